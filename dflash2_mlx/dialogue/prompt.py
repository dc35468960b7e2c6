"""A request made ready for the engine: its prompt as token ids, checked. Needs no MLX thread."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from dflash2_mlx.borders import Marks
from dflash2_mlx.dialogue.events import Ask, Message, Tool
from dflash2_mlx.dialogue.forced import ToolGrammar, grammar_for_tools
from dflash2_mlx.dialogue.segments import opens_reasoning
from dflash2_mlx.dialogue.template import Template, fit_messages, fit_variables, template_of
from dflash2_mlx.errors import InvalidRequest
from dflash2_mlx.generation import checked_prompt
from dflash2_mlx.grammar import Grammar
from dflash2_mlx.marking import marks_of, raw_marks
from dflash2_mlx.pair import Pair
from dflash2_mlx.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the worker needs of a request: ids, how to choose tokens, how to read the answer."""

    ask: Ask
    ids: tuple[int, ...]
    sampling: SamplingParams
    tools: tuple[Tool, ...] = ()
    starts_in_reasoning: bool = False
    notes: tuple[str, ...] = ()
    marks: Marks | None = None


@dataclass(frozen=True, slots=True)
class Rendered:
    """Messages and variables as the template takes them, the ids it gave, and notes."""

    messages: list[Message]
    variables: dict[str, Any]
    ids: list[int]
    notes: tuple[str, ...]


def prepare(pair: Pair, ask: Ask) -> Prepared:
    """Render, tokenize and check a request; safe on any thread.

    Raises `InvalidRequest` (`ContextExceeded` where the prompt is too long) naming the field.
    """
    held = _held(pair, ask)
    sampling = _sampling(pair, ask, held.grammar)
    if ask.prompt is not None:
        ids = pair.encode(ask.prompt) if isinstance(ask.prompt, str) else ask.prompt
        ids = tuple(checked_prompt(pair, ids))
        return Prepared(ask, ids, sampling, notes=ask.notes, marks=raw_marks(pair, len(ids)))
    rendered = render(pair, ask)
    ids = rendered.ids
    starts_in_reasoning = opens_reasoning(pair.tokenizer, ids, pair.end_tokens)
    if starts_in_reasoning and _holds_at_once(ask):
        ids, starts_in_reasoning = [*ids, *_end_of_thought(pair)], False
    return Prepared(
        ask,
        tuple(checked_prompt(pair, ids)),
        sampling,
        tools=_shown(ask),
        starts_in_reasoning=starts_in_reasoning,
        notes=(*rendered.notes, *held.notes),
        marks=marks_of(pair, rendered.messages, ids, rendered.variables),
    )


def count_tokens(pair: Pair, ask: Ask) -> int:
    """How long the prompt of messages is, also where it is longer than the model reads."""
    return len(render(pair, ask).ids)


def render(pair: Pair, ask: Ask) -> Rendered:
    """The ids of messages, unchecked; notes tell what was moved to fit the template."""
    if not ask.messages:
        raise InvalidRequest("messages is empty, expected at least one", "messages")
    template, notes = template_of(pair), list(ask.notes)
    messages, tools, moved = fit_messages(template, ask.messages, _shown(ask))
    variables = fit_variables(template, ask.template, notes)
    if _holds_at_once(ask):
        if _wants_thought(ask, template):
            notes.append("a form holds from the first token on: no thought comes before it")
        if template.can_turn_thinking_off:
            variables["enable_thinking"] = False
    if tools:
        variables["tools"] = tools
    ids = _encode(pair, messages, variables)
    return Rendered(messages, variables, ids, (*notes, *moved))


def _wants_thought(ask: Ask, template: Template) -> bool:
    """Whether a request asks for thinking of a model that can be told to."""
    if "enable_thinking" in ask.template:
        return bool(ask.template["enable_thinking"])
    can_be_told = template.can_turn_thinking_off or template.level_kwarg is not None
    return can_be_told and ask.template.get("reasoning_effort", "none") not in ("none", "minimal")


def _shown(ask: Ask) -> tuple[Tool, ...]:
    return () if ask.tool_choice == "none" else ask.tools


def _held(pair: Pair, ask: Ask) -> ToolGrammar:
    """What the answer is held to: a form, a forced call, strict schemas, or nothing."""
    if ask.grammar is not None:
        ask.grammar.check()
    if ask.prompt is not None:
        return ToolGrammar(ask.grammar)
    parallel = ask.parallel_tool_calls
    return grammar_for_tools(pair.tokenizer, ask.tools, ask.tool_choice, parallel, ask.grammar)


def _holds_at_once(ask: Ask) -> bool:
    """Whether the answer begins in a form or a forced call, and leaves no room for a thought."""
    return ask.grammar is not None or (bool(ask.tools) and ask.tool_choice not in ("auto", "none"))


def _sampling(pair: Pair, ask: Ask, grammar: Grammar | None) -> SamplingParams:
    given = dict(ask.sampling)
    if ask.max_tokens is not None and ask.max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {ask.max_tokens}, expected at least 1", "max_tokens")
    try:
        return replace(pair.sampling(**given), grammar=grammar)
    except InvalidRequest as error:
        names = {field.name for field in fields(SamplingParams)}
        error.param = next((word for word in str(error).split() if word in names), None)
        raise


def _encode(pair: Pair, messages: Sequence[Message], variables: dict[str, Any]) -> list[int]:
    """Token ids; where the last message is the assistant's, the answer goes on from it."""
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        return pair.encode_chat(messages, **variables)
    going_on = {"add_generation_prompt": False, "continue_final_message": True}
    try:
        return pair.encode_chat(messages, **{**variables, **going_on})
    except InvalidRequest:  # templates that trim or rewrite the last turn cannot go on from it
        if len(messages) == 1:
            raise
        ids = pair.encode_chat(messages[:-1], **variables)
        return ids + list(pair.tokenizer.encode(last["content"], add_special_tokens=False))


def _end_of_thought(pair: Pair) -> list[int]:
    """Closes a thought that the template opened and cannot leave out."""
    closed = f"\n{pair.tokenizer.think_end}\n\n"
    return list(pair.tokenizer.encode(closed, add_special_tokens=False))
