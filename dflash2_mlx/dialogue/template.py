"""What a model's chat template takes, tried out with a few words; messages made to fit it."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

from dflash2_mlx.dialogue.events import Level, Message, Tool
from dflash2_mlx.dialogue.toolless import as_text, with_tools_described
from dflash2_mlx.errors import InvalidRequest
from dflash2_mlx.pair import Pair

LEVELS: tuple[Level, ...] = get_args(Level)
NOTE = "Note from the system: "
MARK, OTHER = "zebra41", "giraffe7"
# These belong to the call and not to the template.
RESERVED = ("messages", "conversation", "tools", "tokenize", "chat_template", "return_tensors",
            "return_dict", "return_assistant_tokens_mask", "padding", "truncation", "max_length",
            "tokenizer_kwargs", "documents")  # fmt: skip
LevelKwarg = Literal["reasoning_effort", "reasoning_strength"]


def user(text: str) -> Message:
    """A user's turn."""
    return {"role": "user", "content": text}


class Template:
    """The chat template of one pair; every trait is found out once, by rendering a few words."""

    def __init__(self, pair: Pair) -> None:
        self._tokenizer = pair.tokenizer
        self._text = str(getattr(pair.tokenizer, "chat_template", None) or "")

    def renders(self, messages: Sequence[Message], *marks: str, **variables: Any) -> bool:
        """Whether the template takes these messages, and shows all marks."""
        try:
            shown = self._tokenizer.apply_chat_template(
                list(messages), **{"tokenize": False, "add_generation_prompt": True, **variables}
            )
        except Exception:  # templates are programs and raise what they like
            return False
        text = shown if isinstance(shown, str) else self._tokenizer.decode(shown)
        return all(mark in text for mark in marks)

    @cached_property
    def takes_system(self) -> bool:
        """A system message at the start."""
        return self.renders([{"role": "system", "content": MARK}, user("a")], MARK)

    @cached_property
    def takes_late_system(self) -> bool:
        """A system message in the middle, and at the end."""
        late = {"role": "system", "content": MARK}
        turns = [user("a"), {"role": "assistant", "content": "b"}, late, user("c"), late]
        return self.renders(turns[:4], MARK) and self.renders(turns, MARK)

    @cached_property
    def takes_repeated_roles(self) -> bool:
        """Two turns of the user in a row."""
        return self.renders([user(MARK), user(OTHER)], MARK, OTHER)

    @cached_property
    def takes_tools(self) -> bool:
        """A list of tools."""
        return self.renders([user("a")], MARK, tools=[_tool(Tool(MARK, OTHER))])

    @cached_property
    def takes_calls(self) -> bool:
        """An assistant's call and a tool's answer."""
        return any(self._shows_call(form) for form in ({"key": MARK}, f'{{"key": "{MARK}"}}'))

    @cached_property
    def takes_objects(self) -> bool:
        """A call's arguments as an object; else they have to be JSON text."""
        return self._shows_call({"key": MARK})

    def _shows_call(self, arguments: Any) -> bool:
        function = {"name": OTHER, "arguments": arguments}
        call = {"id": "abcdefghi", "type": "function", "function": function}
        turns: list[Message] = [
            user("a"),
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": OTHER, "tool_call_id": "abcdefghi", "content": "quokka3"},
        ]
        return self.renders(turns, OTHER, MARK, "quokka3", tools=[_tool(Tool(OTHER))])

    @property
    def can_turn_thinking_off(self) -> bool:
        """Whether `enable_thinking` means something to it."""
        return "enable_thinking" in self._text

    @cached_property
    def level_kwarg(self) -> LevelKwarg | None:
        """What it calls the level of reasoning."""
        names: tuple[LevelKwarg, ...] = ("reasoning_strength", "reasoning_effort")
        return next((name for name in names if name in self._text), None)

    @cached_property
    def levels(self) -> tuple[str, ...]:
        """The levels of reasoning that it knows, least first."""
        kwarg = self.level_kwarg
        if kwarg is None:
            return ()
        taken = [level for level in LEVELS if self.renders([user("a")], **{kwarg: level})]
        if taken and not self.renders([user("a")], **{kwarg: MARK}):
            return tuple(taken)
        named = tuple(lv for lv in LEVELS if f"'{lv}'" in self._text or f'"{lv}"' in self._text)
        if len(named) > 1:
            return named
        return LEVELS[2:6] if kwarg == "reasoning_strength" else LEVELS[2:5]


_templates: WeakKeyDictionary[Pair, Template] = WeakKeyDictionary()


