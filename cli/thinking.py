"""The option for how long a model thinks before it answers."""

from dataclasses import dataclass
from typing import Annotated

from dflash2_mlx.cli.options import answer_option
from dflash2_mlx.dialogue.events import Level


@dataclass(frozen=True, slots=True)
class ThinkingOptions:
    """For models that think; others take it with a note."""

    reasoning_effort: Annotated[
        Level | None,
        answer_option(
            metavar="LEVEL",
            help="How long a thinking model thinks: none, minimal, low, medium, high, xhigh, max.",
            show_default="the model's own",
        ),
    ] = None

    @property
    def template(self) -> dict[str, str]:
        """What is handed to the chat template."""
        return {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
