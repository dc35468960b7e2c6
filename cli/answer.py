"""What `generate` and `chat` show of an answer."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from dflash2_mlx.cli.console import out, think, write
from dflash2_mlx.dialogue.events import Event, Reasoning, Text
from dflash2_mlx.words import counted

if TYPE_CHECKING:
    from dflash2_mlx.generation import Result
    from dflash2_mlx.sampling import SamplingParams


def show(events: Iterable[Event]) -> None:
    """Write text to stdout and thoughts to stderr as they come; their lines end when they do.

    Also when they break off. A thought amid the text adds no line to what goes into a file.
    """
    unended: set[Callable[[str], None]] = set()
    try:
        for event in events:
            if not isinstance(event, Text | Reasoning) or not event.text:
                continue
            put, other = (write, think) if isinstance(event, Text) else (think, write)
            if other in unended and (other is think or out.is_terminal):
                unended.remove(other)
                other("\n")
            put(event.text)
            unended.add(put)
    finally:
        for end in unended:
            end("\n")


def summary(
    result: "Result", params: "SamplingParams", *, thought: int = 0, incomplete: bool = False
) -> str:
    """One line: how much came, how fast, whether drafting helped, how tokens were chosen.

    `thought` of its tokens were thinking. `incomplete`: it stopped before its grammar did.
    """
    state = result.effective
    num_tokens = counted(result.completion_tokens, "token")
    parts = [
        num_tokens + f", {thought} of them thought" * (thought > 0),
        f"{result.decode_tokens_per_s:.1f} tok/s",
        f"{result.tokens_per_pass:.2f} tokens per pass",
        f"drafting {'on' if state.drafting else 'off'}: {state.reason}",
    ]
    if result.cached_tokens:
        parts.append(f"{result.cached_tokens} of {result.prompt_tokens} prompt tokens known")
    if result.redecided:
        parts.append(f"{counted(result.redecided, 'near tie')} decided once more")
    if sampling := replace(params, seed=state.seed).describe():
        parts.append(sampling)
    if result.finish_reason == "length":
        is_json = params.grammar is not None and params.grammar.kind == "json_schema"
        what = "JSON" if is_json else "answer"
        parts.append(f"stopped at {num_tokens}" + f", so the {what} is incomplete" * incomplete)
    return " · ".join(parts)
