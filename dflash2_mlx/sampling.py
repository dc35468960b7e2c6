"""A request's sampling fields."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from dflash2_mlx.errors import InvalidRequest, UnsupportedField
from dflash2_mlx.grammar import Grammar

MAX_LOGPROBS = 20  # as OpenAI's top_logprobs
FILTERS = ("top_p", "top_k", "min_p")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen from the target's distribution; greedy by default.

    `penalty_context` is how many of the last tokens the three penalties look at (mlx-lm's 20).
    `logprobs` asks for log probabilities: of the emitted token (0), and of that many best ones.
    `grammar` holds the whole answer to a JSON schema, regular expression or Lark grammar.
    `seed` may be any integer; None draws a fresh one, which is reported. Raises `InvalidRequest`
    for a value that no distribution has, naming the field.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_context: int = 20
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        _in_range("temperature", self.temperature, 0.0, math.inf)
        _in_range("top_p", self.top_p, 0.0, 1.0)
        _whole("top_k", self.top_k, 0)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        _in_range("presence_penalty", self.presence_penalty, -math.inf, math.inf)
        _in_range("frequency_penalty", self.frequency_penalty, -math.inf, math.inf)
        _whole("penalty_context", self.penalty_context, 1)
        for token, bias in self.logit_bias.items():
            _whole("logit_bias token", token, 0)
            _in_range(f"logit_bias of token {token}", bias, -math.inf, math.inf)
        if self.seed is not None:
            _whole("seed", self.seed, None)
        if isinstance(self.stop, str):
            raise InvalidRequest("stop is a string, expected a tuple of strings")
        if "" in self.stop:
            raise InvalidRequest("stop holds an empty string; leave it out")
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if not isinstance(self.grammar, Grammar | None):
            kind = type(self.grammar).__name__
            raise InvalidRequest(f"grammar is a {kind}, expected a Grammar, as of Grammar.regex")

    def describe(self) -> str:
        """The fields in force in words, `temperature 0.7, top_p 0.9, seed 123`; "" when greedy."""
        penalties = self._changed(PENALTIES)
        names = [*([] if self.temperature == 0 else self._changed(FILTERS)), *penalties]
        if penalties:
            names += self._changed(["penalty_context"])
        words = [self._worded(name) for name in names]
        if num_biased := len(self.logit_bias):
            words.append(f"logit_bias on {num_biased} token{'s' * (num_biased > 1)}")
        if self.grammar is not None:
            words.append(f"held to a {self.grammar.name}")
        if self.temperature > 0 and self.seed is not None:
            words.append(f"seed {self.seed}")
        if not words and self.temperature == 0:
            return ""
        return ", ".join([self._worded("temperature"), *words])

    @property
    def idle(self) -> frozenset[str]:
        """Fields that were set and change nothing: filters of a choice that is greedy anyway."""
        return frozenset() if self.temperature > 0 else frozenset(self._changed(FILTERS))

    def _changed(self, names: Sequence[str]) -> list[str]:
        plain = {field.name: field.default for field in fields(self)}
        return [name for name in names if getattr(self, name) != plain[name]]

    def _worded(self, name: str) -> str:
        return f"{name} {getattr(self, name):.12g}"

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `InvalidRequest` where a field does not fit a vocabulary of this size."""
        for token in self.logit_bias:
            if token >= vocab_size:
                raise InvalidRequest(f"logit_bias token {token} is outside 0 to {vocab_size - 1}")

    def check_exact(self) -> None:
        """Raise `UnsupportedField` unless a greedy answer is asked for: others break no ties."""
        if self.temperature > 0:
            raise UnsupportedField(
                f"exact decides ties between the likeliest tokens, and temperature is "
                f"{self.temperature:g}; set the temperature to 0 or leave exact out"
            )


def _whole(name: str, value: Any, low: int | None, high: int | None = None) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if is_whole and (low is None or low <= value) and (high is None or value <= high):
        return
    bounds = "" if low is None else f" from {low}" + (" up" if high is None else f" to {high}")
    raise InvalidRequest(f"{name} is {value!r}, expected a whole number{bounds}")


def _in_range(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    inside = is_number and (low < value if open_low else low <= value) and value <= high
    if not inside or not math.isfinite(value):
        bounds = f"above {low:g}" if open_low else f"from {low:g} to {high:g}"
        bounds = "a finite number" if low == -math.inf else f"a number {bounds}"
        raise InvalidRequest(f"{name} is {value!r}, expected {bounds.replace(' to inf', ' up')}")
