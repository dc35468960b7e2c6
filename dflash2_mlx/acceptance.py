"""Which drafted tokens stand, and what follows them.

A ruling is `[1 + L]` int32 for a block of L rows: how many drafts were accepted (n), then L tokens
of which the first n + 1 are emitted.
"""

import mlx.core as mx

from dflash2_mlx.distribution import Rows


def accept_greedy(drafts: mx.array, logits: mx.array) -> mx.array:
    """The longest prefix of `drafts` `[L - 1]` that the target would choose itself, and one more.

    `logits` `[L, V]` of the anchor and the drafts; the tokens are the target's argmax throughout.
    """
    return accept_equal(drafts, mx.argmax(logits, axis=-1))


def accept_equal(drafts: mx.array, choices: mx.array) -> mx.array:
    """The longest prefix of `drafts` `[L - 1]` that equals the target's `choices` `[L]`."""
    choices = choices.astype(mx.int32)
    if drafts.size == 0:
        return mx.concatenate([mx.zeros(1, dtype=mx.int32), choices])
    num_accepted = _prefix_length(drafts.astype(mx.int32) == choices[:-1])
    return mx.concatenate([num_accepted[None], choices])


def accept_sampled(
    drafts: mx.array, candidates: mx.array, q: mx.array, rows: Rows, uniforms: mx.array
) -> tuple[mx.array, Rows]:
    """Rejection sampling: n drafts accepted `[]`, and the distribution of the token behind them.

    Draft i `[L - 1]` was drawn from `q` `[L - 1, K]` over `candidates` `[L - 1, K]`, and is kept
    with probability min(1, p / q). Behind the first one refused follows a token from what p has
    over q, max(p - q, 0); behind the last one accepted, a token from p (Leviathan et al. 2023).
    """
    if drafts.size == 0:
        num_accepted = mx.array(0, dtype=mx.int32)
        return num_accepted, rows.row(num_accepted)
    drawn = mx.where(candidates == drafts[:, None], q, 0.0).max(axis=-1)
    p = mx.exp(rows.log_probabilities(drafts))
    num_accepted = _prefix_length(uniforms * drawn < p)
    # Behind the last draft nothing was drawn: its row of q is zero.
    refused = mx.minimum(num_accepted, drafts.size - 1)
    spent = mx.take(q, refused, axis=0) * (num_accepted < drafts.size)
    return num_accepted, _without(
        rows.row(num_accepted), mx.take(candidates, refused, axis=0), spent
    )


def margins(logits: mx.array, choices: mx.array) -> mx.array:
    """By how much each choice `[L]` leads the best other token of its row: `[L]` float32.

    `logits` are `[L, V]`; nan where a row has no choice.
    """
    chosen = mx.take_along_axis(logits, choices[:, None], axis=-1)
    others = mx.put_along_axis(logits, choices[:, None], mx.array(-mx.inf, logits.dtype), axis=-1)
    best = others.max(axis=-1).astype(mx.float32)
    return chosen[:, 0].astype(mx.float32) - best


def _without(row: Rows, candidates: mx.array, q: mx.array) -> Rows:
    """The residual max(p - q, 0) of one row `[K']`, or p itself where nothing is left."""
    p = mx.softmax(row.weights, axis=-1)
    if row.ids is None:
        left = p.at[candidates].subtract(q)
    else:
        left = p - (row.ids[:, None] == candidates[None]).astype(q.dtype) @ q
    left = mx.maximum(left, 0.0)
    return Rows(mx.where(left.sum() > 0, mx.log(left), row.weights), row.ids)


def _prefix_length(stands: mx.array) -> mx.array:
    return mx.cumprod(stands.astype(mx.int32)).sum()
