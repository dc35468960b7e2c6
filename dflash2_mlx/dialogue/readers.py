"""Readers of tool calls: text between two tags in, calls out, each piece as soon as it is certain.

What a model writes wrong never raises. Arguments that stop being JSON stand, from where they began,
under `raw`; what is no call at all becomes plain text.
"""

from typing import Any, Protocol

from dflash2_mlx.dialogue.calls import RAW, Calls, Parser, dumps, recover
from dflash2_mlx.dialogue.loose_json import Broken, Chars, LooseJson, Run
from dflash2_mlx.dialogue.styles import Header, Markup


class Reader(Protocol):
    """What reads the text of one call, or of several.

    `inside` tells that a tag here would be part of an argument. A reader made for one call without
    an outer tag has `ended` behind it or `failed` before it; what it did not read is the `rest`.
    """

    rest: str

    @property
    def inside(self) -> bool: ...

    @property
    def ended(self) -> bool: ...

    @property
    def failed(self) -> bool: ...

    def feed(self, text: str) -> None:
        """Read on."""

    def close(self) -> None:
        """The text is over: make the best of what is missing."""


class HeaderReader:
    """A header with the name, then the arguments as JSON; one call or several."""

    def __init__(self, calls: Calls, style: Header, *, once: bool = False) -> None:
        self._calls, self._style, self._once = calls, style, once
        self._arguments: LooseJson | None = None
        self._run: Run | None = None
        self._raw = ""  # what was read of the arguments at hand
        self.rest = ""
        self.ended = self.failed = False

    @property
    def inside(self) -> bool:
        """Whether a tag here would be part of a string."""
        return self._arguments is not None and self._arguments.in_string

    def feed(self, text: str) -> None:
        """Read on; behind a lone call the text is left in `rest`."""
        self.rest += text
        while not self.ended and (self._read_arguments() if self._run else self._read_header()):
            pass

    def close(self) -> None:
        """Complete the call at hand; without any call the text is plain."""
        if self._calls.open:
            self._complete(self.rest)
        else:
            self._calls.plain(self._style.without_tags(self.rest))

    def _read_header(self) -> bool:
        if (found := self._style.pattern.search(self.rest)) is None:
            return False
        before = self.rest[: found.start()]
        if self._calls.open:
            self._complete(before)
        else:
            self._calls.plain(self._style.without_tags(before))
        groups = found.groupdict()
        self._calls.start(groups["name"], groups["id"])
        self._arguments, self._raw = LooseJson(self._calls.write), ""
        self._run = Run(self._object(self._arguments))
        self.rest = self.rest[found.end() :]
        return True

    def _read_arguments(self) -> bool:
        assert self._run is not None
        num_read = self._run.feed(self.rest)
        self._raw, self.rest = self._raw + self.rest[:num_read], self.rest[num_read:]
        if self._run.ended:
            self._calls.end()
            self.ended = self._once
        done = self._run.ended or self._run.broken
        if done:
            self._run = None
        return done

    def _object(self, arguments: LooseJson) -> Chars:
        char = yield from arguments.spaced()
        if char != "{":
            raise Broken
        return (yield from arguments.value(char))

    def _complete(self, rest: str) -> None:
        assert self._arguments is not None
        raw = self._style.without_tags(self._raw + rest)
        sound = self._run is not None and self._arguments.lacks_brackets_only
        if not self._raw.strip():
            self._calls.write(dumps({RAW: raw}) if raw.strip() else "{}")
        else:
            self._calls.write(self._arguments.ending(**({} if sound else {RAW: raw})))
        self._calls.end()
        self._run = self._arguments = None


class MarkupReader:
    """Arguments between tags of their own, each turned into JSON by the tokenizer's parser."""

    def __init__(self, calls: Calls, parser: Parser, style: Markup, *, once: bool = False) -> None:
        self._calls, self._parser, self._style, self._once = calls, parser, style, once
        self._head: str | None = None  # what opened the call at hand
        self._num_calls = self._num_arguments = 0
        self._num_seen = 0  # characters of `rest` without the end of an argument
        self.rest = ""
        self.ended = self.failed = False

    @property
    def inside(self) -> bool:
        """Whether a tag here would be part of an argument."""
        return self._head is not None and self._style.opens in self.rest

    def feed(self, text: str) -> None:
        """Read on; behind a lone call the text is left in `rest`."""
        self.rest += text
        while not (self.ended or self.failed):
            if not (self._read_head() if self._head is None else self._read_part()):
                return

    def close(self) -> None:
        """Complete the call at hand; without any call the text is plain."""
        if self._head is not None:
            if self.inside:
                self._write(dumps({RAW: self.rest[self.rest.find(self._style.opens) :]}))
            self._end()
        elif not self._num_calls:
            recover(self.rest, self._calls, self._parser)
        else:
            self._calls.plain(self.rest)

    def _read_head(self) -> bool:
        found = self._style.head.search(self.rest)
        if found is None:
            return False
        self._head = found.group()
        as_parsed = self._parser.calls(self._head + self._style.close)
        name = as_parsed[0].name if as_parsed else found["name"].strip("\"'")
        if self._once and name not in self._parser.names:
            self.failed = True
            return False
        self._calls.start(name)
        self._num_calls += 1
        self._num_arguments, self.rest = 0, self.rest[found.end() :]
        return True

    def _read_part(self) -> bool:
        start = max(0, self._num_seen - len(self._style.ends))
        if self._num_seen and self.rest.find(self._style.ends, start) < 0:
            self._num_seen = len(self.rest)
            return False
        part = self._style.part.search(self.rest)
        if part is None or part["unfinished"]:
            self._num_seen = len(self.rest) if part else 0
            return False
        self.rest, self._num_seen = self.rest[part.end() :], 0
        if part.groupdict().get("end"):
            self._end()
        else:
            self._write(self._as_json(part))
        return True

    def _as_json(self, part: Any) -> str:
        alone = self._parser.calls(f"{self._head}{part.group()}{self._style.close}")
        if len(alone) == 1:
            return alone[0].arguments
        value = part["value"].removeprefix("\n").removesuffix("\n")
        return dumps({(part["key"] or RAW).strip("\"' \n"): value})

    def _write(self, arguments: str) -> None:
        """Add the members of an object."""
        if members := arguments[1:-1]:
            self._calls.write((", " if self._num_arguments else "{") + members)
            self._num_arguments += 1

    def _end(self) -> None:
        self._calls.write("}" if self._num_arguments else "{}")
        self._calls.end()
        self._head, self.ended = None, self._once


class WholeReader:
    """Leaves everything to the tokenizer's parser, at the end."""

    inside = ended = failed = False

    def __init__(self, calls: Calls, parser: Parser) -> None:
        self._calls, self._parser = calls, parser
        self.rest = ""

    def feed(self, text: str) -> None:
        """Keep the text."""
        self.rest += text

    def close(self) -> None:
        """Parse; what is no call becomes plain text."""
        recover(self.rest, self._calls, self._parser, known_only=False)
