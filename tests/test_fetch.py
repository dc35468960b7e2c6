"""Any spec leads to a complete local folder or to one line that says why not."""

import json
import os
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from gguf_writer import model_metadata, model_tensors, write_gguf
from huggingface_hub import constants, errors
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS
from test_gguf import CONFIG
from tiny import build_model

from dflash2_mlx import fetch, hub
from dflash2_mlx.errors import BadCheckpoint, DFlashError, DownloadFailed, ModelNotFound
from dflash2_mlx.fetch import cached_folder, drafter_folder, target_folder, target_source

SHA = "3e6447f082e89cc7f0bc6e5441afd38dfce760ff"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Both caches, empty; asking the hub for anything fails the test unless it is faked."""
    monkeypatch.setenv("DFLASH2_MLX_CACHE", str(tmp_path / "ours"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked"))
    return tmp_path / "hub"


def model_folder(folder: Path, *shards: str, lost: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    if shards:
        index = {"weight_map": {f"tensor.{i}": shard for i, shard in enumerate(shards)}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in shards or ("model.safetensors",):
        if name != lost:
            (folder / name).touch()
    return folder


def snapshot(
    cache: Path, repo: str, commit: str = SHA, ref: str | None = None, **lost: str
) -> Path:
    root = cache / f"models--{repo.replace('/', '--')}"
    if ref:
        (root / "refs").mkdir(parents=True)
        (root / "refs" / ref).write_text(commit)
    return model_folder(root / "snapshots" / commit, "a.safetensors", "b.safetensors", **lost)


class FakeHub:
    """Stands in for `snapshot_download`; remembers what it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Path | Exception) -> None:
        self.answer = answer
        self.asked: list[dict[str, Any]] = []
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self)

    def __call__(self, repo: str, **options: Any) -> str:
        self.asked.append({"repo": repo, **options})
        if isinstance(self.answer, Exception):
            raise self.answer
        return str(self.answer)


def http_error(kind: type[errors.HfHubHTTPError]) -> errors.HfHubHTTPError:
    import httpx2

    request = httpx2.Request("GET", "https://hub.invalid")
    return kind("line one\nline two", response=httpx2.Response(404, request=request))


def test_a_folder_is_used_as_it_is(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "mine")
    assert target_folder(str(folder)) == drafter_folder(str(folder)) == folder
    assert cached_folder(str(folder)) == folder


def test_a_folder_may_be_relative_in_the_home_or_behind_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder(tmp_path / "owner" / "name", "a.safetensors")
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for spec in ("owner/name", "./owner/name", "~/owner/name", "link", "~/link"):
        assert target_folder(spec) == folder


@pytest.mark.parametrize(
    ("lost", "seen"),
    [("config.json", "config.json"), ("model.safetensors", "model.safetensors")],
)
def test_an_incomplete_folder_is_refused(tmp_path: Path, lost: str, seen: str) -> None:
    folder = model_folder(tmp_path / "mine")
    (folder / lost).unlink()
    assert cached_folder(str(folder)) is None
    with pytest.raises(BadCheckpoint, match=rf"^mine: files are missing in .*: {seen};"):
        target_folder(str(folder))


