"""A server in process: a tiny real model that says what a script makes of its prompt."""

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from byte_bpe import byte_bpe
from mlx_lm.tokenizer_utils import TokenizerWrapper
from starlette.testclient import TestClient
from tiny import END, VOCAB, ByteTokenizer, ScriptedDrafter, pair_of, tiny_pair, tiny_target

from dflash2_mlx.pair import Pair
from dflash2_mlx.server.answer import Answerer
from dflash2_mlx.server.app import make_app
from dflash2_mlx.server.exchange import Desk
from dflash2_mlx.server.rules import Rules
from dflash2_mlx.server.run import bind, make_server
from dflash2_mlx.server.worker import Answer, Worker
from dflash2_mlx.target import Target

ANSWER = 257  # the special token that ends every prompt
Script = Callable[[str], str]


class ChatTokenizer(ByteTokenizer):
    """Bytes, with a chat format as plain as it gets: `role: content` lines, then `ANSWER`."""

    think_start: str | None = None
    think_end: str | None = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [*text.encode(), *([ANSWER] if add_special_tokens else [])]

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], tokenize: bool = True, **variables: Any
    ) -> Any:
        tools = [str(tool["function"]) + "\n" for tool in variables.get("tools") or ()]
        text = "".join([*tools, *(self._line(message) for message in messages)])
        if variables.get("continue_final_message"):
            return [*text.removesuffix("\n").encode(), ANSWER]
        return [*text.encode(), ANSWER] if tokenize else text

    def _line(self, message: dict[str, Any]) -> str:
        calls = "".join(str(call["function"]) for call in message.get("tool_calls") or ())
        return f"{message['role']}: {message['content']}{calls}\n"


class SayingTarget(Target):
    """A real tiny model whose logits are replaced: it says `script(prompt)`, then the end.

    `before_read` is called on the worker's thread with the number of tokens of every forward.
    """

    def __init__(self, script: Script) -> None:
        super().__init__(tiny_target("dense"), taps=[0])
        self.script = script
        self.before_read: Callable[[int], None] = lambda count: None
        self._seen: list[int] = []

    def read(self, tokens: mx.array, caches: list[Any], **options: Any) -> Any:
        self.before_read(tokens.size)
        position = caches[0].offset
        reading = super().read(tokens, caches, **options)
        self._seen = [*self._seen[:position], *tokens.tolist()]
        chosen = [self._next(self._seen[: position + n]) for n in range(1, tokens.size + 1)]
        return dataclasses.replace(reading, logits=mx.eye(VOCAB)[mx.array(chosen)] * 50)

    def _next(self, seen: list[int]) -> int:
        if ANSWER not in seen:
            return END
        start = len(seen) - seen[::-1].index(ANSWER)
        prompt = bytes(token for token in seen[: start - 1] if token < 256).decode()
        said, place = [*self.script(prompt).encode(), END], len(seen) - start
        return said[place] if place < len(said) else END


def last_line(prompt: str) -> str:
    """The script of most tests: says back what the user said last."""
    return prompt.splitlines()[-1].removeprefix("user: ")


def saying_pair(script: Script = last_line, tokenizer: Any = None, **options: Any) -> Pair:
    """A pair that says what the script wants; every other draft is wrong at its third token."""
    target = SayingTarget(script)

    def propose(position: int, width: int) -> list[int]:
        drafts: list[int] = []
        for _ in range(width - 1):
            drafts.append(target._next([*target._seen[: position + 1], *drafts]))
        return [*drafts[:2], *[65] * len(drafts[2:])]

    options.setdefault("context_limit", 4096)
    pair = pair_of(target, ScriptedDrafter(propose), **options)
    pair.tokenizer = tokenizer or ChatTokenizer()
    return pair


def random_pair() -> Pair:
    """A pair of random models with a tokenizer that grammars can use."""
    pair = tiny_pair()
    inner = byte_bpe()
    inner = type(inner)(tokenizer_object=inner._tokenizer, eos_token="<end>")
    inner.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    pair.tokenizer = TokenizerWrapper(inner)
    pair.context_limit = 4096
    return pair


@contextmanager
def served(
    pair: Pair | None = None,
    *,
    rules: Rules | None = None,
    keepalive_s: float = 5.0,
    answer: Answer | None = None,
    **options: Any,
) -> Iterator[TestClient]:
    """A client of a running server; `client.app.state.desk.worker` is its worker."""
    pair = pair or saying_pair()
    worker = Worker(lambda: pair, answer or Answerer(), **options)
    worker.start()
    worker.wait_until_loaded()
    desk = Desk(worker, ("tiny", "tiny-folder"), keepalive_s)
    app = make_app(desk, rules)
    with TestClient(app, base_url="http://localhost:8080") as client:
        yield client


@contextmanager
def running(
    pair: Pair | None = None, rules: Rules | None = None, **options: Any
) -> Iterator[tuple[Any, Worker, Any]]:
    """The same on a real socket; yields its address, its worker, and uvicorn's server."""
    pair = pair or saying_pair()
    worker = Worker(lambda: pair, Answerer(), **options)
    worker.start()
    worker.wait_until_loaded()
    app = make_app(Desk(worker, ("tiny",)), rules)
    with bind("127.0.0.1", 0) as sock:
        sock.listen()  # who connects before the server accepts waits for it
        server = make_server(app, worker)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            yield sock.getsockname(), worker, server
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def listening(pair: Pair | None = None, **options: Any) -> Iterator[tuple[Any, Worker]]:
    """Address and worker of a server on a real socket."""
    with running(pair, **options) as (address, worker, _):
        yield address, worker


def chunks(response: Any) -> list[Any]:
    """The JSON of every `data:` line of a stream, and `[DONE]`."""
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
