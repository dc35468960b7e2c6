"""C28: forced calls and strict schemas; what a grammar lets through, the readers read as a call."""

import importlib
import json
import random
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from byte_bpe import byte_bpe
from call_writers import WRITERS
from llguidance import LLMatcher
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tiny import END
from tokenizers import AddedToken

from dflash2_mlx.constraint import grammar_tokenizer
from dflash2_mlx.dialogue.events import Tool, ToolArguments, ToolStart
from dflash2_mlx.dialogue.forced import grammar_for_tools
from dflash2_mlx.dialogue.segments import Segmenter
from dflash2_mlx.errors import InvalidRequest
from dflash2_mlx.grammar import Grammar

VOCAB = 400
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "what": {"type": "string", "description": "[a temperature=1 text]"},
        "number": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"enum": ["c", "f"]},
        "where": {"$ref": "#/$defs/place"},
    },
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "boolean"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
    "required": ["what", "unit"],
    "additionalProperties": False,
}
FIND, NOW = Tool("find", parameters=SCHEMA, strict=True), Tool("now")
STYLES = [None, *sorted(WRITERS)]
TAGS = {  # beside the outer ones
    "glm47": ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    "kimi_k2": ["<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"],
    "kimi_k3": ["<|open|>", "<|close|>", "<|sep|>"],
    "mistral": ["[ARGS]"],
}
CLOSERS = ["\n</parameter>\n", "</parameter>\n", "</param>", "</arg_value>\n", '"']
CLOSERS += ["</longcat_arg_value>\n", "</atem:parameter>\n", "<tool_call>", "[TOOL_CALLS]"]


@cache
def tokenizer_of(style: str | None) -> TokenizerWrapper:
    """A byte tokenizer with the tags of a style as tokens, as published ones have them."""
    inner = byte_bpe.__wrapped__()
    tags = ["<think>", "</think>", *TAGS.get(style or "", ())]
    if style is None:
        inner.add_tokens([AddedToken(tag, special=False) for tag in tags])
        return TokenizerWrapper(inner)
    parser = importlib.import_module(f"mlx_lm.tool_parsers.{style}")
    outer = [parser.tool_call_start, parser.tool_call_end]
    tags += [tag for tag in outer if tag and style not in ("kimi_k3", "minicpm5")]
    is_special = style in ("mistral", "gemma4", "pythonic")
    inner.add_tokens([AddedToken(tag, special=is_special) for tag in tags])
    return TokenizerWrapper(
        inner, tool_parser=parser.parse_tool_call, tool_call_start=outer[0], tool_call_end=outer[1]
    )


@cache
def guide_of(style: str | None) -> Any:
    return grammar_tokenizer(tokenizer_of(style), VOCAB, {END})


def matcher(style: str | None, grammar: Grammar) -> LLMatcher:
    found = LLMatcher(guide_of(style), grammar.compiled(), log_level=0)
    assert not found.is_error(), found.get_error()
    return found


def obeys(style: str | None, grammar: Grammar, text: str) -> bool:
    """Whether the whole text may be the answer."""
    ids, guide = tokenizer_of(style).encode(text), matcher(style, grammar)
    return guide.try_consume_tokens(ids) == len(ids) and (
        guide.is_stopped() or guide.is_accepting()
    )


def wander(style: str | None, grammar: Grammar, seed: int) -> str:
    """A random answer that obeys; texts and JSON strings are ended soon."""
    guide, luck = matcher(style, grammar), random.Random(seed)
    tokenizer, ids = tokenizer_of(style), []
    closers = [tokenizer.encode(closer) for closer in CLOSERS]
    while not guide.is_stopped():
        assert len(ids) < 3000, tokenizer.decode(ids[-400:])
        mask = np.frombuffer(guide.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[:VOCAB]).tolist()
        ready = [c for c in closers if guide.validate_tokens(c) == len(c)]
        if END in allowed and luck.random() < 0.3:
            chosen = [END]
        elif ready and len(allowed) > 40 and luck.random() < 0.3:
            chosen = luck.choice(ready)
        else:
            tags = [id_ for id_ in allowed if id_ > END]
            characters = [id_ for id_ in allowed if id_ == 10 or 32 <= id_ < 127]
            several = [options for options in (tags, characters) if options]
            chosen = [luck.choice(luck.choice(several or [allowed]))]
        assert guide.consume_tokens(chosen)
        ids += chosen
    return str(tokenizer.decode([id_ for id_ in ids if id_ != END]))


