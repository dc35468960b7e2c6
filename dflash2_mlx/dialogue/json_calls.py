"""The reader of calls that are JSON: a name, and arguments that stream as they come."""

import json
from typing import Any

import regex

from dflash2_mlx.dialogue.calls import NAME, RAW, Calls, Parser, as_object, dumps, recover
from dflash2_mlx.dialogue.loose_json import Broken, Chars, LooseJson, Run

_JSON = regex.compile(r"\s*(\[\s*)?\{")
_JUNK = " \t\r\n}],;"  # brackets too many are not worth showing
_ARGUMENTS = frozenset({"arguments", "parameters"})


class JsonReader:
    """`{"name": ..., "arguments": {...}}`, one or several, or a list of them."""

    def __init__(self, calls: Calls, parser: Parser, *, once: bool = False) -> None:
        self._calls, self._parser, self._once = calls, parser, once
        self._outer = self._now = LooseJson(lambda _: None)
        self._chars: list[str] = []
        self._num_settled = 0  # characters up to the end of the last call
        self._forget_call()
        self._run = Run(self._read())
        self.rest = ""

    @property
    def inside(self) -> bool:
        """Whether a tag here would be part of a string."""
        return self._now.in_string and not self.failed

    @property
    def ended(self) -> bool:
        """Whether a lone call is over."""
        return self._run.ended

    @property
    def failed(self) -> bool:
        """Whether the text stopped being JSON."""
        return self._run.broken

    def feed(self, text: str) -> None:
        """Read on; what follows a fault or the end of a lone call is left in `rest`."""
        for place, char in enumerate(text):
            if not self._run.feed(char):
                self.rest += text[place:]
                return
            self._chars.append(char)

    def close(self) -> None:
        """Complete the call at hand; text that was no call becomes plain text."""
        if self._calls.open:
            self._complete()
            return
        left = "".join(self._chars[self._num_settled :]) + self.rest
        if left.strip(_JUNK):
            recover(left, self._calls, self._parser)

    def _forget_call(self) -> None:
        self._started = False
        self._id: str | None = None
        self._arguments: LooseJson | None = None
        self._kept: str | None = None
        self._from: int | None = None

    def _read(self) -> Chars:
        while True:
            char = yield from self._outer.spaced()
            if char == "[":
                yield from self._outer.items("[", "]", self._call)
            else:
                yield from self._call(char)
            if self._once:
                return ""

    def _call(self, char: str) -> Chars:
        if char != "{":
            raise Broken
        yield from self._outer.items("{", "}", self._field)
        if not self._started:
            raise Broken
        if self._arguments is None:
            self._calls.write(self._kept or "{}")
        self._calls.end()
        self._num_settled = len(self._chars) + 1
        self._forget_call()
        return ""

    def _field(self, char: str) -> Chars:
        if char not in "\"'":
            raise Broken
        key, _ = yield from self._captured(char)
        char = yield from self._outer.colon()
        if key == "function" and char == "{":
            return (yield from self._outer.items("{", "}", self._field))
        if key in _ARGUMENTS and self._from is None:
            return (yield from self._read_arguments(char))
        value, rest = yield from self._captured(char)
        if key in ("name", "function") and not self._started:
            self._start(value)
        elif key == "id" and isinstance(value, str):
            self._id = value
        return rest

    def _start(self, name: Any) -> None:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise Broken
        self._calls.start(name, self._id)
        self._started = True

    def _read_arguments(self, char: str) -> Chars:
        self._from = len(self._chars)
        if char != "{" or not self._started:
            value, rest = yield from self._captured(char)
            self._kept = as_object(value)
            return rest
        self._arguments = self._now = LooseJson(self._calls.write)
        rest = yield from self._arguments.value(char)
        self._now = self._outer
        return rest

    def _captured(self, char: str) -> Any:
        """Read a value; returns it with the character read too far."""
        pieces: list[str] = []
        self._now = LooseJson(pieces.append)
        rest = yield from self._now.value(char)
        self._now = self._outer
        return json.loads("".join(pieces)), rest

    def _complete(self) -> None:
        raw = "".join(self._chars[self._from :]) + self.rest if self._from is not None else ""
        if self._arguments is None:
            self._calls.write(self._kept or (dumps({RAW: raw}) if raw.strip() else "{}"))
        else:
            sound = self._arguments.lacks_brackets_only and not self.failed
            self._calls.write(self._arguments.ending(**({} if sound else {RAW: raw})))
        self._calls.end()


def begins_json(text: str) -> bool | None:
    """Whether text between tags is JSON, whatever the style; None when too little has come."""
    found = _JSON.match(text, partial=True)
    return None if found and found.partial else found is not None
