"""What passes take, learned from times of a machine that has moods of its own."""

import math
import random
from itertools import product

import pytest

from dflash2_mlx.curve import KNOWN, MOVED, Curve, LiveCurve

DEPTH = 100
STORED = {1: 10.0, 2: 11.0, 4: 13.0, 8: 27.0}


def live_curve(*, measured: bool = True, slope: bool = False) -> LiveCurve:
    return LiveCurve(Curve(dict(STORED), {8: 1.0} if slope else {}), measured=measured)


def see(live: LiveCurve, width: int, ms: float, times: int = 1) -> None:
    for _ in range(times):
        live.watch(width, DEPTH, ms)


def test_a_slow_machine_is_slow_at_widths_that_did_not_run() -> None:
    live = live_curve(slope=True)
    see(live, 4, 26.0, times=40)
    curve = live.curve
    assert curve.base_ms == pytest.approx({1: 20.0, 2: 22.0, 4: 26.0, 8: 54.0})
    assert curve.slope_ms[8] == pytest.approx(2.0)


def test_a_machine_that_slows_down_leaves_the_order_of_widths_alone() -> None:
    live = live_curve()
    see(live, 1, 10.0, times=20)
    see(live, 4, 13.0, times=40)
    see(live, 4, 16.0, times=40)
    assert live.curve.ms(4, DEPTH) == pytest.approx(16.0, rel=0.01)
    assert live.curve.ms(1, DEPTH) == pytest.approx(16.0 * 10 / 13, rel=0.05)


def test_widths_that_were_all_timed_keep_their_own_errors() -> None:
    """The stored curve has block 4 a quarter too slow, whatever the machine does meanwhile."""
    live, true = live_curve(), {1: 10.0, 2: 11.0, 4: 10.4}
    for mood, width in product((1.0, 1.2, 0.9, 1.1), true):
        see(live, width, mood * true[width], times=12)
    for width in true:
        assert live.curve.ms(width, DEPTH) == pytest.approx(1.1 * true[width], rel=0.05)


def test_noise_is_averaged_out() -> None:
    dice, live = random.Random(1), live_curve()
    for _ in range(200):
        for width in (1, 4):
            see(live, width, STORED[width] * math.exp(dice.gauss(0, 0.1)), times=3)
    ratio = live.curve.ms(4, DEPTH) / live.curve.ms(1, DEPTH)
    assert ratio == pytest.approx(1.3, rel=0.04)


def test_a_guess_gives_way_to_the_first_times() -> None:
    live = live_curve(measured=False)
    for width, ms in ((1, 50.0), (2, 200.0), (4, 90.0)):
        see(live, width, ms, times=KNOWN)
        assert live.curve.ms(width, DEPTH) == pytest.approx(ms, rel=1e-3)
    assert live.curve.ms(1, DEPTH) == pytest.approx(50.0, rel=1e-3)


# Accidents, and what is none


def test_one_slow_pass_is_not_a_slow_width() -> None:
    live = live_curve()
    see(live, 4, 13.0, times=10)
    see(live, 4, 1300.0)
    assert live.curve.ms(4, DEPTH) == pytest.approx(13.0)


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("slow", range(KNOWN))
def test_one_slow_pass_while_exploring_spoils_no_width(slow: int, measured: bool) -> None:
    live = live_curve(measured=measured)
    for place in range(KNOWN):
        see(live, 4, 1300.0 if place == slow else 13.0)
    assert live.known(4)
    assert live.curve.base_ms == pytest.approx(STORED)


@pytest.mark.parametrize("slow", range(KNOWN))
def test_one_slow_pass_of_a_second_width_spoils_none(slow: int) -> None:
    live = live_curve(measured=False)
    see(live, 1, 10.0, times=KNOWN)
    for place in range(KNOWN):
        see(live, 4, 1300.0 if place == slow else 13.0)
    assert live.curve.ms(1, DEPTH) == pytest.approx(10.0, rel=1e-3)
    assert live.curve.ms(4, DEPTH) == pytest.approx(13.0, rel=1e-3)


def test_slow_passes_in_a_row_are_a_slow_machine() -> None:
    live = live_curve()
    see(live, 4, 13.0, times=10)
    see(live, 4, 39.0, times=2)
    assert live.curve.ms(4, DEPTH) == pytest.approx(39.0, rel=1e-3)
    assert live.curve.ms(1, DEPTH) == pytest.approx(30.0, rel=0.05)
    see(live, 4, 13.0)
    assert live.curve.ms(1, DEPTH) == pytest.approx(10.0, rel=0.05)


def test_a_width_unlike_what_just_ran_has_a_wrong_stored_time() -> None:
    live = live_curve()
    see(live, 4, 13.0, times=10)
    see(live, 1, 2.0)
    assert live.curve.ms(1, DEPTH) == pytest.approx(2.0, rel=0.01)
    assert live.curve.ms(4, DEPTH) == pytest.approx(13.0, rel=0.01)


# What is known


def test_a_width_is_stale_until_timed_and_when_the_machine_has_changed() -> None:
    live = live_curve()
    assert live.stale(1)
    assert not live.timed(1)
    see(live, 1, 10.0)
    assert live.timed(1)
    assert not live.known(1)
    assert not live.stale(1)
    see(live, 4, 13.0, times=20)
    assert not live.stale(1)
    see(live, 4, 13.0 * math.exp(1.2 * MOVED), times=40)
    assert live.stale(1)
    assert not live.stale(4)


def test_a_width_the_curve_does_not_have_is_ignored() -> None:
    live = live_curve()
    see(live, 7, 99.0, times=5)
    assert live.curve.base_ms == STORED


def test_a_long_run_keeps_learning() -> None:
    """A server's filter neither goes deaf nor astray."""
    dice, live = random.Random(2), live_curve()
    for _ in range(20_000):
        see(live, 4, 13.0 * math.exp(dice.gauss(0, 0.1)))
    see(live, 4, 19.5, times=40)
    assert live.curve.ms(4, DEPTH) == pytest.approx(19.5, rel=0.02)
    assert live.curve.ms(1, DEPTH) == pytest.approx(15.0, rel=0.2)
    see(live, 1, 15.0, times=10)
    assert live.curve.ms(1, DEPTH) == pytest.approx(15.0, rel=0.05)
