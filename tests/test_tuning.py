"""What a machine showed about a pair is kept, told apart from other pairs, and never in the way."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dflash2_mlx.chip import Chip
from dflash2_mlx.curve import Curve
from dflash2_mlx.tuner import PRIOR_RATE, Acceptance, Pilot
from dflash2_mlx.tuning import FEW_PASSES, KINDS, Known, Store, Tuning, kind_of, tuning_key

GUESS = Curve({1: 1.0, 2: 1.1, 4: 1.3, 8: 2.7}, {1: 0.01})
TRUE = Curve({1: 10.0, 2: 11.0, 4: 13.0, 8: 27.0}, {8: 0.5})
DEPTH = 100
MODULE = "dflash2_mlx.tuning"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "folder" / "tuning.json")


def tuning(store: Store, key: str = "pair", *, quantized: bool = False) -> Tuning:
    return Tuning(key, GUESS, quantized=quantized, store=store)


def known(when: str = "2026-11-29") -> Known:
    acceptance = {kind: Acceptance([30.0] * 7, [40.0] * 7) for kind in KINDS}
    return Known(TRUE, acceptance, measured=True, when=when)


def answer(pilot: Pilot, passes: int, stood: int = 7, curve: Curve = TRUE) -> list[int]:
    """Widths of an answer whose drafts stand, timed by a curve."""
    widths = []
    for _ in range(passes):
        width = pilot.choose(DEPTH)
        pilot.watch(width, DEPTH, min(stood, width - 1), curve.ms(width, DEPTH))
        widths.append(width)
    return widths


# What is kept, and for whom


KEY = {
    "chip": Chip(False, "applegpu_g16s", 16, "Apple M4 Pro"),
    "target": "qwen3.8-27b-4bit 3e6447f",
    "drafter": "z-lab/Qwen3.8-27B-DFlash2",
    "bits": "4-bit bfloat16 with 4-bit bfloat16",
}
OTHER = {
    "chip": Chip(False, "applegpu_g16s", 16, "Apple M4 Max"),
    "target": "qwen3.8-27b-4bit another",
    "drafter": "z-lab/Qwen3.8-27B-DFlash2@another",
    "bits": "4-bit bfloat16 with 8-bit bfloat16",
}


@pytest.mark.parametrize("part", KEY)
def test_each_thing_that_times_depend_on_is_in_the_key(part: str) -> None:
    assert tuning_key(**KEY) == tuning_key(**KEY)  # type: ignore[arg-type]
    changed = {**KEY, part: OTHER[part]}
    assert tuning_key(**KEY) != tuning_key(**changed)  # type: ignore[arg-type]
    assert str(OTHER[part]) in tuning_key(**changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "what", ["platform.system", "platform.release", "dflash2_mlx.tuning.version"]
)
def test_system_and_mlx_are_in_the_key(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    before = tuning_key(**KEY)  # type: ignore[arg-type]
    monkeypatch.setattr(what, lambda *_: "another")
    assert tuning_key(**KEY) != before  # type: ignore[arg-type]


def test_a_cpu_is_known_by_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = {**KEY, "chip": Chip(True, "x86_64", None, "AMD EPYC")}
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    two = tuning_key(**cpu)  # type: ignore[arg-type]
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert two != tuning_key(**cpu)  # type: ignore[arg-type]


def test_what_was_saved_is_loaded(store: Store) -> None:
    assert store.save("pair", known())
    assert store.load("pair") == known()
    assert store.load("another pair") is None


def test_the_file_can_be_read_by_people(store: Store) -> None:
    store.save("pair", known())
    entry = json.loads(store.path.read_text())["pair"]
    assert entry["ms"] == {"1": 10.0, "2": 11.0, "4": 13.0, "8": 27.0}
    assert entry["when"] == "2026-11-29"
    assert entry["measured"] is True


# Files that are damaged, locked, missing


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"pair": 1}', '{"pair": {}}', '{"pair": {"ms": []}}', "\x00"],
)
def test_a_damaged_file_counts_as_unknown_and_is_written_anew(store: Store, content: str) -> None:
    store.path.parent.mkdir()
    store.path.write_text(content)
    assert store.load("pair") is None
    assert not tuning(store).known.measured
    assert store.save("pair", known())
    assert store.load("pair") == known()


DAMAGE = {
    "a pass of no time": ("ms", {"1": 0.0, "2": 1.0}),
    "a negative time": ("ms", {"1": -1.0, "2": 1.0}),
    "an endless time": ("ms", {"1": 1.0, "2": float("inf")}),
    "a time that is no number": ("ms", {"1": float("nan")}),
    "no plain pass": ("ms", {"2": 1.0, "8": 2.0}),
    "a negative slope": ("ms_per_1000_tokens", {"1": -3.0}),
    "no times": ("ms", {}),
    "a width that is no number": ("ms", {"one": 1.0}),
    "no acceptance": ("acceptance", None),
    "too few places": ("acceptance", {k: {"stood": [1.0], "tried": [2.0]} for k in KINDS}),
    "more stood than tried": (
        "acceptance",
        {k: {"stood": [3.0] * 7, "tried": [2.0] * 7} for k in KINDS},
    ),
}


def test_a_kind_that_was_not_told_apart_before_is_unknown_and_the_rest_is_kept(
    store: Store,
) -> None:
    store.save("pair", known())
    content = json.loads(store.path.read_text())
    del content["pair"]["acceptance"]["languages"]
    store.path.write_text(json.dumps(content))
    unknown = Acceptance.unknown(7)
    expected = {**known().acceptance, "languages": unknown}
    assert store.load("pair") == replace(known(), acceptance=expected)


@pytest.mark.parametrize("damage", DAMAGE)
def test_an_entry_that_makes_no_sense_counts_as_unknown(store: Store, damage: str) -> None:
    name, value = DAMAGE[damage]
    store.save("sound", known())
    content = json.loads(store.path.read_text())
    content["pair"] = {**content["sound"], name: value}
    store.path.write_text(json.dumps(content))
    assert store.load("pair") is None
    assert store.load("sound") == known()


def test_a_curve_of_other_widths_is_not_used(store: Store) -> None:
    store.save("pair", known())
    guess = Curve({1: 1.0, 2: 1.1, 4: 1.3})
    assert not Tuning("pair", guess, quantized=False, store=store).known.measured


def test_a_folder_that_cannot_be_written_is_no_fault(tmp_path: Path) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("")
    tuner = tuning(Store(blocked / "tuning.json"))
    assert not tuner.measure(TRUE)
    pilot = tuner.pilot("code")
    answer(pilot, FEW_PASSES)
    tuner.learn(pilot, "code", FEW_PASSES)
    assert tuner.known.measured


WRITER = """
import json, sys
from pathlib import Path
from dflash2_mlx.tuning import Known, Store
path, name, count, entry = sys.argv[1:]
for number in range(int(count)):
    assert Store(Path(path)).save(f"{name}-{number}", Known.from_dict(json.loads(entry)))
