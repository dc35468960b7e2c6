"""The options that several commands share, as dataclasses whose fields declare them.

    @spread
    def generate(model: ModelOptions, sampling: SamplingOptions) -> None: ...

A command receives whole groups, so no option can be parsed and then forgotten.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from dflash2_mlx.cli.console import note
from dflash2_mlx.cli.progress import show_progress

if TYPE_CHECKING:
    from dflash2_mlx.pair import Pair
    from dflash2_mlx.sampling import SamplingParams

Number = TypeVar("Number", int, float)
DType = Literal["auto", "stored", "float32", "bfloat16"]

model_option = functools.partial(typer.Option, rich_help_panel="Model")
speed_option = functools.partial(typer.Option, rich_help_panel="Speed (the answer stays the same)")
answer_option = functools.partial(typer.Option, rich_help_panel="Answer")
prompt_option = functools.partial(typer.Option, rich_help_panel="Prompt")
choice_option = functools.partial(typer.Option, rich_help_panel="Choice of words")


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model, which drafter, and how they run."""

    model: Annotated[
        str,
        model_option(
            "--model",
            "-m",
            metavar="M",
            help="A name from `dflash2-mlx models`, a hub id (owner/name@revision) or a folder.",
        ),
    ]
    dtype: Annotated[
        DType,
        model_option(
            metavar="FORMAT",
            help="auto takes the fastest that fits; or stored, float32, bfloat16.",
        ),
    ] = "auto"
    drafter: Annotated[
        str | None,
        speed_option(
            metavar="D",
            help="The small model that guesses ahead: a name, hub id or folder.",
            show_default="the one made for the model",
        ),
    ] = None
    no_draft: Annotated[
        bool, speed_option("--no-draft", help="Guess nothing ahead: one token at a time.")
    ] = False
    drafter_bits: Annotated[
        int | None,
        speed_option(
            metavar="BITS",
            help="Quantize the drafter to this many bits.",
            show_default="as stored",
        ),
    ] = None
    block_size: Annotated[
        str, speed_option(metavar="auto|N", help="How many tokens are checked at once.")
    ] = "auto"

    def __post_init__(self) -> None:
        if self.no_draft and self.drafter is not None:
            raise typer.BadParameter("cannot be used with --no-draft", param_hint="--drafter")
        self.block()

    def block(self) -> int | Literal["auto"]:
        """The block size as the engine takes it."""
        if self.block_size == "auto":
            return "auto"
        return _number(int, self.block_size, "--block-size", "'auto' or a whole number")

    def load(self) -> "Pair":
        """The pair these options name; what is to be known about it goes to stderr.

        Raises:
            DFlashError: a model is unknown, unusable, or not made for the other.
        """
        from dflash2_mlx.pair import load_pair

        with show_progress() as progress:
            pair = load_pair(
                self.model,
                False if self.no_draft else self.drafter,
                drafter_bits=self.drafter_bits,
                dtype=None if self.dtype == "auto" else self.dtype,
                progress=progress,
            )
        for announcement in pair.notes:
            note(announcement)
        note(pair.effective(self.block()).describe())
        return pair


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How long the answer gets, and how each token is chosen."""

    max_tokens: Annotated[
        int | None,
        answer_option(
            metavar="N",
            help="Stop after this many tokens.",
            show_default="as many as the model can read",
        ),
    ] = None
    stop: Annotated[
        list[str] | None,
        answer_option(metavar="S", help="End the answer before this text; may be repeated."),
    ] = None
    temperature: Annotated[
        float,
        choice_option(metavar="T", help="0 takes the likeliest token; higher varies more."),
    ] = 0.0
    top_p: Annotated[
        float,
        choice_option(metavar="P", help="Keep the likeliest tokens that reach P together."),
    ] = 1.0
    top_k: Annotated[
        int, choice_option(metavar="K", help="Keep the K likeliest tokens; 0 keeps all.")
    ] = 0
    min_p: Annotated[
        float,
        choice_option(metavar="P", help="Keep tokens at least P times as likely as the likeliest."),
    ] = 0.0
    repetition_penalty: Annotated[
        float, choice_option(metavar="R", help="Above 1, tokens already seen become less likely.")
    ] = 1.0
    presence_penalty: Annotated[
        float, choice_option(metavar="R", help="Taken once from every token already written.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, choice_option(metavar="R", help="Taken from a token each time it was written.")
    ] = 0.0
    logit_bias: Annotated[
        str | None,
        choice_option(metavar="'ID=V,..'", help="Added to the scores of these token ids."),
    ] = None
    seed: Annotated[
        int | None,
        choice_option(
            metavar="N", help="Makes a varied answer repeatable.", show_default="a fresh one"
        ),
    ] = None

    def __post_init__(self) -> None:
        self.bias()

    def params(self) -> "SamplingParams":
        """The engine's own form of these options.

        Raises:
            InvalidRequest: a value out of its range, named.
        """
        from dflash2_mlx.sampling import SamplingParams

        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.bias(),
            seed=self.seed,
            stop=tuple(self.stop or ()),
        )

    def bias(self) -> dict[int, float]:
        """`ID=V,..` as a mapping from token id to what its score is raised by."""
        bias: dict[int, float] = {}
        for entry in [] if self.logit_bias is None else self.logit_bias.split(","):
            name, _, value = entry.partition("=")
            token = _number(int, name, "--logit-bias", "a whole number before each '='")
            if token in bias:
                raise typer.BadParameter(f"token {token} is given twice", param_hint="--logit-bias")
            bias[token] = _number(float, value, "--logit-bias", "a number after each '='")
        return bias


def _number(kind: type[Number], text: str, option: str, expected: str) -> Number:
    try:
        return kind(text)
    except ValueError:
        raise typer.BadParameter(f"expected {expected}, got {text!r}", param_hint=option) from None


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for each field of its dataclass parameters.

    Typer reads the signature; the command itself gets the dataclasses, filled in.
    """
    outer = inspect.signature(command).parameters
    groups: dict[str, Any] = {
        name: p.annotation for name, p in outer.items() if is_dataclass(p.annotation)
    }

    @functools.wraps(command)
    def flat(**options: Any) -> None:
        for name, group in groups.items():
            options[name] = group(**{f.name: options.pop(f.name) for f in fields(group)})
        command(**options)

    inner: list[inspect.Parameter] = []
    for name, parameter in outer.items():
        is_group = name in groups
        inner += inspect.signature(groups[name]).parameters.values() if is_group else [parameter]
    keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in inner]
    flat.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    flat.__annotations__ = {p.name: p.annotation for p in keywords}
    return flat
