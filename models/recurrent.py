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

from dflash2_mlx.models.cache import leaves
from dflash2_mlx.models.spy import Spy, installed


@dataclass(slots=True)
class MixerCall:
    """One call of a recurrent mixer, and what its projections returned, in order."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[mx.array] = field(default_factory=list)


class Mixer:
    """A module that keeps recurrent state, with the linear layers inside it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.spies = [Spy(module, self._around_call)]
        self.spies += [Spy(linear, self._around_projection) for linear in _linears(module)]
        self.calls: list[MixerCall] = []
        self._playing: Iterator[mx.array] | None = None

    def _around_call(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.calls.append(MixerCall(args, kwargs))
        return forward(*args, **kwargs)

    def _around_projection(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._playing is not None:
            return next(self._playing)
        output = forward(*args, **kwargs)
        self.calls[-1].outputs.append(output)
        return output

    def replay(self, call: MixerCall, kept: int, length: int) -> None:
        """Run the first `kept` of the call's `length` rows again, on the state its caches hold."""

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

    def forget(self) -> None:
        """Let go of what the projections gave, where nothing will be rewound."""
        self.calls.clear()

    def rewind(self, kept: int) -> None:
        """Leave the caches as if only the first `kept` tokens had been read."""
        for cache, state in self.before:
            cache.cache = list(state)
        if kept:
            for mixer, call in self.calls:
                mixer.replay(call, kept, self.length)


class Recorder:
    """Records tapes of one model, given the modules that keep its recurrent state."""

    def __init__(self, mixers: list[nn.Module]) -> None:
        self._mixers = [Mixer(module) for module in mixers]

    @contextmanager
    def recording(self, caches: list[Any], length: int) -> Iterator[Tape]:
        """A tape of the one forward of `length` tokens that runs inside."""
        recurrent = [leaf for leaf in leaves(caches) if isinstance(leaf, ArraysCache)]
        tape = Tape([(cache, list(cache.cache)) for cache in recurrent], [], length)
        # A single row is kept or dropped whole: the old state is enough.
        mixers = self._mixers if length > 1 else []
        for mixer in mixers:
            mixer.calls = []
        with installed([spy for mixer in mixers for spy in mixer.spies]):
            yield tape
        tape.calls.extend((mixer, call) for mixer in mixers for call in mixer.calls)
        for mixer in mixers:
            mixer.calls = []


def _linears(module: nn.Module) -> list[nn.Module]:
    kinds = (nn.Linear, nn.QuantizedLinear)
    return [inner for _, inner in module.named_modules() if isinstance(inner, kinds)]
