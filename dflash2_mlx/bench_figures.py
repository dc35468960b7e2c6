"""The numbers of a benchmark: speed, acceptance, parity and validity, by kind of prompt."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from operator import truediv
from typing import Any

from dflash2_mlx.bench import AUTO, MLX_LM, PLAIN, Answer, Run, Task
from dflash2_mlx.loops import Repeat, longest_repeat
from dflash2_mlx.parity import Difference, first_difference

ALL = "all"
FIRST_PLACES = 16  # places of a block whose acceptance is told


@dataclass(frozen=True, slots=True)
class Figures:
    """What one contender did on the prompts of one kind.

    `decode_tokens_per_s` is of all their tokens in the median time of each, `rates` the same of
    each repeat; `spread` how far the slowest and fastest repeat lie apart, as a share of the
    median. `speedup` is over plain mlx-lm.
    `accepted_by_place` are the shares of drafted passes in which so many drafts stood.
    """

    decode_tokens_per_s: float
    rates: tuple[float, ...]
    spread: float
    speedup: float
    ttft_s: float
    tokens_per_pass: float
    passes_per_s: float
    histogram: dict[int, int]
    accepted_by_place: tuple[float, ...]
    equal: int
    prompts: int
    peak_memory_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Checked:
    """A prompt's lengths, and whether its text may be counted: one that loops may not."""

    kind: str
    prompt: str
    prompt_tokens: int
    output_tokens: int
    longest_repeat: Repeat

    @property
    def valid(self) -> bool:
        """Whether the text did not get stuck."""
        return not self.longest_repeat.is_loop


def check(tasks: Sequence[Task]) -> list[Checked]:
    """Lengths and validity of every prompt."""
    return [
        Checked(t.kind, t.text, len(t.ids), len(t.truth), longest_repeat(t.truth)) for t in tasks
    ]


def differences(runs: Iterable[Run], tasks: Sequence[Task]) -> dict[str, list[Difference]]:
    """For each contender, where its answers left plain mlx-lm's; once for each prompt."""
    found: dict[str, dict[int, Difference]] = {}
    for run in runs:
        known, task = found.setdefault(run.contender, {}), tasks[run.task]
        index = first_difference(run.answer.tokens, task.truth)
        if index is not None and run.task not in known:
            margin = task.margins[index] if index < len(task.margins) else None
            known[run.task] = Difference(run.task, index, margin)
    return {name: list(known.values()) for name, known in found.items()}


def figures(runs: Sequence[Run], tasks: Sequence[Task]) -> dict[str, dict[str, Figures]]:
    """By kind of prompt, and for all, then by contender.

    Texts that loop are left out, but for a kind that has no others: see `looping_kinds`.
    """
    checked = check(tasks)
    groups = {
        kind: [n for n, task in enumerate(tasks) if task.kind == kind] for kind in _kinds(tasks)
    }
    groups[ALL] = list(range(len(tasks)))
    found = {}
    for kind, numbers in groups.items():
        valid = [number for number in numbers if checked[number].valid]
        found[kind] = _of_group(runs, tasks, valid or numbers)
    return found


def looping_kinds(tasks: Sequence[Task]) -> list[str]:
    """Kinds of which every text loops, so that their figures mean nothing."""
    checked = check(tasks)
    return [
        kind for kind in _kinds(tasks) if not any(one.valid for one in checked if one.kind == kind)
    ]


def by_prompt(runs: Sequence[Run], tasks: Sequence[Task]) -> list[dict[str, Figures]]:
    """The same for every prompt alone, by contender."""
    return [_of_group(runs, tasks, [number]) for number in range(len(tasks))]


