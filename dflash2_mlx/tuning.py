"""What this machine showed about a pair: kept in one readable JSON file, used from the first pass.

The file is `tuning.json` in the cache folder. A key names everything that a time depends on: chip,
system, MLX, target, drafter, bits and dtype. It is written under a lock and replaced atomically.
"""

import contextlib
import math
import os
import platform
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

import regex
from filelock import FileLock, Timeout

from dflash2_mlx.chip import Chip
from dflash2_mlx.curve import Curve, LiveCurve
from dflash2_mlx.errors import DFlashError
from dflash2_mlx.folders import cache_root, read_object, write_object
from dflash2_mlx.tuner import (
    PRIOR_RATE,
    PRIOR_WEIGHT,
    QUANTIZED_CAP,
    Acceptance,
    Parking,
    Pilot,
    best_width,
)

Kind = Literal["code", "maths", "copy", "languages", "prose", "grammar"]
# Copy: a text given back with few changes. Languages: others than English, which drafters have seen
# less of. Grammar: answers held to a form.
KINDS: tuple[Kind, ...] = get_args(Kind)
COPY_SIGN = re.compile(r"^\s*(?:please\s+)?(?:repeat|copy|retype|rewrite|rename)\b", re.I | re.M)
CODE_SIGNS = (
    *("```", "def ", "function", "class ", "import ", "SELECT ", "#include", "();", "{\n"),
    *("Python", "SQL", " code"),
)
MATHS_SIGN = re.compile(r"(?<![\w.])\$?\d+(?:[.,]\d+)*%?(?!\w)|[=+*/^] ?\d|\b\d*[xy]\b")
MANY_NUMBERS = 2
TRANSLATE_SIGN = re.compile(r"\btranslate\b|\btranslation (?:of|into)\b", re.I)
# Beside another letter: a lone one is a symbol of mathematics.
FOREIGN_LETTER = regex.compile(r"(?V1)(?<=\p{L})[\p{L}--[a-zA-Zªºµ]]|[\p{L}--[a-zA-Zªºµ]](?=\p{L})")
MANY_LETTERS, FOREIGN_SHARE = 3, 0.01  # at least, and of a text; English has fewer, in names
FEW_PASSES = 24  # an answer shorter than this teaches nothing worth a write
LOCK_S = 2.0
SEPARATOR = " | "


def kind_of(text: str) -> Kind:
    """What a prompt is about, or wants, by what that looks like."""
    if COPY_SIGN.search(text):
        return "copy"
    if any(sign in text for sign in CODE_SIGNS):
        return "code"
    num_foreign = len(FOREIGN_LETTER.findall(text))
    if TRANSLATE_SIGN.search(text) or num_foreign >= max(MANY_LETTERS, FOREIGN_SHARE * len(text)):
        return "languages"
    return "maths" if len(MATHS_SIGN.findall(text)) >= MANY_NUMBERS else "prose"


