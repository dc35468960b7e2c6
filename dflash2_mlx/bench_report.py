"""A whole benchmark as plain values, with what it was made with and what follows from it."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from dflash2_mlx.bench import Run, Task
from dflash2_mlx.bench_figures import (
    ALL,
    Checked,
    Figures,
    by_prompt,
    check,
    differences,
    figures,
    looping_kinds,
    verdict,
)
from dflash2_mlx.decision import decisions
from dflash2_mlx.pair import Pair
from dflash2_mlx.parity import Difference
from dflash2_mlx.setting import compared_with_published, machine, of_pair
from dflash2_mlx.words import counted

UNTUNED = "auto had no times of this pair before, and took them in its first answers; bench again"


def report(
    pair: Pair,
    runs: Sequence[Run],
    tasks: Sequence[Task],
    *,
    max_tokens: int,
    repeats: int,
    command: str,
    tuned: bool = True,
) -> dict[str, Any]:
    """Everything as plain values: setting, prompts, figures, verdict, and remarks in words.

    `tuned`: auto knew the times of this pair before the first answer. What the tuner decides is
    told for the depth at which passes ran on average.
    """
    by_kind, left = figures(runs, tasks), differences(runs, tasks)
    checked, looping = check(tasks), looping_kinds(tasks)
    sound = {kind: by_name for kind, by_name in by_kind.items() if kind not in looping}
    depth = round(statistics.mean(one.prompt_tokens + one.output_tokens / 2 for one in checked))
    decided = decisions(pair.tuning.learned, depth) if pair.tuning else []
    remarks = _on_auto(sound) + _on_pair(pair, sound) + _on_ids(left)
    setting = {
        "command": command,
        "machine": machine(),
        "pair": of_pair(pair),
        "max_tokens": max_tokens,
        "repeats": repeats,
        "sampling": "greedy",
        "tuned_before": tuned,
        "decided_behind_tokens": depth,
    }
    return {
        "title": _title(setting, checked),
        "setting": setting,
        "prompts": [
            {**asdict(one), "valid": one.valid, "figures": _plain(by_name)}
            for one, by_name in zip(checked, by_prompt(runs, tasks), strict=True)
        ],
        "kinds": {kind: _plain(by_name) for kind, by_name in by_kind.items()},
        "invalid_kinds": looping,
        "verdict": verdict(sound),
        "differences": {name: [asdict(one) for one in found] for name, found in left.items()},
        "decisions": [asdict(one) for one in decided],
        "remarks": remarks + _on_loops(checked, looping) + ([] if tuned else [UNTUNED]),
    }


def _plain(by_name: dict[str, Figures]) -> dict[str, Any]:
    return {name: figures.to_dict() for name, figures in by_name.items()}


def _title(setting: dict[str, Any], checked: Sequence[Checked]) -> str:
    here, pair = setting["machine"], setting["pair"]
    drafter = f" with {pair['drafter']} ({pair['drafter_bits']}-bit)" if pair["drafter"] else ""
    return (
        f"{pair['target']} ({pair['target_bits']}-bit){drafter}; {here['chip']}, "
        f"{here['cores']} cores, {here['memory_bytes'] / 2**30:.0f} GiB; mlx "
        f"{here['packages']['mlx']}; {counted(len(checked), 'prompt')} of "
        f"{_range(one.prompt_tokens for one in checked)} tokens, answers of "
        f"{_range(one.output_tokens for one in checked)}, greedy, "
        f"{counted(setting['repeats'], 'repeat')}"
    )


def _range(counts: Iterable[int]) -> str:
    low, high = min(known := list(counts)), max(known)
    return str(low) if low == high else f"{low} to {high}"


def _on_loops(checked: Sequence[Checked], looping: Sequence[str]) -> list[str]:
    lines = [
        f"not counted: the answer to {one.prompt!r:.60} loops ({one.longest_repeat})"
        for one in checked
        if not one.valid
    ]
    return lines + [f"invalid: every answer of kind {kind} loops" for kind in looping]


def _on_ids(left: dict[str, list[Difference]]) -> list[str]:
    lines = []
    for name, found in left.items():
        if real := [one for one in found if not one.is_tie()]:
            at = ", ".join(f"prompt {one.prompt} at token {one.index}" for one in real)
            lines.append(f"{name}: other ids than plain mlx-lm ({at}); see 'dflash2-mlx verify'")
    return lines


def _on_auto(by_kind: dict[str, dict[str, Figures]]) -> list[str]:
    found = {kind: ratios for kind, ratios in verdict(by_kind).items() if kind != ALL}
    if not found:
        return []
    lines, compared = [], [("of_plain", "plain decoding")]
    if any(name.startswith("block ") for by_name in by_kind.values() for name in by_name):
        compared.insert(0, ("of_best_block", "the best fixed block"))
    for name, words in compared:
        kind = min(found, key=lambda kind: found[kind][name])
        lines.append(f"auto against {words}: at least {found[kind][name]:.2f}x ({kind})")
    return lines


def _on_pair(pair: Pair, by_kind: dict[str, dict[str, Figures]]) -> list[str]:
    lines = []
    for name, one in by_kind.get(ALL, {}).items():
        if name.startswith("block "):
            block = int(name.removeprefix("block "))
            lines.append(compared_with_published(pair, block, one.tokens_per_pass))
    return [line for line in lines if line]
