"""Reading, behind an answer, what the next request of the conversation will begin with.

The answer's own passes left rows behind that a cold run would have rounded otherwise. So the answer
is read once more, as a prompt, while its client is busy with it: the next turn then reads only what
is new. Where the client sends something else, no more than this reading is lost.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dflash2_mlx.decode import OnPrefill
from dflash2_mlx.dialogue.events import (
    Ask,
    Event,
    Message,
    Reasoning,
    Text,
    ToolArguments,
    ToolStart,
)
from dflash2_mlx.dialogue.prompt import render
from dflash2_mlx.generation import read_ahead
from dflash2_mlx.marking import marker_of, marks_of
from dflash2_mlx.pair import BlockSize, Pair
from dflash2_mlx.server.job import Tell
from dflash2_mlx.server.shaping import parsed_arguments

log = logging.getLogger("dflash2_mlx.server")


@dataclass(slots=True)
class Listener:
    """Passes events on, and puts together the message that the client will send back."""

    tell: Tell
    text: str = ""
    thought: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, *events: Event) -> None:
        """Take events in, then hand them on."""
        for event in events:
            match event:
                case Text():
                    self.text += event.text
                case Reasoning():
                    self.thought += event.text
                case ToolStart():
                    self.calls.append({"id": event.id, "name": event.name, "arguments": ""})
                case ToolArguments():
                    self.calls[event.index]["arguments"] += event.json
        self.tell(*events)

    @property
    def message(self) -> Message:
        """The answer as a turn."""
        turn: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.thought:
            turn["reasoning_content"] = self.thought
        if self.calls:
            turn["tool_calls"] = [_call(call) for call in self.calls]
        return turn

    @property
    def replies(self) -> list[Message]:
        """A turn that could follow: what comes then decides how templates show this one."""
        if not self.calls:
            return [{"role": "user", "content": "a"}]
        return [
            {"role": "tool", "name": call["name"], "tool_call_id": call["id"], "content": "a"}
            for call in self.calls
        ]


def read_on(pair: Pair, ask: Ask, heard: Listener, block_size: BlockSize, go_on: OnPrefill) -> int:
    """Read the conversation up to the end of its last answer; gives the tokens that were new.

    `go_on` hears of every chunk.
    """
    if ask.prompt is not None or ask.messages[-1]["role"] == "assistant":
        return 0
    following = replace(ask, messages=(*ask.messages, heard.message, *heard.replies))
    rendered = render(pair, following)
    marks = marks_of(pair, rendered.messages, rendered.ids, rendered.variables)
    if marks is None:
        return 0
    place = _last_answer(rendered.messages) + 1
    end = marker_of(pair).end_before(place, rendered.messages, rendered.ids, rendered.variables)
    num_read = read_ahead(
        pair,
        rendered.ids[:end],
        marks,
        session=ask.session,
        block_size=block_size,
        on_prefill=go_on,
    )
    log.debug("read ahead %d tokens for the next turn", num_read)
    return num_read


def _last_answer(messages: Sequence[Message]) -> int:
    return max(n for n, message in enumerate(messages) if message["role"] == "assistant")


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": call["name"], "arguments": parsed_arguments(call["arguments"])}
    return {"id": call["id"], "type": "function", "function": function}
