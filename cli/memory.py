"""The options that say what memory is for."""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from dflash2_mlx.cli.console import note

if TYPE_CHECKING:
    from dflash2_mlx.memory import Plan
    from dflash2_mlx.pair import Pair

memory_option = functools.partial(typer.Option, rich_help_panel="Memory")
GIB = 2**30


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """How much memory may be used, and for what."""

    memory_limit: Annotated[
        float | None,
        memory_option(
            metavar="GB",
            min=0.1,
            help="Use no more memory than this, weights included.",
            show_default="what the system can spare",
        ),
    ] = None
    prompt_cache: Annotated[
        float | None,
        memory_option(
            metavar="GB",
            min=0,
            help="Keep what was read of prompts in so much memory; 0 keeps nothing.",
            show_default="what is left, up to half",
        ),
    ] = None
    prompt_cache_disk: Annotated[
        float,
        memory_option(
            metavar="GB",
            min=0,
            help="Keep system messages and tools on disk too, for the next start.",
            show_default="nothing",
        ),
    ] = 0.0
    kv_bits: Annotated[
        int | None,
        memory_option(
            metavar="8|4",
            help="Keep keys and values in 8 or 4 bits: longer contexts, and other answers.",
            show_default="as computed",
        ),
    ] = None
    prefill_step: Annotated[
        int | None,
        memory_option(
            metavar="N",
            min=32,
            max=16384,
            help="Read prompts in chunks of this many tokens.",
            show_default="2048, fewer from 32768 tokens on",
        ),
    ] = None

    def plan(self, pair: "Pair", window: int | None = None) -> "Plan":
        """Plan the pair's memory; a context window cut to fit is told on stderr.

        Raises:
            DFlashError: what is asked for does not fit.
        """
        from dflash2_mlx.budget import plan_memory, remember_plan

        pair.prefill_step = self.prefill_step
        if self.kv_bits is not None:
            pair.target.quantize_states(self.kv_bits)
        plan = plan_memory(
            pair,
            window=window,
            limit=_bytes(self.memory_limit),
            store=_bytes(self.prompt_cache),
            disk=_bytes(self.prompt_cache_disk) or 0,
        )
        remember_plan(pair, plan)
        if plan.note:
            note(plan.note, "warn")
        return plan


def _bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else int(gigabytes * GIB)
