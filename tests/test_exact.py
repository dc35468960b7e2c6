"""With `exact`, near ties are decided by passes of one row; all else stays as fast as it was."""

import dataclasses
from collections.abc import Collection, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from byte_bpe import byte_bpe
from families import build
from tiny import END, VOCAB, ScriptedDrafter, pair_of, plain_ids, tiny_target

from dflash2_mlx import SamplingParams, generate, generation
from dflash2_mlx.acceptance import margins
from dflash2_mlx.chooser import Chooser
from dflash2_mlx.decode import Conversation, decode
from dflash2_mlx.errors import UnsupportedField
from dflash2_mlx.grammar import Grammar
from dflash2_mlx.models.cache import leaves
from dflash2_mlx.pair import Pair
from dflash2_mlx.randomness import Randomness
from dflash2_mlx.target import Caches, Reading, Target

PROMPT = list(b"A prompt that is longer than every window.")
NUM_TOKENS = 24
TIES = (5, 6, 7, 12, 20)  # 6 and 7 are met in the first row of a pass: it emits nothing
TOLERANCE, MARGIN = 1e-3, 1e-4


class Wavering(Target):
    """At some places of the answer two tokens are all but tied; wide reads take the wrong one."""

    def __init__(self, model: nn.Module, ties: Collection[int] = TIES) -> None:
        super().__init__(model, taps=[0])
        self.ties = ties

    def read(self, tokens: mx.array, caches: Caches, **options: Any) -> Reading:
        offset = next(leaf.offset for leaf in leaves(caches) if hasattr(leaf, "offset"))
        reading = super().read(tokens, caches, **options)
        rows = [len(PROMPT) - 1 + tie - offset for tie in self.ties]
        logits = reading.logits
        for row in (row for row in rows if 0 <= row < tokens.size):
            best, second = mx.argsort(-logits[row])[:2].tolist()
            lead = MARGIN if tokens.size == 1 else -MARGIN
            logits[row, best] = logits[row, second] + lead
        return dataclasses.replace(reading, logits=logits)


@cache
def model_of(kind: str) -> nn.Module:
    return build(kind[len("hybrid ") :]) if kind.startswith("hybrid ") else tiny_target(kind)


def pair_of_kind(kind: str, ties: Collection[int] = TIES) -> tuple[Pair, list[int]]:
    """A pair whose drafter is always right, and what plain decoding says."""
    model = model_of(kind)
    truth = plain_ids(model, PROMPT, NUM_TOKENS + 16, ends=())

    def propose(position: int, width: int) -> list[int]:
        return truth[position + 1 - len(PROMPT) :][: width - 1]

    target = Wavering(model, ties)
    return pair_of(target, ScriptedDrafter(propose), end_tokens=frozenset()), truth[:NUM_TOKENS]


@pytest.fixture(autouse=True)
def tolerance(monkeypatch: pytest.MonkeyPatch) -> list[Pair]:
    """The machine's tolerance, and the pairs it was asked for."""
    asked: list[Pair] = []

    def exactness_of(pair: Pair) -> Any:
        asked.append(pair)
        return SimpleNamespace(tolerance=TOLERANCE)

    monkeypatch.setattr(generation, "exactness_of", exactness_of)
    return asked


@pytest.mark.parametrize("block", [2, 3, 5, 8])
@pytest.mark.parametrize("kind", ["dense", "sliding", "hybrid qwen3_5"])
def test_near_ties_go_as_in_plain_decoding(kind: str, block: int) -> None:
    pair, truth = pair_of_kind(kind)
    options: dict[str, Any] = {"max_tokens": NUM_TOKENS, "block_size": block}
    assert list(generate(pair, PROMPT, **options).token_ids) != truth
    exact = generate(pair, PROMPT, exact=True, **options)
    assert list(exact.token_ids) == truth
    assert exact.redecided > 0


