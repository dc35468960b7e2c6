"""An answer's text becomes reasoning, text and calls, however it was split into pieces."""

import json
import re
from typing import Any

import pytest
from call_writers import WRITERS, Call, tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st
from read_answers import (
    CALLS,
    FUNCTIONS,
    STYLES,
    TOOLS,
    calls_of,
    fold,
    read,
    split,
    text_of,
    thought_of,
)

from dflash2_mlx.dialogue.events import Reasoning, Text, ToolArguments, ToolStart
from dflash2_mlx.dialogue.segments import Segmenter, opens_reasoning

# Every style


@pytest.mark.parametrize("style", STYLES)
def test_calls_are_read_and_no_tag_shows(style: str) -> None:
    said = f"<think>\nhm\n</think>\n\nLook. {WRITERS[style](CALLS)}"
    events = read(said, style)
    assert calls_of(events) == CALLS
    assert (thought_of(events), text_of(events)) == ("hm", "Look. ")
    assert [type(event) for event in events[:3]] == [Reasoning, Text, ToolStart]


@pytest.mark.parametrize("style", STYLES)
def test_one_character_at_a_time_gives_the_same(style: str) -> None:
    said = f"a <b {WRITERS[style](CALLS)}"
    events = read(said, style, pieces=said)
    assert fold(events) == fold(read(said, style))
    assert calls_of(events) == CALLS


WORDS = st.text(st.sampled_from("ab \n\"'\\{}[]:,é<>/|"), max_size=12)
VALUES = st.one_of(WORDS, st.integers(-(10**6), 10**6), st.booleans(), st.none())
ARGUMENTS = st.dictionaries(st.sampled_from(["what", "number", "c", "d"]), VALUES, max_size=3)


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=25, deadline=None)
@given(
    calls=st.lists(st.tuples(st.sampled_from(["find", "now", "other"]), ARGUMENTS), max_size=3),
    before=WORDS,
    places=st.lists(st.integers(0, 10**6), max_size=12),
)
def test_splits_change_nothing_and_arguments_are_the_parsers(
    style: str, calls: list[Call], before: str, places: list[int]
) -> None:
    said = before + (WRITERS[style](calls) if calls else "")
    whole = read(said, style)
    assert fold(read(said, style, pieces=split(said, places))) == fold(whole)
    assert all(isinstance(given, dict) for _, given in calls_of(whole))
    if calls and (expected := parsed(style, calls)) is not None and "<" not in before:
        assert calls_of(whole) == expected


def parsed(style: str, calls: list[Call]) -> list[Call] | None:
    """What mlx-lm's parser makes of each call by itself; None where it fails."""
    tokenizer, found = tokenizer_of(style), []
    for call in calls:
        said = WRITERS[style]([call]).removeprefix(tokenizer.tool_call_start)
        try:
            result = tokenizer.tool_parser(said.removesuffix(tokenizer.tool_call_end), FUNCTIONS)
        except Exception:
            return None
        result = result[0] if isinstance(result, list) else result
        found.append((result["name"], json.loads(json.dumps(result["arguments"]))))
    return found


TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "find", "arguments": {']
TAGS += [
    "<function=find>",
    "<parameter=what>",
    "</parameter>",
    "</function>",
    "<arg_key>what</arg_key>",
]
TAGS += [
    "<arg_value>",
    "</arg_value>",
    "[TOOL_CALLS]",
    "find[ARGS]",
    '"what": "',
    "'x'",
    '"',
    "}",
    "\\",
]


@pytest.mark.parametrize("style", ["json_tools", "qwen3_coder", "glm47", "mistral", None])
@settings(max_examples=60, deadline=None)
@given(
    said=st.lists(st.one_of(st.sampled_from(TAGS), WORDS), max_size=14).map("".join),
    places=st.lists(st.integers(0, 10**6), max_size=6),
    cut=st.booleans(),
    starts=st.booleans(),
)
def test_whatever_a_model_writes_is_read_to_its_end(
    style: str | None, said: str, places: list[int], cut: bool, starts: bool
) -> None:
    options: dict[str, Any] = {"cut": cut, "starts_in_reasoning": starts}
    events = read(said, style, **options)
    assert fold(read(said, style, pieces=split(said, places), **options)) == fold(events)
    assert cut or all(isinstance(given, dict) for _, given in calls_of(events))
    assert not re.search(r"</?think>", text_of(events) + thought_of(events))
    if "function" not in said and "{" not in said:
        assert text_of(read(said, style, (), think=None)) == said


# Reasoning (V15, C11)


@pytest.mark.parametrize(
    "pieces", [None, ["pl", "an</th", "in", "k>do", "ne"], list("plan</think>done")]
)
def test_a_thought_that_the_prompt_opened_is_kept_apart(pieces: list[str] | None) -> None:
    said = "".join(pieces or ["plan</think>done"])
    events = read("plan</think>done", starts_in_reasoning=True, pieces=pieces)
    if said == "plan</think>done":
        assert fold(events) == [("Reasoning", "plan"), ("Text", "done")]
    assert thought_of(events) == said.partition("</think>")[0]


def test_a_thought_cut_short_is_no_answer() -> None:
    events = read("plan", starts_in_reasoning=True, cut=True)
    assert fold(events) == [("Reasoning", "plan")]


def test_an_empty_thought_and_line_breaks_around_tags_do_not_show() -> None:
    assert fold(read("<think>\n\n</think>\n\nyes\n")) == [("Text", "yes\n")]
    assert fold(read("\n  code\n", pieces="\n  code\n")) == [("Text", "\n  code\n")]
    assert fold(read("\n\n")) == [("Text", "\n\n")]


def test_tokens_of_a_thought_never_exceed_those_fed() -> None:
    reader = Segmenter(tokenizer_of("json_tools"), (), starts_in_reasoning=True)
    for piece in ("abc", "de</", "think>f", "", "gh"):
        reader.feed(piece, tokens=4, from_draft=3)
    assert reader.num_reasoning == 11  # of 12: the last text came with the closing tag
    reader.finish(cut=False)
    assert reader.num_reasoning == 11


def test_text_counts_its_tokens_and_those_drafted() -> None:
    reader = Segmenter(tokenizer_of("json_tools"), TOOLS)
    fed = [("ab", 2, 1), ("", 1, 0), ("cd<", 4, 4), ("e", 1, 0), ("", 1, 1)]
    events = [event for text, *counts in fed for event in reader.feed(text, *counts)]
    events += reader.finish(cut=False)
    assert text_of(events) == "abcd<e"
    assert sum(event.tokens for event in events) == 8
    assert sum(event.from_draft for event in events) == 5


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("hi|<think>", True),
        ("hi|<think>\n", True),
        ("hi|<think>so far", True),
        ("<think>a</think>|hi|<think>", True),
        ("hi|<think>\n\n</think>\n\n", False),
        ("what is <think>?|", False),
        ("hi|", False),
    ],
)
def test_the_prompts_end_tells_whether_a_thought_is_open(prompt: str, opens: bool) -> None:
    tokenizer = tokenizer_of(None, decode=lambda ids: "".join(map(chr, ids)))
    assert opens_reasoning(tokenizer, [ord(char) for char in prompt], {ord("|")}) is opens
    assert not opens_reasoning(tokenizer_of(None, None), [1])


# Calls and the text around them (V05, V06, C23)


@pytest.mark.parametrize("pieces", [["a <to", "ol_", "call>", '{"name": "now"}</tool', "_call> b"]])
def test_a_tag_over_three_tokens_and_a_block_border_never_shows(pieces: list[str]) -> None:
    events = read("", pieces=pieces)
    assert fold(events) == [
        ("Text", "a "),
        ("call 0", "now"),
        ("arguments 0", "{}"),
        ("Text", " b"),
    ]


def test_text_before_between_and_after_calls_keeps_its_order() -> None:
    one = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    kinds = [kind for kind, _ in fold(read(f"a\n{one}b{one}\n{one}c"))]
    assert kinds == [
        *("Text", "call 0", "arguments 0", "Text"),
        *("call 1", "arguments 1", "call 2", "arguments 2", "Text"),
    ]


