"""Marks are where the next prompt of a conversation agrees with this one, whatever the template."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from reusing import pair_for
from tiny import ByteTokenizer

from dflash2_mlx.marking import Marker, marker_of, marks_of, raw_marks
from dflash2_mlx.pair import Message, Pair


class Templated(ByteTokenizer):
    """Qwen's shape: special tokens around turns, a thought opened by the prompt, dropped later."""

    START, STOP = 270, 271

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses
        self.rendered: list[int] = []

    def apply_chat_template(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        self.rendered.append(len(messages))
        questions = [n for n, message in enumerate(messages) if message["role"] == "user"]
        if self.refuses and messages[-1]["role"] == "assistant":
            raise ValueError("the last message has to be the user's")
        ids = list(str(variables.get("tools") or "").encode())
        for place, message in enumerate(messages):
            text = f"{message['role']}\n"
            if "reasoning_content" in message and place > questions[-1]:
                text += f"<think>{message['reasoning_content']}</think>"
            ids += [self.START, *(text + message["content"]).encode(), self.STOP, 10]
        if variables.get("add_generation_prompt", True):
            ids += [self.START, *b"assistant\n<think>\n"]
        return ids


def said(role: str, content: str, thought: str | None = None) -> Message:
    message = {"role": role, "content": content}
    return message if thought is None else {**message, "reasoning_content": thought}


def templated(refuses: bool = False) -> Pair:
    pair = pair_for("dense")
    pair.tokenizer = Templated(refuses)
    return pair


CHAT = [
    said("system", "be kind"),
    said("user", "one?"),
    said("assistant", "first", "hm"),
    said("user", "two?"),
    said("assistant", "second", "well"),
    said("user", "three?"),
]


def ends(pair: Pair, messages: Sequence[Message], **variables: Any) -> tuple[list[str], str]:
    """The last letters before each mark, and before the stem."""
    ids = pair.encode_chat(messages, **variables)
    marks = Marker(pair).marks(messages, ids, variables)
    shown = "".join(chr(token) if token < 256 else "|" for token in ids)
    return [shown[:at][-8:] for at in marks.positions], shown[: marks.stem][-8:]


def test_marks_lie_behind_questions_answers_and_the_system_message() -> None:
    positions, stem = ends(templated(), CHAT)
    assert [end.strip()[-4:] for end in positions] == ["ne?|", "user", "wo?|", "user", "ee?|"]
    assert stem.endswith("|user\n")


def test_a_thought_that_will_be_dropped_is_behind_the_mark() -> None:
    """The next turn renders the question again, and not the thought behind it (K15)."""
    pair = templated()
    first = pair.encode_chat(CHAT[:2])
    second = pair.encode_chat(CHAT[:4])
    marks = Marker(pair).marks(CHAT[:2], first, {})
    shared = next(n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    assert marks.positions[-1] == shared - len("|assistant\n")
    assert marks.positions[-1] in Marker(pair).marks(CHAT[:4], second, {}).positions


def test_marks_of_a_turn_are_those_of_the_next_as_far_as_both_agree() -> None:
    pair = templated()
    loop = [said("user", "go"), *[said("assistant", "call", "so"), said("tool", "result")] * 3]
    for turns in (CHAT, loop):
        asked = [n + 1 for n, turn in enumerate(turns) if turn["role"] in ("user", "tool")]
        for count, later in pairwise(asked):
            before, after = (pair.encode_chat(turns[:n]) for n in (count, later))
            shared = next(
                (n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b),
                len(before),
            )
            ones = Marker(pair).marks(turns[:count], before, {})
            others = Marker(pair).marks(turns[:later], after, {})
            below = [{at for at in marks.positions if at < shared} for marks in (ones, others)]
            assert below[0] == below[1] != set()
            assert ones.stem == others.stem


def test_the_stem_is_the_same_for_every_question() -> None:
    pair = templated()
    tools = [{"name": "look"}]
    stems = set()
    for question in ("a", "b", "about", "", "\n"):
        messages = [said("system", "be kind"), said("user", question)]
        ids = pair.encode_chat(messages, tools=tools)
        stems.add(Marker(pair).marks(messages, ids, {"tools": tools}).stem)
    assert len(stems) == 1
    without = Marker(pair).marks(CHAT[1:2], pair.encode_chat(CHAT[1:2]), {})
    assert without.stem == 0


def test_a_template_that_takes_no_answer_last_has_the_same_marks() -> None:
    positions, _ = ends(templated(refuses=True), CHAT)
    assert [end.strip()[-3:] for end in positions] == ["e?|", "ser", "o?|", "ser", "e?|"]


def test_beginnings_are_rendered_once() -> None:
    pair = templated()
    marker, tokenizer = Marker(pair), pair.tokenizer
    for count in (2, 4, 6):
        marker.marks(CHAT[:count], pair.encode_chat(CHAT[:count]), {})
    rendered = tokenizer.rendered.copy()
    # The prompt; all its messages; for the stem, and for each answer, two that could follow.
    assert sorted(rendered) == [2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6]
    marker.marks(CHAT, pair.encode_chat(CHAT), {"enable_thinking": False})
    assert len(tokenizer.rendered) > len(rendered) + 5


def test_remembered_beginnings_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash2_mlx.marking.MAX_REMEMBERED", 100)
    marker = marker_of(templated())
    for number in range(20):
        chat = [said("user", f"question {number}")]
        marker.marks(chat, [1, 2, 3], {})
    assert marker._num_tokens <= 100
    assert len(marker._rendered) < 20


def test_without_a_prefix_cache_nothing_is_rendered() -> None:
    pair = templated()
    pair.prefix_cache = None
    assert marks_of(pair, CHAT, [1], {}) is None
    assert raw_marks(pair, 5000) is None
    assert pair.tokenizer.rendered == []


def test_a_raw_prompt_is_marked_at_even_spaces() -> None:
    marks = raw_marks(pair_for("dense"), 1300)
    assert marks is not None
    assert marks.positions == (512, 1024)


def test_a_template_that_refuses_everything_gives_no_marks() -> None:
    pair = templated()

    def refuse(messages: Sequence[Message], **variables: Any) -> list[int]:
        raise ValueError("no")

    pair.tokenizer.apply_chat_template = refuse
    assert Marker(pair).marks(CHAT, [1, 2, 3], {}).positions == ()


def test_a_text_that_begins_with_a_line_break_moves_no_mark() -> None:
    """Where tokens merge over the border, the border is before them."""
    pair = templated()

    class Merging(Templated):
        def apply_chat_template(self, messages: Sequence[Message], **variables: Any) -> list[int]:
            ids = super().apply_chat_template(messages, **variables)
            merged: list[int] = []
            for token in ids:
                if token == 10 and merged and merged[-1] in (10, 280):
                    merged[-1] = 280
                else:
                    merged.append(token)
            return merged

    pair.tokenizer = Merging()
    stems = set()
    for question in ("x", "\nx", "\n\nx", "a", "b"):
        messages = [said("system", "be kind"), said("user", question)]
        stems.add(Marker(pair).marks(messages, pair.encode_chat(messages), {}).stem)
    assert len(stems) == 1
