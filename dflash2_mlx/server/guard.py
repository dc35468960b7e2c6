"""Who may ask: hosts, origins, keys. Pure ASGI, in front of everything else."""

import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from dflash2_mlx.errors import DFlashError, InvalidRequest, NotAllowed
from dflash2_mlx.server.failures import error_response
from dflash2_mlx.server.rules import Rules

OPEN_PATHS = ("/", "/health", "/v1/health")  # without a key: they tell nobody's texts


class WrongPlace(InvalidRequest):
    """A request for another host, or from a page of another origin."""

    status = 403
    code = "forbidden"


class Guard:
    """Lets a request through to `app`, or answers it with an error.

    A page of another origin could make a browser send requests to this machine: unless its origin
    was allowed they are refused, and so are host names that were pointed here.
    """

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http":
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
            try:
                self._check(Headers(scope=scope), scope["path"], scope["method"])
            except DFlashError as error:
                await error_response(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, headers: Headers, path: str, method: str) -> None:
        rules, host = self._rules, _host_name(headers.get("host", ""))
        if rules.hosts is not None and host not in rules.hosts:
            raise WrongPlace(
                f"the Host header is {host!r}, expected one of {', '.join(rules.hosts)}"
            )
        origin = headers.get("origin")
        if origin is not None and not self._may_ask(origin, headers.get("host", "")):
            raise WrongPlace(
                f"pages of {origin} may not use this server; start it with --allow-origin {origin}"
            )
        if rules.key is not None and path not in OPEN_PATHS and method != "OPTIONS":
            self._check_key(headers)

    def _may_ask(self, origin: str, host: str) -> bool:
        allowed = self._rules.origins
        return "*" in allowed or origin in allowed or urlsplit(origin).netloc == host

    def _check_key(self, headers: Headers) -> None:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = headers.get("x-api-key") or (token.strip() if scheme.lower() == "bearer" else "")
        expected = (self._rules.key or "").encode()
        if not given:
            raise NotAllowed("a key is needed: send Authorization: Bearer KEY, or x-api-key")
        if not hmac.compare_digest(given.encode("utf-8", "replace"), expected):
            raise NotAllowed("this is not the key of this server")


def _host_name(host: str) -> str:
    """The name in a Host header, without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
