"""Requests as aider, Continue, Open WebUI and Cline shape them, in our own words.

Taken from what their public sources put together; the clients themselves were not run.
"""

from typing import Any

import pytest
from served import chunks, saying_pair, served

FUNCTION = {
    "name": "write_file",
    "description": "Writes a file",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "write_file", "arguments": '{"path": "a"}'},
}


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


BODIES: dict[str, dict[str, Any]] = {
    # Examples as turns, the rules once more as a system message at the end; no limits.
    "aider": {
        "model": "tiny",
        "messages": [
            turn("system", "You edit code."),
            turn("user", "an example"),
            turn("assistant", "its answer"),
            turn("user", "These are the files."),
            turn("assistant", "Ok."),
            turn("user", "say hello"),
            turn("system", "say hello"),
        ],
        "temperature": 0,
        "stream": True,
    },
    "aider's warming of a cache": {
        "model": "tiny",
        "messages": [turn("user", "say hello")],
        "max_tokens": 1,
        "stream": False,
    },
    # Where nothing was said it sends a space; fields that have no value are there all the same.
    "Continue": {
        "model": "tiny",
        "messages": [
            turn("system", "You are in a chat."),
            turn("user", "hi"),
            turn("assistant", " ", tool_calls=[CALL]),
            turn("tool", "done", tool_call_id="call_1"),
            turn("user", [{"type": "text", "text": "say "}, {"type": "text", "text": "hello"}]),
        ],
        "max_tokens": 2048,
        "temperature": 0.5,
        "top_p": None,
        "frequency_penalty": None,
        "presence_penalty": None,
        "stop": [],
        "prediction": {"type": "content", "content": "hello"},
        "tools": [{"type": "function", "function": {**FUNCTION, "strict": None}}],
        "stream": True,
    },
    # Settings that a user left alone are null; calls in the history carry their place.
    "Open WebUI": {
        "model": "tiny",
        "messages": [
            turn("system", "User context: none"),
            turn("user", "hi"),
            turn("assistant", "", tool_calls=[{"index": 0, **CALL}]),
            turn("tool", "done", tool_call_id="call_1"),
            turn("user", "say hello"),
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": None,
        "logit_bias": {},
        "stop": None,
        "tools": [TOOL],
        "user": "someone",
    },
    "Open WebUI's title of a chat": {
        "model": "tiny",
        "messages": [turn("user", "say hello")],
        "stream": False,
        "max_completion_tokens": 1000,
    },
    # Every content is a list, results of tools are text of the user.
    "Cline": {
        "model": "tiny",
        "messages": [
            turn("system", "You are skilled."),
            turn("user", [{"type": "text", "text": "<task>x</task>"}]),
            turn("assistant", [{"type": "text", "text": "<read_file></read_file>"}]),
            turn("user", [{"type": "text", "text": "say hello"}]),
        ],
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
}


@pytest.fixture(scope="module")
def http() -> Any:
    with served(saying_pair(lambda prompt: "hello" if "say hello" in prompt else "?")) as http:
        yield http


@pytest.mark.parametrize("name", BODIES)
def test_it_is_answered_and_nothing_of_it_is_lost(http: Any, name: str) -> None:
    body = BODIES[name]
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    if not body["stream"]:
        assert "hello".startswith(answer.json()["choices"][0]["message"]["content"])
        return
    found = chunks(answer)
    deltas = [chunk["choices"][0]["delta"] for chunk in found[:-1] if chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "hello"
    usages = [chunk for chunk in found[:-1] if not chunk["choices"]]
    assert len(usages) == int("stream_options" in body)
    assert found[-1] == "[DONE]"


def test_continue_completes_code_with_the_older_endpoint(http: Any) -> None:
    body = {
        "prompt": "<fim_prefix>say hello<fim_suffix><fim_middle>",
        "model": "tiny",
        "max_tokens": 256,
        "temperature": 0.01,
        "stop": ["<fim_prefix>", "<fim_suffix>", "/src/", "#- coding: utf-8", "\n\n"],
        "stream": True,
        "top_p": None,
    }
    found = chunks(http.post("/v1/completions", json=body))
    assert "".join(chunk["choices"][0]["text"] for chunk in found[:-1]) == "hello"


def test_open_webui_looks_the_models_up_before_it_asks(http: Any) -> None:
    for path in ("/models", "/v1/models", "/v1/models/"):
        listed = http.get(path, headers={"Authorization": "Bearer none"}, follow_redirects=False)
        assert listed.status_code == 200
        assert [model["id"] for model in listed.json()["data"]] == ["tiny"]
