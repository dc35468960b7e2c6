"""Timing a real pair: what a pass of each width costs here, behind a short and a longer text."""

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from dflash2_mlx.curve import Curve
from dflash2_mlx.decode import Conversation
from dflash2_mlx.errors import DFlashError
from dflash2_mlx.folders import Progress
from dflash2_mlx.pair import Pair
from dflash2_mlx.parity import load_prompts

SHALLOW = 128  # tokens of context at which the first times are taken
MIN_DEEP, MAX_DEEP = 1024, 4096  # and the second
PREFILL_S = 4.0  # what reading the longer context may take beyond MIN_DEEP
MIN_ROUNDS, MAX_ROUNDS = 3, 12  # timed passes of each width
BUDGET_S = 8.0  # at each depth; then no more rounds are added
MAX_SPREAD = 1.3  # between the quartiles of plain passes; more means that others use the machine

TRY_AGAIN = "what was known before is kept; try again when nothing else runs"
Times = dict[int, list[float]]  # width -> ms of each pass


@dataclass(frozen=True, slots=True)
class Parts:
    """Milliseconds of the drafter's part of a pass, selector and all, and of the host's share.

    The host builds the graphs of both models; on a GPU it does so while the pass before runs.
    """

    draft_ms: float
    host_ms: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """A curve, and what it was taken from: `ms[depth][width]` is a typical pass.

    `parts[depth][width]` is what of a pass can be timed by itself.
    """

    curve: Curve
    ms: dict[int, dict[int, float]]
    parts: dict[int, dict[int, Parts]]
    spread: float
    passes: int
    seconds: float


def check_idle(load: float | None = None, cores: int | None = None) -> None:
    """Raise `DFlashError` when more programs want to run than the machine has cores."""
    load = os.getloadavg()[0] if load is None else load
    cores = cores or os.cpu_count() or 1
    if load > cores:
        raise DFlashError(f"the machine is busy (load {load:.1f} on {cores} cores); {TRY_AGAIN}")


