"""Reads an answer's text as the server does, and folds the events to what a client sees."""

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from call_writers import THINK, WRITERS, Call, tokenizer_of, tool

from dflash2_mlx.dialogue.events import Event, Reasoning, Text, Tool, ToolArguments, ToolStart
from dflash2_mlx.dialogue.schemas import for_parsers
from dflash2_mlx.dialogue.segments import Segmenter

TOOLS = (tool("find", what="string", number="integer", where="object"), tool("now"))
FUNCTIONS = [for_parsers(tool) for tool in TOOLS]
STYLES = sorted(WRITERS)
CALLS: list[Call] = [("find", {"what": "a b", "number": 3}), ("now", {})]


def read(
    text: str,
    style: str | None = "json_tools",
    tools: Sequence[Tool] = TOOLS,
    *,
    pieces: Iterable[str] | None = None,
    cut: bool = False,
    **options: Any,
) -> list[Event]:
    think = options.pop("think", THINK)
    reader = Segmenter(tokenizer_of(style, think), tools, **options)
    events = [e for piece in ([text] if pieces is None else pieces) for e in reader.feed(piece)]
    return events + reader.finish(cut)


def split(text: str, places: Iterable[int]) -> list[str]:
    cuts = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(cuts)]


def fold(events: Iterable[Event]) -> list[tuple[str, str]]:
    """What a client sees in the end, in order: neighbours joined, ids and token counts left out."""
    seen: list[tuple[str, str]] = []
    for event in events:
        match event:
            case Reasoning(text) | Text(text):
                kind, said = type(event).__name__, text
            case ToolStart(index, _, name):
                kind, said = f"call {index}", name
            case ToolArguments(index, piece):
                kind, said = f"arguments {index}", piece
            case _:
                raise AssertionError(event)
        if seen and seen[-1][0] == kind:
            seen[-1] = (kind, seen[-1][1] + said)
        else:
            seen.append((kind, said))
    return seen


def calls_of(events: Iterable[Event]) -> list[Call]:
    folded = fold(events)
    names = [said for kind, said in folded if kind.startswith("call")]
    arguments = [json.loads(said) for kind, said in folded if kind.startswith("arguments")]
    return list(zip(names, arguments, strict=True))


def text_of(events: Iterable[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


def thought_of(events: Iterable[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Reasoning))
