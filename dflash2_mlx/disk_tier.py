"""Prompt states on disk: the system message and tools of an agent survive a restart.

One safetensors file for each state, named by what it holds and by the checksum of its bytes. It is
written beside its place on a thread of its own and moved there whole, so a process that is killed
leaves nothing half. Arrays are stored as bytes; their form is in the header.
"""

import hashlib
import json
import logging
import os
import queue
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

import dflash2_mlx
from dflash2_mlx.states import Point, Rows, arrays_in

FORMAT = "dflash2-mlx prompt state 1"
SUFFIX, PARTIAL = ".safetensors", ".partial"
log = logging.getLogger("dflash2_mlx.server")


@dataclass(frozen=True, slots=True)
class Kept:
    """A path of chunks as a file holds it: ids and rows of each, and the point behind the last."""

    ids: list[bytes]
    rows: list[Rows]
    point: Point


class DiskTier:
    """Files in `folder`, up to `budget_bytes`; the ones used longest ago are removed first.

    Only files of this program with this name pattern are ever touched.
    """

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        self.folder = folder
        self.budget_bytes = budget_bytes
        self._waiting: queue.Queue[tuple[str, dict[str, Any], dict[str, str]] | None]
        self._waiting = queue.Queue()
        self._writer: threading.Thread | None = None
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"*{PARTIAL}"):  # by a process that was killed
            left.unlink(missing_ok=True)
        self._known = {_digest_in(file.name) for file in self.files()}

    def has(self, digest: bytes) -> bool:
        """Whether a state is there or about to be, by the digest of its last chunk."""
        return digest.hex() in self._known

    def write(self, digest: bytes, ids: Sequence[bytes], rows: list[Rows], point: Point) -> None:
        """Write a state in the background, unless it is there. Its arrays are evaluated already."""
        if self.has(digest):
            return
        arrays: list[mx.array] = []
        tree = _without_arrays({"rows": rows, "point": point}, arrays)
        header = {
            "format": FORMAT,
            "version": dflash2_mlx.__version__,
            "digest": digest.hex(),
            "ids": json.dumps([chunk.hex() for chunk in ids]),
            "tree": json.dumps(tree),
        }
        # Views of memory that nobody changes: the thread never calls MLX.
        views = {str(n): np.array(_as_bytes(array), copy=False) for n, array in enumerate(arrays)}
        self._known.add(digest.hex())
        self._waiting.put((digest.hex(), views, header))
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_all, daemon=True)
            self._writer.start()

    def read(self, digest: bytes) -> Kept | None:
        """The state, or None where there is none; a damaged or foreign file is told and ignored."""
        self.flush()
        file = next(self.folder.glob(f"{digest.hex()}-*{SUFFIX}"), None)
        self._known.discard(digest.hex())
        if file is None:
            return None
        try:
            if checksum(file) != _checksum_in(file.name):
                raise ValueError("its checksum is another")
            kept = _loaded(file, digest)
            os.utime(file)
            self._known.add(digest.hex())
        except Exception as error:  # a file can hold anything
            log.warning("ignored %s: %s", file, error)
            return None
        return kept

    def flush(self) -> None:
        """Wait until everything is written."""
        if self._writer is not None:
            self._waiting.put(None)
            self._writer.join()
            self._writer = None

    def files(self) -> list[Path]:
        """The files that count, those used longest ago first."""
        found = [file for file in self.folder.glob(f"*{SUFFIX}") if _checksum_in(file.name)]
        return sorted(found, key=lambda file: file.stat().st_mtime_ns)

    def _write_all(self) -> None:
        while (task := self._waiting.get()) is not None:
            try:
                self._write(*task)
            except (OSError, SafetensorError) as error:
                log.warning("no prompt state written to %s: %s", self.folder, error)

    def _write(self, name: str, views: dict[str, Any], header: dict[str, str]) -> None:
        size = sum(view.nbytes for view in views.values())
        if size > self.budget_bytes:
            log.info("a prompt state of %d bytes is more than the disk may hold", size)
            return
        partial = self.folder / f"{name}.{os.getpid()}{PARTIAL}"
        save_file(views, partial, metadata=header)
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(partial, self.folder / f"{name}-{checksum(partial)}{SUFFIX}")
        self._remove_oldest()

    def _remove_oldest(self) -> None:
        files = self.files()
        used = sum(file.stat().st_size for file in files)
        for file in files[:-1]:
            if used <= self.budget_bytes:
                return
            used -= file.stat().st_size
            with suppress(OSError):
                file.unlink()


def checksum(file: Path) -> str:
    """Of all bytes of a file."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()[:32]


def _checksum_in(name: str) -> str | None:
    digest, _, rest = name.removesuffix(SUFFIX).partition("-")
    return rest if len(digest) == 32 and len(rest) == 32 else None


def _digest_in(name: str) -> str:
    return name.partition("-")[0]


def _without_arrays(tree: Any, arrays: list[mx.array]) -> Any:
    """The tree as JSON takes it; its arrays go into the list."""
    if isinstance(tree, mx.array):
        arrays.append(tree)
        dtype = str(tree.dtype).rpartition(".")[2]
        return {"array": len(arrays) - 1, "dtype": dtype, "shape": list(tree.shape)}
    if isinstance(tree, tuple):
        return {"tuple": [_without_arrays(leaf, arrays) for leaf in tree]}
    if isinstance(tree, list):
        return [_without_arrays(leaf, arrays) for leaf in tree]
    if isinstance(tree, dict):
        return {"dict": {key: _without_arrays(leaf, arrays) for key, leaf in tree.items()}}
    return tree


def _with_arrays(tree: Any, stored: dict[str, mx.array]) -> Any:
    """The inverse of `_without_arrays`."""
    if isinstance(tree, list):
        return [_with_arrays(leaf, stored) for leaf in tree]
    if not isinstance(tree, dict):
        return tree
    if "array" in tree:
        whole = stored[str(tree["array"])]
        return whole.view(getattr(mx, tree["dtype"])).reshape(tree["shape"])
    if "tuple" in tree:
        return tuple(_with_arrays(leaf, stored) for leaf in tree["tuple"])
    return {key: _with_arrays(leaf, stored) for key, leaf in tree["dict"].items()}


def _as_bytes(array: mx.array) -> mx.array:
    flat = array.reshape(-1).view(mx.uint8)
    mx.eval(flat)
    return flat


def _loaded(file: Path, digest: bytes) -> Kept:
    stored, header = _with_header(file)
    if header.get("format") != FORMAT or header.get("digest") != digest.hex():
        raise ValueError("it is none of this program's prompt states")
    tree = _with_arrays(json.loads(header["tree"]), stored)
    mx.eval(arrays_in(tree["rows"]), arrays_in(tree["point"]))
    ids = [bytes.fromhex(chunk) for chunk in json.loads(header["ids"])]
    return Kept(ids, tree["rows"], tree["point"])


def _with_header(file: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    loaded: Any = mx.load(str(file), return_metadata=True)
    return loaded
