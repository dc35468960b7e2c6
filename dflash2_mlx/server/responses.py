"""POST /v1/responses, stateless: OpenAI's newer dialect, the only one that Codex speaks."""

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

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
from dflash2_mlx.errors import ContextExceeded, DFlashError, UnsupportedField
from dflash2_mlx.server import sse
from dflash2_mlx.server.body import read_body, refuse
from dflash2_mlx.server.chat import UNSUPPORTED as CHAT_UNSUPPORTED
from dflash2_mlx.server.chat import SamplingFields, progress, report
from dflash2_mlx.server.exchange import Desk, attend
from dflash2_mlx.server.fields import read_choice, read_form, read_tools, session_of
from dflash2_mlx.server.jsontext import JSONAnswer
from dflash2_mlx.server.responses_input import flat_tools, namespaces, read_input
from dflash2_mlx.server.responses_items import CallItem, Item, MessageItem, Payload, ReasoningItem
from dflash2_mlx.server.shaping import plain

# Known fields and the values at which they ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **{name: values for name, values in CHAT_UNSUPPORTED.items() if name != "store"},
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "truncation": ("disabled",),
    "context_management": ([],),
    "top_logprobs": (0,),
    "moderation": (),
}


class ResponsesRequest(SamplingFields):
    """The body. Nothing is stored, whatever `store` says; the answer says so."""

    input: str | list[Any]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wants_summary(self) -> bool:
        """Whether reasoning is to come as a summary: clients that ask for one read nothing else."""
        return bool((self.reasoning or {}).get("summary"))


def to_ask(body: ResponsesRequest, session: str | None = None) -> Ask:
    """The request; raises `InvalidRequest` naming the field that is wrong or not supported."""
    refuse(body, UNSUPPORTED)
    if "message.output_text.logprobs" in (body.include or ()):
        raise UnsupportedField("include: log probabilities are in /v1/chat/completions", "include")
    choice, box = read_choice(body.tool_choice, read_tools(flat_tools(body.tools)))
    history = read_input(body.input, body.instructions)
    skipped = ", ".join(dict.fromkeys(history.skipped))
    notes = (f"input items of these kinds were skipped: {skipped}",) if skipped else ()
    effort = (body.reasoning or {}).get("effort")
    template = {} if effort is None else {"reasoning_effort": effort}
    limit = body.max_output_tokens
    return Ask(
        messages=plain(history.messages),
        sampling=body.sampling(),
        max_tokens=body.max_tokens if limit is None else limit,
        tools=box.tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        grammar=read_form((body.text or {}).get("format"), "text.format"),
        template={**template, **(body.chat_template_kwargs or {})},
        session=session,
        notes=(*box.notes, *notes),
    )


async def responses(request: Request) -> Response:
    """The endpoint."""
    desk: Desk = request.app.state.desk
    body = await read_body(request, ResponsesRequest)
    desk.check_model(body.model)
    ask = to_ask(body, session_of(request.headers, body.prompt_cache_key))
    writer = Writer(desk.model, body, ask)
    try:
        exchange = await desk.open(ask)
    except ContextExceeded as error:
        if not body.stream:
            raise
        # Codex takes only this event, and no status, as a sign to shorten its conversation.
        return StreamingResponse(
            stream(writer, _only(Failed(error))), media_type="text/event-stream"
        )
    if body.stream:
        return sse.EventStream(exchange, stream(writer, exchange), writer.failed)
    return JSONAnswer(await attend(exchange, request, whole(writer, exchange)))


async def stream(writer: "Writer", events: Any) -> AsyncIterator[str]:
    """Server-sent events of an answer; `response.completed`, or how else it ended, is the last."""
    for payload in writer.start():
        yield sse.data(payload, payload["type"])
    async for event in events:
        for payload in writer.feed(event):
            yield sse.data(payload, payload["type"])


async def whole(writer: "Writer", events: Any) -> dict[str, Any]:
    """The answer in one object; raises the `DFlashError` it failed with."""
    last: Payload = {}
    async for event in events:
        if isinstance(event, Failed):
            raise event.error
        for payload in writer.feed(event):
            last = payload
    response: dict[str, Any] = last["response"]
    return response


