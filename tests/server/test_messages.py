"""/v1/messages: the events that Claude Code and the SDK read; what is understood, and refused."""

import json
from typing import Any

import pytest
from acting import ActingAnswerer, acting_pair
from anthropic import Anthropic, APIError, AuthenticationError, BadRequestError, NotFoundError
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter
from scripted_events import ANSWERS, BROKE, USAGE, done, saying
from served import ChatTokenizer, saying_pair, served

from dflash2_mlx.dialogue.events import Prefilling, Text, Tool
from dflash2_mlx.server.guard import Rules
from dflash2_mlx.server.messages import MessagesRequest, to_ask

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
USER = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"what": {"type": "string"}}}
FIND = {"name": "find", "description": "finds", "input_schema": SCHEMA}


def sdk_of(client: Any, **options: Any) -> Anthropic:
    options = {"api_key": "none", "max_retries": 0, **options}
    return Anthropic(base_url="http://localhost:8080", http_client=client, **options)


def ask_of(messages: Any = USER, **body: Any) -> Any:
    body = {"messages": messages, "max_tokens": 50, **body}
    return to_ask(MessagesRequest.model_validate(body))


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each of them valid and under its own name."""
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] not in ("ping", "error"):
            EVENT.validate_python(event)
        events.append(event)
    return events


def streamed(*told: Any, **body: Any) -> list[dict[str, Any]]:
    with served(answer=saying(*told)) as client:
        body = {"messages": USER, "max_tokens": 50, "stream": True, **body}
        return events_of(client.post("/v1/messages", json=body).text)


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in events if event["type"] != "ping"]


def deltas(events: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    return [(e["index"], e["delta"]) for e in events if e["type"] == "content_block_delta"]


def test_blocks_come_one_after_another() -> None:
    events = streamed(*ANSWERS["thought and call"])
    block = ["content_block_start", "content_block_delta"]
    signed = [*block, "content_block_delta", "content_block_stop"]
    assert kinds(events) == [
        "message_start",
        *signed,
        *block,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert deltas(events) == [
        (0, {"type": "thinking_delta", "thinking": "hm"}),
        (0, {"type": "signature_delta", "signature": "dflash2-mlx"}),
        (1, {"type": "input_json_delta", "partial_json": "{}"}),
    ]


@pytest.mark.parametrize("name", ANSWERS)
def test_streamed_and_whole_answers_are_the_same(name: str) -> None:
    with served(answer=saying(*ANSWERS[name])) as client:
        sdk, body = sdk_of(client), {"model": "tiny", "max_tokens": 9, "messages": USER}
        whole = sdk.messages.create(**body)
        with sdk.messages.stream(**body) as stream:
            final = stream.get_final_message()
    Message.model_validate(whole.model_dump())
    # The SDK's own fields, and ours, which it leaves out of what it gathers.
    others: Any = {"content": {"__all__": {"parsed_output"}}}
    others |= dict.fromkeys(("id", "usage", "dflash", "timings"), True)
    assert final.model_dump(exclude=others) == whole.model_dump(exclude=others)
    assert final.usage.output_tokens == whole.usage.output_tokens == USAGE.completion
    assert final.usage.cache_read_input_tokens == USAGE.cached
    assert whole.usage.input_tokens == USAGE.prompt - USAGE.cached


@pytest.mark.parametrize(
    ("name", "max_tokens", "reason"),
    [
        ("text", 9, "end_turn"),
        ("calls", 9, "tool_use"),
        ("cut text", 9, "max_tokens"),
        ("cut text", 10, "model_context_window_exceeded"),
        ("cut call", 9, "max_tokens"),
        ("stop string", 9, "stop_sequence"),
    ],
)
def test_why_an_answer_ended(name: str, max_tokens: int, reason: str) -> None:
    last = streamed(*ANSWERS[name], max_tokens=max_tokens)[-2]
    assert last["delta"]["stop_reason"] == reason
    assert last["delta"]["stop_sequence"] == ("lo" if reason == "stop_sequence" else None)


CHANGE = {"name": "change_file", "input_schema": {"type": "object", "properties": {"new": True}}}


@pytest.mark.parametrize("max_tokens", [12, 30, 60, 70, 90])
def test_an_answer_may_be_cut_anywhere(max_tokens: int) -> None:
    body: Any = {"model": "tiny", "max_tokens": max_tokens, "messages": USER, "tools": [CHANGE]}
    with served(acting_pair(), answer=ActingAnswerer()) as client:
        whole = sdk_of(client).messages.create(**body)
        with sdk_of(client).messages.stream(**body) as stream:
            final = stream.get_final_message()
    assert whole.stop_reason == final.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == max_tokens
    kinds = [(b.type, getattr(b, "input", None)) for b in whole.content]
    assert kinds == [(b.type, getattr(b, "input", None)) for b in final.content]
    assert kinds


def test_a_prefill_pings_and_tells_how_long_the_prompt_is() -> None:
    told = (Prefilling(0, 900), Prefilling(512, 900), Text("a"), done())
    events = streamed(*told)
    assert [e["type"] for e in events[:3]] == ["message_start", "ping", "ping"]
    assert kinds(events)[:2] == ["message_start", "content_block_start"]


def test_a_failure_in_a_stream_is_an_error_event() -> None:
    events = streamed(Text("Hel"), BROKE)
    assert events[-1] == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "the engine broke down"},
    }
    with served(answer=saying(Text("Hel"), BROKE)) as client:
        stream = sdk_of(client).messages.create(
            model="tiny", max_tokens=9, messages=USER, stream=True
        )
        with pytest.raises(APIError, match="the engine broke down"):
            list(stream)


def test_thinking_that_is_to_be_omitted_leaves_an_empty_block() -> None:
    events = streamed(*ANSWERS["thought"], thinking={"type": "adaptive", "display": "omitted"})
    assert [delta["type"] for _, delta in deltas(events)] == ["signature_delta", "text_delta"]


def test_the_engine_answers_through_the_sdk() -> None:
    with served() as client:
        sdk = sdk_of(client)
        body: Any = {"model": "tiny", "max_tokens": 60, "messages": USER}
        answer = sdk.messages.create(**body, system="be kind")
        counted = sdk.messages.count_tokens(model="tiny", messages=USER, system="be kind")
        with sdk.messages.stream(**body) as stream:
            text = "".join(stream.text_stream)
    assert answer.content[0].text == text == "hi"  # type: ignore[union-attr]
    assert counted.input_tokens == len(b"system: be kind\nuser: hi\n") + 1
    assert answer.usage.input_tokens == counted.input_tokens


def test_tokens_are_counted_while_the_model_is_unloaded_and_leave_it_so() -> None:
    body = {"messages": USER, "system": "be kind"}
    with served(idle_unload_s=0.0) as client:
        worker = client.app.state.desk.worker  # type: ignore[attr-defined]
        assert worker.wait_for_state("unloaded", timeout_s=20)
        counted = client.post("/v1/messages/count_tokens", json=body)
        assert worker.pair is None
        assert worker.health().state == "unloaded"
        assert worker.reading.target is None
        assert client.post("/v1/messages", json={**body, "max_tokens": 9}).status_code == 200
    assert counted.json() == {"input_tokens": len(b"system: be kind\nuser: hi\n") + 1}


def test_a_stop_sequence_is_named() -> None:
    messages = [{"role": "user", "content": "one two three"}]
    body = {"messages": messages, "max_tokens": 60, "stop_sequences": ["zzz", " th"]}
    with served() as client:
        answer = client.post("/v1/messages", json=body).json()
    assert answer["content"] == [{"type": "text", "text": "one two"}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", " th")


def test_a_prompt_that_is_too_long_is_told_in_known_words_and_can_be_counted() -> None:
    messages: Any = [{"role": "user", "content": "x" * 5000}]
    with served() as client:
        sdk = sdk_of(client)
        assert sdk.messages.count_tokens(model="tiny", messages=messages).input_tokens > 5000
        with pytest.raises(BadRequestError, match=r"prompt is too long.*5008.*4096"):
            sdk.messages.create(model="tiny", max_tokens=9, messages=messages)


def test_both_kinds_of_keys_and_any_version_are_taken() -> None:
    beta = {"anthropic-version": "2042-01-01", "anthropic-beta": "whatever-2042"}
    body: Any = {"model": "tiny", "max_tokens": 60, "messages": USER, "extra_headers": beta}
    with served(rules=Rules(key="secret")) as client:
        assert sdk_of(client, api_key="secret").messages.create(**body).content
        token = sdk_of(client, api_key=None, auth_token="secret")
        assert token.messages.create(**body).content
        with pytest.raises(AuthenticationError) as caught:
            sdk_of(client, api_key="guess").messages.create(**body)
    assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


def test_another_model_is_not_found() -> None:
    with served() as client, pytest.raises(NotFoundError, match="is not served here"):
        sdk_of(client).messages.create(model="claude-9", max_tokens=9, messages=USER)  # type: ignore[arg-type]


# What is understood


def test_blocks_become_plain_messages() -> None:
    asked = ask_of(
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "Look"},
                    {"type": "tool_use", "id": "t", "name": "find", "input": {"a": 2}},
                    {"type": "tool_use", "id": "u", "name": "now", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t", "content": "found"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "u",
                        "is_error": True,
                        "content": [{"type": "text", "text": "no clock"}],
                    },
                    {"type": "text", "text": "go on"},
                ],
            },
        ],
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=a1b2c"},
            {"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "be brief"},
        ],
    )
    called = [
        {"id": "t", "type": "function", "function": {"name": "find", "arguments": {"a": 2}}},
        {"id": "u", "type": "function", "function": {"name": "now", "arguments": {}}},
    ]
    assert asked.messages == (
        {"role": "system", "content": "be kind\n\nbe brief"},
        {"role": "user", "content": "a\n\nb"},
        {"role": "assistant", "content": "Look", "reasoning_content": "hm", "tool_calls": called},
        {"role": "tool", "content": "found", "tool_call_id": "t"},
        {"role": "tool", "content": "Error: no clock", "tool_call_id": "u"},
        {"role": "user", "content": "go on"},
    )


def test_a_system_message_may_stand_anywhere() -> None:
    asked = ask_of([*USER, {"role": "system", "content": "late"}, *USER], system="early")
    assert [message["role"] for message in asked.messages] == ["system", "user", "system", "user"]


def test_an_answer_goes_on_from_what_the_assistant_began() -> None:
    pair = saying_pair(lambda prompt: prompt.splitlines()[-1].upper(), ChatTokenizer())
    messages = [*USER, {"role": "assistant", "content": "so"}]
    with served(pair) as client:
        answer = client.post("/v1/messages", json={"messages": messages, "max_tokens": 60}).json()
    assert answer["content"][0]["text"] == "ASSISTANT: SO"


def test_tools_of_other_kinds_are_skipped_and_noted() -> None:
    tools = [{**FIND, "type": "custom"}, {"type": "web_search_20260318", "name": "web_search"}]
    asked = ask_of(tools=tools, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert asked.tools == (Tool("find", "finds", SCHEMA),)
    assert (asked.tool_choice, asked.parallel_tool_calls) == ("required", False)
    assert asked.notes == ("tools of these kinds were skipped: web_search_20260318",)


@pytest.mark.parametrize(
    ("choice", "read"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "find"}, "find"),
    ],
)
def test_choices_among_tools(choice: dict[str, Any], read: str) -> None:
    assert ask_of(tools=[FIND], tool_choice=choice).tool_choice == read


@pytest.mark.parametrize(
    ("thinking", "template"),
    [
        (None, {}),
        ({"type": "adaptive"}, {}),
        ({"type": "disabled"}, {"enable_thinking": False}),
        ({"type": "enabled", "budget_tokens": 2000}, {"enable_thinking": True}),
    ],
)
def test_thinking_is_left_to_the_model_or_set(thinking: Any, template: dict[str, Any]) -> None:
    asked = ask_of(thinking=thinking)
    assert asked.template == template
    assert len(asked.notes) == ("budget_tokens" in (thinking or {}))


def test_fields_reach_the_engine_under_its_own_names() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    asked = ask_of(
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        stop_sequences=["a", "b"],
        output_config={"effort": "high", "format": form},
        metadata={"user_id": "someone"},
        context_management={"edits": []},
    )
    assert asked.sampling == {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "stop": ("a", "b")}
    assert asked.max_tokens == 50
    assert asked.template == {"reasoning_effort": "high"}
    assert asked.grammar is not None


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "has no name"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"tools": [{"name": "find", "input_schema": 3}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "lost"}}, "'lost'"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"temperature": "hot"}, "temperature"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(body: dict[str, Any], named: str) -> None:
    body = {"messages": USER, "max_tokens": 9, **body}
    body = {name: value for name, value in body.items() if value is not None}
    with served() as client:
        response = client.post("/v1/messages", json=body)
    assert response.status_code == 400
    error = response.json()
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert named in error["error"]["message"]
