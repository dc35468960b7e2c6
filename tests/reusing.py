"""Pairs whose states are of every kind, and prompts read warm and cold."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import mlx.nn as nn
from families import build
from tiny import pair_of, tiny_drafter, tiny_pair

from dflash2_mlx import generate
from dflash2_mlx.borders import Marks
from dflash2_mlx.generation import Result
from dflash2_mlx.pair import Pair, join
from dflash2_mlx.prefix_cache import PrefixCache
from dflash2_mlx.target import Target

STEP = 16
PLENTY = 10**9
# Rows only; rows and windows; rows and recurrent state; windows whose masks cannot be rewound.
KINDS = ("dense", "grouped sliding", "qwen3_5", "lfm2")


@cache
def model_of(kind: str) -> nn.Module:
    model = build(kind)
    mx.eval(model.parameters())  # on this thread, whoever computes with it
    return model


def pair_for(kind: str, drafting: bool = True, budget: int | None = PLENTY) -> Pair:
    """A tiny pair of one of `KINDS` with a prefix cache, chunks of `STEP` tokens."""
    if kind in ("dense", "grouped sliding"):
        pair = tiny_pair(kind)
        if not drafting:
            pair = pair_of(Target(pair.target.model))
    elif drafting:
        drafter = tiny_drafter(num_target_layers=len(model_of(kind).layers))
        pair = pair_of(join(model_of(kind), drafter), drafter)
    else:
        pair = pair_of(Target(model_of(kind)))
    pair.end_tokens = frozenset()
    pair.prefill_step = STEP
    pair.prefix_cache = PrefixCache(budget) if budget else None
    return pair


@dataclass(frozen=True)
class Turn:
    """A prompt and where its chunks end."""

    ids: tuple[int, ...]
    marks: Marks


def run(pair: Pair, turn: Turn, num_tokens: int = 12, block: int = 4) -> Result:
    """An answer to a turn."""
    return generate(pair, turn.ids, max_tokens=num_tokens, block_size=block, marks=turn.marks)


def cold(kind: str, turn: Turn, drafting: bool = True, num_tokens: int = 12) -> Result:
    """The same from a pair that has seen nothing, and keeps nothing."""
    return run(pair_for(kind, drafting, budget=None), turn, num_tokens)


def same(warm: Result, fresh: Result) -> bool:
    """Whether two answers agree in ids and in what each pass accepted."""
    return (warm.token_ids, warm.accepted) == (fresh.token_ids, fresh.accepted)


def text(seed: int, length: int) -> tuple[int, ...]:
    """Random token ids."""
    return tuple(random.Random(seed).choices(range(250), k=length))


def chat(*parts: Sequence[int]) -> Turn:
    """System text, then questions and answers in turns; a chunk ends behind each part."""
    ids: tuple[int, ...] = ()
    ends = []
    for part in parts:
        ids += tuple(part)
        ends.append(len(ids))
    return Turn((*ids, 255), Marks(tuple(ends), stem=ends[0]))
