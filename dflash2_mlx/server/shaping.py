"""Messages of every shape that clients send, as plain ones: a role, a text, tool calls."""

from collections.abc import Mapping, Sequence
from typing import Any

from dflash2_mlx.dialogue.events import Message
from dflash2_mlx.dialogue.heard import parsed_arguments
from dflash2_mlx.errors import InvalidRequest, UnsupportedField

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
TEXT_PARTS = ("text", "input_text", "output_text", "summary_text", "refusal")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # spellings of one field


def plain(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """OpenAI's messages with roles system, user, assistant, tool and contents that are text.

    Parts of a content are joined as they are, null is empty. A call's arguments become an object
    where they are the JSON of one. Raises `InvalidRequest` naming the message, for instance where
    it holds an image.
    """
    return tuple(_plain(message, f"messages[{place}]") for place, message in enumerate(messages))


def text_of(content: Any, place: str) -> str:
    """The text of a content: a string, null, or a list of parts; `place` names it in errors."""
    if content is None:
        return ""
    if isinstance(content, str):
        return _utf8(content, place)
    if isinstance(content, Mapping):
        return _part(content, place)
    if isinstance(content, Sequence):
        return "".join(_part(part, f"{place}[{number}]") for number, part in enumerate(content))
    raise InvalidRequest(f"{place} is a {_kind(content)}, expected text or a list of parts", place)


def _plain(message: Mapping[str, Any], place: str) -> Message:
    role = ROLES.get(str(message.get("role")))
    if role is None:
        known = ", ".join(ROLES)
        raise InvalidRequest(
            f"{place}.role is {message.get('role')!r}, expected one of {known}", f"{place}.role"
        )
    shaped: dict[str, Any] = {
        "role": role,
        "content": text_of(message.get("content"), f"{place}.content"),
    }
    if role == "assistant":
        shaped |= _assistant(message, place)
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            shaped[name] = message[name]
    return shaped


def _assistant(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    thought = next((message[name] for name in THOUGHTS if message.get(name)), None)
    if isinstance(thought, str):
        found["reasoning_content"] = thought
    calls = message.get("tool_calls") or []
    if legacy := message.get("function_call"):
        calls = [{"id": "call_0", "function": legacy}]
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise InvalidRequest(f"{place}.tool_calls is a {_kind(calls)}, expected a list", place)
    if calls:
        found["tool_calls"] = [
            _call(call, f"{place}.tool_calls[{number}]") for number, call in enumerate(calls)
        ]
    return found


def _call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{place} has no function with a name; send both", place)
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {
            "name": function["name"],
            "arguments": parsed_arguments(function.get("arguments")),
        },
    }


def _part(part: Any, place: str) -> str:
    if isinstance(part, str):
        return _utf8(part, place)
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in TEXT_PARTS:
        text = part.get("text", part.get("refusal"))
        if isinstance(text, str):
            return _utf8(text, place)
        raise InvalidRequest(f"{place} has no text", place)
    raise UnsupportedField(
        f"{place} is of type {kind!r}, and this model reads only text; leave it out", place
    )


def _utf8(text: str, place: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{place} holds half of a surrogate pair; send UTF-8", place) from None
    return text


def _kind(value: Any) -> str:
    return type(value).__name__