@dataclass(slots=True)
class Writer:
    """Turns the events of one answer into numbered events of this dialect."""

    model: str
    body: ResponsesRequest
    ask: Ask
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    _items: list[Item] = field(default_factory=list)
    _open: Item | None = None
    _sent: int = 0

    def start(self) -> Iterator[Payload]:
        """What comes at once."""
        for kind in ("response.created", "response.in_progress"):
            yield from self._numbered([self._event(kind, "in_progress")])

    def feed(self, event: Event) -> Iterator[Payload]:
        """What one event becomes, nothing included."""
        yield from self._numbered(self._payloads(event))

    def failed(self, error: DFlashError) -> str:
        """The last event of an answer that could not be written to its end."""
        (payload,) = self.feed(Failed(error))
        return sse.data(payload, payload["type"])

    def _numbered(self, payloads: Any) -> Iterator[Payload]:
        for payload in payloads:
            yield {**payload, "sequence_number": self._sent}
            self._sent += 1

    def _payloads(self, event: Event) -> Iterator[Payload]:
        match event:
            case Queued() | Prefilling() | Writing():
                # An event and no comment: only events keep Codex from giving up.
                told = progress(event)
                yield self._event("response.in_progress", "in_progress", dflash=told)
            case Reasoning(text=text) if text:
                yield from self._add(
                    text, ReasoningItem(*self._next("rs"), self.body.wants_summary)
                )
            case Text(text=text) if text:
                yield from self._add(text, MessageItem(*self._next("msg")))
            case ToolStart():
                yield from self._begin(self._call(event))
            case ToolArguments(json=text) if self._open is not None and text:
                yield from self._open.add(text)
            case Done():
                yield from self._end(event)
            case Failed(error=error):
                yield self._event("response.failed", "failed", error=_error(error))

    def _add(self, text: str, fresh: Item) -> Iterator[Payload]:
        """A piece more of the open item, or of a fresh one where that is of another type."""
        if type(self._open) is not type(fresh):
            yield from self._begin(fresh)
        assert self._open is not None
        yield from self._open.add(text)

    def _begin(self, item: Item) -> Iterator[Payload]:
        yield from self._close("completed")
        self._open = item
        self._items.append(item)
        yield from item.open()

    def _call(self, start: ToolStart) -> CallItem:
        namespace, name = namespaces(self.body.tools).get(start.name, (None, start.name))
        return CallItem(*self._next("fc"), start.id, name, namespace)

    def _next(self, prefix: str) -> tuple[str, int]:
        """Id and place of the next item."""
        return f"{prefix}_{self.id}_{len(self._items)}", len(self._items)

    def _close(self, status: str) -> Iterator[Payload]:
        if self._open is not None:
            yield from self._open.close(status)
            self._open = None

    def _end(self, done: Done) -> Iterator[Payload]:
        cut = done.finish == "length"
        status = "incomplete" if cut else "completed"
        items = [item.item("completed") for item in self._items[:-1]]
        items += [item.item(status) for item in self._items[-1:]]
        yield from self._close(status)
        more: dict[str, Any] = {"usage": usage(done.usage), "output": items, **report(done)}
        if cut:
            more["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            more["completed_at"] = int(time.time())
        yield self._event(f"response.{status}", status, **more)

    def _event(self, kind: str, status: str, **more: Any) -> Payload:
        return {"type": kind, "response": self._response(status, **more)}

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        body, ask = self.body, self.ask
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.model,
            "output": [],
            "usage": None,
            "error": None,
            "incomplete_details": None,
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": ask.max_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": ask.parallel_tool_calls,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": body.reasoning,
            "store": False,
            "temperature": body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [_tool(tool) for tool in ask.tools],
            "top_p": body.top_p,
            "truncation": "disabled",
            **more,
        }


def usage(counts: Usage) -> dict[str, Any]:
    """This dialect's usage, drafted tokens included."""
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
        "output_tokens": counts.completion,
        "output_tokens_details": {
            "reasoning_tokens": counts.reasoning,
            "accepted_prediction_tokens": counts.accepted,
            "rejected_prediction_tokens": counts.rejected,
        },
        "total_tokens": counts.prompt + counts.completion,
    }


def _tool(tool: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
        "strict": tool.strict,
    }


def _error(error: DFlashError) -> Mapping[str, Any]:
    code = error.code if isinstance(error, ContextExceeded) else "server_error"
    return {"code": code, "message": str(error)}


async def _only(event: Event) -> AsyncIterator[Event]:
    yield event
