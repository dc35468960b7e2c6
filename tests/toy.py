"""A toy vocabulary on which every distribution can be enumerated, and drafting simulated in bulk.

The simulation runs the engine's own `Chooser`, mapped over many seeds at once.
"""

import itertools
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from dflash2_mlx.chooser import NO_DRAFT, Chooser, Draft
from dflash2_mlx.distribution import Distribution
from dflash2_mlx.models.selector import Trellis
from dflash2_mlx.randomness import Randomness
from dflash2_mlx.sampling import SamplingParams

VOCAB = 6
NUM_TOKENS = 3
PROMPT = [0, 3, 1]

# What a toy drafter proposes behind an anchor: the trellis of `num_rows` rows.
Drafter = Callable[[int, int], Trellis]


def target_table(seed: int = 0, scale: float = 1.5) -> mx.array:
    """Logits `[V, V]` of the next token behind each token."""
    return scale * mx.random.normal((VOCAB, VOCAB), key=mx.random.key(seed))


def exact_joint(params: SamplingParams, table: mx.array) -> np.ndarray:
    """P of the first three tokens `[V, V, V]`, by plain decoding of every possible beginning."""
    distribution = Distribution(params, VOCAB)
    joint = np.zeros((VOCAB,) * NUM_TOKENS)
    for prefix in itertools.product(range(VOCAB), repeat=NUM_TOKENS - 1):
        share, history = 1.0, list(PROMPT)
        for token in prefix:
            share *= next_probabilities(distribution, table, history)[token]
            history.append(token)
        joint[prefix] = share * next_probabilities(distribution, table, history)
    return joint


def next_probabilities(
    distribution: Distribution, table: mx.array, history: Sequence[int]
) -> np.ndarray:
    """p `[V]` behind a history, by the engine's definition."""
    raw = table[mx.array([history[-1]])]
    logits = distribution.logits(raw, history, NO_DRAFT.tokens)
    rows = distribution.rows(logits)
    p = np.zeros(VOCAB)
    ids = range(VOCAB) if rows.ids is None else rows.ids[0].tolist()
    p[list(ids)] = np.array(mx.softmax(rows.weights[0]))
    return p


def simulate(
    params: SamplingParams,
    table: mx.array,
    drafter: Drafter,
    block: int,
    draws: int,
    chooser: type[Chooser] = Chooser,
) -> tuple[np.ndarray, float]:
    """Frequencies `[V, V, V]` of the first three tokens over many seeds, drafted in blocks.

    Also the share of first drafts that stood. All seeds that emitted the same beginning make their
    next pass together.
    """
    seeds = mx.random.randint(0, 2**31 - 1, (draws, 2), key=mx.random.key(7)).astype(mx.uint32)
    counts = np.zeros((VOCAB,) * NUM_TOKENS)
    waiting: dict[tuple[int, ...], list[mx.array]] = {(): [seeds]}
    stood = 0.0
    while waiting:
        prefix = min(waiting, key=len)
        words = mx.concatenate(waiting.pop(prefix))
        tokens, num_accepted = run_pass(params, table, drafter, block, prefix, words, chooser)
        if not prefix:
            stood = float((num_accepted > 0).mean())
        for outcome, chosen in grouped(prefix, tokens, num_accepted):
            if len(outcome) == NUM_TOKENS:
                counts[outcome] += len(chosen)
            else:
                waiting.setdefault(outcome, []).append(words[mx.array(chosen)])
    assert counts.sum() == draws
    return counts / draws, stood


def run_pass(params, table, drafter, block, prefix, words, chooser):
    """One pass behind `prefix` for every seed in `words`: tokens `[N, L]`, drafts accepted `[N]`."""
    history = [*PROMPT, *prefix]
    trellis = drafter(history[-1], block - 1)
    position = len(history)

    def one(seed: mx.array) -> mx.array:
        choose = chooser(params, Randomness(seed), VOCAB)
        draft = choose.draft(trellis, position) if block > 1 else NO_DRAFT
        line = mx.concatenate([mx.array(history[-1:], dtype=mx.uint32), draft.tokens])
        return choose.judge(table[line], draft, position, history)

    ruling = np.array(mx.vmap(one)(words))
    return ruling[:, 1:], ruling[:, 0]


