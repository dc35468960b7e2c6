"""The curve of a real pair: real passes, fair turns, no trust in a busy machine."""

import math
import random
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from tiny import VOCAB, pair_of, tiny_pair, tiny_target

from dflash2_mlx import measure as measuring
from dflash2_mlx.curve import Curve
from dflash2_mlx.decode import Conversation
from dflash2_mlx.errors import DFlashError
from dflash2_mlx.measure import (
    MAX_DEEP,
    MAX_ROUNDS,
    MIN_DEEP,
    MIN_ROUNDS,
    SHALLOW,
    check_idle,
    check_steady,
    curve_of,
    deeper,
    measure,
    rising,
    time_parts,
    time_widths,
    typical,
    typical_of_each,
)
from dflash2_mlx.pair import Pair
from dflash2_mlx.target import Target
from dflash2_mlx.tuning import Store, Tuning

GUESS = Curve({1: 1.0, 2: 1.1, 4: 1.3, 8: 2.7})
TRUE = Curve({1: 10.0, 2: 11.0, 4: 13.0, 8: 27.0}, {1: 0.1, 2: 0.2, 4: 0.4, 8: 1.6})
TimePass = Callable[[Conversation, int], float]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    pair = tiny_pair()
    pair.tuning = Tuning("tiny", GUESS, quantized=False, store=Store(tmp_path / "tuning.json"))
    return pair


def by_curve(noise: float = 0.0) -> TimePass:
    """Real passes, whose times are those of a curve."""
    dice, real = random.Random(0), measuring.time_pass

    def time_pass(conversation: Conversation, width: int) -> float:
        real(conversation, width)
        return TRUE.ms(width, conversation.length) * (1 + noise * dice.gauss(0, 1))

    return time_pass


def small(monkeypatch: pytest.MonkeyPatch, time_pass: TimePass) -> None:
    """Few tokens and few passes, for tiny models."""
    monkeypatch.setattr(measuring, "time_pass", time_pass)
    monkeypatch.setattr(measuring, "MIN_DEEP", 300)
    monkeypatch.setattr(measuring, "MAX_DEEP", 300)
    monkeypatch.setattr(measuring, "MAX_ROUNDS", MIN_ROUNDS)


def test_a_curve_is_found_through_noise(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, by_curve(noise=0.02))
    found = measure(pair)
    assert list(found.ms) == [SHALLOW, 300]
    assert found.passes == 2 * MIN_ROUNDS * 4
    for width in GUESS.widths:
        for depth in (SHALLOW, 300):
            assert found.curve.ms(width, depth) == pytest.approx(TRUE.ms(width, depth), rel=0.05)


def test_real_passes_have_real_times(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, measuring.time_pass)
    monkeypatch.setattr(measuring, "MAX_SPREAD", 1e9)
    found = measure(pair)
    assert found.curve.widths == GUESS.widths
    assert all(ms > 0 for at in found.ms.values() for ms in at.values())
    assert found.seconds > 0


