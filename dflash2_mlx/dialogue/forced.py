"""Grammars for tool calls: forced ones, and schemas that a request wants held strictly."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dflash2_mlx.dialogue.call_grammar import Frame, as_object_schema, left_open, writing_for
from dflash2_mlx.dialogue.events import Tool, ToolChoice
from dflash2_mlx.dialogue.lark import Lark
from dflash2_mlx.errors import InvalidRequest
from dflash2_mlx.grammar import Grammar


@dataclass(frozen=True, slots=True)
class ToolGrammar:
    """What the answer has to obey, if anything, and what the client should know about it."""

    grammar: Grammar | None
    notes: tuple[str, ...] = ()


def grammar_for_tools(
    tokenizer: Any,
    tools: Sequence[Tool],
    choice: ToolChoice = "auto",
    parallel: bool = True,
    form: Grammar | None = None,
) -> ToolGrammar:
    """The grammar that a request's tools ask for.

    `required` or a tool's name forces a call, several if `parallel`. With `auto`, a `form` (the
    grammar of an answer without calls) leaves calls possible; without one, strict tools hold every
    call to its schema, amid text that is free. Raises `InvalidRequest` for a strict schema that
    cannot be enforced, and for a choice that is no tool.
    """
    if choice == "none" or not tools:
        return ToolGrammar(form)
    is_free = choice == "auto"
    if is_free and form is None and not any(tool.strict for tool in tools):
        return ToolGrammar(None)
    if is_free and form is not None and form.kind != "json_schema":
        return ToolGrammar(form, (f"the answer is held to a {form.name}: tools cannot be called",))
    chosen, notes = _enforceable(_chosen(tools, choice))
    writing, note = writing_for(tokenizer, chosen)
    lark = Lark(tokenizer)
    call = lark.either(writing.one(lark, tool) for tool in chosen)
    calls = writing.frame.all(lark, call, parallel)
    if form is not None and is_free:
        start = f"{lark.rule(calls)} | {lark.json(json.loads(form.source))}"
    elif is_free:
        start = _amid_text(lark, tokenizer, writing.frame, call, parallel)
    else:
        start = calls
    open_texts = [left_open(writing, tool) for tool in chosen if tool.strict]
    told = (*notes, *(found for found in (note, *open_texts) if found))
    return ToolGrammar(Grammar.lark(lark.source(start)), told)


def _chosen(tools: Sequence[Tool], choice: ToolChoice) -> Sequence[Tool]:
    if choice in ("auto", "required"):
        return tools
    named = [tool for tool in tools if tool.name == choice]
    if not named:
        names = ", ".join(tool.name for tool in tools)
        raise InvalidRequest(
            f"tool_choice names {choice!r}, expected one of {names}", "tool_choice"
        )
    return named


def _enforceable(tools: Sequence[Tool]) -> tuple[list[Tool], tuple[str, ...]]:
    """The tools with schemas that llguidance takes, and notes about those it does not."""
    checked, notes = [], []
    for tool in tools:
        try:
            Grammar.json_schema(as_object_schema(tool)).check()
        except InvalidRequest as error:
            if tool.strict:
                raise InvalidRequest(f"tool {tool.name} is strict, but {error}", "tools") from None
            notes.append(f"arguments of {tool.name} may be any object: {error}")
            tool = replace(tool, parameters={"type": "object", "additionalProperties": True})
        checked.append(tool)
    return checked, tuple(notes)


def _amid_text(lark: Lark, tokenizer: Any, frame: Frame, call: str, parallel: bool) -> str:
    """Free text, thoughts too, with calls in it."""
    tags = [getattr(tokenizer, name, None) for name in ("think_start", "think_end")]
    text, marks = lark.without(frame.start), [lark.text(tag) for tag in tags if tag]
    thoughts = [f"{text} {mark}" for mark in marks if mark.startswith("<[")]
    thought = f"({lark.either(thoughts)})*" if thoughts else ""
    begun = lark.until(frame.start)
    called = lark.rule(f"{thought} {begun} {frame.behind_start(lark, call, parallel)}")
    return f"{called}{'*' if parallel else '?'} {thought} {text}"
