"""POST /v1/completions: raw text goes on, without a chat template."""

from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dflash2_mlx.dialogue.events import Ask, Done, Event, Failed, Prefilling, Queued, Text, Writing
from dflash2_mlx.errors import InvalidRequest
from dflash2_mlx.server import sse
from dflash2_mlx.server.body import read_body, refuse
from dflash2_mlx.server.chat import UNSUPPORTED, Head, SamplingFields, report, usage, waiting
from dflash2_mlx.server.exchange import Desk, Whole, collect
from dflash2_mlx.server.failures import failed_sse
from dflash2_mlx.server.fields import session_of
from dflash2_mlx.server.jsontext import JSONAnswer

RAW_UNSUPPORTED = {**UNSUPPORTED, "echo": (False,), "suffix": ("",)}


class CompletionRequest(SamplingFields):
    """The body; `prompt` is one text or one list of token ids, also alone in a list."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = None

    def sampling(self) -> dict[str, Any]:
        """The fields that were set, with the engine's names."""
        scored = {} if self.logprobs is None else {"logprobs": self.logprobs}
        return {**super().sampling(), **scored}


def to_ask(body: CompletionRequest, session: str | None = None) -> Ask:
    """The request; raises `InvalidRequest` naming the field that is wrong or not supported."""
    refuse(body, RAW_UNSUPPORTED)
    return Ask(
        prompt=_only_prompt(body.prompt),
        sampling=body.sampling(),
        max_tokens=body.max_tokens,
        session=session,
    )


async def completions(request: Request) -> Response:
    """The endpoint."""
    desk: Desk = request.app.state.desk
    body = await read_body(request, CompletionRequest)
    desk.check_model(body.model)
    exchange = await desk.open(to_ask(body, session_of(request.headers, body.prompt_cache_key)))
    head = Head(desk.model, "cmpl")
    if body.stream:
        lines = stream(head, exchange, body.include_usage)
        return sse.EventStream(exchange, lines, failed_sse)
    return JSONAnswer(whole(head, await collect(exchange, request)))


async def stream(
    head: Head, events: AsyncIterable[Event], include_usage: bool
) -> AsyncIterator[str]:
    """Server-sent events of an answer: pieces, one finishing chunk, usage if asked, DONE."""

    def chunk(text: str, finish: str | None = None, **more: Any) -> str:
        return sse.data(head.object("text_completion", choices=[_choice(text, finish)], **more))

    async for event in events:
        match event:
            case Queued() | Prefilling() | Writing():
                yield sse.comment(waiting(event))
                yield chunk("")
            case Text(text=text) if text:
                yield chunk(text)
            case Failed(error=error):
                yield failed_sse(error)
                return
            case Done():
                ending = _choice("", event.finish, _logprobs(event))
                yield sse.data(head.object("text_completion", choices=[ending], **report(event)))
                if include_usage:
                    counted = usage(event.usage)
                    yield sse.data(head.object("text_completion", choices=[], usage=counted))
    yield sse.DONE


def whole(head: Head, answer: Whole) -> dict[str, Any]:
    """The answer in one object."""
    done = answer.done
    choice = _choice(answer.text, done.finish, _logprobs(done))
    return head.object("text_completion", choices=[choice], usage=usage(done.usage), **report(done))


def _choice(text: str, finish: str | None, logprobs: Any = None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}


def _logprobs(done: Done) -> dict[str, Any] | None:
    if done.logprobs is None:
        return None
    tokens = [entry["token"] for entry in done.logprobs]
    starts = [sum(map(len, tokens[:place])) for place in range(len(tokens))]
    return {
        "tokens": tokens,
        "token_logprobs": [entry["logprob"] for entry in done.logprobs],
        "top_logprobs": [
            {top["token"]: top["logprob"] for top in entry["top_logprobs"]}
            for entry in done.logprobs
        ],
        "text_offset": starts,
    }


def _only_prompt(prompt: Any) -> str | tuple[int, ...]:
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise InvalidRequest(
                f"prompt holds {len(prompt)} prompts, expected one; send a request for each",
                "prompt",
            )
        prompt = prompt[0]
    if not prompt:
        raise InvalidRequest("prompt is empty, expected some text", "prompt")
    return prompt if isinstance(prompt, str) else tuple(prompt)
