"""Speed measured fairly: the same prompts, greedy, every way of decoding in turn."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, product

import mlx.core as mx

from dflash2_mlx.errors import InvalidRequest
from dflash2_mlx.folders import Progress
from dflash2_mlx.generation import stream_generate
from dflash2_mlx.pair import BlockSize, Pair
from dflash2_mlx.parity import Prompt, encode, load_prompts, plain
from dflash2_mlx.sampling import SamplingParams

MLX_LM, PLAIN, AUTO, REFERENCE = "mlx-lm", "plain", "auto", "dflash 0.1.0"
WARM_UP = 8  # tokens of an answer that nobody times


@dataclass(frozen=True, slots=True)
class Pass:
    """`emitted` tokens, of `drafted` that the target looked at, the first `from_draft` accepted."""

    emitted: int
    drafted: int
    from_draft: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One timed answer; decoding runs from the first token that came to the last."""

    tokens: tuple[int, ...]
    passes: tuple[Pass, ...]
    ttft_s: float
    decode_s: float
    peak_memory_bytes: int

    @property
    def decoded(self) -> int:
        """Tokens that came after those of the first pass."""
        return len(self.tokens) - (self.passes[0].emitted if self.passes else 0)


Ask = Callable[[list[int], int], Answer]  # prompt ids, and how many tokens at most


@dataclass(frozen=True, slots=True)
class Contender:
    """A way of decoding, under the name it has in reports."""

    name: str
    ask: Ask


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt as ids, with mlx-lm's greedy answer and its margins, to compare with."""

    kind: str
    text: str
    ids: list[int]
    truth: list[int]
    margins: list[float]


@dataclass(frozen=True, slots=True)
class Run:
    """One answer of one contender to the task at `task`."""

    contender: str
    task: int
    answer: Answer


def timed(stream: Iterable[tuple[Sequence[int], int, int]]) -> Answer:
    """Consume (tokens, drafted, from_draft) of each pass, and time when they come."""
    mx.reset_peak_memory()
    tokens: list[int] = []
    passes: list[Pass] = []
    arrivals_s = [time.perf_counter()]
    for emitted, drafted, from_draft in stream:
        arrivals_s.append(time.perf_counter())
        tokens += emitted
        passes.append(Pass(len(emitted), drafted, from_draft))
    started_s, first_s, last_s = arrivals_s[0], arrivals_s[:2][-1], arrivals_s[-1]
    peak = mx.get_peak_memory()
    return Answer(tuple(tokens), tuple(passes), first_s - started_s, last_s - first_s, peak)


def ours(
    pair: Pair, name: str, block_size: BlockSize, sampling: SamplingParams | None = None
) -> Contender:
    """This program with a block size; 1 is plain decoding. Greedy unless `sampling` is given."""

    def ask(ids: list[int], max_tokens: int) -> Answer:
        steps = stream_generate(pair, ids, sampling, max_tokens=max_tokens, block_size=block_size)
        return timed((step.tokens, step.drafted, step.from_draft) for step in steps)

    return Contender(name, ask)


def mlx_lm(pair: Pair) -> Contender:
    """mlx-lm's own plain generation, text and all."""

    def stream(ids: list[int], max_tokens: int) -> Iterator[tuple[list[int], int, int]]:
        import mlx_lm

        responses = mlx_lm.stream_generate(
            pair.target.model, pair.tokenizer, ids, max_tokens=max_tokens
        )
        for response in responses:
            yield [response.token], 0, 0
            if response.token in pair.end_tokens:
                return

    return Contender(MLX_LM, lambda ids, max_tokens: timed(stream(ids, max_tokens)))


def contenders(pair: Pair, blocks: Sequence[int] | None = None) -> list[Contender]:
    """mlx-lm, plain, each block and auto; without a drafter only the first two.

    `blocks` None takes every width that the pair's tuner may choose. Raises `InvalidRequest` for an
    impossible block.
    """
    named = [mlx_lm(pair), ours(pair, PLAIN, 1)]
    if not pair.effective().drafting:
        return named
    if blocks is None:
        widths = pair.tuning.curve.widths if pair.tuning else [pair.effective().block_size]
        blocks = [width for width in widths if width > 1]
    for block in blocks:
        pair.effective(block)
        named.append(ours(pair, f"block {block}", block))
    return [*named, ours(pair, AUTO, "auto")]


def choose_prompts(kinds: Sequence[str] | None, per_kind: int) -> list[Prompt]:
    """The first prompts of each kind; raises `InvalidRequest` for a kind that there is not."""
    known = {kind: list(group) for kind, group in groupby(load_prompts(), lambda p: p.kind)}
    for kind in kinds or ():
        if kind not in known:
            raise InvalidRequest(f"kind is {kind!r}, expected one of {', '.join(known)}")
    return [prompt for kind in kinds or known for prompt in known[kind][:per_kind]]


def prepare(
    pair: Pair, prompts: Sequence[Prompt], max_tokens: int, progress: Progress | None = None
) -> list[Task]:
    """Ids of the prompts, and what plain mlx-lm answers."""
    tasks = []
    for number, prompt in enumerate(prompts, 1):
        ids = encode(pair, prompt.prompt)
        tasks.append(Task(prompt.kind, prompt.prompt, ids, *plain(pair, ids, max_tokens)))
        if progress:
            progress("answering every prompt with mlx-lm", number, len(prompts))
    return tasks


def alternate(
    contenders: Sequence[Contender],
    tasks: Sequence[Task],
    *,
    max_tokens: int,
    repeats: int,
    progress: Progress | None = None,
) -> Iterator[Run]:
    """Ask every contender every prompt `repeats` times, in turns whose order changes."""
    for contender in contenders:
        contender.ask(tasks[0].ids, min(WARM_UP, max_tokens))
    total = repeats * len(tasks) * len(contenders)
    done, orders = 0, balanced_orders(len(contenders))
    for repeat, (number, task) in product(range(repeats), enumerate(tasks)):
        for place in orders[(repeat + number) % len(orders)]:
            contender = contenders[place]
            yield Run(contender.name, number, contender.ask(task.ids, max_tokens))
            done += 1
            if progress:
                progress("asking in turns", done, total)


def balanced_orders(count: int) -> list[list[int]]:
    """Orders of `count` contenders in which each follows each other one equally often.

    What one does to the machine (heat, caches, clocks) would else always meet the same next one
    (E. J. Williams 1949).
    """
    zigzag = [(step + 1) // 2 * (-1) ** step % count for step in range(count)]
    named = sorted(range(count), key=zigzag.__getitem__)  # so that the first order is 0, 1, 2, ..
    orders = [[named[(place - shift) % count] for place in zigzag] for shift in range(count)]
    return orders if count % 2 == 0 else orders + [order[::-1] for order in orders]
