"""The pass: propose a block, verify it in one forward, accept a prefix, rewind the rest."""

import time
from bisect import bisect
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import mlx.core as mx

from dflash2_mlx.borders import PREFILL_STEP, Marks, chunk_borders
from dflash2_mlx.chooser import Chooser, Draft, TokenLogprobs, Verdict, greedy_chooser
from dflash2_mlx.models.cache import leaves
from dflash2_mlx.models.selector import Trellis
from dflash2_mlx.randomness import Position
from dflash2_mlx.reuse import Reuse
from dflash2_mlx.target import Reading, Target
from dflash2_mlx.unseen import MAX_UNSEEN, Unseen

MAX_PAUSE = 0.1  # of a pass: a reader that held us longer hides what the pass took
FORCED_ROWS = 5  # of a pass whose drafts are certain: one read of quantized weights (qmv_wide)

FinishReason = Literal["stop", "length"]
ChooseWidth = Callable[[], int]
OnPrefill = Callable[[int, int], None]  # tokens read so far, and to be read


class Proposer(Protocol):
    """What the pass asks of a drafter; `models.drafter.Drafter` is one."""

    @property
    def context_rows(self) -> int | None: ...

    def make_context(self) -> list[Any]: ...

    def skip(self, context: list[Any], num_tokens: int) -> None: ...

    def extend(self, context: list[Any], taps: mx.array) -> None: ...

    def propose(
        self, context: list[Any], taps: mx.array | None, anchor: mx.array, width: int
    ) -> Trellis: ...


@dataclass(frozen=True, slots=True)
class Step:
    """What one pass emitted: 1 to `drafted + 1` tokens, the first `from_draft` of them drafted.

    `in_doubt`: the next token was too close to call, so a pass of one row follows and decides it;
    such a step may have no tokens. `logprobs` are there when asked for, one for each token. `text`
    is filled in by the reader that detokenizes. The pass ran behind `depth` tokens and took
    `pass_s` seconds, None where that says nothing: beside a pass of another width the first is
    warm-up, and one that was launched ahead shares its time with the other. `forced`: a grammar
    allowed nothing but what was drafted.
    """

    tokens: tuple[int, ...]
    drafted: int
    from_draft: int
    finish_reason: FinishReason | None = None
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    in_doubt: bool = False
    depth: int = 0
    pass_s: float | None = None
    forced: bool = False


@dataclass(frozen=True, slots=True)
class Flight:
    """A pass that was launched and not read: its verdict is still on the device.

    It has `width` rows, which a grammar can make more or fewer than were `asked` for.
    """

    width: int
    asked: int
    forced: bool
    reading: Reading
    verdict: mx.array
    launched_s: float  # on the clock of time.perf_counter
    depth: int  # committed tokens before it, as far as the host knew

    @property
    def kept(self) -> int | mx.array:
        """How many of its rows stay: a number where that is certain, else `[]` int32."""
        return 1 if self.width == 1 else self.verdict[0] + 1

    @property
    def anchor(self) -> mx.array:
        """The last token that it emits, `[1]` uint32."""
        return self.verdict[self.kept].reshape(1).astype(mx.uint32)


