"""An imported GGUF model is the model in the file: same values, same logits, same limits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf_writer import model_metadata, model_tensors, permute, unpack, write_gguf
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model
from tiny import build_model

from dflash2_mlx.errors import BadCheckpoint
from dflash2_mlx.gguf import import_gguf

CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 260,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
QUANTIZED = ["Q4_0", "Q4_1", "Q8_0"]
FLOAT = ["F32", "F16", "BF16"]
IDS = mx.array([[7, 40, 200, 3, 99, 258, 1, 64]])


def write_model(
    folder: Path, model: nn.Module, kind: str = "F32", architecture: str = "llama", **extra: Any
) -> Path:
    """A GGUF file of a float model, its q and k permuted as llama.cpp does for llama."""
    tensors = model_tensors(model, kind)
    if architecture == "llama":
        for name, (stored, array) in tensors.items():
            if heads := {"attn_q": 4, "attn_k": 2}.get(name.split(".")[-2]):
                tensors[name] = (stored, permute(array, heads))
    metadata = model_metadata(architecture, CONFIG) | extra
    return write_gguf(folder / "model.gguf", metadata, tensors)


def imported(gguf: Path) -> tuple[nn.Module, dict[str, Any]]:
    folder = gguf.with_name("imported")
    import_gguf(gguf, folder)
    model, config = load_model(folder)
    return model, config


def rounded(model: nn.Module, kind: str) -> nn.Module:
    """The float model with the values that the format can hold, by the format's definition."""
    for path, array in tree_flatten(model.parameters()):
        if array.ndim > 1:
            model.load_weights([(path, mx.array(unpack(kind, np.array(array))))], strict=False)
    return model


def far(model: nn.Module, reference: nn.Module) -> float:
    """The largest difference of logits, relative to their spread."""
    expected = reference(IDS)
    gap = mx.abs(model(IDS).astype(mx.float32) - expected).max() / mx.std(expected)
    return float(gap.item())


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_the_values_in_the_file(tmp_path: Path, kind: str, tied: bool) -> None:
    float_model = build_model("llama", CONFIG | {"tie_word_embeddings": tied})
    model, _ = imported(write_model(tmp_path, float_model, kind))
    error = far(model, float_model)
    assert 0 < error < {"Q8_0": 0.1}.get(kind, 1.5)  # the error of the format itself
    assert far(model, rounded(float_model, kind)) < 1e-3 < error


@pytest.mark.parametrize(("kind", "limit"), [("F32", 1e-4), ("F16", 0.05), ("BF16", 0.4)])
def test_float_files_keep_their_type(tmp_path: Path, kind: str, limit: float) -> None:
    float_model = build_model("llama", CONFIG)
    model, config = imported(write_model(tmp_path, float_model, kind))
    dtype = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}[kind]
    assert {array.dtype for _, array in tree_flatten(model.parameters())} == {dtype}
    assert config["dtype"] == str(dtype).removeprefix("mlx.core.")
    assert "quantization" not in config
    assert far(model, rounded(float_model, kind)) < limit


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_qwen_is_not_permuted(tmp_path: Path, architecture: str) -> None:
    float_model = build_model(architecture, CONFIG)
    model, config = imported(write_model(tmp_path, float_model, "F32", architecture))
    assert config["model_type"] == architecture
    assert far(model, float_model) < 1e-4


def test_bfloat16_beyond_the_range_of_float16_survives(tmp_path: Path) -> None:
    float_model = build_model("llama", CONFIG)
    huge = mx.full((64, 96), 2.0**20)
    float_model.load_weights([("model.layers.0.mlp.down_proj.weight", huge)], strict=False)
    model, _ = imported(write_model(tmp_path, float_model, "BF16"))
    assert mx.array_equal(
        dict(tree_flatten(model.parameters()))["model.layers.0.mlp.down_proj.weight"],
        huge.astype(mx.bfloat16),
    )


def test_every_matrix_keeps_its_own_width(tmp_path: Path) -> None:
    float_model = build_model("llama", CONFIG)
    tensors = model_tensors(float_model, "Q4_1")
    tensors["token_embd.weight"] = ("Q8_0", tensors["token_embd.weight"][1])
    tensors["blk.1.ffn_down.weight"] = ("F16", tensors["blk.1.ffn_down.weight"][1])
    gguf = write_gguf(tmp_path / "mixed.gguf", model_metadata("llama", CONFIG), tensors)
    model, config = imported(gguf)
    eight = {"group_size": 32, "bits": 8}
    assert config["quantization"] == {"group_size": 32, "bits": 4, "model.embed_tokens": eight}
    assert model.model.embed_tokens.bits == 8
    assert model.model.layers[0].mlp.down_proj.bits == 4
    down = model.model.layers[1].mlp.down_proj.weight
    # Beside quantized matrices all floats are float32, or every call would widen something.
    assert down.dtype == model.model.layers[0].mlp.down_proj.scales.dtype == mx.float32
    expected = unpack("F16", tensors["blk.1.ffn_down.weight"][1])
    assert np.array_equal(np.array(down), expected)


