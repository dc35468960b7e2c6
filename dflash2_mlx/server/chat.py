"""POST /v1/chat/completions: OpenAI's chat, as most clients speak it."""

import time
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response

import dflash2_mlx
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
    Waiting,
    Writing,
)
from dflash2_mlx.errors import InvalidRequest
from dflash2_mlx.server import sse
from dflash2_mlx.server.body import read_body, refuse
from dflash2_mlx.server.exchange import Desk, Whole, collect
from dflash2_mlx.server.failures import failed_sse
from dflash2_mlx.server.fields import read_choice, read_form, read_stop, read_tools, session_of
from dflash2_mlx.server.jsontext import JSONAnswer
from dflash2_mlx.server.shaping import plain

# Known fields and the values at which they ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "store": (False,),
    "audio": (),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "web_search_options": (),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1.0, 1),
    "typical_p": (1.0, 1),
    "xtc_probability": (0.0, 0),
    "mirostat": (0,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
}


class SamplingFields(BaseModel):
    """How tokens are chosen, with OpenAI's names and llama.cpp's, vLLM's and mlx-lm's additions."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_context_size: int | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    prompt_cache_key: str | None = None

    def sampling(self) -> dict[str, Any]:
        """The fields that were set, with the engine's names."""
        same = ("temperature", "top_p", "min_p", "seed")
        penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        given = {name: getattr(self, name) for name in (*same, *penalties)}
        given["top_k"] = 0 if self.top_k == -1 else self.top_k  # vLLM's way to say all
        given["penalty_context"] = self.repetition_context_size
        given["logit_bias"] = _bias(self.logit_bias)
        given["stop"] = read_stop(self.stop)
        return {name: value for name, value in given.items() if value is not None}

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool((self.stream_options or {}).get("include_usage"))


class ChatRequest(SamplingFields):
    """The body."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def sampling(self) -> dict[str, Any]:
        """The fields that were set, with the engine's names."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
        scored = {"logprobs": self.top_logprobs or 0} if self.logprobs else {}
        return {**super().sampling(), **scored}


def to_ask(body: ChatRequest, session: str | None = None) -> Ask:
    """The request; raises `InvalidRequest` naming the field that is wrong or not supported."""
    refuse(body, UNSUPPORTED)
    choice, box = read_choice(body.tool_choice, read_tools(body.tools))
    levels = {"reasoning_effort": body.reasoning_effort, "enable_thinking": body.enable_thinking}
    given = {name: value for name, value in levels.items() if value is not None}
    max_tokens = body.max_completion_tokens
    return Ask(
        messages=plain(body.messages),
        sampling=body.sampling(),
        max_tokens=body.max_tokens if max_tokens is None else max_tokens,
        tools=box.tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        grammar=read_form(body.response_format, "response_format"),
        template={**given, **(body.chat_template_kwargs or {})},
        session=session,
        notes=box.notes,
    )


async def chat(request: Request) -> Response:
    """The endpoint."""
    desk: Desk = request.app.state.desk
    body = await read_body(request, ChatRequest)
    desk.check_model(body.model)
    exchange = await desk.open(to_ask(body, session_of(request.headers, body.prompt_cache_key)))
    head = Head(desk.model)
    if body.stream:
        lines = stream(head, exchange, body.include_usage)
        return sse.EventStream(exchange, lines, failed_sse)
    return JSONAnswer(whole(head, await collect(exchange, request)))


@dataclass(frozen=True, slots=True)
class Head:
    """What every piece of one answer carries."""

    model: str
    prefix: str = "chatcmpl"
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def object(self, kind: str, **content: Any) -> dict[str, Any]:
        """An object of this answer."""
        return {
            "id": f"{self.prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"dflash2-mlx-{dflash2_mlx.__version__}",
            **content,
        }


