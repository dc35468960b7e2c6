"""The only ways to the terminal: stdout carries the answer, stderr everything else."""

import os
import sys
import traceback

from rich.console import Console
from rich.theme import Theme

from dflash2_mlx.errors import DFlashError

THEME = Theme({"muted": "dim", "accent": "cyan", "warn": "yellow", "bad": "bold red"})

out = Console(theme=THEME, highlight=False)
err = Console(theme=THEME, highlight=False, stderr=True)

# A model may write escape sequences; on a terminal they would act, so they show as U+FFFD.
_ACTING = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def write(text: str) -> None:
    """Write a piece of the answer to stdout, at once and as it is."""
    sys.stdout.write(text.translate(_ACTING) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def think(text: str) -> None:
    """Write a piece of the model's thinking to stderr, at once; muted on a terminal."""
    if err.is_terminal:
        shown = text.translate(_ACTING)
        err.print(shown, style="muted", end="", markup=False, emoji=False, soft_wrap=True)
    else:
        sys.stderr.write(text)
        sys.stderr.flush()


def note(text: str, style: str = "muted") -> None:
    """Write one line to stderr in a style of the theme; brackets in `text` are only text."""
    line = " ".join(part.strip() for part in text.splitlines())
    err.print(line, style=style, markup=False, emoji=False, soft_wrap=True)


def complain(error: Exception) -> None:
    """Tell the user about an error, in one line, after its trace if DFLASH2_MLX_DEBUG is set."""
    if isinstance(error, DFlashError):
        return note(f"error: {error}", "bad")
    if os.environ.get("DFLASH2_MLX_DEBUG"):
        traceback.print_exception(error)
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    note(f"error: unexpected {what}; run with DFLASH2_MLX_DEBUG=1 for the trace", "bad")
