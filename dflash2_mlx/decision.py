"""What follows from what is known of a pair: expected speed of each width, the block, and why."""

from dataclasses import dataclass

from dflash2_mlx.tuner import tokens_per_ms
from dflash2_mlx.tuning import KINDS, SEPARATOR, Kind, Known

USUAL_DEPTH = 1000  # tokens of context at which a decision is told where none is asked for


@dataclass(frozen=True, slots=True)
class Expectation:
    """A pass of `width` rows: its time, and by kind of text its tokens and their rate."""

    width: int
    ms: float
    tokens: dict[Kind, float]
    tokens_per_s: dict[Kind, float]


@dataclass(frozen=True, slots=True)
class Decision:
    """The block that an answer of this kind starts with (1: plain decoding), and why in words."""

    kind: Kind
    block: int
    reason: str


def expectations(known: Known, depth: int) -> list[Expectation]:
    """What to expect of each width behind `depth` tokens, going by earlier answers."""
    rows, expected = [], {kind: known.expected(kind) for kind in KINDS}
    for width in known.curve.widths:
        tokens = {kind: expected[kind].expected_tokens(width) for kind in KINDS}
        rates = {
            kind: 1000 * tokens_per_ms(known.curve, expected[kind], width, depth) for kind in KINDS
        }
        rows.append(Expectation(width, known.curve.ms(width, depth), tokens, rates))
    return rows


def decisions(known: Known, depth: int = USUAL_DEPTH) -> list[Decision]:
    """The block for each kind of text behind `depth` tokens."""
    if not known.measured:
        width = max(w for w in known.curve.widths if known.cap is None or w <= known.cap)
        return [Decision(kind, width, "not timed yet") for kind in KINDS]
    pilots = {kind: known.pilot(kind) for kind in KINDS}
    chosen = {kind: pilot.choose(depth) for kind, pilot in pilots.items()}
    return [Decision(kind, chosen[kind], pilots[kind].describe(depth)) for kind in KINDS]


def in_words(key: str, known: Known) -> str:
    """One line on one pair of the store, for a text of usual length."""
    target, drafter, bits = key.split(SEPARATOR)[-3:]
    told = "; ".join(f"{decision.kind}: {decision.reason}" for decision in decisions(known))
    return (
        f"{target} with {drafter} ({bits}), behind {USUAL_DEPTH} tokens: {told}; "
        f"by times of {known.when or 'no date'}"
    )
