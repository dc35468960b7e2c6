"""Answers prompts with the package `dflash`, in its environment: run by path, with JSON lines.

The argument is one JSON object: folders of target and drafter, dtype or null, BLAS or null. The
first line out says what was loaded; then every line in is a prompt, and every line out its timed
answer. Nothing of this package is imported here: its environment does not have it.
"""

import ctypes
import json
import sys
import time
from typing import Any


def load(setup: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Target, drafter and tokenizer, in the precision that the other side computes in."""
    if setup["blas"]:
        ctypes.CDLL(setup["blas"], mode=ctypes.RTLD_GLOBAL)  # before MLX, as our own package does
    import mlx.core as mx
    from dflash import model_mlx
    from mlx_lm.utils import dequantize_model

    model_mlx.snapshot_download = lambda folder, **_: folder  # it is on disk already
    model, tokenizer = model_mlx.load(setup["target"])
    drafter = model_mlx.load_draft(setup["drafter"])
    if setup["dtype"]:
        dtype = getattr(mx, setup["dtype"])
        model.set_dtype(dtype)
        dequantize_model(model)
        drafter.set_dtype(dtype)
    mx.eval(model.parameters(), drafter.parameters())
    return model, drafter, tokenizer


def answer(parts: tuple[Any, Any, Any], ids: list[int], max_tokens: int) -> dict[str, Any]:
    """One greedy answer; passes are [emitted, drafted, from_draft]."""
    import mlx.core as mx
    from dflash.model_mlx import stream_generate

    model, drafter, tokenizer = parts
    block = int(drafter.config.block_size)
    mx.reset_peak_memory()
    tokens: list[int] = []
    passes: list[list[int]] = []
    arrivals_s = [time.perf_counter()]
    for response in stream_generate(model, drafter, tokenizer, ids, max_tokens=max_tokens):
        if not (emitted := [int(token) for token in response.tokens]):
            continue
        arrivals_s.append(time.perf_counter())
        drafted = min(block, max_tokens - len(tokens) + 1) - 1 if tokens else 0
        passes.append([len(emitted), drafted, min(len(emitted) - 1, drafted)])
        tokens += emitted
    return {
        "tokens": tokens,
        "passes": passes,
        "ttft_s": arrivals_s[:2][-1] - arrivals_s[0],
        "decode_s": arrivals_s[-1] - arrivals_s[:2][-1],
        "peak_memory_bytes": mx.get_peak_memory(),
    }


def main() -> None:
    # What libraries print must not get between the lines of answers.
    lines, sys.stdout = sys.stdout, sys.stderr
    parts = load(json.loads(sys.argv[1]))
    print(json.dumps({"block": int(parts[1].config.block_size)}), file=lines, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        told = answer(parts, request["ids"], request["max_tokens"])
        print(json.dumps(told), file=lines, flush=True)


if __name__ == "__main__":
    main()
