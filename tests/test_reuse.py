"""What was read of one prompt is not read again for the next, and changes nothing in its answer."""

from collections.abc import Sequence
from itertools import pairwise

import mlx.core as mx
import pytest
from reusing import KINDS, PLENTY, STEP, Turn, chat, cold, pair_for, run, same, text

from dflash2_mlx import generate
from dflash2_mlx.borders import Marks, chunk_borders, kept_borders
from dflash2_mlx.decode import Conversation
from dflash2_mlx.generation import read_ahead, stream_generate
from dflash2_mlx.models.cache import KVCache
from dflash2_mlx.pair import Pair

SYSTEM, QUESTION = text(1, 50), text(2, 37)
both = pytest.mark.parametrize("drafting", [True, False], ids=["drafting", "plain"])
every_kind = pytest.mark.parametrize("kind", KINDS)


def turns(pair: Pair, count: int) -> list[tuple[Turn, int]]:
    """A chat of `count` turns that takes in its own answers, and what each turn knew already."""
    parts: list[Sequence[int]] = [SYSTEM]
    told = []
    for number in range(count):
        parts.append(text(100 + number, 9 + 5 * number))
        turn = chat(*parts)
        result = run(pair, turn)
        told.append((turn, result.cached_tokens))
        parts.append(result.token_ids)
        ahead = chat(*parts)
        read_ahead(pair, ahead.ids[:-1], ahead.marks, block_size=4)
    return told


@both
@every_kind
def test_the_same_prompt_again_is_known_but_for_its_last_token(kind: str, drafting: bool) -> None:
    """A warm answer is the cold one (K04, K06, K09), in the passes of the cold one (K10)."""
    pair, turn = pair_for(kind, drafting), chat(SYSTEM, QUESTION)
    fresh = cold(kind, turn, drafting)
    for known in (0, len(turn.ids) - 1, len(turn.ids) - 1):
        result = run(pair, turn)
        assert same(result, fresh)
        assert result.cached_tokens == known


@both
@every_kind
def test_every_turn_of_a_chat_knows_the_prompt_and_answer_before_it(
    kind: str, drafting: bool
) -> None:
    """Also with drafting (K07, K08)."""
    pair = pair_for(kind, drafting)
    told = turns(pair, 5)
    for (before, _), (turn, known) in pairwise(told):
        assert known >= len(before.ids) + 10  # all of the answer but its last tokens
        assert known < len(turn.ids)
    last, _ = told[-1]
    assert same(run(pair, last), cold(kind, last, drafting))


@every_kind
def test_a_shorter_prompt_and_a_fork_are_answered_as_by_a_fresh_pair(kind: str) -> None:
    """What does not end where a state was kept is read from an earlier one on (K04, K05, K16)."""
    pair = pair_for(kind)
    long = chat(SYSTEM, QUESTION, text(3, 40), text(4, 30))
    run(pair, long)
    for other in (
        chat(SYSTEM, QUESTION),
        chat(SYSTEM, QUESTION[:20], text(5, 3)),
        chat(SYSTEM, text(6, 30)),
        chat(SYSTEM[:4], text(7, 30)),
        chat(SYSTEM[:1]),
        Turn((5,), Marks()),
        Turn(long.ids[:60], Marks()),
    ):
        assert same(run(pair, other), cold(kind, other))
        assert same(run(pair, long), cold(kind, long))


@every_kind
def test_a_new_chat_sees_nothing_of_an_earlier_one(kind: str) -> None:
    """(K13)"""
    pair = pair_for(kind)
    run(pair, chat(SYSTEM, list(b"zebra41")), num_tokens=30)
    for turn in (chat(SYSTEM, list(b"hi")), chat(list(b"hi"))):
        assert same(run(pair, turn), cold(kind, turn))


