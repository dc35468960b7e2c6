"""One answer, on the worker's thread: a request in, events out."""

import logging
import math
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from dflash2_mlx.chooser import TokenLogprobs
from dflash2_mlx.dialogue.events import Ask, Done, Event, Prefilling, ToolStart, Usage
from dflash2_mlx.dialogue.heard import Heard
from dflash2_mlx.dialogue.prompt import Prepared, prepare
from dflash2_mlx.dialogue.reading import begin, reader_for
from dflash2_mlx.errors import UnsupportedField
from dflash2_mlx.generation import Generation, Result
from dflash2_mlx.pair import BlockSize, Pair
from dflash2_mlx.server.ahead import read_on
from dflash2_mlx.server.job import Afterwards, Tell
from dflash2_mlx.text import Detokenizer

log = logging.getLogger("dflash2_mlx.server")
LEAST_LOGPROB = -9999.0  # JSON knows no infinity


@dataclass(frozen=True, slots=True)
class Answerer:
    """Answers as this server was told to: block size, and whether near ties are settled.

    `exact` is for greedy answers; others are sampled as asked, and their notes say so.
    """

    block_size: BlockSize = "auto"
    exact: bool = False

    def __call__(self, pair: Pair, asked: Ask | Prepared, tell: Tell) -> Afterwards:
        """Tell of an answer from its prefill to `Done`; gives what is to be done behind that.

        Raises `DFlashError` where it cannot be given, and what `tell` raises.
        """
        prepared = prepare(pair, asked) if isinstance(asked, Ask) else asked
        if prepared.marks is None and pair.prefix_cache is not None:
            prepared = prepare(pair, prepared.ask)  # it came while there was no pair
        exact, prepared = self._settled(prepared)
        generation = begin(
            pair,
            prepared,
            block_size=self.block_size,
            exact=exact,
            on_prefill=lambda done, total: tell(Prefilling(done, total)),
        )
        heard = Heard()

        def hear(*events: Event) -> None:
            heard.take(*events)
            tell(*events)

        with closing(generation):
            tell(Prefilling(0, len(prepared.ids) - 1))
            _tell_steps(pair, prepared, generation, hear)
        return lambda go_on: read_on(pair, prepared.ask, heard, self.block_size, go_on)

    def _settled(self, prepared: Prepared) -> tuple[bool, Prepared]:
        """Whether near ties are settled in this answer, and the request with a note if not."""
        if not self.exact:
            return False, prepared
        try:
            prepared.sampling.check_exact()
        except UnsupportedField as error:
            note = f"near ties are not settled in this answer: {error}"
            return False, replace(prepared, notes=(*prepared.notes, note))
        return True, prepared


def _tell_steps(pair: Pair, prepared: Prepared, generation: Generation, tell: Tell) -> None:
    reader, num_drafted, calls = reader_for(pair, prepared), 0, 0
    for step in generation:
        num_drafted += step.drafted
        events = reader.feed(step.text, len(step.tokens), step.from_draft)
        calls += sum(isinstance(event, ToolStart) for event in events)
        tell(*events)
        if reader.done:
            break
    result = generation.result
    if result.why_no_more:
        known = f"{result.cached_tokens} of {result.prompt_tokens} prompt tokens known"
        log.info("%s: %s", known, result.why_no_more)
    events = reader.finish(result.finish_reason == "length")
    calls += sum(isinstance(event, ToolStart) for event in events)
    tell(*events)
    finish: Literal["stop", "length", "tool_calls"] = result.finish_reason or "stop"
    if calls and finish == "stop":
        finish = "tool_calls"
    tell(
        Done(
            finish=finish,
            usage=_usage(result, num_drafted, reader.num_reasoning),
            timings=_timings(result, num_drafted),
            effective=_effective(result),
            stop=_stop(pair, prepared, result),
            notes=prepared.notes,
            logprobs=_logprobs(pair, result),
        )
    )


def _usage(result: Result, num_drafted: int, num_reasoning: int) -> Usage:
    return Usage(
        prompt=result.prompt_tokens,
        completion=result.completion_tokens,
        cached=result.cached_tokens,
        reasoning=num_reasoning,
        accepted=result.tokens_from_draft,
        rejected=num_drafted - result.tokens_from_draft,
    )


def _timings(result: Result, num_drafted: int) -> dict[str, float]:
    """As llama.cpp names them."""
    num_read = result.prompt_tokens - result.cached_tokens
    prompt_s = _seconds(num_read, result.prefill_tokens_per_s)
    predicted_s = _seconds(result.completion_tokens, result.decode_tokens_per_s)
    return {
        "cache_n": result.cached_tokens,
        "prompt_n": num_read,
        "prompt_ms": 1000 * prompt_s,
        "prompt_per_second": result.prefill_tokens_per_s,
        "predicted_n": result.completion_tokens,
        "predicted_ms": 1000 * predicted_s,
        "predicted_per_second": result.decode_tokens_per_s,
        "draft_n": num_drafted,
        "draft_n_accepted": result.tokens_from_draft,
    }


def _seconds(count: int, rate: float) -> float:
    return count / rate if rate > 0 else 0.0


def _effective(result: Result) -> dict[str, Any]:
    lengths = Counter(result.accepted)
    return {
        **asdict(result.effective),
        "passes": result.passes,
        "tokens_per_pass": result.tokens_per_pass,
        "redecided": result.redecided,
        "pass_lengths": [lengths[n] for n in range(1, max(lengths, default=0) + 1)],
        "ttft_s": result.ttft_s,
        "peak_memory_bytes": result.peak_memory_bytes,
    }


def _stop(pair: Pair, prepared: Prepared, result: Result) -> str | None:
    """The stop string behind the text, if one ended it."""
    stops = prepared.sampling.stop
    if not stops or result.finish_reason != "stop":
        return None
    detokenizer = Detokenizer(pair.tokenizer, pair.end_tokens)
    said = detokenizer.add(result.token_ids) + detokenizer.finish()
    rest = said[len(result.text) :]
    return max((stop for stop in stops if rest.startswith(stop)), key=len, default=None)


def _logprobs(pair: Pair, result: Result) -> tuple[Mapping[str, Any], ...] | None:
    """OpenAI's entries; an id that is only a part of a character has no bytes to show."""
    if result.logprobs is None:
        return None
    entries = zip(result.token_ids, result.logprobs, strict=True)
    return tuple(_entry(pair, token, logprobs) for token, logprobs in entries)


def _entry(pair: Pair, token: int, logprobs: TokenLogprobs) -> dict[str, Any]:
    top = [_scored(pair, other, logprob) for other, logprob in logprobs.top]
    return {**_scored(pair, token, logprobs.logprob), "top_logprobs": top}


def _scored(pair: Pair, token: int, logprob: float) -> dict[str, Any]:
    text = pair.tokenizer.decode([token])
    return {
        "token": text,
        "logprob": logprob if math.isfinite(logprob) else LEAST_LOGPROB,
        "bytes": None if "\ufffd" in text else list(text.encode()),
    }
