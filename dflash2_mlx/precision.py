"""What numbers a pair computes with, decided by device and size."""

import os
from typing import Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import dequantize_model

from dflash2_mlx.errors import InvalidRequest
from dflash2_mlx.target import parameters

DtypeChoice = Literal["auto", "stored", "float32", "bfloat16"]
_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}


def on_cpu() -> bool:
    """Whether MLX computes on the CPU here."""
    return bool(mx.default_device().type == mx.cpu)


def set_target_precision(model: nn.Module, choice: str) -> str | None:
    """Convert a loaded target in place; returns what was done, in words, or None.

    `auto` on a CPU dequantizes to float32 when that takes less than half of the free memory: there
    a float32 product is many times faster than a 4-bit one. Elsewhere weights stay as stored.
    Raises `InvalidRequest` for an unknown choice.
    """
    if choice not in ("auto", "stored", *_DTYPES):
        names = ", ".join(["auto", "stored", *_DTYPES])
        raise InvalidRequest(f"dtype is {choice!r}, expected one of {names}")
    if choice == "stored" or (choice == "auto" and not on_cpu()):
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
    convert(model, dtype)
    done = "dequantized" if was_quantized else "converted"
    why = ", which is faster on this CPU" if choice == "auto" else ""
    return f"target {done} to {str(dtype).rpartition('.')[2]}{why}"


def set_drafter_precision(drafter: nn.Module) -> None:
    """Activations never in float16, which overflows in DFlash 2; float32 throughout on a CPU."""
    if on_cpu():
        convert(drafter, mx.float32)
    elif drafter.dtype == mx.float16:
        drafter.set_dtype(mx.bfloat16)


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
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
