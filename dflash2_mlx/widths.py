"""Whether a product over several rows gives each row the bits it has alone.

MLX chooses its kernel by the number of rows, and kernels differ in the order of their sums. For
which numbers the bits stay depends on the chip (lablup/mlxcel#1182), so it has to be tried out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash2_mlx.rounding import Deviation, deviation, dtype_name
from dflash2_mlx.target import Target

WIDTHS = range(1, 17)

Layer = Callable[[mx.array], mx.array]


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Linear layers that run the same kernels: `num_out` x `num_in` weights, in one format."""

    name: str
    num_out: int
    num_in: int
    format: str

    def __str__(self) -> str:
        return f"{self.name} {self.num_out} x {self.num_in}, {self.format}"


@dataclass(frozen=True, slots=True)
class LayerWidths:
    """The widths at which every row has the bits it has alone, and how far others deviate."""

    kind: LayerKind
    equal: tuple[int, ...]
    deviation: Deviation


def layer_kinds(target: Target) -> dict[LayerKind, Layer]:
    """One of each kind of linear layer that a target has, its head included.

    Experts of a mixture are left out: they get their rows from a router.
    """
    modules = [module for _, module in target.model.named_modules()]
    linear = [module for module in modules if isinstance(module, nn.Linear | nn.QuantizedLinear)]
    kinds: dict[LayerKind, Layer] = {}
    for module in linear:
        kinds.setdefault(_kind(module), module)
    head = target.head
    if owner := getattr(head, "__self__", None):  # a tied embedding's as_linear
        kinds.setdefault(_kind(owner), head)
    return kinds


def try_widths(target: Target, kind: LayerKind, layer: Layer) -> LayerWidths:
    """Read 1 to 16 random rows at once, and each of them alone."""
    key = mx.random.key(0)
    rows = mx.random.normal((WIDTHS[-1], kind.num_in), key=key).astype(target.dtype)
    alone = mx.concatenate([layer(row[None, None])[0] for row in rows])
    equal, worst = [], Deviation()
    for width in WIDTHS:
        together = layer(rows[None, :width])[0]
        if mx.array_equal(together, alone[:width]).item():
            equal.append(width)
        else:
            worst = worst.or_worse(deviation(together, alone[:width]))
    return LayerWidths(kind, tuple(equal), worst)


def _kind(module: Any) -> LayerKind:
    num_out, num_in = module.weight.shape
    if "scales" not in module:
        return LayerKind(type(module).__name__, num_out, num_in, dtype_name(module.weight.dtype))
    mode = getattr(module, "mode", "affine")
    return LayerKind(
        type(module).__name__,
        num_out,
        num_in * 32 // module.bits,
        f"{module.bits}-bit {mode}, groups of {module.group_size}",
    )
