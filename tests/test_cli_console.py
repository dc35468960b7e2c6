"""What reaches the terminal."""

import io

import pytest

from dflash2_mlx.cli.console import note, write


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


def test_a_note_is_one_line_without_markup(capsys: pytest.CaptureFixture[str]) -> None:
    note("a\nb [red] " + "long " * 100)
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "a b [red] " + " ".join(["long"] * 100) + "\n"
