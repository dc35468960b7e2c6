"""The options that name a pair, and how it is loaded."""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dflash2_mlx.cli.console import note
from dflash2_mlx.cli.progress import show_progress

if TYPE_CHECKING:
    from dflash2_mlx.pair import Pair

DType = Literal["auto", "stored", "float32", "bfloat16"]

model_option = functools.partial(typer.Option, rich_help_panel="Model")
speed_option = functools.partial(typer.Option, rich_help_panel="Speed (the answer stays the same)")

MODEL = model_option(
    "--model",
    "-m",
    metavar="M",
    help="A name from `dflash2-mlx models`, a hub id (owner/name@revision) or a folder.",
)
DTYPE = model_option(
    metavar="FORMAT", help="auto takes the fastest that fits; or stored, float32, bfloat16."
)
DRAFTER = speed_option(
    metavar="D",
    help="The small model that guesses ahead: a name, hub id or folder.",
    show_default="the one made for the model",
)
DRAFTER_BITS = speed_option(
    metavar="BITS", help="Quantize the drafter to this many bits.", show_default="as stored"
)
DRAFT_BLOCK = speed_option(
    metavar="N",
    help="How many tokens a block has when the drafter fills it, even if fewer are checked.",
    show_default="as many as are checked",
)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Which model and which drafter, in what precision."""

    model: Annotated[str, MODEL]
    dtype: Annotated[DType, DTYPE] = "auto"
    drafter: Annotated[str | None, DRAFTER] = None
    drafter_bits: Annotated[int | None, DRAFTER_BITS] = None
    draft_block: Annotated[int | None, DRAFT_BLOCK] = None

    def load_pair(self, *, drafting: bool = True) -> "Pair":
        """The pair these options name; what was done to load it goes to stderr.

        Raises:
            DFlashError: a model is unknown, unusable, or not made for the other.
        """
        from dflash2_mlx.pair import load_pair

        with show_progress() as progress:
            pair = load_pair(
                self.model,
                self.drafter if drafting else False,
                drafter_bits=self.drafter_bits,
                draft_block=self.draft_block,
                dtype=None if self.dtype == "auto" else self.dtype,
                progress=progress,
            )
        for announcement in pair.notes:
            note(announcement)
        return pair