def grouped(prefix, tokens, num_accepted):
    """Seeds by what they have emitted now, cut to three tokens."""
    outcomes: dict[tuple[int, ...], list[int]] = {}
    room = NUM_TOKENS - len(prefix)
    for index, (row, n) in enumerate(zip(tokens.tolist(), num_accepted.tolist(), strict=True)):
        outcomes.setdefault((*prefix, *row[: min(n + 1, room)]), []).append(index)
    return outcomes.items()


def good(table: mx.array) -> Drafter:
    """Knows the target but for some noise; four candidates."""
    noisy = table + 0.5 * mx.random.normal(table.shape, key=mx.random.key(1))
    return markov_drafter(noisy)


def bad(table: mx.array) -> Drafter:
    """Prefers what the target does not."""
    return markov_drafter(-table)


def point_mass(table: mx.array) -> Drafter:
    """One candidate a row, proposed for certain."""

    def propose(anchor: int, num_rows: int) -> Trellis:
        tokens = mx.array([(anchor + 1 + row) % VOCAB for row in range(num_rows)])
        return Trellis(tokens.astype(mx.uint32)[:, None], mx.zeros((num_rows, 1, 1)))

    return propose


def never_overlapping(table: mx.array) -> Drafter:
    """Only the tokens that the target likes least: with top_k they have no probability at all."""
    worst = mx.argsort(table, axis=-1)[:, :2].astype(mx.uint32)

    def propose(anchor: int, num_rows: int) -> Trellis:
        candidates = mx.broadcast_to(worst[anchor], (num_rows, 2))
        return Trellis(candidates, mx.zeros((num_rows, 2, 2)))

    return propose


def broken(table: mx.array) -> Drafter:
    """Scores that are not numbers."""

    def propose(anchor: int, num_rows: int) -> Trellis:
        candidates = mx.broadcast_to(mx.arange(4, dtype=mx.uint32), (num_rows, 4))
        return Trellis(candidates, mx.full((num_rows, 4, 4), mx.nan))

    return propose


DRAFTERS: dict[str, Callable[[mx.array], Drafter]] = {
    "good": good,
    "bad": bad,
    "point mass": point_mass,
    "never overlapping": never_overlapping,
    "broken": broken,
}


def markov_drafter(table: mx.array, top_k: int = 4) -> Drafter:
    """Scores a token by the one before it: candidates are the best behind the anchor."""

    def propose(anchor: int, num_rows: int) -> Trellis:
        best = mx.argsort(-table[anchor])[:top_k].astype(mx.uint32)
        between = table[best][:, best]
        first = mx.broadcast_to(table[anchor][best], (top_k, top_k))
        scores = [first] + [between] * (num_rows - 1)
        return Trellis(mx.broadcast_to(best, (num_rows, top_k)), mx.stack(scores))

    return propose


def total_variation(a: np.ndarray, b: np.ndarray) -> float:
    """Half the sum of the differences."""
    return float(0.5 * np.abs(a - b).sum())


def chi_square_p(frequencies: np.ndarray, exact: np.ndarray, draws: int) -> float:
    """p value of the draws under the exact distribution; rare cells are put together."""
    observed, expected = frequencies.flatten() * draws, exact.flatten() * draws
    if observed[expected < 1e-9].sum() > 0:
        return 0.0
    rare = expected < 10
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    kept = expected > 1e-9
    statistic = float(((observed - expected)[kept] ** 2 / expected[kept]).sum())
    return upper_tail(statistic, int(kept.sum()) - 1)


def upper_tail(statistic: float, degrees: int) -> float:
    """P(chi-square > statistic), by Wilson and Hilferty's cube root."""
    if degrees < 1:
        return 1.0
    from math import erfc, sqrt

    spread = 2 / (9 * degrees)
    z = ((statistic / degrees) ** (1 / 3) - (1 - spread)) / sqrt(spread)
    return 0.5 * erfc(z / sqrt(2))


def drawn_draft(trellis: Trellis, tokens: mx.array, temperature: float) -> Draft:
    """A draft of given tokens, with the q they would have been drawn from."""
    path = mx.argmax(trellis.candidates == tokens[:, None], axis=-1)
    return Draft(tokens, trellis.candidates, trellis.probabilities(path, temperature))
