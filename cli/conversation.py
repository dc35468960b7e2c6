"""A chat that knows no terminal: its turns, its commands, and how the next answer comes."""

import json
import re
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dflash2_mlx.errors import InvalidRequest

if TYPE_CHECKING:
    from dflash2_mlx.generation import Result
    from dflash2_mlx.pair import Pair
    from dflash2_mlx.sampling import SamplingParams

COMMANDS = {
    "/reset": "forget the conversation so far",
    "/system": "TEXT sets the instructions; alone it shows them",
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
        params: how tokens are chosen, in every turn.
        system: instructions that come before the first turn.
        max_tokens: the most tokens of one answer; None is as many as the model can read.
        block_size: tokens checked at once.
        exact: settle near ties by passes of their own.
    """

    def __init__(
        self,
        pair: "Pair",
        params: "SamplingParams",
        *,
        system: str | None = None,
        max_tokens: int | None = None,
        block_size: int | Literal["auto"] = "auto",
        exact: bool = False,
    ) -> None:
        self.pair = pair
        self.params = params
        self.system = system
        self.max_tokens = max_tokens
        self.block_size = block_size
        self.exact = exact
        self.turns: list[dict[str, str]] = []
        self.result: Result | None = None  # of the last answer
        self._saved: set[Path] = set()

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation as a chat template takes it."""
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, *self.turns]

    def ask(self, text: str) -> Generator[str]:
        """Yield the answer piece by piece; `result` then holds its figures.

        Closing the iterator early stops the answer and keeps what came of it. A question that
        got no answer at all is not kept, so an error leaves the conversation as it was.

        Raises:
            DFlashError: the question cannot be answered, for instance for its length.
        """
        from dflash2_mlx.generation import stream_generate
        from dflash2_mlx.marking import marks_of

        self.result = None
        question = {"role": "user", "content": text}
        messages = [*self.messages, question]
        ids = self.pair.encode_chat(messages)
        generation = stream_generate(
            self.pair,
            ids,
            self.params,
            max_tokens=self.max_tokens,
            block_size=self.block_size,
            exact=self.exact,
            marks=marks_of(self.pair, messages, ids, {}),
        )
        answer, finished = "", False
        try:
            for step in generation:
                answer += step.text
                finished = step.finish_reason is not None
                yield step.text
        finally:
            if answer or finished:
                self.turns += [question, {"role": "assistant", "content": answer}]
            generation.close()
            self.result = generation.result

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
        parts = [f"## {titles[m['role']]}\n\n{m['content'].strip()}\n" for m in self.messages]
        return "\n".join([f"# Chat with {self.pair.name}\n", *parts])
