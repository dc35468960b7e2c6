"""`doctor` tells what is here, and fails when the engine does not work."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import pair_of, tiny_target
from typer.testing import CliRunner, Result

from dflash2_mlx.budget import plan_memory, remember_plan
from dflash2_mlx.cli.app import app
from dflash2_mlx.errors import DFlashError
from dflash2_mlx.exactness import measure, save
from dflash2_mlx.machine import this_machine
from dflash2_mlx.target import Target

PAIR = pair_of(Target(tiny_target()))
GOOD = ("greedy", True, "12 of 12 tokens equal")
BAD = ("rewind", False, "3 of 12 tokens equal")


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch) -> Any:
    def doctor(checks: Any, *options: str) -> Result:
        selftest = SimpleNamespace(run=checks if callable(checks) else lambda: checks)
        monkeypatch.setitem(sys.modules, "dflash2_mlx.selftest", selftest)
        monkeypatch.setattr("dflash2_mlx.selftest", selftest, raising=False)
        return CliRunner().invoke(app, ["doctor", *options])

    return doctor


def test_a_machine_where_all_works_is_exit_code_0(doctor: Any) -> None:
    result = doctor([GOOD])
    assert result.exit_code == 0
    assert "ok      greedy: 12 of 12 tokens equal\n" in result.stdout


def test_a_failed_check_is_exit_code_1_and_named(doctor: Any) -> None:
    result = doctor([GOOD, BAD])
    assert isinstance(result.exception, DFlashError)
    assert "self-test failed: rewind" in str(result.exception)
    assert "FAILED  rewind: 3 of 12 tokens equal\n" in result.stdout


def test_an_engine_that_cannot_start_is_a_failed_check(doctor: Any) -> None:
    def run() -> None:
        raise ImportError("no module named mlx")

    result = doctor(run)
    assert isinstance(result.exception, DFlashError)
    assert "FAILED  start: ImportError: no module named mlx\n" in result.stdout


def test_what_was_measured_here_is_shown(
    doctor: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DFLASH2_MLX_CACHE", str(tmp_path))
    assert json.loads(doctor([GOOD], "--json").stdout)["exactness"] == []
    save(measure(PAIR), PAIR)
    line = "tiny (float32): rows keep their bits in blocks of 1"
    assert f"exactness        {line}" in doctor([GOOD]).stdout
    (known,) = json.loads(doctor([GOOD], "--json").stdout)["exactness"]
    assert known["target"] == "tiny"
    assert 1 in known["equal_widths"]
    assert known["logits_deviation"] < 1e-3


def test_json_is_one_object_with_all_that_a_report_needs(doctor: Any) -> None:
    result = doctor([GOOD, BAD], "--json")
    report = json.loads(result.stdout)
    assert report["ok"] is False
    assert report["checks"][1] == dict(zip(("name", "ok", "detail"), BAD, strict=True))
    assert report["packages"]["mlx"]
    assert report["memory_bytes"] > 0
    assert set(report["blas"]) == {"in_force", "reason"}
    assert {"platform", "macos", "python", "chip", "cache"} <= set(report)


def test_the_text_names_the_versions_and_the_blas(doctor: Any) -> None:
    names = [line.split()[0] for line in doctor([GOOD]).stdout.splitlines()]
    assert {"platform", "chip", "mlx", "mlx-lm", "transformers", "BLAS", "cache"} <= set(names)


def test_what_memory_is_for_is_shown(
    doctor: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DFLASH2_MLX_CACHE", str(tmp_path))
    weights = {"small": 2**30, "huge": 2**50}
    monkeypatch.setattr("dflash2_mlx.machine.known_weights", lambda: weights)
    pair = pair_of(Target(tiny_target()), context_limit=1000)
    plan = plan_memory(pair)
    remember_plan(pair, plan)
    memory = json.loads(doctor([GOOD], "--json").stdout)["memory"]
    assert memory["limit_bytes"] == this_machine().limit_bytes
    assert memory["plans"]["tiny"]["context_tokens"] == 1000
    shown = doctor([GOOD]).stdout
    assert "may be used" in shown
    assert "huge: weights 1048576.0 GiB, does not fit\n" in shown
    assert f"memory plan      tiny: {plan.describe()}\n" in shown
