"""Checkpoints on the model hub. The library resumes, verifies, and honours HF_HOME,
HF_HUB_CACHE, HF_HUB_OFFLINE and HF_TOKEN; here are its answers in our words."""

import io
import re
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash2_mlx.errors import DFlashError, DownloadFailed, ModelNotFound
from dflash2_mlx.folders import Progress, check_complete, first_line, missing_files

# What mlx-lm reads, without "*.py": code from a hub is never run here.
PATTERNS = [
    "*.json",
    "*.jinja",
    "*.jsonl",
    "*.tiktoken",
    "*.txt",
    "model*.safetensors",
    "tiktoken.model",
    "tokenizer.model",
]


@dataclass(frozen=True, slots=True)
class Hub:
    """A repository on the model hub; `revision` is a commit hash, a tag or a branch."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo

    def cached(self) -> Path | None:
        """The snapshot in the hub's cache folder if it is complete, found without the network."""
        from huggingface_hub.constants import HF_HUB_CACHE

        root = Path(HF_HUB_CACHE).expanduser() / f"models--{self.repo.replace('/', '--')}"
        commit = self.revision or "main"
        if not re.fullmatch("[0-9a-f]{40}", commit):
            ref = root / "refs" / commit
            if not ref.is_file():
                return None
            commit = ref.read_text("utf-8").strip()
        folder = root / "snapshots" / commit
        return None if missing_files(folder) else folder

    def fetch(self, progress: Progress | None = None) -> Path:
        """The local snapshot; a request is made only for what is not cached yet.

        Without `progress` the library draws its own bar on stderr.

        Raises:
            ModelNotFound: no such repository or revision.
            DownloadFailed: offline, gated, or the transfer broke.
            BadCheckpoint: the repository lacks files that a model needs.
        """
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        wanted: dict[str, Any] = {"revision": self.revision, "allow_patterns": PATTERNS}
        if self.cached() is not None:
            with suppress(LocalEntryNotFoundError):  # it knows of small files that are missing
                return Path(snapshot_download(self.repo, **wanted, local_files_only=True))
        bar = _bar_class(progress, str(self)) if progress else None
        try:
            folder = snapshot_download(self.repo, **wanted, tqdm_class=bar)
        except Exception as error:  # the hub, the network and the disk fail in many classes
            raise self._explained(error) from error
        return check_complete(Path(folder), str(self))

    def _explained(self, error: Exception) -> DFlashError:
        from huggingface_hub import constants, errors

        if isinstance(error, errors.GatedRepoError):
            return DownloadFailed(
                f"{self} is gated; accept its terms on its page on the hub, then set HF_TOKEN"
            )
        if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
            return ModelNotFound(
                f"{self} is not on the hub; check the name, or set HF_TOKEN if it is private"
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return ModelNotFound(f"{self.repo} has no revision {self.revision} on the hub")
        if constants.HF_HUB_OFFLINE:
            return DownloadFailed(
                f"{self} is not complete in the cache and HF_HUB_OFFLINE is set; "
                f"unset it and run 'dflash2-mlx pull {self}'"
            )
        cause = error.__cause__ or error  # the library wraps a network error in advice
        return DownloadFailed(
            f"{self} could not be fetched ({type(cause).__name__}: {first_line(cause)}); "
            "check the network and run the command again, it resumes"
        )


def _bar_class(progress: Progress, label: str) -> type[Any]:
    """A tqdm class that reports instead of drawing; tqdm keeps the rate of reports low."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    class Bar(tqdm):
        monitor_interval = 0

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.counts_bytes = kwargs.get("unit") == "B" and "Download" not in kwargs["desc"]
            super().__init__(*args, **kwargs | {"file": io.StringIO(), "disable": False})

        def display(self, *_: Any, **__: Any) -> None:
            if self.counts_bytes:
                progress(label, int(self.n), int(self.total) if self.total else None)

    Bar.set_lock(threading.RLock())
    return Bar