@every_kind
def test_a_long_and_a_short_chat_in_turns_are_each_as_if_alone(kind: str) -> None:
    """(K16, K17)"""
    pair = pair_for(kind)
    long: list[Sequence[int]] = [text(1, 300)]
    short: list[Sequence[int]] = [text(2, 20)]
    for number in range(3):
        for parts in (long, short):
            parts.append(text(10 + number, 12))
            turn = chat(*parts)
            result = run(pair, turn)
            assert same(result, cold(kind, turn))
            parts.append(result.token_ids)


@every_kind
def test_the_template_may_drop_what_an_answer_thought(kind: str) -> None:
    """Only what changed is read again: the state behind the question is kept (K15)."""
    pair = pair_for(kind)
    question = chat(SYSTEM, QUESTION)
    thought = run(pair, question).token_ids
    told = chat(SYSTEM, QUESTION, thought[6:], text(8, 5))
    result = run(pair, told)
    assert same(result, cold(kind, told))
    assert result.cached_tokens == len(SYSTEM) + len(QUESTION)


@every_kind
def test_a_state_put_together_is_of_our_own_classes_and_rewinds(kind: str) -> None:
    """(K11)"""
    pair, turn = pair_for(kind), chat(SYSTEM, QUESTION)
    states = []
    for _ in range(2):
        conversation = _read(pair, turn)
        states.append(conversation)
        flight = conversation.launch(6)
        conversation.commit(flight, [7, 8])
    kinds = [[type(cache) for cache in c.leaf_caches] for c in states]
    assert kinds[0] == kinds[1]
    assert states[1].drafter is pair.drafter
    ones, others = (
        [cache.rows() for cache in c.leaf_caches if isinstance(cache, KVCache)] for c in states
    )
    for (keys, values), (other_keys, other_values) in zip(ones, others, strict=True):
        assert mx.array_equal(keys, other_keys)
        assert mx.array_equal(values, other_values)


def _read(pair: Pair, turn: Turn) -> Conversation:
    from dflash2_mlx.generation import reuse_of

    conversation = Conversation(pair.target, pair.drafter)
    reuse = reuse_of(pair, turn.marks, None)
    conversation.prefill(turn.ids, marks=turn.marks, reuse=reuse, step=STEP)
    return conversation


@every_kind
def test_the_drafter_has_the_same_context_warm_and_cold(kind: str) -> None:
    """Its positions go on at the known length, and its rows are the same bits (K09, K10)."""
    pair = pair_for(kind)
    turn, longer = chat(SYSTEM, QUESTION), chat(SYSTEM, QUESTION, text(9, 25))
    _read(pair, turn)
    warm = _read(pair, longer)
    fresh = _read(pair_for(kind), longer)
    for ours, theirs in zip(warm.context, fresh.context, strict=True):
        assert ours.offset == theirs.offset == len(longer.ids) - 1
        for one, other in zip(ours.rows(), theirs.rows(), strict=True):
            assert mx.array_equal(one, other)


def test_a_state_without_the_drafters_context_is_not_used_for_drafting() -> None:
    """The same numbers with and without drafting, each from its own states (K08, K19)."""
    pair, turn = pair_for("dense"), chat(SYSTEM, QUESTION)
    for _ in range(2):
        plain = generate(pair, turn.ids, max_tokens=5, block_size=1, marks=turn.marks)
        drafted = generate(pair, turn.ids, max_tokens=5, block_size=4, marks=turn.marks)
        assert plain.cached_tokens == drafted.cached_tokens
        assert drafted.tokens_per_pass >= plain.tokens_per_pass == 1


def test_a_target_that_cannot_be_drafted_for_reuses_too() -> None:
    from families import build
    from tiny import pair_of

    from dflash2_mlx.prefix_cache import PrefixCache
    from dflash2_mlx.target import Target

    target = Target(build("phi3small"))
    assert target.undraftable
    pair, fresh = pair_of(target), pair_of(target)
    for one in (pair, fresh):
        one.prefill_step, one.end_tokens = STEP, frozenset()
    pair.prefix_cache = PrefixCache(PLENTY)
    turn = chat(SYSTEM, QUESTION)
    longer = chat(SYSTEM, QUESTION, text(9, 25))
    run(pair, turn)
    again, more = run(pair, turn), run(pair, longer)
    assert same(again, run(fresh, turn))
    assert same(more, run(fresh, longer))
    assert (again.cached_tokens, more.cached_tokens) == (len(turn.ids) - 1, len(turn.ids) - 1)


