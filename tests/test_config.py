"""A drafter's config and tensors: both layouts are read, what cannot work is refused by name."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from tiny import DRAFTER, HIDDEN, VOCAB, tiny_config, tiny_drafter

from dflash2_mlx.errors import BadCheckpoint, PairMismatch
from dflash2_mlx.models.checkpoint import published_names
from dflash2_mlx.models.config import DrafterConfig
from dflash2_mlx.models.drafter import Drafter, load_drafter
from dflash2_mlx.models.quantize import backbone_bits, quantize, save

TARGET = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_layers": 4}


def config(**changes: Any) -> dict[str, Any]:
    return {**DRAFTER, **changes}


def nested(**changes: Any) -> dict[str, Any]:
    return config(dflash_config={**DRAFTER["dflash_config"], **changes})


def without(field: str) -> dict[str, Any]:
    inner = {k: v for k, v in DRAFTER["dflash_config"].items() if k != field}
    return {k: v for k, v in config(dflash_config=inner).items() if k != field}


def test_block_size_and_theta_are_read_at_either_level() -> None:
    flat = without("block_size") | {"block_size": 16, "rope_theta": 5e5}
    flat.pop("rope_parameters")
    read = DrafterConfig.from_dict(flat)
    assert (read.block_size, read.rope["rope_theta"]) == (16, 5e5)
    read = DrafterConfig.from_dict(nested(block_size=4) | {"rope_theta": 1.0})
    assert (read.block_size, read.rope["rope_theta"]) == (4, 10000.0)


def test_the_nested_block_size_wins_over_a_default() -> None:
    assert DrafterConfig.from_dict(DRAFTER).block_size == 8


def test_dflash1_has_no_convolution_and_no_selector() -> None:
    read = DrafterConfig.from_dict(config(architectures=["DFlashDraftModel"]))
    assert (read.conv_kernel_size, read.selector_rank) == (0, 0)
    names = [name for name, _ in tree_flatten(Drafter(read).parameters())]
    assert not [name for name in names if "conv" in name or "selector" in name]


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (without("mask_token_id"), "mask_token_id is missing, expected a token id from 0 to 299"),
        (nested(mask_token_id=-1), "mask_token_id is -1"),
        (nested(mask_token_id=VOCAB), "mask_token_id is 300"),
        (nested(mask_token_id=True), "mask_token_id is True"),
        (nested(mask_token_id=256), "mask_token_id is 256, expected another id than eos_token_id"),
        (without("block_size"), "block_size is missing"),
        (nested(block_size=0), "block_size is 0"),
        (nested(target_layer_ids=[]), "target_layer_ids is []"),
        (nested(target_layer_ids="1"), "target_layer_ids is '1'"),
        (config(layer_types=["sliding_attention"]), "expected 2 entries"),
        (config(layer_types=["full_attention", "linear"]), "layer_types is ['linear']"),
        (config(sliding_window=None), "sliding_window is missing"),
        (config(num_key_value_heads=3), "num_key_value_heads is 3"),
        (config(rms_norm_eps="x"), "rms_norm_eps is 'x'"),
        (nested(conv_group_size=7), "conv_group_size is 7"),
        (nested(selector_top_k=999), "selector_top_k is 999"),
        (without("hidden_size"), "hidden_size is missing"),
    ],
)
def test_an_impossible_field_is_named_with_its_value(broken: dict[str, Any], said: str) -> None:
    with pytest.raises(BadCheckpoint) as caught:
        DrafterConfig.from_dict(broken)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"vocab_size": 320}, "vocab_size 300, the target has 320"),
        ({"hidden_size": 128}, "hidden_size 64, the target has 128"),
        ({"num_layers": 3}, "num_target_layers 4, the target has 3"),
    ],
)
def test_a_target_of_another_shape_is_refused_with_both_numbers(
    change: dict[str, int], said: str
) -> None:
    with pytest.raises(PairMismatch, match=said):
        tiny_config().check_target(**{**TARGET, **change})


def test_a_tap_outside_the_target_is_refused() -> None:
    with pytest.raises(PairMismatch, match=r"taps target layers \[4\].*layers 0 to 3"):
        tiny_config(target_layer_ids=[1, 4]).check_target(**TARGET)


def stored(folder: Path, **changes: mx.array | None) -> Path:
    """The tiny drafter in the published layout, with some tensors changed or left out."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(DRAFTER))
    weights = published_names(dict(tree_flatten(tiny_drafter().parameters())))
    weights.update({k: v for k, v in changes.items() if v is not None})
    for name in [k for k, v in changes.items() if v is None]:
        del weights[name]
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def logits_of(drafter: Drafter) -> mx.array:
    """What the drafter makes of one block, end to end."""
    table = mx.random.normal((VOCAB, HIDDEN), key=mx.random.key(3))
    drafter.bind(lambda ids: table[ids], lambda hidden: hidden @ table.T)
    taps = mx.random.normal((1, 20, 2 * HIDDEN), key=mx.random.key(4))
    return drafter.logits(drafter.hidden(drafter.make_context(), taps, mx.array([5]), 8))