def test_missing_shards_are_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "mine", "1.safetensors", "2.safetensors", "3.safetensors")
    (folder / "2.safetensors").unlink()
    (folder / "3.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match=r"2\.safetensors and 1 more;"):
        target_folder(str(folder))
    (folder / "model.safetensors.index.json").write_text("[")
    with pytest.raises(BadCheckpoint, match=r"readable model\.safetensors\.index\.json"):
        target_folder(str(folder))


@pytest.mark.parametrize(
    "spec", ["smollm", "/no/such/folder", "./owner/name", "~nobody/x", "a/b/c", "a/b@", "x\0y", ""]
)
def test_an_unknown_spec_is_refused(spec: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for find in (target_folder, drafter_folder, cached_folder):
        with pytest.raises(ModelNotFound, match=r"^'.*' is not a known model"):
            find(spec)


@pytest.mark.parametrize(
    ("spec", "repo", "revision"),
    [
        ("owner/name", "owner/name", None),
        ("owner/Name-1.5_b@main", "owner/Name-1.5_b", "main"),
        (f"o/n@{SHA}", "o/n", SHA),
        ("o/n@refs/pr/1", "o/n", "refs/pr/1"),
        ("qwen3.8-27b-4bit", "mlx-community/Qwen3.8-27B-4bit", SHA),
    ],
)
def test_hub_ids_carry_their_revision(spec: str, repo: str, revision: str | None) -> None:
    assert target_source(spec) == hub.Hub(repo, revision)


@pytest.mark.parametrize(("ref", "revision"), [(None, f"@{SHA}"), ("main", ""), ("v1", "@v1")])
def test_a_cached_snapshot_makes_no_request(
    cache: Path, monkeypatch: pytest.MonkeyPatch, ref: str | None, revision: str
) -> None:
    folder = snapshot(cache, "owner/name", ref=ref)
    fake = FakeHub(monkeypatch, folder)
    assert cached_folder(f"owner/name{revision}") == folder
    assert target_folder(f"owner/name{revision}") == folder
    assert [asked["local_files_only"] for asked in fake.asked] == [True]


def test_another_revision_is_not_taken_for_the_one_asked(cache: Path) -> None:
    snapshot(cache, "owner/name", ref="main")
    assert cached_folder("owner/name@v2") is None
    assert cached_folder(f"owner/name@{'0' * 40}") is None


def test_an_interrupted_download_is_taken_up_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = snapshot(cache, "owner/name", ref="main", lost="b.safetensors")
    assert cached_folder("owner/name") is None

    class Completing(FakeHub):
        def __call__(self, repo: str, **options: Any) -> str:
            (folder / "b.safetensors").touch()
            return super().__call__(repo, **options)

    fake = Completing(monkeypatch, folder)
    assert target_folder("owner/name") == folder
    assert [asked.get("local_files_only", False) for asked in fake.asked] == [False]


def test_a_repository_without_all_its_shards_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeHub(monkeypatch, snapshot(cache, "owner/name", ref="main", lost="b.safetensors"))
    with pytest.raises(BadCheckpoint, match=r"^owner/name: files are missing in .* b\.safetensors"):
        target_folder("owner/name")


def test_code_is_never_fetched(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeHub(monkeypatch, snapshot(cache, "owner/name"))
    target_folder("owner/name@v3")
    assert fake.asked[0]["revision"] == "v3"
    assert set(fake.asked[0]["allow_patterns"]) == set(DEFAULT_ALLOW_PATTERNS) - {"*.py"}


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (http_error(errors.RepositoryNotFoundError), ModelNotFound, "is not on the hub"),
        (http_error(errors.GatedRepoError), DownloadFailed, "is gated; accept its terms"),
        (http_error(errors.RevisionNotFoundError), ModelNotFound, "has no revision v9"),
        (errors.HFValidationError("bad"), ModelNotFound, "is not on the hub"),
        (http_error(errors.HfHubHTTPError), DownloadFailed, r"HfHubHTTPError: line one\)"),
        (OSError(28, "No space left on device"), DownloadFailed, "No space left on device"),
        (RuntimeError(""), DownloadFailed, "RuntimeError: RuntimeError"),
    ],
)
def test_what_the_hub_says_becomes_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[DFlashError], words: str
) -> None:
    FakeHub(monkeypatch, error)
    with pytest.raises(kind, match=words) as report:
        target_folder("owner/name@v9")
    assert "owner/name" in str(report.value)
    assert "\n" not in str(report.value)


def test_offline_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    FakeHub(monkeypatch, errors.LocalEntryNotFoundError("not here"))
    with pytest.raises(DownloadFailed, match=r"HF_HUB_OFFLINE is set; .*pull owner/name'$"):
        target_folder("owner/name")


def test_the_real_library_finds_what_is_cached(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    folder = snapshot(cache, "owner/name", ref="main")
    assert target_folder("owner/name") == folder
    assert target_folder(f"owner/name@{SHA}") == folder


def test_bytes_on_disk_are_reported_and_nothing_else(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Reporting(FakeHub):
        def __call__(self, repo: str, *, tqdm_class: Any, **options: Any) -> str:
            for unit, desc in (
                ("B", "Reconstructing"),
                ("B", "Downloading bytes"),
                ("it", "Files"),
            ):
                with tqdm_class(total=10, unit=unit, desc=desc, mininterval=0) as bar:
                    bar.update(10)
            return super().__call__(repo, **options)

    Reporting(monkeypatch, snapshot(cache, "owner/name"))
    heard: list[tuple[str, int, int | None]] = []
    target_folder("owner/name", progress=lambda *report: heard.append(report))
    assert heard[-1] == ("owner/name", 10, 10)
    assert set(heard) <= {("owner/name", 0, 10), ("owner/name", 10, 10)}
    assert capfd.readouterr() == ("", "")


def test_the_embedded_drafter_is_package_data() -> None:
    folder = Path(str(fetch.drafter_source("smollm2-135m")))
    assert folder.name == "demo_drafter"
    assert (folder / "LICENSE").is_file()


def test_a_gguf_file_is_imported_once_for_each_version(tmp_path: Path) -> None:
    tensors = model_tensors(build_model("llama", CONFIG), "Q8_0")
    gguf = write_gguf(tmp_path / "tiny.gguf", model_metadata("llama", CONFIG), tensors)
    assert cached_folder(str(gguf)) is None
    folder = target_folder(str(gguf))
    assert folder.parent == tmp_path / "ours" / "targets"
    assert cached_folder(str(gguf)) == folder
    made = (folder / "config.json").stat().st_mtime_ns
    assert target_folder(str(gguf)) == folder
    assert (folder / "config.json").stat().st_mtime_ns == made
    os.utime(gguf, (1, 1))
    assert target_folder(str(gguf)) != folder
