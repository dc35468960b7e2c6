"""Generating text: the decode loop, read as text and counted."""

import math
import secrets
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import mlx.core as mx

from dflash2_mlx.borders import Marks
from dflash2_mlx.chooser import Chooser, TokenLogprobs
from dflash2_mlx.decode import Conversation, FinishReason, OnPrefill, Step, decode
from dflash2_mlx.errors import ContextExceeded, InvalidRequest
from dflash2_mlx.exactness import exactness_of
from dflash2_mlx.pair import BlockSize, Effective, Pair, with_seed
from dflash2_mlx.randomness import Randomness
from dflash2_mlx.reuse import Reuse
from dflash2_mlx.sampling import SamplingParams
from dflash2_mlx.steering import Steering
from dflash2_mlx.text import TextReader


@dataclass(frozen=True, slots=True)
class Result:
    """A whole answer, or what has come of it; the fields of `generate --json`.

    `accepted` holds the tokens emitted by each pass, in order; `redecided` counts those tokens that
    took a pass of their own because of `exact`. Rates are per second of wall time, decoding and
    prefill apart; `ttft_s` runs from the request to the first token. `from_draft` says of each
    token whether it was drafted. `cached_tokens` of the prompt were known from earlier requests;
    `why_no_more` says why not more of them, and is None where nothing is kept. `logprobs` has one
    entry for each token when the request asked for them, else it is None.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    passes: int
    accepted: tuple[int, ...]
    redecided: int
    tokens_per_pass: float
    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    ttft_s: float
    peak_memory_bytes: int
    effective: Effective
    from_draft: tuple[bool, ...]
    tokens_from_draft: int
    why_no_more: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `logprobs` is there when asked for, without what cannot come."""
        shown = asdict(self)
        del shown["logprobs"]
        if self.why_no_more is None:
            del shown["why_no_more"]
        if self.logprobs is not None:
            entries = zip(self.token_ids, self.logprobs, strict=True)
            shown["logprobs"] = [_as_json(token, logprobs) for token, logprobs in entries]
        return shown


class Generation(Iterator[Step]):
    """The steps of one answer as they are verified; `result` tells what has come so far."""

    def __init__(
        self,
        pair: Pair,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        max_tokens: int | None,
        block_size: BlockSize,
        exact: bool,
        on_prefill: OnPrefill | None = None,
        marks: Marks | None = None,
        session: str | None = None,
    ) -> None:
        sampling.check_vocabulary(pair.target.vocab_size)
        if exact:
            sampling.check_exact()
        self._pair = pair
        self._on_prefill = on_prefill
        self._prompt = checked_prompt(pair, prompt_ids)
        self._max_tokens = _token_budget(pair, len(self._prompt), max_tokens)
        if pair.guard is not None:
            pair.guard.admit(len(self._prompt) + self._max_tokens)
        self._seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        grammar = sampling.grammar is not None
        self._steering = Steering(pair, block_size, self._prompt, grammar=grammar)
        self._chooser = Chooser(
            sampling,
            Randomness.from_seed(self._seed),
            pair.target.vocab_size,
            pair.constraint(sampling.grammar) if sampling.grammar else None,
            exactness_of(pair).tolerance if exact and self._steering.effective.drafting else None,
            coupled=sampling.seed is not None,
        )
        self._reuse = reuse_of(pair, marks, session)
        self._marks = marks or (Marks() if self._reuse else None)
        self._reader = TextReader(pair.tokenizer, sampling.stop, hidden=pair.end_tokens)
        self._steps: list[Step] = []
        self._started = self._prefilled = self._first = self._last = time.perf_counter()
        self._run = self._stream()

    def __next__(self) -> Step:
        return next(self._run)

    def close(self) -> None:
        """Stop; what was generated stays in `result`."""
        self._run.close()

    @property
    def incomplete(self) -> bool:
        """Whether the answer has to go on to obey its grammar."""
        constraint = self._chooser.constraint
        return constraint is not None and not constraint.complete

    @property
    def result(self) -> Result:
        """The answer so far."""
        tokens = tuple(token for step in self._steps for token in step.tokens)
        accepted = tuple(len(step.tokens) for step in self._steps if step.tokens or step.in_doubt)
        from_draft = tuple(
            place < step.from_draft for step in self._steps for place in range(len(step.tokens))
        )
        logprobs = tuple(entry for step in self._steps for entry in step.logprobs)
        cached = self._reuse.cached_tokens if self._reuse else 0
        return Result(
            text="".join(step.text for step in self._steps),
            token_ids=tokens,
            finish_reason=self._steps[-1].finish_reason if self._steps else None,
            prompt_tokens=len(self._prompt),
            completion_tokens=len(tokens),
            cached_tokens=cached,
            passes=len(accepted),
            accepted=accepted,
            redecided=sum(step.in_doubt for step in self._steps),
            tokens_per_pass=len(tokens) / max(1, len(accepted)),
            decode_tokens_per_s=_rate(len(tokens), self._last - self._prefilled),
            prefill_tokens_per_s=_rate(len(self._prompt) - cached, self._prefilled - self._started),
            ttft_s=self._first - self._started,
            peak_memory_bytes=mx.get_peak_memory(),
            effective=with_seed(self._steering.effective, self._seed),
            from_draft=from_draft,
            tokens_from_draft=sum(from_draft),
            why_no_more=self._reuse.cause if self._reuse else None,
            logprobs=logprobs if self._chooser.params.logprobs is not None else None,
        )

    def _stream(self) -> Generator[Step]:
        self._started = time.perf_counter()
        mx.reset_peak_memory()
        conversation = Conversation(
            self._pair.target,
            self._pair.drafter if self._steering.effective.drafting else None,
            self._chooser,
        )
        conversation.prefill(
            self._prompt,
            self._on_prefill,
            marks=self._marks,
            reuse=self._reuse,
            step=self._pair.prefill_step,
        )
        self._prefilled = time.perf_counter()
        steps = decode(
            conversation,
            lambda: self._steering.width(conversation),
            max_tokens=self._max_tokens,
            end_tokens=self._pair.end_tokens,
        )
        try:
            for step in steps:
                step = self._read(step)
                self._steering.watch(conversation, step)
                yield step
                if step.finish_reason:
                    return
        finally:
            steps.close()
            self._steering.finish()

    def _read(self, step: Step) -> Step:
        self._last = time.perf_counter()
        if not self._steps:
            self._first = self._last
        segment = self._reader.read(step.tokens)
        text, stopped = segment.text, segment.stopped
        if step.finish_reason and not stopped:
            rest = self._reader.finish()
            text, stopped = text + rest.text, rest.stopped
        step = replace(
            step,
            tokens=step.tokens[: segment.num_read],
            from_draft=min(step.from_draft, segment.num_read),
            logprobs=step.logprobs[: segment.num_read],
            text=text,
            finish_reason="stop" if stopped else step.finish_reason,
            in_doubt=step.in_doubt and not stopped,
        )
        self._steps.append(step)
        return step


