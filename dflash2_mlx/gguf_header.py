"""The header of a GGUF file: its metadata, and how each tensor is stored.

MLX reads the tensors, but it also turns formats it has no kernels for into float16 without a word,
and it does not say which format a tensor had. So the header is read here first.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from dflash2_mlx.errors import BadCheckpoint

# A tensor's type id is a place in this list.
# fmt: off
KINDS = (
    "F32", "F16", "Q4_0", "Q4_1", "Q4_2", "Q4_3", "Q5_0", "Q5_1", "Q8_0", "Q8_1",
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S",
    "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8", "I16", "I32", "I64", "F64", "IQ1_M", "BF16",
)
# fmt: on
# kind -> (values per block, bytes per block); these need no requantizing
READABLE = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q8_0": (32, 34),
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
}
_SCALARS = dict(enumerate(("B", "b", "H", "h", "I", "i", "f", "?"))) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class Tensor:
    """One entry of the tensor table; `shape` is in MLX order, slowest axis first."""

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int  # bytes from the start of the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a GGUF file says about itself, in plain Python values."""

    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


def read_header(path: Path) -> Header:
    """Reads metadata and tensor table of a GGUF file, version 2 or 3.

    Raises:
        BadCheckpoint: not a GGUF file, cut short, or a tensor format that MLX cannot hold as it is.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data, path.name).header()
    except (struct.error, OSError, ValueError, KeyError, MemoryError) as error:
        raise BadCheckpoint(
            f"{path.name}: the GGUF header cannot be read ({error}); fetch the file again"
        ) from None


class _Reader:
    """A cursor over the mapped file."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self.data = data
        self.name = name
        self.at = 0

    def header(self) -> Header:
        if self.data[:4] != b"GGUF":
            raise BadCheckpoint(f"{self.name}: not a GGUF file (it does not begin with GGUF)")
        self.at = 4
        version = self.scalar("I")
        if version not in (2, 3):
            raise BadCheckpoint(f"{self.name}: GGUF version {version}, expected 2 or 3")
        num_tensors, num_entries = self.scalar("Q"), self.scalar("Q")
        metadata = {self.string(): self.value(self.scalar("I")) for _ in range(num_entries)}
        rows = [self.row() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        start = -(-self.at // alignment) * alignment
        return Header(metadata, {row[0]: self.tensor(*row, start) for row in rows})

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        self.at += length
        raw = self.data[self.at - length : self.at]
        if len(raw) != length:
            raise ValueError("a string runs past the end of the file")
        return raw.decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in (_STRING, _ARRAY):
            return [self.value(kind) for _ in range(count)]
        layout = f"<{count}{_SCALARS[kind]}"
        self.at += struct.calcsize(layout)
        return list(struct.unpack_from(layout, self.data, self.at - struct.calcsize(layout)))

    def row(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_axes = self.string(), self.scalar("I")
        shape = tuple(self.scalar("Q") for _ in range(num_axes))
        return name, shape[::-1], self.scalar("I"), self.scalar("Q")

    def tensor(
        self, name: str, shape: tuple[int, ...], type_id: int, offset: int, start: int
    ) -> Tensor:
        kind = KINDS[type_id] if type_id < len(KINDS) else f"type {type_id}"
        if kind not in READABLE:
            raise BadCheckpoint(
                f"{self.name}: tensor {name} is stored as {kind}; "
                f"only {', '.join(READABLE)} are read, use such a file"
            )
        block, size = READABLE[kind]
        if not shape or shape[-1] % block:
            raise ValueError(f"tensor {name} of shape {shape} does not divide into {kind} blocks")
        tensor = Tensor(name, shape, kind, start + offset, prod(shape) // block * size)
        if tensor.offset + tensor.num_bytes > len(self.data):
            raise BadCheckpoint(
                f"{self.name}: tensor {name} runs past the end of the file; "
                "the download was cut short, fetch it again"
            )
        return tensor
