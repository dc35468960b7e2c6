"""Writes small GGUF files: the formats as their definitions say, tokenizers, whole tiny models."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from mlx import nn
from mlx.utils import tree_flatten
from tokenizers import pre_tokenizers

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]

TYPE_IDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q8_0": 8, "Q4_K": 12, "BF16": 30}
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[str, Floats]]
) -> Path:
    """Writes `tensors`, given as name -> (kind, floats), behind `metadata`."""
    blobs = [pad(pack(kind, array)) for kind, array in tensors.values()]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(string(key) + value(entry) for key, entry in metadata.items())
    offset = 0
    for (name, (kind, array)), blob in zip(tensors.items(), blobs, strict=True):
        head += string(name) + struct.pack("<I", array.ndim)
        head += struct.pack(f"<{array.ndim}Q", *reversed(array.shape))
        head += struct.pack("<IQ", TYPE_IDS[kind], offset)
        offset += len(blob)
    path.write_bytes(pad(head) + b"".join(blobs))
    return path


def pad(raw: bytes) -> bytes:
    return raw + b"\0" * (-len(raw) % 32)


def string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(entry: Any) -> bytes:
    """The type id and the bytes of one metadata value."""
    match entry:
        case bool():
            return struct.pack("<I?", 7, entry)
        case int():
            return struct.pack("<II", 4, entry)
        case float():
            return struct.pack("<If", 6, entry)
        case str():
            return struct.pack("<I", 8) + string(entry)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(entry)) + b"".join(map(string, entry))
        case [float(), *_]:
            return struct.pack(f"<IIQ{len(entry)}f", 9, 6, len(entry), *entry)
        case [int(), *_]:
            return struct.pack(f"<IIQ{len(entry)}i", 9, 5, len(entry), *entry)
    raise TypeError(f"no GGUF type for {entry!r}")


def pack(kind: str, array: Floats) -> bytes:
    """The bytes of one tensor in the format `kind`."""
    match kind:
        case "F32":
            return array.astype("<f4").tobytes()
        case "F16":
            return array.astype("<f2").tobytes()
        case "BF16":
            return (array.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    blocks = array.astype(np.float32).reshape(-1, 32)
    return b"".join(_PACKERS[kind](block) for block in blocks)


def _q4_0(block: Floats) -> bytes:
    scale = np.float16(block[np.abs(block).argmax()] / -8)
    codes = np.clip(np.round(block / scale) + 8, 0, 15).astype(np.uint8)
    return scale.tobytes() + _nibbles(codes)


def _q4_1(block: Floats) -> bytes:
    low, scale = np.float16(block.min()), np.float16((block.max() - block.min()) / 15)
    codes = np.clip(np.round((block - low) / scale), 0, 15).astype(np.uint8)
    return scale.tobytes() + low.tobytes() + _nibbles(codes)


def _q8_0(block: Floats) -> bytes:
    scale = np.float16(np.abs(block).max() / 127)
    codes = np.clip(np.round(block / scale), -127, 127).astype(np.int8)
    return scale.tobytes() + codes.tobytes()


def _nibbles(codes: Codes) -> bytes:
    """Values 0..15 in the low halves, 16..31 in the high halves."""
    return (codes[:16] | codes[16:] << 4).tobytes()


_PACKERS = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q5_0": lambda block: bytes(22),
    "Q4_K": lambda block: bytes(18),
}


def unpack(kind: str, array: Floats) -> Floats:
    """What a reader must find after `pack(kind, array)`."""
    raw = pack(kind, array)
    match kind:
        case "F32":
            found = np.frombuffer(raw, "<f4")
        case "F16":
            found = np.frombuffer(raw, "<f2")
        case "BF16":
            found = (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
        case _:
            size = len(raw) // (array.size // 32)
            blocks = [raw[at : at + size] for at in range(0, len(raw), size)]
            found = np.concatenate([_unpack_block(kind, block) for block in blocks])
    return found.astype(np.float32).reshape(array.shape)


def _unpack_block(kind: str, raw: bytes) -> Floats:
    scale = np.frombuffer(raw[:2], "<f2").astype(np.float32)
    if kind == "Q8_0":
        return scale * np.frombuffer(raw[2:], np.int8)
    halves = np.frombuffer(raw[-16:], np.uint8)
    codes = np.concatenate([halves & 15, halves >> 4])
    if kind == "Q4_0":
        return scale * (codes - np.float32(8))
    return scale * codes + np.frombuffer(raw[2:4], "<f2").astype(np.float32)


def byte_vocabulary(pre: str = "gpt-2") -> dict[str, Any]:
    """A tokenizer of all bytes, one merge, an end token, a control token and a plain tag."""
    extra = ["he", "<end>", "<turn>", "<think>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*ALPHABET, *extra],
        "tokenizer.ggml.token_type": [1] * 257 + [3, 3, 4],
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.ggml.bos_token_id": 258,
        "tokenizer.chat_template": "{{ messages[0].content }}<turn>",
    }


def model_metadata(architecture: str, config: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a model with this mlx-lm config, and a tokenizer for it."""
    values = {
        "block_count": config["num_hidden_layers"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
        "context_length": 512,
    }
    named = {f"{architecture}.{key}": entry for key, entry in values.items()}
    return {"general.architecture": architecture, **named, **byte_vocabulary()}


def model_tensors(model: nn.Module, kind: str) -> dict[str, tuple[str, Floats]]:
    """A float model's weights under GGUF names: matrices in the format `kind`, vectors as F32."""
    tensors = {}
    for path, array in tree_flatten(model.parameters()):
        stem, _, leaf = path.rpartition(".")
        tensors[f"{gguf_name(stem)}.{leaf}"] = (kind if array.ndim > 1 else "F32", np.array(array))
    return tensors


def gguf_name(path: str) -> str:
    if path in NAMES:
        return NAMES[path]
    _, _, layer, module = path.split(".", 3)
    return f"blk.{layer}.{NAMES[module]}"


def permute(array: Floats, num_heads: int) -> Floats:
    """The rows of q or k as llama.cpp stores them: the two halves of each head interleaved."""
    head_dim = array.shape[0] // num_heads
    halves = array.reshape(num_heads, 2, head_dim // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)
