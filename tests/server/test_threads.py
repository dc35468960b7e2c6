"""Models live on one thread, whichever loads them, and are gone when they are unloaded."""

import gc
import threading
import weakref
from typing import Any

import pytest
from served import ChatTokenizer
from starlette.testclient import TestClient
from tiny import LLAMA as CONFIG
from tiny import ByteTokenizer, build_model, pair_of, tiny_drafter, tiny_pair

from dflash2_mlx.generation import generate
from dflash2_mlx.pair import Pair, join
from dflash2_mlx.sampling import SamplingParams
from dflash2_mlx.server.answer import Answerer
from dflash2_mlx.server.app import make_app
from dflash2_mlx.server.exchange import Desk
from dflash2_mlx.server.worker import Worker

WAIT_S = 20.0
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "temperature": 0}
PROMPT = ByteTokenizer().encode("hello there")


def chatting(pair: Pair) -> Pair:
    pair.tokenizer, pair.context_limit = ChatTokenizer(), 4096
    return pair


def answers_of(worker: Worker) -> list[str]:
    with TestClient(make_app(Desk(worker, ("tiny",))), base_url="http://localhost") as http:
        found = [http.post("/v1/chat/completions", json=BODY) for _ in range(2)]
        assert [answer.status_code for answer in found] == [200, 200]
        return [answer.json()["choices"][0]["message"]["content"] for answer in found]


# V01
@pytest.mark.parametrize("kind", ["dense", "sliding"])
def test_a_model_loaded_on_one_thread_or_the_other_answers_the_same(kind: str) -> None:
    ready = chatting(tiny_pair(kind))
    lone = generate(
        ready, ready.encode_chat(BODY["messages"]), SamplingParams(), max_tokens=6, block_size=4
    )
    answers = []
    for load in (lambda: ready, lambda: chatting(tiny_pair(kind))):
        worker = Worker(load, Answerer(4))
        worker.start()
        answers += answers_of(worker)
    assert answers == [lone.text] * 4


# V01
@pytest.mark.parametrize("kind", ["dense", "sliding"])
def test_the_library_may_be_called_from_any_thread(kind: str) -> None:
    pair = tiny_pair(kind)
    found: list[Any] = []

    def call() -> None:
        result = generate(pair, PROMPT, SamplingParams(), max_tokens=9, block_size=4)
        found.append(result.token_ids)

    call()
    for _ in range(2):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert found == [found[0]] * 3


# M11
def test_an_unloaded_pair_leaves_nothing_behind_and_the_next_request_loads_one() -> None:
    loaded: list[weakref.ref[Any]] = []

    def load() -> Pair:
        drafter = tiny_drafter()
        pair = chatting(pair_of(join(build_model("llama", CONFIG), drafter), drafter))
        loaded.extend((weakref.ref(pair), weakref.ref(pair.target.model)))
        return pair

    worker = Worker(load, Answerer(4), idle_unload_s=0.0)
    worker.start()
    with TestClient(make_app(Desk(worker, ("tiny",))), base_url="http://localhost") as http:
        for count in (1, 2, 3):
            assert http.post("/v1/chat/completions", json=BODY).status_code == 200
            assert worker.wait_for_state("unloaded", timeout_s=WAIT_S)
            gc.collect()
            assert [ref() for ref in loaded] == [None] * len(loaded)
            assert len(loaded) >= 2 * count
            assert http.get("/health").json()["status"] == "ok"
