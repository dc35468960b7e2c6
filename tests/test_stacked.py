"""Layers put into one product give what they give alone, and are held once."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from tiny import HIDDEN, VOCAB, tiny_drafter

from dflash2_mlx.models.selector import TILE, best
from dflash2_mlx.models.stacked import stacked

ROWS = mx.random.normal((5, 64), key=mx.random.key(1))
PRECISIONS = {
    "plain": [None] * 3,
    "quantized": [4] * 3,
    "mixed bits": [4, 8, 4],
    "partly quantized": [4, None, None],
}


def linear(outputs: int, bits: int | None) -> nn.Module:
    layer = nn.Linear(64, outputs, bias=False)
    return layer if bits is None else nn.QuantizedLinear.from_linear(layer, bits=bits)


@pytest.mark.parametrize("bits", PRECISIONS.values(), ids=PRECISIONS)
def test_stacked_layers_give_what_they_give_alone(bits: list[int | None]) -> None:
    layers = [linear(size, b) for size, b in zip((96, 32, 32), bits, strict=True)]
    alone = mx.concatenate([layer(ROWS) for layer in layers], axis=-1)
    mx.eval(alone)
    whole = stacked(layers)
    assert mx.allclose(whole(ROWS), alone, atol=1e-5)
    again = mx.concatenate([layer(ROWS) for layer in layers], axis=-1)
    assert mx.array_equal(again, alone)


def test_stacking_holds_no_weight_twice() -> None:
    layers = [linear(4096, None) for _ in range(3)]
    mx.eval([layer.parameters() for layer in layers])
    before = mx.get_active_memory()
    whole = stacked(layers)
    mx.clear_cache()
    assert mx.get_active_memory() <= before + 4096
    assert whole(ROWS).shape == (5, 3 * 4096)


def test_a_bound_drafter_that_is_cast_computes_in_the_new_dtype() -> None:
    table = mx.random.normal((VOCAB, HIDDEN), key=mx.random.key(3))
    drafter = tiny_drafter()
    drafter.set_dtype(mx.bfloat16)
    drafter.bind(lambda ids: table[ids], lambda hidden: hidden @ table.T)
    taps = mx.random.normal((1, 6, 2 * HIDDEN), key=mx.random.key(4))
    first = drafter.hidden(drafter.make_context(), taps, mx.array([5]), 4)
    drafter.set_dtype(mx.float32)
    context = drafter.make_context()
    second = drafter.hidden(context, taps, mx.array([5]), 4)
    assert (first.dtype, second.dtype) == (mx.bfloat16, mx.float32)
    assert {array.dtype for cache in context for array in cache.state} == {mx.float32}


@pytest.mark.parametrize("vocab_size", [TILE * 16, TILE * 17, TILE * 40, TILE * 40 + 1, 100])
@pytest.mark.parametrize("top_k", [1, 4, 16])
def test_the_best_of_a_row_are_found_by_tiles(vocab_size: int, top_k: int) -> None:
    logits = mx.random.normal((7, vocab_size), key=mx.random.key(vocab_size))
    # Neighbours, so that one tile holds several of the best.
    logits = logits + 5 * mx.cos(mx.arange(vocab_size) / 9)
    ids, values = best(logits, top_k)
    expected = mx.sort(mx.argsort(logits, axis=-1)[:, -top_k:], axis=-1)
    assert mx.array_equal(mx.sort(ids, axis=-1), expected.astype(ids.dtype))
    assert mx.array_equal(values, mx.take_along_axis(logits, ids, axis=-1))