def read(style: str | None, text: str, tools: list[Tool]) -> tuple[list[tuple[str, Any]], str]:
    reader = Segmenter(tokenizer_of(style), tools)
    events = [*reader.feed(text), *reader.finish(cut=False)]
    calls: list[list[str]] = []
    said = ""
    for event in events:
        if isinstance(event, ToolStart):
            calls.append([event.name, ""])
        elif isinstance(event, ToolArguments):
            calls[-1][1] += event.json
        else:
            said += event.text
    return [(name, json.loads(arguments)) for name, arguments in calls], said


@pytest.mark.parametrize("style", STYLES)
def test_whatever_the_grammar_allows_is_a_call_of_the_tool(style: str | None) -> None:
    grammar = grammar_for_tools(tokenizer_of(style), [FIND, NOW], "find", parallel=False).grammar
    for seed in range(4):
        text = wander(style, grammar, seed)
        calls, said = read(style, text, [FIND, NOW])
        assert ([name for name, _ in calls], said) == (["find"], ""), text
        jsonschema.validate(calls[0][1], SCHEMA)


@pytest.mark.parametrize("style", STYLES)
def test_several_calls_of_any_tool(style: str | None) -> None:
    found = grammar_for_tools(tokenizer_of(style), [FIND, NOW], "required")
    names = set()
    for seed in range(6):
        calls, said = read(style, wander(style, found.grammar, seed), [FIND, NOW])
        assert said.strip() == ""
        assert calls
        names |= {name for name, _ in calls}
    assert names == {"find", "now"}
    assert bool(found.notes) == (style in ("gemma4", "function_gemma"))


# Gemma's forms are written as JSON, and Kimi K3's with its other form, one JSON block.
OTHERWISE = ("gemma4", "function_gemma", "kimi_k3")


@pytest.mark.parametrize("style", [style for style in STYLES if style not in OTHERWISE])
def test_calls_as_the_model_writes_them_obey(style: str | None) -> None:
    calls = [("find", {"what": "a b", "unit": "c"}), ("now", {})]
    written = WRITERS[style or "json_tools"]
    tokenizer, tools = tokenizer_of(style), [FIND, NOW]
    several = grammar_for_tools(tokenizer, tools, "required").grammar
    single = grammar_for_tools(tokenizer, tools, "required", parallel=False).grammar
    find = grammar_for_tools(tokenizer, tools, "find").grammar
    assert obeys(style, several, written(calls))
    assert not obeys(style, single, written(calls))
    assert obeys(style, single, written(calls[:1]))
    assert not obeys(style, find, written(calls[1:]))
    assert not obeys(style, find, "Hello")
    assert not obeys(style, find, written([("find", {"what": "a b"})]))


@pytest.mark.parametrize("style", [None, "json_tools", "qwen3_coder", "mistral"])
def test_strict_tools_hold_calls_amid_free_text(style: str | None) -> None:
    tokenizer, written = tokenizer_of(style), WRITERS[style or "json_tools"]
    grammar = grammar_for_tools(tokenizer, [FIND, NOW]).grammar
    good, bad = [("find", {"what": "x", "unit": "c"})], [("find", {"what": "x", "unit": "k"})]
    assert obeys(style, grammar, "Just text.")
    assert obeys(style, grammar, "<think>hm</think>Look: " + written(good))
    assert not obeys(style, grammar, "Look: " + written(bad))
    single = grammar_for_tools(tokenizer, [FIND, NOW], parallel=False).grammar
    assert obeys(style, single, written(good))
    assert not obeys(style, single, written(good) + "\n" + written(good))