"""


def test_writers_at_the_same_time_lose_nothing(store: Store) -> None:
    names, count = ("a", "b", "c"), 8
    entry = json.dumps(known().to_dict())
    command = [sys.executable, "-c", WRITER, str(store.path)]
    writers = [subprocess.Popen([*command, name, str(count), entry]) for name in names]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert set(store.entries()) == {f"{name}-{n}" for name in names for n in range(count)}
    assert {path.name for path in store.path.parent.iterdir()} <= {"tuning.json", "tuning.lock"}


def test_reset_forgets_everything_and_may_be_repeated(store: Store) -> None:
    store.save("pair", known())
    store.reset()
    assert store.load("pair") is None
    store.reset()


# Learning


def test_a_second_process_starts_with_the_block_at_once(store: Store) -> None:
    first = tuning(store)
    pilot = first.pilot("code")
    early = answer(pilot, 30)
    assert set(early[:12]) == {1, 2, 4, 8}
    first.learn(pilot, "code", 30)

    again = tuning(store)
    assert again.known.measured
    assert again.known.when
    assert set(answer(again.pilot("code"), 10)) == {early[-1]}


def test_times_of_this_machine_replace_the_guess(store: Store) -> None:
    first = tuning(store)
    pilot = first.pilot("code")
    answer(pilot, 40)
    first.learn(pilot, "code", 40)
    stored = tuning(store).curve
    assert {w: stored.ms(w, DEPTH) for w in stored.widths} == {
        w: pytest.approx(TRUE.ms(w, DEPTH), rel=0.01) for w in TRUE.widths
    }


def test_a_short_answer_is_remembered_in_the_process_but_not_written(store: Store) -> None:
    tuner = tuning(store)
    pilot = tuner.pilot("code")
    answer(pilot, FEW_PASSES - 1)
    tuner.learn(pilot, "code", FEW_PASSES - 1)
    assert tuner.known.measured
    assert not store.path.exists()


def test_exploring_goes_on_where_a_short_answer_ended(store: Store) -> None:
    tuner = tuning(store)
    pilot = tuner.pilot("code")
    assert answer(pilot, 3) == [1, 1, 2]
    tuner.learn(pilot, "code", 3)
    assert not tuner.known.measured
    assert answer(tuner.pilot("code"), 5) == [2, 4, 4, 8, 8]


def test_code_and_prose_are_learned_apart(store: Store) -> None:
    """P02."""
    tuner = tuning(store)
    tuner.measure(TRUE)
    for kind, stood in (("code", 7), ("prose", 0)):
        pilot = tuner.pilot(kind)  # type: ignore[arg-type]
        answer(pilot, 300, stood)
        tuner.learn(pilot, kind, 300)  # type: ignore[arg-type]
    again = tuning(store)
    assert answer(again.pilot("code"), 3) == [4, 4, 4]
    prose = answer(again.pilot("prose"), 60, stood=0)
    assert set(prose) == {1}


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Fix this:\n```python\nx=1\n```", "code"),
        ("Write a Python function that adds.", "code"),
        ("What does `SELECT * FROM t` do?", "code"),
        ("A train travels 180 km in 3 hours. How fast is it?", "maths"),
        ("Solve 3x + 4 = 10.", "maths"),
        ("What happened in 1969?", "prose"),
        ("Rename the variable x to total in this code:\n\nx = 1", "copy"),
        ("<|im_start|>user\nPlease repeat this text: The mill.", "copy"),
        ("I copy files. Why do waves repeat?", "prose"),
        ("Translate into Spanish: The library opens at nine.", "languages"),
        ("Welche Flüsse fließen durch Österreich?", "languages"),
        ("一列火车3小时行驶180公里", "languages"),
        ("Поезд проходит 180 км за 3 часа.", "languages"),
        ("Schreibe eine Python-Funktion, die überprüft, ob Wörter gleich sind.", "code"),
        ("Was Zoë in the café? " + "We walked along the quiet harbour. " * 20, "prose"),
        ("“Quotes” … and 😀😀 are no letters", "prose"),
        ("Où est né Napoléon?", "languages"),
        ("法国的首都是哪里", "languages"),
        ("Is the translation of this poem good?", "languages"),
        ("A translation moves the point (3, 4) by (1, 2).", "maths"),
        ("Solve x² + 5x + 6 = 0.", "maths"),
        ("Is 20 µm + ½ µm more than 3 µm?", "maths"),
        ("sin θ + cos θ = 1 and 2 π r = 5, so what are θ and π?", "maths"),
        ("A naïve café owner sells 3 coffees for 12 dollars.", "maths"),
        ("Tell me a story about a cat.", "prose"),
        ("", "prose"),
    ],
)
def test_the_kind_of_a_prompt_shows_in_how_it_looks(text: str, kind: str) -> None:
    assert kind_of(text) == kind


def test_of_a_kind_never_seen_what_others_showed_is_expected(store: Store) -> None:
    """Or the first answers of every kind would pay for the same hope."""
    tuner = tuning(store)
    tuner.measure(TRUE)
    assert tuner.known.expected("maths").rates == [PRIOR_RATE] * 7
    in_vain = sum(width > 1 for width in answer(tuner.pilot("maths"), 40, stood=0))
    pilot = tuner.pilot("prose")
    answer(pilot, 60, stood=0)
    tuner.learn(pilot, "prose", 60)
    assert tuner.known.expected("maths").rates == [tuner.known.expected("prose").prior] * 7
    assert sum(width > 1 for width in answer(tuner.pilot("maths"), 40, stood=0)) <= in_vain / 2


def test_what_a_kind_showed_itself_counts_before_what_others_did(store: Store) -> None:
    poor = {kind: Acceptance([1.0] * 7, [40.0] * 7) for kind in KINDS}
    good = {**poor, "code": Acceptance([30.0] * 7, [40.0] * 7)}
    store.save("pair", Known(TRUE, good, measured=True))
    assert tuning(store).pilot("code").choose(DEPTH) > 1
    assert tuning(store).pilot("maths").choose(DEPTH) == 1


def test_a_poor_end_of_an_answer_does_not_park_the_next_one(store: Store) -> None:
    store.save("pair", known())
    tuner = tuning(store)
    pilot = tuner.pilot("prose")
    assert answer(pilot, 80)[-1] == 4
    assert 1 in answer(pilot, 100, stood=0)
    tuner.learn(pilot, "prose", 180)
    assert tuner.pilot("prose").choose(DEPTH) > 1


def test_answers_that_are_all_poor_park_the_next_one(store: Store) -> None:
    store.save("pair", known())
    tuner = tuning(store)
    for _ in range(20):
        pilot = tuner.pilot("prose")
        answer(pilot, 60, stood=0)
        tuner.learn(pilot, "prose", 60)
    assert tuner.pilot("prose").choose(DEPTH) == 1


def test_short_answers_of_a_parked_pair_are_probed_now_and_then(store: Store) -> None:
    poor = {kind: Acceptance([1.0] * 7, [40.0] * 7) for kind in KINDS}
    store.save("pair", Known(TRUE, poor, measured=True))
    tuner = tuning(store)
    widths = []
    for _ in range(40):
        pilot = tuner.pilot("prose")
        widths += answer(pilot, 20, stood=0)
        tuner.learn(pilot, "prose", 20)
    drafted = [place for place, width in enumerate(widths) if width > 1]
    assert len(drafted) >= 3
    assert len(drafted) < 0.02 * len(widths)
    # A text whose drafts stand is found out although no answer is as long as the wait for a probe.
    for _ in range(60):
        pilot = tuner.pilot("prose")
        found = answer(pilot, 20)
        tuner.learn(pilot, "prose", 20)
    assert found[-1] == 4


def test_a_measured_curve_is_taken_over_at_once_and_kept(store: Store) -> None:
    tuner = tuning(store)
    assert tuner.measure(TRUE)
    assert tuner.curve == TRUE
    assert tuning(store).curve == TRUE
    assert set(answer(tuner.pilot("code"), 5)) == {4}


# What is said at the start


def test_a_new_pair_says_that_it_will_be_timed(store: Store) -> None:
    assert tuning(store).first_block() == (4, "auto: every width is timed first")


def test_a_measured_pair_says_its_block_and_since_when(store: Store) -> None:
    store.save("pair", known())
    assert tuning(store).first_block() == (4, "auto: from block 4, by times of 2026-11-29")


def test_a_pair_that_loses_says_so_with_numbers(store: Store) -> None:
    """P12."""
    losing = Curve({1: 10.0, 2: 22.0, 4: 44.0, 8: 90.0})
    store.save("pair", Known(losing, known().acceptance, measured=True, when="2026-11-29"))
    block, reason = tuning(store).first_block()
    assert block == 2
    assert reason == (
        "auto: parked: drafting would run at 0.80x of plain decoding (block 2), "
        "by times of 2026-11-29; a rare probe looks again"
    )


def test_a_quantized_pair_keeps_its_cap(store: Store) -> None:
    """P01."""
    tuner = Tuning("pair", Curve({1: 1.0, 5: 1.4, 8: 1.5}), quantized=True, store=store)
    assert tuner.known.cap == 5
    assert tuner.first_block()[0] == 5
    tuner.measure(Curve({1: 10.0, 5: 14.0, 8: 15.0}))
    assert tuner.pilot("code").choose(DEPTH) == 8
