"""One layer of a DFlash drafter: attention over context and block, feed-forward, convolutions.

A block is rows `[L, D]`. What each row does by itself is compiled; between the two halves of a
layer the rows attend to a context that grows.
"""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu
from mlx_lm.models.rope_utils import initialize_rope

from dflash2_mlx.models.cache import KVCache
from dflash2_mlx.models.config import DrafterConfig
from dflash2_mlx.models.convolution import GroupedDynamicConv
from dflash2_mlx.models.stacked import stacked


class Attention(nn.Module):
    """Rows of the block attend to the context's rows and to each other."""

    def __init__(self, config: DrafterConfig, layer: int) -> None:
        super().__init__()
        dim, head_dim = config.hidden_size, config.head_dim
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.scale = head_dim**-0.5
        self.window = config.window(layer)
        self.is_causal = config.causal(layer)
        self.q_proj = nn.Linear(dim, self.num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(dim, self.num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(dim, self.num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * head_dim, dim, bias=False)
        self.q_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.rope = initialize_rope(
            head_dim,
            base=config.rope["rope_theta"],
            traditional=False,
            scaling_config=config.rope,
            max_position_embeddings=config.max_position_embeddings,
        )

    def fuse(self) -> None:
        """Put weights that read the same rows into one product; again when they change."""
        num_heads, num_kv_heads = self.num_heads, self.num_kv_heads
        self._project = stacked([self.q_proj, self.k_proj, self.v_proj])
        norms = [self.q_norm.weight] * num_heads + [self.k_norm.weight] * num_kv_heads
        norm = mx.stack(norms)[:, None]
        mx.eval(norm)
        self._norm = lambda x: mx.fast.rms_norm(x, None, self.q_norm.eps) * norm

    def project(self, x: mx.array, offset: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Queries, keys and values `[1, heads, L, head_dim]` of rows `[L, D]` at `offset` `[]`."""
        num_heads, num_kv_heads = self.num_heads, self.num_kv_heads
        heads = self._project(x).reshape(1, len(x), num_heads + 2 * num_kv_heads, -1)
        heads = heads.swapaxes(1, 2)
        rotated = self.rope(self._norm(heads[:, :-num_kv_heads]), offset=offset)
        return rotated[:, :num_heads], rotated[:, num_heads:], heads[:, -num_kv_heads:]

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None
    ) -> mx.array:
        """`queries` `[1, heads, L, head_dim]` look at all keys, or as a `mask` says."""
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self.scale, mask=mask
        )

    def leave(self, attended: mx.array) -> mx.array:
        """`[1, heads, L, head_dim]` -> `[L, D]`."""
        out: mx.array = self.o_proj(attended[0].swapaxes(0, 1).reshape(attended.shape[2], -1))
        return out

    def mask(self, length: int, cache: KVCache) -> mx.array | None:
        """Which rows `[L, S]` a block of `length` sees of those the cache will return with it."""
        first, end = cache.first_visible, cache.high + length
        is_all_seen = self.window is None or end - first <= self.window
        if is_all_seen and not self.is_causal and cache.low == cache.high:
            return None
        query, key = (cache.offset + mx.arange(length))[:, None], mx.arange(first, end)
        before = key < cache.offset
        if self.window is not None:
            before = before & (query - key < self.window)
        last = query if self.is_causal else query[-1:]
        return before | ((key >= cache.offset) & (key <= last))


class MLP(nn.Module):
    """Gated feed-forward."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden_dim, bias=False)
        self.up_proj = nn.Linear(dim, hidden_dim, bias=False)
        self.down_proj = nn.Linear(hidden_dim, dim, bias=False)

    def fuse(self) -> None:
        """Put weights that read the same rows into one product; again when they change."""
        self._project = stacked([self.gate_proj, self.up_proj])

    def __call__(self, x: mx.array) -> mx.array:
        """`[L, D]` -> `[L, D]`."""
        out: mx.array = self.down_proj(swiglu(*mx.split(self._project(x), 2, axis=-1)))
        return out


class DecoderLayer(nn.Module):
    """One DFlash layer; in DFlash 2 a convolution runs before and after each sublayer."""

    def __init__(self, config: DrafterConfig, layer: int) -> None:
        super().__init__()
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(dim, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(dim, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(dim, eps=eps)
        self.has_conv = config.conv_kernel_size > 0
        if self.has_conv:
            conv = (dim, config.conv_kernel_size, config.conv_group_size)
            self.attention_conv = GroupedDynamicConv(*conv)
            self.mlp_conv = GroupedDynamicConv(*conv)
        self._enter_compiled = mx.compile(self.enter)
        self._leave_compiled = mx.compile(self.leave)

    def __call__(self, x: mx.array, mask: mx.array | None, cache: KVCache) -> mx.array:
        """`[L, D]` behind the context's rows in the cache -> `[L, D]`.

        The block's own rows are written behind them and rewound.
        """
        offset = mx.array(cache.offset)
        queries, keys, values, *after = self._enter_compiled(x, offset)
        keys, values = cache.update_and_fetch(keys, values)
        cache.trim(len(x))
        attended = self.self_attn.attend(queries, keys, values, mask)
        out: mx.array = self._leave_compiled(x, attended, *after)
        return out

    def enter(self, x: mx.array, offset: mx.array) -> tuple[mx.array, ...]:
        """Queries, keys and values of rows `[L, D]`, and the kernel of the convolution behind."""
        x = self.input_layernorm(x)
        if not self.has_conv:
            return self.self_attn.project(x, offset)
        before, after = self.attention_conv.coefficients(x)
        return *self.self_attn.project(self.attention_conv(x, before), offset), *after

    def leave(self, x: mx.array, attended: mx.array, *after: mx.array) -> mx.array:
        """The rows `[L, D]` with what they attended to, and what comes behind attention."""
        out = self.self_attn.leave(attended)
        x = x + (self.attention_conv(out, after) if self.has_conv else out)
        rows = self.post_attention_layernorm(x)
        if not self.has_conv:
            return x + self.mlp(rows)
        before, behind = self.mlp_conv.coefficients(rows)
        return x + self.mlp_conv(self.mlp(self.mlp_conv(rows, before)), behind)
