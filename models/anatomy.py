"""The parts of an mlx-lm model, found by watching one forward that is never evaluated.

Names differ from family to family; which module is called with what does not.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from dflash2_mlx.models.cache import KVCache, leaves
from dflash2_mlx.models.spy import Spy, installed

NUM_TOKENS = 2  # many models take another path for a single row


@dataclass(slots=True)
class Call:
    """One call of a module, and the calls made inside it."""

    module: nn.Module
    method: str = "__call__"
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    inner: list["Call"] = field(default_factory=list)
    output: Any = None  # of a tuple, the first

    def walk(self) -> Iterator["Call"]:
        """This call and all those inside, in the order they began."""
        yield self
        for call in self.inner:
            yield from call.walk()


@dataclass(frozen=True, slots=True)
class Anatomy:
    """What drafting needs of a model.

    `embedding` turns ids into rows, `head` hidden states `[.., D]` into logits `[.., V]`; None if
    no module does. `mixers` are the innermost modules that are handed recurrent state. `problem`
    says what stands in the way of drafting, or is None.
    """

    embedding: nn.Module | None
    head: Callable[[mx.array], mx.array] | None
    mixers: list[nn.Module]
    problem: str | None


def examine(model: nn.Module, caches: list[Any]) -> Anatomy:
    """Watch a forward over empty `caches`, which are spent then. Raises what the model raises."""
    forward = _watch(model, caches)
    calls = list(forward.walk())
    mixers = [call for call in calls if _is_mixer(call)]
    return Anatomy(
        embedding=next((call.module for call in calls if _embeds(call)), None),
        head=_head(calls, vocab_size=forward.output.shape[-1]),
        mixers=list({id(call.module): call.module for call in mixers}.values()),
        problem=_problem(model, caches, calls, mixers),
    )


def held_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The caches among the arguments of a call, if one of them is recurrent; else none."""
    single = (value for value in (*args, *kwargs.values()) if not isinstance(value, list))
    held = list(leaves(value for value in single if hasattr(value, "state")))
    return held if any(isinstance(cache, ArraysCache) for cache in held) else []


def _watch(model: nn.Module, caches: list[Any]) -> Call:
    stack = [Call(model)]

    def spy(module: nn.Module) -> Spy:
        def watched(method: str) -> Callable[..., Any]:
            def around(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
                call = Call(module, method, args, kwargs)
                stack[-1].inner.append(call)
                stack.append(call)
                output = forward(*args, **kwargs)
                stack.pop()
                call.output = output[0] if isinstance(output, tuple) else output
                return output

            return around

        return Spy(module, watched("__call__"), as_linear=watched("as_linear"))

    with installed([spy(module) for _, module in model.named_modules()]):
        model(mx.zeros((1, NUM_TOKENS), dtype=mx.uint32), cache=caches)
    return stack[0].inner[0]


def _embeds(call: Call) -> bool:
    """Whether ids went in, to a module that can also be a head."""
    ids = next(iter(call.args), None)
    is_ids = isinstance(ids, mx.array) and mx.issubdtype(ids.dtype, mx.integer)
    return is_ids and hasattr(call.module, "as_linear")


def _head(calls: list[Call], vocab_size: int) -> Callable[[mx.array], mx.array] | None:
    """The last matmul that gives a row of logits."""
    for call in reversed(calls):
        is_matmul = not call.inner and getattr(call.module.get("weight"), "ndim", 0) == 2
        if is_matmul and call.output.shape[-1] == vocab_size:
            return call.module if call.method == "__call__" else call.module.as_linear
    return None


def _is_mixer(call: Call) -> bool:
    inside = (inner for call in call.inner for inner in call.walk())
    return bool(held_caches(call.args, call.kwargs)) and not any(
        held_caches(inner.args, inner.kwargs) for inner in inside
    )


def _problem(
    model: nn.Module, caches: list[Any], calls: list[Call], mixers: list[Call]
) -> str | None:
    outputs: dict[int, list[Any]] = {id(layer): [] for layer in model.layers}
    for call in calls:
        outputs.get(id(call.module), []).append(call.output)
    if not all(_is_one_stream(layer) for layer in outputs.values()):
        return "its decoder layers do not hand on one hidden state per token"
    held = [cache for call in mixers for cache in held_caches(call.args, call.kwargs)]
    recurrent = [leaf for leaf in leaves(caches) if isinstance(leaf, ArraysCache)]
    if {id(cache) for cache in held} != {id(cache) for cache in recurrent}:
        return "its recurrent state is not kept by modules of its own"
    if any(isinstance(leaf, KVCache) and leaf.is_overreached for leaf in leaves(caches)):
        return "its masks look further back than its caches"
    return None


def _is_one_stream(outputs: list[Any]) -> bool:
    return len(outputs) == 1 and outputs[0].ndim == 3 and outputs[0].shape[1] == NUM_TOKENS
