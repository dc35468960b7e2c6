"""Where a tool call begins and ends in the text, and who reads it."""

from collections.abc import Callable, Iterable
from typing import Any

import regex

from dflash2_mlx.dialogue.calls import Calls, Parser
from dflash2_mlx.dialogue.json_calls import JsonReader, begins_json
from dflash2_mlx.dialogue.readers import HeaderReader, MarkupReader, Reader, WholeReader
from dflash2_mlx.dialogue.styles import HEADERS, JSON, MARKUPS

Make = Callable[[Calls], Reader]
Say = Callable[[str], None]


class Marks:
    """Finds the first of some strings in text that arrives in pieces."""

    def __init__(self, marks: Iterable[str]) -> None:
        sources = sorted((regex.escape(mark) for mark in marks if mark), key=len)
        self._pattern: Any = regex.compile("|".join(sources)) if sources else None

    def cut(self, text: str) -> tuple[str, str, str]:
        """Returns the text before the mark, the mark, and the rest; without a mark the rest is what
        could still become one."""
        found = self._pattern.search(text, partial=True) if self._pattern else None
        if found is None:
            return text, "", ""
        if found.partial:
            return text[: found.start()], "", text[found.start() :]
        return text[: found.start()], found.group(), text[found.end() :]

    def without(self, text: str) -> str:
        """The text without any of the strings."""
        return self._pattern.sub("", text) if self._pattern else text


class Tagged:
    """Between two tags. A closing tag inside an argument is part of it, if the call is whole
    later; if it never is, the call ended there."""

    def __init__(self, end: str, make: Make, calls: Calls) -> None:
        self._end, self._make = end, make
        self._marks = Marks({end})
        self._reader = make(calls)
        self._read = ""
        self._ahead = ""  # not given to the reader; begins with a doubtful tag, or part of one
        self._num_seen = 0  # characters of `_ahead` without another tag

    def feed(self, text: str) -> str | None:
        """Read on; returns the text behind the call once it has ended."""
        self._ahead += text
        if self._num_seen:
            return self._look_for_another()
        before, tag, rest = self._marks.cut(self._ahead)
        self._give(before)
        if tag and self._reader.inside:
            self._ahead, self._num_seen = tag + rest, len(tag)
            return self._look_for_another()
        self._ahead = rest
        return self._close(rest) if tag else None

    def finish(self, cut: bool) -> str:
        """The answer is over, by a `cut` or by the model; returns what is text again."""
        if self._num_seen:
            return self._close(self._ahead[len(self._end) :])
        if not cut:
            self._give(self._ahead)
            self._reader.close()
        return ""

    def _look_for_another(self) -> str | None:
        while (at := self._ahead.find(self._end, self._num_seen)) >= 0:
            self._num_seen = at + len(self._end)
            if self._is_whole(self._read + self._ahead[:at]):
                self._give(self._ahead[:at])
                return self._close(self._ahead[self._num_seen :])
        # Never 0 again, and a tag may have come in part.
        self._num_seen = max(len(self._end), len(self._ahead) - len(self._end) + 1)
        return None

    def _is_whole(self, text: str) -> bool:
        calls = Calls(str)
        reader = self._make(calls)
        reader.feed(text)
        return bool(calls.num_started) and not (calls.open or reader.inside or reader.failed)

    def _give(self, text: str) -> None:
        self._read += text
        self._reader.feed(text)

    def _close(self, rest: str) -> str:
        self._reader.close()
        return rest


class Bare:
    """A call without its outer tag; what proves to be none goes to `say` and is read again."""

    def __init__(self, opening: str, reader: Reader, calls: Calls, say: Say) -> None:
        self._opening, self._reader, self._calls, self._say = opening, reader, calls, say
        self._read = ""
        reader.feed(opening)

    def feed(self, text: str) -> str | None:
        """Read on; returns the text behind the call, or what followed the false opening."""
        self._read += text
        self._reader.feed(text)
        if self._reader.ended:
            return self._reader.rest
        return self._give_back() if self._reader.failed and not self._calls.open else None

    def finish(self, cut: bool) -> str:
        """The answer is over, by a `cut` or by the model; returns what is text again."""
        if cut:
            return ""
        if not self._calls.open:
            return self._give_back()
        self._reader.close()
        return ""

    def _give_back(self) -> str:
        self._say(self._opening)
        return self._read


class _Either:
    """Reads JSON where the text begins so, whatever the style."""

    ended = failed = False

    def __init__(self, as_json: Reader, as_styled: Reader) -> None:
        self._readers = {True: as_json, False: as_styled}
        self._reader: Reader | None = None
        self.rest = ""

    @property
    def inside(self) -> bool:
        """Whether a tag here would be part of an argument."""
        return self._reader is not None and self._reader.inside

    def feed(self, text: str) -> None:
        """Read on."""
        if self._reader is None:
            self.rest, text = "", self.rest + text
            is_json = begins_json(text)
            if is_json is None:
                self.rest = text
                return
            self._reader = self._readers[is_json]
        self._reader.feed(text)

    def close(self) -> None:
        """The text is over."""
        reader = self._reader or self._readers[False]
        if self._reader is None:
            reader.feed(self.rest)
        reader.close()


def reader_of(style: str | None, calls: Calls, parser: Parser) -> Reader:
    """What reads the text between the tags of a style."""
    as_json = JsonReader(calls, parser)
    if style in JSON:
        return as_json
    return _Either(as_json, _styled(style, calls, parser) or WholeReader(calls, parser))


def bare_reader(style: str | None, calls: Calls, parser: Parser) -> Reader | None:
    """What reads one call without its outer tag, if the style can tell where it ends."""
    return _styled(style, calls, parser, once=True)


def _styled(
    style: str | None, calls: Calls, parser: Parser, once: bool = False
) -> HeaderReader | MarkupReader | None:
    if style in HEADERS:
        return HeaderReader(calls, HEADERS[style], once=once)
    if style in MARKUPS:
        return MarkupReader(calls, parser, MARKUPS[style], once=once)
    return None
