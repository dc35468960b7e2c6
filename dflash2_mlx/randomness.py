"""Random numbers that depend on a request's seed and a token's position, and on nothing else."""

import hashlib
from enum import IntEnum

import mlx.core as mx

Position = int | mx.array  # an array `[]` where only the device knows it


class Purpose(IntEnum):
    """What a number at a position is for; numbers for different purposes are independent."""

    DRAFT = 0
    ACCEPT = 1
    EMIT = 2


class Randomness:
    """Numbers for one request: a pure function of seed (any integer), position and purpose.

    They do not depend on MLX's global state, on other requests or on how many passes were made.
    `words` are 64 random bits, `[2]` uint32.
    """

    def __init__(self, words: mx.array) -> None:
        self._words = words

    @classmethod
    def from_seed(cls, seed: int) -> "Randomness":
        """Hashes the seed, so that near seeds have nothing in common."""
        digest = hashlib.blake2b(str(seed).encode(), digest_size=8).digest()
        words = [int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")]
        return cls(mx.array(words, dtype=mx.uint32))

    def uniforms(self, position: Position, count: int, purpose: Purpose) -> mx.array:
        """One number in [0, 1) for each of `count` positions: `[count]` float32."""
        keys = self._keys(position + mx.arange(count), purpose)
        return mx.vmap(lambda key: mx.random.uniform(key=key))(keys)

    def gumbels(self, position: Position, count: int, size: int, purpose: Purpose) -> mx.array:
        """Standard Gumbel numbers `[count, size]` float32, a row for each position."""
        keys = self._keys(position + mx.arange(count), purpose)
        return mx.vmap(lambda key: mx.random.gumbel((size,), key=key))(keys)

    def gumbel_at(self, position: mx.array, size: int, purpose: Purpose) -> mx.array:
        """Standard Gumbel numbers `[size]` for a position `[]`."""
        return mx.random.gumbel((size,), key=self._keys(position, purpose))

    def _keys(self, positions: mx.array, purpose: Purpose) -> mx.array:
        counter = positions.astype(mx.uint32) * len(Purpose) + int(purpose)
        first = mx.broadcast_to(self._words[0], counter.shape)
        return mx.stack([first, counter + self._words[1]], axis=-1)
