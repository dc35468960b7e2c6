"""The choice of a block, with made-up costs: tokens per measured time decide, nothing else does."""

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise

import pytest

from dflash2_mlx import tuner
from dflash2_mlx.curve import KNOWN, Curve, LiveCurve
from dflash2_mlx.tuner import (
    CAP_LIFT,
    EXPLORED,
    FIRST_PROBE,
    LAST_PROBE,
    MIN_GAIN,
    PARKED_EVERY,
    PLAIN_EVERY,
    PROBE_PASSES,
    Acceptance,
    Pilot,
    best_width,
    tokens_per_ms,
)

DEPTH = 100
PLACES = 7
Costs = Mapping[int, float]

# Width 8 accepts more than 4, and costs more per token.
KNEE = {1: 10.0, 2: 11.0, 4: 13.0, 8: 27.0}
FLAT = {1: 10.0, 2: 10.5, 4: 11.0, 8: 12.0}
LOSING = {1: 10.0, 2: 22.0, 4: 44.0, 8: 90.0}


def accepting(rate: float, passes: float = 48.0) -> Acceptance:
    """What `passes` wide passes show of a text whose every draft stands with `rate`."""
    return Acceptance([rate * passes] * PLACES, [passes] * PLACES)


def pilot_for(costs: Costs, rate: float = 0.8, **options: object) -> Pilot:
    """A pilot of a process that has timed plain decoding before, where the curve was measured."""
    options.setdefault("measured", True)
    live = LiveCurve(Curve(dict(costs)))
    if options["measured"]:
        live.watch(1, 0, costs[1])
    return Pilot(live, accepting(rate), **options)  # type: ignore[arg-type]


def fly(
    pilot: Pilot,
    passes: int,
    stood: Callable[[int], int],
    costs: Costs | None = None,
) -> list[int]:
    """The widths of so many passes; `stood(place)` drafts would stand in the pass at a place."""
    widths = []
    for place in range(passes):
        width = pilot.choose(DEPTH)
        ms = costs[width] if costs else None
        pilot.watch(width, DEPTH, min(stood(place), width - 1), ms)
        widths.append(width)
    return widths


def mostly(share: int, run: int = PLACES) -> Callable[[int], int]:
    """A run of `run` drafts stands in `share` of ten passes, none in the others."""
    return lambda place: run if place % 10 < share else 0


# Costs and depth


def test_a_pass_costs_more_behind_more_tokens() -> None:
    curve = Curve({1: 10.0, 5: 20.0}, {5: 2.0})
    assert curve.ms(5, 0) == 20.0
    assert curve.ms(5, 4000) == 28.0
    assert curve.ms(1, 4000) == 10.0


def test_depth_narrows_the_block() -> None:
    """P06: wide passes that win behind a short prompt lose behind a long one."""
    curve = Curve({1: 10.0, 4: 12.0, 8: 14.0}, {1: 0.1, 4: 0.8, 8: 3.0})
    chosen = [best_width(curve, accepting(0.8), depth) for depth in (0, 4000, 100_000)]
    assert chosen == [8, 4, 1]


# Acceptance


def test_expected_tokens_are_the_sum_over_prefixes() -> None:
    acceptance = accepting(0.5, passes=1e9)
    assert acceptance.expected_tokens(1) == 1.0
    assert acceptance.expected_tokens(4) == pytest.approx(1 + 0.5 + 0.25 + 0.125)


def test_a_place_behind_a_rejection_was_not_tried() -> None:
    acceptance = Acceptance.unknown(4)
    acceptance.watch(drafted=4, from_draft=1)
    assert acceptance.tried == [1.0, 1.0, 0.0, 0.0]
    assert acceptance.stood == [1.0, 0.0, 0.0, 0.0]


def test_a_place_never_tried_is_taken_to_be_like_the_one_before() -> None:
    acceptance = Acceptance([90.0, 0.0, 0.0], [100.0, 0.0, 0.0])
    first, second, third = acceptance.rates
    assert first == second == third
    assert first == pytest.approx(0.9, abs=0.01)


def test_what_was_long_ago_fades() -> None:
    acceptance = accepting(1.0)
    for _ in range(200):
        acceptance.watch(drafted=1, from_draft=0)
    assert acceptance.rates[0] < 0.1


