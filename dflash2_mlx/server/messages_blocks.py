"""What an answer becomes on /v1/messages: blocks, and the events of each."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pydantic_core

Payload = dict[str, Any]
SIGNATURE = "dflash2-mlx"  # clients keep it and send it back; nothing here is signed


@dataclass(slots=True)
class TextBlock:
    """Text of an answer."""

    text: str = ""

    def start(self) -> dict[str, Any]:
        """The block as it begins."""
        return {"type": "text", "text": ""}

    def add(self, text: str) -> Iterator[Payload]:
        """A piece more."""
        self.text += text
        yield {"type": "text_delta", "text": text}

    def end(self) -> Iterator[Payload]:
        """What comes before it stops."""
        yield from ()

    def whole(self) -> dict[str, Any]:
        """The block as it is now."""
        return {"type": "text", "text": self.text}


@dataclass(slots=True)
class ThinkingBlock:
    """The model's thinking, or an empty block for who wants it left out."""

    omitted: bool
    text: str = ""

    def start(self) -> dict[str, Any]:
        """The block as it begins."""
        return {"type": "thinking", "thinking": "", "signature": ""}

    def add(self, text: str) -> Iterator[Payload]:
        """A piece more."""
        if not self.omitted:
            self.text += text
            yield {"type": "thinking_delta", "thinking": text}

    def end(self) -> Iterator[Payload]:
        """What comes before it stops."""
        yield {"type": "signature_delta", "signature": SIGNATURE}

    def whole(self) -> dict[str, Any]:
        """The block as it is now."""
        return {"type": "thinking", "thinking": self.text, "signature": SIGNATURE}


@dataclass(slots=True)
class ToolUseBlock:
    """A call of a function."""

    id: str
    name: str
    text: str = ""

    def start(self) -> dict[str, Any]:
        """The block as it begins."""
        return {"type": "tool_use", "id": self.id, "name": self.name, "input": {}}

    def add(self, text: str) -> Iterator[Payload]:
        """A piece more of its input."""
        self.text += text
        yield {"type": "input_json_delta", "partial_json": text}

    def end(self) -> Iterator[Payload]:
        """What comes before it stops."""
        yield from ()

    def whole(self) -> dict[str, Any]:
        """The block as it is now; of an input that was cut, what a client can read of it."""
        try:
            given = pydantic_core.from_json(self.text or "{}", allow_partial=True)
        except ValueError:
            given = {}
        return {**self.start(), "input": given if isinstance(given, dict) else {}}


Block = TextBlock | ThinkingBlock | ToolUseBlock
