"""`dflash2-mlx verify`: whether drafting keeps its promises with this model, on this machine."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dflash2_mlx.cli.console import THEME, note, out, write
from dflash2_mlx.cli.options import ModelOptions, answer_option, spread
from dflash2_mlx.errors import DFlashError

if TYPE_CHECKING:
    from dflash2_mlx.verify import Check

_RESULTS = {True: "ok", False: "FAILED", None: "-"}
_STYLES = {True: "", False: "bad", None: "muted"}


@spread
def verify(
    model: ModelOptions,
    max_tokens: Annotated[
        int, answer_option(metavar="N", min=1, help="Compare answers of this length.")
    ] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check on this machine that drafting does not change what a model writes.

    Exits with 1 when something differs by more than rounding.
    """
    pair = model.load()

    from dflash2_mlx.exactness import this_machine
    from dflash2_mlx.verify import drafted_block
    from dflash2_mlx.verify import verify as run

    block = drafted_block(pair, model.block())
    found = run(pair, max_tokens=max_tokens, block_size=block, exact=model.exact, notify=note)
    checks = list(found)
    faults = [check.name for check in checks if check.ok is False]
    if as_json:
        report = {
            "target": pair.name,
            "state": pair.effective(block).describe(),
            "machine": asdict(this_machine()),
            "ok": not faults,
            "checks": {check.name: _figures(check) for check in checks},
        }
        write(json.dumps(report) + "\n")
    else:
        (out if out.is_terminal else _wide()).print(_table(checks))
    if faults:
        raise DFlashError(
            f"verify: {', '.join(faults)} of {pair.name} differ by more than rounding; "
            "use --no-draft, and report the above"
        )


def _figures(check: "Check") -> dict[str, Any]:
    return {"ok": check.ok, "detail": check.detail, **check.figures}


def _table(checks: "list[Check]") -> Table:
    table = Table(box=None, pad_edge=False, header_style="accent")
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("seen", overflow="fold")
    for check in checks:
        table.add_row(check.name, _RESULTS[check.ok], escape(check.detail), style=_STYLES[check.ok])
        for line in check.more:
            table.add_row("", "", escape(line), style="muted")
    return table


def _wide() -> Console:
    return Console(theme=THEME, highlight=False, width=200)
