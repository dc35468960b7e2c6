"""/v1/responses: the events that Codex and the SDK read, and what is understood and refused."""

import json
from typing import Any

import pytest
from acting import ActingAnswerer, acting_pair
from openai import BadRequestError, OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from scripted_events import ANSWERS, BROKE, call, done, saying
from served import random_pair, served

from dflash2_mlx.dialogue.events import Prefilling, Reasoning, Text, Tool
from dflash2_mlx.errors import InvalidRequest
from dflash2_mlx.server.responses import ResponsesRequest, to_ask

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
FIND = {
    "type": "function",
    "name": "find",
    "description": "finds",
    "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
}


def ask_of(input: Any = "hi", **body: Any) -> Any:
    return to_ask(ResponsesRequest.model_validate({"input": input, **body}))


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each of them valid, numbered and under its own name."""
    events = []
    for number, block in enumerate(text.removesuffix("\n\n").split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        if event["type"] != "response.failed":  # the SDK's codes are not those Codex reads
            EVENT.validate_python(event)
        events.append(event)
    return events


def streamed(*told: Any, **body: Any) -> list[dict[str, Any]]:
    """The events of an answer, without those of waiting in line."""
    with served(answer=saying(*told)) as client:
        body = {"input": "hi", "stream": True, **body}
        events = events_of(client.post("/v1/responses", json=body).text)
    return [
        event for event in events if "queued" not in event.get("response", {}).get("dflash", {})
    ]


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    items = [{**item, "id": None} for item in response["output"]]
    return {**response, "id": None, "created_at": 0, "completed_at": 0, "output": items}


# V27
def test_text_comes_in_the_order_that_clients_parse() -> None:
    events = streamed(Text("Hel"), Text("lo"), done())
    assert kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event.get("delta") for event in events[4:6]] == ["Hel", "lo"]
    assert events[8]["item"]["content"][0]["text"] == "Hello"
    assert events[-1]["response"]["output"] == [events[8]["item"]]


def test_reasoning_is_an_item_of_its_own() -> None:
    events = streamed(*ANSWERS["thought"])
    assert kinds(events)[2:9] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
    ]
    item = events[8]["item"]
    assert item["content"] == [{"type": "reasoning_text", "text": "hm, yes"}]
    assert events[-1]["response"]["output"][1]["content"][0]["text"] == "Yes."


def test_reasoning_comes_as_a_summary_for_who_asked_for_one() -> None:
    events = streamed(*ANSWERS["thought"], reasoning={"summary": "auto"})
    assert kinds(events)[3:8] == [
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
    ]
    assert events[8]["item"]["summary"] == [{"type": "summary_text", "text": "hm, yes"}]


def test_calls_are_items_with_their_arguments() -> None:
    events = streamed(*ANSWERS["calls"], tools=[FIND])
    arguments = [e["delta"] for e in events if e["type"].endswith("arguments.delta")]
    assert arguments == ['{"what"', ': "a"}', "{}"]
    finished = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert [(i["name"], i["arguments"], i["call_id"]) for i in finished[1:]] == [
        ("find", '{"what": "a"}', "call_0"),
        ("now", "{}", "call_1"),
    ]


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("reasoning", [None, {"summary": "auto"}])
def test_streamed_and_whole_answers_are_the_same(name: str, reasoning: Any) -> None:
    body = {"input": "hi", "reasoning": reasoning, "tools": [FIND]}
    with served(answer=saying(*ANSWERS[name])) as client:
        whole = client.post("/v1/responses", json=body).json()
        events = events_of(client.post("/v1/responses", json={**body, "stream": True}).text)
    Response.model_validate(whole)
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert without_ids(events[-1]["response"]) == without_ids(whole)


def test_a_cut_call_is_never_said_to_be_done() -> None:
    events = streamed(*ANSWERS["cut call"])
    finished = [e["item"]["type"] for e in events if e["type"] == "response.output_item.done"]
    assert finished == ["message"]
    last = events[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in last["response"]["output"]] == ["completed", "incomplete"]


@pytest.mark.parametrize("max_tokens", [12, 30, 60, 70, 90])
def test_an_answer_may_be_cut_anywhere(max_tokens: int) -> None:
    tools = [{**FIND, "name": "change_file"}]
    body = {"input": "hi", "max_output_tokens": max_tokens, "tools": tools}
    with served(acting_pair(), answer=ActingAnswerer()) as client:
        whole = client.post("/v1/responses", json=body).json()
        events = events_of(client.post("/v1/responses", json={**body, "stream": True}).text)
    streamed = events[-1]["response"]
    assert whole["status"] == streamed["status"] == "incomplete"
    assert whole["usage"]["output_tokens"] == max_tokens
    finished = [e["item"]["id"] for e in events if e["type"] == "response.output_item.done"]
    for one, other in zip(whole["output"], streamed["output"], strict=True):
        assert {**one, "id": 0, "call_id": 0} == {**other, "id": 0, "call_id": 0}
        cut = other["type"] == "function_call" and other["status"] == "incomplete"
        assert (other["id"] in finished) is not cut


def test_a_failure_ends_the_stream_with_what_went_wrong() -> None:
    events = streamed(Text("Hel"), BROKE)
    assert kinds(events)[-1] == "failed"
    error = {"code": "server_error", "message": "the engine broke down"}
    assert events[-1]["response"]["error"] == error


def test_a_prompt_that_is_too_long_ends_a_stream_as_codex_reads_it() -> None:
    with served() as client:
        body = {"input": "x" * 5000}
        refused = client.post("/v1/responses", json=body)
        events = events_of(client.post("/v1/responses", json={**body, "stream": True}).text)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert kinds(events) == ["created", "in_progress", "failed"]
    assert events[-1]["response"]["error"]["code"] == "context_length_exceeded"
    assert "4096" in events[-1]["response"]["error"]["message"]


# V26
def test_a_long_prefill_sends_real_events() -> None:
    events = streamed(Prefilling(0, 900), Prefilling(512, 900), Text("a"), done())
    progress = [e["response"].get("dflash") for e in events if e["type"].endswith("in_progress")]
    assert progress[-2:] == [{"prefill": [0, 900]}, {"prefill": [512, 900]}]


def test_the_engine_answers_through_the_sdk() -> None:
    with served() as client:
        sdk = OpenAI(base_url="http://localhost:8080/v1", api_key="none", http_client=client)
        answer = sdk.responses.create(model="tiny", input="Ahoj 😀", temperature=0)
        with sdk.responses.stream(model="tiny", input="Ahoj 😀", temperature=0) as stream:
            deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
            final = stream.get_final_response()
    assert answer.output_text == final.output_text == "".join(deltas) == "Ahoj 😀"
    assert answer.status == "completed"
    assert answer.usage is not None
    assert answer.usage.input_tokens == len("user: Ahoj 😀\n".encode()) + 1
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert not answer.model_extra["store"]


def test_the_sdk_parses_structured_output() -> None:
    class Point(BaseModel):
        x: int

    with served(random_pair(), answer=saying(Text('{"x": 3}'), done())) as client:
        sdk = OpenAI(base_url="http://localhost:8080/v1", api_key="none", http_client=client)
        answer = sdk.responses.parse(model="tiny", input="a point", text_format=Point)
    assert answer.output_parsed == Point(x=3)


def test_usage_tells_cached_reasoning_and_drafted_tokens() -> None:
    usage = streamed(*ANSWERS["text"])[-1]["response"]["usage"]
    assert usage == {
        "input_tokens": 20,
        "input_tokens_details": {"cached_tokens": 12, "cache_write_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {
            "reasoning_tokens": 3,
            "accepted_prediction_tokens": 5,
            "rejected_prediction_tokens": 2,
        },
        "total_tokens": 29,
    }


# What is understood


def test_items_become_messages_and_one_answer_is_one_turn_again() -> None:
    text = {"type": "input_text", "text": "hi"}
    asked = ask_of(
        [
            {"type": "message", "role": "developer", "content": [text]},
            {"role": "user", "content": "first"},
            {
                "type": "reasoning",
                "id": "rs",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
                "encrypted_content": None,
            },
            {"type": "message", "role": "assistant", "content": [{**text, "type": "output_text"}]},
            {"type": "function_call", "call_id": "c", "name": "find", "arguments": '{"a": 2}'},
            {"type": "function_call", "call_id": "d", "name": "now", "arguments": ""},
            {"type": "function_call_output", "call_id": "c", "output": "found"},
            {"type": "function_call_output", "call_id": "d", "output": [text]},
        ],
        instructions="be brief",
    )
    called = [
        {"id": "c", "type": "function", "function": {"name": "find", "arguments": {"a": 2}}},
        {"id": "d", "type": "function", "function": {"name": "now", "arguments": {}}},
    ]
    assert asked.messages == (
        {"role": "system", "content": "be brief"},
        {"role": "system", "content": "hi"},
        {"role": "user", "content": "first"},
        {
            "role": "assistant",
            "content": "hi",
            "reasoning_content": "hm",
            "tool_calls": called,
        },
        {"role": "tool", "content": "found", "tool_call_id": "c"},
        {"role": "tool", "content": "hi", "tool_call_id": "d"},
    )


def test_an_answer_can_be_sent_back_as_it_came() -> None:
    told = (Reasoning("hm"), Text("Look: "), *call(0, "find", '{"what": "a"}'), done("tool_calls"))
    output = streamed(*told)[-1]["response"]["output"]
    (turn,) = ask_of(output).messages
    assert (turn["reasoning_content"], turn["content"]) == ("hm", "Look: ")
    assert turn["tool_calls"][0]["function"] == {"name": "find", "arguments": {"what": "a"}}


def test_calls_of_other_kinds_stay_in_the_history() -> None:
    asked = ask_of(
        [
            {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** x"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"},
            {"type": "local_shell_call", "call_id": "d", "action": {"command": ["ls"]}},
            {"type": "local_shell_call_output", "call_id": "d", "output": "a b"},
            {"type": "web_search_call", "id": "w", "status": "completed"},
        ]
    )
    calls = [m["tool_calls"][0]["function"] for m in asked.messages if m["role"] == "assistant"]
    assert calls == [
        {"name": "apply_patch", "arguments": {"input": "*** x"}},
        {"name": "local_shell", "arguments": {"command": ["ls"]}},
    ]
    assert asked.notes == ("input items of these kinds were skipped: web_search_call",)


def test_tools_of_other_kinds_are_skipped_and_noted() -> None:
    tools = [FIND, {"type": "custom", "name": "apply_patch"}, {"type": "local_shell"}]
    asked = ask_of(tools=tools, tool_choice={"type": "function", "name": "find"})
    assert asked.tools == (Tool("find", "finds", FIND["parameters"]),)
    assert asked.tool_choice == "find"
    assert asked.notes == ("tools of these kinds were skipped: custom (apply_patch), local_shell",)


def test_functions_in_a_namespace_are_flat_for_the_model_and_not_for_the_client() -> None:
    tools = [{"type": "namespace", "name": "mcp__toy", "description": "d", "tools": [FIND]}, FIND]
    called = {"type": "function_call", "call_id": "c", "namespace": "mcp__toy", "name": "find"}
    asked = ask_of([{**called, "arguments": "{}"}], tools=tools)
    assert [tool.name for tool in asked.tools] == ["mcp__toy__find", "find"]
    assert asked.messages[0]["tool_calls"][0]["function"]["name"] == "mcp__toy__find"
    told = (*call(0, "mcp__toy__find", "{}"), *call(1, "find", "{}"), done("tool_calls"))
    items = streamed(*told, tools=tools)[-1]["response"]["output"]
    assert [(item.get("namespace"), item["name"]) for item in items] == [
        ("mcp__toy", "find"),
        (None, "find"),
    ]


@pytest.mark.parametrize("tools", [None, [], [{}], [3], [{"name": 3, "tools": 3}], ["x", [1]]])
def test_a_strange_namespace_is_no_crash(tools: Any) -> None:
    body = {"input": "hi", "tools": [{"type": "namespace", "name": "n", "tools": tools}]}
    with served(answer=saying(done())) as client:
        assert client.post("/v1/responses", json=body).status_code == 200


def test_fields_reach_the_engine_under_its_own_names() -> None:
    asked = ask_of(
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=7,
        parallel_tool_calls=False,
        reasoning={"effort": "low"},
        prompt_cache_key="thread",
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        store=True,
        include=["reasoning.encrypted_content"],
        service_tier="auto",
    )
    assert asked.sampling == {"temperature": 0.5, "top_p": 0.9}
    assert (asked.max_tokens, asked.parallel_tool_calls) == (7, False)
    assert asked.template == {"reasoning_effort": "low"}
    assert asked.grammar is not None


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"input": []}, "messages"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(body: dict[str, Any], named: str) -> None:
    with served() as client:
        sdk = OpenAI(base_url="http://localhost:8080/v1", api_key="none", http_client=client)
        with pytest.raises(BadRequestError) as caught:
            sdk.responses.create(**{"model": "tiny", "input": "hi", **body})
    assert caught.value.param == named


def test_an_unknown_field_of_the_input_is_no_crash() -> None:
    with pytest.raises(InvalidRequest, match=r"input\[0\] is no object"):
        ask_of([3])
