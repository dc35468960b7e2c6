"""How exact this machine is with one target: measured once, then kept in the cache folder."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash2_mlx.blas import blas_in_force
from dflash2_mlx.decode import Conversation
from dflash2_mlx.errors import DFlashError
from dflash2_mlx.folders import cache_root, read_object, write_object
from dflash2_mlx.pair import Pair
from dflash2_mlx.rounding import Deviation, deviation, dtype_name
from dflash2_mlx.target import Target
from dflash2_mlx.widths import WIDTHS, LayerKind, LayerWidths, layer_kinds, try_widths

NUM_BEFORE, NUM_READ = 32, 32  # tokens of text that are prefilled, then read in blocks
BLOCKS = (2, 5, 8, 16, 32)
TEXT = (
    "The old lighthouse keeper found a letter in a bottle. It said: 12 x 7 = 84, and\n"
    "def area(w, h):\n    return w * h\n\nHe read it twice, then put the kettle on, for the night "
    "was long and the sea was calm. 'Who writes such things?' he asked the cat. "
)

Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Machine:
    """What decides how numbers are rounded here."""

    chip: str
    mlx: str
    blas: str | None


@dataclass(frozen=True, slots=True)
class Exactness:
    """What was measured; `logits` is how far wide reads of a text are from one-row reads of it."""

    machine: Machine
    target: str
    dtype: str
    layers: tuple[LayerWidths, ...]
    logits: Deviation

    @property
    def equal_widths(self) -> tuple[int, ...]:
        """The widths at which every kind of layer gives the bits of one row."""
        return tuple(sorted(set(WIDTHS).intersection(*(layer.equal for layer in self.layers))))

    @property
    def tolerance(self) -> float:
        """A choice with a larger margin than this is the same in wide and in narrow reads.

        Two logits that each deviate can move towards each other.
        """
        return 2 * self.logits.largest

    def describe(self) -> str:
        """One line."""
        return (
            f"rows keep their bits in blocks of {spans(self.equal_widths)}; "
            f"logits deviate by up to {self.logits.largest:.2g}"
        )


def this_machine(info: Mapping[str, Any] | None = None) -> Machine:
    """The machine in use, as `mx.device_info()` describes it; every field may be missing."""
    info = mx.device_info() if info is None else info
    names = [str(info[key]) for key in ("device_name", "architecture") if key in info]
    blas = blas_in_force()
    return Machine(
        " ".join(names) or "unknown", metadata.version("mlx"), blas.name if blas else None
    )


def exactness_of(pair: Pair, notify: Notify | None = None) -> Exactness:
    """What is known of this machine and the pair's target, measured now if it is not.

    `notify` hears in one line that something takes long, or could not be kept. Raises `DFlashError`
    when wide reads are wrong by more than rounding.
    """
    known = load(pair)
    if known is None:
        if notify:
            notify(f"measuring how exact this machine is with {pair.name}; this is done once")
        known = measure(pair)
        check(known)
        save(known, pair, notify)
    return known


def measure(pair: Pair) -> Exactness:
    """Try every kind of layer, and the target as a whole."""
    target = pair.target
    layers = [try_widths(target, kind, layer) for kind, layer in layer_kinds(target).items()]
    dtype = dtype_name(target.dtype)
    logits = logits_deviation(target, pair.encode(TEXT))
    return Exactness(this_machine(), pair.name, dtype, tuple(layers), logits)


def logits_deviation(target: Target, text: list[int]) -> Deviation:
    """How far logits `[V]` of the same tokens deviate when these are read in blocks."""
    tokens = (text * (NUM_BEFORE + NUM_READ))[: NUM_BEFORE + NUM_READ]
    alone, worst = read_in_blocks(target, tokens, 1), Deviation()
    for block in BLOCKS:
        worst = worst.or_worse(deviation(read_in_blocks(target, tokens, block), alone))
    return worst


def read_in_blocks(target: Target, tokens: list[int], block: int) -> mx.array:
    """Logits `[NUM_READ, V]` of the last tokens, read `block` at a time."""
    conversation = Conversation(target)
    conversation.prefill(tokens[: NUM_BEFORE + 1])  # which leaves the last one to be read
    logits = []
    for start in range(NUM_BEFORE, len(tokens), block):
        rows = mx.array(tokens[start : start + block])
        logits.append(target.read(rows, conversation.caches).logits)
        mx.eval(logits)
    return mx.concatenate(logits)


def check(exactness: Exactness) -> None:
    """Raise `DFlashError` unless the logits deviate by rounding only."""
    if not exactness.logits.is_rounding(exactness.dtype):
        raise DFlashError(
            f"logits of {exactness.target} differ by {exactness.logits.relative:.1%} between wide "
            "and one-row reads, expected rounding; see 'dflash2-mlx verify', and use --no-draft"
        )


def load(pair: Pair) -> Exactness | None:
    """What the cache folder has for this machine and target."""
    return _parsed(read_object(_path(pair)))


def save(exactness: Exactness, pair: Pair, notify: Notify | None = None) -> None:
    """Keep it in the cache folder."""
    try:
        write_object(_path(pair), asdict(exactness))
    except OSError as error:
        if notify:
            notify(f"the measurement cannot be kept in {cache_root()}: {error.strerror}")


def all_known() -> Iterator[Exactness]:
    """What the cache folder has for this machine, for any target."""
    here = this_machine()
    for path in sorted((cache_root() / "exactness").glob("*.json")):
        found = _parsed(read_object(path))
        if found and found.machine == here:
            yield found


def spans(widths: tuple[int, ...]) -> str:
    """Widths as text: `1 to 5, 8`."""
    parts: list[list[int]] = []
    for width in widths:
        if parts and parts[-1][-1] == width - 1:
            parts[-1].append(width)
        else:
            parts.append([width])
    return ", ".join(f"{p[0]} to {p[-1]}" if len(p) > 1 else str(p[0]) for p in parts) or "none"


def _path(pair: Pair) -> Path:
    kinds = sorted(str(kind) for kind in layer_kinds(pair.target))
    identity = [asdict(this_machine()), pair.name, dtype_name(pair.target.dtype), kinds]
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:12]
    slug = re.sub(r"[^\w.-]+", "-", pair.name).strip("-.")[-64:]
    return cache_root() / "exactness" / f"{slug}-{digest}.json"


def _parsed(content: dict[str, Any]) -> Exactness | None:
    """A stored record; None for an empty one, or one of another version of this program."""
    try:
        layers = [
            LayerWidths(
                LayerKind(**layer["kind"]),
                tuple(layer["equal"]),
                Deviation(**layer["deviation"]),
            )
            for layer in content.pop("layers")
        ]
        machine, logits = Machine(**content.pop("machine")), Deviation(**content.pop("logits"))
        return Exactness(machine=machine, layers=tuple(layers), logits=logits, **content)
    except (KeyError, TypeError):
        return None
