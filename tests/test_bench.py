"""A benchmark that is fair, and figures that mean what they say."""

from collections import Counter
from collections.abc import Iterator
from itertools import cycle, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from tiny import pair_of, plain_ids, tiny_pair, tiny_target

from dflash2_mlx import bench
from dflash2_mlx.bench import (
    AUTO,
    IN_A_TURN,
    MLX_LM,
    PLAIN,
    Answer,
    Contender,
    Pass,
    Run,
    Task,
    alternate,
    balanced_orders,
    choose_prompts,
    contenders,
    in_turns,
    prepare,
    together,
    whole,
)
from dflash2_mlx.bench_figures import ALL, check, differences, figures, looping_kinds, verdict
from dflash2_mlx.bench_report import report
from dflash2_mlx.curve import Curve
from dflash2_mlx.decision import decisions
from dflash2_mlx.errors import InvalidRequest
from dflash2_mlx.pair import Pair
from dflash2_mlx.parity import Prompt
from dflash2_mlx.setting import PUBLISHED, compared_with_published
from dflash2_mlx.target import Target
from dflash2_mlx.tuning import Store, Tuning


@pytest.fixture(autouse=True)
def plain_mlx_lm(monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-lm's loop, without a tokenizer that tiny models do not have."""

    def stream_generate(
        model: Any, _: Any, prompt: list[int], max_tokens: int
    ) -> Iterator[SimpleNamespace]:
        for token, _ in generate_step(mx.array(prompt), model, max_tokens=max_tokens):
            yield SimpleNamespace(token=int(token))

    monkeypatch.setattr("mlx_lm.stream_generate", stream_generate)


def tuned(folder: Path, pair: Pair | None = None) -> Pair:
    pair = pair or tiny_pair()
    guess = Curve({1: 1.0, 2: 1.1, 4: 1.3, 8: 2.7})
    pair.tuning = Tuning("tiny", guess, quantized=False, store=Store(folder / "tuning.json"))
    return pair


PROMPTS = [Prompt("code", "def add("), Prompt("chat", "Why is the sky blue?")]


def bench_all(
    pair: Pair, *, max_tokens: int = 12, repeats: int = 2
) -> tuple[list[Run], list[Task]]:
    tasks = prepare(pair, PROMPTS, max_tokens)
    runs = alternate(contenders(pair, [2, 4]), tasks, max_tokens=max_tokens, repeats=repeats)
    return list(runs), tasks


# Who is compared, and how


def test_plain_mlx_lm_plain_every_block_and_auto_are_compared(tmp_path: Path) -> None:
    names = [contender.name for contender in contenders(tuned(tmp_path))]
    assert names == [MLX_LM, PLAIN, "block 2", "block 4", "block 8", AUTO]


def test_blocks_that_were_asked_for_are_those_that_run(tmp_path: Path) -> None:
    pair = tuned(tmp_path)
    names = [contender.name for contender in contenders(pair, [3, 16])]
    assert names == [MLX_LM, PLAIN, "block 3", "block 16", AUTO]
    with pytest.raises(InvalidRequest, match="block size is 99"):
        contenders(pair, [99])


def test_a_block_is_the_width_of_its_passes(tmp_path: Path) -> None:
    """L04."""
    pair = tuned(tmp_path)
    for contender in contenders(pair, [3, 5])[2:4]:
        answer = whole(contender, list(b"A prompt."), 16)
        block = int(contender.name.removeprefix("block "))
        assert max(one.drafted for one in answer.passes) == block - 1


def test_without_a_drafter_there_is_plain_decoding_only() -> None:
    pair = pair_of(Target(tiny_target()))
    assert [contender.name for contender in contenders(pair)] == [MLX_LM, PLAIN]


def test_every_contender_gives_the_same_ids(tmp_path: Path) -> None:
    runs, tasks = bench_all(tuned(tmp_path))
    assert len(runs) == 5 * 2 * 2
    for run in runs:
        assert list(run.answer.tokens) == tasks[run.task].truth
    assert all(found == [] for found in differences(runs, tasks).values())


@pytest.mark.parametrize("count", range(1, 9))
def test_every_contender_has_every_place_and_every_neighbour_equally_often(count: int) -> None:
    orders = balanced_orders(count)
    assert orders[0] == list(range(count))
    assert all(sorted(order) == list(range(count)) for order in orders)
    places = Counter((place, one) for order in orders for place, one in enumerate(order))
    neighbours = Counter(pair for order in orders for pair in pairwise(order))
    assert len(places) == count * count
    assert len(neighbours) == count * (count - 1)
    assert len(set(places.values())) == 1
    assert len(set(neighbours.values())) <= 1


def scripted(name: str, turns: int, told: list[str]) -> Contender:
    """A contender whose answers have so many turns of one token; its turns are `told`."""

    def begin(ids: list[int], max_tokens: int) -> Iterator[Answer]:
        for turn in range(min(turns, max_tokens)):
            told.append(name)
            yield Answer((turn,), (Pass(1, 0, 0),), 0.5 * (turn == 0), 1.0, 10 + turn)

    return Contender(name, begin)


def test_all_answer_at_once_in_turns_whose_order_changes() -> None:
    told: list[str] = []
    entrants = [scripted(name, turns, told) for name, turns in (("a", 4), ("b", 2), ("c", 4))]
    orders = cycle(balanced_orders(3))
    answers = together(entrants, Task("code", "", [1], [], []), 50, orders)
    # From its third turn on, b is over.
    assert "".join(told) == "abc" + "bca" + "ca" + "ca"
    assert [len(answer.tokens) for answer in answers.values()] == [4, 2, 4]
    assert answers["a"] == Answer((0, 1, 2, 3), (Pass(1, 0, 0),) * 4, 0.5, 4.0, 13)


def test_every_prompt_is_asked_often_enough_behind_a_warm_up() -> None:
    told: list[str] = []
    tasks = [Task("code", "", [1], [1], [1.0]), Task("chat", "", [2], [1], [1.0])]
    progress: list[int] = []
    runs = list(
        alternate(
            [scripted(name, 50, told) for name in "abc"],
            tasks,
            max_tokens=12,
            repeats=2,
            progress=lambda _, done, total: progress.append(done),
        )
    )
    assert "".join(told[:24]) == "a" * 8 + "b" * 8 + "c" * 8  # warm-up
    assert len(told) == 24 + 2 * 2 * 3 * 12
    places = Counter((name, turn % 3) for turn, name in enumerate(told[24:]))
    assert set(places.values()) == {16}  # each was first, second and third as often
    assert [(run.contender, run.task) for run in runs[3:6]] == [("a", 1), ("b", 1), ("c", 1)]
    assert len(runs) == 12
    assert progress == [3, 6, 9, 12]


def test_an_answer_ends_where_the_model_ends_it(tmp_path: Path) -> None:
    """P14: no forced length."""
    target = tiny_target()
    prompt = list(b"A prompt.")
    end = plain_ids(target, prompt, 30, ends=())[9]
    pair = tuned(tmp_path)
    pair.end_tokens = frozenset({end})
    lengths = {c.name: len(whole(c, prompt, 30).tokens) for c in contenders(pair, [2, 4])}
    assert len(set(lengths.values())) == 1
    assert max(lengths.values()) <= 10


def test_prompts_are_real_ones_of_every_kind() -> None:
    """P11: other languages are one of the kinds."""
    kinds = [prompt.kind for prompt in choose_prompts(None, 2)]
    assert set(kinds) == {"code", "maths", "chat", "prose", "structured", "copy", "languages"}
    assert max(kinds.count(kind) for kind in kinds) == 2
    assert [p.kind for p in choose_prompts(["copy", "code"], 1)] == ["copy", "code"]


def test_an_unknown_kind_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidRequest, match="kind is 'poems', expected one of code, maths"):
        choose_prompts(["poems"], 1)


