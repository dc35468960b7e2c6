"""How a server was told to answer, and what it says where that is not how it answers."""

from typing import Any

import pytest
from served import saying_pair, served

from dflash2_mlx.generation import stream_generate
from dflash2_mlx.server.answer import Answerer

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
}


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether near ties were to be settled, of each answer; the measuring is left out."""
    seen: list[bool] = []

    def watched(*arguments: Any, exact: bool, **options: Any) -> Any:
        seen.append(exact)
        return stream_generate(*arguments, **options)

    monkeypatch.setattr("dflash2_mlx.dialogue.reading.stream_generate", watched)
    return seen


@pytest.mark.parametrize("path", BODIES)
def test_an_exact_server_settles_greedy_answers_and_says_of_others_that_it_did_not(
    settled: list[bool], path: str
) -> None:
    with served(answer=Answerer(exact=True)) as http:
        greedy, sampled = (
            http.post(path, json={**BODIES[path], "temperature": temperature}).json()
            for temperature in (0, 0.7)
        )
    assert settled == [True, False]
    assert greedy["dflash"]["notes"] == []
    (note,) = sampled["dflash"]["notes"]
    assert "near ties are not settled in this answer" in note
    assert "temperature is 0.7" in note


def test_a_request_that_leaves_temperature_out_is_answered_at_the_models_own(
    settled: list[bool],
) -> None:
    pair = saying_pair()
    pair.default_sampling = pair.sampling(temperature=0.5)
    with served(pair, answer=Answerer(exact=True)) as http:
        answer = http.post("/v1/chat/completions", json={"messages": MESSAGES}).json()
    assert settled == [False]
    assert "temperature is 0.5" in answer["dflash"]["notes"][0]


def test_a_server_that_is_not_exact_says_nothing_of_it(settled: list[bool]) -> None:
    with served(answer=Answerer()) as http:
        body = {"messages": MESSAGES, "temperature": 0.7}
        answer = http.post("/v1/chat/completions", json=body).json()
    assert settled == [False]
    assert answer["dflash"]["notes"] == []
