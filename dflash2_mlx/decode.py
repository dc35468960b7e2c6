"""The pass: propose a block, verify it in one forward, accept a prefix, rewind the rest."""

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import mlx.core as mx

from dflash2_mlx.acceptance import accept_greedy
from dflash2_mlx.models.drafter import Proposal
from dflash2_mlx.target import Reading, Target

PREFILL_STEP = 2048  # tokens, mlx-lm's own chunk, so that chunk borders round alike

FinishReason = Literal["stop", "length"]
ChooseWidth = Callable[[], int]


class Proposer(Protocol):
    """What the pass asks of a drafter; `models.drafter.Drafter` is one."""

    @property
    def context_rows(self) -> int | None: ...

    def make_context(self) -> list[Any]: ...

    def skip(self, context: list[Any], num_tokens: int) -> None: ...

    def extend(self, context: list[Any], taps: mx.array) -> None: ...

    def propose(
        self, context: list[Any], taps: mx.array | None, anchor: mx.array, width: int
    ) -> Proposal: ...


@dataclass(frozen=True, slots=True)
class Step:
    """What one pass emitted: 1 to `drafted + 1` tokens, the first `from_draft` of them drafted.

    `text` is filled in by the reader that detokenizes.
    """

    tokens: tuple[int, ...]
    drafted: int
    from_draft: int
    finish_reason: FinishReason | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class Flight:
    """A pass that was launched and not read: its verdict is `[1 + width]` int32 on the device."""

    width: int
    reading: Reading
    verdict: mx.array


class Conversation:
    """Caches of target and drafter, which hold the same committed tokens, the anchor excluded."""

    def __init__(self, target: Target, drafter: Proposer | None = None) -> None:
        self.target = target
        self.drafter = drafter
        self.caches = target.make_caches()
        self.context = drafter.make_context() if drafter else []
        self.length = 0
        self._unseen: list[mx.array] = []  # taps that the drafter's context has not taken in

    def prefill(self, tokens: Sequence[int]) -> None:
        """Read a prompt in chunks; the drafter takes in the rows that a block can still see."""
        first_seen = self._skip_unseen(len(tokens))
        for start in range(0, len(tokens), PREFILL_STEP):
            chunk = tokens[start : start + PREFILL_STEP]
            reading = self.target.read(mx.array(list(chunk)), self.caches)
            self.length += reading.length
            if reading.taps is not None and self.drafter and start + len(chunk) > first_seen:
                taps = reading.taps[:, max(0, first_seen - start) :]
                self.drafter.extend(self.context, taps)
            # The head is never evaluated: nothing here asks for the logits.
            mx.eval([cache.state for cache in (*self.caches, *self.context)])
            mx.clear_cache()

    def launch(self, anchor: int, width: int) -> Flight:
        """Propose and verify `width` rows (1: plain decoding) as one graph, and start it."""
        block = mx.array([anchor], dtype=mx.uint32)
        drafts = mx.zeros((0,), dtype=mx.uint32)
        if self.drafter and width > 1 and self.length > 0:
            taps = mx.concatenate(self._unseen, axis=1) if self._unseen else None
            drafts = self.drafter.propose(self.context, taps, block, width).tokens
            self._unseen = []
        else:
            width = 1
        reading = self.target.read(mx.concatenate([block, drafts]), self.caches)
        verdict = accept_greedy(drafts, reading.logits)
        mx.async_eval(verdict)
        return Flight(width, reading, verdict)

    def commit(self, flight: Flight, num_tokens: int) -> None:
        """Keep the anchor and all but the last of `num_tokens` emitted; rewind the other rows."""
        self.target.rewind(self.caches, flight.reading, num_tokens)
        self.length += num_tokens
        if self.drafter and flight.reading.taps is not None:
            self._unseen.append(flight.reading.taps[:, :num_tokens])

    def stop_drafting(self) -> None:
        """Go on with plain decoding and forget the drafter's context."""
        self.drafter, self.context, self._unseen = None, [], []

    def close(self, flight: Flight | None) -> None:
        """Leave sound caches behind, whatever was in flight."""
        if flight is not None:
            self.target.rewind(self.caches, flight.reading, 0)
        if self.drafter and self._unseen:
            self.drafter.extend(self.context, mx.concatenate(self._unseen, axis=1))
            self._unseen = []

    def _skip_unseen(self, num_tokens: int) -> int:
        limit = self.drafter.context_rows if self.drafter else None
        skipped = max(0, num_tokens - limit) if limit is not None else 0
        if self.drafter and skipped:
            self.drafter.skip(self.context, skipped)
        return skipped


def decode(
    conversation: Conversation,
    anchor: int,
    choose_width: ChooseWidth,
    *,
    max_tokens: int,
    end_tokens: Collection[int],
) -> Generator[Step]:
    """Emit tokens behind `anchor` until an end token (emitted too) or `max_tokens`.

    A step is handed out only after the next pass was launched. Closing the generator early leaves
    the caches at the last step handed out.
    """
    remaining = max_tokens
    # Drafters learn from anchors inside answers; behind a prompt's last token they draft nothing
    # that stands (1.00 tokens per pass on the demo pair's 24 prompts).
    flight: Flight | None = conversation.launch(anchor, 1)
    try:
        while flight is not None:
            num_accepted, *choices = cast(list[int], flight.verdict.tolist())  # the one read
            tokens, reason = _cut(choices[: num_accepted + 1], remaining, end_tokens)
            conversation.commit(flight, len(tokens))
            step = Step(
                tuple(tokens),
                flight.width - 1,
                min(num_accepted, len(tokens)),
                finish_reason=reason,
            )
            remaining -= len(tokens)
            flight, delivered = None, False
            if reason is None and conversation.target.undraftable:
                delivered = True
                yield step  # before the launch: what these caches read cannot be undone
            if reason is None:
                flight = conversation.launch(tokens[-1], min(choose_width(), remaining))
            if not delivered:
                yield step
    finally:
        conversation.close(flight)


def _cut(
    tokens: list[int], remaining: int, end_tokens: Collection[int]
) -> tuple[list[int], FinishReason | None]:
    """End at the first end token, wherever it is in the block, or when `remaining` are emitted."""
    for position, token in enumerate(tokens):
        if token in end_tokens:
            return tokens[: position + 1], "stop"
    return tokens, "length" if len(tokens) >= remaining else None
