"""The target's distribution is mlx-lm's: its processors, its filters, its order, row by row."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx_lm.sample_utils as mlx_lm
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dflash2_mlx.distribution import Distribution, nucleus_floor
from dflash2_mlx.sampling import SamplingParams

MIN_GAP = 1e-3  # between logits, and between a sum of probabilities and top_p: no ties


@pytest.fixture(autouse=True, scope="module")
def uncompiled() -> Iterator[None]:
    """mlx-lm compiles its filters anew for each value, which takes longer than all the rest."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture(autouse=True)
def probabilities_instead_of_a_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-lm's sampler, stopped before its last step."""
    monkeypatch.setattr(
        mlx_lm, "categorical_sampling", lambda logits, temp: mx.softmax(logits / temp, axis=-1)
    )


def line_of_logits() -> st.SearchStrategy[np.ndarray]:
    """4 to 12 logits, no two near each other, none so far from the rest that it settles all."""
    values = st.lists(st.floats(-2, 2, width=32), min_size=4, max_size=12)
    apart = values.filter(lambda line: all(b - a > MIN_GAP for a, b in pairwise(sorted(line))))
    return apart.map(lambda line: np.array(line, dtype=np.float32))


def near_the_edge(logits: np.ndarray, top_p: float, min_p: float) -> bool:
    """Whether rounding alone could decide if a token is kept."""
    p = np.sort(np.exp(logits.astype(np.float64) - logits.max()))[::-1]
    sums = np.cumsum(p / p.sum())
    return bool((np.abs(sums - top_p) < MIN_GAP).any() or (np.abs(p - min_p) < MIN_GAP * p).any())


def probabilities(params: SamplingParams, logits: np.ndarray) -> np.ndarray:
    """p `[V]` of one row by our definition."""
    rows = Distribution(params, len(logits)).rows(mx.array(logits)[None])
    p = np.zeros(len(logits))
    p[slice(None) if rows.ids is None else rows.ids[0].tolist()] = mx.softmax(rows.weights[0])
    return p


@given(
    logits=line_of_logits(),
    temperature=st.floats(0.2, 3.0),
    top_p=st.one_of(st.just(1.0), st.floats(0.05, 0.99)),
    min_p=st.one_of(st.just(0.0), st.floats(0.01, 0.9)),
    top_k=st.integers(0, 3),
)
def test_filters_are_those_of_mlx_lm(
    logits: np.ndarray, temperature: float, top_p: float, min_p: float, top_k: int
) -> None:
    assume(not near_the_edge(logits, top_p, min_p))
    logprobs = mx.array(logits) - mx.logsumexp(mx.array(logits))
    sampler = mlx_lm.make_sampler(temperature, top_p, min_p, top_k=top_k)
    params = SamplingParams(temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k)
    p = probabilities(params, logits)
    np.testing.assert_allclose(p, sampler(logprobs[None])[0], atol=2e-6, rtol=2e-5)


@given(
    logits=line_of_logits(),
    temperature=st.floats(0.05, 10.0),
    top_p=st.floats(0.0, 1.0),
    min_p=st.floats(0.0, 1.0),
    top_k=st.integers(0, 30),
)
def test_every_row_is_a_distribution_that_likes_the_best_token_most(
    logits: np.ndarray, temperature: float, top_p: float, min_p: float, top_k: int
) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k)
    p = probabilities(params, logits)
    assert p.sum() == pytest.approx(1.0, abs=1e-5)
    assert p[logits.argmax()] == p.max() > 0


@given(
    logits=st.lists(st.integers(-9, 3), min_size=1, max_size=70),
    top_p=st.floats(0.0, 1.0),
    sortable=st.integers(1, 70),
)
def test_halving_finds_the_floor_that_sorting_finds(
    logits: list[int], top_p: float, sortable: int
) -> None:
    p = np.exp(np.array(logits, dtype=np.float64))
    above = np.array([p[p > each].sum() for each in p]) / p.sum()
    assume((np.abs(above - top_p) > 1e-5).all() or top_p in (0.0, 1.0))
    expected = min([x for x, a in zip(logits, above, strict=True) if a < top_p] or [max(logits)])
    row = mx.array([logits, logits[::-1]], dtype=mx.float32)
    total = mx.logsumexp(row, axis=-1, keepdims=True)
    assert nucleus_floor(row, total, top_p, sortable)[:, 0].tolist() == [expected, expected]


VOCAB = 8
TOKENS = st.integers(0, VOCAB - 1)
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.floats(0.5, 2.0),
        "presence_penalty": st.floats(-2.0, 2.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "logit_bias": st.dictionaries(TOKENS, st.floats(-20.0, 20.0), max_size=3),
    },
)


@given(
    changes=CHANGES,
    context=st.integers(1, 12),
    committed=st.lists(TOKENS, min_size=1, max_size=20),
    drafts=st.lists(TOKENS, max_size=7),
    seed=st.integers(0, 100),
)
def test_penalties_and_bias_are_those_of_mlx_lm_in_every_row(
    changes: dict[str, Any], context: int, committed: list[int], drafts: list[int], seed: int
) -> None:
    """Row i as mlx-lm has it after the committed tokens and exactly i of the drafts."""
    raw = 3 * mx.random.normal((len(drafts) + 1, VOCAB), key=mx.random.key(seed))
    params = SamplingParams(**changes, penalty_context=context)
    rows = Distribution(params, VOCAB).logits(raw, committed, mx.array(drafts, dtype=mx.uint32))
    sizes = ("repetition_context_size", "presence_context_size", "frequency_context_size")
    processors = mlx_lm.make_logits_processors(**changes, **dict.fromkeys(sizes, context))
    for index, row in enumerate(rows):
        expected = mx.array(raw[index : index + 1])
        for process in processors:
            expected = process(mx.array(committed + drafts[:index]), expected)
        np.testing.assert_allclose(row, expected[0], atol=1e-5)
