"""Fields that several dialects share: tools, the choice among them, stops, forms."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash2_mlx.dialogue.events import Tool, ToolChoice
from dflash2_mlx.errors import BodyTooLarge, InvalidRequest
from dflash2_mlx.grammar import Grammar

MAX_SCHEMA = 256 * 2**10  # characters; compiling takes time on a thread that others wait for
MAX_TOOLS = 512
# Of Claude Code, opencode and Open WebUI.
SESSION_HEADERS = (
    "x-claude-code-session-id",
    "x-session-affinity",
    "x-session-id",
    "x-openwebui-chat-id",
)


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The functions of a request, and notes about what was left aside."""

    tools: tuple[Tool, ...] = ()
    notes: tuple[str, ...] = ()


def read_tools(tools: Sequence[Any] | None) -> Toolbox:
    """OpenAI's list of tools, nested as in chat or flat as in responses; null is none.

    Kinds other than functions are skipped and noted. Raises `InvalidRequest` naming the place.
    """
    found: list[Tool] = []
    skipped: list[str] = []
    if len(tools or ()) > MAX_TOOLS:
        raise BodyTooLarge(f"tools has {len(tools or ())} entries, at most {MAX_TOOLS} are read")
    for number, entry in enumerate(tools or ()):
        place = f"tools[{number}]"
        if not isinstance(entry, Mapping):
            raise InvalidRequest(f"{place} is no object", place)
        kind = entry.get("type", "function")
        if kind == "function":
            found.append(read_tool(entry.get("function", entry), place, "parameters"))
        else:
            skipped.append(f"{kind} ({entry['name']})" if entry.get("name") else str(kind))
    notes = (f"tools of these kinds were skipped: {', '.join(skipped)}",) if skipped else ()
    return Toolbox(tuple(found), notes)


def read_tool(function: Any, place: str, schema_field: str) -> Tool:
    """One function; raises `InvalidRequest` for a name or schema that is none."""
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{place} has no name", place)
    schema = function.get(schema_field) or {}
    check_schema(schema, f"{place}.{schema_field}")
    _check_properties(schema, f"{place}.{schema_field}")
    return Tool(
        name=function["name"],
        description=str(function.get("description") or ""),
        parameters=_spelled_out(schema),
        strict=function.get("strict") is True,
    )


def read_choice(choice: Any, box: Toolbox) -> tuple[ToolChoice, Toolbox]:
    """Which tools may or must be called, as in chat and responses; the toolbox may shrink."""
    if choice is None:
        return "auto", box
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        choice, box = _allowed(choice.get("allowed_tools", choice), box)
    if isinstance(choice, Mapping):
        return choice_of(_name(choice), box), box
    if choice not in ("auto", "none", "required"):
        raise InvalidRequest(
            f"tool_choice is {choice!r}, expected auto, none, required or a function", "tool_choice"
        )
    if choice == "required" and not box.tools:
        raise InvalidRequest("tool_choice is required, but tools has no function", "tool_choice")
    return choice, box


def _allowed(allowed: Any, box: Toolbox) -> tuple[Any, Toolbox]:
    """The mode of a choice among some tools, and only those."""
    tools = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if not isinstance(tools, list):
        raise InvalidRequest("tool_choice.allowed_tools has no list of tools", "tool_choice")
    names = [_name(tool) for tool in tools]
    kept = tuple(tool for tool in box.tools if tool.name in names)
    return allowed.get("mode", "auto"), Toolbox(kept, box.notes)


def choice_of(name: str, box: Toolbox) -> ToolChoice:
    """The named function, which has to be there."""
    if name not in {tool.name for tool in box.tools}:
        raise InvalidRequest(f"tool_choice names {name!r}, which is not among tools", "tool_choice")
    return name


def session_of(headers: Mapping[str, str], key: str | None = None) -> str | None:
    """What a client says belongs together: a field of its request, or a header."""
    return key or next((headers[name] for name in SESSION_HEADERS if headers.get(name)), None)


def read_stop(stop: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Stop strings; null and an empty list are none."""
    return ((stop,) if isinstance(stop, str) else tuple(stop)) if stop else None


def read_form(form: Any, place: str) -> Grammar | None:
    """`response_format` of chat, or `text.format` of responses, as a grammar; null is none."""
    if form is None:
        return None
    if not isinstance(form, Mapping):
        raise InvalidRequest(f"{place} is a {type(form).__name__}, expected an object", place)
    kind = form.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar.json_object()
    if kind != "json_schema":
        raise InvalidRequest(
            f"{place}.type is {kind!r}, expected text, json_object or json_schema", place
        )
    inner = form.get("json_schema", form)
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"{place} has no schema", place)
    check_schema(schema, place)
    return Grammar.json_schema(schema)


def check_schema(schema: Any, place: str) -> None:
    """Raise unless it is an object of a size that can be compiled."""
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"{place} is a {type(schema).__name__}, expected an object", place)
    if (size := len(json.dumps(schema))) > MAX_SCHEMA:
        raise BodyTooLarge(f"{place} has {size} characters, at most {MAX_SCHEMA} are read", place)


def _check_properties(schema: Mapping[str, Any], place: str) -> None:
    """Raise for a schema of arguments that says nothing of them one by one."""
    properties, required = schema.get("properties"), schema.get("required")
    if properties is not None and not (
        isinstance(properties, Mapping)
        and all(isinstance(inner, Mapping) or inner is True for inner in properties.values())
    ):
        where = f"{place}.properties"
        raise InvalidRequest(f"{where}: expected an object with a schema for each name", where)
    if required is not None and not (
        isinstance(required, list) and all(isinstance(name, str) for name in required)
    ):
        where = f"{place}.required"
        raise InvalidRequest(f"{where}: expected a list of names", where)


def _spelled_out(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema with `true`, which lets everything pass, as the schema it is short for."""
    properties = schema.get("properties") or {}
    if True not in properties.values():
        return schema
    spelled = {name: {} if inner is True else inner for name, inner in properties.items()}
    return {**schema, "properties": spelled}


def _name(choice: Any) -> str:
    function = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise InvalidRequest("tool_choice has no name of a function", "tool_choice")
    return name
