"""`dflash2-mlx generate`: one prompt, one answer."""

import json
from contextlib import closing
from dataclasses import replace
from typing import Annotated

import typer

from dflash2_mlx.cli.answer import show, summary
from dflash2_mlx.cli.console import note, write
from dflash2_mlx.cli.grammar import GrammarOptions
from dflash2_mlx.cli.options import ModelOptions, ScoredSamplingOptions, prompt_option, spread
from dflash2_mlx.cli.texts import stdin_text
from dflash2_mlx.errors import InvalidRequest


@spread
def generate(
    prompt: Annotated[
        str, prompt_option(metavar="TEXT|-", help="What to answer; - reads it from stdin.")
    ],
    model: ModelOptions,
    sampling: ScoredSamplingOptions,
    form: GrammarOptions,
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
    if raw and system is not None:
        raise typer.BadParameter("cannot be used with --raw", param_hint="--system")
    if sampling.logprobs is not None and not as_json:
        raise typer.BadParameter("needs --json, which prints them", param_hint="--logprobs")
    if prompt == "-" and form.from_stdin:
        raise typer.BadParameter("cannot read stdin with --prompt -", param_hint=form.from_stdin)
    messages = _messages(system, stdin_text("prompt") if prompt == "-" else prompt)
    grammar = form.read()
    pair = model.load(sampling)
    params = replace(sampling.params(pair), grammar=grammar)
    # A grammar holds from the first token on, so a thinking model has no room to think.
    template = {} if grammar is None else {"enable_thinking": False}

    from dflash2_mlx.generation import stream_generate

    generation = stream_generate(
        pair,
        pair.encode(messages[-1]["content"]) if raw else pair.encode_chat(messages, **template),
        params,
        max_tokens=sampling.max_tokens,
        block_size=model.block(),
        exact=model.exact,
    )
    with closing(generation):
        show("" if as_json else step.text for step in generation)
    if as_json:
        write(json.dumps(generation.result.to_dict()) + "\n")
    note(summary(generation.result, params, incomplete=generation.incomplete))


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
