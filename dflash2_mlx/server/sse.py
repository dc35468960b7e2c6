"""Server-sent events: how a stream is written, and that it ends when its reader leaves."""

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from dflash2_mlx.errors import DFlashError, unexpected
from dflash2_mlx.server.exchange import Exchange
from dflash2_mlx.server.jsontext import encoded

DONE = "data: [DONE]\n\n"
log = logging.getLogger("dflash2_mlx.server")


def data(content: Mapping[str, Any], event: str | None = None) -> str:
    """One event with a JSON object, and a name where the dialect has names."""
    named = f"event: {event}\n" if event else ""
    return f"{named}data: {encoded(content).decode()}\n\n"


def comment(text: str) -> str:
    """A line that parsers skip."""
    return f": {text}\n\n"


class EventStream(StreamingResponse):
    """Sends what `lines` yields; gives the exchange up however the sending ends.

    Where making a line fails, the stream ends as `failed` says it in its dialect.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        exchange: Exchange,
        lines: AsyncIterator[str],
        failed: Callable[[DFlashError], str],
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_sound(exchange, lines, failed), headers=headers)
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send, as ASGI."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._exchange.close()


async def _sound(
    exchange: Exchange, lines: AsyncIterator[str], failed: Callable[[DFlashError], str]
) -> AsyncIterator[str]:
    try:
        async for line in lines:
            yield line
            exchange.shown()
    except Exception as error:
        log.exception("a stream broke")
        yield failed(unexpected(error))
