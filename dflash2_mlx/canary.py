"""Notices a drafter whose drafts never stand: the sign of a wrong pair or an overflowing dtype."""

from dataclasses import dataclass

NUM_PASSES = 48
MIN_SHARE = 0.1  # of drafted passes whose first draft stood; sound pairs have 0.3 to 0.9


@dataclass(slots=True)
class Canary:
    """Watches the first drafted passes of one answer."""

    passes: int = 0
    stood: int = 0

    def watch(self, drafted: int, from_draft: int) -> bool:
        """Take in one pass; True exactly once, when the first passes accepted next to nothing."""
        if drafted == 0 or self.passes >= NUM_PASSES:
            return False
        self.passes += 1
        self.stood += from_draft > 0
        return self.passes == NUM_PASSES and self.stood < MIN_SHARE * NUM_PASSES

    def describe(self) -> str:
        """What was seen, in words."""
        return f"the first draft stood in {self.stood} of {self.passes} passes"
