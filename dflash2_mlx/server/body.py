"""Request bodies: read within limits, checked field by field."""

import asyncio
import json
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from dflash2_mlx.errors import BodyTooLarge, InvalidRequest, UnsupportedField

MAX_BYTES = 32 * 2**20
MAX_DEPTH = 64
BODY_S = 60.0  # a body of this size takes far less on a local network

Model = TypeVar("Model", bound=BaseModel)


async def read_body(request: Request, model: type[Model]) -> Model:
    """The JSON body as a model.

    Raises `BodyTooLarge`, or `InvalidRequest` naming the first field that is wrong.
    """
    content = _parsed(await _bytes(request, MAX_BYTES))
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise _named(error) from None


def refuse(content: BaseModel, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise `UnsupportedField` for a field that was set to something else than it may be here.

    `neutral` are the values that mean nothing; null always does.
    """
    given = {
        **(content.model_extra or {}),
        **{k: getattr(content, k) for k in content.model_fields_set},
    }
    for name, values in neutral.items():
        value = given.get(name)
        if value is None or any(value == other and type(value) is type(other) for other in values):
            continue
        raise UnsupportedField(f"{name} cannot be honoured here; leave it out", name)


async def _bytes(request: Request, max_bytes: int) -> bytes:
    told = request.headers.get("content-length", "0")
    if told.isdigit() and int(told) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError:
        raise InvalidRequest(f"the body did not arrive within {BODY_S:.0f} seconds") from None
    except ClientDisconnect:
        raise InvalidRequest("the client left before its request was read") from None
    return bytes(body)


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {max_bytes} bytes; send less")


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        content = json.loads(body, parse_constant=_no_constant)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # not JSON, not UTF-8, or a number of thousands of digits
        words = (
            str(error) if isinstance(error, json.JSONDecodeError | _NoConstant) else "see RFC 8259"
        )
        raise InvalidRequest(f"the body is not JSON: {words}") from None
    if not isinstance(content, dict):
        raise InvalidRequest(f"the body is a {type(content).__name__}, expected a JSON object")
    _check_tree(content)
    return content


class _NoConstant(ValueError):
    pass


def _no_constant(name: str) -> None:
    raise _NoConstant(f"{name} is no JSON number")


def _check_tree(content: Any) -> None:
    """Raise for what is nested too deep, is no finite number, or is half of a surrogate pair."""
    level = [content]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += [*value, *value.values()]
            elif isinstance(value, list):
                below += value
            elif isinstance(value, float) and not math.isfinite(value):
                raise InvalidRequest("the body holds a number beyond any float; send a smaller one")
            elif isinstance(value, str) and not _is_utf8(value):
                raise InvalidRequest("the body holds half of a surrogate pair; send UTF-8")
        if not below:
            return
        level = below
    raise _too_deep()


def _too_deep() -> BodyTooLarge:
    return BodyTooLarge(f"the body is nested deeper than {MAX_DEPTH} levels; send a flatter one")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _named(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    # Types of a union are parts of the location; a client knows only its own field.
    place = ".".join(str(part) for part in first["loc"][:1]) or "the body"
    words = first["msg"][:1].lower() + first["msg"][1:]
    return InvalidRequest(f"{place}: {words}", place if first["loc"] else None)
