"""Messages of every shape reach the model as it expects them, and nothing is lost on the way."""

from functools import cache
from typing import Any

import pytest
from byte_bpe import byte_bpe
from mlx_lm.tokenizer_utils import TokenizerWrapper
from served import saying_pair

from dflash2_mlx.dialogue.events import Ask, Tool
from dflash2_mlx.dialogue.prompt import prepare
from dflash2_mlx.dialogue.template import Template, template_of
from dflash2_mlx.errors import ContextExceeded, InvalidRequest, UnsupportedField
from dflash2_mlx.grammar import Grammar
from dflash2_mlx.pair import Pair
from dflash2_mlx.server.fields import read_tools
from dflash2_mlx.server.shaping import plain

TURN = "[{{ m.role }}]{{ m.content }}"
CALLS = "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ ARGS }}){% endfor %}"
GO = "{% if add_generation_prompt %}[go]{% endif %}"
TOOLS = (
    "{% for t in tools or [] %}<{{ t.function.name }}: {{ t.function.description }}>{% endfor %}"
)


def loop(body: str) -> str:
    return "{% for m in messages %}" + body + "{% endfor %}" + GO


TEMPLATES = {
    "plain": loop(TURN),
    "tools": TOOLS + loop(TURN + CALLS.replace("ARGS", "c.function.arguments | tojson")),
    "items": TOOLS
    + loop(TURN + CALLS.replace("ARGS", "c.function.arguments.items() | list | string")),
    "text arguments": TOOLS + loop(TURN + CALLS.replace("ARGS", "'=' + c.function.arguments")),
    "system first": loop(
        "{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
        + TURN
    ),
    "late system dropped": loop("{% if m.role != 'system' or loop.first %}" + TURN + "{% endif %}"),
    "no system": loop(
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}" + TURN
    ),
    "thinking": loop(TURN) + "{% if enable_thinking is not defined or enable_thinking %}<think>\n"
    "{% else %}<think></think>{% endif %}",
    "three levels": "{% set known = ['low', 'medium', 'xhigh'] %}"
    "{% if reasoning_effort is defined and reasoning_effort not in known %}"
    "{{ raise_exception('unknown level') }}{% endif %}"
    "{{ reasoning_effort }}/{{ enable_thinking }}" + loop(TURN),
    "any level": "{{ reasoning_effort }}" + loop(TURN),
    "strength": "{{ reasoning_strength }}" + loop(TURN),
    "trims": loop("[{{ m.role }}]{{ m.content | upper }}"),
}


@cache
def pair_with(name: str, **options: Any) -> Pair:
    inner = byte_bpe()
    inner = type(inner)(tokenizer_object=inner._tokenizer, eos_token="<end>")
    inner.chat_template = TEMPLATES[name]
    return saying_pair(tokenizer=TokenizerWrapper(inner), **options)


def shown(name: str, *messages: dict[str, Any], **fields: Any) -> tuple[str, tuple[str, ...]]:
    """What the model reads, and the notes about it."""
    pair = pair_with(name)
    prepared = prepare(pair, Ask(messages=plain(messages), **fields))
    return pair.tokenizer.decode(list(prepared.ids)), prepared.notes


def system(text: Any) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def calling(arguments: Any, content: Any = None) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    answer = {"role": "tool", "tool_call_id": "c1", "content": "3"}
    return [user("q"), assistant(content, tool_calls=[call]), answer]


def texts(*parts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": part} for part in parts]


def test_an_empty_system_message_stays_where_there_is_a_place_for_it() -> None:
    """Some templates have instructions of their own where there is none."""
    assert shown("plain", system(""), user("q"))[0] == "[system][user]q[go]"
    assert shown("no system", system(""), user("q"))[0] == "[user]q[go]"


# V13
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("ab", "ab"),
        (texts("a", "b"), "ab"),
        ([{"type": "input_text", "text": "a"}, "b"], "ab"),
        ({"type": "text", "text": "ab"}, "ab"),
        ([], ""),
        ("", ""),
        (None, ""),
    ],
)
def test_contents_of_every_shape_become_the_same_text(role: str, content: Any, text: str) -> None:
    (message,) = plain([{"role": role, "content": content}])
    assert message == {"role": role, "content": text}


def test_a_content_left_out_is_empty() -> None:
    assert plain([{"role": "assistant"}]) == ({"role": "assistant", "content": ""},)


