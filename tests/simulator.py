"""Replays acceptance against cost curves of chips we do not have: what a pilot gives away.

Curves are whole passes relative to plain decoding, from public measurements (mlx#3852, mlx PR3863,
mlxcel, mlx-vlm#1959, mlx-dspark; notes of several engines); the drafter's share is added.
Acceptance is a run length per position of a text: how many drafts in a row would stand there.
"""

import json
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash2_mlx.chip import Chip
from dflash2_mlx.curve import Curve
from dflash2_mlx.priors import prior_curve
from dflash2_mlx.tuner import Pilot

DRAFT = 0.13  # of a plain pass: a 4-bit drafter of 2 B parameters beside a 4-bit target of 27 B

# Relative cost of verifying so many rows.
CHIPS: dict[str, dict[int, float]] = {
    "M4 Pro 4-bit": {1: 1.0, 2: 1.0, 3: 1.13, 4: 1.44, 5: 1.78, 6: 2.1, 8: 2.9},
    "M3 Max 4-bit": {1: 1.0, 2: 1.0, 3: 1.13, 4: 1.28, 5: 1.6, 6: 2.04, 8: 2.5},
    "M5 Max 27B 4-bit": {1: 1.0, 2: 1.11, 3: 1.34, 4: 1.24, 5: 1.5, 6: 1.9, 8: 2.47},
    "M5 Pro 27B 4-bit": {1: 1.0, 2: 1.03, 3: 1.07, 4: 1.11, 5: 1.3, 6: 1.8, 8: 2.3},
    "M4 Pro 8-bit": {1: 1.0, 2: 1.02, 3: 1.03, 4: 1.05, 5: 1.1, 6: 1.4, 8: 1.7},
    "M4 bf16": {1: 1.0, 2: 1.15, 3: 1.16, 4: 1.17, 5: 1.18, 6: 1.2, 8: 1.25},
    "M1 Max 4-bit": {1: 1.0, 2: 1.9, 3: 2.8, 4: 3.7, 5: 4.6, 6: 3.9, 8: 3.9},
    "M1 Max 8-bit": {1: 1.0, 2: 1.95, 3: 2.9, 4: 3.85, 5: 4.8, 6: 4.6, 8: 4.6},
    "CPU float32": {1: 1.0, 2: 1.2, 3: 1.4, 4: 2.0, 5: 1.8, 6: 1.9, 8: 2.3},
    "CPU 4-bit": {1: 1.0, 2: 2.1, 3: 3.2, 4: 4.3, 5: 5.4, 6: 6.6, 8: 9.4},
}
# What the program is told of each: the GPU generation, None for a CPU, and the target's bits.
SEEN_AS: dict[str, tuple[int | None, int]] = {
    "M4 Pro 4-bit": (16, 4),
    "M3 Max 4-bit": (15, 4),
    "M5 Max 27B 4-bit": (17, 4),
    "M5 Pro 27B 4-bit": (17, 4),
    "M4 Pro 8-bit": (16, 8),
    "M4 bf16": (16, 16),
    "M1 Max 4-bit": (13, 4),
    "M1 Max 8-bit": (13, 8),
    "CPU float32": (None, 32),
    "CPU 4-bit": (None, 4),
}
BLOCK = 8
DEPTH_SLOPE = 0.02  # of a plain pass per thousand tokens and row
# Conditional acceptance of published pairs, and of the demo pair.
TEXTS = {"copy": 0.95, "maths": 0.885, "code": 0.85, "chat": 0.8, "prose": 0.65, "polish": 0.15}
# Run lengths of the demo pair on its prompts, greedy: by kind, a digit for each token of an answer.
RECORDED: dict[str, list[str]] = json.loads(
    Path(__file__).with_name("recorded_runs.json").read_text("utf-8")
)


