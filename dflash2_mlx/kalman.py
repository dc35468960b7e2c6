"""Numbers that are not known exactly, and what each observation of a sum of them tells."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Belief:
    """What is believed of N numbers: the state of a Kalman filter (R. E. Kalman 1960).

    Plain Python, since it is asked in every pass: behind one, memory of 1 KB at once, as numpy
    takes it, costs a millisecond on Linux (docs/speed.md).
    """

    mean: list[float]  # [N]
    covariance: list[list[float]]  # [N, N]

    @classmethod
    def about(cls, covariance: list[list[float]]) -> "Belief":
        """Zero is expected of every number."""
        return cls([0.0] * len(covariance), covariance)

    def sum_of(self, places: Sequence[int]) -> tuple[float, float]:
        """What is expected of the sum of the numbers at `places`, and its variance."""
        variance = sum(self.covariance[one][other] for one in places for other in places)
        return sum(self.mean[place] for place in places), variance

    def blurred(self, variances: Sequence[float]) -> "Belief":
        """The same, each number less certain by its one of `variances`, `[N]`."""
        covariance = [list(row) for row in self.covariance]
        for place, variance in enumerate(variances):
            covariance[place][place] += variance
        return Belief(self.mean, covariance)

    def told(self, places: Sequence[int], value: float, noise: float) -> "Belief":
        """After the sum of some numbers was seen to be `value`, with noise of that variance."""
        expected, variance = self.sum_of(places)
        shared = [sum([row[place] for place in places]) for row in self.covariance]
        gain = [one / (variance + noise) for one in shared]
        return Belief(
            [mean + g * (value - expected) for mean, g in zip(self.mean, gain, strict=True)],
            [
                [cov - g * s for cov, s in zip(row, shared, strict=True)]
                for row, g in zip(self.covariance, gain, strict=True)
            ],
        )
