"""A walk over candidates: every drafted token obeys, q is what it was drawn from, nothing stays."""

import numpy as np
import pytest
from byte_bpe import byte_bpe
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import END, VOCAB

from dflash2_mlx.constraint import Constraint, Walk, grammar_tokenizer
from dflash2_mlx.errors import InvalidRequest
from dflash2_mlx.grammar import Grammar

GRAMMARS = [
    Grammar.regex("(a|bc|bd){1,4}"),
    Grammar.regex("a?(bcd|bda|x)+, or a"),
    Grammar.lark('start: "a" start "b" | "c"'),
    Grammar.json_schema({"type": "object", "properties": {"name": {"enum": ["bc", "bd", "b"]}}}),
]
LETTERS = [*b'abcdx, or{}":', END, *range(257, 265), 7]


def fresh(grammar: Grammar) -> Constraint:
    return Constraint(grammar, grammar_tokenizer(byte_bpe(), VOCAB, {END}), VOCAB)


def walk(
    grammar: Grammar, lines: list[list[int]], scores: np.ndarray | None = None, **options: float
) -> Walk:
    """A walk over candidates that are all as likely, unless scored `[T, K, K]` or `[K]`."""
    candidates = np.array(lines, dtype=np.uint32)
    num_rows, width = candidates.shape
    shape = (num_rows, width, width)
    spread = np.zeros(shape) if scores is None else np.broadcast_to(scores, shape)
    noise = np.zeros((num_rows, width), dtype=np.float32)
    constraint = fresh(grammar)
    return constraint.walk(candidates, spread.astype(np.float32), noise, options.get("t", 0.0))