@dataclass(frozen=True, slots=True)
class Machine:
    """How times of passes differ from what they should be, as shares: each by itself (`noise`), and
    all for a while (`wander`, which keeps `lasting` of itself from pass to pass)."""

    noise: float
    wander: float = 0.0
    lasting: float = 0.98
    seed: int = 1

    def slowness(self) -> Iterator[float]:
        """What the time of each next pass is multiplied by."""
        choose = random.Random(self.seed)
        mood = choose.gauss(0, self.wander)
        while True:
            yield math.exp(mood + choose.gauss(0, self.noise))
            step = math.sqrt(1 - self.lasting**2) * self.wander
            mood = self.lasting * mood + choose.gauss(0, step)


QUIET = Machine(noise=0.03)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Time of one answer: as piloted, plain, and with the best fixed width."""

    piloted: float
    plain: float
    oracle: float
    probes: int
    widths: tuple[int, ...]

    @property
    def regret(self) -> float:
        """Time given away against the best fixed width."""
        return self.piloted / self.oracle - 1.0

    @property
    def speedup(self) -> float:
        """Over plain decoding."""
        return self.plain / self.piloted


def curve_of(chip: str, depth_slope: float = DEPTH_SLOPE) -> Curve:
    """A chip's curve in milliseconds, 30 for a plain pass."""
    rows = CHIPS[chip]
    base = {w: 30 * (cost + (DRAFT if w > 1 else 0.0)) for w, cost in rows.items()}
    return Curve(base, {w: 30 * depth_slope * w for w in rows})


def guess_of(chip: str) -> Curve:
    """What the program takes the chip's curve to be before anything was timed."""
    generation, bits = SEEN_AS[chip]
    return prior_curve(Chip(generation is None, "", generation), bits, BLOCK, DRAFT)


def recorded(kinds: Iterable[str], num_tokens: int) -> list[int]:
    """Run lengths of the demo pair on answers of these kinds, over and over."""
    runs = [int(digit) for kind in kinds for answer in RECORDED[kind] for digit in answer]
    repeats = 1 + (num_tokens + BLOCK) // len(runs)
    return runs * repeats


def run_lengths(rate: float, num_tokens: int, seed: int, longest: int = BLOCK - 1) -> list[int]:
    """For each position, how many drafts in a row stand there; a draft stands with `rate`."""
    choose = random.Random(seed)
    runs = []
    for _ in range(num_tokens + longest + 1):
        run = 0
        while run < longest and choose.random() < rate:
            run += 1
        runs.append(run)
    return runs


def replay(
    pilot: Pilot,
    true: Curve,
    runs: Sequence[int],
    num_tokens: int,
    depth: int,
    machine: Machine = QUIET,
) -> Outcome:
    """Let a pilot choose through a text, its passes timed on a machine that has moods.

    As in the engine, the first pass is plain, a width is chosen before the pilot has heard what
    came of the pass before, and only passes between others of their width are timed.
    """
    slowness = machine.slowness()
    done, time, widths, width = 0, 0.0, [0], 1
    while done < num_tokens:
        here = depth + done
        stood = min(runs[done], width - 1)
        ms = true.ms(width, here)
        widths.append(width)
        done, time, last = done + stood + 1, time + ms, width
        width = min(pilot.choose(depth + done), max(1, num_tokens - done))
        width = width if width in true.base_ms else 1
        is_timed = widths[-2] == last == width
        seen_ms = ms * next(slowness)
        pilot.watch(last, here, stood, seen_ms if is_timed else None)
    plain = sum(true.ms(1, depth + position) for position in range(num_tokens))
    oracle = min(fixed(true, runs, num_tokens, depth, width) for width in true.widths)
    return Outcome(time, plain, oracle, pilot.probes, tuple(widths[1:]))


def fixed(true: Curve, runs: Sequence[int], num_tokens: int, depth: int, width: int) -> float:
    """Time of the whole text with one width."""
    done, time = 0, 0.0
    while done < num_tokens:
        time += true.ms(width, depth + done)
        done += min(runs[done], width - 1) + 1
    return time