def test_an_answer_held_to_a_form_may_still_call_tools() -> None:
    form = Grammar.json_schema({"type": "object", "properties": {"answer": {"type": "integer"}}})
    grammar = grammar_for_tools(tokenizer_of("json_tools"), [NOW], form=form).grammar
    assert obeys("json_tools", grammar, '{"answer": 4}')
    assert obeys("json_tools", grammar, WRITERS["json_tools"]([("now", {})]))
    assert not obeys("json_tools", grammar, "four")
    other = grammar_for_tools(tokenizer_of("json_tools"), [NOW], form=Grammar.regex("a+"))
    assert other.grammar == Grammar.regex("a+")
    assert "tools cannot be called" in other.notes[0]


def test_nothing_is_held_that_was_not_asked_for() -> None:
    tokenizer, form = tokenizer_of(None), Grammar.json_object()
    assert grammar_for_tools(tokenizer, [NOW]).grammar is None
    assert grammar_for_tools(tokenizer, [FIND], "none").grammar is None
    assert grammar_for_tools(tokenizer, [], form=form).grammar == form


UNKNOWN = {"type": "object", "properties": {"a": {"type": "string", "format": "no-such-thing"}},
           "patternProperties": {"(?=x)": {}}}  # fmt: skip


def test_a_schema_that_cannot_be_enforced_is_refused_if_strict_and_noted_if_not() -> None:
    tokenizer = tokenizer_of("json_tools")
    with pytest.raises(InvalidRequest, match="tool odd is strict, but the JSON schema cannot"):
        grammar_for_tools(tokenizer, [Tool("odd", parameters=UNKNOWN, strict=True)])
    loose = grammar_for_tools(tokenizer, [Tool("odd", parameters=UNKNOWN)], "required")
    assert "arguments of odd may be any object" in loose.notes[0]
    assert obeys("json_tools", loose.grammar, WRITERS["json_tools"]([("odd", {"b": [1]})]))


def test_a_choice_that_is_no_tool_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="names 'later', expected one of find, now"):
        grammar_for_tools(tokenizer_of(None), [FIND, NOW], "later")


def test_names_that_a_style_cannot_write_are_written_as_json() -> None:
    odd = Tool("a-b", parameters={"type": "object", "properties": {"x y": {"type": "null"}}})
    for style in ("pythonic", "qwen3_coder"):
        found = grammar_for_tools(tokenizer_of(style), [odd], "a-b", parallel=False)
        assert "written as JSON" in found.notes[0]
        calls, _ = read(style, wander(style, found.grammar, 1), [odd])
        assert calls[0][0] == "a-b"


CHOICES = {
    "type": "object",
    "properties": {
        "one": {"enum": ["a", None]},
        "two": {"anyOf": [{"type": "integer", "maximum": 9}, {"type": "null"}]},
        "three": {"enum": ["", "b"]},
    },
    "required": ["one", "two", "three"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("style", ["qwen3_coder", "minimax_m2", "glm47", "kimi_k2", "pythonic"])
def test_choices_that_may_be_null_or_empty(style: str) -> None:
    choose = Tool("choose", parameters=CHOICES)
    grammar = grammar_for_tools(tokenizer_of(style), [choose], "required", parallel=False).grammar
    for seed in range(4):
        ((_, given),), _ = read(style, wander(style, grammar, seed), [choose])
        assert given["one"] in ("a", None)
        assert given["two"] is None or given["two"] <= 9


def test_what_a_form_leaves_open_is_noted_for_strict_tools() -> None:
    schema = {"type": "object", "properties": {"id": {"type": "string", "pattern": "^a+$"}}}
    tool = Tool("get", parameters=schema, strict=True)
    assert (
        "get are not held to pattern" in grammar_for_tools(tokenizer_of("glm47"), [tool]).notes[0]
    )
    assert grammar_for_tools(tokenizer_of("json_tools"), [tool]).notes == ()
