"""A text that got stuck is told from one that only has a ruler or a refrain in it."""

import random

import pytest

from dflash2_mlx.loops import LONGEST_PHRASE, MIN_TIMES, MIN_TOKENS, Repeat, longest_repeat


def babble(length: int, seed: int = 0) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(10_000) for _ in range(length)]


def test_no_token_twice_is_no_repeat() -> None:
    assert longest_repeat(babble(200)) == Repeat()
    assert longest_repeat([]) == Repeat()
    assert longest_repeat([1]) == Repeat()


@pytest.mark.parametrize("period", [1, 2, 5, LONGEST_PHRASE])
def test_a_phrase_said_over_and_over_is_found_anywhere(period: int) -> None:
    phrase = babble(period, seed=1)
    ids = babble(7) + phrase * 6 + babble(9, seed=2)
    assert longest_repeat(ids) == Repeat(6 * period, period)


def test_the_shortest_phrase_is_the_one_that_is_told() -> None:
    assert longest_repeat([5] * 40) == Repeat(40, 1)


def test_a_phrase_cut_at_the_end_counts_to_where_it_is_cut() -> None:
    phrase = babble(8)
    assert longest_repeat(phrase * 4 + phrase[:3]) == Repeat(35, 8)


def test_a_word_repeated_for_long_is_a_loop() -> None:
    """C27."""
    assert longest_repeat(babble(20) + [7] * MIN_TOKENS).is_loop


@pytest.mark.parametrize("times", [2, MIN_TIMES])
def test_a_long_phrase_has_to_come_three_times(times: int) -> None:
    repeat = longest_repeat(babble(LONGEST_PHRASE) * times)
    assert repeat.tokens == times * LONGEST_PHRASE
    assert repeat.is_loop == (times >= MIN_TIMES)


def test_a_ruler_in_a_table_is_no_loop() -> None:
    assert not longest_repeat([*babble(30), *[9, 8] * 8, *babble(30, seed=3)]).is_loop


def test_a_repeat_is_told_in_words() -> None:
    assert str(Repeat(40, 4)) == "40 tokens in phrases of 4"
