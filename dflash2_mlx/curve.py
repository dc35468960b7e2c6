"""What a pass of each width takes: stored costs, corrected by the times of passes as they come."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from dflash2_mlx.kalman import Belief

KNOWN = 2  # times of a width before it counts as known
# Variances of log times, from passes of five widths in turns on a busy CPU: the machine wanders
# by 8 % within seconds, all widths alike; of each width's own there is white noise only.
NOISE = 0.1**2  # of one pass
WANDER = 0.015**2  # of the machine, from pass to pass
CHANGE = 0.003**2  # of a width by itself, from pass to pass
MEASURED_ERROR = 0.1**2  # of a stored width that was measured
GUESSED_ERROR = 10.0**2  # of one that was not
ANYTHING = 1e6  # of what is not known
SURPRISE = 4.0  # standard deviations
MACHINE = 0  # the place of its state, before those of the widths' errors
MOVED = 0.25  # of a width that others tell about, after which it should be timed again


@dataclass(frozen=True, slots=True)
class Curve:
    """Milliseconds of a whole pass of each width at depth 0, and how they grow with the context.

    `base_ms[L]` for L = 1 is plain decoding; for L > 1 it includes proposing. `slope_ms[L]` is per
    thousand tokens of context. Both hold exactly the widths that may run.
    """

    base_ms: dict[int, float]
    slope_ms: dict[int, float] = field(default_factory=dict)

    def ms(self, width: int, depth: int) -> float:
        """The cost of one pass behind `depth` committed tokens."""
        return self.base_ms[width] + self.slope_ms.get(width, 0.0) * depth / 1000

    @property
    def widths(self) -> list[int]:
        """Widths that may run, in order."""
        return sorted(self.base_ms)

    def scaled(self, scale: dict[int, float]) -> "Curve":
        """The same widths, each so many times as slow."""
        return Curve(
            {width: ms * scale[width] for width, ms in self.base_ms.items()},
            {width: ms * scale[width] for width, ms in self.slope_ms.items()},
        )

    def only(self, keep: Callable[[int], bool]) -> "Curve":
        """The same curve over fewer widths."""
        return Curve({w: ms for w, ms in self.base_ms.items() if keep(w)}, self.slope_ms)


class LiveCurve:
    """A stored curve corrected by the times of this process.

    The log of a time is the stored one, plus the machine's state, which all widths share (heat,
    clocks, other programs) and which wanders, plus the error of the stored width, plus noise. So a
    slow moment does not look like a slow width, and a width that did not run keeps its place among
    the others. Errors of neighbours are alike, the more the nearer their widths are.
    """

    def __init__(self, stored: Curve, *, measured: bool = True) -> None:
        self._stored = stored
        self._curve: Curve | None = None  # the costs to decide by, until a pass changes them
        self._seen = dict.fromkeys(stored.widths, 0)
        self._timed_at: dict[int, float] = {}  # what was expected of a width when it was timed
        self._last = 0  # the width timed last
        self._slow = 0  # the one whose time was too slow to believe, if nothing came since
        self._parts = {width: (MACHINE, own) for own, width in enumerate(stored.widths, 1)}
        self._drift = [WANDER] + [CHANGE] * len(stored.widths)
        self._belief = self._before = _prior(
            stored.widths, MEASURED_ERROR if measured else GUESSED_ERROR
        )

    def watch(self, width: int, depth: int, ms: float) -> None:
        """Take in the time of one pass."""
        if width not in self._seen:
            return
        self._seen[width] += 1
        self._belief = self._belief.blurred(self._drift)
        slowness = math.log(ms / self._stored.ms(width, depth))
        parts = self._parts[width]
        expected, variance = self._belief.sum_of(parts)
        if abs(slowness - expected) > SURPRISE * math.sqrt(variance + NOISE):
            if slowness > expected and self._slow != width:
                self._slow = width  # an accident, unless the next one is as slow
                return
            self._belief = self._doubted(width)
        if self._seen[width] == 1:
            self._before = self._belief
        self._belief = self._belief.told(parts, slowness, NOISE)
        self._timed_at[width] = self._expected(width)
        self._last, self._slow, self._curve = width, 0, None

    def _doubted(self, width: int) -> Belief:
        """What is left to believe once a time of this width contradicts it."""
        if self._last == width and self._seen[width] == 2:
            return self._before  # the first time of this width was an accident
        # What changed between two passes of one width is the machine.
        machine, own = self._parts[width]
        cause = machine if self._last == width else own
        return self._belief.blurred(
            [ANYTHING * (place == cause) for place in range(len(self._drift))]
        )

    def _expected(self, width: int) -> float:
        return self._belief.sum_of(self._parts[width])[0]

    def timed(self, width: int) -> bool:
        """Whether this width has a time of its own."""
        return self._seen.get(width, 0) > 0

    def known(self, width: int) -> bool:
        """Whether enough passes of this width were timed."""
        return self._seen.get(width, 0) >= KNOWN

    def stale(self, width: int) -> bool:
        """Whether this width has no time, or one of a machine that was much faster or slower."""
        return abs(self._expected(width) - self._timed_at.get(width, math.inf)) > MOVED

    def doubt(self, width: int) -> float:
        """How uncertain it is what this width takes beside the last: a share, one deviation."""
        one, other = self._parts[width][1], self._parts[self._last or width][1]
        error = self._belief.covariance
        return math.sqrt(error[one][one] + error[other][other] - 2 * error[one][other])

    @property
    def curve(self) -> Curve:
        """The costs to decide by now."""
        if self._curve is None:
            self._curve = self._stored.scaled(
                {width: math.exp(self._expected(width)) for width in self._stored.widths}
            )
        return self._curve


def _prior(widths: list[int], error: float) -> Belief:
    """Nothing is known of the machine, and the stored widths are right but for some error."""
    rows = [[error * min(a, b) / max(a, b) for b in widths] for a in widths]
    return Belief.about([[ANYTHING] + [0.0] * len(widths), *([0.0, *row] for row in rows)])
