"""Language models on M-series Macs, several times faster, with the same output.

from dflash2_mlx import SamplingParams, generate, load_pair

pair = load_pair("smollm2-135m")
result = generate(pair, pair.encode_chat("Hello"), SamplingParams(), max_tokens=64)
print(result.text, result.tokens_per_pass)
"""

import importlib
from typing import TYPE_CHECKING, Any

from dflash2_mlx.blas import preload_blas

preload_blas()  # before anything imports mlx.core

if TYPE_CHECKING:
    from dflash2_mlx.decode import Step
    from dflash2_mlx.generation import Generation, Result, generate, stream_generate
    from dflash2_mlx.grammar import Grammar
    from dflash2_mlx.pair import Pair, load_pair
    from dflash2_mlx.sampling import SamplingParams

__version__ = "0.1.0"

# Importing MLX and transformers takes seconds, and `--help` must not pay for it.
_HOMES = {
    "Generation": "dflash2_mlx.generation",
    "Grammar": "dflash2_mlx.grammar",
    "Pair": "dflash2_mlx.pair",
    "Result": "dflash2_mlx.generation",
    "SamplingParams": "dflash2_mlx.sampling",
    "Step": "dflash2_mlx.decode",
    "generate": "dflash2_mlx.generation",
    "load_pair": "dflash2_mlx.pair",
    "stream_generate": "dflash2_mlx.generation",
}
__all__ = [
    "Generation",
    "Grammar",
    "Pair",
    "Result",
    "SamplingParams",
    "Step",
    "generate",
    "load_pair",
    "stream_generate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dflash2_mlx' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
