"""Pieces of Lark grammars for llguidance, with the special tokens of one tokenizer."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import regex

_PROSE = frozenset({"description", "title", "$comment", "examples", "default"})
_VALUES = frozenset({"const", "enum"})
# As models are trained to write JSON.
_SPACING = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
ANY_TEXT = r"/(.|\n)*/"


class Lark:
    """Collects rules; each method returns an expression to use in others."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokens = _special_tokens(tokenizer)
        marks = sorted(map(regex.escape, self._tokens), key=len, reverse=True)
        self._split = regex.compile(f"({'|'.join(marks)})") if marks else None
        self._rules: dict[str, str] = {}

    def rule(self, body: str, attributes: str = "") -> str:
        """A rule of its own; the same body twice is the same rule."""
        name = self._rules.setdefault(f"{attributes}: {body}", f"r{len(self._rules)}")
        return name

    def text(self, text: str) -> str:
        """Exactly this text, special tokens included."""
        parts = self._split.split(text) if self._split else [text]
        return " ".join(self._part(part) for part in parts if part)

    def until(self, end: str) -> str:
        """Any text, then `end`."""
        closing = self.text(end)
        if closing.startswith("<["):
            return f"{self.rule(ANY_TEXT)} {closing}"
        first, _, rest = closing.partition(" <[")
        lazy = self.rule(f"{ANY_TEXT} {first}", "[lazy]")
        return f"{lazy} <[{rest}" if rest else lazy

    def without(self, mark: str) -> str:
        """Any text that does not hold `mark`."""
        return self.rule(ANY_TEXT if self.text(mark).startswith("<[") else self._text_without(mark))

    def _text_without(self, mark: str) -> str:
        held = f"{ANY_TEXT} {json.dumps(mark)} {ANY_TEXT}"
        name = f"T{len(self._rules)}"
        return self._rules.setdefault(f": {ANY_TEXT} & ~({held})", name)

    def json(self, schema: Mapping[str, Any]) -> str:
        """JSON that validates."""
        return self.rule(f"%json {json.dumps({**without_prose(schema), 'x-guidance': _SPACING})}")

    def either(self, bodies: Iterable[str]) -> str:
        """One of several."""
        return self.rule(" | ".join(dict.fromkeys(bodies)))

    def source(self, start: str) -> str:
        """The grammar."""
        rules = [f"{name}{body}" for body, name in self._rules.items()]
        return "\n".join([f"start: {start}", *rules, ""])

    def _part(self, part: str) -> str:
        token = self._tokens.get(part)
        return json.dumps(part, ensure_ascii=False) if token is None else f"<[{token}]>"


def without_prose(schema: Any) -> Any:
    """A schema without what is only for readers."""
    if isinstance(schema, list):
        return [without_prose(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: value if key in _VALUES else without_prose(value)
        for key, value in schema.items()
        # A property may be called so, too; then it holds a schema.
        if key not in _PROSE or isinstance(value, Mapping)
    }


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    """Tokens that llguidance takes for special: it does not find them in text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {
        token.content: id_
        for id_, token in added.items()
        if token.special or regex.fullmatch("<.*>", token.content)
    }
