"""What a measurement was made with: a number never travels alone."""

import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from dflash2_mlx.blas import blas_in_force
from dflash2_mlx.catalogue import load_catalogue
from dflash2_mlx.chip import this_chip
from dflash2_mlx.machine import physical_memory
from dflash2_mlx.pair import Pair
from dflash2_mlx.rounding import dtype_name

PACKAGES = ("dflash2-mlx", "mlx", "mlx-lm")
FAR_BELOW = 0.6  # of the known tokens per pass; other prompts alone do not explain that


@dataclass(frozen=True, slots=True)
class Published:
    """Tokens per pass that somebody measured with a drafter, and with what."""

    block: int
    tokens_per_pass: float
    source: str


# Other prompts give other figures; these tell a drafter that works from one that does not.
PUBLISHED = {
    "demo_drafter": Published(8, 1.65, "our 24 prompts, greedy, float32"),
    "z-lab/Qwen3.8-27B-DFlash2": Published(8, 4.80, "its makers, mean of five benchmarks"),
    "z-lab/Muse-Glimmer-30B-DFlash2": Published(16, 5.70, "its makers, mean of five benchmarks"),
    "nchapman/Qwen3.5-4B-DFlash2": Published(8, 4.05, "its model card, greedy"),
    "rasyosef/Qwen3.5-2B-DFlash2": Published(8, 3.49, "its model card, greedy"),
    "mgoin/Qwen3-4B-speculator.dflash2": Published(8, 3.82, "its validation set"),
}


def machine() -> dict[str, Any]:
    """Chip, memory, system and versions."""
    load = os.getloadavg()[0]
    return {
        "chip": str(this_chip()),
        "cores": os.cpu_count(),
        "memory_bytes": physical_memory(),
        "system": platform.platform(),
        "blas": str(path) if (path := blas_in_force()) and this_chip().on_cpu else None,
        "device": str(mx.default_device()),
        "load": round(load, 2),
        "packages": {name: version(name) for name in PACKAGES},
    }


def of_pair(pair: Pair) -> dict[str, Any]:
    """Models with their revisions, bits and dtypes; a revision is None where none was pinned."""
    state, entry = pair.effective(), load_catalogue().get(pair.name)
    drafter = pair.drafter
    return {
        "target": pair.name,
        "target_revision": entry.target_revision if entry else _revision(pair.name),
        "target_bits": state.target_bits,
        "target_dtype": dtype_name(pair.target.dtype),
        "drafter": state.drafter,
        "drafter_revision": _drafter_revision(pair),
        "drafter_bits": state.drafter_bits,
        "draft_block": None if drafter is None else drafter.draft_block,
        "drafter_dtype": None if drafter is None else dtype_name(drafter.dtype),
        "tuning": state.reason,
    }


def compared_with_published(pair: Pair, block: int, tokens_per_pass: float) -> str | None:
    """One line on how a figure stands to what is known of the drafter, if it is of that block."""
    known = PUBLISHED.get((pair.drafter_name or "").partition("@")[0])
    if known is None or known.block != block:
        return None
    line = (
        f"{tokens_per_pass:.2f} tokens per pass at block {block}; "
        f"{known.tokens_per_pass:.2f} is known ({known.source})"
    )
    if tokens_per_pass >= FAR_BELOW * known.tokens_per_pass:
        return line
    return f"{line}: far below, is the drafter's revision the one made for this target?"


def _drafter_revision(pair: Pair) -> str | None:
    for entry in load_catalogue().values():
        if entry.drafter == pair.drafter_name:
            return entry.drafter_revision
    return _revision(pair.drafter_name or "")


def _revision(spec: str) -> str | None:
    return spec.partition("@")[2] or None
