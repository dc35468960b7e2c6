"""Streams of every dialect: they show life, end in their own words, and stay valid UTF-8."""

import dataclasses
import json
import threading
from typing import Any

import pytest
from scripted_events import done, saying
from served import served
from starlette.testclient import TestClient

from dflash2_mlx.dialogue.events import Event, Prefilling, Reasoning, Text, ToolArguments, ToolStart

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {
        "messages": MESSAGES,
        "max_tokens": 9,
        "thinking": {"type": "adaptive", "display": "omitted"},
    },
}
LIFE = {
    "/v1/chat/completions": '"delta":{},',
    "/v1/completions": '"text":"","logprobs":null,"finish_reason":null',
    "/v1/responses": "event: response.in_progress",
    "/v1/messages": "event: ping",
}
UNSEEN: dict[str, tuple[Event, ...]] = {
    "passes without events": (),
    "tokens without text": (Text("", 1), Reasoning("", 1)),
    "pieces without arguments": (ToolArguments(0, ""),),
}


def lives_on(path: str, *events: Event) -> list[str]:
    """The lines of a stream in which nothing but such events happens until life was seen often."""
    seen = threading.Event()

    def answer(pair: Any, asked: Any, tell: Any) -> None:
        tell(Prefilling(0, 2))
        tell(Prefilling(2, 2))
        tell(ToolStart(0, "call_0", "find"))
        while not seen.wait(0.01):
            tell(*events)
        tell(done())

    lines: list[str] = []
    with (
        served(answer=answer, keepalive_s=0.01) as http,
        http.stream("POST", path, json={**BODIES[path], "stream": True}) as response,
    ):
        for line in response.iter_lines():
            lines.append(line)
            if sum(LIFE[path] in line for line in lines) > 6:
                seen.set()
    return lines


@pytest.mark.parametrize("events", UNSEEN.values(), ids=UNSEEN)
@pytest.mark.parametrize("path", BODIES)
def test_a_client_is_shown_life_while_tokens_come_of_which_it_sees_nothing(
    path: str, events: tuple[Event, ...]
) -> None:
    lines = lives_on(path, *events)
    assert sum(LIFE[path] in line for line in lines) > 6
    if path.endswith("completions"):
        assert ": writing" in lines
        assert lines[-2] == "data: [DONE]"


def test_a_client_is_shown_life_while_thoughts_come_that_it_wants_left_out() -> None:
    lines = lives_on("/v1/messages", Reasoning("hm", 1))
    assert "event: message_stop" in lines


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_that_cannot_be_written_ends_in_the_words_of_its_dialect(path: str) -> None:
    unwritable = dataclasses.replace(done(), effective={"odd": object()})
    with served(answer=saying(Text("a"), unwritable)) as strict:
        http = TestClient(
            strict.app, base_url="http://localhost:8080", raise_server_exceptions=False
        )
        whole = http.post(path, json=BODIES[path])
        stream = http.post(path, json={**BODIES[path], "stream": True})
        assert http.get("/health").status_code == 200
    words = "an unexpected TypeError inside the server"
    assert whole.status_code == 500
    assert words in whole.json()["error"]["message"]
    last = json.loads(stream.text.strip().splitlines()[-1].removeprefix("data: "))
    error = last["response"]["error"] if path.endswith("responses") else last["error"]
    assert words in error["message"]
    if path.endswith("responses"):
        assert last["type"] == "response.failed"
    assert "[DONE]" not in stream.text


@pytest.mark.parametrize("path", BODIES)
def test_half_of_a_surrogate_pair_that_a_model_wrote_breaks_nothing(path: str) -> None:
    with served(answer=saying(Text("a\ud800b"), done())) as http:
        whole = http.post(path, json=BODIES[path])
        stream = http.post(path, json={**BODIES[path], "stream": True})
    for answer in (whole, stream):
        assert answer.status_code == 200
        assert r"a\ud800b" in answer.content.decode()


NAMES = ("x-session-id", "x-session-affinity", "x-claude-code-session-id", "x-openwebui-chat-id")


@pytest.mark.parametrize("path", BODIES)
def test_what_belongs_together_is_told_by_a_header_or_a_key(path: str) -> None:
    heard: list[str | None] = []

    def answer(pair: Any, asked: Any, tell: Any) -> None:
        heard.append(asked.ask.session)
        tell(done())

    with served(answer=answer) as http:
        http.post(path, json=BODIES[path])
        for name in NAMES:
            http.post(path, json=BODIES[path], headers={name: "s"})
        if path != "/v1/messages":
            keyed = {**BODIES[path], "prompt_cache_key": "key"}
            http.post(path, json=keyed, headers={"x-session-id": "other"})
    assert heard == [None, "s", "s", "s", "s", "key"][: len(heard)]
    assert len(heard) >= 5