def test_the_cost_is_counted() -> None:
    pair, truth = pair_of_kind("dense")
    result = generate(pair, PROMPT, max_tokens=NUM_TOKENS, block_size=4, exact=True)
    assert result.accepted == (1, 4, 0, 1, 0, 1, 0, 1, 4, 0, 1, 4, 3, 1, 3)
    assert result.redecided == 5
    assert result.passes == 15
    assert result.tokens_per_pass == pytest.approx(NUM_TOKENS / 15)
    assert list(result.token_ids) == truth


def test_without_ties_exact_costs_nothing() -> None:
    pair, truth = pair_of_kind("dense", ties=())
    options: dict[str, Any] = {"max_tokens": NUM_TOKENS, "block_size": 4}
    exact, usual = generate(pair, PROMPT, exact=True, **options), generate(pair, PROMPT, **options)
    assert exact.token_ids == usual.token_ids == tuple(truth)
    assert exact.accepted == usual.accepted
    assert exact.redecided == usual.redecided == 0


@pytest.mark.parametrize("kind", ["dense", "sliding", "hybrid qwen3_5", "hybrid lfm2"])
def test_a_pass_that_emitted_nothing_leaves_caches_as_they_were(kind: str) -> None:
    pair, truth = pair_of_kind(kind)
    exact, plain = (
        Conversation(pair.target, drafter, chooser)
        for drafter, chooser in ((pair.drafter, doubting()), (None, None))
    )
    for conversation, width in ((exact, 4), (plain, 1)):
        conversation.prefill(PROMPT)
        steps = decode(
            conversation, lambda w=width: w, max_tokens=NUM_TOKENS, end_tokens=frozenset()
        )
        emitted = list(steps)
        assert [token for step in emitted for token in step.tokens] == truth
        assert any(not step.tokens for step in emitted) is (conversation is exact)
    assert exact.length == plain.length == exact.context[0].offset + len(exact._unseen)
    pairs = list(zip(rows_of(exact.caches), rows_of(plain.caches), strict=True))
    assert pairs
    assert all(one.shape == other.shape for one, other in pairs)
    assert all(mx.allclose(one, other, atol=1e-4) for one, other in pairs)


@pytest.mark.parametrize("tolerance", [0.3, 3.0])
def test_a_grammar_is_obeyed_where_passes_are_in_doubt(
    monkeypatch: pytest.MonkeyPatch, tolerance: float
) -> None:
    monkeypatch.setattr(
        generation, "exactness_of", lambda pair: SimpleNamespace(tolerance=tolerance)
    )
    pair, _ = pair_of_kind("dense", ties=())
    pair.tokenizer, pair.end_tokens = byte_bpe(), frozenset({END})
    params = SamplingParams(grammar=Grammar.regex("(a|bc|bd){3,9}, [0-9]{2,4}"))
    options: dict[str, Any] = {"max_tokens": 60}
    plain = generate(pair, PROMPT, params, block_size=1, **options)
    exact = generate(pair, PROMPT, params, block_size=5, exact=True, **options)
    assert exact.token_ids == plain.token_ids
    assert exact.redecided > 0
    assert exact.finish_reason == "stop"


def test_closing_while_a_tie_is_open_leaves_sound_caches() -> None:
    pair, truth = pair_of_kind("sliding")
    conversation = Conversation(pair.target, pair.drafter, doubting())
    conversation.prefill(PROMPT)
    steps = decode(conversation, lambda: 4, max_tokens=NUM_TOKENS, end_tokens=frozenset())
    taken = [next(steps) for _ in range(3)]
    steps.close()
    assert (taken[-1].tokens, taken[-1].in_doubt) == ((), True)
    more = decode(conversation, lambda: 4, max_tokens=8, end_tokens=frozenset())
    assert [token for step in more for token in step.tokens] == truth[5:13]


def test_an_answer_that_ends_before_a_tie_leaves_nothing_to_decide() -> None:
    pair, truth = pair_of_kind("dense", ties=(3,))
    pair.end_tokens = frozenset({truth[2]})
    result = generate(pair, PROMPT, max_tokens=NUM_TOKENS, block_size=5, exact=True)
    assert (list(result.token_ids), result.redecided) == (truth[:3], 0)


