"""The application: routes, with and without /v1, behind one guard."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dflash2_mlx.errors import DFlashError
from dflash2_mlx.server.chat import chat
from dflash2_mlx.server.completions import completions
from dflash2_mlx.server.exchange import ClientGone, Desk
from dflash2_mlx.server.failures import on_bug, on_error, on_http_error
from dflash2_mlx.server.guard import Guard
from dflash2_mlx.server.info import health, metrics, model, models
from dflash2_mlx.server.messages import count, messages
from dflash2_mlx.server.page import page
from dflash2_mlx.server.responses import responses
from dflash2_mlx.server.rules import Rules

Endpoint = Callable[[Request], Awaitable[Response]]

POSTS: dict[str, Endpoint] = {
    "/chat/completions": chat,
    "/completions": completions,
    "/responses": responses,
    "/messages": messages,
    "/messages/count_tokens": count,
}
GETS: dict[str, Endpoint] = {
    "/models": models,
    "/models/{name:path}": model,
    "/health": health,
    "/metrics": metrics,
}


def make_app(desk: Desk, rules: Rules | None = None) -> Starlette:
    """The application for a worker that runs already; it is closed with the application."""
    rules = rules or Rules()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        desk.worker.close()

    app = Starlette(
        routes=[
            route
            for paths, method in ((POSTS, "POST"), (GETS, "GET"))
            for path, endpoint in paths.items()
            for route in _routes(path, endpoint, method)
        ]
        + [Route("/", page)],
        middleware=[Middleware(Guard, rules), *_cors(rules)],
        exception_handlers={
            DFlashError: on_error,
            HTTPException: on_http_error,
            ClientGone: on_gone,
            Exception: on_bug,
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.desk = desk
    return app


async def on_gone(request: Request, error: Exception) -> Response:
    """Nobody reads this."""
    return Response(status_code=499)


def _routes(path: str, endpoint: Endpoint, method: str) -> list[Route]:
    return [Route(prefix + path, endpoint, methods=[method]) for prefix in ("/v1", "")]


def _cors(rules: Rules) -> list[Middleware]:
    if not rules.origins:
        return []
    allowed = list(rules.origins)
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=allowed,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    ]
