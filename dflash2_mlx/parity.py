"""Greedy output with drafting beside plain mlx-lm output."""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files

import mlx.core as mx
from mlx_lm.generate import generate_step

from dflash2_mlx.errors import InvalidRequest
from dflash2_mlx.generation import Result, generate
from dflash2_mlx.pair import BlockSize, Pair

TIE = 1e-3  # a margin that float32 products of different widths may round either way

Progress = Callable[[int], None]  # hears how many prompts are done


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, and what it is an example of."""

    kind: str
    prompt: str


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token at which an answer left the plain one.

    `margin` is by how much mlx-lm's logits preferred its token to the second best; None where one
    answer is only longer.
    """

    prompt: int
    index: int
    margin: float | None

    def is_tie(self, tolerance: float = 0.0) -> bool:
        """Whether rounding explains it: a margin within `tolerance`, or that of float32."""
        return self.margin is not None and self.margin <= max(tolerance, TIE)


@dataclass(frozen=True, slots=True)
class Parity:
    """What came of some prompts; `tokens_per_pass` are means of per-prompt means."""

    num_prompts: int
    differences: tuple[Difference, ...]
    tokens: int
    passes: int
    redecided: int
    tokens_per_pass: float
    by_kind: dict[str, float]

    @property
    def num_equal(self) -> int:
        """Prompts whose ids are equal throughout."""
        return self.num_prompts - len(self.differences)


def load_prompts() -> list[Prompt]:
    """The prompts that ship with the package, sorted by kind."""
    lines = files("dflash2_mlx.models").joinpath("prompts.jsonl").read_text("utf-8").splitlines()
    return [Prompt(**json.loads(line)) for line in lines]


def encode(pair: Pair, text: str, *, thinking: bool = True) -> list[int]:
    """Ids of one user turn, or of the bare text for a model without a chat format."""
    try:
        return pair.encode_chat(text, enable_thinking=thinking)
    except InvalidRequest:
        return pair.encode(text)


def plain(pair: Pair, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], list[float]]:
    """mlx-lm's greedy ids, and at each the margin between its two best tokens."""
    ids, margins = [], []
    steps = generate_step(mx.array(list(prompt)), pair.target.model, max_tokens=max_tokens)
    for token, logprobs in steps:
        best = mx.topk(logprobs.astype(mx.float32), 2)
        ids.append(int(token))
        margins.append(abs(float(best[0] - best[1])))
        if ids[-1] in pair.end_tokens:
            break
    return ids, margins


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first index at which two id lists differ, None when they are equal."""
    for index in range(max(len(ours), len(theirs))):
        if list(ours[index : index + 1]) != list(theirs[index : index + 1]):
            return index
    return None


def compare(
    pair: Pair,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    block_size: BlockSize = "auto",
    exact: bool = False,
    progress: Progress | None = None,
) -> Parity:
    """Answer every prompt both ways; models that can think do so in every second answer."""
    results, differences = [], []
    for number, prompt in enumerate(prompts):
        ids = encode(pair, prompt.prompt, thinking=number % 2 == 0)
        result = generate(pair, ids, max_tokens=max_tokens, block_size=block_size, exact=exact)
        theirs, margins = plain(pair, ids, max_tokens)
        results.append(result)
        index = first_difference(result.token_ids, theirs)
        if index is not None:
            margin = margins[index] if index < len(margins) else None
            differences.append(Difference(number, index, margin))
        if progress:
            progress(number + 1)
    return _summed(prompts, results, differences)


def _summed(
    prompts: Sequence[Prompt], results: Sequence[Result], differences: Sequence[Difference]
) -> Parity:
    by_kind: dict[str, list[float]] = {}
    for prompt, result in zip(prompts, results, strict=True):
        by_kind.setdefault(prompt.kind, []).append(result.tokens_per_pass)
    return Parity(
        num_prompts=len(prompts),
        differences=tuple(differences),
        tokens=sum(result.completion_tokens for result in results),
        passes=sum(result.passes for result in results),
        redecided=sum(result.redecided for result in results),
        tokens_per_pass=statistics.mean(result.tokens_per_pass for result in results),
        by_kind={kind: round(statistics.mean(values), 3) for kind, values in by_kind.items()},
    )
