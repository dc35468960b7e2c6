"""One layer of a DFlash drafter: attention over context and block, feed-forward, convolutions."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu
from mlx_lm.models.rope_utils import initialize_rope

from dflash2_mlx.models.cache import KVCache
from dflash2_mlx.models.config import DrafterConfig
from dflash2_mlx.models.convolution import GroupedDynamicConv


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

    def __call__(self, x: mx.array, context: mx.array | None, cache: KVCache) -> mx.array:
        """`x` `[B, L, D]` block, `context` `[B, S, D]` rows new to the cache -> `[B, L, D]`.

        The context's rows stay in the cache; the block's are written behind them and rewound.
        """
        length = x.shape[1]
        rows = x if context is None else mx.concatenate([context, x], axis=1)
        keys, values = self._store(rows, cache)
        cache.trim(length)
        queries = self.q_norm(self._heads(self.q_proj(x), self.num_heads))
        queries = self.rope(queries, offset=cache.offset)
        mask = self._mask(length, keys.shape[2])
        out = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self.scale, mask=mask
        )
        return self.o_proj(out.swapaxes(1, 2).reshape(*x.shape[:2], -1))

    def extend(self, context: mx.array, cache: KVCache) -> None:
        """Store context rows `[B, S, D]` without a block."""
        self._store(context, cache)

    def _store(self, rows: mx.array, cache: KVCache) -> tuple[mx.array, mx.array]:
        keys = self.k_norm(self._heads(self.k_proj(rows), self.num_kv_heads))
        values = self._heads(self.v_proj(rows), self.num_kv_heads)
        return cache.update_and_fetch(self.rope(keys, offset=cache.offset), values)

    def _heads(self, x: mx.array, num_heads: int) -> mx.array:
        return x.reshape(*x.shape[:2], num_heads, -1).swapaxes(1, 2)

    def _mask(self, length: int, num_keys: int) -> mx.array | None:
        """Keys are consecutive positions that end with the block's last row."""
        if not self.is_causal and (self.window is None or num_keys <= self.window):
            return None
        query = mx.arange(num_keys - length, num_keys)[:, None]
        key = mx.arange(num_keys)[None]
        visible = key >= num_keys - length
        if self.is_causal:
            visible = visible & (key <= query)
        before = key < num_keys - length
        if self.window is not None:
            before = before & (query - key < self.window)
        return visible | before


class MLP(nn.Module):
    """Gated feed-forward."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden_dim, bias=False)
        self.up_proj = nn.Linear(dim, hidden_dim, bias=False)
        self.down_proj = nn.Linear(hidden_dim, dim, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        """`[B, L, D]` -> `[B, L, D]`."""
        out: mx.array = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
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

    def __call__(self, x: mx.array, context: mx.array | None, cache: KVCache) -> mx.array:
        """`x` `[B, L, D]`, `context` `[B, S, D]` -> `[B, L, D]`."""
        attend = lambda rows: self.self_attn(rows, context, cache)  # noqa: E731
        if not self.has_conv:
            x = x + attend(self.input_layernorm(x))
            return x + self.mlp(self.post_attention_layernorm(x))
        x = x + _convolved(attend, self.attention_conv, self.input_layernorm(x))
        return x + _convolved(self.mlp, self.mlp_conv, self.post_attention_layernorm(x))


def _convolved(
    sublayer: Callable[[mx.array], mx.array], conv: GroupedDynamicConv, x: mx.array
) -> mx.array:
    before, after = conv.coefficients(x)
    return conv(sublayer(conv(x, before)), after)
