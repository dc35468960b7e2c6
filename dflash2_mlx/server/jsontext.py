"""JSON as it goes out: always valid UTF-8, whatever a model wrote."""

import json
from typing import Any

from starlette.responses import JSONResponse


def encoded(content: Any) -> bytes:
    """Compact JSON; half of a surrogate pair, which no UTF-8 can hold, as its escape.

    Raises `ValueError` for a number that JSON does not know.
    """
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


class JSONAnswer(JSONResponse):
    """A whole answer."""

    def render(self, content: Any) -> bytes:
        """The body."""
        return encoded(content)
