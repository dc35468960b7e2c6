"""Which numbers a pair computes with, for chips we do not have and one we do."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from test_config import logits_of, stored
from tiny import CPU, LLAMA, M4, build_model, tiny_drafter

from dflash2_mlx import precision
from dflash2_mlx.chip import Chip, chip_of
from dflash2_mlx.drafters import drafter_in_precision, quantized_copy
from dflash2_mlx.errors import InvalidRequest
from dflash2_mlx.models.drafter import load_drafter
from dflash2_mlx.precision import (
    choose_drafter_bits,
    float32_bytes,
    set_drafter_precision,
    set_target_precision,
)

BIG, SMALL = 1_924_404_480, 22_800_000


@pytest.mark.parametrize(
    ("architecture", "generation", "activations"),
    [
        ("applegpu_g13g", 13, mx.float32),  # M1
        ("applegpu_g13d", 13, mx.float32),  # M1 Ultra
        ("applegpu_g14s", 14, mx.float32),  # M2 Pro
        ("applegpu_g15s", 15, mx.bfloat16),  # M3
        ("applegpu_g16g", 16, mx.bfloat16),  # M4
        ("applegpu_g17s", 17, mx.bfloat16),  # M5
        ("sm_90", None, mx.bfloat16),
    ],
)
def test_activations_follow_the_generation(architecture, generation, activations) -> None:
    chip = chip_of({"architecture": architecture}, on_cpu=False)
    assert (chip.generation, chip.activations) == (generation, activations)


def test_a_chip_that_says_nothing_is_no_fault() -> None:
    assert chip_of({}, on_cpu=False) == Chip(False, "unknown", None)
    assert chip_of({}, on_cpu=True).activations == mx.float32


@pytest.mark.parametrize(
    ("wanted", "stored_bits", "num_params", "chip", "chosen"),
    [
        (None, 16, BIG, M4, 4),
        (None, 16, SMALL, M4, 16),
        (None, 8, BIG, M4, 8),
        (None, 16, BIG, CPU, 16),
        (8, 16, BIG, M4, 8),
        (16, 16, BIG, M4, 16),
        (16, 32, SMALL, CPU, 32),
        (4, 4, SMALL, CPU, 4),
    ],
)
def test_bits_follow_size_and_chip(wanted, stored_bits, num_params, chip, chosen) -> None:
    assert choose_drafter_bits(wanted, stored_bits, num_params, chip) == chosen


def test_bits_that_cannot_be_had_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="drafter bits are 5, expected 4, 8 or 16"):
        choose_drafter_bits(5, 16, BIG, M4)
    with pytest.raises(InvalidRequest, match="are 8, but this drafter is stored in 4 bits"):
        choose_drafter_bits(8, 4, BIG, M4)


@pytest.mark.parametrize("chip", [CPU, M4, Chip(False, "applegpu_g13g", 13)])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_no_drafter_computes_in_float16(chip: Chip, dtype: mx.Dtype) -> None:
    drafter = tiny_drafter()
    drafter.set_dtype(dtype)
    set_drafter_precision(drafter, chip, keep_bits=False)
    assert drafter.dtype == chip.activations
    assert logits_of(drafter).dtype == mx.float32


def test_a_quantized_copy_is_made_once_and_says_from_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH2_MLX_CACHE", str(tmp_path / "cache"))
    source = stored(tmp_path / "drafter")
    copy = quantized_copy(source, load_drafter(source), 4)
    made = (copy / "model.safetensors").stat().st_mtime_ns
    config = json.loads((copy / "config.json").read_text())
    assert config["provenance"]["folder"] == str(source)
    assert config["provenance"]["bits"] == config["quantization"]["bits"] == 4
    drafter = drafter_in_precision(source, 4, CPU)
    assert drafter.fc.bits == 4
    assert (copy / "model.safetensors").stat().st_mtime_ns == made
    stored(source, **{"norm.weight": mx.zeros((64,))})  # another version of the drafter ...
    assert quantized_copy(source, load_drafter(source), 4) != copy  # ... gets another copy


def test_a_stored_drafter_is_not_touched(tmp_path: Path) -> None:
    source = stored(tmp_path / "drafter")
    assert drafter_in_precision(source, None, CPU).fc.weight.dtype == mx.float32
    assert [file.name for file in sorted(source.iterdir())] == ["config.json", "model.safetensors"]


def test_a_target_is_dequantized_on_a_cpu_and_says_so() -> None:
    model = build_model("llama", LLAMA)
    exact = model(mx.arange(9)[None])
    nn.quantize(model, group_size=32, bits=8)
    quantized = model(mx.arange(9)[None])
    assert "dequantized to float32" in str(set_target_precision(model, "auto", CPU))
    assert not [name for name, module in model.named_modules() if hasattr(module, "bits")]
    assert mx.allclose(model(mx.arange(9)[None]), quantized, atol=1e-3)
    assert mx.abs(model(mx.arange(9)[None]) - exact).max() < mx.abs(exact).max() / 4


def test_a_target_stays_as_stored_where_that_is_wanted_or_faster() -> None:
    for choice, chip in (("stored", CPU), ("auto", M4)):
        model = build_model("llama", LLAMA)
        nn.quantize(model, group_size=32, bits=4)
        assert set_target_precision(model, choice, chip) is None
        assert model.layers[0].mlp.up_proj.bits == 4


def test_a_target_too_large_for_float32_stays_and_says_so(monkeypatch) -> None:
    model = build_model("llama", LLAMA)
    nn.quantize(model, group_size=32, bits=4)
    monkeypatch.setattr(precision, "free_memory", lambda: float32_bytes(model))
    note = set_target_precision(model, "auto", CPU)
    assert note is not None
    assert note.startswith("target stays as stored")
    assert model.layers[0].mlp.up_proj.bits == 4


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="dtype is 'int8', expected one of auto, stored"):
        set_target_precision(build_model("llama", LLAMA), "int8", CPU)
