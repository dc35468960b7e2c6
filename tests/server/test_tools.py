"""Tool calls over HTTP: the same streamed and whole, drafting or not, cut or forced."""

import importlib
import json
from typing import Any

import jsonschema
import pytest
from byte_bpe import byte_bpe
from call_writers import WRITERS, Call
from mlx_lm.tokenizer_utils import TokenizerWrapper
from served import ChatTokenizer, chunks, saying_pair, served
from tiny import tiny_pair

from dflash2_mlx.server.answer import Answerer

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in {
        "find": {
            "type": "object",
            "properties": {"unit": {"enum": ["c", "f"]}, "hot": {"type": "boolean"}},
            "required": ["unit", "hot"],
            "additionalProperties": False,
        },
        "now": {},
    }.items()
]
CALLS: list[Call] = [("find", {"unit": "c", "hot": True}), ("now", {})]


class Caller(ChatTokenizer):
    """Byte tokens, and the tags of a style: every tag is many tokens."""

    def __init__(self, style: str) -> None:
        parser = importlib.import_module(f"mlx_lm.tool_parsers.{style}")
        self.tool_call_start, self.tool_call_end = parser.tool_call_start, parser.tool_call_end
        self.tool_parser = parser.parse_tool_call


def ask(http: Any, **body: Any) -> tuple[str, list[tuple[str, str]], str]:
    """Text, calls and finish reason, which have to be the same streamed and whole."""
    filled = {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS, "seed": 1, **body}
    answer = http.post("/v1/chat/completions", json=filled)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    message = choice["message"]
    calls = [
        (c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())
    ]
    whole = (message["content"] or "", calls, choice["finish_reason"])
    streamed = http.post("/v1/chat/completions", json={**filled, "stream": True})
    assert joined(chunks(streamed)[:-1]) == whole
    return whole


def joined(found: list[dict[str, Any]]) -> tuple[str, list[tuple[str, str]], str]:
    text, names, arguments = "", {}, {}
    for chunk in found:
        delta = chunk["choices"][0]["delta"]
        text += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            names.setdefault(call["index"], call["function"].get("name"))
            piece = call["function"]["arguments"]
            arguments[call["index"]] = arguments.get(call["index"], "") + piece
    calls = [(names[index], arguments[index]) for index in sorted(names)]
    return text, calls, found[-1]["choices"][0]["finish_reason"]


def says(text: str, style: str = "json_tools", block: int = 8) -> Any:
    pair = saying_pair(lambda prompt: text, Caller(style))
    return served(pair, answer=Answerer(block_size=block))


@pytest.mark.parametrize("style", ["json_tools", "qwen3_coder", "glm47", "mistral", "pythonic"])
@pytest.mark.parametrize("block", [1, 3, 8])
def test_calls_are_the_same_streamed_and_whole_at_any_block(style: str, block: int) -> None:
    with says(f"Look. {WRITERS[style](CALLS)}", style, block) as http:
        text, calls, finish = ask(http)
    assert (text, finish) == ("Look. ", "tool_calls")
    assert [(name, json.loads(given)) for name, given in calls] == CALLS


@pytest.mark.parametrize("max_tokens", [12, 30, 60])
@pytest.mark.parametrize("style", ["json_tools", "qwen3_coder"])
def test_a_call_cut_by_max_tokens_is_not_handed_over_as_whole(style: str, max_tokens: int) -> None:
    said = WRITERS[style]([("write", {"text": "a long text that goes on and on " * 3})])
    with says(said, style) as http:
        text, calls, finish = ask(http, max_tokens=max_tokens)
    assert (text, finish) == ("", "length")
    for _, given in calls:
        assert not given.endswith("}")


def test_one_call_is_one_call_where_parallel_ones_are_off() -> None:
    with says(WRITERS["json_tools"](CALLS)) as http:
        _, calls, finish = ask(http, parallel_tool_calls=False)
        usage = http.post(
            "/v1/chat/completions",
            json={
                "messages": [{"role": "user", "content": "Hi"}],
                "tools": TOOLS,
                "parallel_tool_calls": False,
            },
        ).json()["usage"]
    assert ([name for name, _ in calls], finish) == (["find"], "tool_calls")
    # Not decoded to the end: the second call was never written.
    assert usage["completion_tokens"] < len(WRITERS["json_tools"](CALLS)) - 20


def test_without_tools_what_looks_like_a_call_is_text() -> None:
    said = WRITERS["json_tools"](CALLS)
    with says(said) as http:
        assert ask(http, tools=None) == (said, [], "stop")
        assert ask(http, tool_choice="none") == (said, [], "stop")


@pytest.fixture(scope="module")
def improviser() -> Any:
    """A random model with a tokenizer that grammars can use."""
    inner = byte_bpe.__wrapped__()
    inner.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    pair = tiny_pair()
    pair.tokenizer = TokenizerWrapper(inner)
    with served(pair) as http:
        yield http


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "find"}}])
def test_a_forced_call_is_valid_while_drafting(
    improviser: Any, choice: Any, temperature: float
) -> None:
    options = {"tool_choice": choice, "temperature": temperature, "parallel_tool_calls": False}
    text, calls, finish = ask(improviser, max_tokens=200, **options)
    assert (text, finish) == ("", "tool_calls")
    ((name, given),) = calls
    assert name == "find" or choice == "required"
    if name == "find":
        jsonschema.validate(json.loads(given), TOOLS[0]["function"]["parameters"])


def test_a_strict_schema_that_cannot_be_held_is_refused_by_name(improviser: Any) -> None:
    odd = {"type": "object", "patternProperties": {"(?=x)": {}}}
    tools = [{"type": "function", "function": {"name": "odd", "parameters": odd, "strict": True}}]
    answer = improviser.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "Hi"}], "tools": tools},
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools"
    assert "tool odd is strict" in answer.json()["error"]["message"]