# Times


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the benchmark's clock shows, one after the other."""
    shown: list[float] = []
    monkeypatch.setattr(
        bench, "time", SimpleNamespace(perf_counter=lambda: shown.pop(0) if shown else 0.0)
    )
    return shown


def test_first_token_and_decoding_are_timed_apart(clock: list[float]) -> None:
    """P14: what was launched ahead of the first token's reading is decoding."""
    # Started, what came, waited for the rest; learning from the answer (300 s) is not decoding.
    clock += [100.0, 102.0, 102.0, 102.5]
    clock += [200.0, 200.125, 200.25, 500.25, 500.5]
    settled: list[bool] = []
    passes = iter([([5], 0, 0), ([6, 7, 8], 3, 2), ([9], 3, 0)])
    first, second = in_turns(passes, lambda: settled.append(True))
    assert (first.ttft_s, first.decode_s) == (2.0, 0.5)
    assert (second.ttft_s, second.decode_s) == (0.0, 0.5)
    answer = first + second
    assert answer.tokens == (5, 6, 7, 8, 9)
    assert answer.passes == (Pass(1, 0, 0), Pass(3, 3, 2), Pass(1, 3, 0))
    assert (answer.ttft_s, answer.decode_s, answer.decoded) == (2.0, 1.0, 4)
    assert len(settled) == 2


