"""OpenAI's chat, through OpenAI's own client: every answer fits its types, stream or not."""

import json
import threading
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk
from served import ChatTokenizer, chunks, saying_pair, served
from talking import HELLO, Talk, filled, text_of

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}\n</tool_call>'


@pytest.fixture(scope="module")
def talk() -> Any:
    with served() as http:
        yield Talk(http)


def says(text: str, tokenizer: Any = None) -> Any:
    """A server whose model says one text to everything."""
    return served(saying_pair(lambda prompt: text, tokenizer))


class Thinker(ChatTokenizer):
    """Its template opens the thought."""

    think_start, think_end = "<think>", "</think>"

    def apply_chat_template(self, messages: Any, tokenize: bool = True, **variables: Any) -> Any:
        ids = super().apply_chat_template(messages, **variables)
        shown = [*ids[:-1], *b"<think>", ids[-1]]
        return shown if tokenize else self.decode(shown)


def test_whole_and_streamed_answers_have_equal_content(talk: Talk) -> None:
    whole, found = talk.whole(seed=1), talk.stream(seed=1)
    assert whole.choices[0].message.content == text_of(found) == "Hello wörld 😀"
    assert whole.choices[0].finish_reason == "stop"
    assert {chunk.id for chunk in found} == {found[0].id}
    assert found[0].choices[0].delta.role == "assistant"
    strict = [ChatCompletionChunk.model_validate(chunk.to_dict(), strict=True) for chunk in found]
    assert len(strict) == len(found)


# V03
def test_a_stream_ends_with_one_finishing_chunk_and_done(talk: Talk) -> None:
    found = chunks(talk.post(stream=True))
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in found[:-1]]
    assert reasons[-1] == "stop"
    assert reasons.count(None) == len(reasons) - 1
    assert found[-1] == "[DONE]"


# V19
@pytest.mark.parametrize("options", [{}, {"include_usage": False}, None])
def test_usage_is_not_streamed_unless_asked_for(talk: Talk, options: Any) -> None:
    found = talk.stream(**({} if options == {} else {"stream_options": options}))
    assert all(chunk.usage is None and chunk.choices for chunk in found)


# V19
def test_usage_comes_once_at_the_end_and_equals_that_of_the_whole(talk: Talk) -> None:
    found = talk.stream(stream_options={"include_usage": True})
    assert [chunk.usage is not None for chunk in found] == [False] * (len(found) - 1) + [True]
    assert found[-1].choices == []
    usage = talk.whole().usage
    assert found[-1].usage == usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens == len("user: Hello wörld 😀\n".encode()) + 1
    assert usage.completion_tokens == len("Hello wörld 😀".encode()) + 1
    details = usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens > 0
    assert details.rejected_prediction_tokens > 0


def test_the_last_chunk_and_the_whole_tell_speed_and_state(talk: Talk) -> None:
    whole = talk.post(seed=7).json()
    last = chunks(talk.post(seed=7, stream=True))[-2]
    for told in (whole, last):
        timings, state = told["timings"], told["dflash"]
        assert timings["prompt_n"] == whole["usage"]["prompt_tokens"]
        assert timings["predicted_n"] == whole["usage"]["completion_tokens"]
        assert timings["predicted_per_second"] > 0
        assert 0 < timings["draft_n_accepted"] < timings["draft_n"]
        assert (state["target"], state["seed"], state["drafting"]) == ("tiny", 7, True)
        assert sum(state["pass_lengths"]) == state["passes"] > 0


def test_pieces_of_a_stream_say_which_tokens_were_drafted(talk: Talk) -> None:
    found = chunks(talk.post(stream=True))[:-1]
    pieces = [chunk["dflash"] for chunk in found if chunk["choices"][0]["delta"].get("content")]
    drafted = sum(piece["from_draft"] for piece in pieces)
    assert 0 < drafted <= found[-1]["timings"]["draft_n_accepted"]


# V20
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_cut_answer_says_length_in_both_modes(talk: Talk, field: str) -> None:
    whole, found = talk.whole(**{field: 2}), talk.stream(**{field: 2})
    assert whole.choices[0].finish_reason == found[-1].choices[0].finish_reason == "length"
    assert whole.choices[0].message.content == text_of(found) == "He"


# V17, V18
@pytest.mark.parametrize("stop", ["wör", ["wör"], ["xyz", "wör", "wörld"]])
def test_a_stop_as_text_or_list_ends_the_answer_before_it(talk: Talk, stop: Any) -> None:
    whole, found = talk.whole(stop=stop), talk.stream(stop=stop)
    assert whole.choices[0].message.content == text_of(found) == "Hello "
    assert whole.choices[0].finish_reason == found[-1].choices[0].finish_reason == "stop"


# V17
@pytest.mark.parametrize("stop", [["beta gamma"], ["beta gamma", "beta"], ["beta", "beta gamma"]])
def test_nothing_of_a_stop_that_comes_in_pieces_is_sent(stop: list[str]) -> None:
    with says("alpha beta gamma delta") as http:
        talk = Talk(http)
        whole, found = talk.whole(stop=stop), talk.stream(stop=stop)
    assert whole.choices[0].message.content == text_of(found) == "alpha "
    assert whole.choices[0].finish_reason == found[-1].choices[0].finish_reason == "stop"


