"""Calls that are not as the template shows them: written otherwise, wrong, or cut."""

from typing import Any

import pytest
from call_writers import WRITERS
from read_answers import STYLES, calls_of, fold, read, text_of

# Calls written otherwise than the template shows (V08)


@pytest.mark.parametrize(
    ("style", "said"),
    [
        ("qwen3_coder", "<function=find>\n<parameter=what>\nx\n</parameter>\n</function>"),
        ("qwen3_coder", "<function=find><parameter=what>x</parameter></function>\n</tool_call>"),
        ("qwen3_coder", '<tool_call>{"name": "find", "arguments": {"what": "x"}}</tool_call>'),
        ("minimax_m2", '<invoke name="find"><parameter name="what">x</parameter></invoke>'),
        ("kimi_k2", '<|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>{"what": "x"}'
                    "<|tool_call_end|>"),
        ("json_tools", '{"name": "find", "arguments": {"what": "x"}}'),
        ("json_tools", '<tool_call>{"arguments": {"what": "x"}, "name": "find"}</tool_call>'),
        ("json_tools", '<tool_call>[{"name": "find", "parameters": {"what": "x"}}]</tool_call>'),
        ("json_tools", '<tool_call>{"name": "find", "arguments": "{\\"what\\": \\"x\\"}"}'
                       "</tool_call>"),
        ("json_tools", '<tool_call>{"type": "function", "function": {"name": "find", '
                       '"arguments": {"what": "x"}}}</tool_call>'),
        ("json_tools", '<tool_call>{"name": "find", "arguments": {"what": "x"}}}</tool_call>'),
        ("json_tools", '<tool_call>{"name": "find", "arguments": {"what": "x"}</tool_call>'),
        ("json_tools", '<tool_call>{"name": "find", "arguments": {"what": "x"</tool_call>'),
        ("json_tools", "<tool_call>{'name': 'find', 'arguments': {'what': 'x',},}</tool_call>"),
        ("mistral", '[TOOL_CALLS][{"name": "find", "arguments": {"what": "x"}}]'),
        ("longcat", '<longcat_tool_call>{"name": "find", "arguments": {"what": "x"}}'
                    "</longcat_tool_call>"),
        (None, '<tool_call>{"name": "find", "arguments": {"what": "x"}}</tool_call>'),
        (None, ' {"name": "find", "parameters": {"what": "x"}}'),
    ],
)  # fmt: skip
def test_a_call_written_otherwise_is_still_a_call(style: str | None, said: str) -> None:
    events = read(said, style, pieces=said)
    assert calls_of(events) == [("find", {"what": "x"})]
    assert text_of(events) == ""


@pytest.mark.parametrize(
    "said",
    [
        "use <function=name> like this",
        '{"name": "Ada", "arguments": {"for": "it"}}',
        '{"name": "find", "age": 3}',
        "<function=",
    ],
)
def test_what_only_looks_like_a_call_is_text(said: str) -> None:
    assert fold(read(said, "qwen3_coder", pieces=said)) == [("Text", said)]


def test_without_tools_the_tags_of_calls_are_text() -> None:
    said = 'Write <tool_call>{"name": "now"}</tool_call>.'
    assert fold(read(said, tools=())) == [("Text", said)]


# Arguments that are wrong (V07, V09)


def call(arguments: str) -> str:
    return f'<tool_call>{{"name": "find", "arguments": {arguments}}}</tool_call>'


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ("{'a': 1,}", {"a": 1}),
        ('{"a": "\\d+"}', {"a": r"\d+"}),
        ('{"a": "x\ny"}', {"a": "x\ny"}),
        ('{"a": True, "b": None, "c": NaN}', {"a": True, "b": None, "c": None}),
        ('{"a": "</tool_call>"}', {"a": "</tool_call>"}),
        ("null", {}),
        ("[1, 2]", {"raw": "[1, 2]"}),
        ('"two"', {"raw": "two"}),
        ('{"a": 1 b}', {"a": 1, "raw": '{"a": 1 b}}'}),
        ("{a: 1}", {"raw": "{a: 1}}"}),
        ('{"a": {"b": [1, oops', {"a": {"b": [1]}, "raw": '{"a": {"b": [1, oops}'}),
        ('{"a": "x}', {"a": "x}}", "raw": '{"a": "x}}'}),
    ],
)
def test_wrong_arguments_become_what_was_meant_or_stand_as_they_are(
    arguments: str, meant: dict[str, Any]
) -> None:
    for pieces in (None, list(call(arguments))):
        events = read(call(arguments), pieces=pieces)
        assert calls_of(events) == [("find", meant)]
        assert text_of(events) == ""


def test_long_code_in_an_object_arrives_whole() -> None:
    code = "".join(f"if x[{n}] == \"\\n\":\n\tprint('{{}}')\n" for n in range(200))
    given = {"where": {"file": code}}
    events = read(WRITERS["json_tools"]([("find", given)]))
    assert len(code) > 4000
    assert calls_of(events) == [("find", given)]


@pytest.mark.parametrize(
    "said", ["<tool_call>{'nothing': 1}</tool_call>", "<tool_call>a b</tool_call>"]
)
def test_what_is_no_call_at_all_is_plain_text(said: str) -> None:
    assert fold(read(f"x{said}y")) == [("Text", f"x{said[11:-12]}y")]


@pytest.mark.parametrize("style", ["qwen3_coder", "glm47", "json_tools", "minimax_m2"])
def test_a_value_of_another_type_than_the_schemas_is_passed_on(style: str) -> None:
    given = {"number": "2026-01-15", "what": "x"}
    assert calls_of(read(WRITERS[style]([("find", given)]), style)) == [("find", given)]


def test_an_argument_that_never_closes_stands_as_it_is() -> None:
    said = (
        "<tool_call><function=find><parameter=number>3</parameter><parameter=what>x</tool_call>. y"
    )
    events = read(said, "qwen3_coder", pieces=said)
    assert calls_of(events) == [("find", {"number": 3, "raw": "<parameter=what>x"})]
    assert text_of(events) == ". y"


# Calls that are cut (V10)


@pytest.mark.parametrize("style", STYLES)
def test_a_cut_call_is_never_completed(style: str) -> None:
    said = WRITERS[style]([("find", {"what": "a long text", "number": 3})])
    whole = dict(fold(read(said, style)))["arguments 0"]
    for end in range(1, len(said) - 1):
        events = read(said[:end], style, cut=True)
        assert text_of(events) == ""
        assert whole.startswith(dict(fold(events)).get("arguments 0", ""))


def test_a_call_without_its_closing_tag_is_whole_if_the_model_stopped() -> None:
    said = '<tool_call>{"name": "find", "arguments": {"what": "x"}}'
    assert calls_of(read(said)) == [("find", {"what": "x"})]
    assert calls_of(read(said[:-2] + ', "n"')) == [
        ("find", {"what": "x", "n": None, "raw": '{"what": "x", "n"'})
    ]
