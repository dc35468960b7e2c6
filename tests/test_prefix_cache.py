"""The store keeps within its bytes, evicts the oldest first, and never changes an answer."""

import random
from collections.abc import Sequence

import mlx.core as mx
import pytest
from reusing import KINDS, STEP, Turn, chat, cold, pair_for, run, same, text

from dflash2_mlx.generation import stream_generate
from dflash2_mlx.prefix_cache import Node, PrefixCache, packed
from dflash2_mlx.states import nbytes

ROW = 100  # bytes of a made-up token


def rows(num_tokens: int) -> list[tuple[mx.array, ...]]:
    return [(mx.zeros((num_tokens, ROW), dtype=mx.uint8),)]


def put(cache: PrefixCache, *chunks: Sequence[int], session: str | None = None) -> Node | None:
    """Keep chunks one behind the other, each a whole state."""
    node: Node | None = cache.root("pair")
    for ids in chunks:
        assert node is not None
        node = cache.add(node, ids, rows(len(ids)), [], session)
    return node


def known(cache: PrefixCache, *chunks: Sequence[int]) -> int:
    ids = [token for chunk in chunks for token in chunk]
    borders = [sum(map(len, chunks[: n + 1])) for n in range(len(chunks))]
    return cache.find("pair", ids, borders).node.end


A, B, C, D = [1] * 10, [2] * 10, [3] * 10, [4] * 10


def test_a_shared_beginning_is_there_once() -> None:
    cache = PrefixCache(10**6)
    put(cache, A, B)
    put(cache, A, C)
    assert cache.used_bytes == 30 * ROW
    assert (known(cache, A, B), known(cache, A, C), known(cache, A, D)) == (20, 20, 10)


def test_keys_keep_models_apart() -> None:
    cache = PrefixCache(10**6)
    put(cache, A)
    assert cache.find("another pair", A, [10]).node.end == 0


def test_the_least_recently_used_goes_first() -> None:
    cache = PrefixCache(30 * ROW)
    for chunk in (A, B, C):
        put(cache, chunk)
    cache.touch(cache.find("pair", A, [10]).node, None)
    put(cache, D)
    assert [known(cache, chunk) for chunk in (A, B, C, D)] == [10, 0, 10, 10]
    assert cache.used_bytes == 30 * ROW


def test_what_a_kept_chunk_stands_on_stays() -> None:
    cache = PrefixCache(30 * ROW)
    put(cache, A, B, C)
    assert put(cache, A, B, C, D) is None
    assert known(cache, A, B, C) == 30


def test_more_than_the_budget_is_never_kept() -> None:
    cache = PrefixCache(5 * ROW)
    assert put(cache, A) is None
    assert cache.used_bytes == 0


def test_a_session_only_orders_eviction() -> None:
    cache = PrefixCache(30 * ROW)
    put(cache, A, session="mine")
    put(cache, B)
    put(cache, C, session="mine")
    put(cache, D)
    assert [known(cache, chunk) for chunk in (A, B, C, D)] == [10, 0, 10, 10]
    assert cache.find("pair", A, [10]).node.session == "mine"  # found without naming it


def test_the_stem_stays_while_chats_pass_through_it() -> None:
    cache = PrefixCache(35 * ROW + 200)
    stem = cache.add(cache.root("pair"), A, rows(10), [mx.zeros(100, dtype=mx.uint8)], None)
    assert stem is not None
    stem.is_stem = True
    first = cache.add(stem, B, rows(10), [mx.zeros(100, dtype=mx.uint8)], None)
    assert first is not None
    cache.add(first, C, rows(10), None, None)
    cache.add(cache.root("pair"), D, rows(10), None, None)  # the point that is oldest goes
    assert stem.point is not None
    assert first.point is None


def test_a_chunk_that_leads_nowhere_goes_with_the_last_behind_it() -> None:
    cache = PrefixCache(10**6)
    node = cache.add(cache.root("pair"), A, rows(10), None, None)
    assert node is not None
    cache.add(node, B, rows(10), [mx.zeros(7, dtype=mx.uint8)], None)
    assert cache.used_bytes == 20 * ROW + 7
    assert cache.shrink(20 * ROW) == 20 * ROW + 7
    assert list(cache.nodes()) == []


def test_ids_are_packed_whole() -> None:
    assert len(packed([0, 2**31, 300_000])) == 12


def counted(cache: PrefixCache) -> int:
    return sum(nbytes(node.rows) + nbytes(node.point) for node in cache.nodes())


class Chats:
    """A random choice of what clients do: new chats, next turns, forks, cut prompts, aborts."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.chats: list[list[Sequence[int]]] = []

    def next(self) -> Turn:
        chance = self.random.random()
        if not self.chats or chance < 0.2:
            self.chats.append([text(self.random.choice((1, 2)), 30)])
        parts = self.random.choice(self.chats)
        if 0.2 <= chance < 0.4:
            parts = parts[: self.random.randint(1, len(parts))]
            self.chats.append(parts)
        elif 0.4 <= chance < 0.5:
            return Turn(chat(*parts).ids[: self.random.randint(1, 30)], chat(*parts).marks)
        parts.append(text(self.random.randint(3, 10**6), self.random.randint(1, 25)))
        if len(parts) > 6:
            self.chats.remove(parts)
        return chat(*parts)


@pytest.mark.parametrize("kind", KINDS)
def test_two_hundred_requests_in_any_order_are_as_if_alone(kind: str) -> None:
    """Chats, forks, shorter prompts and aborts, in a store that holds a few of them."""
    chats = Chats(seed=len(kind))
    pair = pair_for(kind, budget=200_000)
    cache, fresh = pair.prefix_cache, pair_for(kind, budget=None)
    assert cache is not None
    num_cached = 0
    for number in range(50):
        turn = chats.next()
        if number % 7 == 3:
            generation = stream_generate(pair, turn.ids, block_size=4, marks=turn.marks)
            next(generation)
            generation.close()
        warm = run(pair, turn, num_tokens=5)
        assert same(warm, run(fresh, turn, num_tokens=5))
        assert cache.used_bytes == counted(cache) <= 200_000
        num_cached += warm.cached_tokens
    assert num_cached > 0
    assert cache.stored.evicted > 0


def test_evicting_everything_under_a_running_answer_changes_nothing() -> None:
    pair, turn = pair_for("qwen3_5"), chat(text(1, 5 * STEP), text(2, 20))
    run(pair, turn)
    generation = stream_generate(pair, turn.ids, max_tokens=12, block_size=4, marks=turn.marks)
    next(generation)
    assert pair.prefix_cache is not None
    pair.prefix_cache.shrink(0)
    for _ in generation:
        pass
    assert same(generation.result, cold("qwen3_5", turn))
    assert pair.prefix_cache.used_bytes == 0
