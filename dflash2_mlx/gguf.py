"""GGUF files of the llama family, imported as folders that mlx-lm loads.

Nothing is requantized: the blocks of Q4_0, Q4_1 and Q8_0 are MLX's own affine format with groups of
32, so the values stay exactly those of the file.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dflash2_mlx.errors import BadCheckpoint
from dflash2_mlx.folders import first_line
from dflash2_mlx.gguf_header import Header, Tensor, read_header
from dflash2_mlx.gguf_tokenizer import end_ids, write_tokenizer

if TYPE_CHECKING:
    import mlx.core as mx

_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
_GROUP_SIZE = 32


@dataclass(frozen=True, slots=True)
class Family:
    """A GGUF architecture and the mlx-lm model that runs it."""

    model_type: str
    architecture: str
    # llama.cpp stores llama's q and k rows permuted, for a rotation of neighbouring pairs.
    rope_traditional: bool


FAMILIES = {
    "llama": Family("llama", "LlamaForCausalLM", rope_traditional=True),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", rope_traditional=False),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", rope_traditional=False),
}
_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def import_gguf(gguf: Path, folder: Path) -> None:
    """Writes the model in `gguf` to `folder`, in the layout that `mlx_lm.load` reads.

    Quantized matrices keep their values. The float tensors, scales included, become float32 beside
    them (MLX would widen them on every call otherwise); in an unquantized file everything takes the
    type of the matrices.

    Raises:
        BadCheckpoint: an architecture, tensor format or tokenizer that is not known here, or a
            damaged file.
    """
    header = read_header(gguf)
    config = model_config(header)
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(header.metadata, folder)
    _write_weights(gguf, header, folder / "model.safetensors")
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _special_ids(header.metadata))
    _check_loads(gguf, folder)


def model_config(header: Header) -> dict[str, Any]:
    """The config.json for mlx-lm: shapes, rotation, special ids, and bits of every matrix."""
    family, values = _family(header.metadata)
    heads = values["attention.head_count"]
    head_dim = values.get("attention.key_length", values["embedding_length"] // heads)
    _refuse_unknown_rope(values, header, head_dim)
    config = {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        "hidden_size": values["embedding_length"],
        "intermediate_size": values["feed_forward_length"],
        "num_hidden_layers": values["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": values.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": _tensor(header, "token_embd.weight").shape[0],
        "max_position_embeddings": values["context_length"],
        "rms_norm_eps": _decimal(values["attention.layer_norm_rms_epsilon"]),
        "rope_theta": _decimal(values.get("rope.freq_base", 10000.0)),
        "rope_traditional": family.rope_traditional,
        "rope_scaling": _rope_scaling(values),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": float_type(header),
    }
    return config | _special_ids(header.metadata) | _quantization(header)


def _tensor(header: Header, name: str) -> Tensor:
    if name not in header.tensors:
        raise BadCheckpoint(f"the GGUF file has no tensor {name}; fetch the file again")
    return header.tensors[name]


def float_type(header: Header) -> str:
    """The type of every tensor that is not quantized, and so of the activations."""
    kinds = {tensor.kind for tensor in header.tensors.values() if len(tensor.shape) > 1}
    if kinds == {"F16"}:
        return "float16"
    return "bfloat16" if kinds == {"BF16"} else "float32"


def module_path(name: str) -> str:
    """`blk.3.attn_q` -> `model.layers.3.self_attn.q_proj`."""
    if name in _OUTER:
        return _OUTER[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", name)
    if not match or match[2] not in _INNER:
        raise BadCheckpoint(
            f"GGUF tensor {name} has no place in a llama, qwen2 or qwen3 model; "
            "use a model in mlx-lm's format"
        )
    return f"model.layers.{match[1]}.{_INNER[match[2]]}"


class _Values(dict[str, Any]):
    """The metadata of one architecture; a missing key is reported by its full name."""

    def __init__(self, architecture: str, metadata: dict[str, Any]) -> None:
        self.prefix = f"{architecture}."
        names = (name for name in metadata if name.startswith(self.prefix))
        super().__init__({name.removeprefix(self.prefix): metadata[name] for name in names})

    def __missing__(self, key: str) -> Any:
        raise BadCheckpoint(f"the GGUF metadata lacks {self.prefix}{key}; fetch the file again")


def _family(metadata: dict[str, Any]) -> tuple[Family, _Values]:
    architecture = metadata.get("general.architecture")
    values = _Values(str(architecture), metadata)
    if architecture not in FAMILIES or values.get("expert_count"):
        seen = f"{architecture!r}" + (" with experts" if values.get("expert_count") else "")
        raise BadCheckpoint(
            f"GGUF architecture {seen} is not imported, only dense {', '.join(FAMILIES)}; "
            "use a model in mlx-lm's format"
        )
    return FAMILIES[architecture], values


def _refuse_unknown_rope(values: _Values, header: Header, head_dim: int) -> None:
    rotated = values.get("rope.dimension_count", head_dim)
    scaling = values.get("rope.scaling.type", "none")
    if "rope_freqs.weight" in header.tensors:
        problem = "its own rotation frequencies (rope_freqs.weight)"
    elif rotated != head_dim:
        problem = f"a rotation of {rotated} of {head_dim} dimensions"
    elif scaling not in ("none", "linear"):
        problem = f"rope scaling {scaling!r}"
    else:
        return
    raise BadCheckpoint(f"GGUF file with {problem}: not imported; use a model in mlx-lm's format")


def _rope_scaling(values: _Values) -> dict[str, Any] | None:
    if values.get("rope.scaling.type", "none") == "none":
        return None
    return {"type": "linear", "factor": _decimal(values["rope.scaling.factor"])}


def _special_ids(metadata: dict[str, Any]) -> dict[str, Any]:
    ids: dict[str, Any] = {"eos_token_id": ends} if (ends := end_ids(metadata)) else {}
    for name, key in (("bos", "bos"), ("pad", "padding")):
        if (token := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            ids[f"{name}_token_id"] = token
    return ids


def _quantization(header: Header) -> dict[str, Any]:
    """The most common width as the default, every other matrix by its path."""
    bits = {
        module_path(name.removesuffix(".weight")): _BITS[tensor.kind]
        for name, tensor in header.tensors.items()
        if tensor.kind in _BITS
    }
    if not bits:
        return {}
    [(usual, _)] = Counter(bits.values()).most_common(1)
    quantization: dict[str, Any] = {"group_size": _GROUP_SIZE, "bits": usual}
    for path, width in bits.items():
        if width != usual:
            quantization[path] = {"group_size": _GROUP_SIZE, "bits": width}
    return {"quantization": quantization, "quantization_config": quantization}


def _write_weights(gguf: Path, header: Header, path: Path) -> None:
    import mlx.core as mx

    dtype = getattr(mx, float_type(header))
    weights = {}
    for name, array in _load(gguf).items():
        stem, _, leaf = name.rpartition(".")
        tensor = header.tensors.get(name)
        if tensor is not None and tensor.kind == "BF16":
            array = _bfloat16(gguf, tensor)
        packed = array.dtype == mx.uint32
        weights[f"{module_path(stem)}.{leaf}"] = array if packed else array.astype(dtype)
    mx.save_safetensors(str(path), weights, metadata={"format": "mlx"})


def _load(gguf: Path) -> "dict[str, mx.array]":
    import mlx.core as mx

    try:
        return cast("dict[str, mx.array]", mx.load(str(gguf), format="gguf"))
    except (RuntimeError, ValueError) as error:
        raise BadCheckpoint(
            f"{gguf.name}: MLX cannot read it ({first_line(error)}); fetch it again"
        ) from error


def _bfloat16(gguf: Path, tensor: Tensor) -> "mx.array":
    """Read by hand: MLX turns BF16 into float16, whose range is smaller."""
    import mlx.core as mx
    import numpy as np

    raw = np.fromfile(gguf, np.uint16, tensor.num_bytes // 2, offset=tensor.offset)
    return mx.array(raw).view(mx.bfloat16).reshape(tensor.shape)


def _check_loads(gguf: Path, folder: Path) -> None:
    """mlx-lm is the judge of names and shapes; nothing is read from disk for it."""
    from mlx_lm.utils import load_model

    try:
        load_model(folder, lazy=True)
    except Exception as error:
        raise BadCheckpoint(
            f"{gguf.name}: mlx-lm does not accept the imported model ({first_line(error)}); "
            "use a model in mlx-lm's format"
        ) from error


def _decimal(x: float) -> float:
    """The short decimal behind a stored float32: 9.999999747378752e-06 -> 1e-05."""
    return float(f"{x:.7g}")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), "utf-8")
