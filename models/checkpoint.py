"""Reading a drafter's folder: whole or in shards, quantized or not, every tensor accounted for."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from dflash2_mlx.errors import BadCheckpoint
from dflash2_mlx.models.extras import TARGETS_OWN, UNUSED, describe, find_extras

Weights = dict[str, mx.array]
CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")


def sanitize(weights: Weights) -> Weights:
    """Published names -> parameter names: the codebooks are stored without `.weight`."""
    return {f"{name}.weight" if name in CODEBOOKS else name: w for name, w in weights.items()}


def published_names(weights: Weights) -> Weights:
    """The inverse of `sanitize`; a quantized codebook keeps its three suffixes."""
    bare = {f"{name}.weight": name for name in CODEBOOKS if f"{name}.scales" not in weights}
    return {bare.get(name, name): w for name, w in weights.items()}


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadCheckpoint(f"no {path.name} in {path.parent}: not a drafter's folder") from None
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"cannot read {path}: {error}") from None
    if not isinstance(content, dict):
        raise BadCheckpoint(f"{path} holds no JSON object")
    return content


def read_weights(folder: Path) -> Weights:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        if missing := [name for name in names if not (folder / name).exists()]:
            raise BadCheckpoint(
                f"{folder} lacks {len(missing)} of {len(names)} shards, first {missing[0]}; "
                "download it again"
            )
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise BadCheckpoint(f"no model*.safetensors file in {folder}; download it again")
    weights: Weights = {}
    for file in files:
        try:
            weights.update(cast(Weights, mx.load(str(file))))
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise BadCheckpoint(f"cannot read {file}: {reason}; download it again") from None
    return weights


def check_vocabulary(weights: Weights) -> None:
    """Refuse a drafter whose tensors map a vocabulary of its own to the target's."""
    for name in ("d2t", "t2d"):
        if name in weights:
            raise BadCheckpoint(
                f"drafter has a vocabulary of its own (tensor '{name}' of {weights[name].size} "
                "ids), expected the target's whole one; use another drafter"
            )


def set_extras_aside(drafter: nn.Module, weights: Weights) -> tuple[Weights, tuple[str, ...]]:
    """The weights without those of parts that no drafter runs, and a note on each such part."""
    parameters = dict(tree_flatten(drafter.parameters()))
    found = find_extras(weights, parameters, UNUSED, TARGETS_OWN)
    aside = {name for names in found.values() for name in names}
    kept = {name: weight for name, weight in weights.items() if name not in aside}
    return kept, describe("drafter", found)


def quantize_like(drafter: nn.Module, weights: Weights, config: Mapping[str, Any]) -> None:
    """Quantize exactly the layers that carry scales, as the config says."""
    if not any(name.endswith(".scales") for name in weights):
        return
    quantization = config.get("quantization") or config.get("quantization_config")
    if not isinstance(quantization, dict) or "group_size" not in quantization:
        raise BadCheckpoint(
            "drafter has quantized tensors (.scales) but config.json has no 'quantization' with "
            "group_size and bits"
        )

    def predicate(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if f"{path}.scales" not in weights:
            return False
        own = quantization.get(path)
        return own if isinstance(own, dict) else True

    nn.quantize(
        drafter,
        group_size=quantization["group_size"],
        bits=quantization["bits"],
        mode=quantization.get("mode", "affine"),
        class_predicate=predicate,
    )


def check_tensors(drafter: nn.Module, weights: Weights, folder: Path) -> None:
    expected = dict(tree_flatten(drafter.parameters()))
    if missing := sorted(set(expected) - set(weights)):
        raise BadCheckpoint(
            f"{folder} lacks {len(missing)} of {len(expected)} tensors, first '{missing[0]}'"
        )
    if unknown := sorted(set(weights) - set(expected)):
        raise BadCheckpoint(
            f"{folder} has {len(unknown)} unknown tensors, first '{unknown[0]}'; "
            "is this a DFlash drafter?"
        )
    for name, parameter in expected.items():
        if weights[name].shape != parameter.shape:
            raise BadCheckpoint(
                f"{folder}: tensor '{name}' has shape {weights[name].shape}, "
                f"config.json asks for {parameter.shape}"
            )
