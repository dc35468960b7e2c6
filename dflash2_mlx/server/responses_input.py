"""What a client sends to /v1/responses: items, gathered into messages, and tools in namespaces."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash2_mlx.errors import InvalidRequest, UnsupportedField
from dflash2_mlx.server.shaping import ROLES, text_of

CALLS = {"function_call": "arguments", "custom_tool_call": "input", "local_shell_call": "action"}
RESULTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")


@dataclass(slots=True)
class History:
    """Input items gathered into OpenAI's chat messages; `skipped` are kinds left aside."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    _thought: str = ""

    def add(self, item: Any, place: str) -> None:
        """Take one item in; raises `InvalidRequest` naming its place."""
        if not isinstance(item, Mapping):
            raise InvalidRequest(f"{place} is no object", place)
        kind = str(item.get("type", "message"))
        if kind == "message":
            self._message(item, place)
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary")
            self._thought += text_of(_as_text_parts(parts), place)
        elif kind in CALLS:
            self._call(item, CALLS[kind], place)
        elif kind in RESULTS:
            self._result(item, place)
        elif kind == "item_reference":
            raise UnsupportedField(f"{place} refers to an item, and none is stored here", place)
        else:
            self.skipped.append(kind)

    def _message(self, item: Mapping[str, Any], place: str) -> None:
        text, role = text_of(item.get("content"), f"{place}.content"), item.get("role")
        if not isinstance(role, str) or role not in ROLES:
            where = f"{place}.role"
            raise InvalidRequest(f"{where} is {role!r}, expected one of {', '.join(ROLES)}", where)
        if role != "assistant":
            self.messages.append({"role": role, "content": text})
            return
        turn = self._turn()
        if turn.get("tool_calls"):
            turn = self._new_turn()
        turn["content"] += text

    def _call(self, item: Mapping[str, Any], arguments: str, place: str) -> None:
        given = item.get(arguments)
        if not isinstance(given, str):
            given = json.dumps(given)
        elif arguments == "input":
            given = json.dumps({"input": given})
        name = flat_name(item.get("namespace"), str(item.get("name", "local_shell")))
        call = {"id": _call_id(item, place), "function": {"name": name, "arguments": given}}
        self._turn().setdefault("tool_calls", []).append(call)

    def _result(self, item: Mapping[str, Any], place: str) -> None:
        text = text_of(item.get("output"), f"{place}.output")
        self.messages.append(
            {"role": "tool", "content": text, "tool_call_id": _call_id(item, place)}
        )

    def _turn(self) -> dict[str, Any]:
        """The assistant's turn that goes on: what one answer held is one message again."""
        last = self.messages[-1] if self.messages else {}
        if self._thought or last.get("role") != "assistant":
            return self._new_turn()
        return last

    def _new_turn(self) -> dict[str, Any]:
        turn: dict[str, Any] = {"role": "assistant", "content": ""}
        if self._thought:
            turn["reasoning_content"], self._thought = self._thought, ""
        self.messages.append(turn)
        return turn


def flat_name(namespace: Any, name: str) -> str:
    """What the model knows a function of a namespace as."""
    return f"{namespace}__{name}" if namespace else name


def flat_tools(tools: Sequence[Any] | None) -> list[Any]:
    """The tools, those of namespaces as plain functions; Codex has one for each MCP server."""
    found: list[Any] = []
    for tool in tools or ():
        found += [{**inner, "name": flat} for flat, inner in _inner(tool)] or [tool]
    return found


def namespaces(tools: Sequence[Any] | None) -> dict[str, tuple[str, str]]:
    """For each flat name of a function in a namespace, both of its names."""
    return {
        flat: (tool["name"], inner["name"]) for tool in tools or () for flat, inner in _inner(tool)
    }


def _inner(tool: Any) -> list[tuple[str, Any]]:
    """Functions in a namespace with their flat names; none where it is something else."""
    if not isinstance(tool, Mapping) or tool.get("type") != "namespace":
        return []
    listed = tool.get("tools")
    return [
        (flat_name(tool.get("name"), inner["name"]), inner)
        for inner in (listed if isinstance(listed, list) else ())
        if isinstance(inner, Mapping) and isinstance(inner.get("name"), str)
    ]


def read_input(items: str | Sequence[Any], instructions: str | None) -> History:
    """The request's messages, instructions first."""
    history = History()
    if instructions:
        history.messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    for number, item in enumerate(items):
        history.add(item, f"input[{number}]")
    return history


def _as_text_parts(parts: Any) -> Any:
    """`reasoning_text` and `summary_text` alike; text that was encrypted elsewhere is none."""
    if not isinstance(parts, list):
        return parts
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return [{"type": "text", "text": text} for text in texts]


def _call_id(item: Mapping[str, Any], place: str) -> str:
    call_id = item.get("call_id") or item.get("id")
    if not isinstance(call_id, str):
        raise InvalidRequest(f"{place} has no call_id", f"{place}.call_id")
    return call_id
