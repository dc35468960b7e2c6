"""Answers in a form, and forced calls, on a real random pair: valid while drafting, or refused."""

import json
from typing import Any

import pytest
from served import random_pair, served
from talking import Talk, text_of

FLAG = {
    "type": "object",
    "properties": {"flag": {"type": "boolean"}, "size": {"enum": [1, 22, 333]}},
    "required": ["flag", "size"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0, 1])
def test_an_answer_in_a_form_is_valid_while_drafting(temperature: float) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "flag", "schema": FLAG, "strict": True}}
    with served(random_pair()) as http:
        talk = Talk(http)
        options = {"response_format": form, "temperature": temperature, "seed": 3}
        answer, found = talk.post(**options), talk.stream(**options)
    assert answer.status_code == 200, answer.text
    content = answer.json()["choices"][0]["message"]["content"]
    said = json.loads(content)
    assert isinstance(said["flag"], bool)
    assert said["size"] in (1, 22, 333)
    assert text_of(found) == content
    assert answer.json()["timings"]["draft_n"] > 0
    assert answer.json()["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "set_flag"}}]
)
def test_a_call_that_is_asked_for_comes_while_drafting(choice: Any) -> None:
    tool = {"type": "function", "function": {"name": "set_flag", "parameters": FLAG}}
    other = {"type": "function", "function": {"name": "other", "parameters": FLAG}}
    with served(random_pair()) as http:
        talk = Talk(http)
        options = {"tools": [tool, other], "tool_choice": choice, "parallel_tool_calls": False}
        whole, found = talk.whole(**options), talk.stream(**options)
    (call,) = whole.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name in ("set_flag", "other")[: 2 if choice == "required" else 1]
    assert isinstance(json.loads(call.function.arguments)["flag"], bool)
    assert not whole.choices[0].message.content
    assert whole.choices[0].finish_reason == found[-1].choices[0].finish_reason == "tool_calls"


def test_a_form_that_is_none_is_a_400_that_names_it() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "nonsense"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with served() as http:
        refused = Talk(http).post(response_format=form)
    assert refused.status_code == 400
    assert "JSON schema" in refused.json()["error"]["message"]


PATTERNS = [{"type": "string", "pattern": f"^.*a.{{{n}}}b$"} for n in range(10, 13)]
TOO_MUCH: dict[str, dict[str, Any]] = {
    "properties in any order": {
        "type": "object",
        "properties": {f"p{n}": {"type": "string"} for n in range(2000)},
    },
    "patterns that all hold": {"type": "string", "allOf": PATTERNS},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("schema", TOO_MUCH.values(), ids=TOO_MUCH)
def test_a_form_that_is_too_much_for_the_parser_is_a_400_before_anything_is_read(
    schema: dict[str, Any], stream: bool
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with served(random_pair()) as http:
        talk = Talk(http)
        refused = talk.post(response_format=form, stream=stream)
        worker = http.app.state.desk.worker  # type: ignore[attr-defined]
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith("the JSON schema cannot be used: ")
        assert not worker.tally.outcomes
        assert talk.whole(max_tokens=2).choices[0].finish_reason


@pytest.mark.parametrize("thinking", [None, False, True])
def test_an_answer_in_a_form_has_no_thought_before_it_however_thinking_is_set(
    thinking: bool | None,
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "flag", "schema": FLAG, "strict": True}}
    pair = random_pair()
    pair.tokenizer.chat_template += (
        "{% if enable_thinking is defined and not enable_thinking %}<think></think>"
        "{% else %}<think>{% endif %}"
    )
    with served(pair) as http:
        answer = Talk(http).post(response_format=form, enable_thinking=thinking).json()
    message = answer["choices"][0]["message"]
    assert isinstance(json.loads(message["content"])["flag"], bool)
    assert "reasoning_content" not in message
