"""A pilot that looks at earlier passes leaves the distribution alone; one that peeks would not."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from draws import (
    NUM_TOKENS,
    Prefix,
    World,
    chi_square_p,
    exact_joint,
    outcomes,
    random_words,
    run_pass,
    sampling_noise,
    total_variation,
)
from toy import toy

from dflash2_mlx.curve import Curve, LiveCurve
from dflash2_mlx.sampling import SamplingParams
from dflash2_mlx.tuner import Acceptance, Pilot

NUM_DRAWS = 100_000
PARAMS = SamplingParams(temperature=1.0, top_k=4)
MIN_P_VALUE = 1e-4
CAUGHT = 1e-6  # a p value below which no fixed seed can be to blame

# Pass by pass: its width, and how many drafts stood.
Passes = tuple[tuple[int, int], ...]
Choose = Callable[[Passes], int]
Run = Callable[[World, SamplingParams, int, Prefix, mx.array], tuple[np.ndarray, np.ndarray]]


def plain_after_a_rejection(passes: Passes) -> int:
    """Wider with every full pass, plain behind one whose drafts fell."""
    if not passes:
        return 2
    width, stood = passes[-1]
    return width + 1 if stood == width - 1 else 1


def narrow_after_luck(passes: Passes) -> int:
    """The opposite."""
    return 4 if not passes or passes[-1][1] == 0 else 1


def by_pilot(passes: Passes) -> int:
    """The tuner's own, where a pass or two decide whether wide ones pay."""
    curve = Curve({1: 1.0, 2: 1.7, 4: 2.8})
    pilot = Pilot(LiveCurve(curve), Acceptance([1.2, 1, 1], [2, 1, 1]), measured=True)
    for width, stood in passes:
        pilot.choose(len(passes))
        pilot.watch(width, 0, stood, None)
    return pilot.choose(0)


RULES: dict[str, Choose] = {
    "plain after a rejection": plain_after_a_rejection,
    "narrow after luck": narrow_after_luck,
    "the pilot's own": by_pilot,
}


def simulate(world: World, choose: Choose, run: Run = run_pass) -> tuple[np.ndarray, set[int]]:
    """Counts `[V, V, V]` of the first three tokens, and all widths that were chosen.

    All seeds with the same beginning and the same passes behind them go on together.
    """
    counts = np.zeros((world.vocab,) * NUM_TOKENS, dtype=np.int64)
    waiting: dict[tuple[Prefix, Passes], list[mx.array]] = {
        ((), ()): [random_words(NUM_DRAWS)],
    }
    widths = set()
    while waiting:
        prefix, passes = min(waiting, key=lambda key: len(key[0]))
        words = mx.concatenate(waiting.pop((prefix, passes)))
        width = choose(passes)
        widths.add(width)
        for outcome, chosen in outcomes(prefix, *run(world, PARAMS, width, prefix, words)):
            if len(outcome) == NUM_TOKENS:
                counts[outcome] += len(chosen)
                continue
            stood = len(outcome) - len(prefix) - 1
            key = (outcome, (*passes, (width, stood)))
            waiting.setdefault(key, []).append(words[mx.array(chosen)])
    assert counts.sum() == NUM_DRAWS
    return counts, widths


def peeking(
    world: World, params: SamplingParams, width: int, prefix: Prefix, words: mx.array
) -> tuple[np.ndarray, np.ndarray]:
    """Decides that a pass had better been plain when its first draft has fallen."""
    tokens, stood = run_pass(world, params, width, prefix, words)
    plain, _ = run_pass(world, params, 1, prefix, words)
    fell = stood == 0
    tokens[fell, 0] = plain[fell, 0]
    return tokens, stood


@pytest.mark.parametrize("rule", RULES)
def test_widths_chosen_by_earlier_passes_leave_the_distribution(rule: str) -> None:
    world = toy("good")
    exact = exact_joint(world, PARAMS)
    counts, widths = simulate(world, RULES[rule])
    assert len(widths) >= 2
    assert chi_square_p(counts, exact) > MIN_P_VALUE
    distance = total_variation(counts / NUM_DRAWS, exact)
    assert distance < 1.5 * sampling_noise(exact, NUM_DRAWS)


def test_a_decision_that_looks_at_its_own_token_bends_the_distribution() -> None:
    world = toy("good")
    counts, _ = simulate(world, lambda _: 4, peeking)
    assert chi_square_p(counts, exact_joint(world, PARAMS)) < CAUGHT
