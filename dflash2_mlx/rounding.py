"""How far apart two computations of the same numbers are, and whether rounding explains it."""

import math
from dataclasses import dataclass

import mlx.core as mx

# By how much the rows of two sound computations differ at most, relative to the row. Seen: 3e-6
# in float32 and 0.02 in bfloat16; a row misread differs by 0.5 and more.
LIMITS = {"float32": 1e-3}
LIMIT = 0.1


@dataclass(frozen=True, slots=True)
class Deviation:
    """`largest` difference of two numbers; `relative` is the worst row's, root mean squares over
    those of the row about its mean."""

    largest: float = 0.0
    relative: float = 0.0

    def or_worse(self, other: "Deviation") -> "Deviation":
        """The worse of both, by each measure; not a number is worst."""
        return Deviation(_worse(self.largest, other.largest), _worse(self.relative, other.relative))

    def is_rounding(self, dtype: str) -> bool:
        """Whether computing in `dtype` twice, in different order, can differ by as much."""
        return self.relative <= LIMITS.get(dtype, LIMIT)

    def to_dict(self) -> dict[str, float | None]:
        """For JSON, which has no infinity: what is not finite is None."""
        values = {"largest": self.largest, "relative": self.relative}
        return {name: value if math.isfinite(value) else None for name, value in values.items()}


def deviation(ours: mx.array, theirs: mx.array) -> Deviation:
    """The deviation of rows `[.., N]`; equal infinities do not differ."""
    apart = mx.where(ours == theirs, 0, ours.astype(mx.float32) - theirs.astype(mx.float32))
    values = mx.where(mx.isfinite(theirs), theirs.astype(mx.float32), 0)
    spread = mx.sqrt(values.var(axis=-1))
    relative = mx.sqrt(apart.square().mean(axis=-1)) / mx.maximum(spread, 1e-30)
    return Deviation(float(mx.abs(apart).max()), float(relative.max()))


def dtype_name(dtype: mx.Dtype) -> str:
    """`float32` of `mlx.core.float32`."""
    return str(dtype).rpartition(".")[2]


def _worse(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)