def test_an_earlier_answer_counts_for_few_passes() -> None:
    remembered = accepting(0.9).remembered()
    assert remembered.rates[0] == pytest.approx(0.9, abs=0.1)
    for _ in range(16):
        remembered.watch(drafted=1, from_draft=0)
    assert remembered.rates[0] < 0.4


def test_remembering_changes_nothing_that_was_learned() -> None:
    learned = accepting(0.9)
    learned.remembered().watch(drafted=7, from_draft=0)
    assert learned.tried == [48.0] * PLACES


# The choice


@pytest.mark.parametrize("rate", [0.95, 0.8, 0.6])
def test_the_choice_is_by_tokens_per_ms_not_by_acceptance(rate: float) -> None:
    """P04: width 8 accepts more tokens a pass whatever the text, and takes longer for each."""
    acceptance = accepting(rate)
    assert acceptance.expected_tokens(8) > acceptance.expected_tokens(4)
    wide, narrow = (tokens_per_ms(Curve(KNEE), acceptance, width, DEPTH) for width in (8, 4))
    assert narrow > wide
    assert pilot_for(KNEE, rate).choose(DEPTH) == 4


def test_plain_decoding_is_one_of_the_choices() -> None:
    assert pilot_for(LOSING).choose(DEPTH) == 1


def test_of_equals_the_narrowest_runs() -> None:
    assert (
        best_width(
            Curve({1: 1.0, 2: 1.0, 4: 1.0}), Acceptance([0.0] * 3, [1e9] * 3, prior=0.0), DEPTH
        )
        == 1
    )


def test_costs_where_block_4_always_wins_never_see_block_8_again() -> None:
    """P03: 800 tokens, and no way back to the full block to lose a little each time."""
    pilot = pilot_for(KNEE)
    assert set(fly(pilot, 400, mostly(8, run=3), KNEE)) == {4}
    assert pilot.probes == 0


@pytest.mark.parametrize(("slower", "block"), [(1 - MIN_GAIN / 2, 4), (1 - 2 * MIN_GAIN, 5)])
def test_a_small_gain_does_not_change_the_block(slower: float, block: int) -> None:
    gain = accepting(0.8).expected_tokens(5) / accepting(0.8).expected_tokens(4)
    pilot = pilot_for({1: 20.0, 4: 10.0, 5: 10.0 * gain * slower}, rate=0.5)
    assert pilot.choose(DEPTH) == 4
    pilot.acceptance = accepting(0.8)
    assert pilot.choose(DEPTH) == block


def test_plain_decoding_replaces_a_losing_block_whatever_the_gain() -> None:
    pilot = pilot_for({1: 10.0, 2: 17.9}, rate=0.8)
    assert pilot.choose(DEPTH) == 2
    pilot.acceptance = accepting(0.77)
    assert pilot.choose(DEPTH) == 1


def test_a_pair_that_loses_with_every_block_is_off_with_numbers() -> None:
    """P12."""
    pilot = pilot_for(LOSING)
    assert set(fly(pilot, 40, mostly(8), LOSING)) == {1}
    assert pilot.parked
    assert pilot.describe(DEPTH) == (
        "parked: drafting would run at 0.82x of plain decoding (block 2)"
    )


def test_a_running_block_is_described_with_its_gain() -> None:
    pilot = pilot_for(KNEE)
    pilot.choose(DEPTH)
    assert pilot.describe(DEPTH) == "block 4, expected 2.26x of plain decoding"


def test_a_block_that_others_are_expected_to_beat_runs_to_find_out() -> None:
    """Nothing was tried yet, so the widest gets the benefit of the doubt."""
    curve = Curve({1: 10.0, 2: 11.5, 4: 13.0, 8: 20.0})
    pilot = Pilot(LiveCurve(curve), Acceptance.unknown(PLACES), measured=True)
    assert pilot.choose(DEPTH) == 8
    assert best_width(curve, pilot.acceptance, DEPTH) == 4
    assert pilot.describe(DEPTH) == "block 8, to see how many drafts stand in this text"


def test_a_block_that_runs_to_find_out_is_not_described_as_a_gain() -> None:
    pilot = Pilot(LiveCurve(Curve({1: 10.0, 4: 30.0})), Acceptance.unknown(PLACES), measured=True)
    assert pilot.choose(DEPTH) == 4
    assert pilot.describe(DEPTH) == "block 4, to see how many drafts stand in this text"


