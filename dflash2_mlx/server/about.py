"""What stays known of a pair while it is unloaded."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash2_mlx.pair import Effective, Pair


@dataclass(frozen=True, slots=True)
class About:
    """What was loaded last, for those who ask."""

    name: str
    context_limit: int
    effective: "Effective"
    notes: tuple[str, ...]

    @classmethod
    def of(cls, pair: "Pair") -> "About":
        """As it is now."""
        return cls(pair.name, pair.context_limit, pair.effective(), pair.notes)


def without_weights(pair: "Pair") -> "Pair":
    """What reads messages and tokens; it computes nothing, and holds no memory worth freeing."""
    from dflash2_mlx.pair import Pair

    return Pair(
        None,  # type: ignore[arg-type]
        None,
        pair.tokenizer,
        name=pair.name,
        end_tokens=pair.end_tokens,
        context_limit=pair.context_limit,
    )
