"""Raw text goes on, through OpenAI's client, stream or not."""

from typing import Any

import openai
import pytest
from openai.types import Completion
from served import chunks, served


@pytest.fixture(scope="module")
def http() -> Any:
    with served() as http:
        yield http


@pytest.fixture(scope="module")
def client(http: Any) -> openai.OpenAI:
    return openai.OpenAI(
        base_url="http://localhost:8080/v1", api_key="none", http_client=http, max_retries=0
    )


def whole(client: openai.OpenAI, **body: Any) -> Completion:
    answer = client.completions.create(**{"model": "tiny", "prompt": "abc def", **body})
    return Completion.model_validate(answer.to_dict(), strict=True)


def streamed(client: openai.OpenAI, **body: Any) -> list[Completion]:
    found = list(
        client.completions.create(**{"model": "tiny", "prompt": "abc def", "stream": True, **body})
    )
    for chunk in found:
        content = chunk.to_dict()
        for choice in content["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"  # null is not in their type
        Completion.model_validate(content, strict=True)
    return found


@pytest.mark.parametrize("options", [{}, {"max_tokens": 2}, {"stop": "c d"}])
def test_whole_and_streamed_answers_are_equal(client: openai.OpenAI, options: Any) -> None:
    answer, found = whole(client, **options), streamed(client, **options)
    assert "".join(chunk.choices[0].text for chunk in found) == answer.choices[0].text
    reasons = [chunk.choices[0].finish_reason for chunk in found]
    assert [reason for reason in reasons if reason] == [answer.choices[0].finish_reason]
    assert reasons[-1] == ("length" if "max_tokens" in options else "stop")
    assert answer.choices[0].text == ("ab" if options else "abc def")


def test_the_prompt_is_read_without_a_chat_format(client: openai.OpenAI) -> None:
    assert whole(client).usage is not None
    assert whole(client).usage.prompt_tokens == len("abc def") + 1  # type: ignore[union-attr]


@pytest.mark.parametrize("prompt", ["abc", ["abc"], [97, 98, 99, 257], [[97, 98, 99, 257]]])
def test_a_prompt_is_one_text_or_one_list_of_ids(client: openai.OpenAI, prompt: Any) -> None:
    assert whole(client, prompt=prompt).choices[0].text == "abc"


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], ["a", "b"], [[1], [2]], [-1], [100000], [1.5], None, {"a": 1}]
)
def test_other_prompts_are_refused_by_name(http: Any, prompt: Any) -> None:
    refused = http.post("/v1/completions", json={"prompt": prompt})
    assert refused.status_code == 400, refused.text
    assert "prompt" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("echo", True), ("suffix", "x"), ("best_of", 3), ("n", 2), ("logprobs", 99)],
)
def test_fields_that_cannot_be_honoured_are_refused_by_name(http, field, value) -> None:
    refused = http.post("/v1/completions", json={"prompt": "a", field: value})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == field
    idle = {"echo": False, "suffix": "", "best_of": 1, "n": 1, "logprobs": None}
    assert http.post("/v1/completions", json={"prompt": "a", **idle}).status_code == 200


def test_usage_and_log_probabilities_come_in_both_modes(client: openai.OpenAI) -> None:
    answer = whole(client, logprobs=2, max_tokens=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "b", "c"]
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.token_logprobs == pytest.approx([0.0, 0.0, 0.0])
    assert [len(top) for top in logprobs.top_logprobs or ()] == [2, 2, 2]
    found = streamed(client, logprobs=2, max_tokens=3, stream_options={"include_usage": True})
    assert found[-1].usage == answer.usage
    told = [chunk.choices[0].logprobs for chunk in found if chunk.choices]
    assert [entry for entry in told if entry] == [logprobs]


def test_a_stream_ends_in_done_and_tells_speed_and_state(http: Any) -> None:
    found = chunks(http.post("/v1/completions", json={"prompt": "abc", "stream": True}))
    assert found[-1] == "[DONE]"
    assert found[-2]["timings"]["predicted_n"] == 4
    assert found[-2]["dflash"]["target"] == "tiny"
