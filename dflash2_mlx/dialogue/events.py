"""What a dialect asks of the worker, and what it hears back. Nothing here knows HTTP or MLX."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dflash2_mlx.errors import DFlashError
from dflash2_mlx.grammar import Grammar

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call; `parameters` is its JSON schema."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False


Level = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]  # of reasoning
ToolChoice = Literal["auto", "none", "required"] | str  # another word is the name of a tool


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, the same for every dialect.

    Either `messages`, as `server.shaping` gives them (roles system, user, assistant, tool; contents
    are text), or a raw `prompt`, text or token ids. `sampling` holds only the fields that the
    request set: they win over the model's own defaults. `template` are variables of the chat
    template, and `reasoning_effort`, a level that is taken as the nearest one the template knows.
    `session` is a hint for keeping prompt states, never part of their keys. `notes` tell what was
    left aside.
    """

    messages: tuple[Message, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    grammar: Grammar | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    session: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Queued:
    """Waiting; `position` 0 is next."""

    position: int


@dataclass(frozen=True, slots=True)
class Prefilling:
    """`done` of `total` prompt tokens were read."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Writing:
    """Tokens are being written; nothing of them can be shown yet."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's thinking: `tokens` of them, the draft proposed `from_draft`."""

    text: str
    tokens: int = 0
    from_draft: int = 0


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer: `tokens` of them, the draft proposed `from_draft`."""

    text: str
    tokens: int = 0
    from_draft: int = 0


@dataclass(frozen=True, slots=True)
class ToolStart:
    """A tool call whose name is certain; `index` counts the calls of one answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """The next piece of a call's arguments, JSON text."""

    index: int
    json: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of tokens; reasoning and accepted ones are parts of `completion`."""

    prompt: int
    completion: int
    cached: int = 0
    reasoning: int = 0
    accepted: int = 0
    rejected: int = 0


@dataclass(frozen=True, slots=True)
class Done:
    """The end of an answer: exactly one of these, or one `Failed`.

    `notes` are things worth telling the client (tools skipped, an unknown reasoning level taken as
    the nearest). `timings` has llama.cpp's names. `effective` is `Effective` as a dict, with
    `passes`, `tokens_per_pass` and `pass_lengths`: how many passes gave 1, 2, ... tokens. `stop` is
    the stop string that ended the answer. `logprobs` has OpenAI's entry for each token, if asked.
    """

    finish: Literal["stop", "length", "tool_calls"]
    usage: Usage
    timings: Mapping[str, float]
    effective: Mapping[str, Any]
    stop: str | None = None
    notes: tuple[str, ...] = ()
    logprobs: tuple[Mapping[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The request could not be answered, or not to its end."""

    error: DFlashError


Waiting = Queued | Prefilling | Writing
Event = Waiting | Reasoning | Text | ToolStart | ToolArguments | Done | Failed
