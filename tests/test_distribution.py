"""Drafted decoding has exactly the target's distribution, and the harness would see if not.

The first three tokens, jointly: 200,000 draws and more of the engine's own `Chooser` against plain
decoding of every possible beginning. `scripts/check_sampling` does the whole grid, this a subset.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny_world
from draws import (
    NUM_TOKENS,
    exact_joint,
    expected_standing,
    random_words,
    run_pass,
    simulate,
    upper_tail,
)
from sampling_grid import (
    ALL_PENALTIES,
    FIELDS,
    MODES,
    WORLDS,
    Case,
    covering_subset,
    examine,
    examine_case,
    whole_grid,
    world_of,
)
from toy import toy

from dflash2_mlx import acceptance, chooser
from dflash2_mlx.acceptance import accept_sampled
from dflash2_mlx.chooser import Chooser
from dflash2_mlx.decode import Conversation
from dflash2_mlx.distribution import Distribution, Rows
from dflash2_mlx.models.selector import Trellis
from dflash2_mlx.randomness import Purpose, Randomness
from dflash2_mlx.sampling import SamplingParams

ENOUGH = 100_000  # draws to see a rate or a mistake
EVERY_FIELD = SamplingParams(
    temperature=0.8, top_k=4, top_p=0.95, min_p=0.02, logit_bias={2: 1.0}, **ALL_PENALTIES
)


@pytest.mark.parametrize("case", covering_subset(), ids=str)
def test_drafting_has_the_exact_distribution(case: Case) -> None:
    finding = examine_case(case)
    assert finding.noise > 0.001  # there is something to choose from
    assert finding.passed, finding


def test_the_subset_has_every_value_twice_and_the_grid_every_combination() -> None:
    subset, grid = covering_subset(), whole_grid()
    assert len({str(case) for case in grid}) == len(grid) == 6 * 4 * 3 * 2**5
    assert all(case in grid for case in subset)
    for values in FIELDS:
        names = {name for value in values for name in value}
        taken = [{n: v for n, v in case.fields.items() if n in names} for case in subset]
        assert all(taken.count(value) >= 2 for value in values)
    assert all([case.drafter for case in subset].count(name) >= 2 for name in WORLDS)
    assert all([(case.block, case.coupled) for case in subset].count(mode) >= 2 for mode in MODES)


@pytest.mark.parametrize("values", [values for values in FIELDS if not values[0]], ids=str)
def test_every_field_of_the_grid_changes_the_distribution(values: tuple[dict[str, Any]]) -> None:
    with_field = SamplingParams(temperature=1.0, **values[-1])
    for world in (toy("good"), tiny_world.tiny_world()):
        plain = exact_joint(world, SamplingParams(temperature=1.0))
        assert 0.5 * np.abs(exact_joint(world, with_field) - plain).sum() > 0.05


@pytest.mark.parametrize(("block", "coupled"), MODES)
def test_the_simulation_draws_what_the_engine_draws(block: int, coupled: bool) -> None:
    """Seed for seed, through real caches and the real drafter's own context."""
    words = random_words(48)
    counts = np.zeros((tiny_world.VOCAB,) * NUM_TOKENS, dtype=np.int64)
    for seed in words:
        chooser = Chooser(EVERY_FIELD, Randomness(seed), tiny_world.VOCAB, coupled=coupled)
        counts[engine_tokens(chooser, block)] += 1
    world = tiny_world.tiny_world()
    assert np.array_equal(counts, simulate(world, EVERY_FIELD, block, words, coupled=coupled))


def engine_tokens(chooser: Chooser, block: int) -> tuple[int, ...]:
    """The first three tokens of a conversation that drafts from its first pass on."""
    conversation = Conversation(*tiny_world.pair(), chooser)
    conversation.prefill(tiny_world.PROMPT)
    first = len(tiny_world.PROMPT)
    while len(conversation.tokens) < first + NUM_TOKENS:
        flight = conversation.launch(block)
        conversation.commit(flight, chooser.read(flight.verdict, flight.width).tokens)
    return tuple(conversation.tokens[first : first + NUM_TOKENS])


