"""The walk through the trellis equals the walk position by position."""

import mlx.core as mx
import pytest
from tiny import randomize

from dflash2_mlx.models.selector import CandidateSelector, Trellis

VOCAB, DIM, RANK = 50, 16, 4


def stepwise(selector: CandidateSelector, hidden, logits, anchor: int, top_k: int) -> list[int]:
    """The definition: S_t(x, y) = U_t(y) + <A(x) * H(h_t), B(y)>, one argmax after another."""
    path, before = [], anchor
    context = selector.hidden_projection(hidden)
    for t in range(hidden.shape[0]):
        candidates = sorted(range(VOCAB), key=lambda token: -logits[t, token].item())[:top_k]
        left = selector.predecessor_codebook.weight[before] * context[t]
        scores = [
            (logits[t, token] + (left * selector.successor_codebook.weight[token]).sum()).item()
            for token in candidates
        ]
        before = candidates[max(range(top_k), key=scores.__getitem__)]
        path.append(before)
    return path


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 15])
@pytest.mark.parametrize("top_k", [1, 5, 16])
def test_the_walk_is_the_definition(num_rows: int, top_k: int) -> None:
    selector = randomize(CandidateSelector(VOCAB, DIM, RANK, top_k), num_rows, scale=1.0)
    keys = mx.random.split(mx.random.key(top_k))
    hidden = mx.random.normal((num_rows, DIM), key=keys[0])
    logits = mx.random.normal((num_rows, VOCAB), key=keys[1])
    trellis = selector(hidden, logits, mx.array([11]))
    assert trellis.scores.dtype == mx.float32
    path = trellis.tokens(trellis.walk())
    assert path.tolist() == stepwise(selector, hidden, logits, 11, top_k)


def test_a_sampled_walk_draws_from_q() -> None:
    """Frequencies of whole paths equal the product of the conditional probabilities."""
    scores = mx.random.normal((2, 3, 3), key=mx.random.key(0))
    scores = mx.concatenate([mx.broadcast_to(scores[:1, :1], (1, 3, 3)), scores[1:]])
    trellis = Trellis(mx.arange(6).reshape(2, 3), scores)
    draws = 40_000
    noise = mx.random.gumbel((draws, 2, 3), key=mx.random.key(1))
    paths = mx.vmap(lambda n: trellis.walk(0.8, n))(noise)
    counts = mx.zeros((9,)).at[paths[:, 0] * 3 + paths[:, 1]].add(1.0)
    first = mx.softmax(scores[0, 0] / 0.8)
    exact = (first[:, None] * mx.softmax(scores[1] / 0.8, axis=-1)).flatten()
    assert 0.5 * mx.abs(counts / draws - exact).sum().item() < 0.01


def test_q_is_the_distribution_on_the_path() -> None:
    scores = mx.random.normal((3, 4, 4), key=mx.random.key(2))
    trellis = Trellis(mx.arange(12).reshape(3, 4), scores)
    path = mx.array([2, 0, 3])
    q = trellis.probabilities(path, 0.7)
    for row, before in enumerate([0, 2, 0]):
        assert mx.allclose(q[row], mx.softmax(scores[row, before] / 0.7), atol=1e-6)
