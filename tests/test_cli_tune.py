"""`tune` shows what was measured and what follows from it; `doctor` says it in words."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_pair
from typer.testing import CliRunner, Result

from dflash2_mlx import measure as measuring
from dflash2_mlx.chip import this_chip
from dflash2_mlx.cli.app import app
from dflash2_mlx.curve import Curve
from dflash2_mlx.errors import DFlashError
from dflash2_mlx.measure import Measurement, Parts
from dflash2_mlx.pair import Pair
from dflash2_mlx.tuner import Acceptance
from dflash2_mlx.tuning import KINDS, Known, Store, Tuning, tuning_key

GUESS = Curve({1: 1.0, 2: 1.1, 4: 1.3, 8: 2.7})
TRUE = Curve({1: 10.0, 2: 11.0, 4: 13.0, 8: 27.0}, {1: 0.1, 2: 0.2, 4: 0.4, 8: 1.6})
LOSING = Curve({1: 10.0, 2: 22.0, 4: 44.0, 8: 90.0})


def measurement(curve: Curve = TRUE) -> Measurement:
    depths = (128, 1024)
    ms = {depth: {w: curve.ms(w, depth) for w in curve.widths} for depth in depths}
    parts = {depth: {w: Parts(0.5 * w, 0.25) for w in curve.widths} for depth in depths}
    return Measurement(curve, ms, parts, spread=1.01, passes=96, seconds=8.5)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("DFLASH2_MLX_CACHE", str(tmp_path))
    return Store()


@pytest.fixture
def pair(store: Store) -> Pair:
    pair = tiny_pair()
    key = tuning_key(this_chip(), "tiny folder", "tiny drafter", "32-bit float32")
    pair.tuning = Tuning(key, GUESS, quantized=False, store=store)
    return pair


@pytest.fixture
def tune(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("dflash2_mlx.pair.load_pair", lambda *_, **__: pair)
    monkeypatch.setattr(measuring, "check_idle", lambda: None)
    monkeypatch.setattr(measuring, "measure", lambda *_: measurement())

    def tune(*options: str) -> Result:
        return CliRunner().invoke(app, ["tune", *options])

    return tune


def test_the_curve_is_shown_with_bars_and_the_block_for_each_depth(tune: Any) -> None:
    result = tune("--model", "tiny")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "behind 128 tokens" in result.stdout
    assert "behind 1024 tokens" in result.stdout
    widest = next(line for line in lines if line.split()[:4] == ["8", "27.2", "4.0", "0.2"])
    chosen = next(line for line in lines if line.split()[:2] == ["4", "13.1"])
    assert widest.count("█") > chosen.count("█") > 3
    assert (widest.count("◂"), chosen.count("◂")) == (0, 5)
    rows = [line for line in lines if "█" in line]
    assert max(map(len, rows)) <= 80
    assert len({tuple(dot.start() for dot in re.finditer(r"\.", row)) for row in rows}) == 1
    assert lines.count("code: block 4, expected 1.94x of plain decoding") == 1


def test_json_has_the_numbers(tune: Any, pair: Pair) -> None:
    report = json.loads(tune("--model", "tiny", "--json").stdout)
    assert report["key"] == pair.tuning.key
    assert [at["depth"] for at in report["depths"]] == [128, 1024]
    first = report["depths"][0]
    assert first["ms"]["4"] == pytest.approx(TRUE.ms(4, 128))
    assert first["parts"]["4"] == {"draft_ms": 2.0, "host_ms": 0.25}
    assert [row["width"] for row in first["expected"]] == [1, 2, 4, 8]
    assert first["expected"][2]["tokens_per_s"]["code"] == pytest.approx(
        1000 * first["expected"][2]["tokens"]["code"] / TRUE.ms(4, 128)
    )
    assert {d["kind"]: d["block"] for d in first["decisions"]} == dict.fromkeys(KINDS, 4)


def test_what_was_measured_is_kept(tune: Any, pair: Pair, store: Store) -> None:
    assert tune("--model", "tiny").exit_code == 0
    assert store.load(pair.tuning.key).curve == TRUE
    assert store.load(pair.tuning.key).measured


def test_a_busy_machine_keeps_what_was_known(
    tune: Any, pair: Pair, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.tuning.measure(LOSING)

    def busy(*_: object) -> None:
        raise DFlashError("the machine is busy")

    monkeypatch.setattr(measuring, "check_idle", busy)
    result = tune("--model", "tiny", "--reset")
    assert isinstance(result.exception, DFlashError)
    assert store.load(pair.tuning.key).curve == LOSING


def test_reset_with_a_model_forgets_what_its_answers_taught(
    tune: Any, pair: Pair, store: Store
) -> None:
    learned = {kind: Acceptance([1.0] * 7, [30.0] * 7) for kind in KINDS}
    store.save("another", Known(TRUE, learned, measured=True))
    pair.tuning.known = Known(TRUE, learned, measured=True)
    assert tune("--model", "tiny", "--reset").exit_code == 0
    assert store.load(pair.tuning.key).acceptance["code"] == Acceptance.unknown(7)
    assert store.load("another").acceptance == learned


def test_reset_without_a_model_forgets_everything(tune: Any, pair: Pair, store: Store) -> None:
    pair.tuning.measure(TRUE)
    result = tune("--reset")
    assert result.exit_code == 0
    assert result.stdout == ""
    assert not store.path.exists()
    assert json.loads(tune("--reset", "--json").stdout) == {"forgotten": str(store.path)}


def test_a_model_or_a_reset_is_needed(tune: Any) -> None:
    result = tune()
    assert result.exit_code == 2
    assert "expected a model to time" in result.stderr


def test_a_file_that_cannot_be_written_is_said(tune: Any, pair: Pair, tmp_path: Path) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("")
    pair.tuning.store = Store(blocked / "tuning.json")
    result = tune("--model", "tiny")
    assert result.exit_code == 0
    assert "the times hold for this run only" in result.stderr


# The doctor


def doctor(*options: str) -> str:
    result = CliRunner().invoke(app, ["doctor", *options])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash2_mlx.selftest.run", lambda: [("greedy", True, "12 of 12")])


@pytest.mark.usefixtures("healthy")
def test_doctor_says_what_was_decided_and_why(pair: Pair, store: Store) -> None:
    learned = {kind: Acceptance([20.0] * 7, [30.0] * 7) for kind in KINDS}
    entry = Known(
        LOSING, {**learned, "code": Acceptance([0.0] * 7, [30.0] * 7)}, True, "2026-11-29"
    )
    store.save(pair.tuning.key, entry)
    line = next(line for line in doctor().splitlines() if line.startswith("tuning"))
    assert line == (
        "tuning           tiny folder with tiny drafter (32-bit float32), behind 1000 tokens: "
        "code: parked: drafting would run at 0.46x of plain decoding (block 2); "
        "maths: parked: drafting would run at 0.76x of plain decoding (block 2); "
        "copy: parked: drafting would run at 0.76x of plain decoding (block 2); "
        "languages: parked: drafting would run at 0.76x of plain decoding (block 2); "
        "prose: parked: drafting would run at 0.76x of plain decoding (block 2); "
        "grammar: parked: drafting would run at 0.76x of plain decoding (block 2); "
        "by times of 2026-11-29"
    )
    (told,) = json.loads(doctor("--json"))["tuning"]
    assert told["key"] == pair.tuning.key
    assert told["decisions"][0]["block"] == 1


@pytest.mark.usefixtures("healthy")
def test_doctor_leaves_out_other_machines_and_damaged_entries(pair: Pair, store: Store) -> None:
    known = Known(TRUE, {kind: Acceptance.unknown(7) for kind in KINDS}, measured=True)
    store.save("another chip | Darwin 25 | mlx 1 | a | b | c", known)
    store.save(pair.tuning.key, known)
    content = json.loads(store.path.read_text())
    content[pair.tuning.key]["ms"] = {}
    store.path.write_text(json.dumps(content))
    assert json.loads(doctor("--json"))["tuning"] == []
