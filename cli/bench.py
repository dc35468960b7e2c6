"""`dflash2-mlx bench`: how fast this pair is here, measured fairly."""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash2_mlx.cli.bench_table import show
from dflash2_mlx.cli.console import note, write
from dflash2_mlx.cli.loading import LoadOptions
from dflash2_mlx.cli.options import spread
from dflash2_mlx.cli.progress import show_progress
from dflash2_mlx.errors import InvalidRequest

if TYPE_CHECKING:
    from dflash2_mlx.bench import Contender
    from dflash2_mlx.folders import Progress
    from dflash2_mlx.pair import Pair


@spread
def bench(
    model: LoadOptions,
    kinds: Annotated[
        str | None,
        typer.Option(
            metavar="K,..",
            help="Kinds of prompts: code, maths, chat, prose, structured, copy, languages.",
            show_default="all",
        ),
    ] = None,
    blocks: Annotated[
        str | None,
        typer.Option(
            metavar="N,..|none",
            help="Block sizes to try; none: only plain decoding and auto.",
            show_default="all that auto chooses from",
        ),
    ] = None,
    prompts: Annotated[int, typer.Option(metavar="N", min=1, help="Prompts of each kind.")] = 2,
    max_tokens: Annotated[
        int, typer.Option(metavar="N", min=2, help="Tokens of an answer, at most.")
    ] = 64,
    repeats: Annotated[
        int, typer.Option(metavar="N", min=1, help="Times that everything is asked.")
    ] = 3,
    reference: Annotated[
        bool,
        typer.Option(
            "--reference",
            help="Also run the package dflash 0.1.0 on this pair, in an environment of its own.",
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Draw speed-up by kind, and acceptance by place."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare plain mlx-lm, plain decoding, each block size and auto, in turns.

    All answer a prompt at the same time, some passes each in turns. Greedy, on prompts that ship
    with the program; an answer ends where the model ends it.
    """
    chosen = _names(kinds)
    numbers = _numbers(blocks)
    if plot is not None:
        from dflash2_mlx.bench_plot import check_can_plot

        check_can_plot(plot)

    from dflash2_mlx import bench as running

    texts = running.choose_prompts(chosen, prompts)
    pair = model.load_pair()
    note(pair.effective().describe())
    tuned = pair.tuning is None or pair.tuning.known.measured
    with ExitStack() as stack:
        progress = stack.enter_context(show_progress(counted=True))
        entrants = running.contenders(pair, numbers)
        if reference:
            entrants.append(stack.enter_context(_reference(model, pair, progress)))
        tasks = running.prepare(pair, texts, max_tokens, progress)
        runs = list(
            running.alternate(
                entrants, tasks, max_tokens=max_tokens, repeats=repeats, progress=progress
            )
        )

    from dflash2_mlx.bench_report import report

    command = " ".join(["dflash2-mlx", *sys.argv[1:]])
    told = report(
        pair, runs, tasks, max_tokens=max_tokens, repeats=repeats, command=command, tuned=tuned
    )
    if plot is not None:
        _plot(told, plot)
    if as_json:
        write(json.dumps(told) + "\n")
    else:
        show(told)


@contextmanager
def _reference(model: LoadOptions, pair: "Pair", progress: "Progress") -> "Iterator[Contender]":
    from dflash2_mlx import reference
    from dflash2_mlx.fetch import drafter_folder, target_folder

    if pair.drafter is None:
        raise InvalidRequest(f"--reference needs a drafter: {pair.effective().reason}")
    folders = target_folder(model.model), drafter_folder(model.drafter or model.model)
    with reference.start(pair, *folders, progress) as worker:
        note(f"the reference runs its own block, {worker.block}")
        yield worker.contender


def _plot(told: dict[str, Any], path: Path) -> None:
    from dflash2_mlx.bench_plot import plot

    plot(told, path)
    note(f"drawn: {path}")


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",")]


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    if text == "none":
        return []
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"expected numbers with commas between them, or none, got {text!r}",
            param_hint="--blocks",
        ) from None
    from dflash2_mlx.pair import check_block_size

    for number in numbers:
        check_block_size(number)
    return numbers
