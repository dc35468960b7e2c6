"""A picture of a benchmark: speed-up by kind of prompt and block, acceptance by place."""

from pathlib import Path
from typing import Any

from dflash2_mlx.bench import MLX_LM
from dflash2_mlx.errors import DFlashError, InvalidRequest

WIDTH, HEIGHT = 12, 8  # inches
BAR_SHARE = 0.8  # of the room between two kinds
KINDS_OF_PICTURE = (".png", ".svg", ".pdf")


def check_can_plot(path: Path) -> None:
    """Raise before anything is measured when no picture could be written to `path`.

    `DFlashError` without matplotlib, `InvalidRequest` for a place or kind of file that is none.
    """
    if path.suffix.lower() not in KINDS_OF_PICTURE:
        raise InvalidRequest(
            f"--plot: {path.name!r} is no picture, expected {', '.join(KINDS_OF_PICTURE)}"
        )
    if not path.resolve().parent.is_dir():
        raise InvalidRequest(f"--plot: {path.resolve().parent} is not there; make that folder")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise DFlashError(
            "--plot needs matplotlib, which is not installed; pip install 'dflash2-mlx[plot]'"
        ) from None


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw a report as `bench --json` prints it; raises `DFlashError` if it cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    above, below = figure.subplots(2, 1)
    _speedups(above, report["kinds"])
    _acceptance(below, report["kinds"])
    figure.suptitle(report["title"], fontsize="small", wrap=True)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise DFlashError(f"--plot: cannot write {path}: {error.strerror}") from None


def _speedups(axes: Any, kinds: dict[str, Any]) -> None:
    names = [name for name in next(iter(kinds.values())) if name != MLX_LM]
    width = BAR_SHARE / len(names)
    for number, name in enumerate(names):
        places = [at - BAR_SHARE / 2 + (number + 0.5) * width for at in range(len(kinds))]
        heights = [by_name[name]["speedup"] for by_name in kinds.values()]
        axes.bar(places, heights, width, label=name)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(kinds)), list(kinds))
    axes.set_ylabel("speed of decoding\n(plain mlx-lm = 1)")
    axes.legend(ncols=len(names), fontsize="x-small", loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _acceptance(axes: Any, kinds: dict[str, Any]) -> None:
    """Of the widest block there is."""
    for kind, by_name in kinds.items():
        shares = max((f["accepted_by_place"] for f in by_name.values()), key=len)
        if shares:
            axes.plot(range(1, len(shares) + 1), shares, marker="o", label=kind)
    axes.set_xlabel("place in the block")
    axes.set_ylabel("share of passes in which\nso many drafts stood")
    axes.set_ylim(0, 1.05)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize="x-small")
