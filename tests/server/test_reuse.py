"""The endpoint reads nothing twice: neither what a conversation repeats, nor its own answers."""

import threading
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import pytest
from reusing import KINDS, PLENTY, pair_for
from served import served
from starlette.testclient import TestClient
from tiny import ByteTokenizer

from dflash2_mlx.budget import plan_memory
from dflash2_mlx.errors import OutOfMemory
from dflash2_mlx.generation import read_ahead
from dflash2_mlx.pair import Message, Pair
from dflash2_mlx.server.answer import Answerer

START, STOP = 270, 271
Body = dict[str, Any]


class Roles(ByteTokenizer):
    """Turns between special tokens; a prompt ends where an answer begins, as with real models."""

    think_start: str | None = None
    think_end: str | None = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def apply_chat_template(
        self, messages: Sequence[Message], tokenize: bool = True, **variables: Any
    ) -> Any:
        ids = [*str(variables.get("tools") or "").encode()]
        for message in messages:
            shown = f"{message['role']}\n{message['content']}{message.get('tool_calls') or ''}"
            ids += [START, *shown.encode(), STOP]
        if variables.get("add_generation_prompt"):
            ids += [START, *b"assistant\n"]
        if variables.get("continue_final_message"):
            ids = ids[:-1]
        return ids if tokenize else self.decode(ids)


def roles_pair(kind: str = "dense", budget: int | None = PLENTY) -> Pair:
    pair = pair_for(kind, budget=budget)
    pair.tokenizer = Roles()
    return pair


def ask(client: TestClient, messages: Sequence[Message], **more: Any) -> Body:
    body = {"messages": list(messages), "max_tokens": 20, **more}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    told: Body = answer.json()
    return told


def said(answer: Body) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def cached(answer: Body) -> int:
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def settled(client: Any) -> None:
    """Wait until the answer was read ahead: the next request must not come before its first chunk,
    or the test would say something of threads."""
    assert client.app.state.desk.worker.wait_for_state("ready", timeout_s=10)


def talk(client: TestClient, count: int, **more: Any) -> list[Body]:
    messages: list[Message] = [{"role": "system", "content": "You are kind. " * 5}]
    answers = []
    for number in range(count):
        messages.append({"role": "user", "content": f"question {number}"})
        answers.append(ask(client, messages, **more))
        messages.append({"role": "assistant", "content": said(answers[-1])})
        settled(client)
    return answers


@pytest.mark.parametrize("kind", KINDS)
def test_every_turn_covers_the_prompt_and_the_answer_before_it(kind: str) -> None:
    """(K07, K08)"""
    answerer = Answerer(block_size=4)
    with served(roles_pair(kind), answer=answerer) as client:
        warm = talk(client, 5)
        totals = client.app.state.desk.worker.tally.totals
        assert totals["cached_tokens"] == sum(map(cached, warm))
    with served(roles_pair(kind, budget=None), answer=answerer) as client:
        cold = talk(client, 5)
    assert [said(answer) for answer in warm] == [said(answer) for answer in cold]
    for before, after in pairwise(warm):
        usage = before["usage"]
        assert cached(after) > usage["prompt_tokens"]
        assert after["timings"]["cache_n"] == cached(after)
        assert after["timings"]["prompt_n"] == after["usage"]["prompt_tokens"] - cached(after)
    assert set(map(cached, cold)) == {0}


def test_another_chat_knows_the_system_message() -> None:
    system = {"role": "system", "content": "You are kind. " * 5}
    with served(roles_pair("qwen3_5"), answer=Answerer(block_size=4)) as client:
        for number, text in enumerate(("one", "\n\ntwo", "about three")):
            answer = ask(client, [system, {"role": "user", "content": text}])
            assert (cached(answer) >= len(system["content"])) == (number > 0)


def test_the_session_is_a_hint_and_no_key() -> None:
    messages = [{"role": "user", "content": "hello"}]
    pair = roles_pair()
    with served(pair, answer=Answerer(block_size=4)) as client:
        ask(client, messages, prompt_cache_key="mine")
        assert cached(ask(client, messages, prompt_cache_key="yours")) > 0
        assert pair.prefix_cache is not None
        assert {node.session for node in pair.prefix_cache.nodes()} >= {"yours"}


