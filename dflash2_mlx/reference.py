"""The package `dflash`, the drafters' own implementation, run beside ours for comparison.

It lives in an environment of its own in the cache folder, made when first asked for, on the MLX and
mlx-lm that run here; what differs is the implementation.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from dflash2_mlx.bench import IN_A_TURN, REFERENCE, Answer, Contender, Pass
from dflash2_mlx.blas import preload_blas
from dflash2_mlx.chip import this_chip
from dflash2_mlx.errors import DFlashError
from dflash2_mlx.folders import Progress, build_once, cache_root
from dflash2_mlx.machine import physical_memory
from dflash2_mlx.models import checkpoint, speculators
from dflash2_mlx.models.drafter import load_drafter
from dflash2_mlx.models.quantize import save
from dflash2_mlx.pair import Pair
from dflash2_mlx.precision import convert
from dflash2_mlx.rounding import dtype_name

PACKAGE = "dflash==0.1.0"
WORKER = Path(__file__).with_name("reference_worker.py")
COPIES = 2.3  # how many times the target has to fit into memory: ours, its own, and what they use


@dataclass(frozen=True, slots=True)
class Proposal:
    """The draft side of one pass: seconds to build its graph and to run it, and its nodes."""

    build_s: float
    eval_s: float
    nodes: int

    @property
    def seconds(self) -> float:
        """Both."""
        return self.build_s + self.eval_s


class Reference:
    """A worker process that answers with `dflash`; a context manager.

    Raises `DFlashError` when it cannot be installed or started, or does not answer.
    """

    def __init__(self, python: Path, setup: dict[str, Any]) -> None:
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        self._process = subprocess.Popen(
            [str(python), "-I", str(WORKER), json.dumps({**setup, "in_a_turn": IN_A_TURN})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.block = int(self._hear()["block"])

    def begin(self, ids: list[int], max_tokens: int, **options: float) -> Iterator[Answer]:
        """An answer turn by turn, greedy with the drafter's block unless `block_size`,
        `temperature` or `top_p` say otherwise. One at a time."""
        turn = self._request("begin", ids=ids, max_tokens=max_tokens, **options)
        while turn:
            passes = tuple(Pass(*numbers) for numbers in turn.pop("passes"))
            yield Answer(tokens=tuple(turn.pop("tokens")), passes=passes, **turn)
            turn = self._request("go on")

    def propose(
        self, ids: list[int], *, new_rows: int, block_size: int, temperature: float = 0.0
    ) -> Proposal:
        """One draft behind the last of `ids`; its context has not seen the `new_rows` before it."""
        told = self._request(
            "propose", ids=ids, new_rows=new_rows, block_size=block_size, temperature=temperature
        )
        return Proposal(**told)

    def _request(self, task: str, **fields: Any) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"task": task, **fields}) + "\n")
            self._process.stdin.flush()
        except OSError:
            self._fail()
        return self._hear()

    @property
    def contender(self) -> Contender:
        """For a benchmark."""
        return Contender(REFERENCE, self.begin)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._log.closed:
            self._end()

    def _end(self) -> list[str]:
        """End the process, and tell what it said of itself."""
        self._process.kill()
        self._process.communicate()
        with self._log as log:
            log.seek(0)
            return log.read().strip().splitlines()

    def _hear(self) -> Any:
        assert self._process.stdout is not None
        try:
            told: Any = json.loads(self._process.stdout.readline())
        except ValueError:
            self._fail()
        return told

    def _fail(self) -> NoReturn:
        lines = self._end() or ["no message"]
        raise DFlashError(f"the reference ({PACKAGE}) failed: {lines[-1]}")


def start(pair: Pair, target: Path, drafter: Path, progress: Progress | None = None) -> Reference:
    """A reference on the same pair: the target in the same precision, the drafter unquantized.

    Raises `DFlashError` when there is no drafter, or no room for a second copy of the target.
    """
    check_room(pair.target.nbytes)
    setup = {
        "target": str(target),
        "drafter": str(unquantized(drafter, progress)),
        "dtype": None if pair.target.quantized else dtype_name(pair.target.dtype),
        "blas": str(path) if (path := preload_blas().path) else None,
    }
    python = environment(progress)
    if progress:
        progress("starting the reference", 0, None)
    return Reference(python, setup)


def check_room(target_bytes: int, memory: int | None = None) -> None:
    """Raise `DFlashError` when the machine cannot hold two copies of a target."""
    memory = memory or physical_memory()
    if COPIES * target_bytes > memory:
        raise DFlashError(
            f"--reference loads the target a second time: {COPIES * target_bytes / 1e9:.1f} GB "
            f"are needed, this machine has {memory / 1e9:.1f} GB; leave it out"
        )


def environment(progress: Progress | None = None) -> Path:
    """The Python of the reference's environment, made now if it is not there."""
    from filelock import FileLock

    wanted = requirements()
    digest = hashlib.sha256(" ".join(wanted).encode()).hexdigest()[:12]
    folder = cache_root() / "reference" / f"dflash-{digest}"
    python, complete = folder / "bin" / "python", folder / "complete"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not complete.exists():
            if progress:
                progress(f"installing {PACKAGE} in {folder}", 0, None)
            _run([sys.executable, "-m", "venv", "--clear", str(folder)])
            pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            _run([*pip, *wanted])
            # Its other dependencies are for its benchmark and for other machines than ours.
            _run([*pip, "--no-deps", PACKAGE])
            complete.touch()
    return python


def requirements() -> list[str]:
    """What the reference runs on: the versions that run here."""
    extra = "[cpu]" if sys.platform == "linux" else ""
    names = ("mlx-lm", "transformers", "huggingface-hub")
    return [f"mlx{extra}=={version('mlx')}", *(f"{name}=={version(name)}" for name in names)]


def unquantized(folder: Path, progress: Progress | None = None) -> Path:
    """A drafter's folder as the reference reads it: this one, or a copy without quantization."""
    stored = checkpoint.read_json(folder / "config.json")
    if "quantization" not in stored and not speculators.is_speculators(stored):
        return folder
    stats = (folder / "config.json").stat()
    digest = hashlib.sha256(f"{folder.resolve()} {stats.st_mtime_ns}".encode()).hexdigest()[:12]

    def make(copy: Path, _: Path) -> None:
        if progress:
            progress("writing a drafter without quantization for the reference", 0, None)
        drafter = load_drafter(folder)
        convert(drafter, this_chip().activations)
        config = speculators.published(stored)
        save(drafter, {k: v for k, v in config.items() if k != "quantization"}, copy)

    return build_once(f"{folder.name}-unquantized-{digest}", make, progress, "drafters")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise DFlashError(
            f"cannot install the reference ({PACKAGE}): {lines[-1]}; it needs a package index"
        )