def test_a_turn_has_a_few_passes_and_nothing_runs_between_turns() -> None:
    made = 0

    def passes() -> Iterator[tuple[list[int], int, int]]:
        nonlocal made
        for token in range(20):
            made += 1
            yield [token], 0, 0

    sizes = []
    for turn in in_turns(passes()):
        sizes.append(len(turn.passes))
        assert made == sum(sizes)
    assert sizes == [1, *[IN_A_TURN] * 3, 1]


def test_what_others_hold_is_not_an_answers_memory() -> None:
    def passes(size: int) -> Iterator[tuple[list[int], int, int]]:
        held = []
        for token in range(3 * IN_A_TURN):
            held.append(mx.zeros(size, dtype=mx.uint8) + 1)
            mx.eval(held[-1])
            yield [token], 0, 0

    before, small, large = mx.get_active_memory(), Answer(), Answer()
    for one, other in zip(in_turns(passes(10_000)), in_turns(passes(1_000_000)), strict=True):
        small, large = small + one, large + other
    assert 100_000 < small.peak_memory_bytes - before < 1_000_000
    assert 15_000_000 < large.peak_memory_bytes - before < 21_000_000


def test_no_answer_takes_no_time() -> None:
    assert list(in_turns(iter([]))) == []
    answer = Answer()
    assert (answer.tokens, answer.decoded, answer.decode_s) == ((), 0, 0.0)


# Figures


def answer_of(sizes: list[int], decode_s: float, drafted: int = 3) -> Answer:
    passes = [Pass(1, 0, 0), *(Pass(size, drafted, size - 1) for size in sizes)]
    total = 1 + sum(sizes)
    return Answer(tuple(range(total)), tuple(passes), 0.5, decode_s, 1000)


def plain_answer(num_tokens: int, decode_s: float) -> Answer:
    return Answer(tuple(range(num_tokens)), (Pass(1, 0, 0),) * num_tokens, 0.25, decode_s, 900)


def task(kind: str, num_tokens: int) -> Task:
    return Task(kind, f"a {kind} prompt", [1, 2, 3], list(range(num_tokens)), [1.0] * num_tokens)


def example() -> tuple[list[Run], list[Task]]:
    tasks = [task("code", 9), task("prose", 5)]
    runs = []
    for code_s, prose_s in ((1.0, 2.0), (1.1, 2.0), (5.0, 2.0)):  # one repeat was disturbed
        runs += [
            Run(MLX_LM, 0, plain_answer(9, 2 * code_s)),
            Run(PLAIN, 0, plain_answer(9, 2 * code_s)),
            Run("block 4", 0, answer_of([4, 3, 1], code_s)),
            Run(AUTO, 0, answer_of([4, 3, 1], code_s)),
            Run(MLX_LM, 1, plain_answer(5, prose_s)),
            Run(PLAIN, 1, plain_answer(5, prose_s)),
            Run("block 4", 1, answer_of([1, 1, 2], 2 * prose_s)),
            Run(AUTO, 1, plain_answer(5, prose_s)),
        ]
    return runs, tasks


