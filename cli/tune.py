"""`dflash2-mlx tune`: time this pair on this machine, and see which block follows from it."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dflash2_mlx.cli.console import THEME, note, out, write
from dflash2_mlx.cli.loading import (
    DRAFT_BLOCK,
    DRAFTER,
    DRAFTER_BITS,
    DTYPE,
    MODEL,
    DType,
    LoadOptions,
)
from dflash2_mlx.cli.progress import show_progress

if TYPE_CHECKING:
    from dflash2_mlx.measure import Measurement
    from dflash2_mlx.tuning import Tuning

BAR_WIDTH = 8
_PIPED_WIDTH = 140


def tune(
    model: Annotated[str | None, MODEL] = None,
    dtype: Annotated[DType, DTYPE] = "auto",
    drafter: Annotated[str | None, DRAFTER] = None,
    drafter_bits: Annotated[int | None, DRAFTER_BITS] = None,
    draft_block: Annotated[int | None, DRAFT_BLOCK] = None,
    reset: Annotated[
        bool,
        typer.Option("--reset", help="First forget what was learned: of M, or of all without M."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time passes of every width on this machine, and choose the block by them.

    Answers learn this by themselves; this is quicker and more exact. Takes some twenty seconds,
    in which nothing else should run.
    """
    if model is None:
        return _forget_all(reset, as_json)
    options = LoadOptions(model, dtype, drafter, drafter_bits, draft_block)

    from dflash2_mlx.measure import check_idle, measure

    check_idle()
    pair = options.load_pair()
    with show_progress(counted=True) as progress:
        measurement = measure(pair, progress)
    assert pair.tuning is not None
    if reset:
        pair.tuning.forget()
    if not pair.tuning.measure(measurement.curve):
        note(f"the times hold for this run only: {pair.tuning.store.path} cannot be written")
    report = _report(pair.tuning, measurement)
    if as_json:
        write(json.dumps(report) + "\n")
    else:
        _show(report)


def _forget_all(reset: bool, as_json: bool) -> None:
    if not reset:
        raise typer.BadParameter("expected a model to time", param_hint="--model")
    from dflash2_mlx.tuning import Store

    store = Store()
    store.reset()
    if as_json:
        write(json.dumps({"forgotten": str(store.path)}) + "\n")
    else:
        note(f"forgotten: {store.path}")


def _report(tuning: "Tuning", measurement: "Measurement") -> dict[str, Any]:
    from dflash2_mlx.decision import decisions, expectations

    return {
        "key": tuning.key,
        "when": tuning.known.when,
        "cap": tuning.known.cap,
        "passes": measurement.passes,
        "seconds": round(measurement.seconds, 2),
        "spread": round(measurement.spread, 3),
        "ms_per_1000_tokens": measurement.curve.slope_ms,
        "depths": [
            {
                "depth": depth,
                "ms": ms,
                "parts": {w: asdict(part) for w, part in measurement.parts[depth].items()},
                "expected": [asdict(row) for row in expectations(tuning.known, depth)],
                "decisions": [asdict(decision) for decision in decisions(tuning.known, depth)],
            }
            for depth, ms in measurement.ms.items()
        ],
    }


def _show(report: dict[str, Any]) -> None:
    console = out if out.is_terminal else Console(theme=THEME, highlight=False, width=_PIPED_WIDTH)
    console.print(report["key"], style="muted", markup=False, soft_wrap=True)
    for at in report["depths"]:
        console.print(_table(at))
        for decision in at["decisions"]:
            console.print(f"{decision['kind']}: {decision['reason']}", markup=False)


def _table(at: dict[str, Any]) -> Table:
    """One line for each width: a bar as long as its pass, and what it is expected to yield."""
    title = f"behind {at['depth']} tokens; by kind of text, tokens a second (◂ the block)"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("rows", "ms a\npass", "of it\ndraft", "of it\nhost"):
        table.add_column(name, justify="right")
    table.add_column("")
    chosen = {d["kind"]: d["block"] for d in at["decisions"]}
    kinds = [kind for kind in chosen if kind != "grammar"]
    for kind in kinds:
        table.add_column(f"{kind:>9}", no_wrap=True)  # as wide as what stands below it
    slowest = max(row["ms"] for row in at["expected"])
    for row in at["expected"]:
        width, part = row["width"], at["parts"][row["width"]]
        times = [f"{ms:.1f}" for ms in (row["ms"], part["draft_ms"], part["host_ms"])]
        bar = "█" * max(1, round(BAR_WIDTH * row["ms"] / slowest))
        yields = [
            f"{row['tokens_per_s'][kind]:8.1f}" + ("[accent]◂[/]" if chosen[kind] == width else "")
            for kind in kinds
        ]
        table.add_row(str(width), *times, bar, *yields)
    return table