async def stream(
    head: Head, events: AsyncIterable[Event], include_usage: bool
) -> AsyncIterator[str]:
    """Server-sent events of an answer: role, deltas, one finishing chunk, usage if asked, DONE.

    While it waits it says so, in a comment and in an empty delta.
    """

    def chunk(delta: Mapping[str, Any], finish: str | None = None, **more: Any) -> str:
        logprobs = more.pop("logprobs", None)
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return sse.data(head.object("chat.completion.chunk", choices=[choice], **more))

    yield chunk({"role": "assistant", "content": ""})
    async for event in events:
        match event:
            case Queued() | Prefilling() | Writing():
                yield sse.comment(waiting(event))
                yield chunk({}, dflash=progress(event))
            case Reasoning(text=text):
                yield chunk({"reasoning_content": text}, dflash=_origin(event))
            case Text():
                if event.text:
                    yield chunk({"content": event.text}, dflash=_origin(event))
            case ToolStart() | ToolArguments():
                yield chunk({"tool_calls": [_call_delta(event)]})
            case Failed(error=error):
                yield failed_sse(error)
                return
            case Done():
                if event.logprobs is not None:
                    yield chunk({}, logprobs=_logprobs(event))
                yield chunk({}, event.finish, **report(event))
                if include_usage:
                    usage_chunk = head.object("chat.completion.chunk", choices=[])
                    yield sse.data({**usage_chunk, "usage": usage(event.usage)})
    yield sse.DONE


def whole(head: Head, answer: Whole) -> dict[str, Any]:
    """The answer in one object."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": answer.text if answer.text or not answer.calls else None,
        "refusal": None,
    }
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in answer.calls
        ]
    choice = {
        "index": 0,
        "message": message,
        "logprobs": _logprobs(answer.done),
        "finish_reason": answer.done.finish,
    }
    return head.object(
        "chat.completion", choices=[choice], usage=usage(answer.done.usage), **report(answer.done)
    )


def usage(counts: Usage) -> dict[str, Any]:
    """OpenAI's usage, drafted tokens included."""
    return {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.completion,
        "total_tokens": counts.prompt + counts.completion,
        "prompt_tokens_details": {"cached_tokens": counts.cached},
        "completion_tokens_details": {
            "reasoning_tokens": counts.reasoning,
            "accepted_prediction_tokens": counts.accepted,
            "rejected_prediction_tokens": counts.rejected,
        },
    }


def report(done: Done) -> dict[str, Any]:
    """How the answer was made: llama.cpp's timings, and our state with notes."""
    return {
        "timings": dict(done.timings),
        "dflash": {**done.effective, "notes": list(done.notes)},
    }


def waiting(event: Waiting) -> str:
    """What a client waits for, in words."""
    match event:
        case Queued(position=position):
            return f"queued, {position} before this one"
        case Prefilling(done=done, total=total):
            return f"prefill {done}/{total}"
        case Writing():
            return "writing"


def progress(event: Waiting) -> dict[str, Any]:
    """The same for programs; an answer that is written needs no figures."""
    match event:
        case Queued(position=position):
            return {"queued": position}
        case Prefilling(done=done, total=total):
            return {"prefill": [done, total]}
        case Writing():
            return {}


def _origin(event: Text | Reasoning) -> dict[str, int]:
    return {"tokens": event.tokens, "from_draft": event.from_draft}


def _call_delta(event: ToolStart | ToolArguments) -> dict[str, Any]:
    if isinstance(event, ToolArguments):
        return {"index": event.index, "function": {"arguments": event.json}}
    function = {"name": event.name, "arguments": ""}
    return {"index": event.index, "id": event.id, "type": "function", "function": function}


def _logprobs(done: Done) -> dict[str, Any] | None:
    if done.logprobs is None:
        return None
    return {"content": [dict(entry) for entry in done.logprobs], "refusal": None}


def _bias(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    if not bias:
        return None
    if strange := [token for token in bias if not token.isascii() or not token.isdigit()]:
        raise InvalidRequest(f"logit_bias names {strange[0]!r}, expected token ids", "logit_bias")
    return {int(token): value for token, value in bias.items()}
