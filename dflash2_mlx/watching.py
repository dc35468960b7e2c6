"""A running answer seen from outside: what the host does in a pass, and when the device waits."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np

from dflash2_mlx.chooser import Chooser
from dflash2_mlx.models.drafter import Drafter
from dflash2_mlx.target import Target
from dflash2_mlx.text import TextReader

WARM_UP = 3  # passes
MS = 1000.0
Spans = list[tuple[float, float]]  # when each call began and ended, seconds
READS = ("item", "tolist", "__int__", "__float__", "__bool__", "__index__", "__array__")
VERBS: tuple[tuple[Any, str, str], ...] = (
    (Drafter, "extend", "build draft"),
    (Drafter, "propose", "build draft"),
    (Chooser, "draft", "build draft"),
    (Target, "read", "build target"),
    (Chooser, "judge", "build accept"),
    (mx, "async_eval", "launch"),
    (Chooser, "read", "read"),
    (Target, "rewind", "rewind"),
    (Target, "rewind_to", "rewind"),
    (TextReader, "read", "detokenise"),
)


class Watch:
    """Notes every call of what makes up a pass, and every read from the device."""

    def __init__(self) -> None:
        self.spans: dict[str, Spans] = defaultdict(list)
        self.reads: list[float] = []
        self._open: set[str] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While it is entered; nothing of the product knows."""
        with ExitStack() as stack:
            for owner, name, label in VERBS:
                wrapped = self._timed(getattr(owner, name), label)
                stack.enter_context(mock.patch.object(owner, name, wrapped))
            for name in READS:
                wrapped = self._counted(getattr(mx.array, name))
                stack.enter_context(mock.patch.object(mx.array, name, wrapped))
            for name in ("array", "asarray"):
                wrapped = self._counted(getattr(np, name))
                stack.enter_context(mock.patch.object(np, name, wrapped))
            yield

    def _timed(self, call: Callable[..., Any], label: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if label in self._open:  # one verb inside another of the same label
                return call(*args, **kwargs)
            self._open.add(label)
            started_s = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.spans[label].append((started_s, time.perf_counter()))
                self._open.remove(label)

        return timed

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], mx.array):
                self.reads.append(time.perf_counter())
            return call(*args, **kwargs)

        return counted


def times_of_passes(watch: Watch, draft_ms: float) -> dict[str, Any]:
    """Medians by pass, milliseconds, and shares of the time, the first passes left out.

    `host_ms` says what the host was busy with; `idle_share` is what the device waited for it, when
    a draft by itself takes `draft_ms`.
    """
    ends = [end for _, end in watch.spans["read"]][WARM_UP:]
    passes = list(pairwise(ends))
    table = {
        label: MS * statistics.median(within(watch.spans[label], *one) for one in passes)
        for label in dict.fromkeys(label for _, _, label in VERBS)
    }
    gaps = [waits for at, waits in waits_of(watch, draft_ms / MS) if at in ends[:-1]]
    reads = [sum(start < at <= end for at in watch.reads) for start, end in passes]
    whole_s = passes[-1][1] - passes[0][0]
    return {
        "passes": len(passes),
        "pass_ms": MS * statistics.median(end - start for start, end in passes),
        "host_ms": table,
        "idle_ms": MS * statistics.median(gaps),
        "idle_share": sum(gaps) / whole_s,
        "reads_per_pass": statistics.mean(reads),
        "read_share": sum(within(watch.spans["read"], *one) for one in passes) / whole_s,
    }


def within(spans: Spans, start: float, end: float) -> float:
    """Seconds of the spans that begin between two times."""
    return sum(last - first for first, last in spans if start <= first < end)


def waits_of(watch: Watch, draft_s: float) -> Iterator[tuple[float, float]]:
    """When a verdict was read, and the seconds that the device then waits for the next pass.

    Until its first launch; and where that is the draft alone, from the end of the draft until the
    rest is launched. A pass that was launched before the read waits for nothing.
    """
    launches = [start for start, _ in watch.spans["launch"]]
    verdicts = [
        next(at for at in launches if at >= built) for _, built in watch.spans["build accept"]
    ]
    reads = [end for _, end in watch.spans["read"]]
    for read, before, verdict in zip(reads, verdicts, verdicts[1:], strict=False):
        first = next(at for at in launches if at > before)
        drafted = max(first, read) + draft_s if first < verdict else verdict
        yield read, max(0.0, first - read) + max(0.0, verdict - drafted)
