"""What numbers a pair computes with, decided by device and size."""

from typing import Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import dequantize_model

from dflash2_mlx.chip import Chip
from dflash2_mlx.errors import InvalidRequest
from dflash2_mlx.machine import physical_memory
from dflash2_mlx.target import parameters

DtypeChoice = Literal["auto", "stored", "float32", "bfloat16"]
DRAFTER_BITS = (4, 8, 16)
LARGE_DRAFTER = 500_000_000  # parameters
_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}


def check_dtype(choice: str) -> None:
    """Raise `InvalidRequest` unless a target can be asked for in it."""
    names = ("auto", "stored", *_DTYPES)
    if choice not in names:
        raise InvalidRequest(f"dtype is {choice!r}, expected one of {', '.join(names)}")


def set_target_precision(model: nn.Module, choice: str, chip: Chip) -> str | None:
    """Convert a loaded target in place; returns what was done, in words, or None.

    `auto` on a CPU dequantizes to float32 when that takes less than half of the free memory: there
    a float32 product is many times faster than a 4-bit one. Elsewhere weights stay as stored.
    Raises `InvalidRequest` for an unknown choice.
    """
    check_dtype(choice)
    if choice == "stored" or (choice == "auto" and not chip.on_cpu):
        return None
    if choice == "auto":
        size, free = float32_bytes(model), free_memory()
        if size > free / 2:
            return (
                f"target stays as stored: float32 would be faster on this CPU but takes "
                f"{size / 1e9:.1f} GB of {free / 1e9:.1f} GB free"
            )
    dtype = _DTYPES["float32" if choice == "auto" else choice]
    was_quantized = any(hasattr(module, "bits") for _, module in model.named_modules())
    if not was_quantized and all(array.dtype == dtype for array in parameters(model).values()):
        return None
    convert(model, dtype)
    done = "dequantized" if was_quantized else "converted"
    why = ", which is faster on this CPU" if choice == "auto" else ""
    return f"target {done} to {str(dtype).rpartition('.')[2]}{why}"


def check_drafter_bits(wanted: int | None) -> None:
    """Raise `InvalidRequest` for bits that no drafter can have; None is a choice by size."""
    if wanted is not None and wanted not in DRAFTER_BITS:
        raise InvalidRequest(f"drafter bits are {wanted}, expected 4, 8 or 16")


def choose_drafter_bits(wanted: int | None, stored: int, num_params: int, chip: Chip) -> int:
    """Bits to run a drafter's backbone in; `wanted` None decides by size and chip.

    On a GPU a drafter of half a billion parameters or more goes to 4 bits: that costs next to no
    acceptance and a quarter of the bytes. Raises `InvalidRequest` for bits that cannot be had.
    """
    if wanted is None:
        is_large = num_params >= LARGE_DRAFTER
        return 4 if is_large and stored >= 16 and not chip.on_cpu else stored
    check_drafter_bits(wanted)
    if wanted == 16 and stored > 16:
        return stored
    if wanted > stored:
        raise InvalidRequest(
            f"drafter bits are {wanted}, but this drafter is stored in {stored} bits; "
            "leave the option out or name another drafter"
        )
    return wanted


def set_drafter_precision(drafter: nn.Module, chip: Chip, *, keep_bits: bool) -> None:
    """Activations in the chip's dtype; on a CPU weights are dequantized, unless bits were asked."""
    if chip.on_cpu and not keep_bits:
        convert(drafter, chip.activations)
    else:
        drafter.set_dtype(chip.activations)


def convert(model: nn.Module, dtype: mx.Dtype) -> None:
    """Dequantize and cast in place."""
    model.set_dtype(dtype)  # scales first, so that weights are not rounded to theirs
    dequantize_model(model)
    mx.eval(model.parameters())


def float32_bytes(model: nn.Module) -> int:
    """Bytes of the parameters when dequantized to float32."""
    total = 0
    for name, array in parameters(model).items():
        if array.dtype == mx.uint32 and name.endswith(".weight"):
            total += 4 * array.size * 8  # 4-bit weights, eight to a word; others take less
        elif not name.endswith((".scales", ".biases")):
            total += 4 * array.size
    return total


def free_memory() -> int:
    """Bytes of physical memory that are free or quickly freed."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return physical_memory()