# V14
@pytest.mark.parametrize("kind", ["image_url", "input_image", "image", "input_audio", "file"])
@pytest.mark.parametrize("role", ["user", "tool"])
def test_what_is_not_text_is_refused_by_name_and_place(role: str, kind: str) -> None:
    messages = [user("a"), {"role": role, "content": [*texts("b"), {"type": kind, kind: {}}]}]
    with pytest.raises(UnsupportedField, match=rf"messages\[1\]\.content\[1\].*{kind}") as refused:
        plain(messages)
    assert refused.value.param == "messages[1].content[1]"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "wizard", "content": "a"}, r"messages\[0\]\.role is 'wizard'"),
        ({"content": "a"}, r"messages\[0\]\.role is None"),
        ({"role": "user", "content": 3}, r"messages\[0\]\.content is a int"),
        ({"role": "user", "content": [3]}, "content"),
        ({"role": "user", "content": [{"type": "text"}]}, "has no text"),
        ({"role": "user", "content": "\ud83d"}, "surrogate"),
        ({"role": "assistant", "tool_calls": "x"}, "tool_calls is a str"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, r"tool_calls\[0\] has no function"),
    ],
)
def test_a_shape_that_is_none_is_refused_with_its_place(message: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        plain([message])


def test_developer_is_system_and_system_messages_at_the_start_are_merged_in_order() -> None:
    said, notes = shown("plain", system("a"), {"role": "developer", "content": "b"}, user("c"))
    assert said == "[system]a\n\nb[user]c[go]"
    assert notes == ()


# V12
def test_a_later_system_message_stays_where_the_template_takes_it() -> None:
    said, notes = shown("plain", system("a"), user("b"), assistant("c"), system("d"), user("e"))
    assert said == "[system]a[user]b[assistant]c[system]d[user]e[go]"
    assert notes == ()


# V12
@pytest.mark.parametrize("template", ["system first", "late system dropped"])
def test_a_later_system_message_becomes_a_note_in_place_and_keeps_the_prefix(template: str) -> None:
    turns = [system("a"), user("b"), assistant("c"), system("d"), user("e")]
    said, notes = shown(template, *turns)
    assert said == "[system]a[user]b[assistant]c[user]Note from the system: d[user]e[go]"
    assert "later ones are user notes" in notes[0]
    longer, _ = shown(template, *turns, assistant("f"), user("g"))
    assert longer.startswith(said.removesuffix("[go]"))


# V12
def test_developer_user_developer_is_taken_by_a_strict_template() -> None:
    turns = [
        {"role": "developer", "content": "a"},
        user("b"),
        {"role": "developer", "content": "c"},
    ]
    said, _ = shown("system first", *turns)
    assert said == "[system]a[user]b[user]Note from the system: c[go]"


def test_a_template_without_system_and_with_alternating_roles_gets_all_texts() -> None:
    turns = [system("a"), user("b"), user("c"), assistant("d"), system("e"), user("f")]
    said, _ = shown("no system", *turns)
    assert said == "[user]a\n\nb\n\nc[assistant]d[user]Note from the system: e\n\nf[go]"


# V11
@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'])
@pytest.mark.parametrize("content", [None, "", []])
def test_arguments_as_object_or_text_and_a_null_content_are_the_same(arguments, content) -> None:
    said = {
        name: shown(name, *calling(arguments, content), tools=(Tool("add", "Adds."),))[0]
        for name in ("tools", "items", "text arguments")
    }
    assert said["tools"] == '<add: Adds.>[user]q[assistant](add {"a": 1})[tool]3[go]'
    assert said["items"] == "<add: Adds.>[user]q[assistant](add [('a', 1)])[tool]3[go]"
    assert said["text arguments"] == '<add: Adds.>[user]q[assistant](add ={"a": 1})[tool]3[go]'


def test_arguments_that_are_no_json_are_kept_in_every_template() -> None:
    for name in ("tools", "items", "text arguments"):
        assert "{'a': 1,}" in shown(name, *calling("{'a': 1,}"))[0]


def test_empty_arguments_are_an_empty_object() -> None:
    assert "(add {})" in shown("tools", *calling(""))[0]
    assert "(add {})" in shown("tools", *calling(None))[0]


def test_a_template_without_tools_has_them_described_and_calls_shown_as_text() -> None:
    said, notes = shown("plain", *calling({"a": 1}, "ok"), tools=(Tool("add", "Adds."),))
    assert '{"name": "add", "description": "Adds.", "parameters": {}}' in said
    assert '<tool_call>\n{"name": "its name", "arguments": {...}}\n</tool_call>' in said
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert f"[user]q[assistant]ok\n{call}[user]<tool_response>\n3\n</tool_response>[go]" in said
    assert "described in words" in notes[0]


def test_tools_that_may_not_be_called_are_not_shown() -> None:
    said, _ = shown("tools", user("a"), tools=(Tool("add"),), tool_choice="none")
    assert said == "[user]a[go]"


# V13, V28
def test_null_and_empty_tools_are_no_tools_and_unknown_kinds_are_named() -> None:
    assert read_tools(None) == read_tools([])
    function = {"type": "function", "function": {"name": "add"}}
    box = read_tools([function, {"type": "web_search"}, {"type": "namespace", "name": "x"}])
    assert [tool.name for tool in box.tools] == ["add"]
    assert box.notes == ("tools of these kinds were skipped: web_search, namespace (x)",)


def test_an_assistant_turn_at_the_end_is_gone_on_from() -> None:
    said, _ = shown("plain", user("a"), assistant("Once upon"))
    assert said == "[user]a[assistant]Once upon"


def test_a_template_that_rewrites_turns_is_gone_on_from_too() -> None:
    said, _ = shown("trims", user("a"), assistant("Once upon"))
    assert said == "[user]A[go]Once upon"


@pytest.mark.parametrize(
    ("template", "level", "start", "noted"),
    [
        ("three levels", "low", "low/True", False),
        ("three levels", "high", "xhigh/True", True),
        ("three levels", "max", "xhigh/True", True),
        ("three levels", "none", "/False", False),
        ("three levels", "wild", "medium/True", True),
        ("any level", "high", "high", False),
        ("any level", "xhigh", "high", True),
        ("any level", "minimal", "low", True),
        ("strength", "xhigh", "xhigh", False),
        ("strength", "none", "low", True),
    ],
)
def test_a_level_of_reasoning_is_taken_as_the_nearest_one(template, level, start, noted) -> None:
    said, notes = shown(template, user("a"), template={"reasoning_effort": level})
    assert said.split("[")[0] == start
    assert bool(notes) is noted


@pytest.mark.parametrize(
    ("template", "asked", "noted"),
    [
        ("thinking", {"enable_thinking": True}, True),
        ("thinking", {"enable_thinking": False, "reasoning_effort": "high"}, False),
        ("thinking", {"reasoning_effort": "none"}, False),
        ("thinking", {}, False),
        ("any level", {"reasoning_effort": "high"}, True),
        ("any level", {"reasoning_effort": "minimal"}, False),
    ],
)
def test_a_thought_that_a_form_leaves_no_room_for_is_noted(template, asked, noted) -> None:
    _, notes = shown(template, user("a"), template=asked, grammar=Grammar.regex("a"))
    assert any("no thought comes before it" in note for note in notes) is noted


def test_a_level_means_nothing_to_a_model_without_reasoning_and_that_is_noted() -> None:
    said, notes = shown("plain", user("a"), template={"reasoning_effort": "high"})
    assert said == "[user]a[go]"
    assert "no levels of reasoning" in notes[0]


@pytest.mark.parametrize(
    ("variables", "end"),
    [
        ({"enable_thinking": True}, "<think>\n"),
        ({"enable_thinking": False}, "<think></think>"),
        ({"reasoning_effort": "none"}, "<think></think>"),
        ({"reasoning_effort": "low"}, "<think>\n"),
        ({"reasoning_effort": "low", "enable_thinking": False}, "<think></think>"),
    ],
)
def test_thinking_is_turned_on_and_off_and_an_explicit_variable_wins(variables, end) -> None:
    assert shown("thinking", user("a"), template=variables)[0] == f"[user]a[go]{end}"


def test_template_variables_reach_the_template_and_the_calls_own_names_are_refused() -> None:
    assert (
        shown("any level", user("a"), template={"reasoning_effort": "low", "x": 1})[0][:3] == "low"
    )
    for name in ("chat_template", "messages", "tokenize"):
        with pytest.raises(InvalidRequest, match=f"chat_template_kwargs.{name}"):
            shown("plain", user("a"), template={name: "x"})


# V29
def test_a_prompt_over_the_limit_is_refused_with_both_numbers() -> None:
    pair = pair_with("plain", context_limit=100)
    with pytest.raises(ContextExceeded) as refused:
        prepare(pair, Ask(messages=plain([user("x" * 200)])))
    assert str(refused.value) == (
        "the prompt has 210 tokens, the model's maximum context length is 100 tokens; "
        "shorten the prompt"
    )


def test_no_messages_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="messages is empty"):
        prepare(pair_with("plain"), Ask())


def test_a_template_is_tried_out_once() -> None:
    pair = pair_with("tools")
    assert template_of(pair) is template_of(pair)
    traits = Template(pair)
    assert traits.takes_tools
    assert traits.takes_calls
    assert not Template(pair_with("plain")).takes_tools