class Conversation:
    """Caches of target and drafter, which hold the same committed tokens, the anchor excluded.

    The drafter's lag behind by those it was not asked to look at yet. Greedy unless a chooser says
    otherwise.
    """

    def __init__(
        self, target: Target, drafter: Proposer | None = None, chooser: Chooser | None = None
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.chooser = chooser or greedy_chooser(target.vocab_size)
        self.caches = target.make_caches()
        self.context = drafter.make_context() if drafter else []
        self.tokens: list[int] = []  # all committed tokens, the anchor last
        self._unseen = Unseen()
        self._late: Flight | None = None  # the same of a pass of which only the device knows more
        self._unread: Flight | None = None  # the pass launched last
        self._taken: Flight | None = None  # the last one whose rows were taken in

    @property
    def length(self) -> int:
        """Committed tokens that the caches hold."""
        return len(self.tokens) - 1

    @property
    def reach(self) -> int:
        """Tokens there can be at most when all that was launched is read."""
        return len(self.tokens) + (self._unread.width if self._unread else 0)

    def can_follow(self, flight: Flight) -> bool:
        """Whether a pass can be launched behind this one before it was read."""
        rows = self.drafter.context_rows if self.drafter else None
        fits = rows is None or flight.width <= rows
        return fits and self.target.runs_ahead and self.chooser.runs_ahead

    def prefill(
        self,
        prompt: Sequence[int],
        progress: OnPrefill | None = None,
        *,
        marks: Marks | None = None,
        reuse: Reuse | None = None,
        step: int | None = None,
    ) -> None:
        """Read all of a prompt but its last token, the first anchor, in chunks of `step` tokens.

        A chunk also ends at each of `marks`. With `reuse`, which asks for marks, reading goes on
        from what earlier prompts left behind, and leaves its own. `progress` hears of every chunk
        and may raise to give up; the conversation is then of no use.
        """
        step = step or PREFILL_STEP
        self.tokens = list(prompt)
        borders = chunk_borders(self.length, marks, step)
        # With marks every chunk gives all rows that a block behind it could see.
        first_seen = self._skip_unseen(self.length) if marks is None else 0
        start = reuse.resume(self, borders, step) if reuse else 0
        for end in borders[bisect(borders, start) :]:
            self._read(start, end, first_seen)
            if reuse is not None:
                reuse.keep(self, start, end)
            mx.clear_cache()
            if progress is not None:
                progress(end, self.length)
            start = end

    def _read(self, start: int, end: int, first_seen: int) -> None:
        """Read one chunk; the drafter takes in its rows from position `first_seen` on."""
        reading = self._forward(mx.array(self.tokens[start:end]))
        reading.tape.forget()  # for a long chunk that would be gigabytes
        if reading.taps is not None and self.drafter and end > first_seen:
            self.drafter.extend(self.context, reading.taps[:, max(0, first_seen - start) :])
        # The head is never evaluated: nothing here asks for the logits.
        mx.eval([cache.state for cache in (*self.caches, *self.context)])

    def _forward(self, tokens: mx.array) -> Reading:
        """The target's forward, tapped where somebody drafts."""
        return self.target.read(tokens, self.caches, tapped=self.drafter is not None)

    @property
    def leaf_caches(self) -> list[Any]:
        """All caches that make up the state, of target and drafter."""
        return [*leaves(self.caches), *self.context]

    def launch(self, width: int, behind: Flight | None = None) -> Flight:
        """Propose and verify `width` rows (1: plain decoding) as one graph, and start it.

        `behind` a pass that was not read yet, what it accepted is only known to the device.
        """
        launched_s, depth = time.perf_counter(), len(self.tokens)
        position: Position = depth
        if behind is None:
            anchor = mx.array(self.tokens[-1:], dtype=mx.uint32)
        else:
            self._take_in(behind, behind.kept)
            anchor, position = behind.anchor, depth + behind.kept
        draft = self._draft(anchor, position, width)
        mx.async_eval(draft.tokens)  # runs while the target's graph is built
        block = mx.concatenate([anchor, draft.tokens])
        reading = self._forward(block)
        verdict = self.chooser.judge(reading.logits, draft, position, self.tokens)
        mx.async_eval(verdict, *self._unseen.state)
        self._unread = Flight(block.size, width, draft.forced, reading, verdict, launched_s, depth)
        return self._unread

    def _draft(self, anchor: mx.array, position: Position, width: int) -> Draft:
        if self.drafter is None or self.length == 0:
            return self.chooser.undrafted()
        # Certain drafts cost no drafter: they pay where drafting does not.
        forced = self.chooser.forced(max(width, FORCED_ROWS) - 1)
        if forced.forced or width == 1:
            return forced
        self._see()
        trellis = self.drafter.propose(self.context, None, anchor, width)
        return self.chooser.draft(trellis, position)

    def commit(self, flight: Flight, tokens: Sequence[int]) -> None:
        """Take in the tokens emitted: the last becomes the anchor, the rows behind it go.

        Without tokens the anchor stays, as if there had been no pass.
        """
        self.chooser.commit(list(tokens))
        if flight is not self._taken:
            self._take_in(flight, len(tokens))
        self.tokens += tokens
        if self._late is flight:
            self._keep_taps(flight, len(tokens))
        self._late = None
        self._unread = None if self._unread is flight else self._unread
        self._settle_context()
        if len(self._unseen) >= MAX_UNSEEN:
            self._see()
            mx.async_eval([cache.state for cache in self.context])

    def _settle_context(self) -> None:
        """Let go of drafter rows behind the committed tokens, where the device knew how many."""
        for cache in self.context:
            if not isinstance(cache.offset, int):
                cache.rewind_to(self.length)

    def _take_in(self, flight: Flight, kept: int | mx.array) -> None:
        """Keep the first `kept` rows of the pass behind the committed tokens."""
        self._taken, most = flight, self.length + flight.width
        if self.target.runs_ahead:
            self.target.rewind_to(self.caches, self.length + kept, self.length + 1, most)
        else:
            assert isinstance(kept, int)
            self.target.rewind(self.caches, flight.reading, kept)
        if isinstance(kept, int):
            self._keep_taps(flight, kept)
        else:
            self._late = flight

    def _keep_taps(self, flight: Flight, kept: int) -> None:
        if self.drafter and kept and flight.reading.taps is not None:
            taps = flight.reading.taps
            self._unseen.add(taps if kept == flight.width else taps[:, :kept])

    def _see(self) -> None:
        """Let the drafter's context take in what it has not seen."""
        assert self.drafter is not None
        if (taps := self._unseen.take()) is not None:
            self.drafter.extend(self.context, taps)
        if self._late and self._late.reading.taps is not None:
            self.drafter.extend(self.context, self._late.reading.taps)
            offset, low = self.length + self._late.kept, self.length + 1
            for cache in self.context:
                cache.rewind_to(offset, low, self.length + self._late.width)
        self._late = None

    def stop_drafting(self) -> None:
        """Go on with plain decoding and forget the drafter's context."""
        self.drafter, self.context, self._unseen, self._late = None, [], Unseen(), None

    def close(self, flight: Flight | None) -> None:
        """Leave sound caches behind, whatever was in flight."""
        self._late = self._unread = None
        self._settle_context()
        if self.target.runs_ahead:
            self.target.rewind_to(self.caches, self.length)
        elif flight is not None:
            self.target.rewind(self.caches, flight.reading, 0)

    def _skip_unseen(self, num_tokens: int) -> int:
        limit = self.drafter.context_rows if self.drafter else None
        skipped = max(0, num_tokens - limit) if limit is not None else 0
        if self.drafter and skipped:
            self.drafter.skip(self.context, skipped)
        return skipped


def decode(
    conversation: Conversation,
    choose_width: ChooseWidth,
    *,
    max_tokens: int,
    end_tokens: Collection[int],
) -> Generator[Step]:
    """Emit tokens behind a prefilled prompt until an end token (emitted too) or `max_tokens`.

    A step is handed out only after the next pass was launched, which happens before this one is
    read where nothing has to be known of it. Closing the generator early leaves the caches at the
    last step handed out.
    """
    remaining = max_tokens
    # Drafters learn from anchors inside answers; behind a prompt's last token they draft nothing
    # that stands (1.00 tokens per pass on the demo pair's 24 prompts).
    flight: Flight | None = conversation.launch(1)
    read_s = paused_s = 0.0
    last_width = 0
    try:
        while flight is not None:
            following = None
            if conversation.can_follow(flight) and flight.width < remaining:
                width = min(choose_width(), remaining - 1)
                following = conversation.launch(width, behind=flight)
            verdict = conversation.chooser.read(flight.verdict, flight.width)
            was_ahead = flight.launched_s < read_s
            since_s, read_s = max(flight.launched_s, read_s), time.perf_counter()
            widths = {last_width, flight.width, following.width if following else flight.width}
            last_width = flight.width
            # Of passes that overlap, only one between two others is seen from its start to its end.
            tells = len(widths) == 1 and was_ahead == (following is not None)
            pass_s = _pass_time(flight, read_s - since_s, paused_s) if tells else None
            tokens, reason = _cut(verdict.tokens, remaining, end_tokens)
            conversation.commit(flight, tokens)
            remaining -= len(tokens)
            step = _step(flight, verdict, tokens, reason, pass_s)
            flight = following if reason is None else None
            if reason is None and conversation.target.undraftable:
                yield step  # before the launch: what these caches read cannot be undone
            if reason is None and flight is None:
                width = 1 if verdict.in_doubt else min(choose_width(), remaining)
                flight = conversation.launch(width)
            if reason is not None or not conversation.target.undraftable:
                delivered_s = time.perf_counter()
                yield step
                paused_s = time.perf_counter() - delivered_s
    finally:
        conversation.close(flight)


def _step(
    flight: Flight,
    verdict: Verdict,
    tokens: list[int],
    reason: FinishReason | None,
    pass_s: float | None,
) -> Step:
    return Step(
        tokens=tuple(tokens),
        drafted=flight.width - 1,
        from_draft=min(verdict.num_accepted, len(tokens)),
        finish_reason=reason,
        logprobs=tuple(verdict.logprobs[: len(tokens)]),
        in_doubt=verdict.in_doubt and reason is None,
        depth=flight.depth,
        pass_s=pass_s,
        forced=flight.forced,
    )


def _pass_time(flight: Flight, seconds: float, paused_s: float) -> float | None:
    if flight.forced or flight.width != flight.asked:
        return None
    return seconds if paused_s <= MAX_PAUSE * seconds else None


def _cut(
    tokens: list[int], remaining: int, end_tokens: Collection[int]
) -> tuple[list[int], FinishReason | None]:
    """End at the first end token, wherever it is in the block, or when `remaining` are emitted."""
    tokens = tokens[:remaining]
    for position, token in enumerate(tokens):
        if token in end_tokens:
            return tokens[: position + 1], "stop"
    return tokens, "length" if len(tokens) == remaining else None
