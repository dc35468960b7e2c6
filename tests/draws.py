"""Drafting simulated in bulk, beside the exact distribution it has to have.

The simulation runs the engine's own `Chooser`, mapped over many seeds at once.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from dflash2_mlx.chooser import NO_DRAFT, Chooser
from dflash2_mlx.distribution import Distribution
from dflash2_mlx.goodness import upper_tail
from dflash2_mlx.models.selector import Trellis
from dflash2_mlx.randomness import Randomness
from dflash2_mlx.sampling import SamplingParams

NUM_TOKENS = 3  # how many tokens behind the prompt are looked at, jointly
CHUNK = 20_000  # seeds at once: what fits the processor's caches
Prefix = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class World:
    """A target small enough to enumerate, and a drafter for it.

    `logits(history, drafts)` are the target's, `[T + 1, V]` behind the history and each of T
    drafts; `propose(history, T)` is the drafter's trellis of T rows.
    """

    vocab: int
    prompt: Prefix
    logits: Callable[[Sequence[int], mx.array], mx.array]
    propose: Callable[[Sequence[int], int], Trellis]


def exact_next(world: World, params: SamplingParams, prefix: Prefix) -> np.ndarray:
    """p `[V]` behind the prompt and a prefix, by the engine's definition, decoding plainly."""
    distribution = Distribution(params, world.vocab)
    history = (*world.prompt, *prefix)
    raw = world.logits(history, NO_DRAFT.tokens)
    rows = distribution.rows(distribution.logits(raw, history, NO_DRAFT.tokens))
    p = np.zeros(world.vocab)
    ids = range(world.vocab) if rows.ids is None else rows.ids[0].tolist()
    p[list(ids)] = np.array(mx.softmax(rows.weights[0]))
    return p


def exact_joint(world: World, params: SamplingParams) -> np.ndarray:
    """P of the first three tokens `[V, V, V]`: plain decoding of every possible beginning."""
    joint = np.ones(())
    for length in range(NUM_TOKENS):
        prefixes = itertools.product(range(world.vocab), repeat=length)
        following = [exact_next(world, params, prefix) for prefix in prefixes]
        joint = joint[..., None] * np.reshape(following, (world.vocab,) * (length + 1))
    return joint


def random_words(draws: int, seed: int = 0) -> mx.array:
    """Seeds `[draws, 2]`, the same in every run."""
    words = np.random.default_rng(seed).integers(0, 2**32, (draws, 2), dtype=np.uint32)
    return mx.array(words)


def simulate(
    world: World, params: SamplingParams, block: int, words: mx.array, *, coupled: bool = False
) -> np.ndarray:
    """Counts `[V, V, V]` of the first three tokens for seeds `[N, 2]`, drafted in blocks.

    All seeds that emitted the same beginning make their next pass together.
    """
    counts = np.zeros((world.vocab,) * NUM_TOKENS, dtype=np.int64)
    waiting: dict[Prefix, list[mx.array]] = {(): [words]}
    while waiting:
        prefix = min(waiting, key=len)
        here = mx.concatenate(waiting.pop(prefix))
        ruled = run_pass(world, params, block, prefix, here, coupled=coupled)
        for outcome, chosen in outcomes(prefix, *ruled):
            if len(outcome) == NUM_TOKENS:
                counts[outcome] += len(chosen)
            else:
                waiting.setdefault(outcome, []).append(here[mx.array(chosen)])
    assert counts.sum() == len(words)
    return counts


def run_pass(
    world: World,
    params: SamplingParams,
    block: int,
    prefix: Prefix,
    words: mx.array,
    *,
    coupled: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """One pass behind `prefix` for each of `words`: tokens `[N, L]`, drafts accepted `[N]`."""
    history = [*world.prompt, *prefix]
    position = len(history)
    trellis = world.propose(history, block - 1) if block > 1 else None

    def one(seed: mx.array) -> mx.array:
        chooser = Chooser(params, Randomness(seed), world.vocab, coupled=coupled)
        draft = NO_DRAFT if trellis is None else chooser.draft(trellis, position)
        return chooser.judge(world.logits(history, draft.tokens), draft, position, history)

    many = mx.vmap(one)
    chunks = [words[start : start + CHUNK] for start in range(0, len(words), CHUNK)]
    ruling = np.concatenate([np.array(many(chunk)) for chunk in chunks])
    return ruling[:, 1:], ruling[:, 0]


def outcomes(
    prefix: Prefix, tokens: np.ndarray, num_accepted: np.ndarray
) -> Iterator[tuple[Prefix, np.ndarray]]:
    """What has been emitted by now, cut to three tokens, and which of the seeds emitted it."""
    room = NUM_TOKENS - len(prefix)
    num_emitted = np.minimum(num_accepted + 1, room)
    line = np.where(np.arange(room) < num_emitted[:, None], padded(tokens, room), -1)
    found, which = np.unique(line, axis=0, return_inverse=True)
    order = np.argsort(which, kind="stable")
    borders = np.cumsum(np.bincount(which, minlength=len(found)))[:-1]
    for row, chosen in zip(found.tolist(), np.split(order, borders), strict=True):
        yield (*prefix, *(token for token in row if token >= 0)), chosen


def padded(tokens: np.ndarray, width: int) -> np.ndarray:
    return np.pad(tokens[:, :width], ((0, 0), (0, max(0, width - tokens.shape[1]))))


def expected_standing(world: World, params: SamplingParams, num_drafts: int) -> np.ndarray:
    """P that at least i drafts stand, for i = 1 .. `num_drafts`, by following every path.

    A path stands with the product of min(p, q) along it; never where q is not a number.
    """
    trellis = world.propose(world.prompt, num_drafts)
    candidates = trellis.candidates.tolist()
    q = np.nan_to_num(mx.softmax(trellis.scores / params.temperature, axis=-1))
    paths: list[tuple[Prefix, int, float]] = [((), 0, 1.0)]
    standing = []
    for row in range(num_drafts):
        longer = []
        for prefix, before, share in paths:
            p = exact_next(world, params, prefix)
            for choice, token in enumerate(candidates[row]):
                stands = share * min(p[token], q[row, before, choice])
                longer.append(((*prefix, token), choice, stands))
        paths = longer
        standing.append(sum(share for *_, share in paths))
    return np.array(standing)


def total_variation(counts: np.ndarray, exact: np.ndarray) -> float:
    """Between the draws and their distribution: half the sum of the differences."""
    return float(0.5 * np.abs(counts / counts.sum() - exact).sum())


def sampling_noise(exact: np.ndarray, draws: int) -> float:
    """The total variation that `draws` exact draws have from their distribution, on average."""
    return float(np.sqrt(exact * (1 - exact) / (2 * math.pi * draws)).sum())


def chi_square_p(counts: np.ndarray, exact: np.ndarray) -> float:
    """p value of the draws under the exact distribution; rare cells are put together."""
    observed, expected = counts.flatten(), exact.flatten() * counts.sum()
    if observed[expected < 1e-6].sum() > 0:
        return 0.0
    rare = expected < 10
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    kept = expected > 1e-6
    statistic = float(((observed - expected)[kept] ** 2 / expected[kept]).sum())
    return upper_tail(statistic, int(kept.sum()) - 1)
