"""`generate`: stdout is the answer, stderr everything else."""

import json
from typing import Any

import pytest
from fake_engine import FakeEngine
from typer.testing import CliRunner, Result

from dflash2_mlx.cli.app import app
from dflash2_mlx.errors import InvalidRequest


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    return FakeEngine().install(monkeypatch)


def run(*options: str, stdin: str | bytes = "") -> Result:
    return CliRunner().invoke(app, ["generate", "--model", "tiny", *options], input=stdin)


def test_stdout_is_the_answer_and_nothing_else(engine: FakeEngine) -> None:
    assert run("--prompt", "Hi").stdout == "Hello\n"


def test_stderr_tells_the_effective_state_what_loading_announced_and_the_figures(
    engine: FakeEngine,
) -> None:
    lines = run("--prompt", "Hi").stderr.splitlines()
    assert lines == [
        "dequantized to [float32]",
        "tiny with tiny-drafter, block 5",
        "2 tokens · 12.3 tok/s · 2.50 tokens per pass · drafting on: block 5 from the checkpoint",
    ]


def test_a_cut_answer_says_where_it_stopped(engine: FakeEngine) -> None:
    engine.finish_reason = "length"
    assert "stopped at 2 tokens" in run("--prompt", "Hi").stderr


def test_the_summary_counts_what_was_decided_once_more(engine: FakeEngine) -> None:
    engine.redecided = 2
    assert " · 2 near ties decided once more" in run("--prompt", "Hi").stderr


def test_a_whole_answer_does_not_claim_to_be_cut(engine: FakeEngine) -> None:
    assert "stopped" not in run("--prompt", "Hi").stderr


def test_json_is_one_object_on_stdout(engine: FakeEngine) -> None:
    printed = run("--prompt", "Hi", "--json").stdout
    assert printed.count("\n") == 1
    assert json.loads(printed)["text"] == "Hello"
    assert json.loads(printed)["effective"]["block_size"] == 5


def test_a_prompt_goes_through_the_chat_template_behind_its_system_prompt(
    engine: FakeEngine,
) -> None:
    run("--prompt", "Hi", "--system", "Be brief")
    assert engine.prompts == [
        [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]
    ]


def test_a_raw_prompt_is_sent_as_it_is(engine: FakeEngine) -> None:
    run("--prompt", " Hi\n", "--raw")
    assert engine.prompts == [" Hi\n"]


def test_a_dash_reads_stdin_without_the_newline_at_its_end(engine: FakeEngine) -> None:
    run("--prompt", "-", "--raw", stdin="two\nlïnes\n\n")
    assert engine.prompts == ["two\nlïnes\n"]


@pytest.mark.parametrize(
    ("options", "stdin", "told"),
    [
        (("--prompt", ""), "", "prompt is empty"),
        (("--prompt", "-"), "\n", "prompt is empty"),
        (("--prompt", "-"), b"abc\xff", "byte 0xff at 3"),
        (("--prompt", "\udcff"), "", "is not UTF-8"),
        (("--prompt", "Hi", "--system", "\udcff"), "", "is not UTF-8"),
    ],
)
def test_a_prompt_without_text_is_refused_before_anything_is_loaded(
    engine: FakeEngine, options: Any, stdin: Any, told: str
) -> None:
    result = run(*options, stdin=stdin)
    assert isinstance(result.exception, InvalidRequest)
    assert told in str(result.exception)
    assert not engine.loads


@pytest.mark.parametrize(("option", "value"), [("--system", "No"), ("--reasoning-effort", "low")])
def test_what_a_chat_format_is_for_has_no_place_in_a_raw_prompt(
    engine: FakeEngine, option: str, value: str
) -> None:
    result = run("--prompt", "Hi", "--raw", option, value)
    assert result.exit_code == 2
    assert option in result.stderr


def test_a_thought_goes_to_stderr(engine: FakeEngine) -> None:
    engine.thinks, engine.script = True, ("<think>", "\nA greeting.\n</think>", "\n\nHello")
    result = run("--prompt", "Hi")
    assert result.stdout == "Hello\n"
    assert result.stderr.splitlines()[2] == "A greeting."
    assert result.stderr.splitlines()[3].startswith("3 tokens, 1 of them thought · ")


def test_a_thought_amid_the_text_adds_no_line_to_a_file(engine: FakeEngine) -> None:
    engine.thinks, engine.script = True, ("Hello", "<think>hm</think>", " world")
    result = run("--prompt", "Hi")
    assert result.stdout == "Hello world\n"
    assert result.stderr.splitlines()[2] == "hm"


def test_ctrl_c_inside_a_thought_ends_its_line(engine: FakeEngine) -> None:
    engine.thinks, engine.script = True, ("<think>", "A gree", KeyboardInterrupt())
    result = run("--prompt", "Hi")
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr.endswith("\nA gree\n")


def test_an_answer_cut_inside_its_thought_is_no_text(engine: FakeEngine) -> None:
    engine.thinks, engine.script = True, ("<think>", "A greeting", ".</th")
    engine.finish_reason = "length"
    result = run("--prompt", "Hi")
    assert result.stdout == ""
    assert result.stderr.splitlines()[2] == "A greeting."


def test_an_empty_system_prompt_is_one(engine: FakeEngine) -> None:
    """Templates may have instructions of their own where there is none."""
    run("--prompt", "Hi", "--system", "")
    assert engine.prompts[0][0] == {"role": "system", "content": ""}


def test_raw_text_and_json_have_all_that_the_model_wrote(engine: FakeEngine) -> None:
    engine.thinks, engine.script = True, ("<think>", "\nA greeting.\n</think>", "\n\nHello")
    assert run("--prompt", "Hi", "--raw").stdout == "".join(engine.script) + "\n"
    as_json = run("--prompt", "Hi", "--json")
    assert json.loads(as_json.stdout)["text"] == "".join(engine.script)
    assert "A greeting." not in as_json.stderr


def test_what_has_no_effect_is_told(engine: FakeEngine) -> None:
    told = "this model has no levels of reasoning: reasoning_effort has no effect"
    assert told in run("--prompt", "Hi", "--reasoning-effort", "low").stderr


def test_ctrl_c_exits_130_and_leaves_what_came(engine: FakeEngine) -> None:
    engine.script = ("Hel", KeyboardInterrupt())
    result = run("--prompt", "Hi")
    assert result.exit_code == 130
    assert result.stdout == "Hel\n"
