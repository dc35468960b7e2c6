"""GET /: one page that needs nothing but this server."""

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response


async def page(request: Request) -> Response:
    """The page, which may run its own script and talk to its own server only."""
    text, policy = _page()
    return HTMLResponse(
        text,
        headers={
            "Content-Security-Policy": policy,
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-cache",
        },
    )


@cache
def _page() -> tuple[str, str]:
    text = files("dflash2_mlx.server").joinpath("page.html").read_text("utf-8")
    policy = {
        "default-src": "'none'",
        "script-src": _hashes("script", text),
        "style-src": _hashes("style", text),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return text, "; ".join(f"{name} {value}" for name, value in policy.items())


def _hashes(tag: str, text: str) -> str:
    inlined = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digests = (hashlib.sha256(content.encode()).digest() for content in inlined)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
