"""A pair holds one copy of the target, and a drafter's context as large as its window."""

import gc

import mlx.core as mx
from families import build
from tiny import tiny_drafter

from dflash2_mlx.models.cache import STEP
from dflash2_mlx.pair import join
from dflash2_mlx.target import parameters

WINDOW, CHUNK, CONTEXT = 256, 2048, 131_072
SLACK = 64 * 1024  # bytes


def active_bytes() -> int:
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


def test_a_drafter_adds_its_own_weights_and_nothing_else() -> None:
    """Not a second target (jundot/omlx#784)."""
    before = active_bytes()
    model = build("qwen3_5")
    with_target = active_bytes()
    assert with_target - before > 10 * SLACK
    drafter = tiny_drafter()
    target = join(model, drafter)
    assert active_bytes() - with_target < nbytes(drafter) + SLACK
    assert target.embedding is dict(model.named_modules())["language_model.model.embed_tokens"]
    assert parameters(drafter).keys().isdisjoint({"embed", "head", "embed.weight", "head.weight"})


def nbytes(module) -> int:
    return sum(array.nbytes for array in parameters(module).values())


def test_a_drafters_context_is_bounded_by_its_window() -> None:
    """Not sized for the target's context (Anbeeld/beellama.cpp#97)."""
    drafter = tiny_drafter(sliding_window=WINDOW).bind(mx.zeros_like, mx.zeros_like)
    context = drafter.make_context()
    num_taps = len(drafter.config.target_layer_ids)
    taps = mx.zeros((1, CHUNK, num_taps * drafter.config.hidden_size))
    for _ in range(CONTEXT // CHUNK):
        drafter.extend(context, taps)
        mx.eval([cache.state for cache in context])
    config = drafter.config
    row = 2 * config.num_key_value_heads * config.head_dim * mx.float32.size
    most = config.num_hidden_layers * row * (2 * WINDOW + STEP + context[0].reserve)
    assert {cache.offset for cache in context} == {CONTEXT}
    assert 0 < sum(cache.nbytes for cache in context) <= most
