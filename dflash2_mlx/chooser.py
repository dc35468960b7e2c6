"""How one request chooses tokens: what is drafted, what stands, and what the host is told."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from dflash2_mlx.acceptance import accept_equal, accept_greedy, accept_sampled, margins
from dflash2_mlx.constraint import Constraint, Walk
from dflash2_mlx.distribution import NEGATIVE_INFINITY, Distribution
from dflash2_mlx.models.selector import Trellis
from dflash2_mlx.randomness import Position, Purpose, Randomness
from dflash2_mlx.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """log p of an emitted token and of the best tokens at its place, best first.

    Of the distribution after bias, penalties and grammar, before filters and temperature; tokens
    that cannot come are left out.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """T drafted tokens `[T]`, and when sampling what they were drawn from: `q` `[T, K]`.

    `allowed` `[T + 1, V]` are the tokens that obey the request's grammar, None without one; with
    `forced` it allowed nothing but these tokens, and no drafter was asked.
    """

    tokens: mx.array
    candidates: mx.array
    q: mx.array
    allowed: mx.array | None = None
    forced: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """All that the host learns of a pass: `num_accepted` drafts, then the tokens to emit.

    `in_doubt`: the token behind them was too close to call in a pass this wide.
    """

    num_accepted: int
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    in_doubt: bool = False


NO_DRAFT = Draft(
    mx.zeros((0,), dtype=mx.uint32), mx.zeros((0, 1), dtype=mx.uint32), mx.zeros((0, 1))
)
# Evaluated here, since what is lazy belongs to the thread that made it.
mx.eval(NO_DRAFT.tokens, NO_DRAFT.candidates, NO_DRAFT.q)


