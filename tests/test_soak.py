"""What a long answer holds does not grow; `scripts/soak` goes on for much longer."""

from typing import Any

import pytest
from soaking import SLACK, endless_pair, grown, is_flat, soak

from dflash2_mlx import SamplingParams
from dflash2_mlx.target import Reading, Target

PASSES, EVERY = 240, 30  # each look walks through all objects of the process
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.7, top_p=0.95)


@pytest.mark.parametrize(("sampling", "block_size"), [(GREEDY, 4), (SAMPLED, 4), (GREEDY, 1)])
def test_memory_and_live_arrays_stay_flat(sampling: SamplingParams, block_size: int) -> None:
    seen = list(soak(endless_pair(), PASSES, EVERY, sampling, block_size))
    assert len(seen) == PASSES // EVERY
    more = grown(seen)
    assert is_flat(more), more


def test_what_is_left_behind_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    read, kept = Target.read, []

    def leaking(*args: Any, **options: Any) -> Reading:
        kept.append(read(*args, **options))
        return kept[-1]

    monkeypatch.setattr(Target, "read", leaking)
    more = grown(list(soak(endless_pair(), PASSES, EVERY, GREEDY, block_size=4)))
    assert more.arrays >= 30
    assert more.nbytes > SLACK
