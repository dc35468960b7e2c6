"""What MLX says about the chip it runs on, and what follows from it."""

import re
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

FIRST_WITH_BFLOAT16 = 15  # applegpu_g15 is M3; M1 (g13) and M2 (g14) emulate bfloat16


@dataclass(frozen=True, slots=True)
class Chip:
    """`generation` is the number in Apple's architecture name (13: M1 .. 17: M5), else None."""

    on_cpu: bool
    architecture: str
    generation: int | None
    name: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.architecture})" if self.name else self.architecture

    @property
    def activations(self) -> mx.Dtype:
        """What a drafter computes in: float32 where bfloat16 is emulated, and on a CPU.

        Never float16: the `fc` layer of DFlash 2 gives values near 12,800, and attention overflows
        (vllm-project/vllm#55250: no draft accepted).
        """
        emulated = self.generation is not None and self.generation < FIRST_WITH_BFLOAT16
        return mx.float32 if self.on_cpu or emulated else mx.bfloat16

    @property
    def few_rows_from_left(self) -> bool:
        """Whether `W @ x.T` is faster than `x @ W.T` for a block's rows (`models/few_rows.py`).

        MKL has other kernels for Intel's own CPUs, where a forward of 3 rows would take 1.4 times
        as long; other CPUs were not measured.
        """
        return self.on_cpu and self.name.startswith("AMD")


def chip_of(info: dict[str, Any], *, on_cpu: bool) -> Chip:
    """The chip that `mx.device_info()` describes; every field may be missing."""
    architecture = str(info.get("architecture", "unknown"))
    found = re.fullmatch(r"applegpu_g(\d+)\w*", architecture)
    generation = int(found[1]) if found else None
    return Chip(on_cpu, architecture, generation, str(info.get("device_name", "")))


def this_chip() -> Chip:
    """The chip in use."""
    return chip_of(mx.device_info(), on_cpu=mx.default_device().type == mx.cpu)
