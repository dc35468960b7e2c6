"""Whether drafting keeps its promises on this machine, with this pair: five checks on the model."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from dflash2_mlx.chooser import Chooser, Draft
from dflash2_mlx.decode import Conversation
from dflash2_mlx.distribution import Distribution
from dflash2_mlx.exactness import TEXT, Exactness, measure, save, spans
from dflash2_mlx.goodness import num_outcomes, p_value
from dflash2_mlx.models.cache import leaves
from dflash2_mlx.models.selector import Trellis
from dflash2_mlx.pair import BlockSize, Pair
from dflash2_mlx.parity import Parity, Prompt, compare, encode, load_prompts
from dflash2_mlx.randomness import Position, Randomness
from dflash2_mlx.rounding import Deviation, deviation, dtype_name
from dflash2_mlx.sampling import SamplingParams
from dflash2_mlx.widths import WIDTHS

NUM_PROMPTS = 8
REWOUND = 8  # rows of the blocks that are rewound
MIN_DEPTH, MAX_DEPTH = 64, 4096  # tokens before them; past the model's window if that is in reach
NUM_DRAWS = 2000
SUSPICIOUS = 1e-4  # a p value that sound draws have once in 10,000 machines
MAX_NOISE = 2**24  # random numbers held at once, 64 MB
WARM = SamplingParams(temperature=1.5)  # flat enough for several outcomes

Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Check:
    """What one check saw: `detail` in a line, `more` for whom it may concern, `figures` for JSON.

    `ok` is None where there is nothing to check.
    """

    name: str
    ok: bool | None
    detail: str
    more: tuple[str, ...] = ()
    figures: dict[str, Any] = field(default_factory=dict)


def verify(
    pair: Pair,
    *,
    max_tokens: int = 64,
    block_size: BlockSize = "auto",
    exact: bool = False,
    notify: Notify = lambda line: None,
) -> Iterator[Check]:
    """Run all checks, one after the other; `notify` hears what is being done.

    What was measured is kept for `exact`, unless it shows a fault. Raises `InvalidRequest` for an
    impossible block size.
    """
    block = drafted_block(pair, block_size)
    notify("reading blocks of 1 to 16 rows with each kind of layer, and a text with all of them")
    exactness = measure(pair)
    yield check_widths(exactness)
    logits = check_logits(pair, exactness)
    if logits.ok:
        save(exactness, pair, notify)
    yield logits
    prompts = spread(load_prompts(), NUM_PROMPTS)
    notify(f"answering {len(prompts)} prompts with and without drafting")
    parity = compare(pair, prompts, max_tokens=max_tokens, block_size=block, exact=exact)
    yield check_ids(parity, exactness.tolerance)
    notify("rewinding blocks, and drawing tokens")
    yield check_rewind(pair)
    yield check_sampling(pair)


def drafted_block(pair: Pair, block_size: BlockSize) -> BlockSize:
    """The block to verify with; auto is the drafter's own, not what is fastest: that may be 1."""
    if block_size == "auto" and pair.drafter is not None and pair.effective().drafting:
        return int(pair.drafter.config.block_size)
    return block_size


