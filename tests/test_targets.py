"""A target's folder is read strictly, but for parts that are never run; names are forgiven."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from tiny import DRAFTER, LLAMA, build_model, tiny_drafter, tiny_target

from dflash2_mlx import targets
from dflash2_mlx.errors import BadCheckpoint, InvalidRequest
from dflash2_mlx.models.quantize import save
from dflash2_mlx.pair import load_pair
from dflash2_mlx.targets import LoadedTarget, load_target

TOKENS = mx.array([[5, 9, 200, 7]])
ROW = mx.zeros((4,))
QWEN3_5 = {
    "text_config": {
        "model_type": "qwen3_5_text",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "vocab_size": 300,
        "max_position_embeddings": 4096,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "type": "default"},
    }
}


@pytest.fixture(autouse=True)
def no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "load_tokenizer", lambda folder, **_: "tokenizer")


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Writes a model's folder, with more tensors or other config fields."""

    def write(model: nn.Module, config: dict[str, Any], extra: dict[str, Any]) -> Path:
        weights = dict(tree_flatten(model.parameters()))
        mx.save_safetensors(str(tmp_path / "model.safetensors"), weights | extra)
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write


@pytest.fixture
def llama(saved: Callable[..., Path]) -> Callable[..., LoadedTarget]:
    """Loads the tiny llama after it was saved."""

    def load(extra: dict[str, Any] | None = None, **config: Any) -> LoadedTarget:
        fields = {"model_type": "llama", **LLAMA, **config}
        return load_target(saved(tiny_target(), fields, extra or {}))

    return load


def equals_tiny(loaded: LoadedTarget) -> bool:
    return bool(mx.array_equal(loaded.model(TOKENS), tiny_target()(TOKENS)))


def test_a_plain_folder_loads_without_a_note(llama: Callable[..., LoadedTarget]) -> None:
    loaded = llama()
    assert loaded.notes == ()
    assert loaded.tokenizer == "tokenizer"
    assert equals_tiny(loaded)


def test_unused_parts_are_ignored_with_a_note_each(llama: Callable[..., LoadedTarget]) -> None:
    names = ("mtp.fc.weight", "mtp.fc.scales", "model.visual.norm.weight", "audio_tower.a.bias")
    loaded = llama(dict.fromkeys(names, ROW))
    assert loaded.notes == (
        "target: ignored 2 tensors of multi-token prediction (first mtp.fc.scales)",
        "target: ignored 1 tensor for images (first model.visual.norm.weight)",
        "target: ignored 1 tensor for audio (first audio_tower.a.bias)",
    )
    assert equals_tiny(loaded)


def test_nothing_is_left_behind_on_the_model(llama: Callable[..., LoadedTarget]) -> None:
    model = llama({"mtp.fc.weight": ROW}).model
    assert "sanitize" not in vars(model)
    assert type(model) is type(tiny_target())


def test_what_the_family_drops_itself_is_noted_too(saved: Callable[..., Path]) -> None:
    config = {"model_type": "qwen3_5", **QWEN3_5}
    model = build_model("qwen3_5", QWEN3_5)
    extra = {"mtp.fc.weight": ROW, "model.visual.norm.weight": ROW}
    loaded = load_target(saved(model, config, extra))
    assert [note.partition(" (")[0] for note in loaded.notes] == [
        "target: ignored 1 tensor of multi-token prediction",
        "target: ignored 1 tensor for images",
    ]
    assert mx.array_equal(loaded.model(TOKENS), model(TOKENS))


def refusal(load: Callable[[], Any]) -> str:
    with pytest.raises(BadCheckpoint) as caught:
        load()
    message = str(caught.value)
    assert message.startswith("cannot load the target in ")
    assert "\n" not in message
    return message


def test_any_other_tensor_is_refused_by_name(llama: Callable[..., LoadedTarget]) -> None:
    message = refusal(lambda: llama({"mtp.fc.weight": ROW, "model.extra.weight": ROW}))
    assert "1 parameters not in model: model.extra.weight" in message


def test_a_missing_tensor_is_refused_although_others_are_ignored(
    saved: Callable[..., Path],
) -> None:
    smaller = build_model("llama", {**LLAMA, "num_hidden_layers": 3})
    folder = saved(smaller, {"model_type": "llama", **LLAMA}, {"mtp.fc.weight": ROW})
    message = refusal(lambda: load_target(folder))
    assert "Missing 9 parameters" in message
    assert "model.layers.3." in message