def test_speed_is_of_the_median_repeat() -> None:
    code = figures(*example())["code"]
    assert code["block 4"].decode_tokens_per_s == pytest.approx(8 / 1.1)
    assert code["block 4"].speedup == pytest.approx(2.0)
    assert code["block 4"].spread == pytest.approx(4.0 / 1.1)
    assert code[MLX_LM].speedup == 1.0


def test_tokens_per_pass_and_its_histogram_leave_the_first_pass_out() -> None:
    block = figures(*example())["code"]["block 4"]
    assert block.tokens_per_pass == pytest.approx(8 / 3)
    assert block.histogram == {1: 3, 3: 3, 4: 3}
    assert block.passes_per_s == pytest.approx(3 / 1.1)
    assert block.accepted_by_place == pytest.approx((2 / 3, 2 / 3, 1 / 3))


def test_all_prompts_together_weigh_by_their_time() -> None:
    every = figures(*example())[ALL]
    assert every["block 4"].decode_tokens_per_s == pytest.approx(12 / 5.1)
    assert every["block 4"].prompts == 2


def test_first_tokens_and_memory_are_told_apart_from_decoding() -> None:
    every = figures(*example())[ALL]
    assert (every[MLX_LM].ttft_s, every["block 4"].ttft_s) == (0.25, 0.5)
    assert (every[MLX_LM].peak_memory_bytes, every["block 4"].peak_memory_bytes) == (900, 1000)


def test_other_ids_are_counted_and_told_with_their_margin() -> None:
    runs, tasks = example()
    tasks[0].truth[4] = 99
    tasks[0].margins[4] = 0.5
    assert figures(runs, tasks)["code"][AUTO].equal == 0
    (difference,) = differences(runs, tasks)[AUTO]
    assert (difference.prompt, difference.index, difference.margin) == (0, 4, 0.5)


def test_a_verdict_is_of_answers_that_were_given_at_the_same_time() -> None:
    """The machine was half as fast in one repeat, and auto as good as ever."""
    runs = []
    for seconds, plain_s in ((1.0, 2.0), (2.0, 4.2), (1.1, 2.2)):
        runs += [
            Run(MLX_LM, 0, plain_answer(9, plain_s)),
            Run(PLAIN, 0, plain_answer(9, plain_s)),
            Run("block 4", 0, answer_of([4, 3, 1], seconds)),
            Run(AUTO, 0, answer_of([4, 3, 1], seconds * 1.1)),
        ]
    ratios = verdict(figures(runs, [task("code", 9)]))["code"]
    assert ratios["of_best_block"] == pytest.approx(1 / 1.1)
    assert ratios["of_plain"] == pytest.approx(2.0 / 1.1)


def test_auto_is_held_against_the_best_block_and_plain_decoding() -> None:
    ratios = verdict(figures(*example()))
    assert ratios["code"] == pytest.approx({"of_best_block": 1, "of_plain": 2, "of_mlx_lm": 2})
    # On prose every block loses, and the best block is none.
    assert ratios["prose"]["of_best_block"] == pytest.approx(1.0)


# Texts that loop


def test_a_text_that_loops_is_flagged_and_its_speed_not_counted() -> None:
    """C27."""
    runs, tasks = example()
    stuck = Task("prose", "stuck", [1], [7] * 40, [1.0] * 40)
    tasks.append(stuck)
    fast = Answer((7,) * 40, (Pass(1, 0, 0), *[Pass(13, 12, 12)] * 3), 0.1, 0.001, 0)
    runs += [Run(run.contender, 2, fast) for run in runs[:4]]
    assert [one.valid for one in check(tasks)] == [True, True, False]
    assert figures(runs, tasks) == figures(*example())
    assert looping_kinds(tasks) == []


