"""A toy vocabulary on which every distribution can be enumerated, with drafters good and bad."""

from collections.abc import Callable, Sequence

import mlx.core as mx
from draws import World

from dflash2_mlx.models.selector import Trellis

VOCAB = 5
PROMPT = (0, 3, 1)
IMPOSSIBLE = -60.0  # a logit that no draw ever meets

# The trellis of `num_rows` rows behind an anchor.
Propose = Callable[[int, int], Trellis]


def toy(drafter: str) -> World:
    """The toy target with one of `DRAFTERS`."""
    table = target_table()
    if drafter == "never overlapping":
        table = mx.put_along_axis(table, disliked(table), mx.array(IMPOSSIBLE), axis=-1)
    propose = DRAFTERS[drafter](table)

    def logits(history: Sequence[int], drafts: mx.array) -> mx.array:
        anchor = mx.array(history[-1:], dtype=mx.uint32)
        return table[mx.concatenate([anchor, drafts.astype(mx.uint32)])]

    return World(VOCAB, PROMPT, logits, lambda history, rows: propose(history[-1], rows))


def target_table(seed: int = 2, scale: float = 0.8) -> mx.array:
    """Logits `[V, V]` of the next token behind each token."""
    return scale * mx.random.normal((VOCAB, VOCAB), key=mx.random.key(seed))


def disliked(table: mx.array) -> mx.array:
    """The two tokens `[V, 2]` that the target likes least behind each token."""
    return mx.argsort(table, axis=-1)[:, :2]


def good(table: mx.array) -> Propose:
    """Knows the target but for some noise."""
    return markov(table + 0.5 * mx.random.normal(table.shape, key=mx.random.key(1)))


def bad(table: mx.array) -> Propose:
    """Prefers what the target does not."""
    return markov(-table)


def point_mass(table: mx.array) -> Propose:
    """One candidate a row, proposed for certain."""

    def propose(anchor: int, num_rows: int) -> Trellis:
        tokens = mx.array([(anchor + 1 + row) % VOCAB for row in range(num_rows)])
        return Trellis(tokens.astype(mx.uint32)[:, None], mx.zeros((num_rows, 1, 1)))

    return propose


def never_overlapping(table: mx.array) -> Propose:
    """Only tokens that the target never says."""
    worst = disliked(table)

    def propose(anchor: int, num_rows: int) -> Trellis:
        candidates = mx.broadcast_to(worst[anchor], (num_rows, 2))
        return Trellis(candidates.astype(mx.uint32), mx.zeros((num_rows, 2, 2)))

    return propose


def broken(table: mx.array) -> Propose:
    """Scores that are not numbers."""

    def propose(anchor: int, num_rows: int) -> Trellis:
        candidates = mx.broadcast_to(mx.arange(4, dtype=mx.uint32), (num_rows, 4))
        return Trellis(candidates, mx.full((num_rows, 4, 4), mx.nan))

    return propose


DRAFTERS: dict[str, Callable[[mx.array], Propose]] = {
    "good": good,
    "bad": bad,
    "point mass": point_mass,
    "never overlapping": never_overlapping,
    "broken": broken,
}


def markov(table: mx.array, top_k: int = 4) -> Propose:
    """Scores a token by the one before it: candidates are the best behind the anchor."""

    def propose(anchor: int, num_rows: int) -> Trellis:
        best = mx.argsort(-table[anchor])[:top_k].astype(mx.uint32)
        first = mx.broadcast_to(table[anchor][best], (top_k, top_k))
        scores = [first] + [table[best][:, best]] * (num_rows - 1)
        return Trellis(mx.broadcast_to(best, (num_rows, top_k)), mx.stack(scores))

    return propose
