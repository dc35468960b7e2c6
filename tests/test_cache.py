"""A cache shows exactly the rows a token may see, for any appends and rewinds."""

import random

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_cache
from mlx_lm.models.base import create_causal_mask

from dflash2_mlx.errors import RewindFailed
from dflash2_mlx.models.cache import STEP, KVCache, rewindable


def rows(start: int, count: int) -> mx.array:
    """Rows that hold their own position: `[1, 1, count, 1]`."""
    return mx.arange(start, start + count).astype(mx.float32)[None, None, :, None]


def append(cache: KVCache, count: int) -> list[int]:
    """Append `count` rows; the positions of all rows handed back."""
    new = rows(cache.offset, count)
    keys, values = cache.update_and_fetch(new, -new)
    assert mx.array_equal(keys, -values)
    return [int(position) for position in keys.flatten().tolist()]


@pytest.mark.parametrize("window", [None, 1, 7, 12])
@pytest.mark.parametrize("seed", range(6))
def test_any_appends_and_rewinds_leave_the_last_rows_in_order(
    window: int | None, seed: int
) -> None:
    choose, cache, length = random.Random(seed), KVCache(window), 0
    for _ in range(120):
        count = choose.choice([1, 1, 2, 5, 8, 40, 300])
        seen = append(cache, count)
        first = 0 if window is None else max(0, length - window + 1)
        assert seen == list(range(first, length + count))
        back = choose.randint(0, min(count, cache.reserve))
        assert cache.trim(back) == back
        length += count - back
        assert cache.offset == length


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("count", [2, 3, 30])
@pytest.mark.parametrize("before", [0, 4, 8, 9, 50])
def test_the_mask_fits_the_rows(window: int | None, count: int, before: int) -> None:
    cache = KVCache(window)
    if before:
        append(cache, before)
    mask = cache.make_mask(count, return_array=True)
    seen = append(cache, count)
    assert mask.shape == (count, len(seen))
    whole = create_causal_mask(count, before, window_size=window)[:, seen[0] :]
    assert mx.array_equal(mask, whole)


def test_no_mask_where_every_row_is_visible() -> None:
    cache = KVCache(window=9)
    append(cache, 30)
    assert cache.make_mask(1) is None
    assert cache.make_mask(1, return_array=True) is None  # as mlx-lm's, which models rely on
    assert KVCache().make_mask(4) == "causal"


@pytest.mark.parametrize("window", [None, 9])
def test_rows_can_be_fetched_again_by_layers_that_share_them(window: int | None) -> None:
    cache = KVCache(window)
    for count in (4, 1, 30, 1, 8):
        new = rows(cache.offset, count)
        appended = cache.update_and_fetch(new, new)
        assert all(map(mx.array_equal, cache.keys_and_values(), appended))


def test_a_mask_wider_than_the_window_is_noticed() -> None:
    cache = KVCache(window=9)
    cache.make_mask(2, window_size=9)
    assert not cache.is_overreached
    cache.make_mask(2, window_size=10)
    assert cache.is_overreached


@pytest.mark.parametrize("num_appends", [1, 3, 7])
def test_a_chunked_cache_starts_where_its_rows_do(num_appends: int) -> None:
    cache = rewindable(mlx_cache.ChunkedKVCache(chunk_size=9))
    for _ in range(num_appends):
        cache.maybe_trim_front()
        start = cache.start_position
        assert append(cache, 4)[0] == start


def test_a_window_bounds_the_memory() -> None:
    cache = KVCache(window=32)
    for _ in range(3000):
        append(cache, 3)
    assert cache.keys is not None
    assert cache.keys.shape[2] <= 32 + cache.reserve + STEP + 3


def test_a_rewind_past_dropped_rows_is_an_error_and_changes_nothing() -> None:
    cache = KVCache(window=8, reserve=4)
    for _ in range(3):
        append(cache, STEP)
    with pytest.raises(RewindFailed, match="cannot rewind 600 of 768 tokens"):
        cache.trim(600)
    assert cache.offset == 3 * STEP
    assert append(cache, 1)[-1] == 3 * STEP


def test_a_snapshot_survives_whatever_is_written_after_it() -> None:
    cache = KVCache(window=8)
    append(cache, 20)
    before = cache.snapshot()
    wrong = mx.full((1, 1, 5, 1), -99.0)
    cache.trim(3)
    for _ in range(100):
        cache.update_and_fetch(wrong, wrong)
    cache.restore(before)
    assert append(cache, 2) == list(range(13, 22))


def test_skipped_tokens_are_never_seen() -> None:
    cache = KVCache(window=100)
    cache.skip(50)
    assert append(cache, 4) == [50, 51, 52, 53]
    assert append(cache, 1) == [50, 51, 52, 53, 54]
    with pytest.raises(RewindFailed):
        cache.trim(6)
