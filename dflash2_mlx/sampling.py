"""A request's sampling fields."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from dflash2_mlx.errors import InvalidRequest, UnsupportedField


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen from the target's distribution; greedy by default.

    Raises `InvalidRequest` for a value that no distribution has, naming the field.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _in_range("temperature", self.temperature, 0.0, math.inf)
        _in_range("top_p", self.top_p, 0.0, 1.0)
        _in_range("top_k", self.top_k, 0, math.inf)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        _in_range("presence_penalty", self.presence_penalty, -math.inf, math.inf)
        _in_range("frequency_penalty", self.frequency_penalty, -math.inf, math.inf)
        for token, bias in self.logit_bias.items():
            _in_range(f"logit_bias of token {token}", bias, -math.inf, math.inf)
        if isinstance(self.stop, str):
            raise InvalidRequest("stop is a string, expected a tuple of strings")
        if "" in self.stop:
            raise InvalidRequest(
                "stop holds an empty string, which would stop at once; leave it out"
            )

    def check_supported(self) -> None:
        """Raise `UnsupportedField` naming each field that is set but not built yet."""
        built = {"seed", "stop"}
        default = SamplingParams()
        asked = [
            f"{f.name} {getattr(self, f.name)}"
            for f in fields(self)
            if f.name not in built and getattr(self, f.name) != getattr(default, f.name)
        ]
        if asked:
            raise UnsupportedField(
                f"{', '.join(asked)}: only greedy decoding is available; leave the field out"
            )


def _in_range(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    inside = is_number and (low < value if open_low else low <= value) and value <= high
    if not inside or not math.isfinite(value):
        bounds = f"above {low:g}" if open_low else f"from {low:g} to {high:g}"
        bounds = "a finite number" if low == -math.inf else f"a number {bounds}"
        raise InvalidRequest(f"{name} is {value!r}, expected {bounds.replace(' to inf', ' up')}")
