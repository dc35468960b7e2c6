"""What real clients sent while they did a task is answered as it was then.

`scripts/check_clients --record tests/server/clients` made the records, with the clients themselves.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from acting import END_WORDS, LOOK, TITLE, ActingAnswerer, acting_pair
from anthropic.types import RawMessageStreamEvent
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from served import served
from starlette.testclient import TestClient

RECORDS = {
    path.stem: json.loads(path.read_text()) for path in Path(__file__).parent.glob("clients/*")
}
TYPES: dict[str, TypeAdapter[Any]] = {
    "/v1/responses": TypeAdapter(ResponseStreamEvent),
    "/v1/messages": TypeAdapter(RawMessageStreamEvent),
    "/v1/chat/completions": TypeAdapter(ChatCompletionChunk),
}
READ_AND_CHANGE = {
    "codex": ["exec_command", "exec_command"],
    "claude": ["Read", "Edit"],
    "opencode": ["read", "edit"],
    "llm": ["read_file", "change_file"],
}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with served(acting_pair(), answer=ActingAnswerer()) as made:
        yield made


def test_there_is_a_record_of_every_client() -> None:
    assert RECORDS.keys() == READ_AND_CHANGE.keys()


@pytest.mark.parametrize("name", READ_AND_CHANGE)
def test_a_recorded_task_goes_as_it_went(name: str, client: TestClient) -> None:
    answers = [answer_to(request, client) for request in RECORDS[name]["requests"]]
    titles = [text for text, calls in answers if TITLE in text and not calls]
    turns = [answer for answer in answers if answer[0] not in titles]
    read, change = READ_AND_CHANGE[name]
    assert turns == [(LOOK.strip(), [read]), ("", [change]), (END_WORDS, [])]
    assert len(titles) == len(answers) - 3


def answer_to(request: dict[str, Any], client: TestClient) -> tuple[str, list[str]]:
    """Text and names of called tools; every event has to be one of the SDK's."""
    path, body = request["path"], request["body"]
    assert body["stream"]
    response = client.post(path, json={**body, "model": "tiny"})
    assert response.status_code == 200, response.text
    data = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in data]
    for event in events:
        if event.get("type") != "ping":
            TYPES[path].validate_python(event)
    texts, calls = zip(*(PIECES[path](event) for event in events), strict=True)
    return "".join(filter(None, texts)).strip(), [call for call in calls if call]


def chat_pieces(chunk: dict[str, Any]) -> tuple[str | None, str | None]:
    delta = chunk["choices"][0]["delta"] if chunk["choices"] else {}
    called = (delta.get("tool_calls") or [{}])[0].get("function", {})
    return delta.get("content"), called.get("name")


def response_pieces(event: dict[str, Any]) -> tuple[str | None, str | None]:
    said = event["delta"] if event["type"] == "response.output_text.delta" else None
    done = event["type"] == "response.output_item.done"
    return said, event["item"].get("name") if done else None


def message_pieces(event: dict[str, Any]) -> tuple[str | None, str | None]:
    return event.get("delta", {}).get("text"), event.get("content_block", {}).get("name")


PIECES = {
    "/v1/chat/completions": chat_pieces,
    "/v1/responses": response_pieces,
    "/v1/messages": message_pieces,
}
