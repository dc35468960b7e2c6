"""The shipped session of an agent, 30 answers with tools and thoughts, replayed warm and cold."""

import zlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from reusing import pair_for
from tiny import ByteTokenizer

from dflash2_mlx.pair import Message
from dflash2_mlx.rehearsal import answers, replay, second_turn, session

START, STOP, THINK = 270, 271, 272
PIECE = 12  # letters to a token, so that tiny models have tens of seconds less to read


class Agentic(ByteTokenizer):
    """Turns between special tokens; thoughts of turns before the last question are dropped."""

    think_start, think_end = "<think>", "</think>"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        pieces = (text[start : start + PIECE] for start in range(0, len(text), PIECE))
        return [zlib.crc32(piece.encode()) % 250 for piece in pieces]

    def apply_chat_template(
        self, messages: Sequence[Message], tokenize: bool = True, **variables: Any
    ) -> Any:
        if not tokenize:
            return f"{messages}{variables.get('tools')}"
        asked = [n for n, message in enumerate(messages) if message["role"] == "user"]
        ids = self.encode(str(variables.get("tools") or ""))
        for place, message in enumerate(messages):
            ids += [START, *self.encode(message["role"])]
            if place > asked[-1] and message.get("reasoning_content"):
                ids += [THINK, *self.encode(message["reasoning_content"]), THINK]
            ids += self.encode(message["content"] + str(message.get("tool_calls") or ""))
            ids.append(STOP)
        if variables.get("add_generation_prompt"):
            ids += [START, *self.encode("assistant"), THINK]
        return ids


def test_the_session_has_thirty_answers_tools_thoughts_and_long_results() -> None:
    messages, tools = session()
    assert len(list(answers(messages))) == 30
    assert len(tools) == 5
    assert sum("reasoning_content" in message for message in messages) == 30
    assert max(len(m["content"]) for m in messages if m["role"] == "tool") > 500


@pytest.mark.parametrize("kind", ["dense", "qwen3_5"])
def test_reuse_changes_nothing_and_spares_most(kind: str) -> None:
    """(K06-K10, K15)"""
    pair = pair_for(kind)
    pair.tokenizer = Agentic()
    pair.prefill_step = 128
    runs = [
        replay(pair, *session(), max_tokens=6, block_size=4, warm=warm) for warm in (False, True)
    ]
    cold, warm = runs
    assert [turn.ids for turn in warm.turns] == [turn.ids for turn in cold.turns]
    assert [turn.accepted for turn in warm.turns] == [turn.accepted for turn in cold.turns]
    assert warm.num_read <= 0.15 * cold.num_read
    dropped = [
        place
        for place, (before, after) in enumerate(pairwise(warm.turns), 1)
        if after.cached_tokens < before.prompt_tokens
    ]
    # A new question: the thoughts before it are gone, and all but the question was read ahead.
    assert dropped == [11, 21]
    for place in dropped:
        turn = warm.turns[place]
        assert turn.prompt_tokens < warm.turns[place - 1].prompt_tokens
        assert turn.prompt_tokens - turn.cached_tokens < 15


def test_the_time_of_a_second_turn_is_taken_with_and_without_states() -> None:
    pair = pair_for("dense")
    pair.tokenizer = Agentic()
    kept = pair.prefix_cache
    told = second_turn(pair, 200, "What was it about?", 4)
    assert min(told.cold_s, told.warm_s) > 0
    assert pair.prefix_cache is kept
