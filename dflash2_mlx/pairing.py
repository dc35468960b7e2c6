"""What can be said of a known pair without loading it, or MLX."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash2_mlx.catalogue import Entry, load_catalogue
from dflash2_mlx.errors import BadCheckpoint
from dflash2_mlx.fetch import drafter_source, target_source
from dflash2_mlx.folders import read_object
from dflash2_mlx.models.config import DrafterConfig
from dflash2_mlx.models.speculators import published


@dataclass(frozen=True, slots=True)
class Pairing:
    """A pair of the catalogue, what of it is on disk, and whether it can draft.

    `taps`, `window` and `block` are those of the drafter's own config when that is on disk, else
    the catalogue's; None means not known, and for `window` also that there is none.
    """

    entry: Entry
    target_cached: bool
    drafter_cached: bool
    taps: tuple[int, ...] | None
    window: int | None
    block: int | None
    fault: str | None

    @property
    def drafting(self) -> bool:
        """Whether the pair can draft, as far as can be told before it is loaded."""
        return self.fault is None

    @property
    def why(self) -> str:
        """The reason for `drafting`."""
        return self.fault or f"a {self.entry.kind} drafter is known for it"

    def to_dict(self) -> dict[str, Any]:
        """What the pair is and can do, then the other fields of the catalogue."""
        entry = asdict(self.entry)
        del entry["undraftable"]  # `why` says it
        first = ("name", "family", "target", "target_bits", "drafter", "kind")
        shown = {field: entry.pop(field) for field in first}
        state = {
            "taps": self.taps,
            "window": self.window,
            "block": self.block,
            "drafting": self.drafting,
            "why": self.why,
            "cached": self.target_cached and self.drafter_cached,
            "target_cached": self.target_cached,
            "drafter_cached": self.drafter_cached,
        }
        return shown | entry | state


def pairings() -> list[Pairing]:
    """All pairs of the catalogue, in its order."""
    return [pairing(entry) for entry in load_catalogue().values()]


def pairing(entry: Entry) -> Pairing:
    """Look for both folders of a pair, and into their configs."""
    target = target_source(entry.name).cached()
    drafter = drafter_source(entry.name).cached()
    taps, window, block, fault = entry.taps, entry.window, entry.block, entry.undraftable
    if drafter is not None:
        try:
            config = DrafterConfig.from_dict(published(read_object(drafter / "config.json")))
            taps, block = config.target_layer_ids, config.block_size
            window = next(filter(None, map(config.window, range(config.num_hidden_layers))), None)
            if target is not None:
                _check(config, target)
        except BadCheckpoint as error:
            fault = fault or str(error)
    return Pairing(entry, target is not None, drafter is not None, taps, window, block, fault)


def _check(config: DrafterConfig, target: Path) -> None:
    content = read_object(target / "config.json")
    content |= content.get("text_config") or {}
    if {"vocab_size", "hidden_size", "num_hidden_layers"} <= content.keys():
        config.check_target(
            vocab_size=content["vocab_size"],
            hidden_size=content["hidden_size"],
            num_layers=content["num_hidden_layers"],
        )
