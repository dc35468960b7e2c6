"""How models write tool calls: one writer per parser of mlx-lm, and tokenizers that carry it."""

import importlib
import json
from types import SimpleNamespace
from typing import Any

from dflash2_mlx.dialogue.events import Tool

Call = tuple[str, dict[str, Any]]
THINK = ("<think>", "</think>")


def tokenizer_of(style: str | None, think: tuple[str, str] | None = THINK, **more: Any) -> Any:
    """What the segmenter asks of mlx-lm's wrapper."""
    tags = dict(zip(("think_start", "think_end"), think or (None, None), strict=True))
    if style is not None:
        parser = importlib.import_module(f"mlx_lm.tool_parsers.{style}")
        tags |= {
            "tool_parser": parser.parse_tool_call,
            "tool_call_start": parser.tool_call_start,
            "tool_call_end": parser.tool_call_end,
        }
    return SimpleNamespace(**{**tags, **more})


def tool(name: str, **types: str) -> Tool:
    """A tool whose parameters have the given types."""
    properties = {key: {"type": type_} for key, type_ in types.items()}
    return Tool(name, f"does {name}", {"type": "object", "properties": properties})


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _json_tools(calls: list[Call]) -> str:
    texts = [json.dumps({"name": name, "arguments": given}) for name, given in calls]
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


def _qwen3_coder(calls: list[Call]) -> str:
    def one(name: str, given: dict[str, Any]) -> str:
        parts = [f"<parameter={k}>\n{_plain(v)}\n</parameter>\n" for k, v in given.items()]
        return f"<tool_call>\n<function={name}>\n{''.join(parts)}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _keyed(calls: list[Call], prefix: str = "") -> str:
    def one(name: str, given: dict[str, Any]) -> str:
        key, value = f"{prefix}arg_key", f"{prefix}arg_value"
        parts = [f"<{key}>{k}</{key}>\n<{value}>{_plain(v)}</{value}>\n" for k, v in given.items()]
        return f"<{prefix}tool_call>{name}\n{''.join(parts)}</{prefix}tool_call>"

    return "\n".join(one(*call) for call in calls)


def _minimax_m2(calls: list[Call]) -> str:
    def one(name: str, given: dict[str, Any]) -> str:
        parts = [f'<parameter name="{k}">{_plain(v)}</parameter>\n' for k, v in given.items()]
        return f'<invoke name="{name}">\n{"".join(parts)}</invoke>\n'

    inner = "".join(one(*call) for call in calls)
    return f"<minimax:tool_call>\n{inner}</minimax:tool_call>"


def _minicpm5(calls: list[Call]) -> str:
    def one(name: str, given: dict[str, Any]) -> str:
        parts = [f'<param name="{k}">{_plain(v)}</param>' for k, v in given.items()]
        return f'<function name="{name}">{"".join(parts)}</function>'

    return "\n".join(one(*call) for call in calls)


def _muse_spark(calls: list[Call]) -> str:
    def one(name: str, given: dict[str, Any]) -> str:
        parts = [
            f'<atem:parameter name="{k}">{json.dumps(v)}</atem:parameter>\n'
            for k, v in given.items()
        ]
        return f'<atem:invoke name="{name}">\n{"".join(parts)}</atem:invoke>\n'

    inner = "".join(one(*call) for call in calls)
    return f"<atem:function_calls>\n{inner}</atem:function_calls>"


def _kimi_k2(calls: list[Call]) -> str:
    parts = [
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>"
        f"{json.dumps(given)}<|tool_call_end|>"
        for number, (name, given) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(parts)}<|tool_calls_section_end|>"


def _kimi_k3(calls: list[Call]) -> str:
    def kind(value: Any) -> str:
        return "string" if isinstance(value, str) else "other"

    def one(name: str, given: dict[str, Any]) -> str:
        parts = [
            f'<|open|>argument key="{k}" type="{kind(v)}"<|sep|>{_plain(v)}<|close|>argument<|sep|>'
            for k, v in given.items()
        ]
        return f'<|open|>call tool="{name}" index="1"<|sep|>{"".join(parts)}<|close|>call<|sep|>'

    inner = "".join(one(*call) for call in calls)
    return f"<|open|>tools<|sep|>{inner}<|close|>tools<|sep|>"


def _mistral(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(given)}" for name, given in calls)


def _pythonic(calls: list[Call]) -> str:
    texts = [
        f"{n}({', '.join(f'{k}={json.dumps(v)}' for k, v in given.items())})" for n, given in calls
    ]
    return f"<|tool_call_start|>[{', '.join(texts)}]<|tool_call_end|>"


def _gemma4_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return f"[{','.join(map(_gemma4_value, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{k}:{_gemma4_value(v)}' for k, v in value.items())}}}"
    return json.dumps(value)


def _gemma4(calls: list[Call]) -> str:
    return "".join(
        f"<|tool_call>call:{name}{_gemma4_value(given)}<tool_call|>" for name, given in calls
    )


def _function_gemma(calls: list[Call]) -> str:
    def value(given: Any) -> str:
        return f"<escape>{given}<escape>" if isinstance(given, str) else json.dumps(given)

    def one(name: str, given: dict[str, Any]) -> str:
        parts = ",".join(f"{k}:{value(v)}" for k, v in given.items())
        return f"<start_function_call>call:{name}{{{parts}}}<end_function_call>"

    return "".join(one(*call) for call in calls)


WRITERS = {
    "json_tools": _json_tools,
    "qwen3_coder": _qwen3_coder,
    "glm47": _keyed,
    "laguna": _keyed,
    "longcat": lambda calls: _keyed(calls, "longcat_"),
    "minimax_m2": _minimax_m2,
    "minicpm5": _minicpm5,
    "muse_spark": _muse_spark,
    "kimi_k2": _kimi_k2,
    "kimi_k3": _kimi_k3,
    "mistral": _mistral,
    "pythonic": _pythonic,
    "gemma4": _gemma4,
    "function_gemma": _function_gemma,
}
