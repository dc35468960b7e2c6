"""Which drafted tokens stand, and what follows them.

A verdict is one int32 array `[1 + L]` for a block of L rows: how many drafts were accepted (n),
then L tokens of which the first n + 1 are emitted. It is all the host reads of a pass.
"""

import mlx.core as mx


def accept_greedy(drafts: mx.array, logits: mx.array) -> mx.array:
    """The longest prefix of `drafts` `[L - 1]` that the target would choose itself, and one more.

    `logits` `[L, V]` of the anchor and the drafts; the tokens are the target's argmax throughout.
    """
    choices = mx.argmax(logits, axis=-1).astype(mx.int32)
    agreed = (drafts.astype(mx.int32) == choices[:-1]).astype(mx.int32)
    return mx.concatenate([mx.cumprod(agreed).sum(keepdims=True), choices])
