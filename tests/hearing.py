"""Who asks a worker directly, and hears what comes of it."""

from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

from dflash2_mlx.dialogue.events import Done, Event, Failed, Usage

DONE = Done(
    "stop",
    Usage(prompt=7, completion=3, accepted=2, rejected=1),
    {"prompt_ms": 500.0, "predicted_ms": 250.0, "predicted_per_second": 12.0},
    {"tokens_per_pass": 1.5},
)
WAIT_S = 10.0


def pair() -> Any:
    effective = SimpleNamespace(describe=lambda: "tiny")
    return SimpleNamespace(
        name="tiny",
        context_limit=99,
        notes=(),
        tokenizer=None,
        end_tokens=frozenset(),
        effective=lambda: effective,
    )


class Client:
    """Keeps the events of one request."""

    def __init__(self) -> None:
        self.events: SimpleQueue[Event] = SimpleQueue()
        self.heard: list[Event] = []

    def last(self) -> Event:
        """The event that ends the request."""
        while True:
            event = self.next()
            if isinstance(event, Done | Failed):
                return event

    def next(self) -> Event:
        event = self.events.get(timeout=WAIT_S)
        self.heard.append(event)
        return event

    def rest(self) -> list[Event]:
        """What came after that, and was not heard yet."""
        return [self.events.get() for _ in range(self.events.qsize())]
