"""`dflash2-mlx models`: the known pairs, and which of them are on disk."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dflash2_mlx.cli.console import THEME, out, write
from dflash2_mlx.pairing import Pairing, pairings
from dflash2_mlx.sampling import SamplingParams

_PIPED_WIDTH = 200  # wide enough to break no name in a file or a pipe
_ROOMY_WIDTH = 110  # columns


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the known pairs of a model and its drafter."""
    known = pairings()
    if as_json:
        write(json.dumps({"models": [pairing.to_dict() for pairing in known]}) + "\n")
    else:
        wide = Console(theme=THEME, highlight=False, width=_PIPED_WIDTH)
        console = out if out.is_terminal else wide
        console.print(_table(known, roomy=console.width >= _ROOMY_WIDTH))


def _table(known: list[Pairing], *, roomy: bool) -> Table:
    """Two lines for each pair: the target by its name, then the drafter.

    With room, also the sampling that the maker recommends; it is in force only when asked for.
    """
    table = Table(box=None, pad_edge=False, header_style="accent")
    table.add_column("name", no_wrap=True)
    table.add_column("bits", justify="right")
    for title in ("cached", "model and drafter", "licence"):
        table.add_column(title, overflow="fold")
    if roomy:
        table.add_column("recommended sampling")
    for pairing in known:
        entry = pairing.entry
        untried = "" if entry.verified else ", untried"
        state = untried if pairing.drafting else ", cannot draft"
        drafter = "built in" if entry.drafter_is_embedded else entry.drafter
        recommended = SamplingParams(**entry.sampling).describe() if roomy else ""
        table.add_row(
            entry.name,
            str(entry.target_bits),
            _yes(pairing.target_cached),
            str(entry.gguf or entry.target),
            entry.licence,
            *filter(None, [recommended]),
        )
        cached = _yes(pairing.drafter_cached)
        row = (f"  {entry.kind}{state}", "", cached, drafter, entry.drafter_licence)
        table.add_row(*row, style="muted")
    return table


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"
