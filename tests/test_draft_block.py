"""A draft can fill more rows than are verified: what is verified does not depend on it."""

import mlx.core as mx
import pytest
from tiny import plain_ids, tiny_drafter, tiny_pair, tiny_target

from dflash2_mlx import stream_generate
from dflash2_mlx.errors import InvalidRequest
from dflash2_mlx.models.drafter import Drafter
from dflash2_mlx.models.selector import Trellis
from dflash2_mlx.pair import Pair, set_draft_block

PROMPT = list(b"A prompt to look back at.")
BLOCK, WIDTH = 8, 3


def trellis(pair: Pair, width: int) -> Trellis:
    """What the pair's drafter proposes behind the prompt."""
    assert pair.drafter is not None
    reading = pair.target.read(mx.array(PROMPT[:-1]), pair.target.make_caches())
    context = pair.drafter.make_context()
    return pair.drafter.propose(context, reading.taps, mx.array(PROMPT[-1:]), width)


def same(one: Trellis, other: Trellis) -> bool:
    return mx.array_equal(one.candidates, other.candidates).item() and bool(
        mx.allclose(one.scores, other.scores, atol=1e-4)
    )


def test_the_first_rows_of_a_wider_draft_are_verified() -> None:
    """Mask rows see each other, so they are not those of a narrow draft."""
    pair = tiny_pair()
    narrow, whole = trellis(pair, WIDTH), trellis(pair, BLOCK)
    set_draft_block(pair.drafter, BLOCK)
    found = trellis(pair, WIDTH)
    assert found.candidates.shape == narrow.candidates.shape
    assert same(found, Trellis(whole.candidates[: WIDTH - 1], whole.scores[: WIDTH - 1]))
    assert not same(found, narrow)
    assert same(trellis(pair, BLOCK), whole)


def test_head_and_selector_look_at_no_row_that_is_not_verified() -> None:
    pair = tiny_pair()
    assert isinstance(pair.drafter, Drafter)
    set_draft_block(pair.drafter, BLOCK)
    rows, head = [], pair.drafter.head
    pair.drafter.head = lambda hidden: (rows.append(hidden.shape[0]), head(hidden))[1]
    trellis(pair, WIDTH)
    assert rows == [WIDTH - 1]


@pytest.mark.parametrize("width", [2, 3, 5, 8])
def test_ids_are_those_of_plain_decoding(width: int) -> None:
    pair = tiny_pair()
    set_draft_block(pair.drafter, BLOCK)
    steps = list(stream_generate(pair, PROMPT, max_tokens=40, block_size=width))
    assert [token for step in steps for token in step.tokens] == plain_ids(
        tiny_target(), PROMPT, 40
    )
    assert max(step.drafted for step in steps) == width - 1


def test_a_draft_stays_below_the_drafters_positions() -> None:
    """The last rows of a wide draft lie further on than those of a narrow one."""
    reached = {}
    for rows in (WIDTH, BLOCK):
        pair = tiny_pair(max_position_embeddings=len(PROMPT) + 16)
        set_draft_block(pair.drafter, rows)
        steps = stream_generate(pair, PROMPT, max_tokens=40, block_size=WIDTH)
        reached[rows] = max(step.depth for step in steps if step.drafted)
    assert reached[WIDTH] > reached[BLOCK] >= len(PROMPT)


@pytest.mark.parametrize("rows", [1, 0, -1, 9])
def test_impossible_blocks_are_refused(rows: int) -> None:
    with pytest.raises(InvalidRequest, match=f"draft block is {rows}, expected 2 to 8"):
        set_draft_block(tiny_drafter(), rows)
