"""The catalogue of known pairs, `models/pairs.toml`: a name for a target with its drafter."""

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from dflash2_mlx.errors import ModelNotFound


@dataclass(frozen=True, slots=True)
class Gguf:
    """A GGUF file inside a wheel of a Python package."""

    package: str
    version: str
    file: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.package} {self.version} (GGUF)"


@dataclass(frozen=True, slots=True)
class Entry:
    """One known pair; `pairs.toml` explains the fields."""

    name: str
    family: str
    target: str
    target_bits: int
    licence: str
    drafter: str
    kind: str
    drafter_licence: str
    target_revision: str | None = None
    drafter_revision: str | None = None
    taps: tuple[int, ...] | None = None
    window: int | None = None
    block: int | None = None
    undraftable: str | None = None
    verified: bool = True
    sampling: Mapping[str, Any] = field(default_factory=dict)
    gguf: Gguf | None = None
    note: str = ""

    @property
    def drafter_is_embedded(self) -> bool:
        """Whether the drafter ships inside this package instead of coming from the hub."""
        return "/" not in self.drafter


@cache
def load_catalogue() -> dict[str, Entry]:
    """Every known pair by name, in the order of the file."""
    text = files("dflash2_mlx.models").joinpath("pairs.toml").read_text("utf-8")
    return {name: _entry(name, **table) for name, table in tomllib.loads(text).items()}


def _entry(name: str, **fields: Any) -> Entry:
    if gguf := fields.pop("gguf", None):
        fields["gguf"] = Gguf(**gguf)
    if taps := fields.pop("taps", None):
        fields["taps"] = tuple(taps)
    return Entry(name, **fields)


def unknown_model(spec: str) -> ModelNotFound:
    """The error for a name that is neither in the catalogue, nor a hub id, nor a folder."""
    near = difflib.get_close_matches(spec.lower(), load_catalogue(), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else "see 'dflash2-mlx models'"
    return ModelNotFound(
        f"'{spec}' is not a known model, a hub id (owner/name) or an existing folder; {hint}"
    )
