"""One answer steered by the tuner: any widths give the same ids, and each request is on its own."""

import random
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from byte_bpe import byte_bpe
from tiny import (
    END,
    TARGETS,
    ScriptedDrafter,
    pair_of,
    plain_ids,
    tiny_drafter,
    tiny_pair,
    tiny_target,
)

import dflash2_mlx.decode
from dflash2_mlx import SamplingParams, generate, stream_generate
from dflash2_mlx.chooser import Chooser, Verdict
from dflash2_mlx.curve import Curve
from dflash2_mlx.decode import MAX_PAUSE, Conversation, decode
from dflash2_mlx.grammar import Grammar
from dflash2_mlx.pair import Pair, join
from dflash2_mlx.randomness import Randomness
from dflash2_mlx.target import Target
from dflash2_mlx.tuner import Pilot
from dflash2_mlx.tuning import Store, Tuning
from dflash2_mlx.unseen import MAX_UNSEEN

PROMPT = list(b"A prompt that is longer than every window.")
GUESS = Curve({1: 1.0, 2: 1.1, 4: 1.3, 8: 2.7})
FLAT = {1: 10.0, 2: 10.5, 4: 11.0, 8: 12.0}
LOSING = {1: 10.0, 2: 22.0, 4: 44.0, 8: 90.0}

Costs = Mapping[int, float]


@pytest.fixture
def time_passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[Costs], None]:
    """Makes every pass take the time its width is said to take, in ms."""

    def set_costs(costs: Costs) -> None:
        def pass_time(flight: dflash2_mlx.decode.Flight, *_: float) -> float:
            return costs.get(flight.width, 10.0 * flight.width) / 1000

        monkeypatch.setattr(dflash2_mlx.decode, "_pass_time", pass_time)

    return set_costs


def tuned(pair: Pair, folder: Path) -> Pair:
    pair.tuning = Tuning("tiny", GUESS, quantized=False, store=Store(folder / "tuning.json"))
    return pair


@cache
def truth() -> list[int]:
    """What the tiny target says behind the prompt."""
    return plain_ids(tiny_target(), PROMPT, 260, ends=())


def scripted(folder: Path, share: float, *, limit: int = 10**6) -> Pair:
    """A pair of which so many drafts are right, and no token ends the answer."""
    luck = random.Random(0)

    def propose(position: int, width: int) -> list[int]:
        first = position + 1 - len(PROMPT)
        right = [*truth()[first : first + width - 1], *[0] * width][: width - 1]
        return [token if luck.random() < share else (token + 1) % 250 for token in right]

    drafter = ScriptedDrafter(propose)
    drafter.config.max_position_embeddings = limit
    pair = pair_of(Target(tiny_target(), taps=[0]), drafter, end_tokens=frozenset())
    return tuned(pair, folder)


def widths_of(pair: Pair, num_tokens: int, **options: object) -> list[int]:
    steps = stream_generate(pair, PROMPT, max_tokens=num_tokens, **options)  # type: ignore[arg-type]
    return [step.drafted + 1 for step in steps]


# The promise


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", TARGETS)
def test_no_decision_of_a_pilot_changes_the_ids(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, seed: int
) -> None:
    pair = tuned(tiny_pair(kind), tmp_path)
    dice = random.Random(seed)
    chosen: list[int] = []

    def choose(self: Pilot, depth: int) -> int:
        # Stretches of plain decoding, as when parked, and passes of any width.
        chosen.append(1 if len(chosen) % 20 < 8 else dice.choice([1, 2, 3, 4, 5, 8]))
        return chosen[-1]

    monkeypatch.setattr(Pilot, "choose", choose)
    result = generate(pair, PROMPT, max_tokens=60)
    assert list(result.token_ids) == plain_ids(pair.target.model, PROMPT, 60)
    assert len(set(chosen)) > 3


def test_the_ids_are_the_same_whatever_passes_cost(
    time_passes: Callable[[Costs], None], tmp_path: Path
) -> None:
    for number, costs in enumerate((FLAT, LOSING)):
        time_passes(costs)
        pair = scripted(tmp_path / str(number), 0.8)
        assert list(generate(pair, PROMPT, max_tokens=200).token_ids) == truth()[:200]


# The widths that run, and the words


def test_where_drafts_are_cheap_the_widest_block_runs(
    time_passes: Callable[[Costs], None], tmp_path: Path
) -> None:
    time_passes(FLAT)
    pair = scripted(tmp_path, 1.0)
    generation = stream_generate(pair, PROMPT, max_tokens=200)
    widths = [step.drafted + 1 for step in generation]
    assert set(widths[14:-1]) == {8}
    state = generation.result.effective
    assert (state.block_size, state.drafting) == (8, True)
    assert state.reason == "block 8, expected 6.49x of plain decoding"


