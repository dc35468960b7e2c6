"""Keys and values in 8 or 4 bits that can be put back, for long contexts in little memory.

Every row is quantized by itself, so a rewind loses nothing. mlx-lm's attention computes with what
this class hands out when a cache says how many `bits` it has.
"""

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx

from dflash2_mlx.models.cache import KVCache

Quantized = tuple[mx.array, ...]  # packed values, scales, biases
GROUP_SIZES = (64, 32)


class QuantizedKVCache(KVCache):
    """`KVCache` with rows of `bits` bits; `keys` and `values` are packed values, scales, biases.

    Raises `ValueError` at the first append for a head size that no group of values divides.
    """

    def __init__(self, bits: int, window: int | None = None, reserve: int = 64) -> None:
        super().__init__(window, reserve)
        self.bits = bits
        self.group_size = GROUP_SIZES[0]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Append rows, return all rows that the first of them can see, quantized."""
        self.group_size = _group_size(keys.shape[-1], values.shape[-1])
        self._append([*self._quantized(keys), *self._quantized(values)])
        return self._visible(self._fetched_from)

    def adopt(self, rows: tuple[mx.array, ...], start: int, offset: int, origin: int) -> None:
        """Hold the rows of tokens `start .. offset-1`, as `cut` gave them; the cache was empty."""
        super().adopt((), start, offset, origin)
        if rows:
            self._hold(rows)
            # Of a row, keys hold as many values as they have scales times what a scale is for.
            self.group_size = rows[0].shape[-1] * 32 // self.bits // rows[1].shape[-1]

    @property
    def state(self) -> list[mx.array]:
        """The arrays to evaluate."""
        held = cast(list[Quantized], [self.keys, self.values])
        return [] if self.keys is None else [array for kind in held for array in kind]

    def _visible(self, first: int) -> tuple[Quantized, Quantized]:
        rows = slice(first - self.start, self.high - self.start)
        cut = tuple(array[..., rows, :] for array in self.state)
        return cut[:3], cut[3:]

    def _hold(self, arrays: Sequence[mx.array]) -> None:
        self.keys, self.values = cast(Any, (tuple(arrays[:3]), tuple(arrays[3:])))

    def _quantized(self, rows: mx.array) -> Quantized:
        return tuple(mx.quantize(rows, group_size=self.group_size, bits=self.bits))


def quantized(cache: KVCache, bits: int) -> QuantizedKVCache:
    """A cache of `bits` bits in place of an empty one; raises `ValueError` where there is none."""
    if type(cache) is not KVCache:
        raise ValueError(f"there is no {type(cache).__name__} in {bits} bits")
    return QuantizedKVCache(bits, cache.window, cache.reserve)


def _group_size(*sizes: int) -> int:
    for group_size in GROUP_SIZES:
        if all(size % group_size == 0 for size in sizes):
            return group_size
    raise ValueError(f"heads of {' and '.join(map(str, sizes))} values are in no groups of 32")
