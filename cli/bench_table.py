"""How a benchmark is shown: speed by kind of prompt, then the details of all prompts together."""

from typing import Any

from rich.console import Console
from rich.table import Table

from dflash2_mlx.cli.console import THEME, out

ALL = "all"
_PIPED_WIDTH = 160


def show(report: dict[str, Any]) -> None:
    """Print a report, as `bench --json` has it, for people."""
    console = out if out.is_terminal else Console(theme=THEME, highlight=False, width=_PIPED_WIDTH)
    console.print(report["title"], style="muted", markup=False, soft_wrap=True)
    console.print(_speeds(report["kinds"], report["invalid_kinds"]))
    console.print(_details(report["kinds"][ALL]))
    for line in report["remarks"]:
        console.print(line, markup=False, soft_wrap=True)


def _speeds(kinds: dict[str, Any], invalid: list[str]) -> Table:
    table = _table("tokens per second (x mlx-lm)")
    table.add_column("decoded by", no_wrap=True)
    for kind in kinds:
        table.add_column(f"{kind} (invalid)" if kind in invalid else kind, justify="right")
    for name in kinds[ALL]:
        cells = [kinds[kind][name] for kind in kinds]
        table.add_row(
            name, *(f"{cell['decode_tokens_per_s']:.1f} ({cell['speedup']:.2f}x)" for cell in cells)
        )
    return table


def _details(by_name: dict[str, Any]) -> Table:
    table = _table("all prompts")
    table.add_column("decoded by", no_wrap=True)
    for title in ("spread", "first token", "tokens/pass", "passes/s", "equal ids", "memory"):
        table.add_column(title, justify="right")
    table.add_column("passes by tokens emitted", style="muted")
    for name, figures in by_name.items():
        histogram = " ".join(f"{size}:{count}" for size, count in figures["histogram"].items())
        table.add_row(
            name,
            f"{figures['spread']:.1%}",
            f"{1000 * figures['ttft_s']:.0f} ms",
            f"{figures['tokens_per_pass']:.2f}",
            f"{figures['passes_per_s']:.1f}",
            f"{figures['equal']} of {figures['prompts']}",
            f"{figures['peak_memory_bytes'] / 1e9:.2f} GB",
            histogram,
        )
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="accent", box=None, pad_edge=False)