# Parking, probes, coming back


def test_acceptance_that_falls_to_nothing_parks_and_comes_back() -> None:
    """P04."""
    pilot = pilot_for(KNEE)
    assert set(fly(pilot, 60, mostly(9), KNEE)) == {4}
    low = fly(pilot, 500, lambda _: 0, KNEE)
    assert low[120:].count(4) == 0
    assert low[-300:].count(1) >= 296
    assert pilot.parked
    back = fly(pilot, LAST_PROBE + PROBE_PASSES + 4, mostly(9), KNEE)
    assert set(back[-3:]) == {4}
    assert not pilot.parked


def test_most_passes_of_a_parked_drafter_cost_no_arithmetic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their host shares the cores with the pass on a CPU."""
    calls: Counter[str] = Counter()
    for owner, name in ((LiveCurve, "watch"), (tuner, "best_width")):
        real = getattr(owner, name)

        def counted(*args: object, real: Callable = real, name: str = name) -> object:
            calls[name] += 1
            return real(*args)

        monkeypatch.setattr(owner, name, counted)
    pilot = pilot_for(LOSING, rate=0.1)
    fly(pilot, PARKED_EVERY, lambda _: 0, LOSING)
    assert pilot.parked
    calls.clear()
    fly(pilot, 8 * PARKED_EVERY, lambda _: 0, LOSING)
    assert calls == {"watch": 8, "best_width": 8}


def test_probes_grow_rarer_with_every_failure() -> None:
    pilot = pilot_for(LOSING, rate=0.1)
    widths = fly(pilot, 4000, lambda _: 0, LOSING)
    probed = [place for place, width in enumerate(widths) if width > 1]
    between = [after - before for before, after in pairwise(probed)]
    assert probed[0] == FIRST_PROBE - 1
    assert between[:5] == [128, 192, 256, 320, LAST_PROBE]
    assert set(between[5:]) == {LAST_PROBE}
    assert pilot.probes == len(probed) < 0.02 * len(widths)


def test_a_probe_that_pays_goes_on_and_one_that_does_not_ends_at_once() -> None:
    def after_probe(from_draft: int) -> list[int]:
        costs = {1: 10.0, 2: 12.0}
        pilot = pilot_for(costs, rate=0.0)
        assert set(fly(pilot, FIRST_PROBE - 1, lambda _: 0, costs)) == {1}
        assert pilot.choose(DEPTH) == 2
        pilot.watch(2, DEPTH, from_draft, costs[2])
        return fly(pilot, 1, lambda _: 0, costs)

    assert after_probe(0) == [1]
    assert after_probe(1) == [2]


def test_a_probe_cut_short_by_the_end_of_an_answer_says_nothing() -> None:
    costs = {1: 10.0, 4: 12.0}
    pilot = pilot_for(costs, rate=0.0)
    fly(pilot, FIRST_PROBE - 1, lambda _: 0, costs)
    assert pilot.choose(DEPTH) == 4
    pilot.watch(3, DEPTH, 0, 11.0)
    assert pilot.choose(DEPTH) == 4


def test_while_the_outcome_of_a_probe_is_not_known_decoding_is_plain() -> None:
    """The engine chooses a width before it has heard of the pass in flight."""
    costs = {1: 10.0, 4: 12.0}
    pilot = pilot_for(costs, rate=0.0)
    fly(pilot, FIRST_PROBE - 1, lambda _: 0, costs)
    assert pilot.choose(DEPTH) == 4
    pilot.watch(1, DEPTH, 0, 10.0)
    assert pilot.choose(DEPTH) == 1
    pilot.watch(4, DEPTH, 3, 12.0)
    assert pilot.choose(DEPTH) == 4


def test_a_probe_that_could_not_draft_is_made_again() -> None:
    """Where a grammar leaves nothing to draft, say."""
    costs = {1: 10.0, 4: 12.0}
    pilot = pilot_for(costs, rate=0.0)
    fly(pilot, FIRST_PROBE - 1, lambda _: 0, costs)
    assert pilot.choose(DEPTH) == 4
    pilot.watch(1, DEPTH, 0, 10.0)
    pilot.watch(1, DEPTH, 0, 10.0)
    assert pilot.choose(DEPTH) == 4


def test_a_lucky_probe_costs_at_most_what_it_won() -> None:
    costs = {1: 10.0, 2: 12.0}
    pilot = pilot_for(costs, rate=0.0)
    fly(pilot, FIRST_PROBE - 1, lambda _: 0, costs)
    widths = fly(pilot, 12, lambda place: 1 if place == 0 else 0, costs)
    drafted = [width for width in widths if width > 1]
    # The first pass won 8 ms; each of the next loses 2.
    assert 1 < len(drafted) <= 6
    assert pilot.parked


def test_a_pass_whose_time_says_nothing_teaches_acceptance_only() -> None:
    live = LiveCurve(Curve(dict(KNEE)))
    pilot = Pilot(live, Acceptance.unknown(PLACES), measured=True)
    for _ in range(5):
        pilot.watch(4, DEPTH, 3, None)
    assert not live.timed(4)
    assert pilot.acceptance.tried[0] > 4


# The cap of quantized targets


def test_a_quantized_target_gets_no_more_than_its_cap() -> None:
    """P01: rows behind the fifth read the weights once more."""
    costs = {1: 10.0, 4: 13.0, 5: 14.0, 8: 20.0}
    acceptance = accepting(0.85)
    gain = acceptance.expected_tokens(8) / 20.0 / (acceptance.expected_tokens(5) / 14.0)
    assert gain < 1 + CAP_LIFT
    pilot = pilot_for(costs, 0.85, cap=5)
    assert pilot.choose(DEPTH) == 5
    assert not pilot.cap_lifted


def test_a_measured_gain_lifts_the_cap() -> None:
    pilot = pilot_for(FLAT, 0.9, cap=4)
    assert pilot.choose(DEPTH) == 8
    assert pilot.cap_lifted


def test_an_unmeasured_pair_explores_within_the_cap_only() -> None:
    pilot = pilot_for(FLAT, measured=False, cap=4)
    widths = fly(pilot, KNOWN * 3, mostly(10), FLAT)
    assert set(widths) == {1, 2, 4}


# Exploring


def test_every_width_is_timed_once_within_thirty_passes() -> None:
    costs = {1: 10.0, 2: 11.0, 3: 12.0, 4: 13.0, 5: 14.0, 6: 19.0, 8: 24.0}
    pilot = pilot_for(costs, measured=False)
    widths = fly(pilot, 30, mostly(9), costs)
    assert widths[: KNOWN * len(costs)] == [w for w in costs for _ in range(KNOWN)]
    assert pilot.explored
    assert len(set(widths[KNOWN * len(costs) :])) == 1


def test_every_width_is_tried_within_thirty_passes_where_few_can_be_timed() -> None:
    """Those beside passes of another width tell nothing, and the first pass is plain."""
    costs = {1: 10.0, 2: 11.0, 3: 12.0, 4: 13.0, 5: 14.0, 6: 19.0, 8: 24.0}
    pilot = pilot_for(costs, measured=False)
    widths = [pilot.choose(DEPTH)]
    for _ in range(29):
        widths.append(pilot.choose(DEPTH))
        is_timed = widths[-2:] == widths[-3:-1]
        pilot.watch(widths[-2], DEPTH, widths[-2] - 1, costs[widths[-2]] if is_timed else None)
    assert pilot.explored
    assert set(widths[:29]) == set(costs)


def test_a_measured_pair_starts_with_its_block_at_once() -> None:
    assert set(fly(pilot_for(KNEE), 20, mostly(8, run=3))) == {4}


def test_a_stored_time_of_plain_decoding_that_is_too_long_is_corrected() -> None:
    stored = Curve({**KNEE, 1: 4 * KNEE[1]})
    pilot = Pilot(LiveCurve(stored), accepting(0.02), measured=True)
    widths = fly(pilot, 40, mostly(1, run=0), KNEE)
    assert widths[0] > 1
    assert set(widths[20:]) == {1}


def test_widths_behind_a_hopeless_one_are_given_up() -> None:
    pilot = pilot_for(LOSING, 0.7, measured=False)
    widths = fly(pilot, 20, mostly(5), LOSING)
    assert set(widths) == {1, 2}
    assert widths.count(2) <= EXPLORED
    assert pilot.explored


def test_a_hopeless_width_is_seen_one_pass_late_at_most() -> None:
    """The engine chooses before it has heard of the pass in flight."""
    pilot = pilot_for(LOSING, 0.7, measured=False)
    widths = [pilot.choose(DEPTH)]
    for _ in range(12):
        widths.append(pilot.choose(DEPTH))
        pilot.watch(widths[-2], DEPTH, 0, LOSING[widths[-2]])
    assert widths == [1] * (KNOWN + 1) + [2] * 2 + [1] * 8


def test_what_one_answer_timed_the_next_does_not_time_again() -> None:
    live = LiveCurve(Curve(dict(KNEE)))
    first = Pilot(live, accepting(0.8), measured=False)
    fly(first, KNOWN, mostly(9), KNEE)
    second = Pilot(live, accepting(0.8), measured=False)
    assert fly(second, KNOWN, mostly(9), KNEE) == [2] * KNOWN


# Live times


def test_a_stored_curve_that_is_wrong_is_corrected_as_it_runs() -> None:
    truth = {1: 10.0, 2: 11.0, 4: 40.0, 8: 80.0}
    pilot = pilot_for(KNEE)
    widths = fly(pilot, 60, mostly(8), truth)
    assert widths[0] == 4
    assert set(widths[-20:]) == {2}


def test_a_slow_moment_of_the_machine_does_not_change_the_block() -> None:
    """All widths are slow then, and block 2 only seems to win because it did not run."""
    costs = {1: 10.0, 2: 11.0, 4: 14.5}
    pilot = pilot_for(costs)
    assert set(fly(pilot, 30, mostly(8), costs)) == {4}
    slow = {width: 1.3 * ms for width, ms in costs.items()}
    assert set(fly(pilot, 60, mostly(8), slow)) == {4}


def test_plain_decoding_is_timed_again_where_a_block_hardly_wins() -> None:
    """Its few times were of a slow moment, and the block would run forever."""
    pilot = pilot_for({1: 10.4, 2: 17.9}, rate=0.8)
    widths = fly(pilot, 40, mostly(8, run=1), {1: 9.0, 2: 17.9})
    assert widths[0] == 2
    assert set(widths[20:]) == {1}
    sure = pilot_for({1: 10.4, 2: 11.0}, rate=0.8)
    assert set(fly(sure, 40, mostly(8, run=1), {1: 9.0, 2: 11.0})) == {2}


def test_a_block_that_has_become_slow_by_itself_gives_way_to_plain_decoding() -> None:
    """Plain decoding is timed again where the running block says that much has changed."""
    costs = {1: 10.0, 4: 13.0}
    pilot = pilot_for(costs)
    assert set(fly(pilot, 30, mostly(8), costs)) == {4}
    widths = fly(pilot, 2 * PLAIN_EVERY, mostly(8), {1: 10.0, 4: 60.0})
    assert pilot.parked
    assert widths[PLAIN_EVERY:].count(4) <= pilot.probes


# Widths that were timed badly


def test_a_width_that_was_taken_for_slow_is_timed_and_found_to_win() -> None:
    live = LiveCurve(Curve({1: 10.0, 2: 13.0, 4: 22.0}))
    live.watch(1, 0, 10.0)
    pilot = Pilot(live, accepting(0.7), measured=True)
    true = {1: 10.0, 2: 13.0, 4: 16.0}
    widths = fly(pilot, 60, lambda place: [3, 0, 3, 1][place % 4], true)
    assert set(widths[:10]) == {2}
    assert set(widths[40:]) == {4}


def test_a_width_that_cannot_win_is_not_timed_again() -> None:
    pilot = pilot_for(KNEE, rate=0.6)
    widths = fly(pilot, 400, lambda place: [3, 0, 1, 3, 2][place % 5], KNEE)
    assert pilot.width == 4
    assert 8 not in widths


def test_no_more_than_the_cap_is_timed_for_a_quantized_target() -> None:
    live = LiveCurve(Curve({1: 10.0, 4: 13.0, 8: 27.0}))
    live.watch(1, 0, 10.0)
    pilot = Pilot(live, accepting(0.8), measured=True, cap=5)
    assert 8 not in fly(pilot, 100, lambda place: 3 + 4 * (place % 2), {1: 10.0, 4: 13.0, 8: 27.0})
