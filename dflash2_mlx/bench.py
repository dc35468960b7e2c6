"""Speed measured fairly: all ways of decoding answer a prompt at once, some passes each in turns.

A machine's speed wanders by a tenth from second to second, and heat builds up over minutes: whole
answers, one after the other, would each meet another machine.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, groupby, islice, product

import mlx.core as mx

from dflash2_mlx.errors import InvalidRequest
from dflash2_mlx.folders import Progress
from dflash2_mlx.generation import stream_generate
from dflash2_mlx.pair import BlockSize, Pair
from dflash2_mlx.parity import Prompt, encode, load_prompts, plain
from dflash2_mlx.sampling import SamplingParams

MLX_LM, PLAIN, AUTO, REFERENCE = "mlx-lm", "plain", "auto", "dflash 0.1.0"
WARM_UP = 8  # tokens of an answer that nobody times
IN_A_TURN = 6  # passes


@dataclass(frozen=True, slots=True)
class Pass:
    """`emitted` tokens, of `drafted` that the target looked at, the first `from_draft` accepted."""

    emitted: int
    drafted: int
    from_draft: int


@dataclass(frozen=True, slots=True)
class Answer:
    """A timed answer, or what came in one turn of it; what follows the first token is decoding."""

    tokens: tuple[int, ...] = ()
    passes: tuple[Pass, ...] = ()
    ttft_s: float = 0.0
    decode_s: float = 0.0
    peak_memory_bytes: int = 0

    @property
    def decoded(self) -> int:
        """Tokens that came after those of the first pass."""
        return len(self.tokens) - (self.passes[0].emitted if self.passes else 0)

    def __add__(self, turn: "Answer") -> "Answer":
        """The answer with its next turn."""
        return Answer(
            self.tokens + turn.tokens,
            self.passes + turn.passes,
            self.ttft_s + turn.ttft_s,
            self.decode_s + turn.decode_s,
            max(self.peak_memory_bytes, turn.peak_memory_bytes),
        )


Passes = Iterator[tuple[Sequence[int], int, int]]  # tokens, drafted, from_draft of each pass
Begin = Callable[[list[int], int], Iterator[Answer]]  # prompt ids, and how many tokens at most


@dataclass(frozen=True, slots=True)
class Contender:
    """A way of decoding, under the name it has in reports; `begin` gives an answer turn by turn."""

    name: str
    begin: Begin


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


def in_turns(passes: Passes, settle: Callable[[], None] = mx.synchronize) -> Iterator[Answer]:
    """Run an answer, and time it: the first pass alone, then a few at a time.

    `settle` waits for what was launched ahead, which belongs to the turn that launched it. Others
    may hold memory meanwhile; what is told is what the answer would need alone.
    """
    alone = mx.get_active_memory()

    def run() -> Iterator[Answer]:
        held, size = 0, 1
        while True:
            active = mx.get_active_memory()
            mx.reset_peak_memory()
            made, started_s = [], time.perf_counter()
            for tokens, drafted, from_draft in islice(passes, size):
                made.append((tokens, Pass(len(tokens), drafted, from_draft)))
                arrived_s = time.perf_counter()
            if not made:
                return
            ran_s = arrived_s - started_s  # an end of the answer that comes behind it is not timed
            idle_s = time.perf_counter()
            settle()
            ran_s += time.perf_counter() - idle_s
            first_s = arrived_s - started_s if size == 1 else 0.0
            peak = alone + held + mx.get_peak_memory() - active
            held += mx.get_active_memory() - active
            size = IN_A_TURN
            yield Answer(
                tuple(token for tokens, _ in made for token in tokens),
                tuple(one for _, one in made),
                first_s,
                ran_s - first_s,
                peak,
            )

    return run()


def ours(
    pair: Pair, name: str, block_size: BlockSize, sampling: SamplingParams | None = None
) -> Contender:
    """This program with a block size; 1 is plain decoding. Greedy unless `sampling` is given."""

    def begin(ids: list[int], max_tokens: int) -> Iterator[Answer]:
        steps = stream_generate(pair, ids, sampling, max_tokens=max_tokens, block_size=block_size)
        return in_turns((step.tokens, step.drafted, step.from_draft) for step in steps)

    return Contender(name, begin)


def mlx_lm(pair: Pair) -> Contender:
    """mlx-lm's own plain generation, text and all."""
    import mlx_lm
    from mlx_lm.generate import generation_stream

    def passes(ids: list[int], max_tokens: int) -> Passes:
        responses = mlx_lm.stream_generate(
            pair.target.model, pair.tokenizer, ids, max_tokens=max_tokens
        )
        for response in responses:
            yield [response.token], 0, 0
            if response.token in pair.end_tokens:
                return

    def settle() -> None:
        mx.synchronize(generation_stream)

    return Contender(MLX_LM, lambda ids, max_tokens: in_turns(passes(ids, max_tokens), settle))


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
    """Let all contenders answer every prompt `repeats` times."""
    for contender in contenders:
        whole(contender, tasks[0].ids, min(WARM_UP, max_tokens))
    total = repeats * len(tasks) * len(contenders)
    done, orders = 0, cycle(balanced_orders(len(contenders)))
    for _, (number, task) in product(range(repeats), enumerate(tasks)):
        for name, answer in together(contenders, task, max_tokens, orders).items():
            yield Run(name, number, answer)
            done += 1
        if progress:
            progress("answering in turns", done, total)


def together(
    contenders: Sequence[Contender],
    task: Task,
    max_tokens: int,
    orders: Iterator[Sequence[int]],
) -> dict[str, Answer]:
    """One answer of each contender, by name: a turn of each in one order, then in the next."""
    answers = {contender.name: Answer() for contender in contenders}
    running = {
        place: (contender.name, contender.begin(task.ids, max_tokens))
        for place, contender in enumerate(contenders)
    }
    while running:
        for place in next(orders):
            if place not in running:
                continue
            name, turns = running[place]
            if (turn := next(turns, None)) is None:
                del running[place]
            else:
                answers[name] += turn
    return answers


def whole(contender: Contender, ids: list[int], max_tokens: int) -> Answer:
    """An answer with nothing in between."""
    return sum(contender.begin(ids, max_tokens), Answer())


def balanced_orders(count: int) -> list[list[int]]:
    """Orders of `count` contenders in which each follows each other one equally often.

    What one does to the machine (heat, caches, clocks) would else always meet the same next one
    (E. J. Williams 1949).
    """
    zigzag = [(step + 1) // 2 * (-1) ** step % count for step in range(count)]
    named = sorted(range(count), key=zigzag.__getitem__)  # so that the first order is 0, 1, 2, ..
    orders = [[named[(place - shift) % count] for place in zigzag] for shift in range(count)]
    return orders if count % 2 == 0 else orders + [order[::-1] for order in orders]