def verdict(by_kind: dict[str, dict[str, Figures]]) -> dict[str, dict[str, float]]:
    """How auto compares with the best fixed block, and with plain decoding, on each kind.

    The median of the repeats' ratios, since all answered a repeat at the same time.
    """
    found: dict[str, dict[str, float]] = {}
    for kind, by_name in by_kind.items():
        if AUTO not in by_name or by_name[AUTO].decode_tokens_per_s == 0:
            continue
        fixed = [name for name in by_name if name.startswith("block ")]
        best = max([*fixed, PLAIN], key=lambda name: by_name[name].decode_tokens_per_s)
        auto = by_name[AUTO].rates
        found[kind] = {
            f"of_{words}": statistics.median(map(truediv, auto, by_name[name].rates))
            for words, name in (("best_block", best), ("plain", PLAIN), ("mlx_lm", MLX_LM))
        }
    return found


def _kinds(tasks: Sequence[Task]) -> list[str]:
    return list(dict.fromkeys(task.kind for task in tasks))


def _of_group(
    runs: Sequence[Run], tasks: Sequence[Task], numbers: Sequence[int]
) -> dict[str, Figures]:
    names = dict.fromkeys(run.contender for run in runs)
    answers = {
        name: [[r.answer for r in runs if r.contender == name and r.task == n] for n in numbers]
        for name in names
    }
    baseline = answers.get(MLX_LM)
    rate = _tokens_per_s(baseline) if baseline else 0.0
    truths = [tasks[number].truth for number in numbers]
    return {name: _figures(asked, truths, rate) for name, asked in answers.items()}


def _figures(
    asked: Sequence[Sequence[Answer]], truths: Sequence[list[int]], baseline: float
) -> Figures:
    """`asked` has the repeats of each prompt."""
    answers = [answer for repeats in asked for answer in repeats]
    later = [one for answer in answers for one in answer.passes[1:]]
    rate = _tokens_per_s(asked)
    seconds = sum(_median_s(repeats) for repeats in asked)
    num_passes = sum(len(repeats[0].passes) - 1 for repeats in asked)
    return Figures(
        decode_tokens_per_s=rate,
        rates=tuple(_tokens_per_s([[one] for one in some]) for some in zip(*asked, strict=True)),
        spread=statistics.mean(_spread(repeats) for repeats in asked),
        speedup=rate / baseline if baseline else 0.0,
        ttft_s=statistics.median(answer.ttft_s for answer in answers),
        tokens_per_pass=statistics.mean(map(_tokens_per_pass, answers)),
        passes_per_s=num_passes / seconds if seconds else 0.0,
        histogram=dict(sorted(Counter(one.emitted for one in later).items())),
        accepted_by_place=_accepted_by_place(answers),
        equal=sum(
            all(list(answer.tokens) == truth for answer in repeats)
            for repeats, truth in zip(asked, truths, strict=True)
        ),
        prompts=len(asked),
        peak_memory_bytes=max(answer.peak_memory_bytes for answer in answers),
    )


def _median_s(repeats: Sequence[Answer]) -> float:
    return statistics.median(answer.decode_s for answer in repeats)


def _tokens_per_s(asked: Sequence[Sequence[Answer]]) -> float:
    tokens = sum(repeats[0].decoded for repeats in asked)
    seconds = sum(_median_s(repeats) for repeats in asked)
    return tokens / seconds if seconds else 0.0


def _spread(repeats: Sequence[Answer]) -> float:
    times = [answer.decode_s for answer in repeats]
    middle = statistics.median(times)
    return (max(times) - min(times)) / middle if middle else 0.0


def _tokens_per_pass(answer: Answer) -> float:
    """Without the first pass, which has nothing to draft from."""
    later = answer.passes[1:]
    return sum(one.emitted for one in later) / len(later) if later else 1.0


def _accepted_by_place(answers: Sequence[Answer]) -> tuple[float, ...]:
    drafted = [one for answer in answers for one in answer.passes if one.drafted]
    shares = []
    for place in range(1, FIRST_PLACES):
        tried = [one for one in drafted if one.drafted >= place]
        if not tried:
            break
        shares.append(sum(one.from_draft >= place for one in tried) / len(tried))
    return tuple(shares)
