"""Server-sent events: how a stream is written, and that it ends when its reader leaves."""

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from dflash2_mlx.server.exchange import Exchange

DONE = "data: [DONE]\n\n"


def data(content: Mapping[str, Any], event: str | None = None) -> str:
    """One event with a JSON object, and a name where the dialect has names."""
    named = f"event: {event}\n" if event else ""
    return f"{named}data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"


def comment(text: str) -> str:
    """A line that parsers skip."""
    return f": {text}\n\n"


class EventStream(StreamingResponse):
    """Sends what `lines` yields; gives the exchange up however the sending ends."""

    media_type = "text/event-stream"

    def __init__(self, exchange: Exchange, lines: AsyncIterator[str]) -> None:
        super().__init__(lines, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send, as ASGI."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._exchange.close()
