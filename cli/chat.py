"""`dflash2-mlx chat`: a conversation in the terminal."""

import os
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from dflash2_mlx.cli.answer import show, summary
from dflash2_mlx.cli.console import complain, note
from dflash2_mlx.cli.conversation import COMMANDS, Conversation, Leave, is_command
from dflash2_mlx.cli.memory import MemoryOptions
from dflash2_mlx.cli.options import ModelOptions, SamplingOptions, prompt_option, spread
from dflash2_mlx.cli.thinking import ThinkingOptions
from dflash2_mlx.dialogue.events import Ask
from dflash2_mlx.errors import ContextExceeded, InvalidRequest
from dflash2_mlx.folders import cache_root

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import Output


@spread
def chat(
    model: ModelOptions,
    sampling: SamplingOptions,
    thinking: ThinkingOptions,
    memory: MemoryOptions,
    system: Annotated[
        str | None, prompt_option(metavar="S", help="Instructions that come before the first turn.")
    ] = None,
    no_history: Annotated[
        bool, typer.Option("--no-history", help="Keep no file of what you typed.")
    ] = False,
) -> None:
    """Chat with a model; /help shows what else you can do there.

    When stdin is not a terminal, every line of it is one turn.
    """
    pair = model.load(sampling)
    memory.plan(pair)
    conversation = Conversation(
        pair,
        Ask(sampling=sampling.given(), max_tokens=sampling.max_tokens, template=thinking.template),
        system=system,
        block_size=model.block(),
        exact=model.exact,
    )
    if _is_interactive():
        note("Type a message and press Enter; /help shows the commands.")
        session = make_session(make_history(kept=not no_history))
        converse(conversation, typed(session), stop_on_interrupt=False)
    else:
        converse(conversation, piped(), stop_on_interrupt=True)


def converse(conversation: Conversation, lines: Iterator[str], *, stop_on_interrupt: bool) -> None:
    """Take every line as a turn or a /command, until there are no more or one asks to leave.

    An error, or Ctrl-C unless `stop_on_interrupt`, ends the turn and never the conversation.
    """
    for line in lines:
        try:
            (_obey if is_command(line) else _reply)(conversation, line)
        except Leave:
            return
        except KeyboardInterrupt:
            if stop_on_interrupt:
                raise
            note("stopped")
        except BrokenPipeError:  # nobody reads the answers any more
            raise
        except Exception as error:
            complain(error)
            if isinstance(error, ContextExceeded) and conversation.turns:
                note("/reset forgets the conversation so far")


def _obey(conversation: Conversation, line: str) -> None:
    for told in conversation.command(line).splitlines():
        note(told)


def _reply(conversation: Conversation, text: str) -> None:
    try:
        with closing(conversation.ask(text)) as events:
            show(events)
    finally:
        for told in conversation.notes:
            note(told)
        if conversation.result and conversation.result.completion_tokens:
            thought = conversation.num_thought
            note(summary(conversation.result, conversation.params, thought=thought))


def piped() -> Iterator[str]:
    """Yield the lines of stdin that are not empty; what is not UTF-8 is told and skipped."""
    for number, raw in enumerate(sys.stdin.buffer, 1):
        try:
            line = raw.decode().strip()
        except UnicodeDecodeError as error:
            seen = f"byte {raw[error.start]:#04x}"
            complain(InvalidRequest(f"stdin line {number} is not UTF-8 ({seen}); it was skipped"))
            continue
        if line:
            yield line


def typed(session: "PromptSession[str]") -> Iterator[str]:
    """Yield what the user types, until Ctrl-D; Ctrl-C empties the line."""
    while True:
        try:
            text = session.prompt()
        except EOFError:
            return
        except KeyboardInterrupt:
            if not session.default_buffer.text:
                note("/quit or Ctrl-D leaves")
            continue
        if text.strip():
            yield text.strip("\n")


def make_session(history: "History", output: "Output | None" = None) -> "PromptSession[str]":
    """The line editor: arrow keys, history, /commands completed, a paste kept in one piece."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.output import create_output

    commands = WordCompleter(list(COMMANDS), meta_dict=COMMANDS, sentence=True)
    return PromptSession(
        [("", "\n"), ("ansicyan", "> ")],
        multiline=True,
        key_bindings=_keys(),
        prompt_continuation="  ",
        completer=commands,
        history=history,
        output=output or create_output(always_prefer_tty=True),
    )


def _keys() -> "KeyBindings":
    """Enter sends the message, Alt-Enter starts a new line in it."""
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def make_history(*, kept: bool) -> "History":
    """What was typed before: in a file of the user's state folder, or only in this run."""
    from platformdirs import user_state_path
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    if not kept:
        return InMemoryHistory()
    moved = os.environ.get("DFLASH2_MLX_CACHE")
    path = (cache_root() if moved else user_state_path("dflash2-mlx")) / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.open("ab").close()
    except OSError as error:
        note(f"no history: cannot write {path}: {error.strerror}", "warn")
        return InMemoryHistory()
    return FileHistory(path)


def _is_interactive() -> bool:
    return sys.stdin.isatty() and (sys.stdout.isatty() or sys.stderr.isatty())
