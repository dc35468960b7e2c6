"""Keys and values of committed tokens, for all layers of a drafter in one product."""

from collections.abc import Sequence
from copy import copy

import mlx.core as mx

from dflash2_mlx.models.layers import Attention
from dflash2_mlx.models.stacked import stacked


class ContextProjection:
    """What all layers store of a committed token: one product, one norm and one rotation."""

    def __init__(self, layers: Sequence[Attention]) -> None:
        first = layers[0]
        self._rope, self._eps = first.rope, first.k_norm.eps
        self._shape = (len(layers), 2, first.num_kv_heads, first.k_norm.weight.size)
        # Copies, since in a layer the same weights lie beside those of its queries.
        parts = [copy(part) for layer in layers for part in (layer.k_proj, layer.v_proj)]
        self._project = stacked(parts)
        self._norms = mx.stack([layer.k_norm.weight for layer in layers])[:, None, None]
        mx.eval(self._norms)

    def __call__(self, rows: mx.array, offset: int | mx.array) -> list[tuple[mx.array, mx.array]]:
        """Rows `[S, D]` from position `offset` -> for each layer keys and values
        `[1, heads, S, head_dim]`."""
        stored = self._project(rows).reshape(len(rows), *self._shape).transpose(2, 1, 3, 0, 4)
        keys = mx.fast.rms_norm(stored[0], None, self._eps) * self._norms
        keys = self._rope(keys, offset=offset)
        return [(keys[i : i + 1], stored[1, i : i + 1]) for i in range(self._shape[0])]
