"""What this machine showed about a pair: kept in one readable JSON file, used from the first pass.

The file is `tuning.json` in the cache folder. A key names everything that a time depends on: chip,
system, MLX, target, drafter, bits and dtype. It is written under a lock and replaced atomically.
"""

import contextlib
import json
import os
import platform
import time
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from dflash2_mlx.chip import Chip
from dflash2_mlx.folders import cache_root, read_object
from dflash2_mlx.tuner import QUANTIZED_CAP, Acceptance, Curve, LiveCurve, Pilot, best_width

Kind = Literal["code", "prose"]
KINDS: tuple[Kind, ...] = ("code", "prose")
CODE_SIGNS = ("```", "def ", "function", "class ", "import ", "SELECT ", "#include", "();", "{\n")
FEW_PASSES = 24  # an answer shorter than this teaches nothing worth a write
LOCK_S = 2.0


def kind_of(text: str) -> Kind:
    """Whether a prompt is about code, going by what code looks like."""
    return "code" if any(sign in text for sign in CODE_SIGNS) else "prose"


@dataclass(frozen=True, slots=True)
class Known:
    """One entry of the file. `measured` tells whether the curve is in milliseconds of this machine,
    timed by passes of every width, or a guess."""

    curve: Curve
    acceptance: dict[Kind, Acceptance]
    measured: bool
    when: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, numbers short enough to read."""
        return {
            "measured": self.measured,
            "when": self.when,
            "ms": {str(w): round(ms, 3) for w, ms in self.curve.base_ms.items()},
            "ms_per_1000_tokens": {str(w): round(ms, 4) for w, ms in self.curve.slope_ms.items()},
            "acceptance": {
                kind: {
                    "stood": [round(x, 2) for x in acceptance.stood],
                    "tried": [round(x, 2) for x in acceptance.tried],
                }
                for kind, acceptance in self.acceptance.items()
            },
        }

    @classmethod
    def from_dict(cls, entry: dict[str, Any]) -> "Known":
        """The inverse; raises `KeyError`, `TypeError` or `ValueError` for anything else."""
        return cls(
            Curve(
                {int(w): float(ms) for w, ms in entry["ms"].items()},
                {int(w): float(ms) for w, ms in entry["ms_per_1000_tokens"].items()},
            ),
            {
                kind: Acceptance(
                    [float(x) for x in entry["acceptance"][kind]["stood"]],
                    [float(x) for x in entry["acceptance"][kind]["tried"]],
                )
                for kind in KINDS
            },
            bool(entry["measured"]),
            str(entry.get("when", "")),
        )


class Store:
    """The file. What cannot be read counts as unknown; what cannot be written is let go."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or cache_root() / "tuning.json"

    def load(self, key: str) -> Known | None:
        """What is known under a key."""
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
            return Known.from_dict(read_object(self.path)[key])
        return None

    def save(self, key: str, known: Known) -> bool:
        """Put one entry in its place, whatever others write meanwhile; False when that failed."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self.path.with_suffix(".lock"), timeout=LOCK_S):
                self._write({**read_object(self.path), key: known.to_dict()})
        except (OSError, Timeout):
            return False
        return True

    def reset(self) -> None:
        """Forget everything."""
        self.path.unlink(missing_ok=True)

    def _write(self, entries: dict[str, Any]) -> None:
        fresh = self.path.with_suffix(f".{os.getpid()}.new")
        fresh.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
        fresh.replace(self.path)


class Tuning:
    """The tuner of one pair: costs and acceptance, learned from every answer."""

    def __init__(self, key: str, guess: Curve, *, quantized: bool, store: Store) -> None:
        self.key = key
        self.store = store
        self._cap = QUANTIZED_CAP if quantized else None
        known = store.load(key)
        fits = known is not None and known.curve.widths == guess.widths
        places = max(guess.widths) - 1
        fresh: dict[Kind, Acceptance] = {kind: Acceptance.unknown(places) for kind in KINDS}
        self.known = known if known is not None and fits else Known(guess, fresh, measured=False)
        self._live = LiveCurve(self.known.curve)

    def pilot(self, kind: Kind) -> Pilot:
        """A pilot for one answer."""
        acceptance = self.known.acceptance[kind].remembered()
        return Pilot(self._live, acceptance, measured=self.known.measured, cap=self._cap)

    def learn(self, pilot: Pilot, kind: Kind, passes: int) -> None:
        """Keep what an answer showed; a long enough one is written to the file."""
        acceptance = {**self.known.acceptance, kind: pilot.acceptance}
        measured = self.known.measured or pilot.explored
        self.known = replace(self.known, acceptance=acceptance, measured=measured)
        if passes >= FEW_PASSES and measured:
            self.store.save(self.key, replace(self.known, curve=self._live.curve, when=_today()))

    def measure(self, curve: Curve) -> bool:
        """Take over a curve that was measured; False when it could not be written."""
        self.known = replace(self.known, curve=curve, measured=True, when=_today())
        self._live = LiveCurve(curve)
        return self.store.save(self.key, self.known)

    def first_block(self) -> tuple[int, str]:
        """Where an answer starts, and why in words."""
        acceptance = self.known.acceptance["prose"].remembered()
        drafted = self.curve.only(lambda w: w > 1 and (self._cap is None or w <= self._cap))
        width = best_width(drafted, acceptance, 0)
        if not self.known.measured:
            return width, "auto: every width is timed first"
        return width, f"auto: from block {width}, by times of {self.known.when or 'this run'}"

    @property
    def curve(self) -> Curve:
        """The costs to decide by now."""
        return self._live.curve


def tuning_key(chip: Chip, target: str, drafter: str, bits: str) -> str:
    """Everything that times depend on, in words."""
    system = f"{platform.system()} {platform.release()}"
    return " | ".join([chip.architecture, system, f"mlx {version('mlx')}", target, drafter, bits])


def _today() -> str:
    return time.strftime("%Y-%m-%d")
