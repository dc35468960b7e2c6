"""One mlx-lm model as a target: forward with taps, caches that rewind, embedding and head."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

from dflash2_mlx.errors import BadCheckpoint, PairMismatch, UnsupportedField
from dflash2_mlx.models.anatomy import Anatomy, examine
from dflash2_mlx.models.cache import KVCache, leaves, rewindable
from dflash2_mlx.models.quantized_cache import quantized
from dflash2_mlx.models.recurrent import Recorder, Tape
from dflash2_mlx.models.spy import Spy, installed

Caches = list[Any]

# mlx-lm 0.32.2 adds phi3small's boolean mask to the scores, so tokens see those behind them.
NOT_CAUSAL = ("phi3small",)


@dataclass(frozen=True, slots=True)
class Reading:
    """What one forward over L tokens gave: `logits` `[L, V]`, `taps` `[1, L, num_taps * D]`."""

    length: int
    logits: mx.array
    taps: mx.array | None
    tape: Tape


class Target:
    """An mlx-lm model, unchanged. Hidden states are tapped at the outputs of decoder layers.

    `undraftable` says why drafting is impossible (say, a cache kind that cannot be rewound), or is
    None. Raises `BadCheckpoint` for a model that does not run on this machine.
    """

    def __init__(self, model: nn.Module, taps: Sequence[int] = ()) -> None:
        self.model = model
        self.num_layers = len(model.layers)
        if outside := [tap for tap in taps if not 0 <= tap < self.num_layers]:
            raise PairMismatch(f"taps {outside} lie outside layers 0 to {self.num_layers - 1}")
        self.kv_bits: int | None = None
        self.undraftable = _known_problem(model) or _not_rewindable(make_prompt_cache(model))
        caches = self.make_caches()
        self._anatomy = _examine(model, caches)
        self._has_device_lengths = all(_has_device_length(leaf) for leaf in leaves(caches))
        self.undraftable = self.undraftable or self._anatomy.problem
        self._recorder = Recorder(self._anatomy.mixers)
        self.taps = () if self.undraftable else tuple(taps)
        self._spies = [self._tap(tap) for tap in self.taps]
        self._tapped: dict[int, mx.array] = {}

    def make_caches(self) -> Caches:
        """Empty caches, one for each of the model's; ours wherever they have to be rewound."""
        caches = make_prompt_cache(self.model)
        return caches if self.undraftable else [_ours(cache, self.kv_bits) for cache in caches]

    def quantize_states(self, bits: int) -> None:
        """Keep keys and values in 8 or 4 bits from now on.

        Raises `UnsupportedField` where the model's own code cannot compute with them.
        """
        try:
            if bits not in (4, 8):
                raise ValueError("keys and values come in 8 or 4 bits")
            if self.undraftable:
                raise ValueError(self.undraftable)
            self.kv_bits, self._has_device_lengths = bits, False
            caches = self.make_caches()
            if not any(isinstance(leaf, KVCache) for leaf in leaves(caches)):
                raise ValueError("it keeps no keys and values")
            self.model(mx.zeros((1, 2), dtype=mx.uint32), cache=caches)
        except Exception as error:  # a forward raises what it likes
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise UnsupportedField(
                f"{bits}-bit keys and values do not work with {_family(self.model)}: {reason}; "
                "leave --kv-bits out"
            ) from None

    def read(self, tokens: mx.array, caches: Caches, *, tapped: bool = True) -> Reading:
        """One lazy forward over `tokens` `[L]`, appended to what the caches hold.

        Not `tapped`, it has no taps, and nobody holds on to hidden states.
        """
        spies = self._spies if tapped else []
        with self._recorder.recording(caches, tokens.size) as tape, installed(spies):
            logits = self.model(tokens[None], cache=caches)
        seen = [self._tapped.pop(tap) for tap in self.taps] if tapped else []
        taps = mx.concatenate(seen, axis=-1) if seen else None
        return Reading(tokens.size, logits[0], taps, tape)

    def rewind(self, caches: Caches, reading: Reading, kept: int) -> None:
        """Put the caches back to the first `kept` tokens of the reading, as if no more was read."""
        if kept == reading.length:
            return
        for cache in leaves(caches):
            if not isinstance(cache, ArraysCache):
                cache.trim(reading.length - kept)
        reading.tape.rewind(kept)

    @property
    def runs_ahead(self) -> bool:
        """Whether a forward can follow one of which the host does not know how much is kept."""
        return self.undraftable is None and self._has_device_lengths

    def rewind_to(
        self, caches: Caches, offset: int | mx.array, low: int | None = None, high: int = 0
    ) -> None:
        """Forget the tokens from position `offset` on, which only the device may know (`[]`).

        For a target that `runs_ahead`; such an offset lies between `low` and `high`.
        """
        for cache in leaves(caches):
            cache.rewind_to(offset, low, high)

    def _tap(self, tap: int) -> Spy:
        def around(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            self._tapped[tap] = output[0] if isinstance(output, tuple) else output
            return output

        return Spy(self.model.layers[tap], around)

    @property
    def embedding(self) -> nn.Module:
        """The raw token embedding."""
        if self._anatomy.embedding is None:
            raise BadCheckpoint(f"no token embedding found in {_family(self.model)}")
        return self._anatomy.embedding

    @property
    def head(self) -> Callable[[mx.array], mx.array]:
        """Hidden states `[.., D]` -> logits `[.., V]`, without the target's own scale or cap."""
        return self._anatomy.head or self.embedding.as_linear

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return int(self.embedding.weight.shape[0])

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        embedding = self.embedding
        scales = getattr(embedding, "scales", None)
        if scales is None:
            return int(embedding.weight.shape[1])
        return int(scales.shape[1]) * int(embedding.group_size)

    @property
    def dtype(self) -> mx.Dtype:
        """What activations are computed in."""
        embedding = self.embedding
        dtype: mx.Dtype = getattr(embedding, "scales", embedding.weight).dtype
        return dtype if dtype in (mx.float32, mx.float16) else mx.bfloat16

    @property
    def quantized(self) -> bool:
        """Whether any matmul runs on quantized weights."""
        return any(hasattr(module, "bits") for _, module in self.model.named_modules())

    @property
    def bits(self) -> int:
        """Bits of most weights."""
        return most_bits(self.model)

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(array.nbytes for array in parameters(self.model).values())


def parameters(model: nn.Module) -> dict[str, mx.array]:
    """All parameters by path."""
    return dict(cast(list[tuple[str, mx.array]], tree_flatten(model.parameters())))


def most_bits(model: nn.Module) -> int:
    """Bits per weight of most bytes of a model, quantized or not."""
    weights: dict[int, int] = {}
    for _, module in model.named_modules():
        weight = module.get("weight") if isinstance(module, dict) else None
        if isinstance(weight, mx.array):
            bits = int(getattr(module, "bits", 8 * weight.dtype.size))
            weights[bits] = weights.get(bits, 0) + weight.nbytes
    return max(weights, key=lambda bits: weights[bits], default=0)


def _ours(cache: Any, kv_bits: int | None = None) -> Any:
    if isinstance(cache, CacheList):
        return CacheList(*[_ours(inner, kv_bits) for inner in cache.caches])
    if isinstance(cache, ArraysCache):
        return cache
    ours = rewindable(cache)
    return ours if kv_bits is None or ours is None else quantized(ours, kv_bits)


def _has_device_length(cache: Any) -> bool:
    return type(cache) is KVCache and not cache.is_shared


def _family(model: nn.Module) -> str:
    return type(model).__module__.rpartition(".")[2]


def _known_problem(model: nn.Module) -> str | None:
    return "its tokens see later ones in mlx-lm" if _family(model) in NOT_CAUSAL else None


def _not_rewindable(caches: Caches) -> str | None:
    foreign = {type(leaf).__name__ for leaf in leaves(caches) if _ours(leaf) is None}
    return f"its cache kind {', '.join(sorted(foreign))} cannot be rewound" if foreign else None


def _examine(model: nn.Module, caches: Caches) -> Anatomy:
    try:
        return examine(model, caches)
    except Exception as error:  # a forward raises what it likes
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise BadCheckpoint(f"{_family(model)} does not run on this machine: {reason}") from None