def test_widths_take_turns_and_every_pass_keeps_one_token(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[int] = []
    real = measuring.time_pass

    def time_pass(conversation: Conversation, width: int) -> float:
        order.append(width)
        before = conversation.length
        ms = real(conversation, width)
        assert conversation.length == before + 1
        return ms

    small(monkeypatch, time_pass)
    conversation = Conversation(pair.target, pair.drafter)
    conversation.prefill(list(range(40)))
    times = time_widths(conversation, [1, 2, 4])
    assert order[:9] == [4, 2, 1, 1, 2, 4, 4, 2, 1]
    assert {width: len(ms) for width, ms in times.items()} == dict.fromkeys((1, 2, 4), MIN_ROUNDS)


def test_rounds_are_added_until_the_time_is_up(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "time_pass", lambda *_: 1.0)
    conversation = Conversation(pair.target, pair.drafter)
    assert len(time_widths(conversation, [1])[1]) == MAX_ROUNDS
    monkeypatch.setattr(measuring, "BUDGET_S", -1.0)
    assert len(time_widths(conversation, [1])[1]) == MIN_ROUNDS


def test_progress_is_told_to_the_end(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "time_pass", lambda *_: 1.0)
    monkeypatch.setattr(measuring, "BUDGET_S", -1.0)
    told: list[tuple[str, int, int | None]] = []
    conversation = Conversation(pair.target, pair.drafter)
    conversation.prefill([1, 2, 3])
    time_widths(conversation, [1], lambda *args: told.append(args))
    assert told[0] == ("timing passes behind 2 tokens", 1, MAX_ROUNDS)
    assert told[-1][1] == told[-1][2]


# A typical pass


def test_one_slow_pass_does_not_change_what_is_typical() -> None:
    assert typical([10.0, 10.2, 9.9, 400.0, 10.1]) == pytest.approx(10.05, abs=0.06)
    assert typical([10.0]) == 10.0


def test_slow_rounds_and_one_slow_pass_change_no_ratio() -> None:
    times = {1: [10.0, 20.0, 10.0, 13.0, 10.0], 4: [20.0, 40.0, 20.0, 26.0, 20.0]}
    assert typical_of_each(times) == pytest.approx({1: 10.0, 4: 20.0})
    times[4][2] = 300.0
    found = typical_of_each(times)
    assert found[4] / found[1] == pytest.approx(2.0)


def test_moods_of_the_machine_cancel_out() -> None:
    dice = random.Random(3)
    moods = [math.exp(dice.gauss(0, 0.2)) for _ in range(MAX_ROUNDS)]
    times = {width: [width * mood for mood in moods] for width in (1, 2, 4)}
    found = typical_of_each(times)
    assert found[2] / found[1] == pytest.approx(2.0)
    assert found[4] / found[1] == pytest.approx(4.0)


def test_slopes_never_fall_with_the_width() -> None:
    assert rising([1.0, 3.0, 2.0, 4.0]) == [1.0, 2.5, 2.5, 4.0]
    assert rising([3.0, 2.0, 1.0]) == [2.0, 2.0, 2.0]
    noisy = curve_of({100: {1: 10.0, 2: 12.0, 4: 14.0}, 1100: {1: 9.9, 2: 12.4, 4: 14.2}})
    assert noisy.slope_ms[1] == 0.0
    assert noisy.slope_ms[2] == noisy.slope_ms[4] == pytest.approx(0.3)


def test_one_depth_gives_no_slope() -> None:
    assert curve_of({60: {1: 10.0, 2: 12.0}}) == Curve({1: 10.0, 2: 12.0}, {1: 0.0, 2: 0.0})


def test_the_second_depth_depends_on_how_fast_prompts_are_read() -> None:
    assert deeper(128, prefill_s=10.0, room=10**6) == MIN_DEEP
    assert MIN_DEEP < deeper(128, prefill_s=0.25, room=10**6) < MAX_DEEP
    assert deeper(128, prefill_s=0.01, room=10**6) == MAX_DEEP
    assert deeper(128, prefill_s=0.01, room=700) == 700
    assert deeper(128, prefill_s=0.01, room=200) == 0


# What is refused


def test_a_machine_with_more_to_do_than_cores_is_refused() -> None:
    check_idle(load=3.9, cores=4)
    with pytest.raises(DFlashError, match=r"busy \(load 5.0 on 4 cores\).* is kept; try again"):
        check_idle(load=5.0, cores=4)


def test_the_parts_of_a_pass_are_timed_and_nothing_is_kept(pair: Pair) -> None:
    conversation, untouched = (Conversation(pair.target, pair.drafter) for _ in range(2))
    for one in (conversation, untouched):
        one.prefill(list(b"a text to stand behind"))
    parts = {width: time_parts(conversation, width) for width in (1, 4)}
    assert parts[4].draft_ms > parts[1].draft_ms
    assert all(part.host_ms > 0 for part in parts.values())
    assert conversation.tokens == untouched.tokens
    flights = [one.launch(4) for one in (conversation, untouched)]
    assert mx.array_equal(*[flight.reading.logits for flight in flights])


def test_plain_passes_that_spread_are_refused_and_the_old_values_kept(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.tuning.measure(TRUE)
    dice = random.Random(0)
    small(monkeypatch, lambda *_: dice.choice([10.0, 20.0]))
    with pytest.raises(DFlashError, match=r"busy \(a plain pass took 1\d.\d to 20.0 ms\)"):
        measure(pair)
    assert pair.tuning.curve == TRUE


def test_steady_passes_pass() -> None:
    assert check_steady([10.0, 10.1, 10.2, 30.0, 10.0, 9.9, 10.1]) < 1.3


def test_a_pair_without_a_drafter_has_nothing_to_tune() -> None:
    with pytest.raises(DFlashError, match="nothing to tune: no drafter was named"):
        measure(pair_of(Target(tiny_target())))


@pytest.mark.parametrize("limit", [10, 70])
def test_a_tiny_context_is_refused(pair: Pair, limit: int) -> None:
    pair.context_limit = limit
    with pytest.raises(DFlashError, match="nothing to tune: tiny reads too few tokens"):
        measure(pair)


def test_a_short_context_is_measured_at_one_depth(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(monkeypatch, by_curve())
    pair.context_limit = 200
    found = measure(pair)
    assert len(found.ms) == 1
    assert max(found.ms) < 200


def test_the_text_that_is_read_is_within_the_vocabulary(pair: Pair) -> None:
    assert max(measuring._text(pair, 500)) < VOCAB