def test_a_kind_of_loops_only_is_shown_and_called_invalid(tmp_path: Path) -> None:
    """C27: with its passes per second, which a loop does not raise."""
    tasks = [Task("prose", "say it again", [1], [7] * 40, [1.0] * 40)]
    slow = Answer((7,) * 40, (Pass(1, 0, 0),) * 40, 0.1, 3.9, 0)
    fast = Answer((7,) * 40, (Pass(1, 0, 0), *[Pass(13, 12, 12)] * 3), 0.1, 0.3, 0)
    runs = [Run(MLX_LM, 0, slow), Run(PLAIN, 0, slow), Run("block 4", 0, fast), Run(AUTO, 0, fast)]
    told = report(tuned(tmp_path), runs, tasks, max_tokens=40, repeats=1, command="bench")
    assert told["invalid_kinds"] == ["prose"]
    assert told["prompts"][0]["longest_repeat"] == {"tokens": 40, "period": 1}
    assert told["kinds"]["prose"][AUTO]["speedup"] == pytest.approx(13.0)
    assert told["kinds"]["prose"][AUTO]["passes_per_s"] == pytest.approx(10.0)
    assert told["kinds"]["prose"][PLAIN]["passes_per_s"] == pytest.approx(10.0)
    assert told["kinds"]["prose"][AUTO]["equal"] == 1
    assert "prose" not in told["verdict"]
    assert told["remarks"][-2:] == [
        "not counted: the answer to 'say it again' loops (40 tokens in phrases of 1)",
        "invalid: every answer of kind prose loops",
    ]


# The report


def test_a_report_says_what_it_was_made_with(tmp_path: Path) -> None:
    runs, tasks = bench_all(tuned(tmp_path))
    told = report(tuned(tmp_path), runs, tasks, max_tokens=12, repeats=2, command="bench ...")
    setting = told["setting"]
    assert {"chip", "memory_bytes", "system", "packages", "load"} <= set(setting["machine"])
    assert setting["pair"]["target_bits"] == 32
    assert {"target_revision", "drafter_revision", "drafter_bits", "tuning"} <= set(setting["pair"])
    assert (setting["max_tokens"], setting["repeats"], setting["command"]) == (12, 2, "bench ...")
    assert "2 prompts of 15 to 27 tokens, answers of 12, greedy, 2 repeats" in told["title"]
    assert [prompt["prompt_tokens"] for prompt in told["prompts"]] == [15, 27]
    assert set(told["prompts"][0]["figures"]) == {MLX_LM, PLAIN, "block 2", "block 4", AUTO}


def test_a_report_tells_what_was_decided_by_what_these_answers_showed(tmp_path: Path) -> None:
    """Not by the times of before, nor for a context that no answer had."""
    pair = tuned(tmp_path)
    runs, tasks = bench_all(pair)
    pair.tuning.forget()  # how many passes were drafted above, and taught, is a matter of time
    pair.tuning.measure(Curve({1: 1.0, 2: 1.1, 4: 1.3, 8: 2.7}))
    for width, ms in ((1, 1.0), (2, 9.0), (4, 9.0), (8, 9.0)):
        for _ in range(10):
            pair.tuning.pilot("code").watch(width, 30, 0, ms)
    told = report(pair, runs, tasks, max_tokens=12, repeats=2, command="bench ...")
    assert told["setting"]["decided_behind_tokens"] == 27
    assert {one["block"] for one in told["decisions"]} == {1}
    assert 1 not in {one.block for one in decisions(pair.tuning.known, 27)}


def test_known_figures_of_a_drafter_are_compared_with() -> None:
    """P15: a revision that does not belong to the target accepts next to nothing."""
    pair = tiny_pair()
    pair.drafter_name = "z-lab/Qwen3.8-27B-DFlash2@50307d4"
    known = PUBLISHED["z-lab/Qwen3.8-27B-DFlash2"]
    good = compared_with_published(pair, known.block, 0.9 * known.tokens_per_pass)
    bad = compared_with_published(pair, known.block, 1.02)
    assert (
        good
        == "4.32 tokens per pass at block 8; 4.80 is known (its makers, mean of five benchmarks)"
    )
    assert bad.endswith("far below, is the drafter's revision the one made for this target?")
    assert compared_with_published(pair, 5, 3.0) is None
    assert compared_with_published(tiny_pair(), 8, 3.0) is None