def measure(pair: Pair, progress: Progress | None = None) -> Measurement:
    """Time real passes of every width that the pair's tuner may choose; takes some twenty seconds.

    Raises `DFlashError` when there is nothing to tune, or when plain passes spread so widely that
    the machine must be busy.
    """
    if pair.tuning is None:
        raise DFlashError(f"nothing to tune: {pair.effective().reason}")
    widths, started_s = pair.tuning.curve.widths, time.perf_counter()
    text = _text(pair, _room(pair, widths))
    ms: dict[int, dict[int, float]] = {}
    parts: dict[int, dict[int, Parts]] = {}
    spread, passes, depth = 1.0, 0, min(SHALLOW, len(text) // 2)
    while depth:
        conversation, prefill_s = _conversation_behind(pair, text[: depth + 1], progress)
        parts[depth] = {width: time_parts(conversation, width) for width in widths}
        times = time_widths(conversation, widths, progress)
        spread = max(spread, check_steady(times[1]))
        ms[depth] = typical_of_each(times)
        passes += sum(map(len, times.values()))
        depth = deeper(depth, prefill_s, len(text) - 1) if len(ms) == 1 else 0
    return Measurement(curve_of(ms), ms, parts, spread, passes, time.perf_counter() - started_s)


def _conversation_behind(
    pair: Pair, text: list[int], progress: Progress | None
) -> tuple[Conversation, float]:
    """A conversation that has read a text, and the seconds that took."""
    label = f"reading {len(text) - 1} tokens"
    started_s = time.perf_counter()
    conversation = Conversation(pair.target, pair.drafter)
    conversation.prefill(text, partial(progress, label) if progress else None, step=SHALLOW)
    return conversation, time.perf_counter() - started_s


def time_widths(
    conversation: Conversation, widths: Sequence[int], progress: Progress | None = None
) -> Times:
    """Milliseconds of passes of each width, in turns there and back; every pass keeps one token."""
    label = f"timing passes behind {conversation.length} tokens"
    times: Times = {width: [] for width in widths}
    started_s = time.perf_counter()
    for number in range(MAX_ROUNDS):
        if number >= MIN_ROUNDS and time.perf_counter() - started_s > BUDGET_S:
            break
        for width in widths if number % 2 else reversed(widths):
            times[width].append(time_pass(conversation, width))
        if progress:
            progress(label, number + 1, MAX_ROUNDS)
    if progress:
        progress(label, MAX_ROUNDS, MAX_ROUNDS)
    return times


def time_pass(conversation: Conversation, width: int) -> float:
    """Milliseconds of one pass behind another, as `decode` makes it; one more token is kept.

    Where passes run ahead, that is the time from read to read while a third one is launched.
    """
    chooser, first = conversation.chooser, conversation.launch(width)
    second = conversation.launch(width, behind=first) if conversation.can_follow(first) else None
    conversation.commit(first, chooser.read(first.verdict, first.width).tokens[:1])
    started_s = time.perf_counter()
    if second:
        last = conversation.launch(width, behind=second)
    else:
        second = last = conversation.launch(width)
    chooser.read(second.verdict, second.width)
    ms = 1000 * (time.perf_counter() - started_s)
    conversation.close(last)
    return ms


def time_parts(conversation: Conversation, width: int) -> Parts:
    """Medians of a few passes of one width, half by half; nothing of them is kept."""
    rounds = [_halves(conversation, width) for _ in range(1 + MIN_ROUNDS)][1:]
    return Parts(*map(statistics.median, zip(*rounds, strict=True)))


def _halves(conversation: Conversation, width: int) -> tuple[float, float]:
    """Milliseconds of drafting, and of building the graphs of both halves."""
    target, drafter, chooser = conversation.target, conversation.drafter, conversation.chooser
    anchor, depth = mx.array(conversation.tokens[-1:], dtype=mx.uint32), len(conversation.tokens)
    mx.eval(anchor)
    started_s = time.perf_counter()
    draft = chooser.undrafted()
    if drafter and width > 1:
        draft = chooser.draft(drafter.propose(conversation.context, None, anchor, width), depth)
    draft_built_s = time.perf_counter()
    mx.eval(draft.tokens)
    drafted_s = time.perf_counter()
    reading = target.read(mx.concatenate([anchor, draft.tokens]), conversation.caches)
    verdict = chooser.judge(reading.logits, draft, depth, conversation.tokens)
    built_s = time.perf_counter()
    mx.eval(verdict)
    target.rewind(conversation.caches, reading, 0)
    host_s = draft_built_s - started_s + built_s - drafted_s
    return 1000 * (drafted_s - started_s), 1000 * host_s


def typical(ms: Sequence[float]) -> float:
    """The median without outliers: what lies further off the quartiles than 1.5 times their gap."""
    if len(ms) < 2:
        return ms[0]
    low, _, high = statistics.quantiles(ms, n=4)
    reach = 1.5 * (high - low)
    return statistics.median(x for x in ms if low - reach <= x <= high + reach)


def typical_of_each(times: Times) -> dict[int, float]:
    """A typical pass of each width, whatever the machine's mood was in each round of all."""
    rounds = [statistics.geometric_mean(ms) for ms in zip(*times.values(), strict=True)]
    pace = typical(rounds)
    return {
        width: pace * typical([one / mood for one, mood in zip(ms, rounds, strict=True)])
        for width, ms in times.items()
    }


def check_steady(ms: Sequence[float]) -> float:
    """How far the quartiles of plain passes lie apart; raises `DFlashError` when it is too far."""
    low, _, high = statistics.quantiles(ms, n=4)
    if high > MAX_SPREAD * low:
        raise DFlashError(
            f"the machine is busy (a plain pass took {low:.1f} to {high:.1f} ms); {TRY_AGAIN}"
        )
    return high / low


def deeper(depth: int, prefill_s: float, room: int) -> int:
    """The second depth: the more the faster prompts are read; 0 where it would tell nothing."""
    affordable = int(PREFILL_S * depth / max(prefill_s, 1e-6))
    deep = min(max(MIN_DEEP, min(affordable, MAX_DEEP)), room)
    return deep if deep >= 2 * depth else 0


def curve_of(ms: dict[int, dict[int, float]]) -> Curve:
    """Cost at depth 0 and per thousand tokens, from typical passes at one or two depths.

    Slopes never fall with the width: more rows do not make a longer context cheaper, and single
    ones are too noisy to be trusted far away.
    """
    depths = sorted(ms)
    near, far = depths[0], depths[-1]
    widths = sorted(ms[near])
    slopes = [0.0] * len(widths)
    if far > near:
        raw = [1000 * (ms[far][w] - ms[near][w]) / (far - near) for w in widths]
        slopes = [max(0.0, slope) for slope in rising(raw)]
    slope_ms = dict(zip(widths, slopes, strict=True))
    base_ms = {w: max(ms[near][w] - slope_ms[w] * near / 1000, 0.5 * ms[near][w]) for w in widths}
    return Curve(base_ms, slope_ms)


def rising(values: Sequence[float]) -> list[float]:
    """The nearest sequence that never falls: neighbours out of order get their mean."""
    runs: list[list[float]] = []
    for value in values:
        runs.append([value])
        while len(runs) > 1 and statistics.mean(runs[-2]) > statistics.mean(runs[-1]):
            runs[-2:] = [runs[-2] + runs[-1]]
    return [statistics.mean(run) for run in runs for _ in run]


def _room(pair: Pair, widths: Sequence[int]) -> int:
    """Tokens of context that leave the passes room below the pair's limits."""
    needed = (2 + MAX_ROUNDS) * len(widths) + 3 * max(widths)
    return min(pair.context_limit, pair.drafter_limit, MAX_DEEP + needed + 1) - needed


def _text(pair: Pair, num_tokens: int) -> list[int]:
    """Tokens of the shipped prompts, over and over; raises `DFlashError` for a tiny context."""
    if num_tokens < 8:
        raise DFlashError(f"nothing to tune: {pair.name} reads too few tokens at a time")
    ids = pair.encode("\n\n".join(prompt.prompt for prompt in load_prompts()))
    return (ids * (1 + num_tokens // len(ids)))[:num_tokens]
