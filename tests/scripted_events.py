"""Answers that tell a list of events, for tests of how a dialect writes them."""

from collections.abc import Sequence
from typing import Any

from dflash2_mlx.dialogue.events import (
    Ask,
    Done,
    Event,
    Failed,
    Prefilling,
    Reasoning,
    Text,
    ToolArguments,
    ToolStart,
    Usage,
)
from dflash2_mlx.dialogue.prompt import Prepared
from dflash2_mlx.errors import EngineFailed
from dflash2_mlx.server.job import Tell
from dflash2_mlx.server.worker import Answer

TIMINGS = {"draft_n": 7, "prompt_per_second": 90.0, "predicted_per_second": 9.0}
EFFECTIVE = {"drafting": True, "passes": 4, "tokens_per_pass": 2.25}
USAGE = Usage(prompt=20, completion=9, cached=12, reasoning=3, accepted=5, rejected=2)


def done(finish: Any = "stop", **more: Any) -> Done:
    """The end of an answer."""
    more.setdefault("usage", USAGE)
    return Done(finish, timings=TIMINGS, effective=EFFECTIVE, **more)


def saying(*events: Event) -> Answer:
    """A worker's answer that tells these events."""

    def answer(pair: Any, asked: Ask | Prepared, tell: Tell) -> None:
        for event in events:
            if isinstance(event, Failed):
                raise event.error
            tell(event)

    return answer


def call(index: int, name: str, *pieces: str) -> tuple[Event, ...]:
    """A tool call whose arguments come in pieces."""
    arguments = (ToolArguments(index, piece) for piece in pieces)
    return (ToolStart(index, f"call_{index}", name), *arguments)


BROKE = Failed(EngineFailed("the engine broke down"))
ANSWERS: dict[str, Sequence[Event]] = {
    "text": (Prefilling(0, 20), Text("Hel", 1), Text("", 1), Text("lo", 2), done()),
    "nothing": (done(),),
    "thought": (Reasoning("hm, "), Reasoning("yes"), Text("Yes."), done()),
    "calls": (
        Text("Look: "),
        *call(0, "find", '{"what"', ': "a"}'),
        *call(1, "now", "{}"),
        done("tool_calls"),
    ),
    "thought and call": (Reasoning("hm"), *call(0, "now", "{}"), done("tool_calls")),
    "text behind a call": (*call(0, "now", "{}"), Text("so"), done("tool_calls")),
    "two thoughts": (Reasoning("a"), Text("b"), Reasoning("c"), Text("d"), done()),
    "cut text": (Text("Hel"), done("length")),
    "cut thought": (Reasoning("hm"), done("length")),
    "cut call": (Text("Look"), *call(0, "find", '{"what": "a', "b"), done("length")),
    "call, then the end of room": (*call(0, "now", "{}"), done("length")),
    "stop string": (Text("Hel"), done(stop="lo")),
}