def stream_generate(
    pair: Pair,
    prompt_ids: Sequence[int],
    sampling: SamplingParams | None = None,
    *,
    max_tokens: int | None = None,
    block_size: BlockSize = "auto",
    exact: bool = False,
    on_prefill: OnPrefill | None = None,
    marks: Marks | None = None,
    session: str | None = None,
) -> Generation:
    """Generate step by step: an iterator of `Step`, each 1 to `block_size` verified tokens.

    `max_tokens` None means up to the context limit. With `exact`, which is for temperature 0,
    tokens that this machine's rounding could decide either way are decided by passes of one row, as
    in plain decoding; the first use for a target takes measurements. `on_prefill(done, total)`
    hears of every chunk of the prompt that was read, and may raise to give up. Where the pair has
    a `prefix_cache`, what earlier prompts left behind is not read again; `marks` say where the next
    prompt will go on, and `session` only orders what is evicted. Raises `InvalidRequest`
    (`ContextExceeded`, `UnsupportedField`) before anything is computed.
    """
    params = sampling or SamplingParams()
    return Generation(
        pair, prompt_ids, params, max_tokens, block_size, exact, on_prefill, marks, session
    )


def generate(
    pair: Pair,
    prompt_ids: Sequence[int],
    sampling: SamplingParams | None = None,
    *,
    max_tokens: int | None = None,
    block_size: BlockSize = "auto",
    exact: bool = False,
    marks: Marks | None = None,
) -> Result:
    """Generate to the end; arguments as for `stream_generate`."""
    generation = stream_generate(
        pair,
        prompt_ids,
        sampling,
        max_tokens=max_tokens,
        block_size=block_size,
        exact=exact,
        marks=marks,
    )
    for _ in generation:
        pass
    return generation.result


def read_ahead(
    pair: Pair,
    ids: Sequence[int],
    marks: Marks,
    *,
    session: str | None = None,
    block_size: BlockSize = "auto",
    on_prefill: OnPrefill | None = None,
) -> int:
    """Read what the next prompt is expected to begin with, so that its state is there; no answer.

    Gives the number of tokens that were not known yet: 0 where the pair keeps nothing, or where the
    ids do not fit the context.
    """
    reuse = reuse_of(pair, marks, session)
    if reuse is None or len(ids) >= pair.context_limit:
        return 0
    drafter = pair.drafter if pair.effective(block_size).drafting else None
    conversation = Conversation(pair.target, drafter)
    # The anchor of a conversation is not read, so one more token stands behind the last.
    tokens = [*ids, 0]
    conversation.prefill(tokens, on_prefill, marks=marks, reuse=reuse, step=pair.prefill_step)
    return len(ids) - reuse.cached_tokens


def reuse_of(pair: Pair, marks: Marks | None, session: str | None) -> Reuse | None:
    """What a prefill takes from the pair's prefix cache and leaves there; None without one."""
    if pair.prefix_cache is None:
        return None
    return Reuse(pair.prefix_cache, pair.state_key, marks or Marks(), session)


def checked_prompt(pair: Pair, prompt_ids: Sequence[int]) -> list[int]:
    """The prompt as plain ints.

    Raises `InvalidRequest` when it is empty or holds what is no token, `ContextExceeded` when it
    leaves no room for an answer.
    """
    prompt = [int(token) for token in prompt_ids]
    if not prompt:
        raise InvalidRequest("the prompt is empty, expected at least one token")
    vocab_size = pair.target.vocab_size
    if strange := [token for token in prompt if not 0 <= token < vocab_size]:
        raise InvalidRequest(f"prompt token {strange[0]} is outside 0 to {vocab_size - 1}")
    if len(prompt) >= pair.context_limit:
        raise ContextExceeded(
            f"the prompt has {len(prompt)} tokens, the model's maximum context length is "
            f"{pair.context_limit} tokens; shorten the prompt"
        )
    return prompt


def _token_budget(pair: Pair, num_prompt: int, max_tokens: int | None) -> int:
    if max_tokens is not None and max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {max_tokens}, expected at least 1")
    room = pair.context_limit - num_prompt
    return room if max_tokens is None else min(max_tokens, room)


def _as_json(token: int, logprobs: TokenLogprobs) -> dict[str, Any]:
    top = [[best, logprob] for best, logprob in logprobs.top if math.isfinite(logprob)]
    return {"token": token, "logprob": logprobs.logprob, "top": top}


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
