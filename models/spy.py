"""Listening to modules of a model that stays untouched.

For the time of one forward an instance wears a subclass of its own class. Parameters, class
objects and other instances never change, and afterwards nothing is left, whatever was raised.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.nn as nn

# Called in place of the module's own method: (method, args, kwargs) -> output.
Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class Spy:
    """One module and what happens around its calls, and around its other methods, by name."""

    def __init__(self, module: nn.Module, around: Around, **others: Around) -> None:
        base = type(module)
        heard = {"__call__": around, **others}
        worn = {
            name: _heard(getattr(base, name), heard[name]) for name in heard if hasattr(base, name)
        }
        self.module, self.base = module, base
        self.worn = type(base.__name__, (base,), worn)


def _heard(own: Callable[..., Any], around: Around) -> Callable[..., Any]:
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return around(lambda *a, **k: own(self, *a, **k), args, kwargs)

    return method


@contextmanager
def installed(spies: Iterable[Spy]) -> Iterator[None]:
    """Install all spies, and take them off again in any case."""
    spies = list(spies)
    for spy in spies:
        object.__setattr__(spy.module, "__class__", spy.worn)
    try:
        yield
    finally:
        for spy in reversed(spies):
            object.__setattr__(spy.module, "__class__", spy.base)
