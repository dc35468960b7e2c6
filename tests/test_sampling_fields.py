"""Every sampling field does while drafting what it does in plain decoding, and nothing else."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors
from tiny import LLAMA, VOCAB, ScriptedDrafter, build_model, join, pair_of, tiny_drafter

from dflash2_mlx import SamplingParams, generate, stream_generate
from dflash2_mlx.decode import Step
from dflash2_mlx.errors import InvalidRequest
from dflash2_mlx.generation import Result
from dflash2_mlx.pair import Pair
from dflash2_mlx.target import Target

PROMPT = list(b"A prompt that is longer than all windows.")
NUM_TOKENS = 30
BLOCKS = range(1, 9)
Fields = dict[str, Any]

# The target likes 269 and 233 best, and repeats them as long as nothing hinders it.
FIELDS: dict[str, Fields] = {
    "repetition": {"repetition_penalty": 1.5},
    "presence": {"presence_penalty": 0.8},
    "frequency": {"frequency_penalty": 0.8},
    "rewards": {"repetition_penalty": 0.9, "frequency_penalty": -0.3},
    "bias": {"logit_bias": {233: -100.0, 153: 2.5}},
    "short memory": {"frequency_penalty": 1.5, "penalty_context": 3},
    "long memory": {"presence_penalty": 2.0, "penalty_context": 1000},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
        "penalty_context": 12,
        "logit_bias": {269: -1.0, 34: 3.0, 0: -100.0},
    },
}


@cache
def sticky_target() -> nn.Module:
    """A random llama that likes to repeat the last token: loud embeddings, used by the head too."""
    model = build_model("llama", {**LLAMA, "tie_word_embeddings": True})
    model.model.embed_tokens.weight = 3 * model.model.embed_tokens.weight
    return model


def processors(fields: Fields) -> list[Callable[[mx.array, mx.array], mx.array]]:
    """What mlx-lm makes of the same fields."""
    given = dict(fields)
    size = given.pop("penalty_context", 20)
    names = ("repetition", "presence", "frequency")
    return make_logits_processors(**given, **{f"{name}_context_size": size for name in names})


@cache
def plain(name: str | None) -> tuple[list[int], np.ndarray]:
    """Ids and log probabilities `[N, V]` of mlx-lm's own loop, long enough for every draft."""
    steps = generate_step(
        mx.array(PROMPT),
        sticky_target(),
        max_tokens=NUM_TOKENS + 8,
        logits_processors=processors(FIELDS[name]) if name else None,
    )
    ids, rows = zip(*steps, strict=True)
    return [int(token) for token in ids], np.array(mx.stack(rows))


def pair_with(drafts: Callable[[Sequence[int], int, int], Sequence[int]] | None, truth) -> Pair:
    """The sticky target, with a drafter that answers `drafts(truth, place, count)`."""
    if drafts is None:
        return pair_of(Target(sticky_target()), end_tokens=frozenset())

    def propose(position: int, width: int) -> Sequence[int]:
        return drafts(truth, position + 1 - len(PROMPT), width - 1)

    target = Target(sticky_target(), taps=[0])
    return pair_of(target, ScriptedDrafter(propose), end_tokens=frozenset())


def random_pair() -> Pair:
    """The sticky target, with a random drafter of the real kind."""
    drafter = tiny_drafter()
    return pair_of(join(sticky_target(), drafter), drafter, end_tokens=frozenset())


DRAFTERS = {
    "right": lambda truth, place, count: truth[place : place + count],
    "repeating": lambda truth, place, count: [truth[place - 1]] * count,
    "half right": lambda truth, place, count: [
        token if (place + i) % 3 else (token + 1) % VOCAB
        for i, token in enumerate(truth[place : place + count])
    ],
}


def answer(pair: Pair, block: int, num_tokens: int = NUM_TOKENS, **fields: Any) -> Result:
    params = SamplingParams(**fields)
    return generate(pair, PROMPT, params, max_tokens=num_tokens, block_size=block)


def ids(pair: Pair, block: int, num_tokens: int = NUM_TOKENS, **fields: Any) -> list[int]:
    return list(answer(pair, block, num_tokens, **fields).token_ids)


def sampled(pair: Pair, block: int, seed: int, num_tokens: int = 12) -> list[int]:
    return ids(pair, block, num_tokens, temperature=1.0, seed=seed)


