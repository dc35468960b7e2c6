"""Every combination of sampling fields, blocks and drafters whose distribution is checked."""

import itertools
import zlib
from dataclasses import dataclass
from typing import Any

from draws import (
    World,
    chi_square_p,
    exact_joint,
    random_words,
    sampling_noise,
    simulate,
    total_variation,
)
from tiny_world import tiny_world
from toy import DRAFTERS, toy

from dflash2_mlx.sampling import SamplingParams

MIN_P_VALUE = 1e-4
MAX_TOTAL_VARIATION = 0.01
MIN_DRAWS = 200_000
MAX_NOISE = 0.0075  # of the total variation: what is allowed is then far beyond chance

ALL_PENALTIES = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "penalty_context": 4,
}
FIELDS: tuple[tuple[dict[str, Any], ...], ...] = (
    ({"temperature": 0.5}, {"temperature": 1.0}, {"temperature": 2.0}),
    ({}, {"top_k": 3}),
    ({}, {"top_p": 0.9}),
    ({}, {"min_p": 0.15}),
    ({}, ALL_PENALTIES),
    ({}, {"logit_bias": {2: 1.0, 4: -0.7}}),
)
# Block sizes, and whether the request has a seed: its drafts are coupled with the target's draws.
MODES = ((2, False), (4, False), (8, False), (8, True))
TINY_PAIR = "tiny pair"
WORLDS = (*DRAFTERS, TINY_PAIR)


def settings() -> list[dict[str, Any]]:
    """One value of each field, in every combination."""
    return [
        {name: value for part in parts for name, value in part.items()}
        for parts in itertools.product(*FIELDS)
    ]


def world_of(drafter: str) -> World:
    """The target that a drafter of `WORLDS` drafts for, with that drafter."""
    return tiny_world() if drafter == TINY_PAIR else toy(drafter)


@dataclass(frozen=True, slots=True)
class Case:
    """One combination."""

    fields: dict[str, Any]
    drafter: str
    block: int
    coupled: bool

    def __str__(self) -> str:
        named = [f"{name} {value}" for name, value in self.fields.items()]
        mode = [f"block {self.block}", *["coupled"] * self.coupled]
        return ", ".join((self.drafter, *mode, *named))


def whole_grid() -> list[Case]:
    """All of them."""
    combinations = itertools.product(WORLDS, MODES, settings())
    return [Case(fields, drafter, *mode) for drafter, mode, fields in combinations]


def covering_subset() -> list[Case]:
    """Each drafter in two of the modes, and every value of every field several times."""
    ways = settings()
    pairs = [(name, MODES[(i + j) % 4]) for i, name in enumerate(WORLDS) for j in range(2)]
    # 37 shares no factor with the number of settings: steps of it reach all of them in turn.
    return [
        Case(ways[(5 + 37 * number) % len(ways)], drafter, *mode)
        for number, (drafter, mode) in enumerate(pairs)
    ]


@dataclass(frozen=True, slots=True)
class Finding:
    """How far draws are from the exact distribution.

    `noise` is the total variation that exact draws would have on average.
    """

    num_draws: int
    p_value: float
    total_variation: float
    noise: float

    @property
    def passed(self) -> bool:
        return self.p_value > MIN_P_VALUE and self.total_variation < MAX_TOTAL_VARIATION


def examine(
    world: World,
    params: SamplingParams,
    block: int,
    *,
    coupled: bool = False,
    num_draws: int | None = None,
    seed: int = 0,
) -> Finding:
    """The first three tokens of drafted decoding against their exact joint distribution.

    Draws 200,000 times, or more where noise alone would come near the total variation allowed.
    """
    exact = exact_joint(world, params)
    if num_draws is None:
        excess = sampling_noise(exact, MIN_DRAWS) / MAX_NOISE
        num_draws = int(MIN_DRAWS * max(1.0, excess**2))
    counts = simulate(world, params, block, random_words(num_draws, seed), coupled=coupled)
    return Finding(
        num_draws,
        chi_square_p(counts, exact),
        total_variation(counts, exact),
        sampling_noise(exact, num_draws),
    )


def examine_case(case: Case) -> Finding:
    """One combination of the grid; each has seeds of its own, so that p values are independent."""
    world, params = world_of(case.drafter), SamplingParams(**case.fields)
    seed = zlib.crc32(str(case).encode())
    return examine(world, params, case.block, coupled=case.coupled, seed=seed)
