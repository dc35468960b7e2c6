"""Between the event loop and the worker: a request goes there, its events come back."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from dflash2_mlx.dialogue.events import (
    Ask,
    Done,
    Event,
    Failed,
    Prefilling,
    Queued,
    Reasoning,
    Text,
    ToolArguments,
    ToolStart,
    Waiting,
    Writing,
)
from dflash2_mlx.dialogue.prompt import Prepared, prepare
from dflash2_mlx.errors import ModelNotFound
from dflash2_mlx.pair import Pair
from dflash2_mlx.server.job import Job
from dflash2_mlx.server.trial import try_grammar
from dflash2_mlx.server.worker import Worker

KEEPALIVE_S = 5.0  # agents give up on a silent stream after tens of seconds
EARLY_S = 0.04  # a refusal that comes this early still gets its own HTTP status
T = TypeVar("T")


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class Exchange:
    """The events of one request, in order: exactly one `Done` or `Failed`, at the end.

    Where a client was shown nothing for `keepalive_s`, what it waits for is told again.
    """

    def __init__(self, keepalive_s: float) -> None:
        self._keepalive_s = keepalive_s
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[Event] = asyncio.Queue()
        self._ahead: deque[Event] = deque()
        self._job: Job | None = None
        self._waiting: Waiting = Queued(0)
        self._shown_at = self._loop.time()

    def deliver(self, event: Event) -> None:
        """Take an event in, on any thread."""
        self._loop.call_soon_threadsafe(self._arrived.put_nowait, event)

    def belongs_to(self, job: Job) -> None:
        """The job whose events these are, to be cancelled by `close`."""
        self._job = job

    def close(self) -> None:
        """Give up, if it is not over."""
        if self._job is not None:
            self._job.cancel()

    def shown(self) -> None:
        """Something went to the client; events of which it sees nothing are no sign of life."""
        self._shown_at = self._loop.time()

    async def look_ahead(self) -> None:
        """Wait a moment for the first news; raises the error if that is what comes."""
        try:
            async with asyncio.timeout(EARLY_S):
                while not self._ahead or isinstance(self._ahead[-1], Queued):
                    self._ahead.append(await self._arrived.get())
        except TimeoutError:
            return
        if isinstance(self._ahead[-1], Failed):
            raise self._ahead[-1].error

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            event = await self._next()
            if event is None:
                yield self._waiting
                self.shown()
                event = await self._next(at_once=False)
                if event is None:
                    continue
            self._waiting = _waiting_behind(event)
            yield event
            if isinstance(event, Done | Failed):
                return

    async def _next(self, at_once: bool = True) -> Event | None:
        """The next event; None when the client has to be shown something first."""
        if self._ahead:
            return self._ahead.popleft()
        due = self._shown_at + self._keepalive_s
        if at_once and self._loop.time() >= due:
            return None
        try:
            async with asyncio.timeout_at(due):
                return await self._arrived.get()
        except TimeoutError:
            return None


def _waiting_behind(event: Event) -> Waiting:
    """What a client waits for once this has happened."""
    if isinstance(event, Queued) or (isinstance(event, Prefilling) and event.done < event.total):
        return event
    return Writing()


@dataclass(frozen=True, slots=True)
class Desk:
    """What all dialects share: the worker, and the names it answers to; first the one shown."""

    worker: Worker
    names: tuple[str, ...]
    keepalive_s: float = KEEPALIVE_S
    started: int = field(default_factory=lambda: int(time.time()))

    @property
    def model(self) -> str:
        """The name that answers carry."""
        return self.names[0]

    def check_model(self, name: str | None) -> None:
        """Raise `ModelNotFound` unless it is a name of the model that is served, or none."""
        if name and name != "default" and name not in self.names:
            raise ModelNotFound(f"model {name!r} is not served here; {self.model!r} is", "model")

    async def open(self, ask: Ask) -> Exchange:
        """Send a request to the worker.

        Raises `DFlashError` where it can be refused at once: for what it asks, or a full queue.
        """
        pair = self.worker.pair
        asked = ask if pair is None else await run_in_threadpool(_tried, pair, ask)
        exchange = Exchange(self.keepalive_s)
        exchange.belongs_to(self.worker.submit(asked, exchange.deliver))
        try:
            await exchange.look_ahead()
        except BaseException:
            exchange.close()
            raise
        return exchange


def _tried(pair: Pair, ask: Ask) -> Prepared:
    """A request made ready, with a grammar that this model can begin to obey."""
    prepared = prepare(pair, ask)
    if prepared.sampling.grammar is not None:
        try_grammar(pair, prepared.sampling.grammar)
    return prepared


@dataclass(slots=True)
class Call:
    """One tool call, whole."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Whole:
    """An answer, all of it; texts, thoughts and calls are joined."""

    done: Done
    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


async def collect(exchange: Exchange, request: Request) -> Whole:
    """The whole answer.

    Raises the `DFlashError` it failed with, and `ClientGone` when the client left.
    """
    return await attend(exchange, request, _gather(exchange))


async def attend(exchange: Exchange, request: Request, reading: Coroutine[Any, Any, T]) -> T:
    """What `reading` makes of the exchange; raises `ClientGone` when the client left."""
    gathering = asyncio.ensure_future(reading)
    leaving = asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait([gathering, leaving], return_when=asyncio.FIRST_COMPLETED)
        if gathering.done():
            return gathering.result()
        raise ClientGone
    finally:
        gathering.cancel()
        leaving.cancel()
        exchange.close()


async def _gather(exchange: Exchange) -> Whole:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Call] = []
    async for event in exchange:
        match event:
            case Text():
                texts.append(event.text)
            case Reasoning():
                thoughts.append(event.text)
            case ToolStart():
                calls.append(Call(event.id, event.name))
            case ToolArguments():
                calls[event.index].arguments += event.json
            case Failed():
                raise event.error
            case Done():
                return Whole(event, "".join(texts), "".join(thoughts), calls)
    raise AssertionError("an exchange ended without Done or Failed")


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
