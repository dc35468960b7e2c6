"""What a parked drafter has not seen is kept in one buffer, in order, whatever came at once."""

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_pair

from dflash2_mlx.counting import num_nodes
from dflash2_mlx.decode import Conversation
from dflash2_mlx.unseen import MAX_UNSEEN, Unseen

WIDTH = 6
PROMPT = list(b"A prompt.")


def taps(first: int, num_rows: int) -> mx.array:
    """Rows that say where they belong."""
    return (mx.arange(first, first + num_rows)[None, :, None] + mx.zeros((1, 1, WIDTH))).astype(
        mx.float32
    )


@given(st.lists(st.integers(1, 90), max_size=12))
def test_rows_come_back_in_order(sizes: list[int]) -> None:
    unseen, first = Unseen(), 0
    for size in sizes:
        unseen.add(taps(first, size))
        first += size
        assert len(unseen) == first
    found = unseen.take()
    assert (found is None) == (not sizes)
    assert found is None or mx.array_equal(found, taps(0, first))
    assert (len(unseen), unseen.take(), unseen.state) == (0, None, [])


def test_rows_taken_are_not_changed_by_later_ones() -> None:
    unseen = Unseen()
    for first in range(3):
        unseen.add(taps(first, 1))
    taken = unseen.take()
    unseen.add(taps(7, 1))
    mx.eval(unseen.state)
    assert taken is not None
    assert mx.array_equal(taken, taps(0, 3))


def test_a_buffer_is_written_in_place_and_holds_on_to_nothing_else() -> None:
    unseen, shapes = Unseen(), set()
    for first in range(MAX_UNSEEN):
        unseen.add(taps(first, 1))
        mx.eval(unseen.state)
        assert num_nodes(*unseen.state) <= 1
        shapes.add(unseen.state[0].shape)
    assert shapes == {(1, 1, WIDTH), (1, 1 + MAX_UNSEEN, WIDTH)}


@pytest.mark.parametrize("width", [1, 4])
def test_a_pass_leaves_no_hidden_states_to_be_computed(width: int) -> None:
    """Neither parked nor drafting: what waits for the drafter is evaluated with the pass."""
    pair = tiny_pair()
    conversation = Conversation(pair.target, pair.drafter)
    conversation.prefill(PROMPT)
    flight = conversation.launch(1)
    for _ in range(8):
        following = conversation.launch(width, behind=flight)
        verdict = conversation.chooser.read(flight.verdict, flight.width)
        conversation.commit(flight, verdict.tokens)
        flight = following
    assert num_nodes(*conversation._unseen.state or [mx.array(0)]) <= 1
