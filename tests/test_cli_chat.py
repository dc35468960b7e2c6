"""The chat: a conversation that no error and no Ctrl-C loses, and the line it is typed in."""

import io
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, FakePair
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from typer.testing import CliRunner, Result

from dflash2_mlx.cli.app import app
from dflash2_mlx.cli.chat import converse, make_history, make_session, piped, typed
from dflash2_mlx.cli.conversation import COMMANDS, Conversation, Leave, is_command
from dflash2_mlx.dialogue.events import Ask, Reasoning, Text
from dflash2_mlx.errors import ContextExceeded, InvalidRequest

HELLO = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    return FakeEngine().install(monkeypatch)


@pytest.fixture
def conversation(engine: FakeEngine) -> Conversation:
    return Conversation(FakePair(engine), Ask())


def answered(conversation: Conversation, text: str) -> str:
    return "".join(event.text for event in conversation.ask(text) if isinstance(event, Text))


class TestConversation:
    def test_every_question_comes_with_all_turns_before_it(self, engine, conversation) -> None:
        conversation.system = "Be brief"
        assert answered(conversation, "Hi") == "Hello"
        answered(conversation, "Bye")
        system = {"role": "system", "content": "Be brief"}
        assert engine.prompts[1] == [system, *HELLO, {"role": "user", "content": "Bye"}]

    def test_a_stopped_answer_is_kept_as_far_as_it_came(self, conversation) -> None:
        with closing(conversation.ask("Hi")) as pieces:
            assert next(pieces).text == "Hel"
        assert conversation.turns[1]["content"] == "Hel"
        assert conversation.result.completion_tokens == 1

    def test_an_interrupted_answer_is_kept_as_far_as_it_came(self, engine, conversation) -> None:
        engine.script = ("Hel", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            answered(conversation, "Hi")
        assert conversation.turns[1]["content"] == "Hel"

    def test_a_question_that_fails_leaves_the_turns_as_they_were(
        self, engine, conversation
    ) -> None:
        answered(conversation, "Hi")
        engine.script = (RuntimeError("out of memory"),)
        with pytest.raises(RuntimeError):
            answered(conversation, "Again")
        assert conversation.turns == HELLO

    def test_a_question_too_long_leaves_the_turns_as_they_were(self, conversation) -> None:
        answered(conversation, "Hi")
        with pytest.raises(ContextExceeded):
            answered(conversation, "x" * 1000)
        assert conversation.turns == HELLO

    def test_an_empty_answer_is_an_answer(self, engine, conversation) -> None:
        engine.script = ("",)
        answered(conversation, "Hi")
        assert [turn["content"] for turn in conversation.turns] == ["Hi", ""]


class TestCommands:
    @pytest.mark.parametrize("line", [*COMMANDS, "/system Be brief", " /Quit "])
    def test_a_command_is_known_by_its_slash(self, line: str) -> None:
        assert is_command(line)

    @pytest.mark.parametrize("line", ["Hi", "/usr/bin is what?", "// a comment", "/quit\nor", "/"])
    def test_a_path_a_comment_or_a_paste_is_a_message(self, line: str) -> None:
        assert not is_command(line)

    def test_reset_forgets_the_turns_and_keeps_the_system_prompt(self, conversation) -> None:
        conversation.command("/system Be brief")
        answered(conversation, "Hi")
        conversation.command("/reset")
        assert conversation.messages == [{"role": "system", "content": "Be brief"}]

    def test_system_alone_shows_it(self, conversation) -> None:
        assert conversation.command("/system") == "no system prompt"
        conversation.command("/system  Be brief ")
        assert conversation.command("/system") == "system prompt: Be brief"

    def test_help_names_every_command(self, conversation) -> None:
        assert all(name in conversation.command("/help") for name in COMMANDS)

    def test_quit_leaves(self, conversation) -> None:
        with pytest.raises(Leave):
            conversation.command("/quit")

    def test_save_writes_json(self, conversation, tmp_path: Path) -> None:
        answered(conversation, "Hi")
        conversation.command(f"/save {tmp_path}/a chat.json")
        saved = json.loads((tmp_path / "a chat.json").read_text())
        assert saved == {"model": "tiny", "messages": HELLO}

    def test_save_writes_markdown(self, conversation, tmp_path: Path) -> None:
        answered(conversation, "Hi")
        conversation.command(f"/save {tmp_path}/chat.md")
        assert (tmp_path / "chat.md").read_text() == (
            "# Chat with tiny\n\n## You\n\nHi\n\n## tiny\n\nHello\n"
        )

    def test_save_replaces_only_what_it_wrote(self, conversation, tmp_path: Path) -> None:
        answered(conversation, "Hi")
        mine, other = tmp_path / "mine.md", tmp_path / "other.md"
        other.write_text("precious")
        conversation.command(f"/save {mine}")
        answered(conversation, "Bye")
        conversation.command(f"/save {mine}")
        assert "Bye" in mine.read_text()
        with pytest.raises(InvalidRequest, match="exists already"):
            conversation.command(f"/save {other}")
        assert other.read_text() == "precious"

    @pytest.mark.parametrize(
        ("line", "told"),
        [
            ("/save", "FILE.md or FILE.json"),
            ("/save chat.txt", "FILE.md or FILE.json"),
            ("/save /nowhere/at/all/chat.md", "cannot write"),
            ("/dance", "/dance is no command here"),
        ],
    )
    def test_a_command_that_cannot_be_done_says_so(self, conversation, line, told) -> None:
        answered(conversation, "Hi")
        with pytest.raises(InvalidRequest, match=told):
            conversation.command(line)

    def test_nothing_to_save_says_so(self, conversation, tmp_path: Path) -> None:
        with pytest.raises(InvalidRequest, match="nothing to save"):
            conversation.command(f"/save {tmp_path}/chat.md")


THOUGHTFUL = ("<think>", "\nA gree", "ting.", "\n</think>", "\n\nHel", "lo")
THOUGHT = "A greeting."


@pytest.fixture
def thinker(engine: FakeEngine) -> FakeEngine:
    engine.thinks, engine.script = True, THOUGHTFUL
    return engine


class TestThinking:
    def test_thoughts_are_no_part_of_the_answer(self, thinker) -> None:
        conversation = Conversation(FakePair(thinker), Ask())
        events = list(conversation.ask("Hi"))
        assert "".join(one.text for one in events if isinstance(one, Reasoning)) == THOUGHT
        assert "".join(one.text for one in events if isinstance(one, Text)) == "Hello"
        assert conversation.num_thought == 3  # with its end

    def test_the_next_turn_hands_them_to_the_template_apart(self, thinker) -> None:
        conversation = Conversation(FakePair(thinker), Ask())
        answered(conversation, "Hi")
        answered(conversation, "Bye")
        assert thinker.prompts[1][1] == {**HELLO[1], "reasoning_content": THOUGHT}

    def test_a_thought_that_the_template_opened_is_one(self, thinker) -> None:
        thinker.script = ("A greeting.\n</think>\n\n", "Hello")
        conversation = Conversation(FakePair(thinker), Ask())
        assert answered(conversation, "Hi<think>\n") == "Hello"  # the prompt's end opens it

    def test_an_answer_stopped_in_its_thought_is_kept(self, thinker) -> None:
        conversation = Conversation(FakePair(thinker), Ask())
        with closing(conversation.ask("Hi")) as events:
            next(events)
        assert conversation.turns == [
            HELLO[0],
            {"role": "assistant", "content": "", "reasoning_content": "A gree"},
        ]

    def test_thoughts_go_to_stderr_and_the_answer_to_stdout(self, thinker) -> None:
        result = piped_chat("Hi\n")
        assert result.stdout == "Hello\n"
        assert THOUGHT in result.stderr.splitlines()
        assert "6 tokens, 3 of them thought · " in result.stderr

    def test_the_effort_is_the_option_until_a_command_changes_it(self, thinker) -> None:
        lines = "Hi\n/think\n/think none\nHi\n/think high\nHi\n"
        result = piped_chat(lines, "--reasoning-effort", "low")
        assert thinker.templates == [
            {"enable_thinking": True},
            {"enable_thinking": False},
            {"enable_thinking": True},
        ]
        told = [line for line in result.stderr.splitlines() if line.startswith("thinking: ")]
        assert told == ["thinking: low", "thinking: none", "thinking: high"]

    def test_without_either_the_model_thinks_as_it_does(self, thinker) -> None:
        assert "thinking: the model's own way" in piped_chat("/think\nHi\n").stderr
        assert thinker.templates == [{}]

    def test_a_model_that_does_not_think_says_so_once(self, engine) -> None:
        told = "this model has no levels of reasoning: reasoning_effort has no effect"
        assert piped_chat("Hi\nBye\n", "--reasoning-effort", "low").stderr.count(told) == 1

    def test_an_effort_that_is_none_is_refused(self, engine, conversation) -> None:
        assert piped_chat("Hi\n", "--reasoning-effort", "loud").exit_code == 2
        with pytest.raises(InvalidRequest, match=r"/think expects one of none, .*, got 'loud'"):
            conversation.command("/think loud")

    def test_a_saved_page_quotes_them(self, thinker, tmp_path: Path) -> None:
        thinker.script = ("<think>One.\n\nTwo.</think>Hello",)
        conversation = Conversation(FakePair(thinker), Ask())
        answered(conversation, "Hi")
        conversation.command(f"/save {tmp_path}/chat.md")
        page = (tmp_path / "chat.md").read_text()
        assert page.endswith("## tiny\n\n> One.\n>\n> Two.\n\nHello\n")


def piped_chat(stdin: str | bytes, *options: str) -> Result:
    return CliRunner().invoke(app, ["chat", "--model", "tiny", *options], input=stdin)


class TestPiped:
    def test_every_line_is_a_turn_and_the_end_is_the_end(self, engine: FakeEngine) -> None:
        result = piped_chat("Hi\n\n  \nBye")
        assert (result.exit_code, result.stdout) == (0, "Hello\nHello\n")
        assert [prompt[-1]["content"] for prompt in engine.prompts] == ["Hi", "Bye"]

    def test_stderr_has_the_state_first_and_figures_after_each_answer(self, engine) -> None:
        engine.finish_reason = "length"
        _, state, *figures = piped_chat("Hi\nBye\n").stderr.splitlines()
        assert state == "tiny with tiny-drafter, block 5"
        assert (
            figures
            == [
                "2 tokens · 12.3 tok/s · 2.50 tokens per pass · "
                "drafting on: block 5 from the checkpoint · stopped at 2 tokens"
            ]
            * 2
        )

    def test_the_system_prompt_comes_first(self, engine: FakeEngine) -> None:
        piped_chat("Hi\n", "--system", "Be brief")
        assert engine.prompts[0][0] == {"role": "system", "content": "Be brief"}

    def test_commands_work_and_unknown_ones_are_told(self, engine: FakeEngine) -> None:
        result = piped_chat("/dance\nHi\n/reset\nBye\n/quit\nnever\n")
        assert result.exit_code == 0
        assert "error: /dance is no command here" in result.stderr
        assert [len(prompt) for prompt in engine.prompts] == [1, 1]

    def test_a_message_too_long_is_one_line_and_the_chat_goes_on(self, engine) -> None:
        result = piped_chat("Hi\n" + "x" * 1000 + "\nBye\n")
        assert (result.exit_code, result.stdout) == (0, "Hello\nHello\n")
        errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
        assert errors == [
            "error: the prompt has 1007 tokens, the model's maximum context length is 999 tokens; "
            "shorten the prompt"
        ]
        assert engine.prompts[-1] == [*HELLO, {"role": "user", "content": "Bye"}]

    def test_bytes_that_are_not_text_are_told_and_skipped(self, engine: FakeEngine) -> None:
        result = piped_chat(b"\xff\xfe\nHi\n")
        assert (result.exit_code, result.stdout) == (0, "Hello\n")
        assert "error: stdin line 1 is not UTF-8 (byte 0xff)" in result.stderr

    def test_ctrl_c_ends_it(self, engine: FakeEngine) -> None:
        engine.script = ("Hel", KeyboardInterrupt())
        result = piped_chat("Hi\nBye\n")
        assert (result.exit_code, result.stdout) == (130, "Hel\n")


class TestTerminal:
    def test_ctrl_c_stops_the_answer_and_keeps_the_chat(
        self, engine, conversation, capsys: pytest.CaptureFixture[str]
    ) -> None:
        engine.script = ("Hel", KeyboardInterrupt())
        converse(conversation, iter(["Hi", "Bye"]), stop_on_interrupt=False)
        out, err = capsys.readouterr()
        assert out == "Hel\nHel\n"
        assert err.splitlines().count("stopped") == 2
        assert [turn["content"] for turn in conversation.turns] == ["Hi", "Hel", "Bye", "Hel"]

    def test_an_unexpected_error_keeps_the_chat(self, engine, conversation, capsys) -> None:
        engine.script = ("Hel", RuntimeError("bad"))
        converse(conversation, iter(["Hi", "/quit", "never"]), stop_on_interrupt=False)
        assert "error: unexpected RuntimeError: bad" in capsys.readouterr().err
        assert [turn["content"] for turn in conversation.turns] == ["Hi", "Hel"]

    def test_a_reader_that_went_away_ends_it(self, engine, conversation, monkeypatch) -> None:
        def closed(text: str) -> None:
            raise BrokenPipeError

        monkeypatch.setattr("dflash2_mlx.cli.answer.write", closed)
        with pytest.raises(BrokenPipeError):
            converse(conversation, iter(["Hi", "Bye"]), stop_on_interrupt=False)


@pytest.fixture
def type_keys() -> Iterator[Any]:
    """Press keys, then Ctrl-D; the answer is the messages that were sent."""
    with create_pipe_input() as keyboard, create_app_session(keyboard, DummyOutput()):
        history = InMemoryHistory()

        def type_keys(keys: str) -> list[str]:
            keyboard.send_text(keys + "\x04")
            return list(typed(make_session(history, DummyOutput())))

        yield type_keys


LEFT, UP, CTRL_C, ALT_ENTER = "\x1b[D", "\x1b[A", "\x03", "\x1b\r"


class TestTyping:
    def test_enter_sends_a_line_and_ctrl_d_leaves(self, type_keys) -> None:
        assert type_keys("Hi\rBye\r") == ["Hi", "Bye"]

    def test_an_empty_line_is_no_message(self, type_keys) -> None:
        assert type_keys("\r  \rHi\r") == ["Hi"]

    def test_arrow_keys_edit_the_line(self, type_keys) -> None:
        assert type_keys(f"Helo{LEFT}l\r") == ["Hello"]

    def test_up_brings_back_what_was_sent(self, type_keys) -> None:
        type_keys("first\rsecond\r")
        assert type_keys(f"{UP}{UP}!\r") == ["first!"]

    def test_a_paste_of_several_lines_is_one_message(self, type_keys) -> None:
        code = "def f():\n    return 1\n\nprint(f())"
        paste = "\x1b[200~" + code.replace("\n", "\r") + "\x1b[201~"
        assert type_keys(f"{paste}\r") == [code]

    def test_alt_enter_starts_a_new_line(self, type_keys) -> None:
        assert type_keys(f"one{ALT_ENTER}two\r") == ["one\ntwo"]

    @pytest.mark.parametrize(("text", "found"), [("/re", ["/reset"]), ("what /re", []), ("r", [])])
    def test_commands_are_completed(self, text: str, found: list[str]) -> None:
        session = make_session(InMemoryHistory(), DummyOutput())
        completions = session.completer.get_completions(Document(text), CompleteEvent())
        assert [completion.text for completion in completions] == found

    def test_ctrl_c_empties_the_line(self, type_keys, capsys) -> None:
        assert type_keys(f"oops{CTRL_C}Hi\r") == ["Hi"]
        assert capsys.readouterr().err == ""

    def test_ctrl_c_on_an_empty_line_tells_how_to_leave(self, type_keys, capsys) -> None:
        assert type_keys(f"{CTRL_C}Hi\r") == ["Hi"]
        assert "/quit" in capsys.readouterr().err


class TestHistory:
    @pytest.fixture(autouse=True)
    def root(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
        monkeypatch.setenv("DFLASH2_MLX_CACHE", str(tmp_path / "root"))
        return tmp_path / "root"

    def test_it_outlives_the_chat_and_only_its_user_reads_it(self, root: Path) -> None:
        make_history(kept=True).append_string("Hi")
        history = make_history(kept=True)
        assert isinstance(history, FileHistory)
        assert list(history.load_history_strings()) == ["Hi"]
        assert (root / "chat_history").stat().st_mode & 0o077 == 0

    def test_it_can_be_turned_off(self, root: Path) -> None:
        assert isinstance(make_history(kept=False), InMemoryHistory)
        assert not root.exists()

    def test_a_folder_that_cannot_be_written_is_told(self, root: Path, capsys) -> None:
        root.write_text("a file is in the way")
        assert isinstance(make_history(kept=True), InMemoryHistory)
        assert "no history: cannot write" in capsys.readouterr().err


def test_an_empty_stdin_is_an_empty_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert list(piped()) == []
