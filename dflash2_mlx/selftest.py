"""A check of this machine in a second: a tiny random pair, drafted and plain."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models import llama

from dflash2_mlx.decode import Conversation, decode
from dflash2_mlx.models.config import DrafterConfig
from dflash2_mlx.models.drafter import Drafter
from dflash2_mlx.pair import join
from dflash2_mlx.target import Target

Check = tuple[str, bool, str]

VOCAB, HIDDEN, NUM_LAYERS, WINDOW = 256, 64, 4, 12
HEADS = {"hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SIZES = {**HEADS, "intermediate_size": 96, "rms_norm_eps": 1e-5, "vocab_size": VOCAB}
TARGET = {
    **SIZES,
    "model_type": "llama",
    "num_hidden_layers": NUM_LAYERS,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": WINDOW,
}
DRAFTER = {
    **SIZES,
    "architectures": ["DFlash2DraftModel"],
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention"] * 2,
    "sliding_window": WINDOW,
    "is_causal": False,
    "max_position_embeddings": 4096,
    "dflash_config": {
        "block_size": 8,
        "mask_token_id": VOCAB - 1,
        "target_layer_ids": [0, 2],
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 8,
        "selector_top_k": 8,
    },
}
PROMPT = [(7 * position) % VOCAB for position in range(40)]
NUM_TOKENS = 32


def run() -> list[Check]:
    """Name, outcome and detail of every check; a check that raises has failed."""
    return [_guarded(name, check) for name, check in CHECKS.items()]


def _guarded(name: str, check: Callable[[], str | None]) -> Check:
    try:
        fault = check()
    except Exception as error:  # a broken install raises anything; the doctor reports it
        fault = f"{type(error).__name__}: {error}"
    return name, fault is None, fault or "ok"


def _same_tokens() -> str | None:
    target, drafter = _pair()
    plain = _tokens(Conversation(Target(target.model)), 1)
    for block in (2, 5, 8):
        drafted = _tokens(Conversation(target, drafter), block)
        if drafted != plain:
            at = next(i for i, (a, b) in enumerate(zip(drafted, plain, strict=False)) if a != b)
            return f"block {block} differs from plain decoding at token {at}"
    return None


def _rewound_rows() -> str | None:
    target, _ = _pair()
    clean, used = target.make_caches(), target.make_caches()
    prompt = mx.array(PROMPT)
    target.read(prompt, clean)
    target.read(prompt, used)
    for kept in (0, 1, 5):
        reading = target.read(mx.arange(8), used)
        target.rewind(used, reading, kept)
        target.read(mx.arange(8)[:kept], clean) if kept else None
        for ours, theirs in zip(used, clean, strict=True):
            if not mx.allclose(ours.rows()[0], theirs.rows()[0], atol=1e-4):
                return f"a cache differs after {kept} of 8 tokens were kept"
    return None


CHECKS: dict[str, Callable[[], str | None]] = {
    "drafted output equals plain decoding": _same_tokens,
    "caches rewind": _rewound_rows,
}


def _pair() -> tuple[Target, Drafter]:
    model: Any = llama.Model(llama.ModelArgs.from_dict(TARGET))
    drafter = Drafter(DrafterConfig.from_dict(DRAFTER))
    _randomize(model, 0)
    _randomize(drafter, 1)
    return join(model, drafter), drafter


def _randomize(module: nn.Module, seed: int) -> None:
    keys = iter(mx.random.split(mx.random.key(seed), 1024))

    def draw(array: mx.array) -> mx.array:
        noise = 0.15 * mx.random.normal(array.shape, key=next(keys))
        return 1 + noise if array.ndim == 1 else noise

    module.update(tree_map(draw, module.parameters()))
    mx.eval(module.parameters())


def _tokens(conversation: Conversation, block: int) -> list[int]:
    conversation.prefill(PROMPT)
    steps = decode(conversation, lambda: block, max_tokens=NUM_TOKENS, end_tokens=frozenset())
    return [token for step in steps for token in step.tokens]