class GivenUp(Exception):
    """Raised in the middle of a prefill."""


@every_kind
def test_a_prefill_that_was_given_up_leaves_what_it_read(kind: str) -> None:
    pair, turn = pair_for(kind), chat(text(1, 8 * STEP), QUESTION)

    def give_up(done: int, total: int) -> None:
        if done >= 4 * STEP:
            raise GivenUp

    generation = stream_generate(pair, turn.ids, block_size=4, marks=turn.marks, on_prefill=give_up)
    with pytest.raises(GivenUp):
        next(generation)
    result = run(pair, turn)
    assert result.cached_tokens == 4 * STEP
    assert same(result, cold(kind, turn))


def test_what_a_prefill_reports_begins_at_what_is_known() -> None:
    pair, turn = pair_for("dense"), chat(SYSTEM, QUESTION)
    run(pair, turn)
    longer = chat(SYSTEM, QUESTION, text(3, 20))
    heard: list[tuple[int, int]] = []
    for _ in stream_generate(
        pair,
        longer.ids,
        max_tokens=1,
        block_size=4,
        marks=longer.marks,
        on_prefill=lambda done, total: heard.append((done, total)),
    ):
        pass
    assert heard == [(103, 107), (107, 107)]


def test_why_not_more_was_known_is_told() -> None:
    """(K06)"""
    pair, turn = pair_for("qwen3_5"), chat(SYSTEM, QUESTION)
    assert run(pair, turn).why_no_more == "nothing is stored yet"
    assert run(pair, turn).why_no_more == ""
    changed = chat(SYSTEM, [*QUESTION[:5], 250, *QUESTION[6:]])
    assert run(pair, changed).why_no_more == f"token {len(SYSTEM) + 5} is the first that differs"
    assert run(pair, chat(SYSTEM, QUESTION, text(9, 5))).why_no_more == ""  # only what is new
    foreign = chat([token + 1 for token in SYSTEM], QUESTION)
    assert run(pair, foreign).why_no_more == "token 0 is the first that differs"
    other = Turn(turn.ids[: len(SYSTEM) + 10], turn.marks)
    assert "read in other chunks" in str(run(pair, other).why_no_more)
    assert pair.prefix_cache is not None
    pair.prefix_cache.shrink(0)
    assert run(pair, turn).why_no_more == "what followed token 0 was evicted"


def test_borders_depend_on_the_prompt_alone() -> None:
    assert chunk_borders(5000, None, 2048) == [2048, 4096, 5000]
    marks = Marks((2500, 2600, 9000), stem=100)
    assert chunk_borders(5000, marks, 2048) == [100, 2148, 2500, 2600, 4648, 5000]
    assert chunk_borders(0, marks, 2048) == []


def test_chunks_shrink_deep_in_the_context() -> None:
    """(M05)"""
    borders = [0, *chunk_borders(150_000, None, 2048)]
    sizes = [b - a for a, b in pairwise(borders)]
    assert (sizes[0], sizes[-2]) == (2048, 256)
    for start, size in zip(borders, sizes, strict=False):
        assert size * max(start, 32_768) <= 2048 * 65_536
    assert min(sizes[:-1]) == 256


def test_whole_states_lie_further_and_further_apart() -> None:
    marks = Marks(tuple(range(50_000, 60_000, 1000)), stem=500)
    borders = chunk_borders(60_500, marks, 2048)
    kept = sorted(kept_borders(borders, marks, 2048))
    assert kept[0] == 500
    assert kept[-3:] == [58_000, 59_000, 60_500]
    gaps = [b / a for a, b in pairwise(kept[1:-3])]
    assert all(gap > 1.4 for gap in gaps)
    assert len(kept) < 12
