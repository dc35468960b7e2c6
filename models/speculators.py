"""Drafters published by the `speculators` project, read as if they had the published layout.

Their config.json nests the transformer's fields and numbers hidden states from the embedding's
output. Their tensors have the published names, at times with the verifier's own beside them.
"""

from collections.abc import Mapping
from typing import Any

from dflash2_mlx.models.config import refuse

ARCHITECTURES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}
DFLASH_FIELDS = (
    "block_size",
    "mask_token_id",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
)
KEPT_FIELDS = ("quantization", "quantization_config", "provenance", "num_target_layers")
# Training options that change what a row of the block means; the value is the one we can run.
MEANINGS = {"sample_from_anchor": False, "shift_label": False, "projector_type": "dflash"}


def published(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A drafter's config.json in the published layout, whichever of the two it has.

    Raises `BadCheckpoint` as `convert_config` does.
    """
    return convert_config(config) if is_speculators(config) else config


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Whether a config.json has the layout of the speculators project."""
    return "speculators_model_type" in config or "transformer_layer_config" in config


def convert_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same config in the published layout.

    Raises `BadCheckpoint` naming a field that cannot be honoured, and what it holds.
    """
    kind, layer = config.get("speculators_model_type"), config.get("transformer_layer_config")
    if kind not in ARCHITECTURES:
        refuse("speculators_model_type", kind, " or ".join(ARCHITECTURES))
    if not isinstance(layer, dict):
        refuse("transformer_layer_config", layer, "the fields of the drafter's layers")
    _check_target(config, layer)
    for field, runnable in MEANINGS.items():
        if config.get(field) not in (None, runnable):
            refuse(field, config[field], repr(runnable))
    is_bidirectional = config.get("sliding_window_non_causal", kind == "dflash2")
    dflash = {name: config[name] for name in DFLASH_FIELDS if name in config}
    return {
        **layer,
        **{name: config[name] for name in KEPT_FIELDS if name in config},
        "architectures": [ARCHITECTURES[kind]],
        "rope_parameters": _rope(layer),
        "is_causal": False if is_bidirectional else None,
        "dflash_config": {**dflash, "target_layer_ids": _taps(config)},
    }


def _check_target(config: Mapping[str, Any], layer: Mapping[str, Any]) -> None:
    """The drafter's vocabulary and width must be those of its target."""
    ours = {"draft_vocab_size": "vocab_size", "target_hidden_size": "hidden_size"}
    for field, of_layer in ours.items():
        seen, whole = config.get(field), layer.get(of_layer)
        if seen is not None and seen != whole:
            refuse(field, seen, f"{whole}, the {of_layer} of its layers")


def _taps(config: Mapping[str, Any]) -> list[int]:
    """Layers by number; a hidden state is numbered one higher than the layer it comes out of."""
    states = config.get("aux_hidden_state_layer_ids")
    is_list = isinstance(states, list) and all(isinstance(state, int) for state in states)
    if not is_list or not states or min(states) < 1:
        refuse("aux_hidden_state_layer_ids", states, "a list of hidden states, numbered from 1")
    return [state - 1 for state in states]


def _rope(layer: Mapping[str, Any]) -> dict[str, Any]:
    rope = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    rope = dict(rope.get("sliding_attention", rope))
    theta = rope.setdefault("rope_theta", layer.get("rope_theta"))
    if theta is None:
        refuse("rope_theta", theta, "the base of the rotation")
    return rope
