"""Whether draws come from the distribution they should come from: Pearson's chi-square test."""

import math

import numpy as np

MIN_EXPECTED = 10.0  # draws of an outcome; rarer outcomes are counted together


def p_value(counts: np.ndarray, exact: np.ndarray) -> float:
    """The probability that draws fit no better than `counts` `[N]`, if `exact` `[N]` is true.

    0 when something impossible was drawn.
    """
    if counts[exact == 0].any():
        return 0.0
    observed, expected = _pooled(counts, exact * counts.sum())
    return upper_tail(float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1)


def num_outcomes(exact: np.ndarray, draws: int) -> int:
    """How many outcomes a test of so many draws tells apart."""
    return len(_pooled(exact, exact * draws)[1])


def upper_tail(statistic: float, degrees: int) -> float:
    """P(chi-square > statistic): the regularised incomplete gamma function, as a finite sum."""
    if degrees < 1 or statistic <= 0:
        return 1.0
    half = statistic / 2
    order, tail = (0.5, math.erfc(math.sqrt(half))) if degrees % 2 else (1.0, math.exp(-half))
    while order < degrees / 2:
        tail += math.exp(order * math.log(half) - half - math.lgamma(order + 1))
        order += 1
    return tail


def _pooled(observed: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Outcomes from the likeliest on, the last one taking in all that are too rare to stand."""
    order = np.argsort(-expected)
    num_alone = int((expected >= MIN_EXPECTED).sum())
    rest = float(expected[order[num_alone:]].sum())
    starts = list(range(num_alone + (rest >= MIN_EXPECTED))) or [0]
    return np.add.reduceat(observed[order], starts), np.add.reduceat(expected[order], starts)