def test_a_new_name_for_a_known_architecture_is_read_with_a_note(
    llama: Callable[..., LoadedTarget],
) -> None:
    loaded = llama(model_type="house_llama", architectures=["LlamaForCausalLM"])
    assert loaded.notes == (
        "target: mlx-lm has no model_type 'house_llama', it is read as 'llama', the family "
        "of its architecture",
    )
    assert equals_tiny(loaded)


def test_a_new_name_with_another_structure_is_refused(llama: Callable[..., LoadedTarget]) -> None:
    extra = {"model.layers.0.self_attn.g_proj.weight": ROW}
    message = refusal(
        lambda: llama(extra, model_type="house_llama", architectures=["LlamaForCausalLM"])
    )
    assert "self_attn.g_proj" in message


def test_an_unknown_family_is_refused_with_the_nearest_known(
    llama: Callable[..., LoadedTarget],
) -> None:
    message = refusal(lambda: llama(model_type="qwen3_7", architectures=["Qwen3_7ForCausalLM"]))
    assert "has no model_type 'qwen3_7' (config.json)" in message
    assert "if it is qwen3" in message
    assert "by another name, write that name there" in message
    assert message.endswith("'dflash2-mlx models' lists targets that work")


@pytest.mark.parametrize("model_type", ["zzzzzzzz", None])
def test_a_folder_of_something_else_is_refused(
    llama: Callable[..., LoadedTarget], model_type: str | None
) -> None:
    message = refusal(lambda: llama(model_type=model_type))
    assert "by another name" not in message


def test_a_config_without_a_model_type_is_refused(saved: Callable[..., Path]) -> None:
    assert "no model_type" in refusal(lambda: load_target(saved(tiny_target(), LLAMA, {})))


def test_a_pair_passes_on_the_notes_of_both_halves(
    saved: Callable[..., Path], tmp_path: Path
) -> None:
    drafter = tiny_drafter()
    save(drafter, DRAFTER, tmp_path / "drafter")
    weights = mx.load(str(tmp_path / "drafter" / "model.safetensors"))
    weights = {**weights, "embed_tokens.weight": ROW}
    mx.save_safetensors(str(tmp_path / "drafter" / "model.safetensors"), weights)
    target = saved(tiny_target(), {"model_type": "llama", **LLAMA}, {"mtp.fc.weight": ROW})
    pair = load_pair(str(target), str(tmp_path / "drafter"), dtype="stored")
    assert pair.notes == (
        "target: ignored 1 tensor of multi-token prediction (first mtp.fc.weight)",
        "drafter: ignored 1 tensor that the target has itself (first embed_tokens.weight)",
    )
    assert pair.effective().drafting


def test_a_draft_block_is_announced_and_has_times_of_its_own(
    saved: Callable[..., Path], tmp_path: Path
) -> None:
    save(tiny_drafter(), DRAFTER, tmp_path / "drafter")
    target = str(saved(tiny_target(), {"model_type": "llama", **LLAMA}, {}))
    usual, pair = (
        load_pair(target, str(tmp_path / "drafter"), draft_block=rows) for rows in (None, 4)
    )
    assert (usual.draft_block, pair.draft_block) == (1, 4)
    note = "every draft fills 4 rows, however few of them are checked"
    assert set(pair.notes) - set(usual.notes) == {note}
    assert usual.tuning
    assert pair.tuning
    assert pair.tuning.key == usual.tuning.key + ", 4 rows drafted"


@pytest.mark.parametrize(
    ("option", "told"),
    [({"dtype": "int8"}, "dtype is 'int8'"), ({"drafter_bits": 5}, "drafter bits are 5")],
)
def test_what_no_pair_can_have_is_refused_before_anything_is_looked_for(
    option: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidRequest, match=told):
        load_pair("no/such-model", "no/such-drafter", **option)


@pytest.mark.parametrize("option", ["drafter_bits", "draft_block"])
@pytest.mark.parametrize("drafter", [None, False])
def test_what_is_asked_of_a_drafter_needs_one(
    saved: Callable[..., Path], drafter: Literal[False] | None, option: str
) -> None:
    target = str(saved(tiny_target(), {"model_type": "llama", **LLAMA}, {}))
    with pytest.raises(InvalidRequest, match=f"--{option.replace('_', '-')} is 4, but no drafter"):
        load_pair(target, drafter, **{option: 4})
