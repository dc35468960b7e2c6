"""What an answer becomes on /v1/responses: items, and the events of each."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Payload = dict[str, Any]  # one event of a stream, without its number


@dataclass(slots=True)
class MessageItem:
    """Text of an answer."""

    id: str
    index: int
    text: str = ""

    def open(self) -> Iterator[Payload]:
        """The item begins, and its one part."""
        yield _added(self.index, {**self.item("in_progress"), "content": []})
        yield self._part("response.content_part.added")

    def add(self, text: str) -> Iterator[Payload]:
        """A piece more."""
        self.text += text
        yield self._event("response.output_text.delta", delta=text, logprobs=[])

    def close(self, status: str) -> Iterator[Payload]:
        """It ends."""
        yield self._event("response.output_text.done", text=self.text, logprobs=[])
        yield self._part("response.content_part.done")
        yield _done(self.index, self.item(status))

    def item(self, status: str) -> dict[str, Any]:
        """The item as it is now."""
        content = [{"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}]
        head = {"type": "message", "id": self.id, "status": status, "role": "assistant"}
        return {**head, "content": content}

    def _part(self, kind: str) -> Payload:
        return self._event(kind, part=self.item("")["content"][0])

    def _event(self, kind: str, **more: Any) -> Payload:
        return {**_place(kind, self), "content_index": 0, **more}


@dataclass(slots=True)
class ReasoningItem:
    """The model's thinking: its own text, or under the name of a summary for who asked for one."""

    id: str
    index: int
    as_summary: bool
    text: str = ""

    def open(self) -> Iterator[Payload]:
        """The item begins, and its one part."""
        yield _added(self.index, {**self.item("in_progress"), **self._parts([])})
        yield self._part("added")

    def add(self, text: str) -> Iterator[Payload]:
        """A piece more."""
        self.text += text
        yield self._event(f"response.{self._name}.delta", delta=text)

    def close(self, status: str) -> Iterator[Payload]:
        """It ends."""
        yield self._event(f"response.{self._name}.done", text=self.text)
        yield self._part("done")
        yield _done(self.index, self.item(status))

    def item(self, status: str) -> dict[str, Any]:
        """The item as it is now."""
        return {
            "type": "reasoning",
            "id": self.id,
            "status": status,
            "encrypted_content": None,
            **self._parts([self._content()]),
        }

    @property
    def _name(self) -> str:
        return "reasoning_summary_text" if self.as_summary else "reasoning_text"

    def _content(self) -> dict[str, str]:
        return {"type": "summary_text" if self.as_summary else "reasoning_text", "text": self.text}

    def _parts(self, parts: list[Any]) -> dict[str, Any]:
        return {"summary": parts} if self.as_summary else {"summary": [], "content": parts}

    def _part(self, verb: str) -> Payload:
        name = "reasoning_summary_part" if self.as_summary else "content_part"
        return self._event(f"response.{name}.{verb}", part=self._content())

    def _event(self, kind: str, **more: Any) -> Payload:
        counted = "summary_index" if self.as_summary else "content_index"
        return {**_place(kind, self), counted: 0, **more}


@dataclass(slots=True)
class CallItem:
    """A call of a function."""

    id: str
    index: int
    call_id: str
    name: str
    namespace: str | None = None
    text: str = ""

    def open(self) -> Iterator[Payload]:
        """The item begins."""
        yield _added(self.index, self.item("in_progress"))

    def add(self, text: str) -> Iterator[Payload]:
        """A piece more of its arguments."""
        self.text += text
        yield {**_place("response.function_call_arguments.delta", self), "delta": text}

    def close(self, status: str) -> Iterator[Payload]:
        """It ends; one that was cut is never said to be done, since clients run what is done."""
        if status == "incomplete" and not _is_json(self.text):
            return
        kind = "response.function_call_arguments.done"
        yield {**_place(kind, self), "name": self.name, "arguments": self.text}
        yield _done(self.index, self.item("completed"))

    def item(self, status: str) -> dict[str, Any]:
        """The item as it is now."""
        if status == "incomplete" and _is_json(self.text):
            status = "completed"
        return {
            "type": "function_call",
            "id": self.id,
            "call_id": self.call_id,
            "name": self.name,
            **({"namespace": self.namespace} if self.namespace else {}),
            "arguments": self.text,
            "status": status,
        }


Item = MessageItem | ReasoningItem | CallItem


def _place(kind: str, item: Item) -> Payload:
    return {"type": kind, "item_id": item.id, "output_index": item.index}


def _added(index: int, item: Mapping[str, Any]) -> Payload:
    return {"type": "response.output_item.added", "output_index": index, "item": dict(item)}


def _done(index: int, item: Mapping[str, Any]) -> Payload:
    return {"type": "response.output_item.done", "output_index": index, "item": dict(item)}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
