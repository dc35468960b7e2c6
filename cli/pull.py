"""`dflash2-mlx pull`: a pair, put on disk ahead of time."""

import json
from typing import Annotated, Any

import typer

from dflash2_mlx.catalogue import load_catalogue
from dflash2_mlx.cli.console import note, write
from dflash2_mlx.cli.progress import show_progress
from dflash2_mlx.fetch import Source, drafter_source, target_source


def pull(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A catalogue name, a hub id or a GGUF file.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Download or convert a model, and its drafter, for use without a network."""
    sources = {"target": target_source(model)}
    if model in load_catalogue():
        sources["drafter"] = drafter_source(model)
    report: dict[str, Any] = {"model": model}
    for part, source in sources.items():
        report[part] = _fetch(part, source)
    if as_json:
        write(json.dumps(report) + "\n")


def _fetch(part: str, source: Source) -> dict[str, Any]:
    was_there = source.cached() is not None
    with show_progress() as progress:
        folder = source.fetch(progress)
    note(f"{part} {source}: {'already there' if was_there else 'ready'} in {folder}")
    return {"source": str(source), "folder": str(folder), "was_there": was_there}
