"""Putting recurrent layers back to a prefix of what they read.

The state of a gated-delta, SSM or short-convolution layer cannot be trimmed. While a block is
verified, a tape keeps what the layer's projections gave. To rewind, the layer's own forward runs
once more over the kept rows on the old state, with the tape in place of the projections. Of that
run only the new state is ever evaluated: the numerics are mlx-lm's, the cost is the recurrence.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from dflash2_mlx.models.spy import Spy, installed


@dataclass(slots=True)
class MixerCall:
    """One call of a recurrent mixer, and what its projections returned, in order."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cache: ArraysCache
    outputs: list[mx.array] = field(default_factory=list)


class Mixer:
    """A module that keeps recurrent state, with the linear layers inside it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.spies = [Spy(module, self._around_call)]
        self.spies += [Spy(linear, self._around_projection) for linear in _linears(module)]
        self.call: MixerCall | None = None
        self._playing: Iterator[mx.array] | None = None

    def _around_call(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        cache = _recurrent_argument(args, kwargs)
        self.call = None if cache is None else MixerCall(args, kwargs, cache)
        return forward(*args, **kwargs)

    def _around_projection(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._playing is not None:
            return next(self._playing)
        output = forward(*args, **kwargs)
        if self.call is not None:
            self.call.outputs.append(output)
        return output

    def replay(self, call: MixerCall, kept: int, length: int) -> None:
        """Run the first `kept` of the call's `length` rows again, on the state in `call.cache`."""

        def cut(value: Any) -> Any:
            is_rows = isinstance(value, mx.array) and value.ndim > 1 and value.shape[1] == length
            return value[:, :kept] if is_rows else value

        self._playing = iter([cut(output) for output in call.outputs])
        try:
            with installed(self.spies[1:]):
                args = [cut(value) for value in call.args]
                self.module(*args, **{name: cut(value) for name, value in call.kwargs.items()})
        finally:
            self._playing = None


@dataclass(frozen=True, slots=True)
class Tape:
    """What it takes to put the recurrent caches back to any prefix of one forward."""

    before: list[tuple[ArraysCache, list[mx.array | None]]]
    calls: list[tuple[Mixer, MixerCall]]
    length: int

    def rewind(self, kept: int) -> None:
        """Leave the caches as if only the first `kept` tokens had been read."""
        for cache, state in self.before:
            cache.cache = list(state)
        if kept:
            for mixer, call in self.calls:
                mixer.replay(call, kept, self.length)


class Recorder:
    """Records tapes for one model; `num_mixers` is 0 for a model without recurrent layers."""

    def __init__(self, model: nn.Module, caches: list[Any]) -> None:
        is_recurrent = any(isinstance(leaf, ArraysCache) for leaf in leaves(caches))
        self._mixers = [Mixer(module) for module in _find_mixers(model, caches)] * is_recurrent
        self.num_mixers = len(self._mixers)

    @contextmanager
    def recording(self, caches: list[Any], length: int) -> Iterator[Tape]:
        """A tape of the one forward of `length` tokens that runs inside."""
        recurrent = [leaf for leaf in leaves(caches) if isinstance(leaf, ArraysCache)]
        tape = Tape([(cache, list(cache.cache)) for cache in recurrent], [], length)
        # A single row is kept or dropped whole; longer reads of one row need no tape either.
        spies = [spy for mixer in self._mixers for spy in mixer.spies] if length > 1 else []
        with installed(spies):
            yield tape
        for mixer in self._mixers:
            if mixer.call is not None:
                tape.calls.append((mixer, mixer.call))
                mixer.call = None


def leaves(caches: list[Any]) -> Iterator[Any]:
    """All caches, those inside mlx-lm's CacheList included."""
    for cache in caches:
        yield from leaves(cache.caches) if hasattr(cache, "caches") else [cache]


def _find_mixers(model: nn.Module, caches: list[Any]) -> list[nn.Module]:
    """The innermost modules that are handed a recurrent cache, from one forward never evaluated."""
    mixers: list[nn.Module] = []
    handed_on: list[bool] = []

    def around(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if _recurrent_argument(args, kwargs) is None:
            return forward(*args, **kwargs)
        if handed_on:
            handed_on[-1] = True
        handed_on.append(False)
        output = forward(*args, **kwargs)
        if not handed_on.pop():
            mixers.append(module)
        return output

    inner = [module for layer in model.layers for _, module in layer.named_modules()]
    spies = [
        Spy(module, lambda *call, module=module: around(module, *call))
        for module in inner
        if module.children()
    ]
    with installed(spies):
        model(mx.zeros((1, 2), dtype=mx.uint32), cache=caches)
    return mixers


def _recurrent_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ArraysCache | None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, ArraysCache):
            return value
    return None


def _linears(module: nn.Module) -> list[nn.Module]:
    kinds = (nn.Linear, nn.QuantizedLinear)
    return [inner for _, inner in module.named_modules() if isinstance(inner, kinds)]