class TestDeterministicFields:
    def test_each_field_changes_the_answer(self) -> None:
        """S03."""
        answers = {name: plain(name)[0][:NUM_TOKENS] for name in (None, *FIELDS)}
        assert len({tuple(found) for found in answers.values()}) == len(answers)

    @pytest.mark.parametrize("block", BLOCKS)
    @pytest.mark.parametrize("name", FIELDS)
    def test_a_drafted_answer_is_mlx_lms(self, name: str, block: int) -> None:
        truth, _ = plain(name)
        pair = pair_with(DRAFTERS["half right"], truth)
        result = answer(pair, block, **FIELDS[name])
        assert list(result.token_ids) == truth[:NUM_TOKENS]
        assert block == 1 or result.tokens_from_draft >= NUM_TOKENS // 3

    @pytest.mark.parametrize("block", [2, 4, 8])
    @pytest.mark.parametrize("drafter", ["right", "repeating"])
    @pytest.mark.parametrize("name", ["repetition", "presence", "frequency"])
    def test_penalties_count_no_rejected_token(self, name: str, drafter: str, block: int) -> None:
        """S04 S06."""
        truth, _ = plain(name)
        pair = pair_with(DRAFTERS[drafter], truth)
        result = answer(pair, block, **FIELDS[name])
        assert list(result.token_ids) == truth[:NUM_TOKENS]
        num_drafted = (block - 1) * (result.passes - 1)  # the first pass drafts nothing
        assert 0 < result.tokens_from_draft <= num_drafted
        if drafter == "repeating":
            assert result.tokens_from_draft < num_drafted

    @pytest.mark.parametrize("block", [1, 3, 8])
    def test_a_drafter_of_the_real_kind_changes_nothing(self, block: int) -> None:
        pair = random_pair()
        assert ids(pair, block, **FIELDS["all"]) == plain("all")[0][:NUM_TOKENS]

    @pytest.mark.parametrize("block", [1, 2, 5, 8])
    @pytest.mark.parametrize(
        "filters", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 0.0}, {"top_k": 300, "top_p": 1e-6}]
    )
    def test_a_filter_that_leaves_one_token_is_greedy_at_any_temperature(
        self, filters: Fields, block: int
    ) -> None:
        truth, _ = plain("all")
        pair = pair_with(DRAFTERS["half right"], truth)
        fields = {**FIELDS["all"], **filters, "temperature": 3.0}
        assert ids(pair, block, **fields) == truth[:NUM_TOKENS]


class TestSeeds:
    @pytest.mark.parametrize("block", [1, 4])
    def test_the_same_seed_gives_the_same_ids_again_and_another_does_not(self, block: int) -> None:
        """S07."""
        pair = random_pair()
        first, second, third, again = (sampled(pair, block, seed) for seed in (1, 2, 3, 1))
        assert first == again
        assert len({tuple(found) for found in (first, second, third)}) == 3

    def test_negative_and_huge_seeds_are_seeds_like_others(self) -> None:
        """S11."""
        pair = random_pair()
        seeds = (1, -1, -2, 10**30)
        answers = [sampled(pair, 3, seed) for seed in seeds]
        assert answers == [sampled(pair, 3, seed) for seed in seeds]
        assert len({tuple(found) for found in answers}) == len(seeds)

    def test_requests_do_not_disturb_each_other(self) -> None:
        """S08."""
        pair = random_pair()
        seeds = (5, 6, 5)
        alone = [sampled(pair, 4, seed) for seed in seeds]
        params = [SamplingParams(temperature=1.0, seed=seed) for seed in seeds]
        together = [
            stream_generate(pair, PROMPT, each, max_tokens=12, block_size=4) for each in params
        ]
        running = list(together)
        while running:
            mx.random.seed(len(running))  # global state plays no part
            running = [generation for generation in running if advanced(generation)]
        assert [list(generation.result.token_ids) for generation in together] == alone
        assert alone[0] == alone[2] != alone[1]

    def test_a_seed_changes_nothing_at_temperature_0(self) -> None:
        pair = random_pair()
        assert ids(pair, 4, 12, seed=1) == ids(pair, 4, 12, seed=2) == plain(None)[0][:12]


def advanced(generation: Any) -> Step | None:
    return next(generation, None)


