"""Draws are held to a distribution: sound ones pass, wrong ones do not."""

import numpy as np
import pytest

from dflash2_mlx.goodness import num_outcomes, p_value, upper_tail

EXACT = np.array([0.5, 0.25, 0.125, 0.0625, 0.03, 0.03, 0.002, 0.0005, 0.0])


@pytest.mark.parametrize(
    ("statistic", "degrees", "expected"),
    [(3.841, 1, 0.05), (5.991, 2, 0.05), (18.307, 10, 0.05), (124.342, 100, 0.05), (0.0, 4, 1.0)],
)
def test_the_tail_is_that_of_the_tables(statistic: float, degrees: int, expected: float) -> None:
    assert upper_tail(statistic, degrees) == pytest.approx(expected, rel=1e-3)


def test_sound_draws_have_p_values_of_any_size() -> None:
    numbers = np.random.default_rng(0)
    found = [p_value(numbers.multinomial(2000, EXACT), EXACT) for _ in range(200)]
    assert 0.03 <= np.mean(np.array(found) < 0.1) <= 0.2
    assert 0.4 <= np.mean(np.array(found) < 0.5) <= 0.6


def test_draws_of_another_distribution_are_found() -> None:
    flatter = np.sqrt(EXACT) / np.sqrt(EXACT).sum()
    assert p_value(np.random.default_rng(0).multinomial(2000, flatter), EXACT) < 1e-9


def test_one_impossible_draw_is_enough() -> None:
    counts = np.round(2000 * EXACT)
    assert p_value(counts, EXACT) > 0.9
    counts[-1] = 1
    assert p_value(counts, EXACT) == 0.0


def test_rare_outcomes_are_counted_together() -> None:
    assert num_outcomes(EXACT, 2000) == 6
    counts = np.round(2000 * EXACT)
    counts[7] += 3  # three times what is expected of it, and nothing for all the rare ones
    assert p_value(counts, EXACT) > 0.5


def test_a_certain_outcome_leaves_nothing_to_test() -> None:
    assert p_value(np.array([2000, 0]), np.array([1.0, 0.0])) == 1.0
