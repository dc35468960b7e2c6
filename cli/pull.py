"""`dflash2-mlx pull`: a pair, put on disk ahead of time."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash2_mlx.catalogue import load_catalogue
from dflash2_mlx.cli.console import err, note, write
from dflash2_mlx.fetch import Progress, Source, drafter_source, target_source

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID


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
    with _progress() as progress:
        folder = source.fetch(progress)
    note(f"{part} {source}: {'already there' if was_there else 'ready'} in {folder}")
    return {"source": str(source), "folder": str(folder), "was_there": was_there}


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar for each step on a terminal, one line for each step elsewhere."""
    if not err.is_interactive:
        yield Lines()
        return
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    label = TextColumn("{task.description}", markup=False)
    columns = (label, BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bars(*columns, console=err, transient=True) as bars:
        yield Drawn(bars)


@dataclass(slots=True)
class Lines:
    """Says once what is being done."""

    seen: set[str] = field(default_factory=set)

    def __call__(self, label: str, done: int, total: int | None) -> None:
        if label not in self.seen:
            self.seen.add(label)
            note(label)


@dataclass(slots=True)
class Drawn:
    """Draws a bar for each label; downloads report from several threads."""

    bars: "Bars"
    tasks: dict[str, "TaskID"] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)

    def __call__(self, label: str, done: int, total: int | None) -> None:
        with self.lock:
            if label not in self.tasks:
                self.tasks[label] = self.bars.add_task(label, total=total)
            self.bars.update(self.tasks[label], completed=done, total=total)
