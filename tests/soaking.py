"""A tiny pair that answers for as many passes as wanted, and what is held meanwhile."""

import gc
from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
from tiny import LLAMA, SLIDING, build_model, pair_of, tiny_drafter

from dflash2_mlx import Pair, SamplingParams, stream_generate
from dflash2_mlx.pair import join

PROMPT = list(12 * b"a text that goes on and on, ")  # longer than caches have room for at first
ENDLESS = 10**9  # tokens
SLACK = 4096  # bytes


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that MLX has in use and `mx.array` objects that Python can reach, after some passes."""

    passes: int
    nbytes: int
    arrays: int


def endless_pair() -> Pair:
    """All layers look back a window, so nothing has to grow with the text; nothing ends it."""
    model = build_model("llama", {**LLAMA, **SLIDING})
    for layer in model.layers:
        layer.use_sliding = True
    drafter = tiny_drafter(max_position_embeddings=ENDLESS)
    return pair_of(join(model, drafter), drafter, end_tokens=frozenset())


def soak(
    pair: Pair, passes: int, every: int, sampling: SamplingParams, block_size: int
) -> Iterator[Held]:
    """One answer of so many passes, looked at in regular distances."""
    steps = stream_generate(pair, PROMPT, sampling, max_tokens=ENDLESS, block_size=block_size)
    for number, _ in enumerate(steps, 1):
        if number % every == 0:
            yield held(number)
        if number == passes:
            steps.close()
            return


def held(passes: int) -> Held:
    """What is held now, the pass in flight being over."""
    mx.synchronize()
    gc.collect()
    arrays = sum(isinstance(one, mx.array) for one in gc.get_objects())
    return Held(passes, mx.get_active_memory(), arrays)


def grown(seen: list[Held]) -> Held:
    """By how much more was held at the end than before; the first quarter is warm-up.

    What is compared is the most that was held in the middle, and in the last three eighths.
    """
    rest = seen[len(seen) // 4 :]
    first, last = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    return Held(
        last[-1].passes,
        max(one.nbytes for one in last) - max(one.nbytes for one in first),
        max(one.arrays for one in last) - max(one.arrays for one in first),
    )


def is_flat(more: Held) -> bool:
    """Whether nothing grew; which small arrays are still in use is a matter of the moment."""
    return more.nbytes <= SLACK and more.arrays <= 0