def test_a_raw_prompt_that_grows_is_known_at_even_spaces() -> None:
    with served(roles_pair(), answer=Answerer(block_size=4)) as client:
        for known in (0, 512):
            body = {"prompt": "x" * (600 + known), "max_tokens": 4}
            answer = client.post("/v1/completions", json=body).json()
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == known


def test_an_answer_that_goes_on_from_the_clients_words_is_as_without_a_cache() -> None:
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "I"},
    ]
    with served(roles_pair(), answer=Answerer(block_size=4)) as client:
        ones = [said(ask(client, messages)) for _ in range(2)]
    with served(roles_pair(budget=None), answer=Answerer(block_size=4)) as client:
        assert ones == [said(ask(client, messages))] * 2


def test_reading_ahead_gives_way_to_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops behind the chunk it is in, and what it read is kept."""
    pair = roles_pair()
    pair.prefill_step = 4
    reading, go = threading.Event(), threading.Event()
    chunks: list[int] = []

    def slowly(*given: Any, **options: Any) -> int:
        go_on = options["on_prefill"]

        def after_chunk(done: int, total: int) -> None:
            chunks.append(done)
            if len(chunks) == 1:
                reading.set()
                assert go.wait(10)
            go_on(done, total)

        return read_ahead(*given, **{**options, "on_prefill": after_chunk})

    monkeypatch.setattr("dflash2_mlx.server.ahead.read_ahead", slowly)
    messages = [{"role": "user", "content": "hello"}]
    with served(pair, answer=Answerer(block_size=4)) as client:
        worker = client.app.state.desk.worker
        first = ask(client, messages, max_tokens=40)
        assert reading.wait(10)
        longer = [*messages, {"role": "assistant", "content": said(first)}, *messages]
        answers: list[Body] = []
        thread = threading.Thread(target=lambda: answers.append(ask(client, longer)))
        thread.start()
        with worker._changed:
            assert worker._changed.wait_for(lambda: worker._queue, 10)
        go.set()
        thread.join()
        assert cached(answers[0]) == first["usage"]["prompt_tokens"] - len("+assistant\n") + 4


def test_a_failure_to_read_ahead_costs_nobody_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any, **options: Any) -> int:
        raise ValueError("broken")

    monkeypatch.setattr("dflash2_mlx.server.ahead.read_ahead", fail)
    with served(roles_pair(), answer=Answerer(block_size=4)) as client:
        assert [said(answer) for answer in talk(client, 2)]
        assert client.get("/health").json()["status"] == "ok"


class Full:
    """A guard that lets in nothing of more than so many tokens."""

    def __init__(self, most: int) -> None:
        self.most = most

    def admit(self, num_tokens: int) -> None:
        if num_tokens > self.most:
            raise OutOfMemory(f"{num_tokens} tokens take 9.0 GiB, and 8.0 GiB may be used")

    def told(self) -> Body:
        return {"plan": {"context_tokens": 900}, "store": None}


def test_what_does_not_fit_into_memory_is_refused_and_the_next_request_served() -> None:
    """(M01, M07)"""
    pair = roles_pair()
    pair.guard = Full(100)  # type: ignore[assignment]
    with served(pair, answer=Answerer(block_size=4)) as client:
        body = {"messages": [{"role": "user", "content": "x" * 200}], "max_tokens": 20}
        refused = client.post("/v1/chat/completions", json=body)
        assert refused.status_code == 507
        assert refused.json()["error"]["code"] == "insufficient_memory"
        assert "9.0 GiB, and 8.0 GiB may be used" in refused.json()["error"]["message"]
        assert said(ask(client, [{"role": "user", "content": "hi"}]))


def test_health_shows_the_plan_and_what_is_kept() -> None:
    pair = roles_pair(budget=None)
    plan = plan_memory(pair, window=900)
    with served(pair, answer=Answerer(block_size=4)) as client:
        ask(client, [{"role": "user", "content": "hi"}])
        memory = client.get("/health").json()["memory"]
    assert memory["plan"] == asdict(plan)
    assert 0 < memory["store"]["used_bytes"] <= memory["store"]["budget_bytes"]
    assert memory["active_bytes"] > 0
