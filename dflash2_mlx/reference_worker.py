"""Answers prompts with the package `dflash`, in its environment: run by path, with JSON lines.

The argument is one JSON object: folders of target and drafter, dtype or null, BLAS or null. The
first line out says what was loaded; then every line in is a request, and every line out what came
of it: for `"task": "begin"` the first turn of a timed answer, for "go on" the next one or null, for
"propose" one timed draft. Answers and drafts may set `block_size` and `temperature`. Nothing of
this package is imported here: its environment does not have it.
"""

import ctypes
import io
import json
import sys
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

CONTEXTS: dict[tuple[int, ...], tuple[Any, int]] = {}  # of texts that were drafted behind before


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


def turns(parts: tuple[Any, Any, Any], request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """An answer, greedy unless a temperature is set: the first pass alone, then a few at a time.

    Passes are [emitted, drafted, from_draft]. What was launched ahead is waited for in each turn.
    """
    import mlx.core as mx
    from dflash.model_mlx import stream_generate
    from mlx_lm.generate import generation_stream

    model, drafter, tokenizer = parts
    size, left, block = 1, request["max_tokens"], block_of(drafter, request)
    ids, in_a_turn = request.pop("ids"), request.pop("in_a_turn")
    responses = stream_generate(model, drafter, tokenizer, ids, **request)
    emitting = (tokens for response in responses if (tokens := list(map(int, response.tokens))))
    mx.reset_peak_memory()
    while True:
        made: list[list[int]] = []
        started_s = time.perf_counter()
        for tokens in islice(emitting, size):
            made.append(tokens)
            arrived_s = time.perf_counter()
        if not made:
            return
        idle_s = time.perf_counter()
        mx.synchronize(generation_stream)
        ran_s = arrived_s - started_s + time.perf_counter() - idle_s
        first_s = arrived_s - started_s if size == 1 else 0.0
        passes: list[list[int]] = []
        for tokens in made:
            drafted = min(block, left + 1) - 1 if passes or size > 1 else 0
            passes.append([len(tokens), drafted, min(len(tokens) - 1, drafted)])
            left -= len(tokens)
        yield {
            "tokens": [token for tokens in made for token in tokens],
            "passes": passes,
            "ttft_s": first_s,
            "decode_s": ran_s - first_s,
            "peak_memory_bytes": mx.get_peak_memory(),
        }
        size = in_a_turn


def propose(parts: tuple[Any, Any, Any], request: dict[str, Any]) -> dict[str, Any]:
    """One draft behind the last of `ids`; its context has not seen the `new_rows` before it."""
    import mlx.core as mx
    from mlx_lm.generate import generation_stream
    from mlx_lm.models.cache import make_prompt_cache

    _, drafter, _ = parts
    ids, new_rows, temperature = request["ids"], request["new_rows"], request["temperature"]
    masks = [int(drafter.config.mask_token_id)] * (block_of(drafter, request) - 1)
    read = tuple(ids[:-1])
    if read not in CONTEXTS:
        CONTEXTS[read] = context_of(parts, ids[:-1])
    hidden, offset = CONTEXTS[read]
    cache = make_prompt_cache(drafter)
    for layer in cache:
        layer.offset = offset

    def draft(anchor: int, rows: Any) -> list[Any]:
        with mx.stream(generation_stream):
            block = mx.array([[anchor, *masks]])
            drafted = drafter.propose(block, rows, cache, temperature, logits_start=1)
        return [array for array in drafted if array is not None]

    mx.eval(draft(ids[-1 - new_rows], hidden[:, :-new_rows]), [layer.state for layer in cache])
    started_s = time.perf_counter()
    drafted = draft(ids[-1], hidden[:, -new_rows:])
    built_s = time.perf_counter()
    graph = io.StringIO()
    mx.export_to_dot(graph, *drafted)
    counted_s = time.perf_counter()
    mx.eval(drafted)
    return {
        "build_s": built_s - started_s,
        "eval_s": time.perf_counter() - counted_s,
        "nodes": graph.getvalue().count("shape=rectangle"),
    }


def context_of(parts: tuple[Any, Any, Any], ids: list[int]) -> tuple[Any, int]:
    """What the drafter reads of the target behind a text, and the position of its first row."""
    import mlx.core as mx
    from dflash.model_mlx import _patch_model, _prefill_target
    from mlx_lm.generate import generation_stream
    from mlx_lm.models.cache import make_prompt_cache

    model, drafter, _ = parts
    config = drafter.config
    _patch_model(model, config.target_layer_ids)
    drafter.bind(model)
    slides = all(kind == "sliding_attention" for kind in config.layer_types)
    limit = config.sliding_window - 1 if slides else None
    with mx.stream(generation_stream):
        _, hidden, offset = _prefill_target(
            model, mx.array(ids), make_prompt_cache(model), limit, 2048
        )
    mx.eval(hidden)
    return hidden, offset


def block_of(drafter: Any, request: dict[str, Any]) -> int:
    """The block that is asked for, else the drafter's own."""
    return int(request.get("block_size") or drafter.config.block_size)


def main() -> None:
    # What libraries print must not get between the lines of answers.
    lines, sys.stdout = sys.stdout, sys.stderr
    setup = json.loads(sys.argv[1])
    parts = load(setup)
    running: Iterator[dict[str, Any]] = iter(())
    print(json.dumps({"block": int(parts[1].config.block_size)}), file=lines, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        task = request.pop("task")
        if task == "begin":
            running = turns(parts, {**request, "in_a_turn": setup["in_a_turn"]})
        told = propose(parts, request) if task == "propose" else next(running, None)
        print(json.dumps(told), file=lines, flush=True)


if __name__ == "__main__":
    main()
