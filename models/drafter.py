"""The DFlash drafters: a block of tokens from one forward over the target's hidden states."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash2_mlx.models import checkpoint, speculators
from dflash2_mlx.models.cache import KVCache
from dflash2_mlx.models.config import DrafterConfig
from dflash2_mlx.models.context import ContextProjection
from dflash2_mlx.models.layers import DecoderLayer
from dflash2_mlx.models.selector import CandidateSelector, Trellis, independent_rows

Embed = Callable[[mx.array], mx.array]
Head = Callable[[mx.array], mx.array]
Context = list[KVCache]


NUM_CANDIDATES = 16  # per row where there is no selector to say otherwise


class Drafter(nn.Module):
    """A DFlash drafter, bound to the embedding and head of its target.

    Raises nothing at run time: `load_drafter` refuses what cannot work, and leaves in `notes` what
    it did not take over from the checkpoint.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.notes: tuple[str, ...] = ()
        self.draft_block = 1  # rows that a draft fills at least, however few are asked for
        dim = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * dim, dim, bias=False)
        self.hidden_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)
        self.layers = [DecoderLayer(config, layer) for layer in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)
        if config.selector_rank:
            self.candidate_selector = CandidateSelector(
                config.vocab_size, dim, config.selector_rank, config.selector_top_k
            )

    @property
    def dtype(self) -> mx.Dtype:
        """What activations are computed in."""
        dtype: mx.Dtype = self.norm.weight.dtype
        return dtype

    def bind(self, embed: Embed, head: Head) -> "Drafter":
        """Share the target's raw embedding (ids -> `[.., D]`) and head (`[.., D]` -> `[.., V]`)."""
        # Behind lambdas: a module set as an attribute would become one of our parameters.
        self.embed = lambda ids: embed(ids)
        self.head = lambda hidden: head(hidden)
        self._fuse()
        return self

    def set_dtype(self, *args: Any, **kwargs: Any) -> None:
        """Cast, also what a bound drafter computes with."""
        super().set_dtype(*args, **kwargs)
        if hasattr(self, "head"):
            self._fuse()

    def _fuse(self) -> None:
        for layer in self.layers:
            layer.self_attn.fuse()
            layer.mlp.fuse()
        self._project_context = ContextProjection([layer.self_attn for layer in self.layers])

    @property
    def context_rows(self) -> int | None:
        """Committed tokens a block can look back at, None for all."""
        return self.config.context_rows

    def make_context(self) -> Context:
        """An empty context cache, one for each layer."""
        config = self.config
        return [KVCache(config.window(layer)) for layer in range(config.num_hidden_layers)]

    def skip(self, context: Context, num_tokens: int) -> None:
        """Move on by tokens too old for any block to see."""
        for cache in context:
            cache.skip(num_tokens)

    def extend(self, context: Context, taps: mx.array) -> None:
        """Take in the target's tapped hidden states `[1, S, taps * D]` of S committed tokens."""
        limit = self.config.context_rows
        if limit is not None and (too_old := taps.shape[1] - limit) > 0:
            self.skip(context, too_old)
            taps = taps[:, too_old:]
        rows = self.hidden_norm(self.fc(taps[0].astype(self.dtype)))
        stored = self._project_context(rows, context[0].offset)
        for cache, keys_and_values in zip(context, stored, strict=True):
            cache.update_and_fetch(*keys_and_values)

    def propose(
        self, context: Context, taps: mx.array | None, anchor: mx.array, width: int
    ) -> Trellis:
        """Candidates for `width - 1` tokens behind `anchor` `[1]`, taking in `taps` `[1, S, ..]`.

        `taps` are of the committed tokens before the anchor that the context has not seen (None: it
        has seen all). One lazy graph: nothing is read back. With a wider `draft_block` the forward
        has more rows; head and selector only see those asked for.
        """
        rows = max(width, self.draft_block)
        hidden = self.hidden(context, taps, anchor, rows)[: width - 1]
        logits = self.logits(hidden)
        if not self.config.selector_rank:
            return independent_rows(logits, min(NUM_CANDIDATES, self.config.vocab_size))
        trellis: Trellis = self.candidate_selector(hidden, logits, anchor)
        return trellis

    def hidden(
        self, context: Context, taps: mx.array | None, anchor: mx.array, width: int
    ) -> mx.array:
        """Final hidden states `[width - 1, D]` of the block's mask rows."""
        blanks = mx.full((width - 1,), self.config.mask_token_id, dtype=mx.uint32)
        block = mx.concatenate([anchor.astype(mx.uint32), blanks])
        if taps is not None:
            self.extend(context, taps)
        x = self.embed(block).astype(self.dtype) * self.config.input_embedding_scale
        masks: dict[Any, mx.array | None] = {}
        for layer, cache in zip(self.layers, context, strict=True):
            kind = layer.self_attn.window, layer.self_attn.is_causal
            if kind not in masks:
                masks[kind] = layer.self_attn.mask(width, cache)
            x = layer(x, masks[kind], cache)
        out: mx.array = self.norm(x[1:])
        return out

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits `[T, V]` float32 of hidden states `[T, D]`, with the config's scale and cap."""
        config = self.config
        logits = self.head(hidden)[:, : config.vocab_size].astype(mx.float32)
        if config.output_multiplier != 1.0:
            logits = logits * config.output_multiplier
        if cap := config.final_logit_softcapping:
            logits = mx.tanh(logits / cap) * cap
        return logits


def load_drafter(folder: str | Path) -> Drafter:
    """Load a drafter; bind it before use. Raises `BadCheckpoint` naming what does not fit."""
    folder = Path(folder).expanduser()
    config = speculators.published(checkpoint.read_json(folder / "config.json"))
    drafter = Drafter(DrafterConfig.from_dict(config))
    weights = checkpoint.sanitize(checkpoint.read_weights(folder))
    checkpoint.check_vocabulary(weights)
    weights, drafter.notes = checkpoint.set_extras_aside(drafter, weights)
    checkpoint.quantize_like(drafter, weights, config)
    checkpoint.check_tensors(drafter, weights, folder)
    drafter.load_weights(list(weights.items()))
    drafter.eval()
    mx.eval(drafter.parameters())
    return drafter
