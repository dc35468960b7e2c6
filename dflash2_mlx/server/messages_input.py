"""What a client sends to /v1/messages: blocks, gathered into plain messages; its tools."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash2_mlx.dialogue.events import ToolChoice
from dflash2_mlx.errors import BodyTooLarge, InvalidRequest, UnsupportedField
from dflash2_mlx.server.fields import MAX_TOOLS, Toolbox, choice_of, read_tool

ROLES = ("user", "assistant", "system")
HARMLESS = ("redacted_thinking", "server_tool_use", "tool_reference", "container_upload")
BILLING = "x-anthropic-billing-header:"  # Claude Code's accounting, new in every request


@dataclass(slots=True)
class History:
    """Anthropic's messages gathered into OpenAI's; `skipped` are kinds of blocks left aside."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def add(self, message: Any, place: str) -> None:
        """Take one message in; raises `InvalidRequest` naming its place."""
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ROLES:
            where = f"{place}.role"
            raise InvalidRequest(f"{where} is {role!r}, expected one of {', '.join(ROLES)}", where)
        blocks = _blocks(message.get("content"), f"{place}.content")
        if role == "assistant":
            self._assistant(blocks, f"{place}.content")
        else:
            self._user(role, blocks, f"{place}.content")

    def add_system(self, content: Any) -> None:
        """Take the system prompt in."""
        texts = [
            text
            for text in self._texts(_blocks(content, "system"), "system")
            # It would change the prompt's first words each time, and no state could be kept.
            if not text.startswith(BILLING)
        ]
        if texts:
            self.messages.append({"role": "system", "content": "\n\n".join(texts)})

    def _user(self, role: str, blocks: Sequence[Any], place: str) -> None:
        """Results of tools come first: they answer the turn before."""
        results = [(n, b) for n, b in enumerate(blocks) if b["type"] == "tool_result"]
        for number, block in results:
            self._result(block, f"{place}[{number}]")
        rest = [block for block in blocks if block["type"] != "tool_result"]
        if rest or not results:
            text = "\n\n".join(self._texts(rest, place))
            self.messages.append({"role": role, "content": text})

    def _assistant(self, blocks: Sequence[Any], place: str) -> None:
        turn: dict[str, Any] = {"role": "assistant", "content": ""}
        for number, block in enumerate(blocks):
            match block["type"]:
                case "thinking":
                    thought = turn.get("reasoning_content", "") + str(block.get("thinking") or "")
                    turn["reasoning_content"] = thought
                case "tool_use":
                    call = _call(block, f"{place}[{number}]")
                    turn.setdefault("tool_calls", []).append(call)
                case _:
                    turn["content"] += "".join(self._texts([block], f"{place}[{number}]"))
        self.messages.append(turn)

    def _result(self, block: Mapping[str, Any], place: str) -> None:
        blocks = _blocks(block.get("content") or [], f"{place}.content")
        text = "\n".join(self._texts(blocks, f"{place}.content"))
        if block.get("is_error") is True:
            text = f"Error: {text}"
        call_id = block.get("tool_use_id")
        if not isinstance(call_id, str):
            raise InvalidRequest(f"{place} has no tool_use_id", f"{place}.tool_use_id")
        self.messages.append({"role": "tool", "content": text, "tool_call_id": call_id})

    def _texts(self, blocks: Sequence[Any], place: str) -> list[str]:
        texts = []
        for block in blocks:
            kind, text = block["type"], block.get("text")
            if kind == "text" and isinstance(text, str):
                texts.append(text)
            elif kind == "text":
                raise InvalidRequest(f"{place} has a text block without text", place)
            elif kind in HARMLESS or kind.endswith("_tool_result"):
                self.skipped.append(kind)
            else:
                raise UnsupportedField(
                    f"{place} has a block of type {kind!r}, and this model reads only text; "
                    "leave it out",
                    place,
                )
        return texts


def read_messages(messages: Sequence[Any], system: Any) -> History:
    """The request's messages, the system prompt first."""
    history = History()
    if system:
        history.add_system(system)
    for number, message in enumerate(messages):
        history.add(message, f"messages[{number}]")
    return history


def read_tools(tools: Sequence[Any] | None) -> Toolbox:
    """Anthropic's list of tools; those that only its own servers run are skipped and noted."""
    if len(tools or ()) > MAX_TOOLS:
        raise BodyTooLarge(f"tools has {len(tools or ())} entries, at most {MAX_TOOLS} are read")
    found, skipped = [], []
    for number, tool in enumerate(tools or ()):
        place = f"tools[{number}]"
        if not isinstance(tool, Mapping):
            raise InvalidRequest(f"{place} is no object", place)
        if tool.get("type") in (None, "custom"):
            found.append(read_tool(tool, place, "input_schema"))
        else:
            skipped.append(str(tool["type"]))
    notes = (f"tools of these kinds were skipped: {', '.join(skipped)}",) if skipped else ()
    return Toolbox(tuple(found), notes)


def read_choice(choice: Mapping[str, Any] | None, box: Toolbox) -> ToolChoice:
    """Which tools may or must be called; raises `InvalidRequest` for what is no choice."""
    kind = "auto" if choice is None else choice.get("type")
    if choice is not None and kind == "tool":
        return choice_of(str(choice.get("name")), box)
    if kind not in ("auto", "any", "none"):
        raise InvalidRequest(
            f"tool_choice.type is {kind!r}, expected auto, any, tool or none", "tool_choice"
        )
    if kind == "any" and not box.tools:
        raise InvalidRequest("tool_choice is any, but tools has no function", "tool_choice")
    return "required" if kind == "any" else kind


def _blocks(content: Any, place: str) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    blocks = content if isinstance(content, list) else None
    if blocks is None or not all(
        isinstance(block, Mapping) and isinstance(block.get("type"), str) for block in blocks
    ):
        raise InvalidRequest(f"{place}: expected text or a list of blocks with a type", place)
    return blocks


def _call(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    if not isinstance(block.get("name"), str):
        raise InvalidRequest(f"{place} has no name", f"{place}.name")
    function = {"name": block["name"], "arguments": block.get("input") or {}}
    return {"id": str(block.get("id") or ""), "function": function}
