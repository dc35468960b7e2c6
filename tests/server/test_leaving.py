"""A client that leaves stops its work, in every state, and harms nobody else. On real sockets."""

import json
import random
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from served import last_line, listening, running, saying_pair

LONG = "a long answer " * 250
WAIT_S = 20.0
NUM_TURNS = 12  # of each of 8 clients


def script(prompt: str) -> str:
    said = last_line(prompt)
    return LONG if said.startswith("long") else said


def request(text: str, path: str = "/v1/chat/completions", **body: Any) -> bytes:
    content = json.dumps({"messages": [{"role": "user", "content": text}], **body}).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Connection: close"]
    lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


@contextmanager
def sent(address: Any, text: str, **body: Any) -> Iterator[socket.socket]:
    """A connection that has sent a request; it is closed hard at the end."""
    with socket.create_connection(address[:2], timeout=WAIT_S) as connection:
        connection.sendall(request(text, **body))
        yield connection


def answer(address: Any, text: str, **body: Any) -> str:
    """What a request is answered, whole."""
    with sent(address, text, **body) as connection:
        received = everything(connection)
    head, _, rest = received.partition(b"\r\n\r\n")
    assert b" 200 " in head.splitlines()[0], received
    return json.loads(rest)["choices"][0]["message"]["content"]


def everything(connection: socket.socket) -> bytes:
    """What comes until the server closes."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


class Gate:
    """Stands before every forward: lets `ahead` of them pass, then waits for its job's end."""

    def __init__(self, worker: Any, ahead: int) -> None:
        self.worker, self.ahead = worker, ahead
        self.reached = threading.Event()
        self.passed = 0

    def __call__(self, count: int) -> None:
        self.passed += 1
        if self.passed > self.ahead:
            job = self.worker._running
            self.reached.set()
            assert job._cancelled.wait(WAIT_S), "nobody noticed that the client left"


# V23, V26
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("ahead", [0, 3], ids=["prefill", "decode"])
def test_work_stops_within_one_chunk_or_pass_when_its_client_leaves(
    monkeypatch: pytest.MonkeyPatch, stream: bool, ahead: int
) -> None:
    monkeypatch.setattr("dflash2_mlx.decode.PREFILL_STEP", 10_000 if ahead else 16)
    pair = saying_pair(script)
    with listening(pair) as (address, worker):
        pair.target.before_read = gate = Gate(worker, ahead)
        with sent(address, "long" + " x" * 200, stream=stream):
            assert gate.reached.wait(WAIT_S)
        assert worker.wait_for_state("ready", timeout_s=WAIT_S)
        # In decode the next pass is in flight already when the step before it is handed over.
        assert gate.passed <= ahead + 2
        assert worker.tally.outcomes == {"cancelled": 1}
        pair.target.before_read = lambda count: None
        assert answer(address, "ok?") == "ok?"
        assert worker.health().running == 0


# V23
@pytest.mark.parametrize("stream", [True, False])
def test_a_waiting_request_whose_client_leaves_never_runs(stream: bool) -> None:
    pair = saying_pair(script)
    with listening(pair) as (address, worker):
        go, started = threading.Event(), threading.Event()

        def before_read(count: int) -> None:
            started.set()
            assert go.wait(WAIT_S)

        pair.target.before_read = before_read
        with sent(address, "first", stream=False) as first:
            assert started.wait(WAIT_S)
            with sent(address, "second", stream=stream):
                wait_until(worker, lambda: len(worker._queue) == 1)
                waiting = worker._queue[0]
            assert waiting._cancelled.wait(WAIT_S)
            wait_until(worker, lambda: not worker._queue)
            go.set()
            assert b"first" in everything(first)
        assert worker.wait_for_state("ready", timeout_s=WAIT_S)
        assert worker.tally.outcomes == {"cancelled": 1, "done": 1}


# V24
def test_twenty_streams_that_break_off_leave_twenty_good_answers_behind() -> None:
    with listening(saying_pair(script)) as (address, worker):
        for number in range(20):
            with sent(address, "long", stream=True) as connection:
                received = b""
                while received.count(b'"content":') < 3:
                    received += connection.recv(4096)
            assert answer(address, f"ok {number}?") == f"ok {number}?"
        assert worker.wait_for_state("ready", timeout_s=WAIT_S)
        assert worker.tally.outcomes["done"] == 20
        assert worker.tally.outcomes["cancelled"] == 20
        assert worker.health().restarts == 0


def test_ctrl_c_ends_running_and_waiting_answers_with_an_error_and_then_the_server() -> None:
    pair = saying_pair(script)
    with running(pair) as (address, worker, server):
        started = threading.Event()

        def before_read(count: int) -> None:
            started.set()

        pair.target.before_read = before_read
        with sent(address, "long", stream=True) as first, sent(address, "b") as second:
            assert started.wait(WAIT_S)
            wait_until(worker, lambda: len(worker._queue) == 1)
            server.handle_exit(signal.SIGINT, None)
            streamed, whole = everything(first), everything(second)
        assert b"shutting down" in streamed
        assert b"[DONE]" not in streamed
        assert whole.startswith(b"HTTP/1.1 503 ")
    assert worker.health().state == "closed"


@pytest.mark.parametrize("seed", [1, 2])
def test_a_crowd_with_random_departures_gets_every_answer_right(seed: int) -> None:
    faults: list[str] = []

    def client(number: int) -> None:
        rng = random.Random(seed * 100 + number)
        for turn in range(NUM_TURNS):
            text, fate = f"client {number} turn {turn}", rng.random()
            if fate < 0.35:
                stream = fate < 0.2
                with sent(address, "long" if fate < 0.3 else text, stream=stream) as connection:
                    for _ in range(rng.randrange(4) if stream else 0):
                        connection.recv(1024)
            elif fate < 0.45:
                with sent(address, text, temperature=-1) as connection:
                    if b" 400 " not in connection.recv(4096):
                        faults.append(f"{text}: a bad request was not refused")
            elif (said := answer(address, text)) != text:
                faults.append(f"{text}: {said}")

    with listening(saying_pair(script), max_queue=64) as (address, worker):
        threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert faults == []
        # A request whose client left before it was read may still pass through.
        wait_until(worker, lambda: worker._running is None and not worker._queue)
        assert worker.health().restarts == 0
        assert worker.tally.outcomes["failed"] == 0
        assert worker.tally.outcomes["done"] > 0


def wait_until(worker: Any, condition: Any) -> None:
    with worker._changed:
        assert worker._changed.wait_for(condition, WAIT_S)
