"""How a download, a conversion or a measurement is shown."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING

from dflash2_mlx.cli.console import err, note
from dflash2_mlx.folders import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID


@contextmanager
def show_progress(*, counted: bool = False) -> Iterator[Progress]:
    """A bar for each step on a terminal, one line for each step elsewhere.

    Steps are measured in bytes, or in plain numbers when `counted`.
    """
    if not err.is_interactive:
        yield Lines()
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bars

    label = TextColumn("{task.description}", markup=False)
    done = MofNCompleteColumn() if counted else DownloadColumn()
    columns = (label, BarColumn(), done, TimeRemainingColumn())
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