def test_the_published_layout_is_read(tmp_path: Path) -> None:
    names = mx.load(str(stored(tmp_path) / "model.safetensors"))
    assert "candidate_selector.predecessor_codebook" in names
    assert mx.array_equal(logits_of(load_drafter(tmp_path)), logits_of(tiny_drafter()))


def test_shards_are_read_and_a_missing_one_is_named(tmp_path: Path) -> None:
    whole = mx.load(str(stored(tmp_path) / "model.safetensors"))
    (tmp_path / "model.safetensors").unlink()
    halves = [dict(list(whole.items())[::2]), dict(list(whole.items())[1::2])]
    weight_map = {}
    for number, half in enumerate(halves, 1):
        name = f"model-{number:05}-of-00002.safetensors"
        mx.save_safetensors(str(tmp_path / name), half)
        weight_map.update(dict.fromkeys(half, name))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert mx.array_equal(logits_of(load_drafter(tmp_path)), logits_of(tiny_drafter()))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match="lacks 1 of 2 shards, first model-00002"):
        load_drafter(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"norm.weight": None}, "lacks 1 of 36 tensors, first 'norm.weight'"),
        ({"layers.0.extra.weight": mx.zeros((2,))}, "1 unknown tensors, first 'layers.0.extra"),
        ({"fc.weight": mx.zeros((2, 3))}, r"'fc.weight' has shape \(2, 3\).*asks for \(64, 128\)"),
    ],
)
def test_every_tensor_is_accounted_for(tmp_path: Path, changes, said: str) -> None:
    with pytest.raises(BadCheckpoint, match=said):
        load_drafter(stored(tmp_path, **changes))


def test_broken_folders_get_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"no config\.json"):
        load_drafter(tmp_path)
    stored(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(BadCheckpoint, match="download it again") as caught:
        load_drafter(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match=r"no model\*\.safetensors"):
        load_drafter(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadCheckpoint, match="cannot read"):
        load_drafter(tmp_path)


def test_exactly_the_layers_with_scales_are_quantized(tmp_path: Path) -> None:
    drafter = tiny_drafter()
    quantization = quantize(drafter, backbone_bits(4))
    save(drafter, {**DRAFTER, "quantization": quantization}, tmp_path)
    loaded = load_drafter(tmp_path)
    bits = {path: module.bits for path, module in loaded.named_modules() if "scales" in module}
    assert bits["layers.0.mlp.gate_proj"] == bits["fc"] == 4
    assert not [path for path in bits if "selector" in path or "kernel_projection" in path]
    assert mx.array_equal(logits_of(loaded), logits_of(drafter))
    assert isinstance(loaded.layers[0].attention_conv.kernel_projection, nn.Linear)


def test_bits_may_differ_from_layer_to_layer(tmp_path: Path) -> None:
    drafter = tiny_drafter(selector_rank=64)
    quantization = quantize(drafter, lambda path: 8 if "codebook" in path else 4)
    changed = {**DRAFTER["dflash_config"], "selector_rank": 64}
    save(drafter, {**DRAFTER, "dflash_config": changed, "quantization": quantization}, tmp_path)
    loaded = load_drafter(tmp_path)
    assert loaded.candidate_selector.predecessor_codebook.bits == 8
    assert loaded.fc.bits == 4
    assert mx.array_equal(logits_of(loaded), logits_of(drafter))


def test_scales_without_a_quantization_entry_are_refused(tmp_path: Path) -> None:
    drafter = tiny_drafter()
    quantize(drafter, backbone_bits(4))
    save(drafter, DRAFTER, tmp_path)
    with pytest.raises(BadCheckpoint, match="no 'quantization'"):
        load_drafter(tmp_path)
