"""What reaches the terminal."""

import io

import pytest
from rich.console import Console

from dflash2_mlx.cli import console
from dflash2_mlx.cli.console import THEME, note, think, write


def test_an_answer_is_written_as_it_is_when_piped(capsys: pytest.CaptureFixture[str]) -> None:
    text = "\ttab [bold]x[/bold] :smile: \x1b[31m\r\n" + "long " * 100
    write(text)
    assert capsys.readouterr().out == text


def test_a_model_cannot_act_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdout", terminal)
    write("a\tb\n\x1b]0;title\x07\x9b31m é")
    assert terminal.getvalue() == "a\tb\n\ufffd]0;title\ufffd\ufffd31m é"


def test_a_thought_is_muted_on_a_terminal_and_cannot_act_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = io.StringIO()
    shown = Console(file=terminal, force_terminal=True, theme=THEME, width=20, highlight=False)
    monkeypatch.setattr(console, "err", shown)
    think("[b] :smile: \x1b[31m " + "long " * 10)
    assert terminal.getvalue() == "\x1b[2m[b] :smile: \ufffd[31m " + "long " * 10 + "\x1b[0m"


def test_a_thought_is_written_as_it_is_when_piped(capsys: pytest.CaptureFixture[str]) -> None:
    think("[b] a\tb\r\n\nb ")
    think("c\n")
    assert capsys.readouterr() == ("", "[b] a\tb\r\n\nb c\n")


def test_a_note_is_one_line_without_markup(capsys: pytest.CaptureFixture[str]) -> None:
    note("a\nb [red] " + "long " * 100)
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "a b [red] " + " ".join(["long"] * 100) + "\n"
