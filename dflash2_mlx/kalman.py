"""Numbers that are not known exactly, and what each observation of a sum of them tells."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Belief:
    """What is believed of N numbers: the state of a Kalman filter (R. E. Kalman 1960).

    `mean` is `[N]`, `covariance` `[N, N]`, both float64.
    """

    mean: Floats
    covariance: Floats

    @classmethod
    def about(cls, covariance: Sequence[Sequence[float]]) -> "Belief":
        """Zero is expected of every number."""
        return cls(np.zeros(len(covariance)), np.array(covariance))

    def sum_of(self, parts: Floats) -> tuple[float, float]:
        """What is expected of the sum of the numbers that `parts`, `[N]`, has 1 for, not 0; and its
        variance."""
        return float(parts @ self.mean), float(parts @ (self.covariance @ parts))

    def blurred(self, covariance: Floats) -> "Belief":
        """The same, less certain by so much, `[N, N]`."""
        return Belief(self.mean, self.covariance + covariance)

    def told(self, parts: Floats, value: float, noise: float) -> "Belief":
        """After such a sum was seen to be `value`, with noise of that variance."""
        shared = self.covariance @ parts
        gain = shared / (float(parts @ shared) + noise)
        surprise = value - float(parts @ self.mean)
        return Belief(self.mean + gain * surprise, self.covariance - np.outer(gain, shared))
