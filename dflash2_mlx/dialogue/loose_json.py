"""JSON as models write it, written again as JSON that every client reads, while it arrives.

Taken as they are meant: single quotes, a backslash that escapes nothing, line breaks in strings, a
comma too many, `True`, `None`, and numbers that are none (`null`). All else passes unchanged.
"""

import json
import re
from collections.abc import Callable, Generator

# Takes one character at a time; returns the one that it read too far, or "".
Chars = Generator[None, str, str]

MAX_DEPTH = 64
MAX_WORD = 400  # characters of a number
_SPACES = frozenset(" \t\r\n")
_QUOTES = frozenset("\"'")
_WORD = re.compile(r"[\w.+-]")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_WORDS = {"true": "true", "false": "false", "null": "null"}
_WORDS |= {"True": "true", "False": "false", "None": "null"}
_WORDS |= dict.fromkeys(("NaN", "Infinity", "-Infinity"), "null")


class Broken(Exception):
    """The text is no JSON, not even loosely."""


class Run:
    """A generator of this module under way."""

    def __init__(self, chars: Chars) -> None:
        self._chars = chars
        self.ended = self.broken = False
        next(chars)

    def feed(self, text: str) -> int:
        """Returns how many characters were read: all of them, unless it `ended` or is `broken`."""
        if self.ended or self.broken:
            return 0
        for place, char in enumerate(text):
            try:
                self._chars.send(char)
            except StopIteration as stop:
                self.ended = True
                return place + 1 - len(stop.value)
            except Broken:
                self.broken = True
                return place
        return len(text)


class LooseJson:
    """Reads one value and gives it to `write`, strict, as soon as each character is certain.

    The generators raise `Broken`. Whatever happened, `ending` completes what was written.
    """

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write_out = write
        self._held = ""  # a comma, and the spaces behind it
        self._closers: list[str] = []
        self._lacks = ""  # of the member or string at hand
        self._last = ""  # character written that is no space
        self.in_string = False

    @property
    def lacks_brackets_only(self) -> bool:
        """Whether every member that was begun is there."""
        return not self._lacks

    def ending(self, **more: str) -> str:
        """What makes the written text a whole value, with `more` members if it is an object."""
        ending = self._lacks + "".join(reversed(self._closers))
        if not more or not ending.endswith("}"):
            return ending
        comma = "" if self._last + self._lacks == "{" else ", "
        return f"{ending[:-1]}{comma}{json.dumps(more, ensure_ascii=False)[1:]}"

    def whole(self) -> Chars:
        """Read a value and the spaces before it."""
        return (yield from self.value((yield from self.spaced())))

    def value(self, char: str) -> Chars:
        """Read a value that begins with `char`."""
        if char in _QUOTES:
            return (yield from self.string(char, lacks='"'))
        if char == "{":
            return (yield from self.items("{", "}", self._member))
        if char == "[":
            return (yield from self.items("[", "]", self.value))
        return (yield from self._word(char))

    def items(self, opener: str, closer: str, item: Callable[[str], Chars]) -> Chars:
        """Read what stands between brackets, of which the first was read."""
        if len(self._closers) >= MAX_DEPTH:
            raise Broken
        self._write(opener)
        self._closers.append(closer)
        self._lacks = ""
        char = yield from self.spaced()
        while char != closer:
            char = yield from self.spaced((yield from item(char)))
            if char == ",":
                self._held = ","
                char = yield from self.spaced()
            elif char != closer:
                raise Broken
        self._held = ""
        self._closers.pop()
        self._write(closer)
        return ""

    def spaced(self, char: str = "") -> Chars:
        """The next character that is no space, from `char` on when there is one."""
        char = char or (yield)
        while char in _SPACES:
            if self._held:
                self._held += char
            else:
                self._write(char)
            char = yield
        return char

    def string(self, quote: str, lacks: str) -> Chars:
        """Read a string behind its first quote."""
        self._write('"')
        self._lacks, self.in_string = lacks, True
        char = yield
        while char != quote:
            char = (yield from self._char(char)) or (yield)
        self._write('"')
        self._lacks, self.in_string = "", False
        return ""

    def colon(self) -> Chars:
        """Read up to the first character of a member's value."""
        if (yield from self.spaced()) != ":":
            raise Broken
        self._write(":")
        self._lacks = "null"
        return (yield from self.spaced())

    def _write(self, text: str) -> None:
        text, self._held = self._held + text, ""
        self._last = text.strip()[-1:] or self._last
        self._write_out(text)

    def _member(self, char: str) -> Chars:
        if char not in _QUOTES:
            raise Broken
        yield from self.string(char, lacks='": null')
        self._lacks = ": null"
        return (yield from self.value((yield from self.colon())))

    def _char(self, char: str) -> Chars:
        if char == "\\":
            return (yield from self._escape())
        # A quote of the other kind, or a control character, stands for itself.
        self._write(json.dumps(char)[1:-1] if char == '"' or char < " " else char)
        return ""

    def _escape(self) -> Chars:
        char = yield
        if char == "u":
            return (yield from self._code())
        if char in '"\\/bfnrt':
            self._write("\\" + char)
        elif char == "'":
            self._write(char)
        else:
            self._write("\\\\")
            return char
        return ""

    def _code(self) -> Chars:
        digits = ""
        while len(digits) < 4:
            char = yield
            if char not in "0123456789abcdefABCDEF":
                self._write("\\\\u" + digits)
                return char
            digits += char
        self._write("\\u" + digits)
        return ""

    def _word(self, char: str) -> Chars:
        word = ""
        while _WORD.match(char) and len(word) < MAX_WORD:
            word += char
            char = yield
        if word not in _WORDS and not _NUMBER.fullmatch(word):
            raise Broken
        self._write(_WORDS.get(word, word))
        self._lacks = ""
        return char