class TestLogprobs:
    @pytest.mark.parametrize("block", BLOCKS)
    @pytest.mark.parametrize("drafter", [None, "right", "half right", "repeating"])
    @pytest.mark.parametrize("name", [None, "all"])
    def test_they_are_mlx_lms(self, name: str | None, drafter: str | None, block: int) -> None:
        """S12."""
        truth, rows = plain(name)
        pair = pair_with(DRAFTERS.get(drafter), truth)
        fields = FIELDS[name] if name else {}
        result = answer(pair, block, logprobs=3, **fields)
        assert list(result.token_ids) == truth[:NUM_TOKENS]
        for token, entry, row in zip(result.token_ids, result.logprobs, rows, strict=False):
            assert entry.logprob == pytest.approx(row[token], abs=1e-3)
            best = np.argsort(-row)[:3].tolist()
            assert [token for token, _ in entry.top] == best
            assert [value for _, value in entry.top] == pytest.approx(row[best], abs=1e-3)

    @pytest.mark.parametrize("block", [1, 2, 5, 8])
    def test_of_a_sampled_answer_they_are_the_targets_before_filters_and_temperature(
        self, block: int
    ) -> None:
        fields = {**FIELDS["all"], "temperature": 0.7, "top_k": 40, "top_p": 0.95, "seed": 3}
        result = answer(random_pair(), block, logprobs=0, **fields)
        line = [*PROMPT, *result.token_ids]
        logits = sticky_target()(mx.array([line]))[0]
        for place, (token, entry) in enumerate(
            zip(result.token_ids, result.logprobs, strict=True), len(PROMPT)
        ):
            row = logits[place - 1 : place]
            for change in processors(FIELDS["all"]):
                row = change(mx.array(line[:place]), row)
            expected = row[0, token] - mx.logsumexp(row)
            assert entry.logprob == pytest.approx(expected.item(), abs=1e-3)
            assert entry.top == ()

    def test_asking_for_them_does_not_change_the_answer(self) -> None:
        pair = random_pair()
        fields = {"temperature": 1.0, "seed": 4}
        assert ids(pair, 4, **fields) == ids(pair, 4, **fields, logprobs=20)


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.1, "top_k": 2, "seed": 2}])
def test_every_pass_ends_in_one_token_that_was_not_drafted(fields: Fields) -> None:
    pair = pair_with(DRAFTERS["half right"], plain(None)[0])
    result = answer(pair, 4, **fields)
    expected = [place < count - 1 for count in result.accepted for place in range(count)]
    whole = sum(result.accepted[:-1])  # the last pass may be cut before its end
    assert list(result.from_draft)[:whole] == expected[:whole]
    assert result.tokens_from_draft == sum(result.from_draft) > 3


@pytest.mark.parametrize("fields", [{}, {"top_k": 20}, {"top_p": 0.9, "frequency_penalty": 0.3}])
@pytest.mark.parametrize("seed", [0, 5, -5])
def test_a_seed_gives_the_same_ids_for_every_block_and_without_drafting(
    seed: int, fields: Fields
) -> None:
    pair = random_pair()
    blocks = (1, 2, 3, 5, 8)
    runs = {tuple(ids(pair, block, temperature=0.8, seed=seed, **fields)) for block in blocks}
    assert len(runs) == 1


class TestPrecedence:
    PAIR = pair_of(
        Target(sticky_target()),
        default_sampling=SamplingParams(temperature=1.0, top_k=20, repetition_penalty=1.1),
    )

    def test_what_is_not_given_is_the_models_own(self) -> None:
        """S09."""
        params = self.PAIR.sampling(top_k=5, min_p=None, seed=3)
        assert params == SamplingParams(temperature=1.0, top_k=5, repetition_penalty=1.1, seed=3)
        assert pair_of(self.PAIR.target).sampling(top_k=5) == SamplingParams(top_k=5)

    def test_an_explicit_zero_wins(self) -> None:
        """S10."""
        params = self.PAIR.sampling(temperature=0, top_k=0, repetition_penalty=1.0)
        assert params == SamplingParams()

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"top_k": -1}, "top_k is -1"),
            ({"xtc": 1}, "xtc is no sampling field"),
            ({"logit_bias": {VOCAB: 1.0}}, "token 300 is outside 0 to 299"),
        ],
    )
    def test_an_impossible_field_is_refused_by_name(self, given: Fields, said: str) -> None:
        with pytest.raises(InvalidRequest, match=said):
            self.PAIR.sampling(**given)
