"""`generate --json-schema`, `--regex` and `--grammar`: what is refused, and what is passed on."""

import json
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from typer.testing import CliRunner, Result

from dflash2_mlx.cli.app import app
from dflash2_mlx.errors import InvalidRequest
from dflash2_mlx.grammar import Grammar

SCHEMA = {"type": "object", "properties": {"größe": {"type": "integer"}}}
LARK = 'start: "yes" | "no"\n'


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    return FakeEngine().install(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA), encoding="utf-8")
    (tmp_path / "answer.lark").write_text(LARK, encoding="utf-8")
    (tmp_path / "latin.json").write_bytes(b'{"gr\xf6\xdfe": 1}')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*options: str, prompt: str = "Hi", stdin: str = "") -> Result:
    args = ["generate", "--model", "tiny", "--prompt", prompt, *options]
    return CliRunner().invoke(app, args, input=stdin)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("options", "stdin", "grammar"),
    [
        ((), "", None),
        (("--json-schema", "schema.json"), "", Grammar.json_schema(SCHEMA)),
        (("--json-schema", "-"), f"\ufeff{json.dumps(SCHEMA)}\n", Grammar.json_schema(SCHEMA)),
        (("--regex", "a|b+"), "", Grammar.regex("a|b+")),
        (("--grammar", "answer.lark"), "", Grammar.lark(LARK)),
        (("--grammar", "-"), LARK, Grammar.lark(LARK.strip())),
    ],
)
def test_a_grammar_reaches_the_engine(
    engine: FakeEngine, options: tuple[str, ...], stdin: str, grammar: Grammar | None
) -> None:
    result = run(*options, stdin=stdin)
    assert result.exit_code == 0, result.output
    assert engine.requests[0]["sampling"].grammar == grammar


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("options", "prompt", "told"),
    [
        (("--json-schema", "schema.json", "--regex", "a"), "Hi", "--regex"),
        (("--regex", "a", "--grammar", "answer.lark"), "Hi", "--grammar"),
        (("--json-schema", "schema.json", "--grammar", "answer.lark"), "Hi", "--grammar"),
        (("--json-schema", "-"), "-", "--json-schema"),
        (("--grammar", "-"), "-", "--grammar"),
    ],
)
def test_what_cannot_go_together_is_wrong_usage(
    engine: FakeEngine, options: tuple[str, ...], prompt: str, told: str
) -> None:
    result = run(*options, prompt=prompt)
    assert result.exit_code == 2
    assert told in result.stderr
    assert not engine.loads


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("options", "stdin", "told"),
    [
        (("--json-schema", "nowhere.json"), "", "cannot read nowhere.json: No such file"),
        (("--json-schema", "."), "", "cannot read .: Is a directory"),
        (("--json-schema", "no\0name"), "", "no file name"),
        (("--json-schema", "latin.json"), "", "latin.json is not UTF-8 (byte 0xf6 at 4)"),
        (("--json-schema", "-"), "", "not JSON"),
        (("--json-schema", "-"), '{"type": "object"', "not JSON"),
        (("--json-schema", "-"), '{"const": NaN}', "not JSON"),
        (("--json-schema", "-"), "[" * 100_000, "not JSON"),
        (("--json-schema", "-"), "[1]", "is a list, expected an object"),
        (("--json-schema", "-"), '{"type": "strin"}', "Invalid type: strin"),
        (("--json-schema", "-"), '{"not": {}}', '"not"'),
        (("--json-schema", "-"), '{"$ref": "#/$defs/x"}', "'/$defs/x' does not exist"),
        (("--json-schema", "-"), '{"const": "\\ud800"}', "JSON schema cannot be used"),
        (("--regex", "(a"), "", "unclosed group"),
        (("--regex", "a\\"), "", "lone backslash"),
        (("--regex", "(?=a)a"), "", "look-around"),
        (("--regex", "\udcff"), "", "not UTF-8"),
        (("--grammar", "schema.json"), "", "Lark grammar cannot be used"),
        (("--grammar", "-"), "", "Empty grammar"),
        (("--grammar", "-"), "start: foo", 'unknown name: "foo"'),
        (("--grammar", "-"), "start: a\na[temperature=0.5]: /x+/", "sets a temperature"),
    ],
)
def test_what_is_no_grammar_is_refused_in_one_line_before_anything_is_loaded(
    engine: FakeEngine, options: tuple[str, ...], stdin: str, told: str
) -> None:
    result = run(*options, stdin=stdin)
    assert isinstance(result.exception, InvalidRequest), result.output
    line = str(result.exception)
    assert told in line
    assert "\n" not in line
    assert len(line) < 400
    assert not engine.loads


@pytest.mark.parametrize(
    ("options", "what"), [(("--json-schema", "-"), "JSON"), (("--regex", "a+"), "answer")]
)
def test_an_answer_that_was_cut_inside_its_grammar_says_so(
    engine: FakeEngine, options: tuple[str, ...], what: str
) -> None:
    engine.finish_reason, engine.incomplete = "length", True
    stderr = run(*options, stdin="{}").stderr
    assert f"stopped at 2 tokens, so the {what} is incomplete" in stderr


def test_a_thinking_model_answers_at_once(engine: FakeEngine) -> None:
    engine.thinks = True
    run("--regex", "a+")
    run()
    assert engine.templates == [{"enable_thinking": False}, {}]


def test_a_form_that_leaves_no_room_for_the_thought_that_was_asked_for_says_so(
    engine: FakeEngine,
) -> None:
    engine.thinks = True
    told = "a form holds from the first token on: no thought comes before it"
    assert told in run("--regex", "a+", "--reasoning-effort", "high").stderr
    assert told not in run("--regex", "a+").stderr


def test_a_form_with_tags_of_thoughts_in_it_is_written_as_it_is(engine: FakeEngine) -> None:
    engine.thinks, engine.script = True, ('{"tag": "<thi', 'nk>x</think>"}')
    result = run("--json-schema", "-", stdin="{}")
    assert result.stdout == '{"tag": "<think>x</think>"}\n'


def test_an_answer_that_was_cut_at_its_end_is_not_called_incomplete(engine: FakeEngine) -> None:
    engine.finish_reason = "length"
    stderr = run("--json-schema", "-", stdin="{}").stderr
    assert "stopped at 2 tokens" in stderr
    assert "incomplete" not in stderr


def test_the_summary_names_what_the_answer_was_held_to(engine: FakeEngine) -> None:
    assert "held to a regular expression" in run("--regex", "a+").stderr
    assert "held to" not in run().stderr


def test_the_help_tells_newcomers_what_a_file_is_for() -> None:
    shown = CliRunner().invoke(app, ["generate", "--help"], env={"COLUMNS": "200"}).output
    assert "Answer in JSON that fits this JSON schema; - reads it from stdin." in shown
    told: Any = [line for line in shown.splitlines() if "--grammar" in line or "--regex" in line]
    assert len(told) == 2
