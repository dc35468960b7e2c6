"""Errors as every client reads them; the only place where they become HTTP."""

import logging
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from dflash2_mlx.errors import DFlashError, unexpected
from dflash2_mlx.server.jsontext import JSONAnswer, encoded

log = logging.getLogger("dflash2_mlx.server")

ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


def error_body(error: DFlashError, path: str) -> dict[str, Any]:
    """The error object of the dialect that is spoken on a path."""
    return _body(path, error.status, str(error), error.code, error.param)


def error_response(error: DFlashError, path: str) -> Response:
    """The error with its status, and when to try again."""
    seconds = getattr(error, "retry_after_s", None)
    headers = {} if seconds is None else {"Retry-After": str(seconds)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONAnswer(error_body(error, path), error.status, headers)


def failed_sse(error: DFlashError) -> str:
    """OpenAI's error in the middle of a stream."""
    return f"data: {encoded(error_body(error, '')).decode()}\n\n"


async def on_error(request: Request, error: Exception) -> Response:
    """Starlette's handler for ours."""
    assert isinstance(error, DFlashError)
    return error_response(error, request.url.path)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's handler for its own: no such path, or another method."""
    assert isinstance(error, HTTPException)
    path, status = request.url.path, error.status_code
    if status == 404:
        words, code = f"there is no {request.method} {path}; see /v1/models", "not_found"
    elif status == 405:
        words, code = f"{path} does not take {request.method}", "method_not_allowed"
    else:
        words, code = error.detail, "bad_request"
    return JSONAnswer(_body(path, status, words, code, None), status, error.headers)


async def on_bug(request: Request, error: Exception) -> Response:
    """Starlette's handler for what should never happen; the log has the rest."""
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return error_response(unexpected(error), request.url.path)


def _body(path: str, status: int, words: str, code: str, param: str | None) -> dict[str, Any]:
    if "/messages" in path:
        kind = ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": words}}
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": words, "type": kind, "param": param, "code": code}}