def test_where_every_block_loses_the_answer_is_plain_and_says_so(
    time_passes: Callable[[Costs], None], tmp_path: Path
) -> None:
    """P12."""
    time_passes(LOSING)
    pair = scripted(tmp_path, 0.5)
    generation = stream_generate(pair, PROMPT, max_tokens=200)
    widths = [step.drafted + 1 for step in generation]
    assert widths.count(1) >= 0.97 * len(widths)
    assert set(widths[7:70]) == {1}
    state = generation.result.effective
    assert (state.block_size, state.drafting) == (1, False)
    assert state.reason.startswith("parked: drafting would run at 0.")
    assert "x of plain decoding (block " in state.reason


def test_a_block_that_was_asked_for_runs_whatever_it_costs(
    time_passes: Callable[[Costs], None], tmp_path: Path
) -> None:
    """L04."""
    time_passes(LOSING)
    for block in (2, 4, 8):
        widths = widths_of(scripted(tmp_path, 1.0), 1 + 8 * block, block_size=block)
        assert widths == [1] + [block] * 8


def test_without_a_depth_option_the_drafter_drafts_and_says_how_deep(
    time_passes: Callable[[Costs], None], tmp_path: Path
) -> None:
    """L05."""
    time_passes(FLAT)
    pair = scripted(tmp_path, 1.0)
    assert pair.effective().reason == "auto: every width is timed first"
    assert max(widths_of(pair, 60)) == 8


def test_a_second_answer_starts_with_the_block_of_the_first(
    time_passes: Callable[[Costs], None], tmp_path: Path
) -> None:
    time_passes(FLAT)
    first = widths_of(scripted(tmp_path, 1.0), 200)
    assert set(first[:13]) == {1, 2, 4, 8}
    # As in another process: only the file is left.
    second = scripted(tmp_path, 1.0)
    assert set(widths_of(second, 100)[1:-1]) == {8}
    assert "from block 8, by times of" in second.effective().reason


def test_an_answer_that_is_given_up_teaches_as_well(
    time_passes: Callable[[Costs], None], tmp_path: Path
) -> None:
    time_passes(FLAT)
    pair = scripted(tmp_path, 1.0)
    steps = stream_generate(pair, PROMPT, max_tokens=250)
    for _ in range(30):
        next(steps)
    steps.close()
    assert pair.tuning.known.measured
    assert (tmp_path / "tuning.json").exists()


def test_the_last_pass_teaches_nothing_about_drafts_behind_the_cut(tmp_path: Path) -> None:
    pair = scripted(tmp_path, 1.0)
    for _ in range(4):
        generate(pair, PROMPT, max_tokens=17)
    assert min(pair.tuning.known.acceptance["prose"].rates) > 0.7


# Parked drafters


def test_after_a_long_park_a_probe_drafts_as_if_the_drafter_had_seen_everything() -> None:
    drafter = tiny_drafter()
    target = join(tiny_target("sliding"), drafter)
    num_parked = 300
    assert num_parked > MAX_UNSEEN

    def after(widths: list[int]) -> Conversation:
        conversation = Conversation(target, drafter)
        conversation.prefill(PROMPT)
        for width in widths:
            flight = conversation.launch(width)
            verdict = conversation.chooser.read(flight.verdict, flight.width)
            conversation.commit(flight, verdict.tokens[:1])
        return conversation

    parked, drafting = after([1] * num_parked), after([4] * num_parked)
    assert parked.tokens == drafting.tokens
    trellises = [
        drafter.propose(c.context, c._unseen.take(), mx.array(c.tokens[-1:]), 8)
        for c in (parked, drafting)
    ]
    ours, theirs = ([t.tokens(t.walk()).tolist(), t.scores] for t in trellises)
    assert ours[0] == theirs[0]
    assert mx.allclose(ours[1], theirs[1], atol=1e-4)


def test_a_parked_drafter_lags_behind_by_no_more_than_it_can_catch_up() -> None:
    drafter = tiny_drafter()
    conversation = Conversation(join(tiny_target(), drafter), drafter)
    conversation.prefill(PROMPT)
    lags = []
    for _ in range(MAX_UNSEEN + 40):
        flight = conversation.launch(1)
        verdict = conversation.chooser.read(flight.verdict, flight.width)
        conversation.commit(flight, verdict.tokens)
        lags.append(conversation.length - conversation.context[0].offset)
    assert max(lags) == MAX_UNSEEN - 1
    assert lags[-1] == 40


# Limits hold for one request


def test_a_prompt_past_the_drafters_reach_is_answered_plainly_and_the_next_drafts(
    tmp_path: Path,
) -> None:
    """P06."""
    limit = 120
    pair = scripted(tmp_path, 1.0, limit=limit)
    prompt = (PROMPT * 5)[: limit + 40]
    far = generate(pair, prompt, max_tokens=20, block_size=4)
    assert list(far.token_ids) == plain_ids(pair.target.model, prompt, 20, ends=())
    assert set(far.accepted) == {1}
    assert not far.effective.drafting
    assert far.effective.reason == f"past the {limit} tokens the drafter can read"
    near = generate(pair, PROMPT, max_tokens=20, block_size=4)
    assert max(near.accepted) == 4
    assert near.effective.drafting


