"""A crowd of clients on raw sockets, some of which leave early; all that they see is counted."""

import json
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

WAIT_S = 600.0
LATEST_S = 0.3  # within which a client that streams nothing breaks off
# Of a stream, what a client waits for before it leaves.
STAGES: dict[str, bytes | None] = {
    "queued": None,
    "prefill": b'"prefill":[',
    "decode": b'"delta":{"content":"',
}
BAD: tuple[Any, ...] = (
    {"top_p": 7},
    {"temperature": -1},
    {"n": 3},
    {"messages": []},
    {"messages": [{"role": "nobody", "content": "a"}]},
    {"max_tokens": 0},
    {"messages": [{"role": "user", "content": "x " * 9000}]},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "odd"}}}},
    {"model": "nope"},
    b"{",
    b"[]",
)


class Crowd:
    """Clients of one address, which send `texts` with known answers."""

    def __init__(self, address: tuple[str, int], texts: list[str], num_tokens: int) -> None:
        self.address, self.texts, self.num_tokens = address, texts, num_tokens
        self.known: dict[str, str] = {}
        self.seen: Counter[str] = Counter()
        self.faults: list[str] = []

    def run(self, num_requests: int, num_clients: int, num_bad: float, seed: int = 0) -> None:
        """Send all requests; a third is broken off, a share of `num_bad` is bad."""

        def client(number: int) -> None:
            rng = random.Random(1000 * seed + number)
            for _ in range(num_requests // num_clients):
                self._try(rng, num_bad)

        threads = [threading.Thread(target=client, args=(n,)) for n in range(num_clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def learn(self) -> None:
        """What each text is answered when nobody else asks."""
        self.known = {text: self.whole(text) for text in self.texts}

    def whole(self, text: str) -> str:
        """An answer in one piece."""
        with self.sent(self.body(text)) as connection:
            received = everything(connection)
        content: str = json.loads(received.partition(b"\r\n\r\n")[2])["choices"][0]["message"][
            "content"
        ]
        return content

    def streamed(self, text: str) -> str:
        """The same in pieces, put together; raises `ValueError` where its end is missing."""
        with self.sent(self.body(text, stream=True)) as connection:
            received = everything(connection)
        lines = [line for line in received.splitlines() if line.startswith(b"data: ")]
        if lines[-1:] != [b"data: [DONE]"]:
            raise ValueError(f"a stream ended in {lines[-1:]}")
        chunks = [json.loads(line[6:]) for line in lines[:-1]]
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
        if sum(choice["finish_reason"] is not None for choice in choices) != 1:
            raise ValueError("a stream has not exactly one finish_reason")
        return "".join(choice["delta"].get("content") or "" for choice in choices)

    def body(self, text: str, **more: Any) -> dict[str, Any]:
        """A greedy request."""
        messages = [{"role": "user", "content": text}]
        return {"messages": messages, "max_tokens": self.num_tokens, "temperature": 0, **more}

    @contextmanager
    def sent(self, body: dict[str, Any] | bytes) -> Iterator[socket.socket]:
        """A connection that has sent a request; it is closed hard at the end."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        with socket.create_connection(self.address, timeout=WAIT_S) as connection:
            connection.sendall(head.encode() + content)
            yield connection

    def _try(self, rng: random.Random, num_bad: float) -> None:
        text, fate = rng.choice(self.texts), rng.random()
        try:
            if rng.random() < num_bad:
                self._send_bad(rng.choice(BAD))
            elif fate < 0.33:
                self._leave(text, rng)
            else:
                self._stay(text, self.streamed if fate < 0.7 else self.whole)
        except Exception as error:
            self.seen["lost"] += 1
            self.faults.append(f"lost: {type(error).__name__}: {error}")
            print(self.faults[-1], file=sys.stderr)

    def _send_bad(self, bad: dict[str, Any] | bytes) -> None:
        body = bad if isinstance(bad, bytes) else {**self.body("a"), **bad}
        with self.sent(body) as connection:
            head = everything(connection)[:16]
        self.seen["refused" if b" 400 " in head or b" 404 " in head else "not refused"] += 1

    def _leave(self, text: str, rng: random.Random) -> None:
        stage = rng.choice(["whole", *STAGES])
        with self.sent(self.body(text, stream=stage != "whole")) as connection:
            if stage == "whole":
                time.sleep(rng.uniform(0, LATEST_S))
            elif mark := STAGES[stage]:
                received = b""
                while mark not in received and (piece := connection.recv(4096)):
                    received += piece
        self.seen[f"broken off: {stage}"] += 1

    def _stay(self, text: str, ask: Callable[[str], str]) -> None:
        said = ask(text)
        self.seen["right" if said == self.known[text] else "wrong"] += 1
        if said != self.known[text]:
            self.faults.append(f"wrong: {said!r}, expected {self.known[text]!r}")


def everything(connection: socket.socket) -> bytes:
    """What comes until the server closes."""
    return b"".join(iter(lambda: connection.recv(65536), b""))
