"""What readers of tool calls write to, and the last resort for calls that nobody could read."""

import json
import re
import secrets
import string
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash2_mlx.dialogue.events import Event, Text, Tool, ToolArguments, ToolStart
from dflash2_mlx.dialogue.loose_json import LooseJson, Run
from dflash2_mlx.dialogue.schemas import for_parsers

NAME = re.compile(r"[\w.:/-]{1,128}")
RAW = "raw"  # the argument that holds what was no JSON
_MISTRAL_ID = string.ascii_letters + string.digits


def new_id(style: str | None) -> str:
    """A fresh id of a call; Mistral's templates refuse all but nine letters and digits."""
    if style == "mistral":
        return "".join(secrets.choice(_MISTRAL_ID) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


class Calls:
    """Events in order: what readers find, as pieces, goes out as few events as possible."""

    def __init__(
        self,
        make_id: Callable[[], str],
        without_tags: Callable[[str], str] = str,
        limit: int | None = None,
    ) -> None:
        self._make_id, self._without_tags, self._limit = make_id, without_tags, limit
        self._ids: set[str] = set()
        self._events: list[Event] = []
        self._pieces: list[str] = []
        self.num_started = self.num_ended = 0

    @property
    def open(self) -> bool:
        """Whether a call has begun and not ended."""
        return self.num_started > self.num_ended

    @property
    def full(self) -> bool:
        """Whether as many calls as allowed are whole: what follows is dropped."""
        return self._limit is not None and self.num_ended >= self._limit

    def start(self, name: str, id_: str | None = None) -> None:
        """Begin a call; `id_` is the model's own, kept unless it was used before."""
        if not id_ or id_ in self._ids:
            id_ = self._make_id()
        self._ids.add(id_)
        self.say(ToolStart(self.num_started, id_, name))
        self.num_started += 1

    def write(self, piece: str) -> None:
        """Go on with the arguments of the open call."""
        self._pieces.append(piece)

    def end(self) -> None:
        """The open call is whole."""
        self._flush()
        self.num_ended = self.num_started

    def whole(self, name: str, arguments: str, id_: str | None = None) -> None:
        """A call at once; `arguments` is JSON text."""
        self.start(name, id_)
        self.write(arguments)
        self.end()

    def plain(self, text: str) -> None:
        """Text that looked like a call and was none."""
        if (text := self._without_tags(text)).strip():
            self.say(Text(text))

    def say(self, event: Event) -> None:
        """Another event, behind what was written so far."""
        self._flush()
        if not self.full:
            self._events.append(event)

    def take(self) -> list[Event]:
        """The events since the last time."""
        self._flush()
        events, self._events = self._events, []
        return events

    def _flush(self) -> None:
        if (json_text := "".join(self._pieces)) and not self.full:
            self._events.append(ToolArguments(self.num_started - 1, json_text))
        self._pieces = []


@dataclass(frozen=True, slots=True)
class Found:
    """A call as a parser found it; `arguments` is the JSON text of an object."""

    name: str
    arguments: str
    id: str | None


class Parser:
    """The tokenizer's own parser, with the tools of one request; it may be missing."""

    def __init__(self, tokenizer: Any, tools: Sequence[Tool]) -> None:
        self._parse = getattr(tokenizer, "tool_parser", None)
        self._tools = [for_parsers(tool) for tool in tools]
        self.names = frozenset(tool.name for tool in tools)

    def calls(self, text: str) -> list[Found]:
        """The calls in the text between two tags; none where the parser fails, however it does."""
        if self._parse is None:
            return []
        try:
            with warnings.catch_warnings(action="ignore"):
                parsed = self._parse(text, self._tools)
            return [_found(call) for call in (parsed if isinstance(parsed, list) else [parsed])]
        except Exception:  # parsers raise whatever they meet
            return []


def recover(text: str, calls: Calls, parser: Parser, *, known_only: bool = True) -> None:
    """Text that was not read as it came: calls to the parser, else a name alone, else plain text.

    Some parsers take any sentence for a call: then only the names of tools count.
    """
    found = parser.calls(text)
    if found and (not known_only or all(call.name in parser.names for call in found)):
        for call in found:
            calls.whole(call.name, call.arguments, call.id)
    elif NAME.fullmatch(text.strip()):
        calls.whole(text.strip(), "{}")
    else:
        calls.plain(text)


def as_object(arguments: Any) -> str:
    """Arguments as the JSON text of an object; what is none stands under `raw`.

    Raises what `json.dumps` does.
    """
    if arguments is None or arguments == "":
        return "{}"
    if isinstance(arguments, Mapping):
        return dumps(arguments)
    text = arguments if isinstance(arguments, str) else dumps(arguments)
    return strict_object(text) or dumps({RAW: text})


def dumps(value: Any) -> str:
    """JSON text that strict readers take; sets and the like become strings."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        text = json.dumps(value, default=str)
    # Python alone writes numbers that are none.
    return strict_object(text) or text if "NaN" in text or "Infinity" in text else text


def strict_object(text: str) -> str:
    """The JSON text of an object as strict readers take it; "" when it is none."""
    pieces: list[str] = []
    run, text = Run(LooseJson(pieces.append).whole()), text.strip()
    is_whole = run.feed(text) == len(text) and run.ended
    return "".join(pieces) if is_whole and text.startswith("{") else ""


def _found(call: Mapping[str, Any]) -> Found:
    name, id_ = call["name"], call.get("id")
    if not NAME.fullmatch(name):
        raise ValueError(name)
    arguments = call.get("arguments", call.get("parameters"))
    return Found(name, as_object(arguments), id_ if isinstance(id_, str) else None)
