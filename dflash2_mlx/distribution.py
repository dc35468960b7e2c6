"""The one definition of the target's distribution, for plain and drafted decoding alike.

The order of operations is mlx-lm's: bias, repetition, presence and frequency penalties change the
logits; top_p, min_p and top_k filter by the probabilities these give; the temperature comes last.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from dflash2_mlx.sampling import SamplingParams

NEGATIVE_INFINITY = -math.inf


@dataclass(frozen=True, slots=True)
class Rows:
    """L distributions: `weights` `[L, K]`, log of unnormalised probabilities, -inf where excluded.

    `ids` `[L, K]` are the tokens they belong to; None: every token of the vocabulary, in order.
    """

    weights: mx.array
    ids: mx.array | None = None

    def log_probabilities(self, tokens: mx.array) -> mx.array:
        """log p of one token per row: `[L']` for the first L' rows."""
        rows = self.weights[: tokens.size]
        if self.ids is None:
            chosen = mx.take_along_axis(rows, tokens[:, None], axis=1)[:, 0]
        else:
            is_token = self.ids[: tokens.size] == tokens[:, None]
            chosen = mx.where(is_token, rows, NEGATIVE_INFINITY).max(axis=-1)
        return chosen - mx.logsumexp(rows, axis=-1)

    def winners(self, noise: mx.array) -> mx.array:
        """One draw per row `[L]` with Gumbel noise `[L, V]`, by token id."""
        if self.ids is None:
            return mx.argmax(self.weights + noise, axis=-1)
        noisy = self.weights + mx.take_along_axis(noise, self.ids, axis=1)
        best = mx.argmax(noisy, axis=-1, keepdims=True)
        return mx.take_along_axis(self.ids, best, axis=1)[:, 0]

    def row(self, index: mx.array) -> "Rows":
        """One row, `index` `[]` on the device, as `[K]` arrays."""
        ids = None if self.ids is None else mx.take(self.ids, index, axis=0)
        return Rows(mx.take(self.weights, index, axis=0), ids)

    def token(self, choice: mx.array) -> mx.array:
        """The token at position `choice` `[]` of a row made by `row`."""
        return choice if self.ids is None else mx.take(self.ids, choice)


class Distribution:
    """What a request's fields make of the target's logits."""

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        self.params = params
        self._bias: mx.array | None = None
        if params.logit_bias:
            tokens = mx.array(list(params.logit_bias))
            values = mx.array(list(params.logit_bias.values()), dtype=mx.float32)
            self._bias = mx.zeros((vocab_size,)).at[tokens].add(values)
        self.has_penalties = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )

    @property
    def changes_logits(self) -> bool:
        """Whether bias or penalties are in force."""
        return self._bias is not None or self.has_penalties

    def logits(self, raw: mx.array, committed: Sequence[int], drafts: mx.array) -> mx.array:
        """Logits after bias and penalties, before filters: `[L, V]` float32.

        Row i follows `committed` (the anchor last) and the first i of `drafts` `[L - 1]`: its
        penalties count exactly those tokens.
        """
        logits = raw.astype(mx.float32)
        if self._bias is not None:
            logits = logits + self._bias
        if self.has_penalties:
            window, counted = self._windows(committed, drafts)
            logits = self._penalized(logits, window, counted)
        return logits

    def rows(self, logits: mx.array) -> Rows:
        """The distributions to sample from, of logits `[L, V]` float32; temperature above 0."""
        params, vocab_size = self.params, logits.shape[-1]
        ids = None
        total = mx.logsumexp(logits, axis=-1, keepdims=True)
        if 0 < params.top_k < vocab_size:
            ids = mx.argpartition(logits, -params.top_k, axis=-1)[:, -params.top_k :]
            logits = mx.take_along_axis(logits, ids, axis=-1)
        floor = mx.full((logits.shape[0], 1), NEGATIVE_INFINITY)
        if params.top_p < 1.0:
            nucleus = nucleus_floor(logits, total, params.top_p, _sortable(vocab_size))
            floor = mx.maximum(floor, nucleus)
        if params.min_p > 0.0:
            floor = mx.maximum(floor, logits.max(axis=-1, keepdims=True) + math.log(params.min_p))
        logits = mx.where(logits < floor, NEGATIVE_INFINITY, logits)
        return Rows((logits - logits.max(axis=-1, keepdims=True)) / params.temperature, ids)

    def _windows(self, committed: Sequence[int], drafts: mx.array) -> tuple[mx.array, mx.array]:
        """The last tokens before each row, `[L, W]`, and which of them are real."""
        size, num_rows = self.params.penalty_context, drafts.size + 1
        known = list(committed[-size:])
        padding = size - len(known)
        line = mx.concatenate([mx.array([known[-1]] * padding + known), drafts.astype(mx.int32)])
        places = mx.arange(num_rows)[:, None] + mx.arange(size)
        return line[places], places >= padding

    def _penalized(self, logits: mx.array, window: mx.array, counted: mx.array) -> mx.array:
        # Padding repeats a token of the window, so it is written the same value once more.
        params = self.params
        chosen = mx.take_along_axis(logits, window, axis=-1)
        repeated = mx.where(
            chosen < 0, chosen * params.repetition_penalty, chosen / params.repetition_penalty
        )
        same = mx.where(counted[:, None, :], window[:, :, None] == window[:, None, :], False)
        penalty = params.presence_penalty + params.frequency_penalty * same.sum(axis=-1)
        return mx.put_along_axis(logits, window, repeated - penalty, axis=-1)


def nucleus_floor(logits: mx.array, total: mx.array, top_p: float, sortable: int) -> mx.array:
    """The smallest logit `[L, 1]` that has less than `top_p` of the mass strictly above it.

    `total` `[L, 1]` is the log of a row's whole mass. No more than `sortable` logits of a row are
    sorted: halves that the floor cannot lie in are left out before.
    """
    above = mx.zeros_like(total)
    while (size := logits.shape[-1]) > sortable:
        half = size // 2
        halves = mx.partition(logits, size - half, axis=-1)
        lower, upper = halves[:, : size - half], halves[:, half:]  # of one size, so one may overlap
        with_upper = above + mx.exp(halves[:, size - half :] - total).sum(axis=-1, keepdims=True)
        in_upper = with_upper >= top_p
        logits = mx.where(in_upper, upper, lower)
        above = mx.where(in_upper, above, with_upper)
    ordered = mx.sort(logits, axis=-1)
    mass = mx.exp(ordered - total)
    above = above + mx.cumsum(mass, axis=-1, reverse=True, inclusive=False)
    floor = mx.where(above < top_p, ordered, mx.inf).min(axis=-1, keepdims=True)
    return mx.minimum(floor, ordered[:, -1:])  # the best token always stays


def _sortable(vocab_size: int) -> int:
    # MLX partitions in linear time on a CPU; on a GPU its partition is a sort of everything.
    return 512 if mx.default_device().type == mx.cpu else vocab_size
