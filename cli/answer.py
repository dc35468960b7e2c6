"""What `generate` and `chat` show of an answer."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dflash2_mlx.cli.console import write

if TYPE_CHECKING:
    from dflash2_mlx.generate import Result


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


def summary(result: "Result") -> str:
    """One line: how much came, how fast, whether drafting helped, and whether it was cut."""
    state = result.effective
    parts = [
        f"{result.completion_tokens} tokens",
        f"{result.decode_tokens_per_s:.1f} tok/s",
        f"{result.tokens_per_pass:.2f} tokens per pass",
        f"drafting {'on' if state.drafting else 'off'}: {state.reason}",
    ]
    if result.finish_reason == "length":
        parts.append(f"stopped at {result.completion_tokens} tokens")
    return " · ".join(parts)
