"""Begins the answer to a prepared request, and reads it by what was asked."""

from collections.abc import Iterator

from dflash2_mlx.decode import OnPrefill
from dflash2_mlx.dialogue.events import Event, Text
from dflash2_mlx.dialogue.prompt import Prepared
from dflash2_mlx.dialogue.segments import Segmenter
from dflash2_mlx.generation import Generation, stream_generate
from dflash2_mlx.pair import BlockSize, Pair


def begin(
    pair: Pair,
    prepared: Prepared,
    *,
    block_size: BlockSize = "auto",
    exact: bool = False,
    on_prefill: OnPrefill | None = None,
) -> Generation:
    """The steps of the answer; raises what `stream_generate` does."""
    return stream_generate(
        pair,
        prepared.ids,
        prepared.sampling,
        max_tokens=prepared.ask.max_tokens,
        block_size=block_size,
        exact=exact,
        on_prefill=on_prefill,
        marks=prepared.marks,
        session=prepared.ask.session,
    )


class Verbatim:
    """Reads an answer that is all text: one to a raw prompt, or in a form."""

    num_reasoning = 0
    done = False

    def feed(self, text: str, tokens: int, from_draft: int) -> list[Event]:
        """The text as it is."""
        return [Text(text, tokens, from_draft)] if text or tokens else []

    def finish(self, cut: bool) -> list[Event]:
        """Nothing was held back."""
        return []


AnswerReader = Segmenter | Verbatim


def reader_for(pair: Pair, prepared: Prepared) -> AnswerReader:
    """What reads the answer to a request as thoughts, text and calls."""
    in_a_form = prepared.ask.grammar is not None and not prepared.tools
    if prepared.ask.prompt is not None or in_a_form:
        return Verbatim()
    return Segmenter(
        pair.tokenizer,
        prepared.tools,
        starts_in_reasoning=prepared.starts_in_reasoning,
        parallel=prepared.ask.parallel_tool_calls,
    )


def listen(reader: AnswerReader, generation: Generation) -> Iterator[Event]:
    """The answer as events, as it comes."""
    for step in generation:
        yield from reader.feed(step.text, len(step.tokens), step.from_draft)
    yield from reader.finish(generation.result.finish_reason == "length")
