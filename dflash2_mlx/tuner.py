"""Which block to run: expected tokens per measured millisecond, plain decoding included.

Everything here is arithmetic on numbers; nothing knows MLX. A choice looks at costs and at what was
accepted in earlier passes, never at a token it decides about, so sampling stays exact.
"""

import math
from dataclasses import dataclass, replace

from dflash2_mlx.curve import Curve, LiveCurve

MIN_GAIN = 0.03  # another block must promise this much more before it replaces the running one
FIRST_PROBE = 64  # plain passes before the drafter is looked at again; so many more every failure
LAST_PROBE = 384
PROBE_PASSES = 8  # passes in which a probe has to pay before drafting is taken up again
EXPLORED = 4  # passes of a width in a row, of which the middle ones tell its time
PLAIN_DUE = range(16, 19)  # passes that time plain decoding, where that was not done lately,
PLAIN_EVERY = 128  # of so many
RIVAL_DUE = range(24, 24 + EXPLORED)  # those that time a width which may be better, of as many
PARKED_EVERY = 4  # passes of a parked drafter, one of which is timed and decided about
OPTIMISM = 0.15  # added to every acceptance rate when a width is given up before it was timed
QUANTIZED_CAP = 5  # rows that MLX's wide quantized kernel serves with one read of the weights
CAP_LIFT = 0.05  # more tokens per ms that wider passes must show, measured, to lift the cap
PRIOR_RATE = 0.7  # of a draft whose predecessors stood, when a pair is new
PRIOR_WEIGHT = 2.0  # passes that the place before counts for
REMEMBERED = 8.0  # passes that earlier answers of the pair count for
DOUBT = 0.4  # optimism about acceptance after n passes is DOUBT / (1 + n)
MEMORY = 32.0  # passes after which old acceptance has faded within an answer
LASTING = 64.0  # drafted passes after which earlier answers of a kind have


@dataclass(slots=True)
class Acceptance:
    """How likely the draft at each place stands when all before it did; fades as text goes on.

    A place that was tried little is taken to be like the one before it, the first like `prior`.
    """

    stood: list[float]
    tried: list[float]
    prior: float = PRIOR_RATE
    memory: float = MEMORY

    @classmethod
    def unknown(cls, num_places: int, prior: float = PRIOR_RATE) -> "Acceptance":
        """Nothing tried yet."""
        return cls([0.0] * num_places, [0.0] * num_places, prior)

    def remembered(self, prior: float | None = None) -> "Acceptance":
        """The same rates, worth few passes; untried places go by `prior`, or by these rates too."""
        weight = min(1.0, REMEMBERED / max(self.tried[0], 1e-9)) if self.tried else 1.0
        if prior is None:
            prior = self.rates[0] if self.tried else self.prior
        return Acceptance([s * weight for s in self.stood], [t * weight for t in self.tried], prior)

    def joined(self, answer: "Acceptance") -> "Acceptance":
        """The rates of earlier answers with those of one more, which counts as long as it was."""
        keep = max(0.0, 1.0 - answer.tried[0] / LASTING) if answer.tried else 1.0
        stood = [keep * s + new for s, new in zip(self.stood, answer.stood, strict=True)]
        tried = [keep * t + new for t, new in zip(self.tried, answer.tried, strict=True)]
        return Acceptance(stood, tried, self.prior)

    @property
    def rates(self) -> list[float]:
        """Conditional probability place by place."""
        rates, rate = [], self.prior
        for stood, tried in zip(self.stood, self.tried, strict=True):
            rate = (stood + PRIOR_WEIGHT * rate) / (tried + PRIOR_WEIGHT)
            rates.append(rate)
        return rates

    def watch(self, drafted: int, from_draft: int) -> None:
        """Take in a pass of `drafted` tokens of which the first `from_draft` stood."""
        fade = 1.0 - 1.0 / self.memory
        for place in range(min(drafted, len(self.tried))):
            # Places behind a rejection were not tried; what they showed before ages all the same.
            self.stood[place] = self.stood[place] * fade + (place < from_draft)
            self.tried[place] = self.tried[place] * fade + (place <= from_draft)

    def expected_tokens(self, width: int, optimism: float = 0.0) -> float:
        """Tokens of a pass of `width` rows: accepted drafts and the target's own."""
        return self.expected(optimism)[width - 1]

    def expected(self, optimism: float = 0.0) -> list[float]:
        """The same of every width from 1 on."""
        reached, totals = 1.0, [1.0]
        for rate in self.rates:
            reached *= min(1.0, rate + optimism)
            totals.append(totals[-1] + reached)
        return totals

    @property
    def doubt(self) -> float:
        """What may be missing in the rates while little was tried."""
        return DOUBT / (1.0 + self.tried[0]) if self.tried else 0.0


