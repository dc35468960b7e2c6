"""JSON schemas of tools, as their readers need them."""

from collections.abc import Mapping
from typing import Any

from dflash2_mlx.dialogue.events import Tool

_DEFINITIONS = ("$defs", "definitions")


def for_parsers(tool: Tool) -> dict[str, Any]:
    """A tool as mlx-lm's parsers take it, every argument with its type at the top.

    The parsers know no `$ref`, and of unions only some do; null they know by its name.
    """
    properties = tool.parameters.get("properties") or {}
    typed = {key: _typed(schema, tool.parameters) for key, schema in properties.items()}
    parameters = {**tool.parameters, "properties": typed}
    return {"type": "function", "function": {"name": tool.name, "parameters": parameters}}


def with_definitions(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a schema that stands by itself; `true` allows anything."""
    held = {key: root[key] for key in _DEFINITIONS if key in root}
    return {**held, **resolved(schema, root)}


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that a reference into `root` leads to, or the schema itself."""
    for _ in range(8):
        if not isinstance(schema, Mapping):
            return {}
        kind, _, name = str(schema.get("$ref", "")).removeprefix("#/").partition("/")
        if kind not in _DEFINITIONS:
            return schema
        schema = root.get(kind, {}).get(name)
    return {}


def _typed(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(resolved(schema, root))
    options = [resolved(option, root) for option in found.get("anyOf") or found.get("oneOf") or ()]
    kinds = found.get("type") or [option.get("type") for option in options]
    one = {kind for kind in kinds if kind != "null"} if isinstance(kinds, list) else {kinds}
    if len(one) == 1 and isinstance(kind := one.pop(), str):
        found = {key: value for key, value in found.items() if key not in ("anyOf", "oneOf")}
        found["type"] = kind
    return found