@st.composite
def walks(draw: st.DrawFn) -> tuple[Grammar, list[int], np.ndarray, np.ndarray, np.ndarray, float]:
    """A grammar, tokens to begin with, candidates `[T, K]`, scores, noise, and a temperature."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    num_rows, width = draw(st.integers(1, 7)), draw(st.integers(1, 8))
    lines = [rng.choice(LETTERS, width, replace=False) for _ in range(num_rows)]
    scores = rng.normal(size=(num_rows, width, width)).astype(np.float32)
    scores[rng.random(scores.shape) < 0.1] = np.nan
    noise = rng.gumbel(size=(num_rows, width)).astype(np.float32)
    grammar = draw(st.sampled_from(GRAMMARS))
    constraint, begun = fresh(grammar), []
    for _ in range(draw(st.integers(0, 4))):
        if constraint.complete:
            break
        mask = constraint.masks()[0]
        begun.append(int(rng.choice([t for t in LETTERS if mask[t // 32] >> t % 32 & 1])))
        constraint.commit(begun[-1:])
    temperature = draw(st.sampled_from([0.0, 0.3, 1.0]))
    return grammar, begun, np.array(lines, dtype=np.uint32), scores, noise, temperature


@settings(max_examples=80)
@given(walks())
def test_every_walk_obeys_and_leaves_the_matcher_where_it_was(case) -> None:
    grammar, begun, candidates, scores, noise, temperature = case
    constraint, other = fresh(grammar), fresh(grammar)
    constraint.commit(begun)
    other.commit(begun)
    before, offered = constraint.masks(), candidates.copy()
    found = constraint.walk(candidates, scores, noise, temperature)
    assert np.array_equal(constraint.masks(), before)
    assert np.array_equal(candidates, offered)
    assert len(found.masks) == len(found.tokens) + 1
    assert found.q.shape == found.candidates.shape == (len(found.tokens), candidates.shape[1])
    for row, token in enumerate(found.tokens):
        assert np.array_equal(found.masks[row], other.masks()[0])
        drawn = found.q[row] > 0
        allowed = found.masks[row][found.candidates[row] // 32] >> found.candidates[row] % 32 & 1
        assert allowed[drawn].all()
        assert found.q[row].sum() == pytest.approx(1, abs=1e-6)
        assert token in found.candidates[row][drawn]
        assert len(set(found.candidates[row].tolist())) == candidates.shape[1]
        other.commit([token])
    assert np.array_equal(found.masks[-1], other.masks()[0])


def test_the_best_candidate_that_obeys_is_taken() -> None:
    found = walk(GRAMMARS[0], [[7, ord("a"), 260]], np.array([9.0, 1.0, 2.0]))
    assert found.tokens == [260]


def test_q_is_the_softmax_over_candidates_that_obey() -> None:
    scores = np.array([9.0, 1.0, 2.0])
    found = walk(GRAMMARS[0], [[7, ord("a"), 260]], scores, t=0.5)
    odds = np.exp(scores[1:] / 0.5)
    assert found.q[0].tolist() == pytest.approx([0.0, *odds / odds.sum()], abs=1e-6)


def test_a_candidate_is_scored_behind_the_one_that_was_taken() -> None:
    """Behind the second candidate the first is best, behind the first the second."""
    scores = np.array([[0.0, 1.0], [1.0, 0.0]])
    first, second = ord("a"), 260
    assert walk(GRAMMARS[0], [[first, second]] * 4, scores).tokens == [second, first] * 2


def test_a_walk_ends_where_no_candidate_obeys() -> None:
    found = walk(GRAMMARS[0], [[ord("a"), 7], [7, 8], [ord("a"), 7]])
    assert found.tokens == [ord("a")]
    assert len(found.masks) == 2


def test_nothing_is_drafted_where_no_first_candidate_obeys() -> None:
    found = walk(GRAMMARS[0], [[7, 8]] * 3)
    assert (found.tokens, len(found.masks), found.q.shape) == ([], 1, (0, 2))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_scores_that_are_not_finite_draft_nothing(value: float) -> None:
    assert walk(GRAMMARS[0], [[ord("a"), 260]] * 3, np.full((2,), value), t=1.0).tokens == []


def test_a_forced_token_takes_the_place_of_a_candidate() -> None:
    """Behind the first choice the grammar leaves no other."""
    text = [*b"x", *b", or a"]
    grammar = Grammar.regex("(x|y), or a")
    found = walk(grammar, [[ord("x"), 7, 8], *[[7, 8, 9]] * 6], np.array([3.0, 2.0, 1.0]))
    assert found.tokens == text
    assert found.q[1:].tolist() == [[1.0, 0.0, 0.0]] * 6
    assert fresh(grammar).forced(6).tokens == []


def test_forced_tokens_are_no_more_than_asked_for() -> None:
    constraint = fresh(Grammar.regex("forced, all of it"))
    for limit in (1, 4, 17, 18):
        found = constraint.forced(limit)
        assert found.tokens == [*b"forced, all of it"][:limit]
        assert found.q.tolist() == [[1.0]] * len(found.tokens)
        assert len(found.masks) == len(found.tokens) + 1


def test_behind_a_drafted_end_token_nothing_is_drafted() -> None:
    found = walk(Grammar.regex("a+"), [[ord("a")], [END], [ord("a")]])
    assert found.tokens == [ord("a"), END]
    only_end = np.zeros_like(found.masks[0])
    only_end[END // 32] = 1 << END % 32
    assert np.array_equal(found.masks[-1], only_end)


def test_temperatures_that_are_next_to_nothing_stay_numbers() -> None:
    found = walk(GRAMMARS[0], [[ord("a"), 260]], np.array([1.0, 30.0]), t=1e-40)
    assert found.q.tolist() == [[0.0, 1.0]]


def outgrown(*, drafting: bool) -> int:
    """How many tokens of a text are read before the matcher gives up on a grammar that it can."""
    constraint = fresh(Grammar.regex("((a{1,100}b?){1,100}c?){1,100}"))
    rng = np.random.default_rng(0)
    for num_read, token in enumerate(b"aababab" * 40):
        try:
            if drafting:
                lines = rng.choice([*b"abc"], (7, 1)).astype(np.uint32)
                noise = np.zeros((7, 1), dtype=np.float32)
                constraint.walk(lines, np.zeros((7, 1, 1), dtype=np.float32), noise, 0.0)
            constraint.masks()
            constraint.commit([token])
        except InvalidRequest:
            return num_read
    raise AssertionError("the grammar was not too much for the matcher")


def test_drafts_that_a_matcher_gives_up_on_do_not_end_an_answer_early() -> None:
    assert outgrown(drafting=True) == outgrown(drafting=False) > 50
