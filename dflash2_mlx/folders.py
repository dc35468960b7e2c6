"""Model folders on disk: whether one is complete, and the ones this program makes itself."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from dflash2_mlx.errors import BadCheckpoint


class Progress(Protocol):
    """Hears how far a download or a conversion is."""

    def __call__(self, label: str, done: int, total: int | None) -> None:
        """`done` of `total` bytes; `total` is None while it is unknown."""


def check_complete(folder: Path, what: str) -> Path:
    """Returns `folder` if it holds a config and every weight file its index names.

    Raises:
        BadCheckpoint: something is missing; `what` is the model the user asked for.
    """
    if lacking := missing_files(folder):
        others = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise BadCheckpoint(
            f"{what}: files are missing in {folder}: {lacking[0]}{others}; "
            "expected config.json and all weights in mlx-lm's format, copy or fetch them again"
        )
    return folder


def missing_files(folder: Path) -> list[str]:
    """The files that a model folder should have and has not."""
    expected = ["config.json", *_weight_files(folder)]
    return [name for name in expected if not (folder / name).is_file()]


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one when there is none, or none that can be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write_object(path: Path, content: dict[str, Any]) -> None:
    """Put a JSON object into a file, whole or not at all; the folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _weight_files(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            return sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            return [f"readable {index.name}"]
    found = sorted(path.name for path in folder.glob("model*.safetensors"))
    return found or ["model.safetensors"]


def origin_of(folder: Path) -> dict[str, Any]:
    """What tells one version of a model folder from another."""
    folder = folder.resolve()
    files = [folder / "config.json", *sorted(folder.glob("model*.safetensors"))]
    stats = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
    return {"folder": str(folder), "files": stats}


def revision_of(folder: Path) -> str:
    """The commit of a folder that came from the hub; of others a digest of what they hold."""
    is_snapshot = folder.parent.name == "snapshots"
    return folder.name[:12] if is_snapshot else digest_of(origin_of(folder))


def digest_of(content: dict[str, Any]) -> str:
    """12 hexadecimal digits that change with the content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def cache_root() -> Path:
    """The folder for what this program makes: DFLASH2_MLX_CACHE, or the user's cache folder."""
    if root := os.environ.get("DFLASH2_MLX_CACHE"):
        return Path(root).expanduser()
    import platformdirs

    return platformdirs.user_cache_path("dflash2-mlx")


def built(name: str, kind: str = "targets") -> Path | None:
    """The folder `KIND/NAME` of the cache, or None when it has not been made yet."""
    folder = cache_root() / kind / name
    return None if missing_files(folder) else folder


def build_once(
    name: str,
    make: Callable[[Path, Path], None],
    progress: Progress | None,
    kind: str = "targets",
) -> Path:
    """The folder `KIND/NAME` of the cache, made now if it is not there.

    `make(folder, scratch)` fills `folder` and may use `scratch`. Both are thrown away when it fails
    or is interrupted; only a complete folder gets its name. Other processes wait meanwhile.
    """
    from filelock import FileLock, Timeout

    final = cache_root() / kind / name
    final.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(final.with_name(f".{name}.lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        if progress:
            progress(f"waiting for another process to make {name}", 0, None)
        lock.acquire()
    try:
        if built(name, kind) is None:
            _build(final, make)
    finally:
        lock.release()
    return final


def _build(final: Path, make: Callable[[Path, Path], None]) -> None:
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # what a killed process left
    folder, scratch = partial / "folder", partial / "scratch"
    try:
        folder.mkdir(parents=True)
        scratch.mkdir()
        make(folder, scratch)
        shutil.rmtree(final, ignore_errors=True)
        folder.rename(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def first_line(error: BaseException) -> str:
    """What an error says, cut to one line."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
