"""The states of a conversation, taken apart for keeping and put together again.

Attention without a window leaves rows behind, chunk by chunk, and states at several positions share
them. Windows, recurrent layers and foreign caches serve at one position only: together they are a
*point*. All that is kept is a copy: a running answer writes to arrays of its own.
"""

import copy
from collections.abc import Iterable, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache

from dflash2_mlx.models.cache import KVCache

Rows = list[tuple[mx.array, ...]]  # one entry for each cache without a window
Point = list[Any]  # one entry for each of the others


def rows_between(caches: Iterable[Any], start: int, end: int) -> Rows:
    """Copies, not evaluated, of the rows of tokens `start .. end-1`."""
    return [cache.cut(start, end) for cache in caches if _keeps_all(cache)]


def point_of(caches: Iterable[Any]) -> Point:
    """Copies, not evaluated, of what all other caches hold now."""
    return [_held(cache) for cache in caches if not _keeps_all(cache)]


def put_together(
    caches: Iterable[Any], chunks: Sequence[Rows], point: Point, num_tokens: int
) -> None:
    """Fill empty caches with the state behind `num_tokens` tokens."""
    by_cache, others = iter(zip(*chunks, strict=True)), iter(point)
    for cache in caches:
        if _keeps_all(cache):
            rows = [mx.concatenate(list(cut), axis=2) for cut in zip(*next(by_cache), strict=True)]
            cache.adopt(tuple(rows), 0, num_tokens, 0)
        else:
            _hold(cache, next(others))


def arrays_in(kept: Rows | Point | None) -> list[mx.array]:
    """All arrays of rows or of a point."""
    leaves = cast(list[tuple[str, Any]], tree_flatten(kept or []))
    return [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]


def nbytes(kept: Rows | Point | None) -> int:
    """Bytes of rows or of a point."""
    return sum(array.nbytes for array in arrays_in(kept))


def _keeps_all(cache: Any) -> bool:
    return isinstance(cache, KVCache) and cache.window is None


def _held(cache: Any) -> Any:
    if isinstance(cache, KVCache):
        first = cache.first_visible
        return (cache.cut(first, cache.high), first, cache.high, cache.origin)
    if isinstance(cache, ArraysCache):
        return [None if array is None else mx.contiguous(array) for array in cache.cache]
    return copy.deepcopy(vars(cache))


def _hold(cache: Any, held: Any) -> None:
    if isinstance(cache, KVCache):
        cache.adopt(*held)
    elif isinstance(cache, ArraysCache):
        cache.cache = list(held)
    else:
        vars(cache).update(copy.deepcopy(held))