def test_a_name_and_each_piece_of_arguments_come_at_once() -> None:
    reader = Segmenter(tokenizer_of("json_tools"), TOOLS)
    assert reader.feed('<tool_call>{"name": "find') == []
    (start,) = reader.feed('", "argu')
    assert (start.name, start.index) == ("find", 0)
    assert reader.feed('ments": {"what": "a') == [ToolArguments(0, '{"what": "a')]
    assert reader.feed("b\\") == [ToolArguments(0, "b")]
    assert reader.feed('n"}}') == [ToolArguments(0, '\\n"}')]
    assert reader.feed("</tool_call>") == []


def test_markup_gives_an_argument_when_it_closes() -> None:
    reader = Segmenter(tokenizer_of("qwen3_coder"), TOOLS)
    (start,) = reader.feed("<tool_call>\n<function=find>\n<parameter=what>\na</para")
    assert start.name == "find"
    assert reader.feed("meter>") == [ToolArguments(0, '{"what": "a"')]
    assert reader.feed("<parameter=number>3</parameter>") == [ToolArguments(0, ', "number": 3')]
    assert reader.feed("</function>") == [ToolArguments(0, "}")]


@pytest.mark.parametrize("style", STYLES)
def test_ids_are_unique(style: str) -> None:
    calls: list[Call] = [("now", {})] * 3
    ids = [e.id for e in read(WRITERS[style](calls), style) if isinstance(e, ToolStart)]
    assert len(set(ids)) == 3
    twice = WRITERS[style](calls[:1]) * 2
    again = [e.id for e in read(twice, style) if isinstance(e, ToolStart)]
    assert len(set(again)) == 2


def test_a_models_own_ids_are_kept_and_mistrals_are_nine_characters() -> None:
    starts = [e for e in read(WRITERS["kimi_k2"](CALLS), "kimi_k2") if isinstance(e, ToolStart)]
    assert [start.id for start in starts] == ["functions.find:0", "functions.now:1"]
    said = '[TOOL_CALLS]find[CALL_ID]abc123DEF[ARGS]{"what": "x"}[TOOL_CALLS]now[ARGS]{}'
    events = read(said, "mistral")
    assert calls_of(events) == [("find", {"what": "x"}), ("now", {})]
    ids = [event.id for event in events if isinstance(event, ToolStart)]
    assert ids[0] == "abc123DEF"
    assert re.fullmatch(r"[A-Za-z0-9]{9}", ids[1])


@pytest.mark.parametrize("style", STYLES)
def test_a_lone_call_ends_the_answer_if_only_one_was_asked_for(style: str) -> None:
    said = WRITERS[style]([("find", {"what": "x"}), ("now", {})]) + " and more"
    reader = Segmenter(tokenizer_of(style), TOOLS, parallel=False)
    events = [event for char in said for event in reader.feed(char)]
    assert reader.done or style == "mistral"  # which ends its calls with the answer
    assert calls_of([*events, *reader.finish(cut=False)]) == [("find", {"what": "x"})]
    assert text_of(events) == ""


# States of the tokenizer's own


def test_headers_of_muse_do_not_show() -> None:
    from mlx_lm.chat_templates.muse_spark import RESPONSE_FORMAT

    own = {
        "response_initial_state": RESPONSE_FORMAT["initial_state"],
        "response_transitions": RESPONSE_FORMAT["transitions"],
    }
    said = (
        " to=self<|message|>plan<|eom|>assistant to=user<|message|>Hi<|eom|>assistant "
        + WRITERS["muse_spark"](CALLS)
    )
    reader = Segmenter(tokenizer_of("muse_spark", None, **own), TOOLS)
    events = [*reader.feed(said), *reader.finish(cut=False)]
    assert (thought_of(events), text_of(events)) == ("plan", "Hi")
    assert calls_of(events) == CALLS
    lost = Segmenter(tokenizer_of("muse_spark", None, **own), TOOLS)
    assert text_of([*lost.feed("no header"), *lost.finish(cut=False)]) == "no header"
