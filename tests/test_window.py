"""Long prompts: the drafter's cache gives what plain attention over everything stored gives."""

import mlx.core as mx
import pytest
from tiny import HIDDEN, VOCAB, tiny_drafter

from dflash2_mlx.models.drafter import Drafter
from dflash2_mlx.models.layers import Attention, DecoderLayer

WINDOW, LENGTH = 10, 6
ANCHOR = mx.array([5])
SLIDING, FULL = "sliding_attention", "full_attention"
KINDS = {
    "all sliding": {"layer_types": [SLIDING, SLIDING]},
    "sliding and full": {"layer_types": [SLIDING, FULL]},
    "all full": {"layer_types": [FULL, FULL]},
    "causal in sliding layers": {"layer_types": [SLIDING, FULL], "is_causal": None},
    "causal": {"layer_types": [SLIDING, SLIDING], "is_causal": True},
    "DFlash 1": {"layer_types": [SLIDING, FULL], "architectures": ["DFlashDraftModel"]},
}


def bound(kind: str, **changes: object) -> Drafter:
    table = mx.random.normal((VOCAB, HIDDEN), key=mx.random.key(3))
    drafter = tiny_drafter(**{"sliding_window": WINDOW, **KINDS[kind], **changes})
    return drafter.bind(lambda ids: table[ids], lambda hidden: hidden @ table.T)


def taps(num_tokens: int) -> mx.array:
    return mx.random.normal((1, num_tokens, 2 * HIDDEN), key=mx.random.key(4))


def attended(module: Attention, x: mx.array, context: mx.array, window: int | None) -> mx.array:
    """One softmax over every stored row; who sees whom is spelled out position by position."""
    rows = mx.concatenate([context, x], axis=1)
    num_context, num_rows = context.shape[1], rows.shape[1]

    def heads(projected: mx.array, num_heads: int) -> mx.array:
        return projected.reshape(*projected.shape[:2], num_heads, -1).swapaxes(1, 2)

    queries = module.q_norm(heads(module.q_proj(rows), module.num_heads))
    keys = module.k_norm(heads(module.k_proj(rows), module.num_kv_heads))
    values = heads(module.v_proj(rows), module.num_kv_heads)
    groups = module.num_heads // module.num_kv_heads
    queries = module.rope(queries)[:, :, num_context:]
    keys, values = (mx.repeat(a, groups, axis=1) for a in (module.rope(keys), values))

    def sees(query: int, key: int) -> bool:
        in_block = key >= num_context
        if in_block:
            return key <= query or not module.is_causal
        return window is None or query - key < window

    visible = [[sees(q, k) for k in range(num_rows)] for q in range(num_context, num_rows)]
    scores = queries @ keys.swapaxes(2, 3) * module.scale
    weights = mx.softmax(mx.where(mx.array(visible), scores, -mx.inf), axis=-1)
    return module.o_proj((weights @ values).swapaxes(1, 2).reshape(1, x.shape[1], -1))


def through(layer: DecoderLayer, x: mx.array, context: mx.array, window: int | None) -> mx.array:
    def convolved(conv: str, inner, rows: mx.array) -> mx.array:  # type: ignore[no-untyped-def]
        if not layer.has_conv:
            return inner(rows)
        module = layer[conv]
        before, after = module.coefficients(rows[0])
        out = inner(module(rows[0], before)[None])
        return module(out[0], after)[None]

    def plain_mlp(rows: mx.array) -> mx.array:
        gate, up = layer.mlp.gate_proj(rows), layer.mlp.up_proj(rows)
        return layer.mlp.down_proj(gate * mx.sigmoid(gate) * up)

    def attention(rows: mx.array) -> mx.array:
        return attended(layer.self_attn, rows, context, window)

    x = x + convolved("attention_conv", attention, layer.input_layernorm(x))
    return x + convolved("mlp_conv", plain_mlp, layer.post_attention_layernorm(x))


def reference(drafter: Drafter, taps: mx.array, windows: list[int | None]) -> mx.array:
    """Draft logits with all of the context's rows at hand in every layer."""
    masks = [drafter.config.mask_token_id] * (LENGTH - 1)
    x = drafter.embed(mx.array([[int(ANCHOR.item()), *masks]]))
    context = drafter.hidden_norm(drafter.fc(taps))
    for layer, window in zip(drafter.layers, windows, strict=True):
        x = through(layer, x, context, window)
    return drafter.logits(drafter.norm(x[0, 1:]))


def windows_of(drafter: Drafter) -> list[int | None]:
    return [drafter.config.window(layer) for layer in range(drafter.config.num_hidden_layers)]


@pytest.mark.parametrize(
    "chunks",
    [[30], [29, 1], [7] * 4 + [2], [1] * 30],
    ids=["at once", "all but one", "by sevens", "one by one"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_of_three_windows_is_seen_as_with_full_storage(
    kind: str, chunks: list[int]
) -> None:
    drafter, seen = bound(kind), taps(3 * WINDOW)
    context = drafter.make_context()
    ends = [sum(chunks[: count + 1]) for count in range(len(chunks))]
    for start, end in zip([0, *ends], ends[:-1], strict=False):
        drafter.extend(context, seen[:, start:end])
    last = seen[:, -chunks[-1] :]
    found = drafter.logits(drafter.hidden(context, last, ANCHOR, LENGTH))
    assert context[0].offset == 3 * WINDOW
    assert mx.allclose(found, reference(drafter, seen, windows_of(drafter)), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_after_rejected_rows_were_rewound(kind: str) -> None:
    drafter, seen = bound(kind), taps(3 * WINDOW)
    context = drafter.make_context()
    drafter.extend(context, seen[:, :24])
    for _ in range(3):
        drafter.extend(context, taps(5) + 1)
        for cache in context:
            cache.trim(5)
    found = drafter.logits(drafter.hidden(context, seen[:, 24:], ANCHOR, LENGTH))
    assert mx.allclose(found, reference(drafter, seen, windows_of(drafter)), atol=1e-4, rtol=0)


@pytest.mark.parametrize("window", [None, WINDOW // 2])
def test_another_window_would_be_noticed(window: int | None) -> None:
    drafter, seen = bound("all sliding"), taps(3 * WINDOW)
    right = reference(drafter, seen, windows_of(drafter))
    wrong = reference(drafter, seen, [window, window])
    assert float(mx.abs(right - wrong).max()) > 0.1


def test_a_layer_type_of_its_own_is_honoured() -> None:
    drafter, seen = bound("sliding and full"), taps(3 * WINDOW)
    right = reference(drafter, seen, [WINDOW, None])
    swapped = reference(drafter, seen, [None, WINDOW])
    assert float(mx.abs(right - swapped).max()) > 0.1


def test_a_short_prompt_needs_no_window() -> None:
    drafter, seen = bound("all sliding"), taps(WINDOW - LENGTH)
    found = drafter.logits(drafter.hidden(drafter.make_context(), seen, ANCHOR, LENGTH))
    assert mx.allclose(found, reference(drafter, seen, [None, None]), atol=1e-4, rtol=0)
