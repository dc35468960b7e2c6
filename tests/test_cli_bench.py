"""`bench` hands every option on, and shows what the report says."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from test_bench import plain_mlx_lm, tuned
from tiny import pair_of, tiny_target
from typer.testing import CliRunner, Result

from dflash2_mlx import bench as running
from dflash2_mlx import reference
from dflash2_mlx.bench import REFERENCE, Answer, Contender, Pass
from dflash2_mlx.cli.app import app
from dflash2_mlx.curve import Curve
from dflash2_mlx.errors import DFlashError, InvalidRequest
from dflash2_mlx.pair import Pair
from dflash2_mlx.target import Target

__all__ = ["plain_mlx_lm"]  # a fixture of every test here

QUICK = (
    "--max-tokens",
    "4",
    "--prompts",
    "1",
    "--repeats",
    "1",
    "--blocks",
    "2",
    "--kinds",
    "code",
)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return tuned(tmp_path)


@pytest.fixture
def bench(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("dflash2_mlx.pair.load_pair", lambda *_, **__: pair)

    def bench(*options: str) -> Result:
        return CliRunner().invoke(app, ["bench", "--model", "tiny", *QUICK, *options])

    return bench


def test_json_has_setting_prompts_figures_and_verdict(bench: Any) -> None:
    result = bench("--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert set(report) == {
        "title",
        "setting",
        "prompts",
        "kinds",
        "invalid_kinds",
        "verdict",
        "differences",
        "decisions",
        "remarks",
    }
    assert "; 1 prompt of " in report["title"]
    assert report["title"].endswith(", greedy, 1 repeat")
    assert list(report["kinds"]) == ["code", "all"]
    assert list(report["kinds"]["code"]) == ["mlx-lm", "plain", "block 2", "auto"]
    assert set(report["kinds"]["code"]["auto"]) == {
        "decode_tokens_per_s",
        "rates",
        "spread",
        "speedup",
        "ttft_s",
        "tokens_per_pass",
        "passes_per_s",
        "histogram",
        "accepted_by_place",
        "equal",
        "prompts",
        "peak_memory_bytes",
    }
    assert report["verdict"]["code"]["of_plain"] > 0


def test_the_text_has_a_line_for_everybody_and_what_follows(bench: Any) -> None:
    lines = bench().stdout.splitlines()
    assert lines[0].startswith("tiny (32-bit) with tiny (32-bit); ")
    assert [line.split("  ")[0] for line in lines if line.startswith("block 2 ")] == ["block 2"] * 2
    assert any(line.startswith("auto against the best fixed block: at least ") for line in lines)
    assert any("x (code)" in line for line in lines)


def test_a_first_benchmark_says_that_auto_had_to_learn(bench: Any, pair: Pair) -> None:
    assert "auto had no times of this pair before" in bench().stdout
    pair.tuning.measure(Curve({1: 1.0, 2: 1.1, 4: 1.3, 8: 2.7}))
    assert "auto had no times of this pair before" not in bench().stdout


def test_options_reach_the_benchmark(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """L04."""
    asked: dict[str, Any] = {}
    real = running.alternate

    def alternate(entrants: Any, tasks: Any, **options: Any) -> Any:
        asked.update(options, tasks=tasks, names=[entrant.name for entrant in entrants])
        return real(entrants, tasks, **options)

    monkeypatch.setattr(running, "alternate", alternate)
    options = ("--kinds", "chat,prose", "--prompts", "2", "--blocks", "3,5", "--max-tokens", "3")
    assert bench(*options, "--repeats", "2").exit_code == 0
    assert [task.kind for task in asked["tasks"]] == ["chat", "chat", "prose", "prose"]
    assert asked["names"] == ["mlx-lm", "plain", "block 3", "block 5", "auto"]
    assert (asked["max_tokens"], asked["repeats"]) == (3, 2)


def test_no_block_at_all_leaves_plain_decoding_and_auto(bench: Any) -> None:
    report = json.loads(bench("--json", "--blocks", "none").stdout)
    assert list(report["kinds"]["code"]) == ["mlx-lm", "plain", "auto"]
    ratios = report["verdict"]["code"]
    assert ratios["of_best_block"] == ratios["of_plain"]
    assert not any("fixed block" in remark for remark in report["remarks"])


@pytest.mark.parametrize("text", ["x", "2,,3", "", "2.5", "none,2"])
def test_blocks_that_are_no_numbers_are_wrong_usage(bench: Any, text: str) -> None:
    result = bench("--blocks", text)
    assert result.exit_code == 2
    assert "--blocks" in result.stderr


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [("--kinds", "poems", "kind is 'poems'"), ("--blocks", "2,65", "block size is 65")],
)
def test_what_cannot_be_run_is_refused_before_a_model_is_loaded(
    bench: Any, monkeypatch: pytest.MonkeyPatch, option: str, value: str, told: str
) -> None:
    monkeypatch.setattr("dflash2_mlx.pair.load_pair", None)
    refused = bench(option, value).exception
    assert isinstance(refused, InvalidRequest)
    assert told in str(refused)


# --reference


class FakeReference:
    block = 8
    ended = False

    def __enter__(self) -> "FakeReference":
        return self

    def __exit__(self, *_: object) -> None:
        self.ended = True

    @property
    def contender(self) -> Contender:
        answer = Answer((1, 2), (Pass(1, 0, 0), Pass(1, 7, 0)), 0.1, 0.1, 0)
        return Contender(REFERENCE, lambda *_: iter([answer]))


def test_the_reference_is_one_of_those_that_take_turns(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, asked = FakeReference(), []
    monkeypatch.setattr("dflash2_mlx.fetch.target_folder", lambda name: Path("target", name))
    monkeypatch.setattr("dflash2_mlx.fetch.drafter_folder", lambda name: Path("drafter", name))
    monkeypatch.setattr(reference, "start", lambda *args: asked.append(args) or worker)
    result = bench("--reference", "--json")
    assert result.exit_code == 0, result.output
    assert asked[0][1:3] == (Path("target/tiny"), Path("drafter/tiny"))
    report = json.loads(result.stdout)
    assert list(report["kinds"]["code"])[-1] == "dflash 0.1.0"
    assert report["differences"]["dflash 0.1.0"][0]["index"] == 0
    assert worker.ended


def test_a_reference_without_a_drafter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "dflash2_mlx.pair.load_pair", lambda *_, **__: pair_of(Target(tiny_target()))
    )
    result = CliRunner().invoke(app, ["bench", "--model", "tiny", *QUICK, "--reference"])
    assert isinstance(result.exception, InvalidRequest)
    assert str(result.exception) == "--reference needs a drafter: no drafter was named"


# --plot


def test_the_picture_is_drawn(bench: Any, tmp_path: Path) -> None:
    result = bench("--plot", str(tmp_path / "speed.png"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
    assert f"drawn: {tmp_path / 'speed.png'}" in result.stderr


@pytest.mark.parametrize(
    ("name", "told"), [("speed.txt", "is no picture"), ("none/speed.png", "is not there")]
)
def test_a_picture_that_could_not_be_written_is_refused_first(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, told: str
) -> None:
    monkeypatch.setattr("dflash2_mlx.pair.load_pair", None)
    error = bench("--plot", str(tmp_path / name)).exception
    assert isinstance(error, InvalidRequest)
    assert told in str(error)


def test_without_matplotlib_one_line_says_how_to_get_it(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    error = bench("--plot", str(tmp_path / "speed.png")).exception
    assert type(error) is DFlashError
    assert str(error) == (
        "--plot needs matplotlib, which is not installed; pip install 'dflash2-mlx[plot]'"
    )
