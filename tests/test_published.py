"""Published drafters as their config.json describes them: read, built without memory, counted.

Where a source of the values is silent (positions and eps of DFlash 1), they are the target's own.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from dflash2_mlx.catalogue import load_catalogue
from dflash2_mlx.models.config import DrafterConfig
from dflash2_mlx.models.drafter import Drafter
from dflash2_mlx.models.speculators import published

CONFIGS = Path(__file__).parent / "configs"
SPECULATORS = "mgoin--Qwen3-4B-speculator.dflash2"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))
MEGABYTE = 1_000_000


def config(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text("utf-8"))
    return content


def shapes(content: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The parameters of the drafter, which is built but never evaluated."""
    drafter = Drafter(DrafterConfig.from_dict(published(content)))
    return {name: array.shape for name, array in tree_flatten(drafter.parameters())}


def count(content: dict[str, Any]) -> int:
    built = Drafter(DrafterConfig.from_dict(published(content)))
    return sum(array.size for _, array in tree_flatten(built.parameters()))


@pytest.mark.parametrize("name", NAMES)
def test_building_a_published_drafter_takes_no_memory(name: str) -> None:
    before = mx.get_active_memory()
    built = Drafter(DrafterConfig.from_dict(published(config(name))))
    assert mx.get_active_memory() - before < MEGABYTE
    assert len(built.layers) == 5


@pytest.mark.parametrize(
    ("name", "num_parameters", "num_tensors"),
    [
        ("z-lab--Qwen3.8-27B-DFlash2", 1_924_404_480, 81),
        ("z-lab--Muse-Glimmer-30B-DFlash2", 2_772_159_744, 81),
        ("incoai--GLM-5.3-Flash-DFlash2", 1_171_080_448, 81),
    ],
)
def test_the_counts_are_the_published_ones(
    name: str, num_parameters: int, num_tensors: int
) -> None:
    assert count(config(name)) == num_parameters
    assert len(shapes(config(name))) == num_tensors


def test_a_speculators_checkpoint_has_the_published_count() -> None:
    """Sizes and counts as on the pages of RedHatAI's 8B and rasyosef's 2B drafter."""
    of_8b = {"hidden_size": 4096, "intermediate_size": 12288}
    of_2b = {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 248320,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    }
    for sizes, num_taps, expected in ((of_8b, 5, 1_169_573_120), (of_2b, 6, 354_243_584)):
        content = config(SPECULATORS)
        content["transformer_layer_config"] |= sizes
        content["draft_vocab_size"] = content["transformer_layer_config"]["vocab_size"]
        content["aux_hidden_state_layer_ids"] = list(range(1, 1 + num_taps))
        assert count(content) == expected


@pytest.mark.parametrize(
    ("name", "width", "projected"),
    [
        ("z-lab--Qwen3.8-27B-DFlash2", 5120, 1280),
        ("z-lab--Muse-Glimmer-30B-DFlash2", 6656, 1664),
        ("incoai--GLM-5.3-Flash-DFlash2", 4096, 1024),
        (SPECULATORS, 2560, 640),
    ],
)
def test_tensors_have_the_published_shapes(name: str, width: int, projected: int) -> None:
    found = shapes(config(name))
    assert found["fc.weight"] == (width, 5 * width)
    for conv in ("attention_conv", "mlp_conv"):
        assert found[f"layers.4.{conv}.kernel_projection.weight"] == (projected, width)
        assert found[f"layers.4.{conv}.base_kernel"] == (2, 2, width)
    assert found["candidate_selector.hidden_projection.weight"] == (256, width)
    assert found["layers.0.self_attn.q_proj.weight"] == (4096, width)
    assert found["layers.0.self_attn.k_proj.weight"] == (1024, width)
    assert found["layers.0.self_attn.q_norm.weight"] == (128,)


@pytest.mark.parametrize("name", [name for name in NAMES if "dflash2" not in name.lower()])
def test_dflash1_has_eleven_tensors_a_layer_and_three_more(name: str) -> None:
    found = shapes(config(name))
    width = config(name)["hidden_size"]
    assert len(found) == 3 + 5 * 11
    assert found["fc.weight"] == (width, 5 * width)


@pytest.mark.parametrize(
    ("name", "block", "mask", "theta", "rows"),
    [
        ("z-lab--Qwen3.8-27B-DFlash2", 8, 248070, 1e7, 2047),
        ("z-lab--Muse-Glimmer-30B-DFlash2", 16, 201818, 5e5, 2047),
        ("incoai--GLM-5.3-Flash-DFlash2", 8, 154856, 1e4, 2047),
        ("z-lab--Qwen3-4B-DFlash-b16", 16, 151669, 1e6, None),
        ("z-lab--Qwen3.5-4B-DFlash", 16, 248070, 1e7, None),
        ("z-lab--Qwen3.6-27B-DFlash", 16, 248070, 1e7, None),
        ("SpecForge--Qwen2.5-0.5B", 16, 151669, 1e6, None),
        (SPECULATORS, 8, 151669, 1e6, 2047),
    ],
)
def test_values_are_read_at_the_level_they_are_kept(
    name: str, block: int, mask: int, theta: float, rows: int | None
) -> None:
    read = DrafterConfig.from_dict(published(config(name)))
    assert (read.block_size, read.mask_token_id, read.rope["rope_theta"]) == (block, mask, theta)
    assert read.context_rows == rows


def test_muse_scales_and_caps_its_logits() -> None:
    muse = DrafterConfig.from_dict(config("z-lab--Muse-Glimmer-30B-DFlash2"))
    assert (muse.output_multiplier, muse.final_logit_softcapping) == (0.19611613513818404, 20.0)
    qwen = DrafterConfig.from_dict(config("z-lab--Qwen3.8-27B-DFlash2"))
    assert (qwen.output_multiplier, qwen.final_logit_softcapping) == (1.0, None)


@pytest.mark.parametrize("name", NAMES)
def test_the_catalogue_says_what_the_config_says(name: str) -> None:
    read = DrafterConfig.from_dict(published(config(name)))
    of_name = [e for e in load_catalogue().values() if e.drafter.replace("/", "--") == name]
    assert of_name or name.startswith("SpecForge")
    for entry in of_name:
        assert entry.taps == read.target_layer_ids
        assert entry.block == read.block_size
        assert entry.window == (read.sliding_window or None)
        assert entry.kind == ("DFlash 2" if read.selector_rank else "DFlash 1")
