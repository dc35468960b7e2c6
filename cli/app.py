"""The program `dflash2-mlx`: its commands, and the one place where errors become exit codes."""

import io
import sys
from typing import Annotated

import typer

import dflash2_mlx
from dflash2_mlx.cli.bench import bench
from dflash2_mlx.cli.chat import chat
from dflash2_mlx.cli.connect import connect
from dflash2_mlx.cli.console import complain, out
from dflash2_mlx.cli.doctor import doctor
from dflash2_mlx.cli.generate import generate
from dflash2_mlx.cli.models import models
from dflash2_mlx.cli.pull import pull
from dflash2_mlx.cli.serve import serve
from dflash2_mlx.cli.tune import tune
from dflash2_mlx.cli.verify import verify

app = typer.Typer(
    name="dflash2-mlx",
    help="Talk to language models that run on this machine, several times faster than usual.",
    epilog="Start here: dflash2-mlx chat --model smollm2-135m",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (chat, generate, serve, connect, models, pull, tune, bench, doctor, verify):
    app.command()(command)


def _show_version(asked: bool) -> None:
    if asked:
        out.print(f"dflash2-mlx {dflash2_mlx.__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the program and exit: 0 done, 1 an error in one line, 2 wrong usage, 130 Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        complain(error)
        sys.exit(1)
