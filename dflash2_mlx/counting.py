"""What a graph costs, counted without running it: primitives, floating point operations, bytes."""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import mlx.core as mx

# These rename or rearrange; the operation behind them reads what they show.
VIEWS = frozenset(
    {"Broadcast", "BroadcastAxes", "Reshape", "Flatten", "Unflatten", "ExpandDims", "Squeeze"}
    | {"Transpose", "View", "AsStrided", "Slice", "Split", "StopGradient", "Depends"}
    | {"NumberOfElements"}
)
LOOKUPS = frozenset(["Gather", "GatherAxis", "DynamicSlice"])
UPDATES = frozenset(["SliceUpdate", "DynamicSliceUpdate", "Scatter", "ScatterAxis"])
PRODUCTS = frozenset(["Matmul", "AddMM", "QuantizedMatmul", "GatherMM", "GatherQMM"])
BY_EXPERT = frozenset(["GatherMM", "GatherQMM"])

Array = tuple[str, Sequence[int], mx.Dtype]  # as MLX exports it: a name, a shape, a dtype


@dataclass(frozen=True, slots=True)
class Counts:
    """Primitives that do work, floating point operations of matrix products and convolutions, and
    bytes read and written, as if every primitive ran by itself: what MLX fuses moves fewer.
    """

    primitives: int = 0
    flops: int = 0
    nbytes: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.primitives + other.primitives,
            self.flops + other.flops,
            self.nbytes + other.nbytes,
        )

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(
            self.primitives - other.primitives,
            self.flops - other.flops,
            self.nbytes - other.nbytes,
        )


def count(fun: Callable[..., Any], *arrays: mx.array) -> Counts:
    """Count what `fun(*arrays)`, an array or a tuple or list of arrays, makes the device do.

    Nothing is evaluated. State that `fun` changes holds placeholders afterwards and is of no more
    use. A view moves no bytes, a lookup only the rows it takes, an update in place only its rows;
    of experts only as many are read as are asked for.
    """
    counter = _Counter()
    # MLX cannot export this one, a copy; a negative moves the same bytes.
    with mock.patch.object(mx, "contiguous", lambda x, *_, **__: -x):
        mx.export_function(counter, fun, *arrays)
    return counter.total


def num_nodes(*arrays: mx.array) -> int:
    """Nodes of the graph behind arrays that are not evaluated; a compiled function's kernel is one.

    All that `mx.export_to_dot` draws as an operation, views too.
    """
    text = io.StringIO()
    mx.export_to_dot(text, *arrays)
    return text.getvalue().count("shape=rectangle")


class _Counter:
    """Listens to `mx.export_function`."""

    def __init__(self) -> None:
        self.total = Counts()
        self._stored: dict[str, int] = {}  # bytes behind an array, which a view does not add to

    def __call__(self, told: dict[str, Any]) -> None:
        if told["type"] == "constants":
            self._stored |= {name: array.nbytes for name, array in told["constants"]}
        elif told["type"] == "inputs":
            self._stored |= {array[0]: _nbytes(array) for array in told["inputs"]}
        elif told["type"] == "primitive":
            self._primitive(told["name"], told["inputs"], told["outputs"])

    def _primitive(self, name: str, inputs: list[Array], outputs: list[Array]) -> None:
        if name in VIEWS:
            source = sum(self._stored[array[0]] for array in inputs)
            self._stored |= {array[0]: min(source, _nbytes(array)) for array in outputs}
            return
        self._stored |= {array[0]: _nbytes(array) for array in outputs}
        self.total += Counts(1, _flops(name, inputs, outputs), self._moved(name, inputs, outputs))

    def _moved(self, name: str, inputs: list[Array], outputs: list[Array]) -> int:
        stored = [self._stored[array] for array in dict.fromkeys(array[0] for array in inputs)]
        written = sum(map(_nbytes, outputs))
        if name in LOOKUPS:
            return 2 * written + sum(stored[1:])
        if name in UPDATES:
            return 2 * sum(stored[1:])
        if name in BY_EXPERT:
            return written + _read_of_experts(inputs)
        return written + sum(stored)


def _read_of_experts(inputs: list[Array]) -> int:
    """Rows and indices as a whole, of the experts' weights at most one for each index."""
    rows, *weights, left, right = inputs
    asked = math.prod(right[1])
    read = sum(_nbytes(array) * min(asked, array[1][0]) // array[1][0] for array in weights)
    return read + sum(map(_nbytes, (rows, left, right)))


def _flops(name: str, inputs: list[Array], outputs: list[Array]) -> int:
    size = math.prod(outputs[0][1])
    if name in PRODUCTS:
        return 2 * size * inputs[0][1][-1]
    if name == "Convolution":
        return 2 * size * math.prod(inputs[1][1][1:])
    return 0


def _nbytes(array: Array) -> int:
    _, shape, dtype = array
    return math.prod(shape) * dtype.size