@pytest.mark.parametrize("drafter", WORLDS)
def test_a_seed_draws_the_same_with_every_drafter_and_without(drafter: str) -> None:
    world, words = world_of(drafter), random_words(20_000)
    plain = simulate(world, EVERY_FIELD, 1, words, coupled=True)
    assert np.count_nonzero(plain) >= 8
    assert np.array_equal(simulate(world, EVERY_FIELD, 4, words, coupled=True), plain)


@pytest.mark.parametrize("drafter", WORLDS)
def test_drafts_stand_as_often_as_p_and_q_overlap(drafter: str) -> None:
    """At each position within 1 % of what following every path gives."""
    world = world_of(drafter)
    for params in (SamplingParams(temperature=1.0), EVERY_FIELD):
        _, num_accepted = run_pass(world, params, 4, (), random_words(ENOUGH))
        stood = np.array([(num_accepted > row).mean() for row in range(3)])
        expected = expected_standing(world, params, 3)
        # Where hardly any draft stands, the draws tell it no closer than four standard errors.
        error = np.sqrt(expected * (1 - expected) / ENOUGH)
        assert (np.abs(stood - expected) <= np.maximum(0.01 * expected, 4 * error)).all()


def accept_by_equality(drafts, candidates, q, rows, uniforms):  # type: ignore[no-untyped-def]
    """A draft stands if a draw from the target is the same token."""
    below = mx.cumsum(mx.softmax(rows.weights[:-1], axis=-1), axis=-1) < uniforms[:, None]
    same = below.sum(axis=-1) == drafts
    return accept_sampled(drafts, candidates, q, rows, mx.where(same, 0.0, mx.inf))


def not_subtracted(row: Rows, candidates: mx.array, q: mx.array) -> Rows:
    """Behind a refused draft follows a token from p, not from what p has over q."""
    return row


def not_clipped(row: Rows, candidates: mx.array, q: mx.array) -> Rows:
    """What q has over p counts as well."""
    left = mx.abs(mx.softmax(row.weights, axis=-1).at[candidates].subtract(q))
    return Rows(mx.log(left), row.ids)


def greedy_walk(trellis: Trellis, temperature: float = 0.0, noise: Any = None) -> mx.array:
    """Drafts are the best candidates, though q says that they were drawn."""
    return walk(trellis)


def count_all_drafts(
    self: Distribution, committed: Sequence[int], drafts: mx.array
) -> tuple[mx.array, mx.array]:
    """Penalties count drafts that are not decided yet, or were refused."""
    places, counted = windows(self, committed, drafts)
    return mx.broadcast_to(places[-1:], places.shape), mx.broadcast_to(counted[-1:], counted.shape)


def same_everywhere(self: Randomness, positions: mx.array, purpose: Purpose) -> mx.array:
    """Every position uses the same random numbers."""
    return keys(self, mx.zeros_like(positions), purpose)


walk, windows, keys = Trellis.walk, Distribution._windows, Randomness._keys
MISTAKES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "accept by equality": (chooser, "accept_sampled", accept_by_equality),
    "residual not subtracted": (acceptance, "_without", not_subtracted),
    "residual not clipped": (acceptance, "_without", not_clipped),
    "greedy drafts": (Trellis, "walk", greedy_walk),
    "penalties count all drafts": (Distribution, "_windows", count_all_drafts),
    "the same numbers everywhere": (Randomness, "_keys", same_everywhere),
}


@pytest.mark.parametrize("mistake", [None, *MISTAKES])
def test_a_planted_mistake_is_caught(mistake: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """S01."""
    if mistake is not None:
        monkeypatch.setattr(*MISTAKES[mistake])
    params = SamplingParams(temperature=0.5, **ALL_PENALTIES)
    finding = examine(toy("good"), params, 4, num_draws=ENOUGH)
    assert finding.p_value < 1e-6 if mistake else finding.p_value > 1e-4, finding


@pytest.mark.parametrize(
    ("degrees", "statistic", "tail"),
    [
        (1, 3.841, 0.05),
        (10, 18.307, 0.05),
        (100, 124.342, 0.05),
        (1, 23.928, 1e-6),
        (4, 23.513, 1e-4),
    ],
)
def test_p_values_are_those_of_the_tables(degrees: int, statistic: float, tail: float) -> None:
    assert upper_tail(statistic, degrees) == pytest.approx(tail, rel=2e-3)
