"""The application on a socket, until someone asks it to end."""

import asyncio
import socket
import threading
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from dflash2_mlx.errors import InvalidRequest
from dflash2_mlx.server.worker import Worker

HEAD_S = 30.0  # for the head of a request to arrive
IDLE_CONNECTION_S = 65  # longer than the minute that most clients keep one
LAST_WORDS_S = 5  # for connections to end after their requests were told


def bind(host: str, port: int) -> socket.socket:
    """A socket that does not listen yet; raises `InvalidRequest` when the address is taken."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        return _bound(socket.socket(family, socket.SOCK_STREAM), address)
    except (OSError, OverflowError, UnicodeError) as error:
        words = getattr(error, "strerror", None) or error
        raise InvalidRequest(f"cannot listen on {host}:{port}: {words}; try --port") from None


def _bound(made: socket.socket, address: Any) -> socket.socket:
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except BaseException:
        made.close()
        raise
    return made


class _Impatient(H11Protocol):
    """Closes a connection on which a request began and its head does not end."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._expect_head()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _Server(uvicorn.Server):
    """Ends running answers as soon as it is asked to end, not after them."""

    def __init__(self, config: uvicorn.Config, worker: Worker) -> None:
        super().__init__(config)
        self._worker = worker

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        # Not here: a signal may have come while this thread holds the worker's lock.
        threading.Thread(target=self._worker.close, daemon=True).start()


def make_server(app: ASGIApp, worker: Worker) -> uvicorn.Server:
    """uvicorn, set up for long streams; run it with `.run(sockets=[...])`."""
    config = uvicorn.Config(
        app,
        http=_Impatient,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_keep_alive=IDLE_CONNECTION_S,
        timeout_graceful_shutdown=LAST_WORDS_S,
    )
    return _Server(config, worker)
