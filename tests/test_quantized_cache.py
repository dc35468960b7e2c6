"""Keys and values in few bits rewind, draft and are reused like others, or are refused by name."""

import mlx.core as mx
import pytest
from families import build
from reusing import STEP, chat, pair_for, same, text
from reusing import run as answer
from tiny import pair_of, tiny_drafter

from dflash2_mlx.budget import sizes_of
from dflash2_mlx.errors import RewindFailed, UnsupportedField
from dflash2_mlx.models.cache import KVCache
from dflash2_mlx.models.quantized_cache import QuantizedKVCache
from dflash2_mlx.pair import Pair, join
from dflash2_mlx.prefix_cache import PrefixCache
from dflash2_mlx.target import Target

FAMILIES = ("llama", "qwen3_5", "qwen3")


def wide_pair(family: str, bits: int | None, *, drafting: bool = True) -> Pair:
    """A tiny pair with heads of 32 values."""
    model = build(family, head_dim=32)
    mx.eval(model.parameters())
    drafter = tiny_drafter(num_target_layers=len(model.layers))
    pair = pair_of(join(model, drafter), drafter) if drafting else pair_of(Target(model))
    pair.end_tokens, pair.prefill_step = frozenset(), STEP
    pair.prefix_cache = PrefixCache(10**9)
    if bits is not None:
        pair.target.quantize_states(bits)
    return pair


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_drafting_over_few_bits_gives_what_plain_decoding_gives(family: str, bits: int) -> None:
    """Also at a warm hit (K12)."""
    turn, longer = chat(text(1, 50), text(2, 30)), chat(text(1, 50), text(2, 30), text(3, 9))
    drafted, plain = (wide_pair(family, bits, drafting=d) for d in (True, False))
    for asked in (turn, turn, longer):
        one, other = answer(drafted, asked), answer(plain, asked)
        assert one.token_ids == other.token_ids
        assert one.cached_tokens == other.cached_tokens
        fresh = wide_pair(family, bits)
        fresh.prefix_cache = None
        assert same(one, answer(fresh, asked))


def test_few_bits_take_less_memory() -> None:
    sizes = {bits: sizes_of(wide_pair("llama", bits, drafting=False)) for bits in (None, 8, 4)}
    assert sizes[4].per_token < sizes[8].per_token < 0.5 * sizes[None].per_token


def test_states_in_other_bits_are_not_mixed() -> None:
    assert len({wide_pair("llama", bits).state_key for bits in (None, 8, 4)}) == 3


@pytest.mark.parametrize("window", [None, 12])
def test_rows_are_those_of_a_plain_cache_up_to_their_bits(window: int | None) -> None:
    ours, theirs = QuantizedKVCache(8, window), KVCache(window)
    for length, back in ((5, 2), (9, 0), (30, 4), (1, 1), (300, 7), (2, 0)):
        rows = mx.random.normal((1, 2, length, 64), key=mx.random.key(length))
        for cache in (ours, theirs):
            cache.update_and_fetch(rows, rows + 1)
            cache.trim(back)
    for packed, plain in zip(ours.rows(), theirs.rows(), strict=True):
        found = mx.dequantize(*packed, group_size=ours.group_size, bits=8)
        assert found.shape == plain.shape
        assert mx.abs(found - plain).max().item() < 0.05


def test_a_window_that_is_gone_cannot_be_rewound_into() -> None:
    cache = QuantizedKVCache(8, window=8)
    rows = mx.zeros((1, 1, 300, 64))
    for _ in range(3):
        cache.update_and_fetch(rows, rows)
    with pytest.raises(RewindFailed):
        cache.trim(700)


@pytest.mark.parametrize(
    ("pair", "bits", "reason"),
    [
        (lambda: pair_for("dense"), 8, "heads of 16 and 16 values are in no groups of 32"),
        (lambda: wide_pair("llama", None), 3, "keys and values come in 8 or 4 bits"),
        (lambda: pair_of(Target(build("mamba2"))), 8, "it keeps no keys and values"),
        (lambda: pair_of(Target(build("phi3small"))), 8, "its tokens see later ones in mlx-lm"),
        (lambda: pair_of(Target(build("deepseek_v3"))), 8, ""),
        (lambda: pair_of(Target(build("gpt_oss"))), 8, ""),
    ],
)
def test_where_it_cannot_work_it_is_refused_with_the_reason(
    pair: object, bits: int, reason: str
) -> None:
    with pytest.raises(UnsupportedField, match=f"do not work with .*: .*{reason}"):
        pair().target.quantize_states(bits)  # type: ignore[operator]
