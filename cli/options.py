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
from dflash2_mlx.cli.loading import LoadOptions, model_option, speed_option

if TYPE_CHECKING:
    from dflash2_mlx.pair import Pair
    from dflash2_mlx.sampling import SamplingParams

Number = TypeVar("Number", int, float)
answer_option = functools.partial(typer.Option, rich_help_panel="Answer")
prompt_option = functools.partial(typer.Option, rich_help_panel="Prompt")
OWN_OR = "the model's own, else {}"  # what its generation_config.json says
choice_option = functools.partial(typer.Option, rich_help_panel="Choice of words")


@dataclass(frozen=True, slots=True)
class ModelOptions(LoadOptions):
    """Which model, which drafter, and how they run."""

    no_draft: Annotated[
        bool, speed_option("--no-draft", help="Guess nothing ahead: one token at a time.")
    ] = False
    block_size: Annotated[
        str, speed_option(metavar="auto|N", help="How many tokens are checked at once.")
    ] = "auto"
    exact: Annotated[
        bool,
        model_option(
            "--exact",
            help="Settle near ties as decoding one token at a time does; needs temperature 0.",
        ),
    ] = False

    def __post_init__(self) -> None:
        for name in ("drafter", "drafter_bits", "draft_block") if self.no_draft else ():
            if getattr(self, name) is not None:
                option = f"--{name.replace('_', '-')}"
                raise typer.BadParameter("cannot be used with --no-draft", param_hint=option)
        self.block()

    def block(self) -> int | Literal["auto"]:
        """The block size as the engine takes it.

        Raises:
            InvalidRequest: a number of rows that no pass can have.
        """
        if self.block_size == "auto":
            return "auto"
        rows = _number(int, self.block_size, "--block-size", "'auto' or a whole number")
        from dflash2_mlx.pair import check_block_size

        check_block_size(rows)
        return rows

    def load(self, sampling: "SamplingOptions | None" = None) -> "Pair":
        """The pair these options name; what is to be known about it goes to stderr.

        With `sampling` that includes how tokens will be chosen, unless that is greedily.

        Raises:
            DFlashError: a model is unknown, unusable, or not made for the other, or `--exact` has
                no meaning for this sampling.
        """
        if self.exact and sampling is not None:
            sampling.asked().check_exact()
        pair = self.load_pair(drafting=not self.no_draft)
        told = [] if sampling is None else sampling.told(pair)
        state = pair.effective(self.block())
        note("; ".join([state.describe(), *told]))
        if self.exact and sampling is not None:
            sampling.params(pair).check_exact()
        if self.exact and state.drafting:
            from dflash2_mlx.exactness import exactness_of

            exactness_of(pair, note)
        return pair


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How long the answer gets, and how each token is chosen."""

    max_tokens: Annotated[
        int | None,
        answer_option(
            metavar="N",
            min=1,
            help="Stop after this many tokens.",
            show_default="as many as the model can read",
        ),
    ] = None
    stop: Annotated[
        list[str] | None,
        answer_option(metavar="S", help="End the answer before this text; may be repeated."),
    ] = None
    temperature: Annotated[
        float | None,
        choice_option(
            metavar="T",
            help="0 takes the likeliest token; higher varies more; applied last.",
            show_default=OWN_OR.format("0"),
        ),
    ] = None
    top_p: Annotated[
        float | None,
        choice_option(
            metavar="P",
            help="Keep the likeliest tokens that reach P together.",
            show_default=OWN_OR.format("1"),
        ),
    ] = None
    top_k: Annotated[
        int | None,
        choice_option(
            metavar="K",
            help="Keep the K likeliest tokens; 0 keeps all.",
            show_default=OWN_OR.format("0"),
        ),
    ] = None
    min_p: Annotated[
        float | None,
        choice_option(
            metavar="P",
            help="Keep tokens at least P times as likely as the likeliest.",
            show_default=OWN_OR.format("0"),
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        choice_option(
            metavar="R",
            help="Above 1, tokens among the last ones become less likely.",
            show_default=OWN_OR.format("1"),
        ),
    ] = None
    presence_penalty: Annotated[
        float | None,
        choice_option(
            metavar="R", help="Taken once from each token among the last ones.", show_default="0"
        ),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        choice_option(
            metavar="R",
            help="Taken from a token each time it is among the last ones.",
            show_default="0",
        ),
    ] = None
    penalty_context: Annotated[
        int | None,
        choice_option(
            metavar="N",
            help="How many last tokens the penalties look at, of prompt and answer.",
            show_default="20",
        ),
    ] = None
    logit_bias: Annotated[
        str | None,
        choice_option(
            metavar="'ID=V,..'", help="Added to the scores of these token ids, before all else."
        ),
    ] = None
    seed: Annotated[
        int | None,
        choice_option(
            metavar="N",
            help="Makes a varied answer repeatable; any whole number.",
            show_default="a fresh one",
        ),
    ] = None

    def __post_init__(self) -> None:
        self.asked()

    def asked(self) -> "SamplingParams":
        """What was given, over greedy sampling.

        Raises:
            InvalidRequest: a value that no distribution has, named.
        """
        from dflash2_mlx.sampling import SamplingParams

        return SamplingParams(**self.given())

    def given(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that were given."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        del values["max_tokens"]
        values |= {"logit_bias": self.bias() or None, "stop": tuple(self.stop or ()) or None}
        return {name: value for name, value in values.items() if value is not None}

    def params(self, pair: "Pair") -> "SamplingParams":
        """The engine's own form of these options, over the model's own sampling.

        Raises:
            InvalidRequest: a value that does not fit the model, named.
        """
        return pair.sampling(**self.given())

    def told(self, pair: "Pair") -> list[str]:
        """What a user should know of `params`: the values in force, and those given in vain."""
        params = self.params(pair)
        idle = sorted(params.idle & self.given().keys())
        in_vain = f"{', '.join(idle)}: no effect at temperature 0" if idle else ""
        return [part for part in (params.describe(), in_vain) if part]

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


@dataclass(frozen=True, slots=True)
class ScoredSamplingOptions(SamplingOptions):
    """With log probabilities, for commands that can print them."""

    logprobs: Annotated[
        int | None,
        answer_option(
            metavar="N",
            help="With --json: log probabilities of each token and of the N likeliest, 0 to 20; "
            "after bias and penalties, before filters and temperature.",
        ),
    ] = None


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