class Chooser:
    """Chooses tokens for one request; everything it hands out stays on the device until `read`.

    `coupled`: drafter and target draw with the same noise at a position, so the ids depend on the
    seed alone, whatever the width of a pass, plain decoding included; else drafts stand by
    rejection sampling, which accepts more of them. Either way the distribution is the target's.
    With a `tolerance`, which is for greedy requests, a choice that leads the second best by no more
    stands only in a pass of one row; a wider pass ends before it.
    """

    def __init__(
        self,
        params: SamplingParams,
        randomness: Randomness,
        vocab_size: int,
        constraint: Constraint | None = None,
        tolerance: float | None = None,
        *,
        coupled: bool = False,
    ) -> None:
        self.params = params
        self.coupled = coupled
        self._vocab_size = vocab_size
        self.constraint = constraint
        # A repetition penalty stretches logits, and with them what they deviate by.
        stretch = max(params.repetition_penalty, 1 / params.repetition_penalty)
        self._tolerance = None if tolerance is None else tolerance * stretch
        self.greedy = params.temperature == 0.0
        self._distribution = Distribution(params, vocab_size)
        self._randomness = randomness

    @property
    def runs_ahead(self) -> bool:
        """Whether tokens can be chosen before the host knows those of the pass before."""
        knows_enough = self.constraint is None and self._tolerance is None
        return knows_enough and not self._distribution.has_penalties

    def draft(self, trellis: Trellis, position: Position) -> Draft:
        """Walk the trellis for tokens at `position` and behind."""
        if self.constraint is not None:
            return self._obeying(trellis, position, self.constraint)
        if self.greedy:
            return Draft(trellis.tokens(trellis.walk()), NO_DRAFT.candidates, NO_DRAFT.q)
        temperature = self.params.temperature
        path = trellis.walk(temperature, self._draft_noise(trellis.candidates, position))
        q = trellis.probabilities(path, temperature)
        return Draft(trellis.tokens(path), trellis.candidates, q)

    def undrafted(self) -> Draft:
        """Nothing drafted: the row of the anchor alone."""
        return self.forced(0)

    def forced(self, limit: int) -> Draft:
        """Up to `limit` tokens that the grammar leaves no choice about, often none."""
        if self.constraint is None:
            return NO_DRAFT
        draft = self._as_draft(self.constraint.forced(limit))
        return replace(draft, forced=draft.tokens.size > 0)

    def commit(self, tokens: list[int]) -> None:
        """Take note of tokens that were emitted."""
        if self.constraint is not None:
            self.constraint.commit(tokens)

    def judge(
        self, raw: mx.array, draft: Draft, position: Position, committed: Sequence[int]
    ) -> mx.array:
        """Decide a block from the target's logits `[L, V]`; one flat int32 array for `read`.

        Row 0 decides the token at `position`, behind `committed` (the anchor last).
        """
        logits = raw
        if self._distribution.changes_logits:
            logits = self._distribution.logits(raw, committed, draft.tokens)
        if draft.allowed is not None:
            logits = mx.where(draft.allowed, logits.astype(mx.float32), NEGATIVE_INFINITY)
        if self.greedy:
            ruling = accept_greedy(draft.tokens, logits)
        else:
            ruling = self._sample(logits.astype(mx.float32), draft, position)
        told = [ruling]
        if self._tolerance is not None and len(raw) > 1:
            told.append(margins(logits, ruling[1:]).view(mx.int32))
        if self.params.logprobs is not None:
            told.append(self._logprobs(logits, ruling[1:]))
        return mx.concatenate(told)

    def read(self, verdict: mx.array, width: int) -> Verdict:
        """Bring the verdict on a block of `width` rows to the host: the one read of a pass."""
        values = np.array(verdict)
        num_accepted, rest = int(values[0]), values[1 + width :]
        num_sure = num_accepted + 1
        if self._tolerance is not None and width > 1:
            clear = rest[:num_sure].view(np.float32) > self._tolerance
            num_sure, rest = int(np.cumprod(clear).sum()), rest[width:]
        return Verdict(
            min(num_accepted, num_sure),
            values[1 : 1 + num_sure].tolist(),
            _unpacked(rest, width, num_sure),
            in_doubt=num_sure <= num_accepted,
        )

    def _obeying(self, trellis: Trellis, position: Position, constraint: Constraint) -> Draft:
        """A walk over candidates that obey the grammar: on the host, one more read of a pass."""
        temperature, noise = self.params.temperature, mx.zeros(trellis.candidates.shape)
        if not self.greedy:
            noise = self._draft_noise(trellis.candidates, position)
        mx.eval(trellis.candidates, trellis.scores, noise)
        candidates = np.array(trellis.candidates)
        walk = constraint.walk(candidates, np.array(trellis.scores), np.array(noise), temperature)
        return self._as_draft(walk)

    def _as_draft(self, walk: Walk) -> Draft:
        assert self.constraint is not None
        return Draft(
            mx.array(walk.tokens, dtype=mx.uint32),
            mx.array(walk.candidates),
            mx.array(walk.q),
            self.constraint.allowed(walk.masks),
        )

    def _draft_noise(self, candidates: mx.array, position: Position) -> mx.array:
        """Gumbel noise for candidates `[T, K]`: by token id when coupled, else by place."""
        num_rows, width = candidates.shape
        if self.coupled:
            return mx.take_along_axis(self._shared_noise(position, num_rows), candidates, axis=1)
        return self._randomness.gumbels(position, num_rows, width, Purpose.DRAFT)

    def _shared_noise(self, position: Position, num_rows: int) -> mx.array:
        return self._randomness.gumbels(position, num_rows, self._vocab_size, Purpose.EMIT)

    def _sample(self, logits: mx.array, draft: Draft, position: Position) -> mx.array:
        num_drafts = draft.tokens.size
        if self.coupled:
            noise = self._shared_noise(position, num_drafts + 1)
            return accept_equal(draft.tokens, self._distribution.rows(logits).winners(noise))
        uniforms = self._randomness.uniforms(position, num_drafts, Purpose.ACCEPT)
        num_accepted, row = accept_sampled(
            draft.tokens, draft.candidates, draft.q, self._distribution.rows(logits), uniforms
        )
        size = row.weights.shape[-1]
        noise = self._randomness.gumbel_at(position + num_accepted, size, Purpose.EMIT)
        token = row.token(mx.argmax(row.weights + noise)).astype(mx.int32)
        line = mx.concatenate([draft.tokens.astype(mx.int32), token[None]])
        tokens = mx.where(mx.arange(num_drafts + 1) == num_accepted, token, line)
        return mx.concatenate([num_accepted[None], tokens])

    def _logprobs(self, logits: mx.array, tokens: mx.array) -> mx.array:
        """For each row the token's log p, then ids and log p of the best, flat as int32 bits."""
        logits = logits.astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        chosen = mx.take_along_axis(logprobs, tokens[:, None], axis=-1)
        packed = [chosen.view(mx.int32)]
        if num_top := self.params.logprobs:
            best = mx.argpartition(logprobs, -num_top, axis=-1)[:, -num_top:]
            values = mx.take_along_axis(logprobs, best, axis=-1)
            packed += [best.astype(mx.int32), values.view(mx.int32)]
        return mx.concatenate(packed, axis=-1).flatten()


def _unpacked(values: np.ndarray, width: int, num_tokens: int) -> list[TokenLogprobs]:
    if not values.size:
        return []
    rows = values.reshape(width, -1)[:num_tokens]
    num_top = (rows.shape[1] - 1) // 2
    found = []
    for row in rows:
        ids = row[1 : 1 + num_top].tolist()
        floats = row.view(np.float32)
        best = zip(ids, floats[1 + num_top :].tolist(), strict=True)
        possible = [(token, value) for token, value in best if value > NEGATIVE_INFINITY]
        top = sorted(possible, key=lambda t: -t[1])
        found.append(TokenLogprobs(float(floats[0]), tuple(top)))
    return found


def greedy_chooser(vocab_size: int) -> Chooser:
    """The target's own first choice everywhere."""
    return Chooser(SamplingParams(), Randomness.from_seed(0), vocab_size)
