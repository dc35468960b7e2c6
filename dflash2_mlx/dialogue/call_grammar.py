"""How a model would write calls of some tools, as a grammar; the mirror of the readers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import regex

from dflash2_mlx.dialogue.events import Tool
from dflash2_mlx.dialogue.lark import Lark
from dflash2_mlx.dialogue.schemas import with_definitions
from dflash2_mlx.dialogue.styles import JSON, style_name
from dflash2_mlx.dialogue.toolless import CALL_END, CALL_START

_PLAIN_NAME = regex.compile(r"[^\s<>\"'&]+")
_TEXT_RULES = frozenset({"pattern", "format", "minLength", "maxLength"})
_IDENTIFIER = regex.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands around calls: each has its own `start`, or a group shares one up to `closes`."""

    start: str
    opens: str = ""
    closes: str = ""
    between: str = ""

    def behind_start(self, lark: Lark, call: str, parallel: bool) -> str:
        """A call, or a group of them, behind its start."""
        if not self.closes:
            return call
        more = f"({lark.text(self.between)} {call})*" if parallel else ""
        return f"{lark.text(self.opens)} {call} {more} {lark.text(self.closes)}"

    def all(self, lark: Lark, call: str, parallel: bool) -> str:
        """All calls of an answer."""
        whole = f"{lark.text(self.start)} {self.behind_start(lark, call, parallel)}"
        if self.closes or not parallel:
            return whole
        whole = lark.rule(whole)
        return f"{whole} ({lark.text(self.between)} {whole})*"


@dataclass(frozen=True, slots=True)
class JsonCall:
    """Arguments as one JSON object, between texts that hold `{name}`, and `{index}`."""

    frame: Frame
    head: str
    tail: str

    def can_write(self, tool: Tool) -> bool:
        """Whether the style has a form for the tool."""
        return _PLAIN_NAME.fullmatch(tool.name) is not None

    def one(self, lark: Lark, tool: Tool) -> str:
        """A call."""
        parts = self.head.replace("{name}", tool.name).split("{index}")
        head = " /[0-9]{1,3}/ ".join(lark.text(part) for part in parts)
        return lark.rule(f"{head} {lark.json(as_object_schema(tool))} {lark.text(self.tail)}")


@dataclass(frozen=True, slots=True)
class MarkupCall:
    """Arguments one by one, in the order of the schema; `{key}` stands in `opens`."""

    frame: Frame
    head: str
    opens: str
    ends: str
    tail: str
    quotes_text: bool = False

    def can_write(self, tool: Tool) -> bool:
        """Whether the style has a form for the tool: names without blanks and quotes."""
        names = [tool.name, *_properties(tool)]
        return all(_PLAIN_NAME.fullmatch(name) for name in names)

    def one(self, lark: Lark, tool: Tool) -> str:
        """A call."""
        properties = _properties(tool)
        required = tool.parameters.get("required") or ()
        parts = [lark.text(self.head.replace("{name}", tool.name))]
        for key, schema in properties.items():
            argument = self._argument(lark, key, with_definitions(schema, tool.parameters))
            parts.append(argument if key in required else f"({argument})?")
        if not properties and tool.parameters.get("additionalProperties"):
            parts.append(f"({self._any_argument(lark)})*")
        return lark.rule(" ".join([*parts, lark.text(self.tail)]))

    def _argument(self, lark: Lark, key: str, schema: Any) -> str:
        opens = lark.text(self.opens.replace("{key}", key))
        if self.quotes_text or not _may_be_text(schema):
            return lark.rule(f"{opens} {lark.json(schema)} {lark.text(self.ends)}")
        choices = _choices(schema)
        if choices and "" not in choices:
            values = lark.either(lark.text("null" if c is None else c) for c in choices)
            return lark.rule(f"{opens} {values} {lark.text(self.ends)}")
        return lark.rule(f"{opens} {lark.until(self.ends)}")

    def _any_argument(self, lark: Lark) -> str:
        before, after = (lark.text(part) for part in self.opens.split("{key}"))
        value = lark.json({}) + " " + lark.text(self.ends) if self.quotes_text else ""
        return lark.rule(rf"{before} /\w+/ {after} {value or lark.until(self.ends)}")


@dataclass(frozen=True, slots=True)
class PythonCall:
    """`name(key=value, ...)`."""

    frame: Frame

    def can_write(self, tool: Tool) -> bool:
        """Whether the style has a form for the tool: Python's names only."""
        names = [tool.name, *_properties(tool)]
        return all(_IDENTIFIER.fullmatch(name) for name in names)

    def one(self, lark: Lark, tool: Tool) -> str:
        """A call; keyword arguments in the order of the schema, the required ones first."""
        properties = _properties(tool)
        needed = set(tool.parameters.get("required") or ())
        arguments = [
            (f"{lark.text(key + '=')} {lark.json(with_definitions(schema, tool.parameters))}", key)
            for key, schema in sorted(properties.items(), key=lambda item: item[0] not in needed)
        ]
        inner = _comma_separated(lark, [(text, key in needed) for text, key in arguments])
        return lark.rule(f'{lark.text(tool.name + "(")} {inner} ")"')


