"""Where models are: a catalogue name, a hub id or a path becomes a local folder.

    target_folder("smollm2-135m")              the catalogue's target
    drafter_folder("smollm2-135m")             the catalogue's drafter for it
    target_folder("owner/name@revision")       a repository on the model hub
    target_folder("~/models/mine")             a folder, or a GGUF file of the llama family

What is on disk is used as it is and without the network. Hub downloads are kept in the hub's own
cache; converted targets in `cache_root()`, which the environment variable DFLASH2_MLX_CACHE moves.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Protocol

from dflash2_mlx.catalogue import Entry, load_catalogue, unknown_model
from dflash2_mlx.folders import (
    Progress,
    build_once,
    built,
    cache_root,
    check_complete,
    missing_files,
)
from dflash2_mlx.gguf import import_gguf
from dflash2_mlx.hub import Hub
from dflash2_mlx.wheel import Wheel

__all__ = [
    "Progress",
    "Source",
    "cache_root",
    "cached_folder",
    "drafter_folder",
    "drafter_source",
    "target_folder",
    "target_source",
]

_HUB_ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII)


class Source(Protocol):
    """One place that a checkpoint can come from; `str` names it for the user."""

    def cached(self) -> Path | None:
        """The local folder if nothing has to be fetched or converted for it."""

    def fetch(self, progress: Progress | None = None) -> Path:
        """The local folder, fetched or converted now if needed."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A model folder of the user's, or the one this package ships."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def cached(self) -> Path | None:
        return None if missing_files(self.path) else self.path

    def fetch(self, progress: Progress | None = None) -> Path:
        return check_complete(self.path, self.path.name)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A GGUF file of the user's, imported into the cache folder."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """Changes with the file, so that a new version of it is imported again."""
        stat = self.path.stat()
        key = f"{self.path}:{stat.st_size}:{stat.st_mtime_ns}"
        return f"{self.path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"

    def cached(self) -> Path | None:
        return built(self.name)

    def fetch(self, progress: Progress | None = None) -> Path:
        if progress:
            progress(f"converting {self.path.name}", 0, None)
        return build_once(self.name, lambda folder, _: import_gguf(self.path, folder), progress)


def target_folder(spec: str, *, progress: Progress | None = None) -> Path:
    """A folder that `mlx_lm.load` reads, downloaded or converted when it is not there yet.

    Raises:
        ModelNotFound: `spec` is nothing known.
        DownloadFailed: it could not be fetched, or has another checksum.
        BadCheckpoint: files are missing, or a GGUF file cannot be imported.
    """
    return target_source(spec).fetch(progress)


def drafter_folder(spec: str, *, progress: Progress | None = None) -> Path:
    """The folder of a drafter; for a catalogue name, that of the pair's drafter.

    Raises:
        ModelNotFound, DownloadFailed, BadCheckpoint: as for `target_folder`.
    """
    return drafter_source(spec).fetch(progress)


def cached_folder(spec: str) -> Path | None:
    """The folder of a target if it is already on disk; never touches the network."""
    return target_source(spec).cached()


def target_source(spec: str) -> Source:
    """Where the target `spec` comes from. Raises ModelNotFound."""
    return _source(spec, _target_of)


def drafter_source(spec: str) -> Source:
    """Where the drafter `spec` comes from. Raises ModelNotFound."""
    return _source(spec, _drafter_of)


def _target_of(entry: Entry) -> Source:
    if entry.gguf:
        return Wheel(entry.name, entry.gguf)
    return Hub(entry.target, entry.target_revision)


def _drafter_of(entry: Entry) -> Source:
    if entry.drafter_is_embedded:
        return Folder(Path(str(files("dflash2_mlx.models") / entry.drafter)))
    return Hub(entry.drafter, entry.drafter_revision)


def _source(spec: str, of_entry: Callable[[Entry], Source]) -> Source:
    if entry := load_catalogue().get(spec):
        return of_entry(entry)
    path = _path(spec)
    if spec and path.is_dir():
        return Folder(path)
    if path.suffix == ".gguf" and path.is_file():
        return GgufFile(path)
    if hub_id := _HUB_ID.fullmatch(spec):
        return Hub(hub_id["repo"], hub_id["revision"])
    raise unknown_model(spec)


def _path(spec: str) -> Path:
    try:
        return Path(spec).expanduser().resolve()
    except (RuntimeError, ValueError, OSError):  # an unknown ~user, a null byte, a link to itself
        raise unknown_model(spec) from None
