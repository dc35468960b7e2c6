"""One request on its way: what it asks, where it stands in line, and its one end."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from dflash2_mlx.dialogue.events import Ask, Done, Event, Failed, Queued

if TYPE_CHECKING:
    from dflash2_mlx.dialogue.prompt import Prepared

Deliver = Callable[[Event], None]


class Tell(Protocol):
    """Hears the events of an answer, and raises `Cancelled` when nobody waits for them."""

    def __call__(self, *events: Event) -> None: ...


# Called once the end was sent, with what hears of every chunk read and may raise to stop.
Afterwards = Callable[[Callable[[int, int], None]], object]


class Cancelled(Exception):
    """Nobody waits for this answer any more."""


class Line(Protocol):
    """Where jobs wait and run."""

    def withdraw(self, job: "Job") -> None:
        """Take a job out, if it still waits."""

    def beat(self) -> None:
        """A sign of life."""


class Job:
    """One request, from the queue to its end, of which its receiver hears exactly once."""

    def __init__(self, line: Line, ask: "Ask | Prepared", deliver: Deliver) -> None:
        self.ask = ask
        self.position: int | None = None
        self.done: Done | None = None  # sent when all is counted and the next one may begin
        self._line = line
        self._deliver = deliver
        self._cancelled = threading.Event()
        self._ending = threading.Lock()
        self._ended = False

    def cancel(self) -> None:
        """Give up, from any thread and in any state; events may still arrive for a moment."""
        self._cancelled.set()
        self._line.withdraw(self)

    def tell(self, *events: Event) -> None:
        """Hand events on; called once for every pass, also without any.

        Raises `Cancelled` when nobody waits for them.
        """
        self._line.beat()
        if self._cancelled.is_set():
            raise Cancelled
        for event in events:
            if isinstance(event, Done):
                self.done = event
            else:
                self._send(event)

    def move_to(self, position: int) -> None:
        """Say how many requests are before this one, if that is news."""
        if position != self.position:
            self.position = position
            self._send(Queued(position))

    def end(self, last: Done | Failed) -> None:
        """Hand the last event on; only the first call, from whatever thread, counts."""
        if self._is_first_end():
            self._send(last)

    def stop(self, last: Failed) -> None:
        """End it where it runs; when the receiver hears of it, no further pass is begun."""
        is_first = self._is_first_end()
        self._cancelled.set()
        if is_first:
            self._send(last)

    def _is_first_end(self) -> bool:
        with self._ending:
            is_first, self._ended = not self._ended, True
        return is_first

    def _send(self, event: Event) -> None:
        """Hand one event on; a receiver that is gone is a client that is gone."""
        try:
            self._deliver(event)
        except Exception:  # its event loop was closed
            self._cancelled.set()
