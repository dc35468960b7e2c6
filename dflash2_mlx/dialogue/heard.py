"""An answer put together again from its events, as the turn that the next request will hold."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash2_mlx.dialogue.events import Event, Message, Reasoning, Text, ToolArguments, ToolStart


@dataclass(slots=True)
class Heard:
    """What has come of an answer. `calls` have `id`, `name`, and `arguments`, JSON text."""

    text: str = ""
    thought: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def take(self, *events: Event) -> None:
        """Take events in; those that hold nothing of the answer are let go."""
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

    @property
    def message(self) -> dict[str, Any]:
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


def parsed_arguments(arguments: Any) -> Any:
    """A call's arguments as an object where they are one, else as they are."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        loaded = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return loaded if isinstance(loaded, dict) else arguments


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": call["name"], "arguments": parsed_arguments(call["arguments"])}
    return {"id": call["id"], "type": "function", "function": function}