Writing = JsonCall | MarkupCall | PythonCall


def _tagged_json(start: str, end: str) -> JsonCall:
    head = '\n{"name": "{name}", "arguments": '
    return JsonCall(Frame(start, between="\n"), head, f"}}\n{end}")


def _keyed(prefix: str = "") -> MarkupCall:
    key, value = f"{prefix}arg_key", f"{prefix}arg_value"
    return MarkupCall(
        Frame(f"<{prefix}tool_call>", between="\n"),
        head="{name}\n",
        opens=f"<{key}>{{key}}</{key}>\n<{value}>",
        ends=f"</{value}>\n",
        tail=f"</{prefix}tool_call>",
    )


WRITINGS: dict[str, Writing] = {
    "kimi_k2": JsonCall(
        Frame("<|tool_calls_section_begin|>", closes="<|tool_calls_section_end|>"),
        "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
    "kimi_k3": JsonCall(
        Frame("<|open|>tools<|sep|>", closes="<|close|>tools<|sep|>"),
        '<|open|>call tool="{name}" index="{index}"<|sep|><|open|>json type="object"<|sep|>',
        "<|close|>json<|sep|><|close|>call<|sep|>",
    ),
    "mistral": JsonCall(Frame("[TOOL_CALLS]"), "{name}[ARGS]", ""),
    "qwen3_coder": MarkupCall(
        Frame("<tool_call>", between="\n"),
        head="\n<function={name}>\n",
        opens="<parameter={key}>\n",
        ends="\n</parameter>\n",
        tail="</function>\n</tool_call>",
    ),
    "glm47": _keyed(),
    "longcat": _keyed("longcat_"),
    "minimax_m2": MarkupCall(
        Frame("<minimax:tool_call>", "\n", "</minimax:tool_call>"),
        head='<invoke name="{name}">\n',
        opens='<parameter name="{key}">',
        ends="</parameter>\n",
        tail="</invoke>\n",
    ),
    "minicpm5": MarkupCall(
        Frame("<function name=", between="\n"),
        head='"{name}">',
        opens='<param name="{key}">',
        ends="</param>",
        tail="</function>",
    ),
    "muse_spark": MarkupCall(
        Frame("<atem:function_calls>", "\n", "</atem:function_calls>"),
        head='<atem:invoke name="{name}">\n',
        opens='<atem:parameter name="{key}">',
        ends="</atem:parameter>\n",
        tail="</atem:invoke>\n",
        quotes_text=True,
    ),
    "pythonic": PythonCall(Frame("<|tool_call_start|>", "[", "]<|tool_call_end|>", ", ")),
}


def writing_for(tokenizer: Any, tools: Sequence[Tool]) -> tuple[Writing, str | None]:
    """The form of calls for a tokenizer, and a note where it is not what the model is used to."""
    style = style_name(tokenizer)
    start: str = getattr(tokenizer, "tool_call_start", None) or CALL_START
    as_json = _tagged_json(start, tokenizer.tool_call_end if style else CALL_END)
    if style in JSON:
        return as_json, None
    own = WRITINGS.get(style or "")
    if own is not None and all(own.can_write(tool) for tool in tools):
        return own, None
    return as_json, f"forced calls are written as JSON: {style} has no form for them here"


def as_object_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments; no parameters at all mean no arguments."""
    if not tool.parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {**tool.parameters, "type": "object"}


def _properties(tool: Tool) -> Mapping[str, Any]:
    return tool.parameters.get("properties") or {}


def _may_be_text(schema: Mapping[str, Any]) -> bool:
    """Whether a string fits; those stand without quotes."""
    if (choices := _choices(schema)) is not None:
        return any(choices) and all(c is None or isinstance(c, str) for c in choices)
    kinds = schema.get("type")
    options = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    if kinds is None and "$ref" not in schema:
        return not options or any(_may_be_text(option) for option in options)
    return "string" in (kinds if isinstance(kinds, list) else [kinds])


def left_open(writing: Writing, tool: Tool) -> str | None:
    """A note about what a form does not hold texts to; they stand without quotes there."""
    if not isinstance(writing, MarkupCall) or writing.quotes_text:
        return None
    held = {key for schema in _properties(tool).values() for key in _TEXT_RULES & set(schema)}
    if not held:
        return None
    return f"texts in arguments of {tool.name} are not held to {', '.join(sorted(held))}"


def _choices(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return list(schema["enum"]) if "enum" in schema else None


def _comma_separated(lark: Lark, arguments: list[tuple[str, bool]]) -> str:
    """Arguments with commas between those that are there; the required ones come first."""
    needed = [text for text, is_needed in arguments if is_needed]
    optional = [text for text, is_needed in arguments if not is_needed]
    later = " ".join(f'(", " {text})?' for text in optional)
    if needed:
        return " ".join([' ", " '.join(needed), later])
    # Each optional argument may be the first.
    tails = [
        " ".join([text, *(f'(", " {other})?' for other in optional[place + 1 :])])
        for place, text in enumerate(optional)
    ]
    return f"({lark.either(tails)})?" if tails else ""