def test_config_and_ends_come_from_the_metadata(tmp_path: Path) -> None:
    gguf = write_model(
        tmp_path,
        build_model("llama", CONFIG),
        **{"tokenizer.ggml.eot_token_id": 258, "tokenizer.ggml.padding_token_id": 257},
    )
    _, config = imported(gguf)
    assert CONFIG.items() <= config.items()
    assert (config["eos_token_id"], config["pad_token_id"]) == ([257, 258], 257)
    generation = json.loads((tmp_path / "imported/generation_config.json").read_text())
    assert generation["eos_token_id"] == [257, 258]


def test_linear_rope_scaling_is_honoured(tmp_path: Path) -> None:
    scaling = {"type": "linear", "factor": 4.0}
    float_model = build_model("llama", CONFIG | {"rope_scaling": scaling})
    extra = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    model, _ = imported(write_model(tmp_path, float_model, **extra))
    assert far(model, float_model) < 1e-4 < far(model, build_model("llama", CONFIG))


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_0"])
def test_other_quantizations_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    tensors = model_tensors(build_model("llama", CONFIG), "Q8_0")
    tensors["blk.1.ffn_up.weight"] = (kind, tensors["blk.1.ffn_up.weight"][1])
    gguf = write_gguf(tmp_path / "k.gguf", model_metadata("llama", CONFIG), tensors)
    with pytest.raises(BadCheckpoint, match=rf"^k.gguf: tensor blk\.1\.ffn_up\.weight .* {kind};"):
        imported(gguf)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"general.architecture": "gemma3"}, "architecture 'gemma3' is not imported"),
        ({"llama.expert_count": 8}, "'llama' with experts is not imported"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn'"),
        ({"llama.rope.dimension_count": 8}, "a rotation of 8 of 16 dimensions"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model is 'bert'"),
        ({"tokenizer.ggml.pre": "poro-chat"}, "tokenizer.ggml.pre is 'poro-chat'"),
        ({"tokenizer.ggml.merges": ["x yz"]}, "the tokenizer in the GGUF metadata is broken"),
        ({"llama.block_count": 3}, "mlx-lm does not accept the imported model"),
    ],
)
def test_what_is_not_known_is_refused_in_one_line(
    tmp_path: Path, extra: dict[str, Any], words: str
) -> None:
    gguf = write_model(tmp_path, build_model("llama", CONFIG), **extra)
    with pytest.raises(BadCheckpoint) as refusal:
        imported(gguf)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    for name, words in [("rope_freqs.weight", "rotation frequencies"), ("blk.0.x", "no place")]:
        tensors = model_tensors(build_model("llama", CONFIG), "F32")
        tensors[name.removesuffix(".weight") + ".weight"] = ("F32", np.ones(8, np.float32))
        gguf = write_gguf(tmp_path / "odd.gguf", model_metadata("llama", CONFIG), tensors)
        with pytest.raises(BadCheckpoint, match=words):
            imported(gguf)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda raw: b"",
    "a web page": lambda raw: b"<!doctype html>" * 40,
    "in the header": lambda raw: raw[:300],
    "in the tensors": lambda raw: raw[:-40_000],
    "version 1": lambda raw: raw[:4] + b"\1" + raw[5:],
    "endless string": lambda raw: raw[:24] + b"\xff" * 8 + raw[32:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_reported_in_one_line(tmp_path: Path, damage: str) -> None:
    gguf = write_model(tmp_path, build_model("llama", CONFIG))
    gguf.write_bytes(DAMAGES[damage](gguf.read_bytes()))
    with pytest.raises(BadCheckpoint, match=r"^model\.gguf: .+") as report:
        imported(gguf)
    assert "\n" not in str(report.value)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    float_model = build_model("llama", CONFIG)
    metadata = model_metadata("llama", CONFIG)
    del metadata["llama.context_length"]
    gguf = write_gguf(tmp_path / "m.gguf", metadata, model_tensors(float_model, "F32"))
    with pytest.raises(BadCheckpoint, match=r"lacks llama\.context_length"):
        imported(gguf)
