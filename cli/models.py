"""`dflash2-mlx models`: the known pairs, and which of them are on disk."""

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dflash2_mlx.catalogue import Entry, load_catalogue
from dflash2_mlx.cli.console import THEME, out, write
from dflash2_mlx.fetch import drafter_source, target_source

_PIPED_WIDTH = 200  # wide enough to break no name in a file or a pipe


@dataclass(frozen=True, slots=True)
class Pairing:
    """A pair of the catalogue, and what of it is on disk."""

    entry: Entry
    target_cached: bool
    drafter_cached: bool

    def to_dict(self) -> dict[str, Any]:
        """Every field of the catalogue, and two more."""
        cached = {"target_cached": self.target_cached, "drafter_cached": self.drafter_cached}
        return asdict(self.entry) | cached


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the known pairs of a model and its drafter."""
    pairings = [_pairing(entry) for entry in load_catalogue().values()]
    if as_json:
        write(json.dumps({"models": [pairing.to_dict() for pairing in pairings]}) + "\n")
    else:
        wide = Console(theme=THEME, highlight=False, width=_PIPED_WIDTH)
        (out if out.is_terminal else wide).print(_table(pairings))


def _pairing(entry: Entry) -> Pairing:
    target, drafter = target_source(entry.name), drafter_source(entry.name)
    return Pairing(entry, target.cached() is not None, drafter.cached() is not None)


def _table(pairings: list[Pairing]) -> Table:
    """Two lines for each pair: the target by its name, then the drafter."""
    table = Table(box=None, pad_edge=False, header_style="accent")
    table.add_column("name", no_wrap=True)
    table.add_column("bits", justify="right")
    for title in ("cached", "model and drafter", "licence"):
        table.add_column(title, overflow="fold")
    for pairing in pairings:
        entry = pairing.entry
        drafting = entry.drafting if entry.verified else f"{entry.drafting}, untried"
        drafter = "built in" if entry.drafter_is_embedded else entry.drafter
        table.add_row(
            entry.name,
            str(entry.target_bits),
            _yes(pairing.target_cached),
            str(entry.gguf or entry.target),
            entry.licence,
        )
        cached = _yes(pairing.drafter_cached)
        row = (f"  {drafting}", "", cached, drafter, entry.drafter_licence)
        table.add_row(*row, style="muted")
    return table


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"
