"""`dflash2-mlx generate`: one prompt, one answer."""

import json
from contextlib import closing
from typing import Annotated

import typer

from dflash2_mlx.cli.answer import show, summary
from dflash2_mlx.cli.console import note, write
from dflash2_mlx.cli.grammar import GrammarOptions
from dflash2_mlx.cli.options import ModelOptions, ScoredSamplingOptions, prompt_option, spread
from dflash2_mlx.cli.texts import stdin_text
from dflash2_mlx.cli.thinking import ThinkingOptions
from dflash2_mlx.dialogue.events import Ask
from dflash2_mlx.errors import InvalidRequest


@spread
def generate(
    prompt: Annotated[
        str, prompt_option(metavar="TEXT|-", help="What to answer; - reads it from stdin.")
    ],
    model: ModelOptions,
    sampling: ScoredSamplingOptions,
    form: GrammarOptions,
    thinking: ThinkingOptions,
    system: Annotated[
        str | None, prompt_option(metavar="S", help="Instructions that come before the prompt.")
    ] = None,
    raw: Annotated[
        bool, prompt_option("--raw", help="Continue the prompt as it is, without a chat format.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: the answer and its figures.")
    ] = False,
) -> None:
    """Answer one prompt."""
    formatted = {"--system": system, "--reasoning-effort": thinking.reasoning_effort}
    if raw and (given := [option for option, value in formatted.items() if value is not None]):
        raise typer.BadParameter("cannot be used with --raw", param_hint=given[0])
    if sampling.logprobs is not None and not as_json:
        raise typer.BadParameter("needs --json, which prints them", param_hint="--logprobs")
    if prompt == "-" and form.from_stdin:
        raise typer.BadParameter("cannot read stdin with --prompt -", param_hint=form.from_stdin)
    messages = _messages(system, stdin_text("prompt") if prompt == "-" else prompt)
    asked = Ask(
        messages=() if raw else tuple(messages),
        prompt=messages[-1]["content"] if raw else None,
        sampling=sampling.given(),
        max_tokens=sampling.max_tokens,
        grammar=form.read(),
        template=thinking.template,
    )
    pair = model.load(sampling)

    from dflash2_mlx.dialogue.prompt import prepare
    from dflash2_mlx.dialogue.reading import begin, listen, reader_for

    prepared = prepare(pair, asked)
    for told in prepared.notes:
        note(told)
    generation = begin(pair, prepared, block_size=model.block(), exact=model.exact)
    reader = reader_for(pair, prepared)
    with closing(generation):
        show(event for event in listen(reader, generation) if not as_json)
    result, thought = generation.result, reader.num_reasoning
    if as_json:
        write(json.dumps(result.to_dict()) + "\n")
    incomplete = generation.incomplete
    note(summary(result, prepared.sampling, thought=thought, incomplete=incomplete))


def _messages(system: str | None, prompt: str) -> list[dict[str, str]]:
    """The prompt behind its system prompt, checked to be text."""
    if not prompt:
        raise InvalidRequest("prompt is empty; give --prompt some text")
    texts = {"system": system, "user": prompt}
    messages = [{"role": role, "content": text} for role, text in texts.items() if text is not None]
    for message in messages:
        _require_utf8(message["content"])
    return messages


def _require_utf8(text: str) -> None:
    # Bytes of the command line that are not UTF-8 arrive as lone surrogates.
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{text!a} is not UTF-8; convert it first") from None
