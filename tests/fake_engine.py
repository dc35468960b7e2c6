"""An engine that says what it is told to, and remembers what it was asked."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from dflash2_mlx.defaults import merged
from dflash2_mlx.sampling import SamplingParams

EFFECTIVE = {
    "target": "tiny",
    "drafter": "tiny-drafter",
    "target_bits": 4,
    "drafter_bits": None,
    "block_size": 5,
    "drafting": True,
    "reason": "block 5 from the checkpoint",
    "seed": 123,
}


def effective() -> SimpleNamespace:
    return SimpleNamespace(**EFFECTIVE, describe=lambda: "tiny with tiny-drafter, block 5")


@dataclass
class FakeEngine:
    """Pieces of text, or errors to raise, that every answer is made of; and all calls so far."""

    script: Sequence[str | BaseException] = ("Hel", "lo")
    finish_reason: str = "stop"
    incomplete: bool = False
    thinks: bool = False
    redecided: int = 0
    default_sampling: SamplingParams = field(default_factory=SamplingParams)
    loads: list[dict[str, Any]] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    measured: list[str] = field(default_factory=list)
    planned: list[dict[str, Any]] = field(default_factory=list)
    cached_tokens: int = 0
    prompts: list[str | list[dict[str, str]]] = field(default_factory=list)
    templates: list[dict[str, Any]] = field(default_factory=list)

    def load_pair(self, target: str, drafter: Any = None, **options: Any) -> "FakePair":
        self.loads.append({"target": target, "drafter": drafter, **options})
        return FakePair(self)

    def stream_generate(
        self, pair: "FakePair", prompt_ids: list[int], sampling: Any = None, **options: Any
    ) -> "FakeGeneration":
        self.requests.append({"prompt_ids": prompt_ids, "sampling": sampling, **options})
        return FakeGeneration(self)

    def plan_memory(self, pair: "FakePair", **options: Any) -> SimpleNamespace:
        self.planned.append(options)
        return SimpleNamespace(describe=lambda: "memory 8 GiB", note=None)

    def exactness_of(self, pair: "FakePair", notify: Any = None) -> None:
        self.measured.append(pair.name)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "FakeEngine":
        monkeypatch.setattr("dflash2_mlx.pair.load_pair", self.load_pair)
        monkeypatch.setattr("dflash2_mlx.dialogue.reading.stream_generate", self.stream_generate)
        monkeypatch.setattr("dflash2_mlx.budget.plan_memory", self.plan_memory)
        monkeypatch.setattr("dflash2_mlx.budget.remember_plan", lambda pair, plan: None)
        monkeypatch.setattr("dflash2_mlx.exactness.exactness_of", self.exactness_of)
        return self


class FakeTokenizer:
    """Bytes; its template takes everything, and knows thoughts where `thinks`."""

    def __init__(self, thinks: bool) -> None:
        self.chat_template = "{{ enable_thinking }}" if thinks else "{{ messages }}"
        self.think_start, self.think_end = ("<think>", "</think>") if thinks else (None, None)

    def apply_chat_template(self, messages: list[dict[str, str]], **variables: Any) -> str:
        return "".join(message["content"] for message in messages)

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode()


class FakePair:
    name = "tiny"
    notes = ("dequantized to [float32]",)
    context_limit = 999
    prefix_cache = None
    end_tokens = frozenset({0})
    target = SimpleNamespace(vocab_size=256)

    def __init__(self, engine: FakeEngine | None = None) -> None:
        self.engine = engine or FakeEngine()
        self.tokenizer = FakeTokenizer(self.engine.thinks)

    def encode(self, text: str) -> list[int]:
        self.engine.prompts.append(text)
        return list(text.encode())

    def encode_chat(self, messages: list[dict[str, str]], **template: Any) -> list[int]:
        self.engine.templates.append(template)
        self.engine.prompts.append([dict(message) for message in messages])
        return list("".join(message["content"] for message in messages).encode())

    def sampling(self, **given: Any) -> SamplingParams:
        return merged(self.engine.default_sampling, given)

    def effective(self, block_size: str | int = "auto") -> SimpleNamespace:
        return effective()


class FakeGeneration:
    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.pieces: list[str] = []
        self.closed = False
        self.incomplete = engine.incomplete
        self.steps = self._run()

    def _run(self) -> Iterator[SimpleNamespace]:
        for number, piece in enumerate(self.engine.script, 1):
            if isinstance(piece, BaseException):
                raise piece
            self.pieces.append(piece)
            last = number == len(self.engine.script)
            yield SimpleNamespace(
                text=piece,
                tokens=(ord("x"),),
                from_draft=0,
                finish_reason=self.engine.finish_reason if last else None,
            )

    def __iter__(self) -> "FakeGeneration":
        return self

    def __next__(self) -> SimpleNamespace:
        return next(self.steps)

    def close(self) -> None:
        self.closed = True
        self.steps.close()

    @property
    def result(self) -> SimpleNamespace:
        finished = len(self.pieces) == len(self.engine.script)
        figures = {
            "text": "".join(self.pieces),
            "finish_reason": self.engine.finish_reason if finished else None,
            "prompt_tokens": 20,
            "completion_tokens": len(self.pieces),
            "cached_tokens": self.engine.cached_tokens,
            "decode_tokens_per_s": 12.34,
            "tokens_per_pass": 2.5,
            "redecided": self.engine.redecided,
        }
        as_dict = {**figures, "effective": EFFECTIVE}
        return SimpleNamespace(**figures, effective=effective(), to_dict=lambda: as_dict)