# V18
@pytest.mark.parametrize("stop", [None, []])
def test_a_null_or_empty_stop_is_none(talk: Talk, stop: Any) -> None:
    assert talk.whole(stop=stop).choices[0].message.content == "Hello wörld 😀"


def test_log_probabilities_are_there_when_asked_for_and_equal_in_both_modes(talk: Talk) -> None:
    whole = talk.whole(logprobs=True, top_logprobs=2, max_tokens=5)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == list("Hello")
    assert [entry.bytes for entry in logprobs.content] == [[ord(char)] for char in "Hello"]
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs.content)
    found = talk.stream(logprobs=True, top_logprobs=2, max_tokens=5)
    streamed = [c.choices[0].logprobs for c in found if c.choices[0].logprobs]
    assert [entry for part in streamed for entry in part.content or ()] == logprobs.content
    assert talk.whole().choices[0].logprobs is None


def test_a_part_of_a_character_has_no_bytes(talk: Talk) -> None:
    whole = talk.whole(messages=[{"role": "user", "content": "😀"}], logprobs=True, max_tokens=1)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert logprobs.content[0].bytes is None
    assert logprobs.content[0].token == "\ufffd"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "warm"),
        ("top_p", 2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("repetition_penalty", 0),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"100000": 1}),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("seed", "a"),
        ("stop", [""]),
        ("stop", 3),
        ("messages", []),
        ("messages", "hi"),
        ("top_logprobs", 3),
        ("n", 2),
        ("n", True),
        ("store", True),
        ("functions", [{"name": "x"}]),
        ("modalities", ["text", "audio"]),
        ("min_tokens", 5),
        ("ignore_eos", True),
        ("guided_json", {}),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema"}),
        ("tools", [{"type": "function", "function": {}}]),
        ("tool_choice", "required"),
        ("tool_choice", "maybe"),
        ("tool_choice", {"type": "function", "function": {"name": "nope"}}),
        ("stream", "yes"),
    ],
)
def test_a_field_that_is_wrong_or_not_supported_is_a_400_that_names_it(talk, field, value) -> None:
    for stream in ({}, {"stream": True}):
        refused = talk.post(**{**stream, field: value})
        assert refused.status_code == 400, refused.text
        error = refused.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["param"].split("[")[0] == field
        assert field in error["message"]


def test_fields_that_ask_for_nothing_are_ignored(talk: Talk) -> None:
    idle = {
        "n": 1,
        "store": False,
        "user": "me",
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "something_new": {"x": 1},
        "modalities": ["text"],
        "tools": [],
        "top_k": -1,
        "parallel_tool_calls": True,
    }
    answer = talk.post(**idle)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "Hello wörld 😀"


def test_every_sampling_field_reaches_the_engine(talk: Talk, monkeypatch: Any) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "logit_bias": {"65": 1.5},
        "seed": 5,
        "stop": ["x"],
    }
    seen: list[Any] = []
    pair = talk.worker.pair
    sampling = pair.sampling
    monkeypatch.setattr(pair, "sampling", lambda **given: seen.append(given) or sampling(**given))
    assert talk.post(**fields).status_code == 200
    assert seen == [{**fields, "logit_bias": {65: 1.5}, "stop": ("x",)}]


# V13
def test_contents_as_lists_null_and_empty_are_taken(talk: Talk) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    history = [
        {"role": "system", "content": parts},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": parts},
        {"role": "user", "content": parts},
    ]
    assert talk.post(messages=history).json()["choices"][0]["message"]["content"] == "ab"


# V14
def test_an_image_is_refused_by_name_and_the_server_lives_on(talk: Talk) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    refused = talk.post(messages=[{"role": "user", "content": [image]}])
    assert refused.status_code == 400
    assert "image_url" in refused.json()["error"]["message"]
    assert talk.post().status_code == 200


def test_an_answer_goes_on_from_an_assistant_turn_at_the_end() -> None:
    with served(saying_pair(lambda prompt: repr(prompt))) as http:
        turns = [*HELLO, {"role": "assistant", "content": "Once upon"}]
        content = Talk(http).whole(messages=turns).choices[0].message.content
    assert content == repr("user: Hello wörld 😀\nassistant: Once upon")


@pytest.mark.parametrize("tools", [None, []])
def test_without_tools_tags_are_text(tools: Any) -> None:
    with says(CALL) as http:
        message = Talk(http).whole(tools=tools).choices[0].message
    assert message.content == CALL
    assert message.tool_calls is None


