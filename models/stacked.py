"""Several linear layers that read the same rows, as one product."""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn

Project = Callable[[mx.array], mx.array]


def stacked(linears: Sequence[nn.Module]) -> Project:
    """The outputs of several linear layers side by side: `[.., D]` -> `[.., O]`.

    Their weights become views of one array. Layers that differ in precision stay as they are.
    """
    first, weights = linears[0], [dict(linear) for linear in linears]
    if len({_precision(linear) for linear in linears}) > 1:
        return lambda rows: mx.concatenate([linear(rows) for linear in linears], axis=-1)
    whole, start = copy(first), 0
    whole.update({name: mx.concatenate([w[name] for w in weights]) for name in weights[0]})
    mx.eval(whole.parameters())
    for linear in linears:
        end = start + len(linear.weight)
        linear.update({name: whole[name][start:end] for name in weights[0]})
        mx.eval(linear.parameters())
        start = end
    # Behind a lambda: a module set as an attribute would count its parameters again.
    return lambda rows: whole(rows)


def _precision(linear: nn.Module) -> tuple[Any, ...]:
    options = ("bits", "group_size", "mode")
    return type(linear), linear.weight.dtype, *(getattr(linear, name, None) for name in options)
