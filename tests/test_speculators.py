"""Drafters in the layout of the speculators project: read like any other, or refused by name."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from test_config import TARGET, logits_of
from tiny import DRAFTER, HIDDEN, VOCAB, tiny_config, tiny_drafter

from dflash2_mlx.chip import this_chip
from dflash2_mlx.drafters import drafter_in_precision
from dflash2_mlx.errors import BadCheckpoint, PairMismatch
from dflash2_mlx.models.checkpoint import published_names
from dflash2_mlx.models.config import DrafterConfig
from dflash2_mlx.models.drafter import load_drafter
from dflash2_mlx.models.quantize import backbone_bits, quantize, save
from dflash2_mlx.models.speculators import convert_config, is_speculators, published

NESTED = {"dflash_config", "architectures", "num_target_layers", "is_causal"}
SPECULATORS: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "speculators_model_type": "dflash2",
    "speculators_config": {"algorithm": "dflash2", "verifier": {"name_or_path": "tiny"}},
    "aux_hidden_state_layer_ids": [1, 3],
    "draft_vocab_size": VOCAB,
    "target_hidden_size": None,
    "sample_from_anchor": False,
    "sliding_window_non_causal": True,
    **{k: v for k, v in DRAFTER["dflash_config"].items() if k != "target_layer_ids"},
    "transformer_layer_config": {k: v for k, v in DRAFTER.items() if k not in NESTED},
}


def changed(**changes: Any) -> dict[str, Any]:
    return {**SPECULATORS, **changes}


def layer(**changes: Any) -> dict[str, Any]:
    return changed(transformer_layer_config={**SPECULATORS["transformer_layer_config"], **changes})


def read(config: dict[str, Any]) -> DrafterConfig:
    return DrafterConfig.from_dict(published(config))


def stored(folder: Path, **extra: mx.array) -> Path:
    (folder / "config.json").write_text(json.dumps(SPECULATORS))
    weights = published_names(dict(tree_flatten(tiny_drafter().parameters())))
    mx.save_safetensors(str(folder / "model.safetensors"), {**weights, **extra})
    return folder


def test_both_layouts_say_the_same() -> None:
    assert is_speculators(SPECULATORS)
    assert not is_speculators(DRAFTER)
    assert read(SPECULATORS) == tiny_config(num_target_layers=None)
    assert published(DRAFTER) is DRAFTER


def test_hidden_states_are_numbered_one_higher_than_the_layers_they_come_from() -> None:
    assert read(changed(aux_hidden_state_layer_ids=[2, 4])).target_layer_ids == (1, 3)


@pytest.mark.parametrize(
    ("kind", "non_causal", "expected"),
    [
        ("dflash2", None, False),
        ("dflash2", False, True),
        ("dflash", None, True),
        ("dflash", True, False),
    ],
)
def test_rows_of_sliding_layers_are_causal_as_the_kind_has_it(
    kind: str, non_causal: bool | None, expected: bool
) -> None:
    config = changed(speculators_model_type=kind, sliding_window_non_causal=non_causal)
    if non_causal is None:
        del config["sliding_window_non_causal"]
    config["transformer_layer_config"] = layer(layer_types=["sliding_attention", "full_attention"])[
        "transformer_layer_config"
    ]
    assert [read(config).causal(number) for number in (0, 1)] == [expected, False]


def test_dflash1_of_speculators_has_no_selector() -> None:
    assert read(changed(speculators_model_type="dflash")).selector_rank == 0


@pytest.mark.parametrize(
    ("rope", "theta"),
    [
        ({"rope_parameters": {"rope_theta": 5e5}}, 5e5),
        ({"rope_parameters": None, "rope_theta": 3e5}, 3e5),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 2e5}}}, 2e5),
    ],
)
def test_theta_is_found_at_every_level(rope: dict[str, Any], theta: float) -> None:
    assert read(layer(**rope)).rope["rope_theta"] == theta


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (changed(speculators_model_type="eagle3"), "speculators_model_type is 'eagle3', expected"),
        (changed(speculators_model_type=None), "speculators_model_type is missing"),
        (changed(transformer_layer_config=None), "transformer_layer_config is missing"),
        (changed(draft_vocab_size=128), "draft_vocab_size is 128, expected 300, the vocab_size"),
        (changed(target_hidden_size=96), "target_hidden_size is 96, expected 64, the hidden_size"),
        (changed(sample_from_anchor=True), "sample_from_anchor is True, expected False"),
        (changed(projector_type="domino"), "projector_type is 'domino', expected 'dflash'"),
        (changed(aux_hidden_state_layer_ids=[0, 2]), "aux_hidden_state_layer_ids is [0, 2]"),
        (changed(aux_hidden_state_layer_ids=None), "aux_hidden_state_layer_ids is missing"),
        (changed(mask_token_id=None), "mask_token_id is missing"),
        (layer(rope_parameters=None), "rope_theta is missing"),
        (layer(layer_types=["sliding_attention"]), "expected 2 entries"),
        (layer(hidden_act="gelu"), "hidden_act is 'gelu', expected silu"),
    ],
)
def test_what_cannot_be_honoured_is_named(broken: dict[str, Any], said: str) -> None:
    with pytest.raises(BadCheckpoint) as caught:
        read(broken)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tap_beyond_the_target_is_refused_with_the_numbers() -> None:
    config = read(changed(aux_hidden_state_layer_ids=[3, 43]))
    with pytest.raises(PairMismatch, match=r"layers \[42\] .* layers 0 to 35"):
        config.check_target(**{**TARGET, "num_layers": 36})


def test_its_tensors_are_read_and_the_verifiers_left_aside_with_a_note(tmp_path: Path) -> None:
    table = mx.zeros((VOCAB, HIDDEN))
    copies = {"embed_tokens.weight": table, "lm_head.weight": table}
    drafter = load_drafter(stored(tmp_path, **copies, **{"verifier_norm.weight": table[0]}))
    assert mx.array_equal(logits_of(drafter), logits_of(tiny_drafter()))
    assert drafter.notes == (
        "drafter: ignored 3 tensors that the target has itself (first embed_tokens.weight)",
    )


def test_other_parts_are_left_aside_with_a_note_each(tmp_path: Path) -> None:
    row = mx.zeros((4,))
    names = ("mtp.fc.weight", "mtp.layers.0.norm.weight", "model.visual.norm.weight")
    drafter = load_drafter(stored(tmp_path, **dict.fromkeys(names, row)))
    assert drafter.notes == (
        "drafter: ignored 2 tensors of multi-token prediction (first mtp.fc.weight)",
        "drafter: ignored 1 tensor for images (first model.visual.norm.weight)",
    )


def test_a_complete_checkpoint_leaves_no_note(tmp_path: Path) -> None:
    assert load_drafter(stored(tmp_path)).notes == ()


@pytest.mark.parametrize("name", ["d2t", "t2d"])
def test_a_vocabulary_of_its_own_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadCheckpoint, match=f"tensor '{name}' of 7 ids"):
        load_drafter(stored(tmp_path, **{name: mx.zeros((7,))}))


def test_a_quantized_copy_keeps_its_layout(tmp_path: Path) -> None:
    drafter = tiny_drafter()
    quantization = quantize(drafter, backbone_bits(4))
    save(drafter, {**SPECULATORS, "quantization": quantization}, tmp_path)
    assert mx.array_equal(logits_of(load_drafter(tmp_path)), logits_of(drafter))


def test_a_copy_made_at_load_keeps_the_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH2_MLX_CACHE", str(tmp_path / "cache"))
    folder = stored(tmp_path, **{"embed_tokens.weight": mx.zeros((VOCAB, HIDDEN))})
    drafter = drafter_in_precision(folder, 4, this_chip())
    assert drafter.fc.bits == 4
    assert [note.partition(" (")[0] for note in drafter.notes] == [
        "drafter: ignored 1 tensor that the target has itself"
    ]


def test_converting_changes_nothing_that_was_given() -> None:
    before = json.dumps(SPECULATORS)
    convert_config(SPECULATORS)
    assert json.dumps(SPECULATORS) == before
