"""What the server counts, as Prometheus reads it."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from dflash2_mlx.dialogue.events import Done

Outcome = Literal["done", "failed", "cancelled", "refused"]
OUTCOMES: tuple[Outcome, ...] = ("done", "failed", "cancelled", "refused")
COUNTED = {
    "prompt_tokens": "Tokens of prompts.",
    "cached_tokens": "Tokens of prompts that were known from earlier requests.",
    "completion_tokens": "Tokens of answers.",
    "drafted_tokens": "Tokens that were drafted.",
    "accepted_tokens": "Drafted tokens that stood.",
    "prefill_seconds": "Time spent on reading prompts.",
    "decode_seconds": "Time spent on writing answers.",
}


@dataclass(slots=True)
class Tally:
    """Sums over all requests; written by the worker's thread, read by any."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    totals: Counter[str] = field(default_factory=Counter)

    def end(self, outcome: Outcome) -> None:
        """Count one more request."""
        self.outcomes[outcome] += 1

    def take(self, done: Done) -> None:
        """Add up what an answer took."""
        usage, timings = done.usage, done.timings
        self.totals["prompt_tokens"] += usage.prompt
        self.totals["cached_tokens"] += usage.cached
        self.totals["completion_tokens"] += usage.completion
        self.totals["drafted_tokens"] += usage.accepted + usage.rejected
        self.totals["accepted_tokens"] += usage.accepted
        self._add_seconds("prefill_seconds", timings.get("prompt_ms", 0.0))
        self._add_seconds("decode_seconds", timings.get("predicted_ms", 0.0))

    def _add_seconds(self, name: str, ms: float) -> None:
        self.totals[name] += ms / 1000  # type: ignore[assignment]

    def text(self, gauges: dict[str, tuple[str, float]]) -> str:
        """Prometheus' text format; `gauges` are name -> help and value."""
        lines = _described("requests_total", "counter", "Requests by how they ended.")
        lines += [
            f'dflash2_requests_total{{outcome="{outcome}"}} {self.outcomes[outcome]}'
            for outcome in OUTCOMES
        ]
        for name, words in COUNTED.items():
            lines += _described(f"{name}_total", "counter", words)
            lines.append(f"dflash2_{name}_total {self.totals[name]:.12g}")
        for name, (words, value) in gauges.items():
            lines += _described(name, "gauge", words)
            lines.append(f"dflash2_{name} {value:.12g}")
        return "\n".join(lines) + "\n"


def _described(name: str, kind: str, words: str) -> list[str]:
    return [f"# HELP dflash2_{name} {words}", f"# TYPE dflash2_{name} {kind}"]
