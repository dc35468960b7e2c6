"""The program as the shell sees it: exit codes, one line for an error, nothing slow for help."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import dflash2_mlx
from dflash2_mlx.cli import app as program
from dflash2_mlx.errors import ModelNotFound

HEAVY = ("mlx", "mlx_lm", "transformers", "tokenizers", "numpy", "prompt_toolkit")
HEAVY += ("starlette", "uvicorn")
SPY = f"""
import sys
from dflash2_mlx.cli.app import main
try:
    main()
finally:
    print("heavy:", *sorted(set({HEAVY}) & set(sys.modules)), file=sys.stderr)
"""


def python(code: str, *args: str, **options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", code, *args]
    env = {"PATH": "", "COLUMNS": "80", **options}
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


@pytest.mark.parametrize(
    ("line", "exit_code"),
    [
        ("--help", 0),
        ("generate --help", 0),
        ("chat --help", 0),
        ("serve --help", 0),
        ("--version", 0),
        ("models", 0),
        ("generate --model tiny", 2),
        ("chat --model tiny --block-size x", 2),
        ("bench --model tiny --blocks x", 2),
        ("generate --model tiny --prompt a --reasoning-effort x", 2),
        ("serve --model tiny --port 99999", 2),
        ("serve --model tiny --host 0.0.0.0", 1),
        ("dance", 2),
    ],
)
def test_what_needs_no_model_imports_nothing_slow(line: str, exit_code: int) -> None:
    done = python(SPY, *line.split())
    assert done.returncode == exit_code, done.stderr
    assert done.stderr.splitlines()[-1] == "heavy:"
    assert "\x1b" not in done.stdout + done.stderr


def test_the_spy_sees_what_is_imported() -> None:
    assert python(f"import mlx.core\n{SPY}", "--version").stderr.endswith("heavy: mlx\n")


def test_version_names_the_program_and_its_version() -> None:
    result = CliRunner().invoke(program.app, ["--version"])
    assert result.stdout == f"dflash2-mlx {dflash2_mlx.__version__}\n"


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def fail(error: BaseException) -> tuple[int, str, str]:
        def broken() -> None:
            raise error

        monkeypatch.setattr(program, "app", broken)
        with pytest.raises(SystemExit) as exit:
            program.main()
        return exit.value.code, *capsys.readouterr()

    return fail


def test_an_error_is_one_line_on_stderr_and_exit_code_1(fail) -> None:
    told = "no model named 'x'\n[bold]; run 'dflash2-mlx models'" + " to see them all" * 10
    code, stdout, stderr = fail(ModelNotFound(told))
    assert (code, stdout) == (1, "")
    assert stderr == f"error: {told}\n".replace("\n[", " [")


def test_an_unexpected_error_is_one_line_too(fail) -> None:
    code, stdout, stderr = fail(ZeroDivisionError("a\nb"))
    assert (code, stdout) == (1, "")
    assert stderr == (
        "error: unexpected ZeroDivisionError: a b; run with DFLASH2_MLX_DEBUG=1 for the trace\n"
    )


def test_the_trace_of_an_unexpected_error_can_be_had(fail, monkeypatch) -> None:
    monkeypatch.setenv("DFLASH2_MLX_DEBUG", "1")
    code, _, stderr = fail(ZeroDivisionError("a"))
    assert code == 1
    assert stderr.startswith("Traceback")


def test_ctrl_c_is_exit_code_130_without_a_word(fail) -> None:
    assert fail(KeyboardInterrupt()) == (130, "", "")


WRITER = """
from dflash2_mlx.cli.app import app, main
from dflash2_mlx.cli.console import write

@app.command()
def babble() -> None:
    while True:
        write("word " * 1000)

main()
"""


def test_a_reader_that_goes_away_is_no_error() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, "babble"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as writer:
        assert writer.stdout.read(4) == b"word"
        writer.stdout.close()
        assert writer.stderr.read() == b""
    assert writer.returncode == 1
