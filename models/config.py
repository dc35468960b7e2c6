"""A drafter's config.json, read strictly: DFlash 1 and DFlash 2 as published."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from dflash2_mlx.errors import BadCheckpoint, PairMismatch

LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """What the checkpoint says about its drafter; names are the checkpoint's own.

    `selector_rank` and `conv_kernel_size` are 0 for DFlash 1. `rope` is the nested
    `rope_parameters` with `rope_theta` inside, whichever level the checkpoint kept it at.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: dict[str, Any]
    layer_types: tuple[str, ...]
    sliding_window: int | None
    is_causal: bool | None
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float | None

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "DrafterConfig":
        """Read a published config; raises `BadCheckpoint` naming the field and what it holds."""
        fields = _Fields(config)
        if (activation := config.get("hidden_act") or "silu") != "silu":
            refuse("hidden_act", activation, "silu")
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
        num_layers = fields.count("num_hidden_layers")
        is_dflash2 = "DFlash2DraftModel" in (config.get("architectures") or ())
        read = cls(
            hidden_size=fields.count("hidden_size"),
            intermediate_size=fields.count("intermediate_size"),
            num_hidden_layers=num_layers,
            num_attention_heads=fields.count("num_attention_heads"),
            num_key_value_heads=fields.count("num_key_value_heads"),
            head_dim=fields.count("head_dim"),
            vocab_size=fields.count("vocab_size"),
            rms_norm_eps=fields.number("rms_norm_eps"),
            max_position_embeddings=fields.count("max_position_embeddings"),
            rope=rope,
            layer_types=tuple(config.get("layer_types") or ("full_attention",) * num_layers),
            sliding_window=config.get("sliding_window"),
            is_causal=config.get("is_causal"),
            block_size=fields.count("block_size"),
            mask_token_id=fields.mask_token_id(),
            target_layer_ids=fields.taps(),
            num_target_layers=config.get("num_target_layers"),
            conv_kernel_size=fields.count("conv_kernel_size") if is_dflash2 else 0,
            conv_group_size=fields.count("conv_group_size") if is_dflash2 else 0,
            selector_rank=fields.count("selector_rank") if is_dflash2 else 0,
            selector_top_k=fields.count("selector_top_k") if is_dflash2 else 0,
            input_embedding_scale=fields.number("input_embedding_scale", 1.0),
            output_multiplier=fields.number("output_multiplier", 1.0),
            final_logit_softcapping=fields.number("final_logit_softcapping", 0.0) or None,
        )
        read._check_consistency()
        return read

    @property
    def context_rows(self) -> int | None:
        """Committed tokens a block can look back at, or None when a layer looks at all of them."""
        if self.sliding_window is None or "full_attention" in self.layer_types:
            return None
        return self.sliding_window - 1

    def window(self, layer: int) -> int | None:
        """The attention window of one layer, None for full attention."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def causal(self, layer: int) -> bool:
        """Whether rows of the block see only rows before them; unset means: in sliding layers."""
        if self.is_causal is None:
            return self.window(layer) is not None
        return self.is_causal

    def check_target(self, *, vocab_size: int, hidden_size: int, num_layers: int) -> None:
        """Raise `PairMismatch` unless this drafter was made for a target of these sizes."""
        seen = (
            ("vocab_size", self.vocab_size, vocab_size),
            ("hidden_size", self.hidden_size, hidden_size),
            ("num_target_layers", self.num_target_layers or num_layers, num_layers),
        )
        for field, ours, theirs in seen:
            if ours != theirs:
                raise PairMismatch(
                    f"drafter config.json has {field} {ours}, the target has {theirs}; "
                    "run 'dflash2-mlx models' for pairs that belong together"
                )
        if outside := [tap for tap in self.target_layer_ids if not 0 <= tap < num_layers]:
            raise PairMismatch(
                f"drafter config.json taps target layers {outside} (target_layer_ids, or "
                f"aux_hidden_state_layer_ids less 1), but the target has layers 0 to "
                f"{num_layers - 1}; name the target it was made for"
            )

    def _check_consistency(self) -> None:
        if len(self.layer_types) != self.num_hidden_layers:
            refuse("layer_types", self.layer_types, f"{self.num_hidden_layers} entries")
        if unknown := sorted(set(self.layer_types) - set(LAYER_TYPES)):
            refuse("layer_types", unknown, " or ".join(LAYER_TYPES))
        if "sliding_attention" in self.layer_types and not _is_count(self.sliding_window):
            refuse("sliding_window", self.sliding_window, "a positive number of tokens")
        if self.num_attention_heads % self.num_key_value_heads:
            refuse(
                "num_key_value_heads",
                self.num_key_value_heads,
                f"a divisor of num_attention_heads {self.num_attention_heads}",
            )
        if self.conv_group_size and self.hidden_size % self.conv_group_size:
            refuse(
                "conv_group_size",
                self.conv_group_size,
                f"a divisor of hidden_size {self.hidden_size}",
            )
        if self.selector_top_k > self.vocab_size:
            refuse("selector_top_k", self.selector_top_k, f"at most vocab_size {self.vocab_size}")


class _Fields:
    """Looks a field up in `dflash_config` first, then at the top level, as the vendor does."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._nested: Mapping[str, Any] = config.get("dflash_config") or {}
        self._top = config

    def get(self, name: str) -> Any:
        return self._nested.get(name, self._top.get(name))

    def count(self, name: str) -> int:
        value = self.get(name)
        if not _is_count(value):
            refuse(name, value, "a positive whole number")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            refuse(name, value, "a number")
        return float(value)

    def mask_token_id(self) -> int:
        value, vocab_size = self.get("mask_token_id"), self.count("vocab_size")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
            refuse("mask_token_id", value, f"a token id from 0 to {vocab_size - 1}")
        ends = self._top.get("eos_token_id")
        if value in (ends if isinstance(ends, list) else [ends]):
            refuse("mask_token_id", value, "another id than eos_token_id")
        return int(value)

    def taps(self) -> tuple[int, ...]:
        taps = self.get("target_layer_ids")
        if not isinstance(taps, list) or not taps or not all(isinstance(tap, int) for tap in taps):
            refuse("target_layer_ids", taps, "a list of target layer numbers")
        return tuple(taps)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def refuse(field: str, seen: Any, expected: str) -> NoReturn:
    """Raise `BadCheckpoint` for a field of a drafter's config.json."""
    shown = "missing" if seen is None else repr(seen)
    raise BadCheckpoint(f"drafter config.json: {field} is {shown}, expected {expected}")