@pytest.mark.parametrize("block_size", [1, "auto"])
def test_what_is_not_drafted_is_not_measured(tolerance: list[Pair], block_size: Any) -> None:
    pair, truth = pair_of_kind("dense")
    pair.target.undraftable = None if block_size == 1 else "it cannot be rewound"
    options: dict[str, Any] = {"block_size": block_size, "exact": True}
    result = generate(pair, PROMPT, max_tokens=NUM_TOKENS, **options)
    assert list(result.token_ids) == truth
    assert not tolerance


def test_exact_is_refused_by_name_with_sampling(tolerance: list[Pair]) -> None:
    pair, _ = pair_of_kind("dense")
    with pytest.raises(UnsupportedField, match=r"exact .* temperature is 0\.5; set .* to 0"):
        generate(pair, PROMPT, SamplingParams(temperature=0.5), exact=True)
    assert not tolerance


def test_margins_are_those_of_the_two_best() -> None:
    logits = mx.array([[1.0, 4.0, 3.5], [2.0, 2.0, 0.0], [mx.inf, 0.0, 1.0], [mx.nan] * 3])
    found = margins(logits, mx.array([1, 0, 0, 0])).tolist()
    assert found[:3] == [0.5, 0.0, np.inf]
    assert np.isnan(found[3])


def rows_of(caches: Caches) -> Iterator[mx.array]:
    """All state that the next token depends on."""
    for leaf in leaves(caches):
        yield from leaf.rows() if hasattr(leaf, "rows") else leaf.cache


def doubting(**fields: Any) -> Chooser:
    params = SamplingParams(**fields)
    return Chooser(params, Randomness.from_seed(0), VOCAB, tolerance=TOLERANCE)


def rows_with(leads: list[float], best: int = 7) -> mx.array:
    """Logits `[L, V]` where token 7 leads token 8 by so much."""
    logits = np.zeros((len(leads), VOCAB), dtype=np.float32)
    logits[:, best] = 5.0
    logits[:, best + 1] = 5.0 - np.array(leads)
    return mx.array(logits)


def judged(chooser: Chooser, leads: list[float], drafts: list[int]) -> Any:
    draft = dataclasses.replace(chooser.undrafted(), tokens=mx.array(drafts, dtype=mx.uint32))
    verdict = chooser.judge(rows_with(leads), draft, len(PROMPT), PROMPT)
    assert verdict.dtype == mx.int32
    return chooser.read(verdict, len(leads))


@pytest.mark.parametrize("logprobs", [None, 0, 3])
@pytest.mark.parametrize("row", range(5))
def test_a_pass_ends_before_its_first_doubt(row: int, logprobs: int | None) -> None:
    leads = [1.0] * 4
    leads[row:] = [TOLERANCE / 2 if logprobs else np.nan] * (4 - row)
    verdict = judged(doubting(logprobs=logprobs), leads, [7, 7, 7])
    assert verdict.tokens == [7] * row
    assert verdict.num_accepted == min(row, 3)
    assert verdict.in_doubt is (row < 4)
    assert len(verdict.logprobs) == (row if logprobs is not None else 0)
    assert all(entry.logprob < 0 for entry in verdict.logprobs)
    assert all(len(entry.top) == logprobs for entry in verdict.logprobs)


def test_a_doubt_behind_a_refused_draft_does_not_matter() -> None:
    verdict = judged(doubting(), [1.0, 1.0, 0.0, 0.0], [7, 9, 7])
    assert (verdict.num_accepted, verdict.tokens, verdict.in_doubt) == (1, [7, 7], False)


def test_a_pass_of_one_row_is_never_in_doubt() -> None:
    verdict = judged(doubting(), [0.0], [])
    assert (verdict.tokens, verdict.in_doubt) == ([7], False)


def test_a_repetition_penalty_stretches_the_tolerance() -> None:
    leads = [1.5 * TOLERANCE] * 2
    assert not judged(doubting(), leads, [7]).in_doubt
    assert judged(doubting(repetition_penalty=2.0), leads, [7]).in_doubt
    assert judged(doubting(repetition_penalty=0.5), leads, [7]).in_doubt