# V05, V06
def test_a_tool_call_is_the_same_in_both_modes_and_no_tag_shows() -> None:
    with says(f"I add.\n{CALL}") as http:
        talk = Talk(http)
        whole = talk.whole(tools=[ADD])
        found = talk.stream(tools=[ADD])
    message = whole.choices[0].message
    assert message.content is not None
    assert message.content.strip() == text_of(found).strip() == "I add."
    assert whole.choices[0].finish_reason == found[-1].choices[0].finish_reason == "tool_calls"
    (call,) = message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "add"
    assert json.loads(call.function.arguments) == {"a": 1, "b": [2, "x"]}
    deltas = [d for c in found for d in c.choices[0].delta.tool_calls or ()]
    assert deltas[0].function is not None
    assert deltas[0].function.name == "add"
    assert len({delta.id for delta in deltas if delta.id}) == 1
    streamed = "".join(d.function.arguments or "" for d in deltas if d.function)
    assert streamed == call.function.arguments


# V28
def test_unknown_kinds_of_tools_are_skipped_and_noted() -> None:
    with says(CALL) as http:
        answer = Talk(http).post(tools=[ADD, {"type": "web_search"}]).json()
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert any("web_search" in note for note in answer["dflash"]["notes"])


# V10
@pytest.mark.parametrize("limit", [12, 30, 60])
def test_a_cut_tool_call_is_never_handed_over_as_finished(limit: int) -> None:
    with says(CALL) as http:
        talk = Talk(http)
        whole = talk.whole(tools=[ADD], max_tokens=limit)
        found = talk.stream(tools=[ADD], max_tokens=limit)
    assert whole.choices[0].finish_reason == found[-1].choices[0].finish_reason == "length"
    calls = whole.choices[0].message.tool_calls or []
    streamed = [d for c in found for d in c.choices[0].delta.tool_calls or ()]
    joined = "".join(d.function.arguments or "" for d in streamed if d.function)
    assert joined == "".join(call.function.arguments for call in calls if call.type == "function")


# V15
def test_a_thought_is_kept_apart_in_both_modes_also_when_it_is_cut() -> None:
    with says("plan</think>done", Thinker()) as http:
        talk = Talk(http)
        whole, found = talk.post().json(), talk.stream()
        cut = talk.post(max_tokens=3).json()
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("plan", "done")
    assert text_of(found) == "done"
    thoughts = [chunk.choices[0].delta.to_dict().get("reasoning_content") for chunk in found]
    assert "".join(thought for thought in thoughts if isinstance(thought, str)) == "plan"
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    assert cut["choices"][0]["message"]["content"] == ""
    assert cut["choices"][0]["message"]["reasoning_content"] == "pla"
    assert cut["choices"][0]["finish_reason"] == "length"


# V26
def test_a_stream_begins_at_once_and_tells_of_waiting_in_comments_and_empty_deltas() -> None:
    held = threading.Event()
    pair = saying_pair()
    pair.target.before_read = lambda count: held.wait(10)
    with served(pair, keepalive_s=0.01) as http:
        lines: list[str] = []
        with http.stream("POST", "/v1/chat/completions", json=filled({"stream": True})) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                if sum(line.startswith(": prefill 0/") for line in lines) == 3:
                    held.set()
    assert json.loads(lines[0][6:])["choices"][0]["delta"]["role"] == "assistant"
    assert held.is_set()
    empty = [json.loads(line[6:]) for line in lines if '"prefill":[0,' in line]
    assert len(empty) >= 3
    assert empty[0]["choices"][0]["delta"] == {}
    assert "data: [DONE]" in lines


def test_an_error_in_the_middle_of_a_stream_is_an_event_and_the_server_lives_on() -> None:
    pair = saying_pair()
    fail = [True]

    def before_read(count: int) -> None:
        if fail[0] and count > 1:
            raise RuntimeError("/secret")

    with served(pair) as http:
        talk = Talk(http)
        pair.target.before_read = lambda count: None
        talk.whole()
        pair.target.before_read = before_read
        found = chunks(talk.post(stream=True))
        assert set(found[-1]["error"]) == {"message", "type", "param", "code"}
        assert "secret" not in str(found[-1])
        with pytest.raises(openai.APIError):
            talk.stream()
        whole = talk.post()
        assert whole.status_code == 500
        assert "secret" not in whole.text
        fail[0] = False
        assert talk.whole().choices[0].message.content == "Hello wörld 😀"


# V02
def test_two_requests_at_once_equal_their_lone_runs(talk: Talk) -> None:
    texts = ["short", "a much longer text that takes more passes " * 3]
    answers: dict[str, str] = {}

    def ask(text: str) -> None:
        answers[text] = text_of(talk.stream(messages=[{"role": "user", "content": text}]))

    threads = [threading.Thread(target=ask, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {text: text for text in texts}


# K13
def test_a_new_chat_sees_nothing_of_an_earlier_one() -> None:
    with served(saying_pair(lambda prompt: prompt)) as http:
        talk = Talk(http)
        fresh = talk.whole(messages=[{"role": "user", "content": "hi"}])
        talk.whole(messages=[{"role": "user", "content": "zebra41 " * 20}])
        warm = talk.whole(messages=[{"role": "user", "content": "hi"}])
    assert warm.choices[0].message.content == fresh.choices[0].message.content == "user: hi\n"
