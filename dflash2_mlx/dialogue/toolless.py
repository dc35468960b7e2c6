"""Tools for a model whose chat template has none: described in words, calls as tagged JSON."""

import json
from collections.abc import Sequence
from typing import Any

from dflash2_mlx.dialogue.events import Message, Tool

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
INTRODUCTION = (
    "You can call functions. These are their signatures, one JSON object a line:\n{tools}\n\n"
    "To call one, write exactly this, and nothing behind it:\n"
    f'{CALL_START}\n{{{{"name": "its name", "arguments": {{{{...}}}}}}}}\n{CALL_END}'
)


def with_tools_described(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """The messages behind a system message that tells of the tools."""
    if not tools:
        return list(messages)
    lines = "\n".join(json.dumps(_signature(tool), ensure_ascii=False) for tool in tools)
    told = INTRODUCTION.format(tools=lines)
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{told}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": told}, *messages]


def as_text(message: Message) -> Message:
    """A turn with its calls, or a tool's answer, as a turn of plain text."""
    if message["role"] == "tool":
        return {
            "role": "user",
            "content": f"<tool_response>\n{message['content']}\n</tool_response>",
        }
    if not message.get("tool_calls"):
        return message
    calls = [_call(call["function"]) for call in message["tool_calls"]]
    texts = [message["content"], *calls]
    return {"role": message["role"], "content": "\n".join(text for text in texts if text)}


def _signature(tool: Tool) -> dict[str, Any]:
    return {
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
    }


def _call(function: dict[str, Any]) -> str:
    said = json.dumps(
        {"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False
    )
    return f"{CALL_START}\n{said}\n{CALL_END}"
