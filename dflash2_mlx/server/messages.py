"""Anthropic's dialect, which Claude Code speaks: POST /v1/messages, and count_tokens below it."""

import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

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
    Usage,
    Writing,
)
from dflash2_mlx.dialogue.prompt import count_tokens
from dflash2_mlx.errors import ContextExceeded, DFlashError, InvalidRequest, ServerBusy
from dflash2_mlx.server import sse
from dflash2_mlx.server.body import read_body, refuse
from dflash2_mlx.server.chat import report
from dflash2_mlx.server.exchange import Desk, attend
from dflash2_mlx.server.failures import error_body
from dflash2_mlx.server.fields import read_form, read_stop, session_of
from dflash2_mlx.server.jsontext import JSONAnswer
from dflash2_mlx.server.messages_blocks import (
    Block,
    Payload,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from dflash2_mlx.server.messages_input import read_choice, read_messages, read_tools
from dflash2_mlx.server.shaping import plain

# Known fields and the values at which they ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {"mcp_servers": ([],), "container": ()}


class CountRequest(BaseModel):
    """The body of count_tokens, and what it shares with a request for an answer."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    messages: list[Any]
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


class MessagesRequest(CountRequest):
    """The body."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None

    def sampling(self) -> dict[str, Any]:
        """The fields that were set, with the engine's names."""
        given = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k")}
        given["stop"] = read_stop(self.stop_sequences)
        return {name: value for name, value in given.items() if value is not None}


def to_ask(body: CountRequest, session: str | None = None) -> Ask:
    """The request; raises `InvalidRequest` naming the field that is wrong or not supported."""
    refuse(body, UNSUPPORTED)
    box = read_tools(body.tools)
    history = read_messages(body.messages, body.system)
    skipped = ", ".join(dict.fromkeys(history.skipped))
    notes = (f"blocks of these kinds were skipped: {skipped}",) if skipped else ()
    template, thinking_notes = _thinking(body.thinking or {})
    output = body.output_config or {}
    if output.get("effort") is not None:
        template["reasoning_effort"] = output["effort"]
    asks_answer = isinstance(body, MessagesRequest)
    return Ask(
        messages=plain(history.messages),
        sampling=body.sampling() if isinstance(body, MessagesRequest) else {},
        max_tokens=body.max_tokens if isinstance(body, MessagesRequest) else None,
        tools=box.tools,
        tool_choice=read_choice(body.tool_choice, box),
        parallel_tool_calls=not (body.tool_choice or {}).get("disable_parallel_tool_use"),
        grammar=read_form(output.get("format"), "output_config.format") if asks_answer else None,
        template=template,
        session=session,
        notes=(*box.notes, *notes, *thinking_notes),
    )


def _thinking(thinking: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Variables of the template, and notes; adaptive and none leave it to the model."""
    match thinking.get("type", "adaptive"):
        case "enabled" | "between_tools":
            budget = thinking.get("budget_tokens")
            note = f"thinking.budget_tokens {budget}: taken as thinking on, without a limit"
            return {"enable_thinking": True}, () if budget is None else (note,)
        case "disabled":
            return {"enable_thinking": False}, ()
        case "adaptive":
            return {}, ()
        case other:
            raise InvalidRequest(
                f"thinking.type is {other!r}, expected enabled, adaptive or disabled", "thinking"
            )


async def messages(request: Request) -> Response:
    """The endpoint."""
    desk: Desk = request.app.state.desk
    body = await read_body(request, MessagesRequest)
    desk.check_model(body.model)
    ask = to_ask(body, session_of(request.headers))
    try:
        exchange = await desk.open(ask)
    except ContextExceeded as error:  # in the words by which Claude Code knows it
        raise ContextExceeded(f"prompt is too long: {error}", "messages") from None
    writer = Writer(desk.model, (body.thinking or {}).get("display") == "omitted", body.max_tokens)
    if body.stream:
        return sse.EventStream(exchange, stream(writer, exchange), _failed)
    return JSONAnswer(await attend(exchange, request, whole(writer, exchange)))


async def count(request: Request) -> Response:
    """The endpoint that counts a prompt's tokens, by the model's own template."""
    desk: Desk = request.app.state.desk
    body = await read_body(request, CountRequest)
    desk.check_model(body.model)
    pair = desk.worker.reading
    if pair is None:
        raise ServerBusy("the model could not be loaded yet; try again later")
    tokens = await run_in_threadpool(count_tokens, pair, to_ask(body))
    return JSONAnswer({"input_tokens": tokens})


async def stream(writer: "Writer", events: Any) -> AsyncIterator[str]:
    """Server-sent events of an answer, from message_start to message_stop, or to an error."""
    async for event in events:
        for payload in writer.feed(event):
            yield sse.data(payload, payload["type"])


def _failed(error: DFlashError) -> str:
    return sse.data(error_body(error, "/messages"), "error")


async def whole(writer: "Writer", events: Any) -> dict[str, Any]:
    """The answer in one object; raises the `DFlashError` it failed with."""
    async for event in events:
        if isinstance(event, Failed):
            raise event.error
        for _ in writer.feed(event):
            pass
        if isinstance(event, Done):
            return {**writer.message(), **writer.ending(event), **report(event)}
    raise AssertionError("an exchange ended without Done or Failed")


@dataclass(slots=True)
class Writer:
    """Turns the events of one answer into events of this dialect."""

    model: str
    omit_thinking: bool = False
    max_tokens: int | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _started: bool = False
    _blocks: list[Block] = field(default_factory=list)
    _open: Block | None = None

    def feed(self, event: Event) -> Iterator[Payload]:
        """What one event becomes; the first one also begins the message."""
        if not self._started:
            self._started = True
            total = event.total if isinstance(event, Prefilling) else 0
            counted = usage(Usage(total, 0))
            yield {"type": "message_start", "message": {**self.message(), "usage": counted}}
        yield from self._payloads(event)

    def message(self) -> dict[str, Any]:
        """The message as it is now, without its ending."""
        return {
            "id": f"msg_{self.id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [block.whole() for block in self._blocks],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def ending(self, done: Done) -> dict[str, Any]:
        """Why it ended, and what it took."""
        return {
            "stop_reason": self._reason(done),
            "stop_sequence": done.stop,
            "usage": usage(done.usage),
        }

    def _payloads(self, event: Event) -> Iterator[Payload]:
        match event:
            case Queued() | Prefilling() | Writing():
                yield {"type": "ping"}
            case Reasoning(text=text) if text:
                yield from self._add(text, ThinkingBlock(self.omit_thinking))
            case Text(text=text) if text:
                yield from self._add(text, TextBlock())
            case ToolStart():
                yield from self._begin(ToolUseBlock(event.id, event.name))
            case ToolArguments(json=text) if text:
                yield from self._deltas(text)
            case Done():
                yield from self._close()
                ending = self.ending(event)
                counted = ending.pop("usage")
                yield {"type": "message_delta", "delta": ending, "usage": counted, **report(event)}
                yield {"type": "message_stop"}
            case Failed(error=error):
                yield error_body(error, "/messages")

    def _add(self, text: str, fresh: Block) -> Iterator[Payload]:
        """A piece more of the open block, or of a fresh one where that is of another type."""
        if type(self._open) is not type(fresh):
            yield from self._begin(fresh)
        yield from self._deltas(text)

    def _begin(self, block: Block) -> Iterator[Payload]:
        yield from self._close()
        self._open = block
        self._blocks.append(block)
        yield self._event("content_block_start", content_block=block.start())

    def _deltas(self, text: str) -> Iterator[Payload]:
        assert self._open is not None
        for delta in self._open.add(text):
            yield self._event("content_block_delta", delta=delta)

    def _close(self) -> Iterator[Payload]:
        if self._open is not None:
            for delta in self._open.end():
                yield self._event("content_block_delta", delta=delta)
            yield self._event("content_block_stop")
            self._open = None

    def _event(self, kind: str, **more: Any) -> Payload:
        return {"type": kind, "index": len(self._blocks) - 1, **more}

    def _reason(self, done: Done) -> str:
        if done.finish == "tool_calls":
            return "tool_use"
        if done.finish == "stop":
            return "end_turn" if done.stop is None else "stop_sequence"
        short = self.max_tokens is not None and done.usage.completion < self.max_tokens
        return "model_context_window_exceeded" if short else "max_tokens"


def usage(counts: Usage) -> dict[str, Any]:
    """Anthropic's usage: cached tokens are no part of `input_tokens`."""
    return {
        "input_tokens": counts.prompt - counts.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached,
        "output_tokens": counts.completion,
        "output_tokens_details": {"thinking_tokens": counts.reasoning},
    }