@dataclass(frozen=True, slots=True)
class Known:
    """One entry of the file. `measured` tells whether the curve is in milliseconds of this machine,
    timed by passes of every width, or a guess. `cap` is a width that only measured gain exceeds."""

    curve: Curve
    acceptance: dict[Kind, Acceptance]
    measured: bool
    when: str = ""
    cap: int | None = None

    def expected(self, kind: Kind) -> Acceptance:
        """What a kind showed before; as far as that is little, what all kinds together did."""
        return replace(self.acceptance[kind], prior=_usual_rate(self.acceptance.values()))

    def pilot(
        self, kind: Kind, live: LiveCurve | None = None, parking: Parking | None = None
    ) -> Pilot:
        """A pilot for one answer; `live` has the times of this process, `parking` earlier parks."""
        acceptance = self.expected(kind).remembered()
        live = live or LiveCurve(self.curve, measured=self.measured)
        return Pilot(live, acceptance, measured=self.measured, cap=self.cap, parking=parking)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, numbers short enough to read."""
        return {
            "measured": self.measured,
            "when": self.when,
            "cap": self.cap,
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
        curve = Curve(_numbers(entry["ms"]), _numbers(entry["ms_per_1000_tokens"]))
        if 1 not in curve.base_ms or min(curve.base_ms.values()) <= 0:
            raise ValueError("a pass takes some time")
        places = max(curve.widths) - 1
        return cls(
            curve,
            {kind: _acceptance(entry["acceptance"].get(kind), places) for kind in KINDS},
            bool(entry["measured"]),
            str(entry.get("when", "")),
            None if entry.get("cap") is None else int(entry["cap"]),
        )


def _usual_rate(kinds: Iterable[Acceptance]) -> float:
    """How likely a first draft stands, whatever the text."""
    seen = [one for one in kinds if one.tried]
    stood, tried = sum(one.stood[0] for one in seen), sum(one.tried[0] for one in seen)
    return (stood + PRIOR_WEIGHT * PRIOR_RATE) / (tried + PRIOR_WEIGHT)


def _numbers(table: dict[str, Any]) -> dict[int, float]:
    numbers = {int(width): float(ms) for width, ms in table.items()}
    if not all(math.isfinite(ms) and ms >= 0 for ms in numbers.values()):
        raise ValueError("times are finite")
    return numbers


def _acceptance(entry: dict[str, Any] | None, places: int) -> Acceptance:
    if entry is None:  # a kind that was not learned apart yet
        return Acceptance.unknown(places)
    stood, tried = ([float(x) for x in entry[name]] for name in ("stood", "tried"))
    sound = all(0 <= s <= t < math.inf for s, t in zip(stood, tried, strict=True))
    if len(tried) != places or not sound:
        raise ValueError("at each place some of the drafts tried stood")
    return Acceptance(stood, tried)


class Store:
    """The file. What cannot be read counts as unknown; what cannot be written is let go."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or cache_root() / "tuning.json"

    def load(self, key: str) -> Known | None:
        """What is known under a key."""
        return self.entries().get(key)

    def entries(self) -> dict[str, Known]:
        """All that is known and can be read."""
        entries = {}
        for key, entry in read_object(self.path).items():
            with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
                entries[key] = Known.from_dict(entry)
        return entries

    def save(self, key: str, known: Known) -> bool:
        """Put one entry in its place, whatever others write meanwhile; False when that failed."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self.path.with_suffix(".lock"), timeout=LOCK_S):
                write_object(self.path, {**read_object(self.path), key: known.to_dict()})
        except (OSError, Timeout):
            return False
        return True

    def reset(self) -> None:
        """Forget everything; raises `DFlashError` when the file cannot be removed."""
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise DFlashError(f"cannot remove {self.path}: {error.strerror}") from None


class Tuning:
    """The tuner of one pair: costs and acceptance, learned from every answer."""

    def __init__(self, key: str, guess: Curve, *, quantized: bool, store: Store) -> None:
        self.key = key
        self.store = store
        self._fresh = _unknown(guess, QUANTIZED_CAP if quantized else None)
        known = store.load(key)
        if known is None or known.curve.widths != guess.widths:
            known = self._fresh
        self.known = replace(known, cap=self._fresh.cap)
        self._set_live()

    def _set_live(self) -> None:
        self._live = LiveCurve(self.known.curve, measured=self.known.measured)
        # Passes that walk a grammar on the host take longer: theirs are not the pair's times.
        self._live_grammar = LiveCurve(self.known.curve, measured=self.known.measured)
        self._parking = {kind: Parking() for kind in KINDS}  # or short answers would never probe

    def pilot(self, kind: Kind) -> Pilot:
        """A pilot for one answer."""
        live = self._live_grammar if kind == "grammar" else self._live
        return self.known.pilot(kind, live, self._parking[kind])

    def learn(self, pilot: Pilot, kind: Kind, passes: int) -> None:
        """Keep what an answer showed; a long enough one is written to the file."""
        known = self.known.acceptance
        acceptance = {**known, kind: known[kind].joined(pilot.shown)}
        measured = self.known.measured or (pilot.explored and kind != "grammar")
        self.known = replace(self.known, acceptance=acceptance, measured=measured)
        if passes >= FEW_PASSES and measured:
            self.store.save(self.key, replace(self.learned, when=_today()))

    @property
    def learned(self) -> Known:
        """What is known by now, the times of this process included."""
        return replace(self.known, curve=self._live.curve)

    def measure(self, curve: Curve) -> bool:
        """Take over a curve that was measured; False when it could not be written."""
        self.known = replace(self.known, curve=curve, measured=True, when=_today())
        self._set_live()
        return self.store.save(self.key, self.known)

    def forget(self) -> None:
        """Be as for a new pair; the file changes with the next thing that is kept."""
        self.known = self._fresh
        self._set_live()

    def first_block(self) -> tuple[int, str]:
        """Where an answer starts, and why in words."""
        acceptance, cap = self.known.expected("prose").remembered(), self.known.cap
        drafted = self.curve.only(lambda width: width > 1 and (cap is None or width <= cap))
        width = best_width(drafted, acceptance, 0)
        if not self.known.measured:
            return width, "auto: every width is timed first"
        pilot = self.known.pilot("prose", self._live)
        source = f"by times of {self.known.when or 'this run'}"
        first = pilot.choose(0)
        if first > 1:
            return first, f"auto: from block {first}, {source}"
        return width, f"auto: {pilot.describe(0)}, {source}; a rare probe looks again"

    @property
    def curve(self) -> Curve:
        """The costs to decide by now."""
        return self._live.curve


def _unknown(guess: Curve, cap: int | None) -> Known:
    acceptance = {kind: Acceptance.unknown(max(guess.widths) - 1) for kind in KINDS}
    return Known(guess, acceptance, measured=False, cap=cap)


def machine_key(chip: Chip) -> str:
    """The part of a key that names the machine."""
    cores = f"{chip}, {os.cpu_count()} cores" if chip.on_cpu else str(chip)
    system = f"{platform.system()} {platform.release()}"
    return SEPARATOR.join([cores, system, f"mlx {version('mlx')}"])


def tuning_key(chip: Chip, target: str, drafter: str, bits: str) -> str:
    """Everything that times depend on, in words."""
    return SEPARATOR.join([machine_key(chip), target, drafter, bits])


def _today() -> str:
    return time.strftime("%Y-%m-%d")
