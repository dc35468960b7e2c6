"""A drafter with fewer bits: which layers, and how it is kept on disk."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from dflash2_mlx.models import checkpoint
from dflash2_mlx.models.drafter import Drafter

GROUP_SIZE = 64
BitsOf = Callable[[str], int | None]


def backbone_bits(bits: int) -> BitsOf:
    """`bits` for the backbone's linear layers; None (as stored) for the layers that steer.

    Conv projections, selector projection and codebooks are a few percent of the bytes and decide
    which candidate wins, so they stay as they are (issue 3).
    """

    def of(path: str) -> int | None:
        steers = path.startswith("candidate_selector") or path.endswith("kernel_projection")
        return None if steers else bits

    return of


def quantize(drafter: Drafter, bits_of: BitsOf) -> dict[str, Any]:
    """Quantize in place; returns the `quantization` entry for config.json, layer by layer."""
    chosen: dict[str, Any] = {}

    def predicate(path: str, module: nn.Module) -> bool | dict[str, Any]:
        bits = bits_of(path) if hasattr(module, "to_quantized") else None
        if bits is None or module.weight.shape[-1] % GROUP_SIZE:
            return False
        chosen[path] = {"group_size": GROUP_SIZE, "bits": bits}
        return dict(chosen[path])

    nn.quantize(drafter, class_predicate=predicate)
    bits = [entry["bits"] for entry in chosen.values()]
    common = max(set(bits), key=bits.count)
    return {
        "group_size": GROUP_SIZE,
        "bits": common,
        **{path: entry for path, entry in chosen.items() if entry["bits"] != common},
    }


def save(drafter: Drafter, config: dict[str, Any], folder: Path) -> None:
    """Write config.json and model.safetensors; codebooks get their published names back."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = checkpoint.published_names(dict(tree_flatten(drafter.parameters())))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
