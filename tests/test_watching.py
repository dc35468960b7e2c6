"""What is seen of a running answer: reads from the device, and when the device waits."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tiny import tiny_pair

from dflash2_mlx import SamplingParams, stream_generate
from dflash2_mlx.watching import READS, Watch, times_of_passes, waits_of

DRAFT_S = 2.0


def watch_of(launches: list[float], ruled: list[float], reads: list[float]) -> Watch:
    """A watch that saw graphs launched, verdicts built and read at those times."""
    watch = Watch()
    for label, times in (("launch", launches), ("build accept", ruled), ("read", reads)):
        watch.spans[label] = [(time, time) for time in times]
    return watch


def waits(launches: list[float], ruled: list[float], reads: list[float]) -> list[float]:
    return [seconds for _, seconds in waits_of(watch_of(launches, ruled, reads), DRAFT_S)]


def test_the_device_waits_from_a_read_to_the_next_launch() -> None:
    assert waits([1, 11, 21.5], [1, 11, 21.5], [10, 20, 30]) == [1, 1.5]


@pytest.mark.parametrize(("whole_at", "waited"), [(12.5, 0.5), (14.0, 2.0)])
def test_a_draft_keeps_it_busy_while_the_rest_is_built(whole_at: float, waited: float) -> None:
    # Launched half a second behind the read; the draft then runs for two.
    assert waits([1, 10.5, whole_at], [1, whole_at], [10, 20]) == [waited]


def test_it_does_not_wait_for_a_pass_that_was_launched_before_the_read() -> None:
    assert waits([1, 5, 12, 15], [1, 5, 15], [10, 20, 30]) == [0, 0]
    # Launched in time, but only the draft: the rest came long after it was through.
    assert waits([1, 5, 14], [1, 14], [10, 20]) == [2]


READERS: list[Callable[[mx.array], Any]] = [
    lambda x: x.item(),
    lambda x: x.tolist(),
    int,
    float,
    bool,
    lambda x: np.array(x),
    lambda x: np.asarray(x),
]


@pytest.mark.parametrize("reader", READERS)
def test_every_kind_of_read_is_noticed(reader: Callable[[mx.array], Any]) -> None:
    watch, array = Watch(), mx.array(3)
    before = [getattr(mx.array, name) for name in READS]
    with watch.watching():
        assert mx.array(reader(array)).shape == ()
        assert np.array([1, 2]).size == 2
    assert len(watch.reads) >= 1
    reader(array)
    assert [getattr(mx.array, name) for name in READS] == before


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.7, top_p=0.9)])
@pytest.mark.parametrize("block_size", [1, 4])
def test_a_pass_reads_once_from_the_device(sampling: SamplingParams, block_size: int) -> None:
    watch, prompt = Watch(), list(b"once upon a time")
    with watch.watching():
        steps = stream_generate(tiny_pair(), prompt, sampling, max_tokens=24, block_size=block_size)
        passes = len(list(steps))
    assert len(watch.spans["read"]) == passes
    times = times_of_passes(watch, draft_ms=1.0)
    assert times["passes"] == passes - 4
    assert times["reads_per_pass"] == 1.0
    assert 0 <= times["idle_share"] < 1
    assert times["host_ms"]["build target"] > 0