def spread(prompts: list[Prompt], count: int) -> list[Prompt]:
    """`count` of the prompts, at even distances."""
    return [prompts[index * len(prompts) // count] for index in range(count)]


def check_widths(exactness: Exactness) -> Check:
    """Rows of wide products against the same rows alone, layer by layer."""
    worst = Deviation()
    for layer in exactness.layers:
        worst = worst.or_worse(layer.deviation)
    unequal = [layer for layer in exactness.layers if layer.equal != tuple(WIDTHS)]
    return Check(
        "widths",
        worst.is_rounding(exactness.dtype),
        f"rows keep their bits in blocks of {spans(exactness.equal_widths)}",
        tuple(
            f"{layer.kind}: {spans(layer.equal)}, else off by up to {layer.deviation.largest:.2g}"
            for layer in unequal
        ),
        {
            "equal": list(exactness.equal_widths),
            **worst.to_dict(),
            "layers": [
                {"layer": str(layer.kind), "equal": list(layer.equal), **layer.deviation.to_dict()}
                for layer in exactness.layers
            ],
        },
    )


def check_logits(pair: Pair, exactness: Exactness) -> Check:
    """Logits of a text read in blocks against those of the text read token by token."""
    found = exactness.logits
    if pair.target.undraftable:
        return Check("logits", None, f"never read in blocks: {pair.target.undraftable}")
    return Check(
        "logits",
        found.is_rounding(exactness.dtype),
        f"wide and one-row reads deviate by up to {found.largest:.2g} ({found.relative:.1g} of "
        f"the spread); choices with a margin above {exactness.tolerance:.2g} are safe",
        figures={**found.to_dict(), "tolerance": 2 * (found.to_dict()["largest"] or 0)},
    )


def check_ids(parity: Parity, tolerance: float) -> Check:
    """Greedy ids with drafting against mlx-lm's: where they part, the two best must be tied."""
    differences = [
        {"prompt": d.prompt, "index": d.index, "margin": d.margin, "tie": d.is_tie(tolerance)}
        for d in parity.differences
    ]
    redecided = f", {parity.redecided} tokens re-decided" if parity.redecided else ""
    return Check(
        "ids",
        all(difference["tie"] for difference in differences),
        f"{parity.num_equal} of {parity.num_prompts} answers equal plain decoding; "
        f"{parity.tokens} tokens in {parity.passes} passes{redecided}",
        tuple(
            f"prompt {d['prompt']} differs from token {d['index']} on, where the two best are "
            f"{_apart(d['margin'])}: {'a tie' if d['tie'] else 'NO TIE'}"
            for d in differences
        ),
        {
            "prompts": parity.num_prompts,
            "equal": parity.num_equal,
            "tokens": parity.tokens,
            "passes": parity.passes,
            "redecided": parity.redecided,
            "tokens_per_pass": parity.tokens_per_pass,
            "differences": differences,
        },
    )


def check_rewind(pair: Pair) -> Check:
    """The next logits after a rewind against those of a run that never read more."""
    target = pair.target
    if target.undraftable:
        return Check("rewind", None, target.undraftable)
    depth = _depth(pair)
    text = pair.encode(TEXT)
    tokens = (text * (depth + 4 * REWOUND))[: depth + 4 * REWOUND]
    used, clean = Conversation(target), Conversation(target)
    used.prefill(tokens[: depth + 1])
    clean.prefill(tokens[: depth + 1])
    worst, at = Deviation(), depth
    for kept in (0, 1, REWOUND // 2, REWOUND - 1):
        right, wrong = tokens[at : at + kept], tokens[: REWOUND - kept]
        reading = target.read(mx.array(right + wrong), used.caches)
        target.rewind(used.caches, reading, kept)
        if right:
            target.read(mx.array(right), clean.caches)
        at += kept + 1
        following = mx.array(tokens[at - 1 : at])
        ours, theirs = (target.read(following, run.caches).logits for run in (used, clean))
        worst = worst.or_worse(deviation(ours, theirs))
    return Check(
        "rewind",
        worst.is_rounding(dtype_name(target.dtype)),
        f"after blocks of {REWOUND} rows, rewound at depth {depth}, logits deviate by up to "
        f"{worst.largest:.2g} from a run that never read more",
        figures={"depth": depth, **worst.to_dict()},
    )


def check_sampling(pair: Pair) -> Check:
    """Drawn first tokens, drafted and verified, against the target's distribution."""
    if not pair.effective().drafting or pair.drafter is None:
        return Check("sampling", None, f"nothing is drafted: {pair.effective().reason}")
    conversation = Conversation(pair.target, pair.drafter)
    conversation.prefill(encode(pair, load_prompts()[-1].prompt))
    flight = conversation.launch(1)
    conversation.commit(flight, conversation.chooser.read(flight.verdict, 1).tokens)
    listener = Listener(pair.target.vocab_size)
    conversation.chooser = listener
    conversation.close(conversation.launch(2))
    exact = _probabilities(listener.logits)
    without_seed, with_seed = (
        p_value(_counts(listener, coupled), exact) for coupled in (False, True)
    )
    outcomes = num_outcomes(exact, NUM_DRAWS)
    return Check(
        "sampling",
        min(without_seed, with_seed) >= SUSPICIOUS,
        f"{NUM_DRAWS} tokens drawn by drafting fit the target's distribution: p = "
        f"{without_seed:.2g}, with given seeds {with_seed:.2g}, over {outcomes} outcomes",
        figures={
            "p_value": without_seed,
            "p_value_seeded": with_seed,
            "draws": NUM_DRAWS,
            "outcomes": outcomes,
        },
    )


class Listener(Chooser):
    """A greedy chooser that remembers its last pass."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(SamplingParams(), Randomness.from_seed(0), vocab_size)

    def draft(self, trellis: Trellis, position: Position) -> Draft:
        self.trellis = trellis
        return super().draft(trellis, position)

    def judge(
        self, raw: mx.array, draft: Draft, position: Position, committed: Sequence[int]
    ) -> mx.array:
        self.logits, self.position, self.committed = raw, position, committed
        return super().judge(raw, draft, position, committed)


def _counts(listener: Listener, coupled: bool) -> np.ndarray:
    """How often each token `[V]` came first, when many seeds make the pass again.

    The first token hangs on the first row alone, so the target need not read what they draft.
    """
    vocab_size = listener.logits.shape[-1]

    def first(words: mx.array) -> mx.array:
        chooser = Chooser(WARM, Randomness(words), vocab_size, coupled=coupled)
        draft = chooser.draft(listener.trellis, listener.position)
        return chooser.judge(listener.logits, draft, listener.position, listener.committed)[1]

    seeds = mx.random.randint(0, 2**31 - 1, (NUM_DRAWS, 2), key=mx.random.key(0))
    batch = max(1, MAX_NOISE // vocab_size)
    many: Any = mx.vmap(first)
    parts = (seeds[at : at + batch] for at in range(0, NUM_DRAWS, batch))
    tokens = [np.array(many(part.astype(mx.uint32))) for part in parts]
    return np.bincount(np.concatenate(tokens), minlength=vocab_size)


def _probabilities(logits: mx.array) -> np.ndarray:
    """p `[V]` of the first row's next token, by plain decoding."""
    rows = Distribution(WARM, logits.shape[-1]).rows(logits[:1].astype(mx.float32))
    return np.array(mx.softmax(rows.weights[0])).astype(np.float64)


def _depth(pair: Pair) -> int:
    windows = [getattr(leaf, "window", None) or 0 for leaf in leaves(pair.target.make_caches())]
    room = pair.context_limit - 4 * REWOUND
    return min(max([MIN_DEPTH, *(w + REWOUND for w in windows if w <= MAX_DEPTH)]), room)


def _apart(margin: float | None) -> str:
    return "unknown" if margin is None else f"{margin:.2g} apart"
