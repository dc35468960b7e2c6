"""What `generate` and `chat` show of an answer."""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from dflash2_mlx.cli.console import write
from dflash2_mlx.words import counted

if TYPE_CHECKING:
    from dflash2_mlx.generation import Result
    from dflash2_mlx.sampling import SamplingParams


def show(pieces: Iterable[str]) -> None:
    """Write the pieces to stdout as they come, and end their line even when they break off."""
    wrote = False
    try:
        for piece in pieces:
            write(piece)
            wrote = wrote or bool(piece)
    finally:
        if wrote:
            write("\n")


def summary(result: "Result", params: "SamplingParams", *, incomplete: bool = False) -> str:
    """One line: how much came, how fast, whether drafting helped, how tokens were chosen.

    `incomplete`: the answer stopped before its grammar did.
    """
    state = result.effective
    num_tokens = counted(result.completion_tokens, "token")
    parts = [
        num_tokens,
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
