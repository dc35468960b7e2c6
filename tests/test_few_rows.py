"""On an AMD CPU few rows are multiplied from the left, with the same results up to rounding."""

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import pytest
from tiny import AMD, CPU, LLAMA, M4, build_model

from dflash2_mlx.chip import Chip
from dflash2_mlx.models.few_rows import (
    FEW,
    FewRowsEmbedding,
    FewRowsLinear,
    speed_up_few_rows,
)

KINDS = {FewRowsLinear, FewRowsEmbedding}


def kinds(model: nn.Module) -> set[type]:
    return {type(module) for _, module in model.named_modules()}


@pytest.mark.parametrize("num_rows", [1, 2, *FEW, FEW.stop, 64])
@pytest.mark.parametrize("bias", [False, True])
def test_results_are_the_same(num_rows: int, bias: bool) -> None:
    layer, embedding = nn.Linear(32, 96, bias=bias), nn.Embedding(96, 32)
    rows = mx.random.normal((1, num_rows, 32), key=mx.random.key(1))
    expected = layer(rows), embedding.as_linear(rows), embedding(mx.array([3, 5]))
    mx.eval(expected)
    for module in (layer, embedding):
        speed_up_few_rows(module, AMD)
    assert (type(layer), type(embedding)) == (FewRowsLinear, FewRowsEmbedding)
    found = layer(rows), embedding.as_linear(rows), embedding(mx.array([3, 5]))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert mx.allclose(ours, theirs, atol=1e-5)


def test_a_whole_model_is_reached_and_keeps_its_parameters() -> None:
    model = build_model("llama", LLAMA)
    model.set_dtype(mx.float32)
    tokens = mx.array([[1, 2, 3, 4]])
    expected, names = model(tokens), model.parameters().keys()
    mx.eval(expected)
    speed_up_few_rows(model, AMD)
    assert kinds(model) >= KINDS
    assert not {nn.Linear, nn.Embedding} & kinds(model)
    assert model.parameters().keys() == names
    assert mx.allclose(model(tokens), expected, atol=1e-5)


@pytest.mark.parametrize("chip", [M4, CPU, replace(AMD, name="Intel(R) Xeon(R) Processor")])
def test_other_chips_multiply_as_ever(chip: Chip) -> None:
    model = build_model("llama", LLAMA)
    model.set_dtype(mx.float32)
    speed_up_few_rows(model, chip)
    assert not KINDS & kinds(model)


def test_only_float32_is_changed() -> None:
    model = build_model("llama", LLAMA)
    model.set_dtype(mx.bfloat16)
    speed_up_few_rows(model, AMD)
    assert not KINDS & kinds(model)
    model.set_dtype(mx.float32)
    nn.quantize(model, group_size=32, bits=4)
    speed_up_few_rows(model, AMD)
    assert nn.QuantizedLinear in kinds(model)
    assert not KINDS & kinds(model)
