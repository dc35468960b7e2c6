"""A chat that knows no terminal: its turns, its commands, and how the next answer comes."""

import json
import re
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from dflash2_mlx.dialogue.events import Ask, Event, Level
from dflash2_mlx.dialogue.heard import Heard
from dflash2_mlx.errors import InvalidRequest

if TYPE_CHECKING:
    from dflash2_mlx.generation import Result
    from dflash2_mlx.pair import Pair
    from dflash2_mlx.sampling import SamplingParams

COMMANDS = {
    "/reset": "forget the conversation so far",
    "/system": "TEXT sets the instructions; alone it shows them",
    "/think": "LEVEL sets how long the model thinks (none, low, medium, high); alone it shows that",
    "/save": "FILE.md or FILE.json: write the conversation there",
    "/help": "show these commands",
    "/quit": "leave, as Ctrl-D does",
}


def is_command(line: str) -> bool:
    """Whether a line is meant as a /command; a path or a pasted comment is not."""
    return re.fullmatch(r"/[A-Za-z]+( .*)?", line.strip()) is not None


class Leave(Exception):
    """The user asked to end the chat."""


class Conversation:
    """The turns so far, and the settings for the next answer.

    Args:
        pair: the loaded models.
        asked: what every turn asks for besides its messages: sampling, length, reasoning effort.
        system: instructions that come before the first turn.
        block_size: tokens checked at once.
        exact: settle near ties by passes of their own.
    """

    def __init__(
        self,
        pair: "Pair",
        asked: Ask,
        *,
        system: str | None = None,
        block_size: int | Literal["auto"] = "auto",
        exact: bool = False,
    ) -> None:
        self.pair = pair
        self.asked = asked
        self.system = system
        self.block_size = block_size
        self.exact = exact
        self.turns: list[dict[str, str]] = []
        self.result: Result | None = None  # of the last answer
        self.num_thought = 0  # tokens of it
        self.notes: list[str] = []  # what the last question gave to tell, for the first time
        self._told: set[str] = set()
        self._saved: set[Path] = set()

    @property
    def params(self) -> "SamplingParams":
        """How tokens are chosen, in every turn."""
        return self.pair.sampling(**self.asked.sampling)

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation as a chat template takes it."""
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, *self.turns]

    def ask(self, text: str) -> Generator[Event]:
        """Yield the answer piece by piece, thoughts and text; `result` then holds its figures.

        Closing the iterator early stops the answer and keeps what came of it. A question that
        got no answer at all is not kept, so an error leaves the conversation as it was.

        Raises:
            DFlashError: the question cannot be answered, for instance for its length.
        """
        from dflash2_mlx.dialogue.prompt import prepare
        from dflash2_mlx.dialogue.reading import begin, listen, reader_for

        self.result, self.notes = None, []
        question = {"role": "user", "content": text}
        prepared = prepare(self.pair, replace(self.asked, messages=(*self.messages, question)))
        self.notes = [told for told in prepared.notes if told not in self._told]
        self._told.update(self.notes)
        generation = begin(self.pair, prepared, block_size=self.block_size, exact=self.exact)
        reader, heard = reader_for(self.pair, prepared), Heard()
        try:
            for event in listen(reader, generation):
                heard.take(event)
                yield event
        finally:
            generation.close()
            self.result, self.num_thought = generation.result, reader.num_reasoning
            if self.result.finish_reason or heard.text or heard.thought:
                self.turns += [question, heard.message]

    def command(self, line: str) -> str:
        """Run a /command and return what there is to tell about it.

        Raises:
            Leave: the command was /quit.
            InvalidRequest: the command is unknown or cannot be done.
        """
        name, _, rest = line.strip().partition(" ")
        match name:
            case "/reset":
                return self._reset()
            case "/system":
                return self._set_system(rest.strip())
            case "/think":
                return self._set_effort(rest.strip())
            case "/save":
                return self._save(rest.strip())
            case "/help":
                return "\n".join(f"{known:<8} {what}" for known, what in COMMANDS.items())
            case "/quit":
                raise Leave
        raise InvalidRequest(f"{name} is no command here; there are {', '.join(COMMANDS)}")

    def _reset(self) -> str:
        self.turns.clear()
        return "conversation forgotten" + (", system prompt kept" if self.system else "")

    def _set_system(self, text: str) -> str:
        if text:
            self.system = text
            return "system prompt set"
        return f"system prompt: {self.system}" if self.system else "no system prompt"

    def _set_effort(self, level: str) -> str:
        if level:
            if level not in get_args(Level):
                known = ", ".join(get_args(Level))
                raise InvalidRequest(f"/think expects one of {known}, got {level!r}")
            self.asked = replace(self.asked, template={"reasoning_effort": level})
        level = self.asked.template.get("reasoning_effort", "the model's own way")
        return f"thinking: {level}"

    def _save(self, name: str) -> str:
        if not self.turns:
            raise InvalidRequest("there is nothing to save yet")
        path = Path(name).expanduser()
        if path.suffix not in (".md", ".json"):
            raise InvalidRequest(f"/save expects FILE.md or FILE.json, got {name or 'no name'!r}")
        if path.exists() and path not in self._saved:
            raise InvalidRequest(f"{path} exists already; choose another name")
        text = self.as_json() if path.suffix == ".json" else self.as_markdown()
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise InvalidRequest(f"cannot write {path}: {error.strerror}") from None
        self._saved.add(path)
        return f"saved to {path}"

    def as_json(self) -> str:
        """The conversation as `{"model": name, "messages": [...]}`."""
        content = {"model": self.pair.name, "messages": self.messages}
        return json.dumps(content, indent=2, ensure_ascii=False) + "\n"

    def as_markdown(self) -> str:
        """The conversation as a page with one heading for each turn."""
        titles = {"system": "System", "user": "You", "assistant": self.pair.name}
        parts = [f"## {titles[m['role']]}\n\n{_as_paragraphs(m)}\n" for m in self.messages]
        return "\n".join([f"# Chat with {self.pair.name}\n", *parts])


def _as_paragraphs(message: dict[str, str]) -> str:
    """A turn's text, behind its thought as a quotation."""
    thought = message.get("reasoning_content", "").strip()
    quoted = "\n".join(f"> {line}".rstrip() for line in thought.splitlines())
    return "\n\n".join(part for part in (quoted, message["content"].strip()) if part)
