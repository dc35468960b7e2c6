"""A tiny random pair, real target and real drafter, whose every beginning is enumerated."""

import itertools
from collections.abc import Sequence
from functools import cache

import mlx.core as mx
from draws import World
from tiny import LLAMA, build_model, tiny_drafter

from dflash2_mlx.models.drafter import Drafter
from dflash2_mlx.models.selector import Trellis
from dflash2_mlx.pair import join
from dflash2_mlx.target import Target

VOCAB = 6
PROMPT = (1, 4, 2, 3)
DEPTH = 4  # rows further behind the prompt cannot matter to the first three tokens


def tiny_world() -> World:
    """The tiny pair: logits looked up behind every beginning, drafts by the drafter itself."""
    table = enumerated()

    def logits(history: Sequence[int], drafts: mx.array) -> mx.array:
        prefix = mx.array(history[len(PROMPT) :], dtype=mx.int32)
        return table[nodes(prefix, drafts.astype(mx.int32))]

    return World(VOCAB, PROMPT, logits, lambda history, rows: propose(tuple(history), rows))


@cache
def pair() -> tuple[Target, Drafter]:
    """Target and drafter with a vocabulary of 6, joined."""
    model = build_model("llama", {**LLAMA, "vocab_size": VOCAB}, seed=3)
    drafter = tiny_drafter(
        4, vocab_size=VOCAB, mask_token_id=VOCAB - 1, eos_token_id=0, selector_top_k=4
    )
    return join(model, drafter), drafter


@cache
def enumerated() -> mx.array:
    """Logits behind the prompt and all of its continuations of up to `DEPTH - 1` tokens.

    Level by level, in the order of `nodes`; the last row stands for everything deeper.
    """
    target, _ = pair()
    levels = []
    for depth in range(DEPTH):
        ends = list(itertools.product(range(VOCAB), repeat=depth))
        levels.append(target.model(mx.array([[*PROMPT, *end] for end in ends]))[:, -1])
    return mx.concatenate([*levels, mx.zeros((1, VOCAB))])


def nodes(prefix: mx.array, drafts: mx.array) -> mx.array:
    """Where `enumerated` has the rows behind a prefix and each of the drafts: `[T + 1]`."""
    deepest = sum(VOCAB**depth for depth in range(DEPTH))
    place = mx.zeros((), dtype=mx.int32)
    places = [place]
    for index in range(prefix.size + drafts.size):
        token = prefix[index] if index < prefix.size else drafts[index - prefix.size]
        # In base V without a zero digit: each level begins where the one before it ends.
        place = place * VOCAB + token + 1 if index + 1 < DEPTH else mx.array(deepest, mx.int32)
        places.append(place)
    return mx.stack(places[prefix.size :])


@cache
def propose(history: tuple[int, ...], num_rows: int) -> Trellis:
    """The drafter's trellis behind a history, from a context made anew."""
    target, drafter = pair()
    taps = target.read(mx.array(history[:-1]), target.make_caches()).taps
    anchor = mx.array(history[-1:], dtype=mx.uint32)
    return drafter.propose(drafter.make_context(), taps, anchor, num_rows + 1)
