"""DFlash 2's candidate selector: one path through the trellis of likely tokens."""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

TILE = 64  # logits whose maximum is looked at first when the best of a vocabulary are searched


@dataclass(frozen=True, slots=True)
class Trellis:
    """The candidates of T rows and how well each follows each candidate of the row before.

    `candidates` `[T, K]` token ids; `scores` `[T, K, K]` float32, `scores[t, x, y]` for candidate y
    of row t after candidate x of row t-1 (row 0 follows the anchor: its K lines are equal).
    """

    candidates: mx.array
    scores: mx.array

    def walk(self, temperature: float = 0.0, noise: mx.array | None = None) -> mx.array:
        """Choose one candidate per row, each given the one before: indices `[T]` into candidates.

        Greedy at temperature 0. Otherwise `noise` `[T, K]` is standard Gumbel noise and the path is
        a draw from `softmax(scores / temperature)`.
        """
        scores = self.scores
        if noise is not None:
            scores = scores / temperature + noise[:, None]
        return _follow(mx.argmax(scores, axis=-1))

    def tokens(self, path: mx.array) -> mx.array:
        """The token ids `[T]` on a path of indices `[T]`."""
        return mx.take_along_axis(self.candidates, path[:, None], axis=1)[:, 0]

    def probabilities(self, path: mx.array, temperature: float) -> mx.array:
        """q `[T, K]`: the distribution each token of the path was drawn from, float32."""
        before = mx.concatenate([mx.zeros_like(path[:1]), path[:-1]])
        scores = mx.take_along_axis(self.scores, before[:, None, None], axis=1)[:, 0]
        return mx.softmax(scores / temperature, axis=-1)


def _follow(successors: mx.array) -> mx.array:
    """Follow `successors` `[T, K]` from line 0 down: indices `[T]`, in log2(T) steps.

    Row t maps the choice of row t-1 to its own; composing neighbours doubles the reach each time.
    """
    reach, num_rows = 1, successors.shape[0]
    while reach < num_rows:
        further = mx.take_along_axis(successors[reach:], successors[:-reach], axis=1)
        successors = mx.concatenate([successors[:reach], further])
        reach *= 2
    return successors[:, 0]


class CandidateSelector(nn.Module):
    """Scores neighbouring candidates: `S_t(x, y) = U_t(y) + <A(x) * H(h_t), B(y)>`."""

    def __init__(self, vocab_size: int, hidden_size: int, rank: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.predecessor_codebook = nn.Embedding(vocab_size, rank)
        self.successor_codebook = nn.Embedding(vocab_size, rank)
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def __call__(self, hidden: mx.array, logits: mx.array, anchor: mx.array) -> Trellis:
        """The trellis of T rows.

        `hidden` `[T, D]` final hidden states, `logits` `[T, V]` float32, `anchor` `[1]` token id.
        """
        candidates, unary = best(logits, self.top_k)
        before = mx.concatenate(
            [mx.broadcast_to(anchor.astype(mx.uint32), (1, self.top_k)), candidates[:-1]]
        )
        context = self.hidden_projection(hidden).astype(mx.float32)
        predecessors = self.predecessor_codebook(before).astype(mx.float32) * context[:, None]
        successors = self.successor_codebook(candidates).astype(mx.float32)
        return Trellis(candidates, unary[:, None] + predecessors @ successors.swapaxes(1, 2))


def independent_rows(logits: mx.array, top_k: int) -> Trellis:
    """A trellis for a drafter without selector: no candidate cares which one came before."""
    candidates, unary = best(logits, top_k)
    return Trellis(candidates, mx.broadcast_to(unary[:, None], (len(unary), top_k, top_k)))


def best(logits: mx.array, top_k: int) -> tuple[mx.array, mx.array]:
    """Ids and logits `[T, top_k]` of the best of every row, in no order, from `[T, V]`.

    The best lie in the `top_k` tiles of a row whose maxima are largest, so only these are searched.
    """
    num_rows, vocab_size = logits.shape
    if vocab_size % TILE or vocab_size // TILE <= top_k:
        return _partitioned(logits, top_k)
    tiles = logits.reshape(num_rows, -1, TILE)
    chosen, _ = _partitioned(tiles.max(axis=-1), top_k)
    inside = mx.take_along_axis(tiles, chosen[:, :, None], axis=1).reshape(num_rows, -1)
    places, values = _partitioned(inside, top_k)
    ids = mx.take_along_axis(chosen, places // TILE, axis=-1) * TILE + places % TILE
    return ids, values


def _partitioned(values: mx.array, top_k: int) -> tuple[mx.array, mx.array]:
    places = mx.argpartition(values, -top_k, axis=-1)[:, -top_k:]
    return places, mx.take_along_axis(values, places, axis=-1)
