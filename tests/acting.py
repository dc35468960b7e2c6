"""A pair that acts out one task with whatever tools a client brings: red becomes blue."""

import dataclasses
import json
import zlib
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from byte_bpe import byte_bpe
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools
from tiny import END, VOCAB, ScriptedDrafter, pair_of, tiny_target

from dflash2_mlx.dialogue.events import Ask
from dflash2_mlx.dialogue.prompt import Prepared, prepare
from dflash2_mlx.pair import Pair
from dflash2_mlx.server.answer import Answerer
from dflash2_mlx.server.job import Tell
from dflash2_mlx.target import Target

FILE, BEFORE, AFTER = "notes.txt", "the door is red\n", "the door is blue\n"
TASK = f"Change red to blue in {FILE}"
THOUGHT, LOOK, END_WORDS, TITLE = "Let me see.", "I look first. ", "The door is blue now.", "A door"
PIECE = 64  # letters of a prompt to one token: agents send 100,000 of them


class CoarseTokenizer(TokenizerWrapper):  # type: ignore[misc]
    """Answers are bytes and a few pairs of them, with Qwen's tags; a prompt is far coarser."""

    chat_template = "everything as JSON"
    think_start, think_end = "<think>", "</think>"

    def __init__(self) -> None:
        super().__init__(
            byte_bpe(),
            tool_parser=json_tools.parse_tool_call,
            tool_call_start=json_tools.tool_call_start,
            tool_call_end=json_tools.tool_call_end,
        )

    def encode(self, text: str, **options: Any) -> list[int]:
        """A prompt, which nobody decodes."""
        pieces = (text[start : start + PIECE] for start in range(0, len(text), PIECE))
        return [zlib.crc32(piece.encode()) % 256 for piece in pieces]

    def apply_chat_template(
        self, messages: Sequence[Any], tokenize: bool = True, **variables: Any
    ) -> Any:
        """Everything that a message holds, and the tools."""
        text = json.dumps([variables.get("tools"), *messages], ensure_ascii=False)
        return self.encode(text) if tokenize else text


class Actor(Target):
    """A real tiny model that reads every prompt, and says what it is told."""

    def __init__(self) -> None:
        super().__init__(tiny_target("dense"), taps=[0])
        self._start, self._script = 0, [END]

    def begin(self, start: int, text: str) -> None:
        """What is to be said behind a prompt of `start` tokens."""
        self._start, self._script = start, [*byte_bpe().encode(text), END]

    def said(self, position: int) -> int:
        """The token at a position."""
        place = position - self._start
        return self._script[place] if 0 <= place < len(self._script) else END

    def read(self, tokens: mx.array, caches: list[Any], **options: Any) -> Any:
        position = caches[0].offset
        reading = super().read(tokens, caches, **options)
        following = [self.said(position + n) for n in range(1, tokens.size + 1)]
        return dataclasses.replace(reading, logits=mx.eye(VOCAB)[mx.array(following)] * 50)


class ActingAnswerer(Answerer):
    """Puts the words for each request into the actor's mouth, and answers as always."""

    def __call__(self, pair: Pair, asked: Ask | Prepared, tell: Tell) -> None:
        prepared = asked if isinstance(asked, Prepared) else prepare(pair, asked)
        assert isinstance(pair.target, Actor)
        pair.target.begin(len(prepared.ids), words_for(prepared.ask))
        super().__call__(pair, prepared, tell)


def acting_pair(context_limit: int = 100_000) -> Pair:
    """The actor with a drafter that knows its lines."""
    actor = Actor()

    def propose(position: int, width: int) -> list[int]:
        return [actor.said(position + 1 + n) for n in range(width - 1)]

    pair = pair_of(actor, ScriptedDrafter(propose), context_limit=context_limit)
    pair.tokenizer = CoarseTokenizer()
    return pair


def words_for(ask: Ask) -> str:
    """What the actor says: a call to read, a call to change, the end; a title without tools."""
    acts = _acts({tool.name for tool in ask.tools}, _folder(ask))
    if not acts:
        return f'{{"title":"{TITLE}"}}' if ask.grammar else TITLE
    turn = sum(message["role"] == "tool" for message in ask.messages)
    thought = f"<think>\n{THOUGHT}\n</think>\n\n"
    return thought + (acts[turn] if turn < len(acts) else END_WORDS)


def _folder(ask: Ask) -> str:
    """Where the task is, as clients tell it in their own ways."""
    text = "\n".join(message["content"] for message in ask.messages)
    for mark in ("orking directory: ", "<cwd>", "folder "):
        if mark in text:
            return text.partition(mark)[2].split("\n")[0].split("<")[0].strip()
    return "."


def _acts(names: set[str], folder: str) -> list[str]:
    path = f"{folder}/{FILE}"
    if "exec_command" in names:  # Codex
        change = f"sed -i s/red/blue/ {FILE} && cat {FILE}"
        return [
            LOOK + _call("exec_command", cmd=f"cat {FILE}"),
            _call("exec_command", cmd=change),
        ]
    if "Edit" in names:  # Claude Code
        change = _call("Edit", file_path=path, old_string="red", new_string="blue")
        return [LOOK + _call("Read", file_path=path), change]
    if "edit" in names:  # opencode
        change = _call("edit", filePath=path, oldString="red", newString="blue")
        return [LOOK + _call("read", filePath=path), change]
    if "change_file" in names:  # the functions given to llm
        change = _call("change_file", path=path, old="red", new="blue")
        return [LOOK + _call("read_file", path=path), change]
    return []


def _call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
