"""Text that got stuck: a token or a short phrase, over and over."""

from collections.abc import Sequence
from dataclasses import dataclass

LONGEST_PHRASE = 16  # tokens
MIN_TOKENS = 24  # shorter runs are rulers, tables and refrains
MIN_TIMES = 3


@dataclass(frozen=True, slots=True)
class Repeat:
    """The longest stretch that says the same again: `tokens` long, in phrases of `period`."""

    tokens: int = 0
    period: int = 0

    @property
    def is_loop(self) -> bool:
        """Whether a speed measured on such a text means nothing: what repeats is easy to guess."""
        return self.tokens >= max(MIN_TOKENS, MIN_TIMES * self.period)

    def __str__(self) -> str:
        return f"{self.tokens} tokens in phrases of {self.period}"


def longest_repeat(ids: Sequence[int]) -> Repeat:
    """The longest stretch of a token or phrase that is said at least twice in a row."""
    best = Repeat()
    for period in range(1, LONGEST_PHRASE + 1):
        same = longest = 0
        for token, before in zip(ids[period:], ids, strict=False):
            same = same + 1 if token == before else 0
            longest = max(longest, same)
        if longest >= period and longest + period > best.tokens:
            best = Repeat(longest + period, period)
    return best