def template_of(pair: Pair) -> Template:
    """The pair's template with all that was found out about it."""
    if pair not in _templates:
        _templates[pair] = Template(pair)
    return _templates[pair]


def _tool(tool: Tool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters) or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def fit_messages(
    template: Template, messages: Sequence[Message], tools: Sequence[Tool]
) -> tuple[list[Message], list[dict[str, Any]] | None, list[str]]:
    """Messages and tools as the template takes them, and notes about what was moved.

    System messages at the start are merged. Later ones stay where the template takes them, else
    they become notes in a user turn at the same place, so that what comes before keeps its prefix.
    """
    notes: list[str] = []
    fitted = _merged_start(messages)
    if not template.takes_late_system and any(m["role"] == "system" for m in fitted[1:]):
        fitted = [*fitted[:1], *map(_as_note, fitted[1:])]
        notes.append("this model takes system messages only first: later ones are user notes")
    has_calls = any(m["role"] == "tool" or m.get("tool_calls") for m in fitted)
    if (tools and not template.takes_tools) or (has_calls and not template.takes_calls):
        fitted = with_tools_described([as_text(message) for message in fitted], tools)
        notes.append("this model's chat template has no tools: they are described in words")
        tools = ()
    if fitted and fitted[0]["role"] == "system" and not template.takes_system:
        instructions = [user(fitted[0]["content"])] if fitted[0]["content"] else []
        fitted = [*instructions, *fitted[1:]]
    if not template.takes_repeated_roles:
        fitted = _merged_turns(fitted)
    fitted = [_with_arguments(message, template.takes_objects) for message in fitted]
    return fitted, [_tool(tool) for tool in tools] or None, notes


def fit_variables(template: Template, given: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """The template's variables for a request; what `reasoning_effort` came to is noted.

    Raises `InvalidRequest` for a name that is no variable of a template.
    """
    variables = dict(given)
    for name in variables:
        if name in RESERVED:
            place = f"chat_template_kwargs.{name}"
            raise InvalidRequest(f"{place} is no variable of the template; leave it out", place)
    level = variables.pop("reasoning_effort", None)
    if level is not None:
        for name, value in _reasoning(template, str(level), notes).items():
            variables.setdefault(name, value)
    return variables


def _reasoning(template: Template, level: str, notes: list[str]) -> dict[str, Any]:
    if level not in LEVELS:
        notes.append(f"reasoning_effort {level!r} is unknown: taken as 'medium'")
        level = "medium"
    if level in ("none", "minimal") and template.can_turn_thinking_off:
        return {"enable_thinking": False}
    found: dict[str, Any] = {"enable_thinking": True} if template.can_turn_thinking_off else {}
    if template.level_kwarg is None:
        if not found:
            notes.append("this model has no levels of reasoning: reasoning_effort has no effect")
        return found
    rank = LEVELS.index(level)
    # Of two levels equally near, the higher: it does not ask for less than the client did.
    nearest = min(template.levels, key=lambda lv: (abs(LEVELS.index(lv) - rank), -LEVELS.index(lv)))
    if nearest != level:
        notes.append(f"reasoning_effort {level!r}: this model's nearest level is {nearest!r}")
    return {**found, template.level_kwarg: nearest}


def _merged_start(messages: Sequence[Message]) -> list[Message]:
    count = next((n for n, m in enumerate(messages) if m["role"] != "system"), len(messages))
    if count == 0:
        return list(messages)
    text = "\n\n".join(m["content"] for m in messages[:count] if m["content"])
    # An empty one stays: some templates have instructions of their own where there is none.
    return [{"role": "system", "content": text}, *messages[count:]]


def _as_note(message: Message) -> Message:
    return user(NOTE + message["content"]) if message["role"] == "system" else message


def _merged_turns(messages: Sequence[Message]) -> list[Message]:
    """Neighbours of the user, and of the assistant without calls, as one turn."""
    merged: list[Message] = []
    for message in messages:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last["role"] == message["role"] != "tool"
            and not last.get("tool_calls")
        ):
            text = "\n\n".join(part for part in (last["content"], message["content"]) if part)
            merged[-1] = {**last, **message, "content": text}
        else:
            merged.append(message)
    return merged


def _with_arguments(message: Message, as_objects: bool) -> Message:
    """The turn with its calls' arguments in one form; text that is no object is wrapped in one."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments: Any = call["function"]["arguments"]
        if not as_objects and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif as_objects and isinstance(arguments, str):
            arguments = {"arguments": arguments}
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}
