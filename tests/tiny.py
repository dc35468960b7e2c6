"""Tiny random pairs, a byte tokenizer and scripted drafters: the engine in milliseconds."""

import importlib
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.generate import generate_step

from dflash2_mlx.chip import Chip
from dflash2_mlx.decode import Conversation
from dflash2_mlx.models.config import DrafterConfig
from dflash2_mlx.models.drafter import Drafter
from dflash2_mlx.models.selector import Trellis
from dflash2_mlx.pair import Pair, join
from dflash2_mlx.target import Target

CPU = Chip(True, "x86_64", None)
AMD = Chip(True, "x86_64", None, "AMD EPYC 9B45")
M4 = Chip(False, "applegpu_g16s", 16)

VOCAB, HIDDEN, NUM_LAYERS = 300, 64, 4
END = 256

LLAMA = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": NUM_LAYERS,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
WINDOW = 12
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": WINDOW,
}
TARGETS: dict[str, dict[str, Any]] = {
    "dense": {},
    "grouped-query": {"num_key_value_heads": 2},
    "tied": {"tie_word_embeddings": True},
    "sliding": SLIDING,
    "grouped sliding": {**SLIDING, "num_key_value_heads": 1},
}
DRAFTER = {
    "architectures": ["DFlash2DraftModel"],
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "layer_types": ["sliding_attention", "sliding_attention"],
    "sliding_window": 10,
    "is_causal": False,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "num_target_layers": NUM_LAYERS,
    "eos_token_id": END,
    "dflash_config": {
        "block_size": 8,
        "mask_token_id": VOCAB - 1,
        "target_layer_ids": [0, 2],
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 8,
        "selector_top_k": 6,
    },
}


class ByteTokenizer:
    """One token per byte; ids from 256 on are special."""

    chat_template = "bytes"
    eos_token_ids = frozenset({END})
    all_special_ids = tuple(range(256, VOCAB))

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(id_ for id_ in ids if id_ < 256).decode(errors="replace")

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        return self.encode("".join(f"{m['role']}: {m['content']}\n" for m in messages))


def randomize(module: nn.Module, seed: int = 0, scale: float = 0.15) -> nn.Module:
    """Random float32 weights that make every token depend on its whole context."""
    keys = iter(mx.random.split(mx.random.key(seed), 4096))

    def draw(array: mx.array) -> mx.array:
        noise = mx.random.normal(array.shape, key=next(keys))
        return 1 + 0.1 * noise if array.ndim == 1 else scale * noise

    module.update(tree_map(draw, module.parameters()))
    mx.eval(module.parameters())
    return module


def build_model(model_type: str, config: dict[str, Any], seed: int = 0) -> nn.Module:
    """A random model of an mlx-lm family, from mlx-lm's own classes."""
    family = importlib.import_module(f"mlx_lm.models.{model_type}")
    args = family.ModelArgs.from_dict({"model_type": model_type, **config})
    return randomize(family.Model(args), seed)


@cache
def tiny_target(kind: str = "dense", seed: int = 0) -> nn.Module:
    """A random llama of one of the kinds in `TARGETS`."""
    return build_model("llama", {**LLAMA, **TARGETS[kind]}, seed)


def tiny_config(**changes: Any) -> DrafterConfig:
    """The tiny drafter's config; fields of `dflash_config` are changed there."""
    nested = {**DRAFTER["dflash_config"]}  # type: ignore[dict-item]
    nested.update({name: changes.pop(name) for name in list(changes) if name in nested})
    return DrafterConfig.from_dict({**DRAFTER, "dflash_config": nested, **changes})


def tiny_drafter(seed: int = 1, **changes: Any) -> Drafter:
    """A random drafter."""
    return randomize(Drafter(tiny_config(**changes)), seed)


def tiny_pair(kind: str = "dense", **changes: Any) -> Pair:
    """A random pair with the byte tokenizer."""
    model, drafter = tiny_target(kind), tiny_drafter(**changes)
    return pair_of(join(model, drafter), drafter)


def pair_of(target: Target, drafter: Any = None, **options: Any) -> Pair:
    options.setdefault("end_tokens", frozenset({END}))
    options.setdefault("drafter_name", "tiny" if drafter is not None else None)
    return Pair(target, drafter, ByteTokenizer(), name="tiny", **options)


class ScriptedDrafter(nn.Module):
    """Proposes what `script(position, width)` says: `width - 1` ids behind the anchor there."""

    context_rows = None
    dtype = mx.float32
    draft_block = 1

    def __init__(self, script: Callable[[int, int], Sequence[int]], block_size: int = 8) -> None:
        super().__init__()
        self.config = SimpleNamespace(block_size=block_size, max_position_embeddings=10**6)
        self.script = script
        self.widths: list[int] = []

    def make_context(self) -> list[Any]:
        return [_CountingContext()]

    def skip(self, context: list[Any], num_tokens: int) -> None:
        context[0].offset += num_tokens

    def extend(self, context: list[Any], taps: mx.array) -> None:
        context[0].offset += taps.shape[1]

    def propose(
        self, context: list[Any], taps: mx.array | None, anchor: mx.array, width: int
    ) -> Trellis:
        if taps is not None:
            self.extend(context, taps)
        self.widths.append(width)
        # Scripts run on the host: they wait for what the device knows.
        drafts = list(self.script(int(context[0].offset), width))
        assert len(drafts) == width - 1
        # One candidate per row: whatever the sampling, this is what gets drafted.
        return Trellis(mx.array(drafts, dtype=mx.uint32)[:, None], mx.zeros((width - 1, 1, 1)))


class _CountingContext:
    """Counts committed tokens; speaks the verbs the engine asks of a cache."""

    offset: int | mx.array = 0
    state: tuple[mx.array, ...] = ()

    def rewind_to(self, offset: int | mx.array, low: int = 0, high: int = 0) -> None:
        self.offset = offset


def plain_ids(
    model: nn.Module, prompt: Sequence[int], max_tokens: int, ends: Sequence[int] = (END,)
) -> list[int]:
    """Greedy ids by mlx-lm's own loop, the end token included."""
    ids = []
    for token, _ in generate_step(mx.array(prompt), model, max_tokens=max_tokens):
        ids.append(int(token))
        if ids[-1] in ends:
            break
    return ids


def cache_rows(conversation: Conversation) -> list[mx.array]:
    """Everything the target's next token could see."""
    rows: list[mx.array] = []
    for layer in conversation.caches:
        rows += layer.rows()
    return rows
