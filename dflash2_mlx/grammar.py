"""What an answer may be held to: a JSON schema, a regular expression or a Lark grammar."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dflash2_mlx.errors import InvalidRequest

Kind = Literal["json_schema", "regex", "lark"]
NAMES: dict[Kind, str] = {
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "lark": "Lark grammar",
}
MAX_FAULT = 300  # characters
_DRAWING = re.compile(r"\^*|\d+ \|.*")  # a marker below a line, or a numbered line of source
_TEMPERATURE = re.compile(r"\[[^\]\n]*\btemperature\s*=")


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer has to obey, from its first token to its last.

    Raises `InvalidRequest` for text that is not UTF-8; whether it is a grammar, `check` tells.
    """

    kind: Kind
    source: str

    def __post_init__(self) -> None:
        try:
            self.source.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(f"the {self.name} is not UTF-8; convert it first") from None

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> "Grammar":
        """JSON that validates; raises `InvalidRequest` when the schema is no JSON object."""
        try:
            loaded = json.loads(schema) if isinstance(schema, str) else dict(schema)
            source = json.dumps(loaded, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"the JSON schema is not JSON: {error}") from None
        if not isinstance(loaded, dict):
            found = type(loaded).__name__
            raise InvalidRequest(f"the JSON schema is a {found}, expected an object")
        return cls("json_schema", source)

    @classmethod
    def json_object(cls) -> "Grammar":
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """Text that a regular expression matches as a whole."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, grammar: str) -> "Grammar":
        """Text that a Lark grammar derives from its rule `start`."""
        return cls("lark", grammar)

    @property
    def name(self) -> str:
        """What the grammar is, in words."""
        return NAMES[self.kind]

    def compiled(self) -> str:
        """The grammar as llguidance takes it; JSON comes without spare whitespace."""
        from llguidance import LLMatcher

        if self.kind == "regex":
            self._refuse_lone_backslash()
            return LLMatcher.grammar_from_regex(self.source)
        if self.kind == "lark":
            self._refuse_temperature()
            return LLMatcher.grammar_from_lark(self.source)
        try:
            return LLMatcher.grammar_from_json_schema(
                self.source, overrides={"whitespace_flexible": False}
            )
        except ValueError as error:
            raise self.fault(str(error)) from None

    def check(self) -> None:
        """Raise `InvalidRequest` where no model could obey; needs no tokenizer, takes milliseconds.

        Some faults show only when the grammar meets a tokenizer.
        """
        from llguidance import LLMatcher

        if fault := LLMatcher.validate_grammar(self.compiled()):
            raise self.fault(fault)

    def fault(self, told: str) -> InvalidRequest:
        """What llguidance told, in one line without its drawings and the matcher's state."""
        lines = [line.strip() for line in told.split("<state>")[0].splitlines()]
        line = " ".join(line for line in lines if not _DRAWING.fullmatch(line))
        line = line if len(line) <= MAX_FAULT else f"{line[:MAX_FAULT]}..."
        return InvalidRequest(f"the {self.name} cannot be used: {line}")

    def _refuse_lone_backslash(self) -> None:
        # llguidance would read it as an escaped end, and match nothing at all.
        if (len(self.source) - len(self.source.rstrip("\\"))) % 2:
            raise self.fault("it ends in a lone backslash")

    def _refuse_temperature(self) -> None:
        if _TEMPERATURE.search(self.source):
            raise self.fault("a rule sets a temperature, but a request has one for all its tokens")