@pytest.mark.parametrize("block", ["auto", 4])
@pytest.mark.parametrize("beside", [-9, -1, 0, 1])
def test_around_the_limit_everything_is_answered(
    tmp_path: Path, beside: int, block: int | str
) -> None:
    """P07: prompts just below, at and above it, and answers that grow past it."""
    limit = len(PROMPT) - beside
    pair = scripted(tmp_path, 1.0, limit=limit)
    result = generate(pair, PROMPT, max_tokens=30, block_size=block)  # type: ignore[arg-type]
    assert list(result.token_ids) == truth()[:30]
    assert set(result.accepted[-10:]) == {1}
    assert f"past the {limit} tokens" in result.effective.reason


# Times that say nothing


def test_a_reader_that_held_the_loop_hides_what_a_pass_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]

    class Slow(Chooser):
        """Every pass takes a hundredth of a second."""

        def read(self, verdict: mx.array, width: int) -> Verdict:
            now[0] += 0.01
            return super().read(verdict, width)

    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(dflash2_mlx.decode, "time", clock)
    pair = tiny_pair()
    chooser = Slow(SamplingParams(), Randomness.from_seed(0), pair.target.vocab_size)
    conversation = Conversation(pair.target, pair.drafter, chooser)
    conversation.prefill(PROMPT)
    timed = []
    for step in decode(conversation, lambda: 1, max_tokens=8, end_tokens=()):
        timed.append(step.pass_s is not None)
        now[0] += 5.0 if len(timed) == 4 else 0.0
    # The first pass is warm-up, the one in flight while the fourth was read has no time, and while
    # the last one ran no other was launched.
    assert timed == [False, True, True, True, False, True, True, False]
    assert MAX_PAUSE < 1


@pytest.mark.parametrize("tolerance", [None, 0.0], ids=["launched ahead", "read in between"])
def test_a_pass_that_nothing_was_launched_behind_tells_no_time(tolerance: float | None) -> None:
    """Such a one is short: most of it went by before the read of the one before it."""
    drafter = ScriptedDrafter(lambda position, width: [0] * (width - 1))  # none of them stands
    target = Target(tiny_target(), taps=[0])
    chooser = Chooser(
        SamplingParams(), Randomness.from_seed(0), target.vocab_size, tolerance=tolerance
    )
    conversation = Conversation(target, drafter, chooser)
    conversation.prefill(PROMPT)
    steps = list(decode(conversation, lambda: 4, max_tokens=12, end_tokens=()))
    wide = [step.pass_s is not None for step in steps if step.drafted == 3]
    assert len(wide) > 4
    assert wide[1:-2] == [True] * (len(wide) - 3)
    assert wide[-1] == (tolerance is not None)


def test_sampled_answers_are_steered_too(
    time_passes: Callable[[Costs], None], tmp_path: Path
) -> None:
    time_passes(FLAT)
    pair = tuned(tiny_pair(), tmp_path)
    pair.end_tokens = frozenset()
    result = generate(pair, PROMPT, SamplingParams(temperature=1.0, seed=3), max_tokens=80)
    assert result.completion_tokens == 80
    assert pair.tuning.known.measured


# Grammars


def speaking(pair: Pair) -> Pair:
    """The pair with a tokenizer that grammars know."""
    pair.tokenizer, pair.end_tokens = byte_bpe(), frozenset({END})
    return pair


def test_what_a_grammar_forces_is_no_achievement_of_the_drafter(
    time_passes: Callable[[Costs], None], tmp_path: Path
) -> None:
    time_passes(FLAT)
    pair = speaking(scripted(tmp_path, 0.0))
    sentence = SamplingParams(grammar=Grammar.regex("(a|b), and then nothing is left to choose."))
    assert generate(pair, PROMPT, sentence, max_tokens=60).tokens_from_draft > 20
    assert max(pair.tuning.known.acceptance["grammar"].tried) <= 1
    assert pair.tuning.known.acceptance["prose"].tried == [0.0] * 7


def test_times_of_passes_that_walk_a_grammar_are_not_those_of_the_pair(
    time_passes: Callable[[Costs], None], tmp_path: Path
) -> None:
    time_passes(LOSING)
    pair = speaking(scripted(tmp_path, 0.5))
    words = SamplingParams(grammar=Grammar.regex("[a-z ]{90,200}"))
    widths = [step.drafted + 1 for step in stream_generate(pair, PROMPT, words, max_tokens=80)]
    assert widths.count(1) >= 0.9 * len(widths)
    assert not pair.tuning.known.measured
    assert pair.tuning.curve.base_ms == GUESS.base_ms