def tokens_per_ms(
    curve: Curve, acceptance: Acceptance, width: int, depth: int, optimism: float = 0.0
) -> float:
    """What the choice is about."""
    return acceptance.expected_tokens(width, optimism) / curve.ms(width, depth)


def best_width(curve: Curve, acceptance: Acceptance, depth: int, optimism: float = 0.0) -> int:
    """The width with most expected tokens per millisecond; the narrowest of equals."""
    tokens = acceptance.expected(optimism)
    return max(curve.widths, key=lambda width: (tokens[width - 1] / curve.ms(width, depth), -width))


@dataclass(slots=True)
class Probe:
    """A look at whether drafting pays again: goes on for as long as it has paid for itself.

    Texts change, so what an answer showed before (`before`) counts for little meanwhile.
    """

    before: Acceptance
    passes: int = 0
    gain_ms: float = 0.0
    awaited: int = 0  # passes to be heard of before the one that was drafted has told its outcome


@dataclass(slots=True)
class Parking:
    """How long plain decoding has run, and how long it may before a probe; answers share one."""

    plain_passes: int = 0
    patience: int = FIRST_PROBE


class Pilot:
    """Chooses the width of every pass of one answer.

    First each width is timed a few times, unless the curve was measured before. Then the best one
    runs; when that is plain decoding the drafter is parked, and a rare probe, rarer after every
    failure, looks whether it pays again. Behind `cap` rows only a measured gain is followed.
    `acceptance` is what passes lately showed, `shown` what all passes of the answer did.
    """

    def __init__(
        self,
        live: LiveCurve,
        acceptance: Acceptance,
        *,
        measured: bool,
        cap: int | None = None,
        parking: Parking | None = None,
    ) -> None:
        self._live = live
        self.acceptance = acceptance
        self.shown = replace(Acceptance.unknown(len(acceptance.tried)), memory=math.inf)
        self._cap = cap
        narrow = [width for width in live.curve.widths if cap is None or width <= cap]
        self._unexplored = [] if measured else [w for w in narrow for _ in range(EXPLORED)]
        self._running: int | None = None
        self._parking = parking or Parking()
        self._probe: Probe | None = None
        self._rival: int | None = None  # a width that runs for a moment, to be timed
        self.probes = 0
        self.cap_lifted = False
        self._explores = not measured
        self._passes = 0

    def choose(self, depth: int) -> int:
        """The width of the next pass, behind `depth` committed tokens."""
        self._passes += 1
        if (width := self._to_explore(depth)) is not None:
            return width
        if self._passes % PLAIN_EVERY in PLAIN_DUE and self._plain_is_due(depth):
            return 1
        if self._probe:
            return self._look(self._probe, depth)
        if (width := self._rival_due(depth)) is not None:
            return width
        parking = self._parking
        running = 1 if self._dozes else self._decide(depth)
        if running > 1:
            parking.plain_passes, parking.patience = 0, FIRST_PROBE
            return running
        parking.plain_passes += 1
        if parking.plain_passes < parking.patience or len(self._live.curve.widths) == 1:
            return 1
        parking.plain_passes = 0
        self.probes += 1
        self._probe = Probe(self.acceptance)
        self.acceptance = self.acceptance.remembered(PRIOR_RATE)
        return self._look(self._probe, depth)

    @property
    def _dozes(self) -> bool:
        """Whether nothing is computed about this pass: on a CPU the host takes time from it."""
        return self._running == 1 and self._probe is None and self._passes % PARKED_EVERY > 0

    def _decide(self, depth: int) -> int:
        """The width that runs from here on."""
        curve = self._live.curve
        best = self._best(curve, depth)
        # Back to plain decoding at once: that is the promise. Anything else has to be worth it.
        needed = 0.0 if best == 1 else MIN_GAIN
        if self._running is None or self._gain(curve, best, depth, over=self._running) > needed:
            self._running = best
        return self._running

    def _look(self, probe: Probe, depth: int) -> int:
        """The next pass of a probe, plain until it is known what came of the one before."""
        if probe.awaited:
            return 1
        probe.awaited = 2  # a width is chosen before the pass in flight was watched
        return self._best(self._live.curve, depth, drafted=True)

    def _to_explore(self, depth: int) -> int | None:
        """The next width to time. Wider ones are given up once a narrower one is hopeless."""
        while self._unexplored:
            width = self._unexplored[0]
            if any(self._hopeless(narrow, depth) for narrow in range(2, width + 1)):
                self._unexplored = []
            elif self._live.known(width):
                self._unexplored.pop(0)
            else:
                return self._unexplored.pop(0)
        return None

    def _plain_is_due(self, depth: int) -> bool:
        """Whether plain decoding may be faster than its times say; or nobody would ever know."""
        if self._live.stale(1):
            return True
        if self._running in (None, 1):
            return False
        gain = self._gain(self._live.curve, self._running, depth, over=1)
        return math.log1p(gain) < 2 * self._live.doubt(1)

    def _rival_due(self, depth: int) -> int | None:
        """A width that may beat the running one if its time is less than it is taken for."""
        place = self._passes % PLAIN_EVERY
        if place not in RIVAL_DUE or self._running in (None, 1):
            return None
        if place == RIVAL_DUE.start:
            self._rival = self._likeliest_rival(depth)
        return self._rival

    def _likeliest_rival(self, depth: int) -> int | None:
        curve, running = self._live.curve, self._running or 1

        def hope(width: int) -> float:
            gain = self._gain(curve, width, depth, over=running)
            return math.log1p(gain) + 2 * self._live.doubt(width)

        rivals = [w for w in curve.widths if w not in (1, running) and w <= (self._cap or w)]
        best = max(rivals, key=hope, default=None)
        return best if best is not None and hope(best) > MIN_GAIN else None

    def _hopeless(self, width: int, depth: int) -> bool:
        """Whether a timed width loses to plain decoding even if more drafts stood than so far."""
        if not self._live.timed(width):
            return False
        curve, acceptance = self._live.curve, self.acceptance
        return tokens_per_ms(curve, acceptance, width, depth, OPTIMISM) < tokens_per_ms(
            curve, acceptance, 1, depth
        )

    def _best(self, curve: Curve, depth: int, *, drafted: bool = False) -> int:
        """The best width, the cap heeded unless what lies behind it is measurably better."""
        doubt = self.acceptance.doubt
        open_ = curve.only(lambda width: width > 1 or not drafted)
        beyond = best_width(open_, self.acceptance, depth, doubt)
        if self._cap is None or beyond <= self._cap:
            return beyond
        within = best_width(
            open_.only(lambda width: width <= (self._cap or width)), self.acceptance, depth, doubt
        )
        gain = tokens_per_ms(curve, self.acceptance, beyond, depth) / tokens_per_ms(
            curve, self.acceptance, within, depth
        )
        self.cap_lifted = gain >= 1.0 + CAP_LIFT
        return beyond if self.cap_lifted else within

    def watch(self, width: int, depth: int, from_draft: int, ms: float | None) -> None:
        """Take in a pass that was made; `ms` None when its time says nothing."""
        self.acceptance.watch(width - 1, from_draft)
        self.shown.watch(width - 1, from_draft)
        if ms is not None and not self._dozes:
            self._live.watch(width, depth, ms)
        if self._probe and width > 1:
            self._weigh(self._probe, width, depth, from_draft)
        elif self._probe:
            self._probe.awaited = max(0, self._probe.awaited - 1)

    def _weigh(self, probe: Probe, width: int, depth: int, from_draft: int) -> None:
        """Go on with a probe, or end it: parked as before, or with the best width from here on."""
        curve = self._live.curve
        probe.awaited = 0
        probe.before.watch(width - 1, from_draft)
        if width not in curve.base_ms:
            return  # cut short by the end of the answer
        probe.passes += 1
        probe.gain_ms += (from_draft + 1) * curve.ms(1, depth) - curve.ms(width, depth)
        if probe.gain_ms < 0:
            self.acceptance, self._probe = probe.before, None
            self._parking.patience = min(self._parking.patience + FIRST_PROBE, LAST_PROBE)
        elif probe.passes == PROBE_PASSES:
            self._running, self._probe = None, None

    @property
    def explored(self) -> bool:
        """Whether this answer timed every width that was worth it."""
        return self._explores and not self._unexplored

    @property
    def width(self) -> int | None:
        """The width that runs by choice, None while widths are explored."""
        return self._running

    @property
    def parked(self) -> bool:
        """Whether plain decoding is running because drafting loses."""
        return self._running == 1

    def describe(self, depth: int) -> str:
        """In words: what runs and by how much it wins over plain decoding."""
        curve = self._live.curve
        best = self._best(curve, depth, drafted=True)
        plain = tokens_per_ms(curve, self.acceptance, 1, depth)
        gain = tokens_per_ms(curve, self.acceptance, best, depth) / plain
        if self.parked:
            return f"parked: drafting would run at {gain:.2f}x of plain decoding (block {best})"
        width = self._running or best
        open_ = curve.only(lambda w: self._cap is None or w <= max(self._cap, width))
        likeliest = best_width(open_, self.acceptance, depth)
        if gain < 1.0 or self._gain(curve, likeliest, depth, over=width) > MIN_GAIN:
            return f"block {width}, to see how many drafts stand in this text"
        lifted = f", more than {self._cap} rows by measured times" if self.cap_lifted else ""
        return f"block {width}, expected {gain:.2f}x of plain decoding{lifted}"

    def _gain(self, curve: Curve, width: int, depth: int, *, over: int) -> float:
        before = tokens_per_ms(curve, self.acceptance, over, depth)
        return tokens_per_ms(curve, self.acceptance, width, depth) / before - 1.0
