"""Keys and values of one attention layer, for any window, that can always be put back.

mlx-lm's rotating cache cannot be trimmed once it is full. This one keeps its rows in the order of
their positions, drops old ones in bulk, and so rewinds, sliding or not, by plain arithmetic. How
many rows count may be known to the device only: then a pass can follow one that was not read yet.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from dflash2_mlx.errors import RewindFailed

STEP = 256


class Snapshot(NamedTuple):
    """What `KVCache.snapshot` remembers: references, since arrays are never changed in place."""

    keys: mx.array | None
    values: mx.array | None
    start: int
    offset: int
    origin: int


class KVCache:
    """Keys and values `[B, heads, rows, head_dim]` of tokens `start .. offset-1`, mlx-lm's verbs.

    With a `window` (a token sees itself and the `window - 1` before it) the rows stay below
    `window + reserve + STEP` plus one append; `reserve` is how far a full window can be rewound.
    `offset` is the position the next token takes: a number, or an array `[]` that the host has not
    read, between `low` and `high`.
    """

    def __init__(self, window: int | None = None, reserve: int = 64) -> None:
        self.window = window
        self.reserve = reserve
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.start = 0  # the position in row 0
        self.offset: int | mx.array = 0
        self.low = self.high = 0
        self.origin = 0  # tokens before it were never stored
        self.is_overreached = False  # a mask was asked for that is wider than the window
        self.is_shared = False  # layers read it that may take positions from how many rows it has
        self._fetched_from = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append rows, return all rows that the first of them can see, in order of position."""
        self._append([keys, values])
        return self._visible(self._fetched_from)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What the last append returned, for layers that share the keys of an earlier one."""
        self.is_shared = True
        return self._visible(self._fetched_from)

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """The causal mask for the next `N` tokens over the rows `update_and_fetch` will return."""
        window = window_size or self.window
        if self.window and window_size and window_size > self.window:
            self.is_overreached = True
        if not isinstance(self.offset, int):
            key = mx.arange(self.first_visible, self.high + N)
            query = (self.offset + mx.arange(N))[:, None]
            visible = key <= query
            return visible if window is None else visible & (query - key < window)
        num_before = self.offset - self.first_visible
        if window is not None and num_before + N > window:
            return create_causal_mask(N, num_before, window_size=window)
        if N == 1:
            return None
        return create_causal_mask(N, num_before) if return_array else "causal"

    def skip(self, num_tokens: int) -> None:
        """Drop all rows and move on by tokens that will never be looked at."""
        self.keys = self.values = None
        self._move(num_tokens)
        self.start = self.origin = self.high

    def is_trimmable(self) -> bool:
        """Always: that is what this class is for."""
        return True

    def trim(self, n: int) -> int:
        """Forget the last `n` tokens; raises `RewindFailed` when older rows are needed but gone."""
        self._check_rows(self.low - n, self.high - n)
        self._move(-n)
        return n

    def rewind_to(self, offset: int | mx.array, low: int | None = None, high: int = 0) -> None:
        """Forget the tokens from position `offset` on; an array `[]` lies between `low` and `high`.

        Raises `RewindFailed` when older rows are needed but gone.
        """
        if isinstance(offset, int):
            low = high = offset
        assert low is not None
        self._check_rows(low, high)
        self.offset, self.low, self.high = offset, low, high

    def _check_rows(self, low: int, high: int) -> None:
        needed = max(self.origin, low - self.window + 1) if self.window else self.origin
        if high > self.high or low < self.origin or self.start > needed:
            raise RewindFailed(
                f"cannot rewind {self.high - low} of {self.high} tokens: rows from position "
                f"{needed} on are needed, {self.start} on are kept"
            )

    def _move(self, num_tokens: int) -> None:
        self.offset = self.offset + num_tokens
        self.low, self.high = self.low + num_tokens, self.high + num_tokens

    def snapshot(self) -> Snapshot:
        """The present rows, free of cost; a later write copies instead of changing them."""
        assert isinstance(self.offset, int)
        return Snapshot(self.keys, self.values, self.start, self.offset, self.origin)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot, also one further away than `trim` reaches."""
        self.keys, self.values, self.start, self.offset, self.origin = snapshot
        self.low = self.high = snapshot.offset

    def cut(self, start: int, end: int) -> tuple[mx.array, ...]:
        """Copies, not evaluated, of the keys and values of tokens `start .. end-1`."""
        rows = slice(start - self.start, end - self.start)
        return tuple(mx.contiguous(array[..., rows, :]) for array in self.state)

    def adopt(self, rows: tuple[mx.array, ...], start: int, offset: int, origin: int) -> None:
        """Hold the rows of tokens `start .. offset-1`, as `cut` gave them; the cache was empty."""
        self.keys, self.values = rows or (None, None)
        self.start, self.offset, self.origin = start, offset, origin
        self.low = self.high = offset

    @property
    def first_visible(self) -> int:
        """The oldest token that the next one sees."""
        return self.start if self.window is None else max(self.start, self.low - self.window + 1)

    @property
    def state(self) -> list[mx.array]:
        """The arrays to evaluate."""
        return [] if self.keys is None or self.values is None else [self.keys, self.values]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(array.nbytes for array in self.state)

    def rows(self) -> tuple[mx.array, mx.array]:
        """The rows a next token would see, for comparing two caches."""
        return self._visible(self.first_visible)

    def size(self) -> int:
        """Rows in use."""
        return self.high - self.start

    def empty(self) -> bool:
        """Whether nothing was stored yet."""
        return self.keys is None

    def _visible(self, first: int) -> tuple[Any, Any]:
        """The rows of tokens from `first` on, of keys and of values."""
        rows = slice(first - self.start, self.high - self.start)
        keys, values = [array[:, :, rows] for array in self.state]
        return keys, values

    def _hold(self, arrays: Sequence[mx.array]) -> None:
        """Take over the arrays of `state`."""
        self.keys, self.values = arrays

    def _append(self, new: Sequence[mx.array]) -> None:
        """Write rows `[B, heads, L, ..]` behind those of `state`, one array for each."""
        held = self._with_room(new)
        # Not by item assignment, which would change the array that a snapshot refers to.
        offset = self.offset - self.start
        at = mx.array([offset]) if isinstance(offset, int) else offset.reshape(1)
        pairs = zip(held, new, strict=True)
        self._hold([mx.slice_update(old, rows, at, axes=(2,)) for old, rows in pairs])
        self._fetched_from = self.first_visible
        self._move(new[0].shape[2])

    def _with_room(self, new: Sequence[mx.array]) -> Sequence[mx.array]:
        """What is held, with room behind it for the new rows."""
        num_new, used, held = new[0].shape[2], self.high - self.start, self.state
        if held and used + num_new <= held[0].shape[2]:
            return held
        keep = used if self.window is None else min(used, self.window - 1 + self.reserve)
        spare = num_new + (STEP if self.window else max(STEP, used // 8))
        self.start = self.high - keep
        olds: Sequence[mx.array | None] = held or [None] * len(new)
        pairs = zip(olds, new, strict=True)
        return [_grown(old, used - keep, used, spare, like) for old, like in pairs]


def _grown(old: mx.array | None, first: int, last: int, spare: int, like: mx.array) -> mx.array:
    room = mx.zeros((*like.shape[:2], spare, like.shape[3]), dtype=like.dtype)
    return room if old is None else mx.concatenate([old[..., first:last, :], room], axis=2)


class ChunkedKVCache(KVCache):
    """The verbs of mlx-lm's chunked cache: tokens see back to the start of their chunk."""

    @property
    def start_position(self) -> int:
        """The position of the first row that the next append will return."""
        return self.first_visible

    def maybe_trim_front(self) -> None:
        """Nothing: old rows are dropped when room is made."""


def rewindable(cache: Any) -> KVCache | None:
    """Our cache in place of one of mlx-lm's attention caches; None for a kind we cannot rewind."""
    kind = type(cache).__name__
    if kind in ("KVCache", "ConcatenateKVCache"):
        return KVCache()
    if kind == "ChunkedKVCache":
        return ChunkedKVCache(window=cache.chunk_size)
    if kind == "RotatingKVCache" and cache.keep == 0:
        return KVCache(window=cache.max_size)
    return None


def leaves(caches: Iterable[Any]) -> Iterator[Any]:
    """All caches, those inside mlx-lm's CacheList included."""
    for cache in caches:
        yield from leaves(cache.caches) if hasattr(cache, "caches") else [cache]
