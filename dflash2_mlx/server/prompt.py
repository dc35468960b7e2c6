"""A request made ready for the engine: its prompt as token ids, checked. Needs no MLX thread."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from dflash2_mlx.errors import InvalidRequest
from dflash2_mlx.generation import checked_prompt
from dflash2_mlx.pair import Pair
from dflash2_mlx.sampling import SamplingParams
from dflash2_mlx.server.events import Ask, Message, Tool
from dflash2_mlx.server.template import fit_messages, fit_variables, template_of

TAIL = 32  # ids at a prompt's end that can hold the tag which opens a thought


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the worker needs of a request: ids, how to choose tokens, how to read the answer."""

    ask: Ask
    ids: tuple[int, ...]
    sampling: SamplingParams
    tools: tuple[Tool, ...] = ()
    starts_in_reasoning: bool = False
    notes: tuple[str, ...] = ()


def prepare(pair: Pair, ask: Ask) -> Prepared:
    """Render, tokenize and check a request; safe on any thread.

    Raises `InvalidRequest` (`ContextExceeded` where the prompt is too long) naming the field.
    """
    sampling = _sampling(pair, ask)
    if ask.prompt is not None:
        ids = pair.encode(ask.prompt) if isinstance(ask.prompt, str) else ask.prompt
        return Prepared(ask, tuple(checked_prompt(pair, ids)), sampling, notes=ask.notes)
    if not ask.messages:
        raise InvalidRequest("messages is empty, expected at least one", "messages")
    tools = () if ask.tool_choice == "none" else ask.tools
    template, notes = template_of(pair), list(ask.notes)
    messages, shown_tools, moved = fit_messages(template, ask.messages, tools)
    variables = fit_variables(template, ask.template, notes)
    if shown_tools:
        variables["tools"] = shown_tools
    ids = checked_prompt(pair, _encode(pair, messages, variables))
    return Prepared(
        ask,
        tuple(ids),
        sampling,
        tools=tools,
        starts_in_reasoning=_starts_in_reasoning(pair, ids),
        notes=(*notes, *moved),
    )


def _sampling(pair: Pair, ask: Ask) -> SamplingParams:
    given = dict(ask.sampling)
    if ask.grammar is not None:
        ask.grammar.check()
    if ask.max_tokens is not None and ask.max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {ask.max_tokens}, expected at least 1", "max_tokens")
    try:
        return replace(pair.sampling(**given), grammar=ask.grammar)
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


def _starts_in_reasoning(pair: Pair, ids: Sequence[int]) -> bool:
    """Whether the prompt ends in the tag that opens a thought."""
    tag = getattr(pair.tokenizer, "think_start", None)
    return bool(tag) and pair.tokenizer.decode(list(ids[-TAIL:])).rstrip().endswith(tag)
