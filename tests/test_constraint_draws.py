"""Held to a grammar, drafted answers are distributed as the target's own, masked."""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from byte_bpe import byte_bpe
from tiny import END, VOCAB, tiny_drafter, tiny_target

from dflash2_mlx.chooser import Chooser, Draft
from dflash2_mlx.constraint import Constraint, grammar_tokenizer
from dflash2_mlx.decode import Conversation
from dflash2_mlx.distribution import Distribution
from dflash2_mlx.goodness import p_value
from dflash2_mlx.grammar import Grammar
from dflash2_mlx.models.selector import Trellis
from dflash2_mlx.pair import join
from dflash2_mlx.randomness import Purpose, Randomness
from dflash2_mlx.sampling import SamplingParams

PROMPT = list(b"Some prompt")
GRAMMAR = Grammar.regex("(a|bc|bd){2}")
PIECES = {"a": 97, "b": 98, "c": 99, "d": 100, "bc": 260, "bd": 261}
TEXTS = ["".join(pair) for pair in itertools.product(("a", "bc", "bd"), repeat=2)]
CANDIDATES = [*PIECES.values(), 7, 8]  # the last two never obey
NUM_TOKENS = 3
NUM_DRAWS = 5_000
Prefix = tuple[int, ...]


def may_follow(prefix: Prefix) -> list[int]:
    """The tokens that some text of the language goes on with; the end behind a whole text."""
    names = {token: piece for piece, token in PIECES.items()}
    text = "".join(names.get(token, "") for token in prefix)
    if text in TEXTS:
        return [END]
    return sorted(
        token
        for piece, token in PIECES.items()
        if any(whole.startswith(text + piece) for whole in TEXTS)
    )


def narrowed(trellis: Trellis, tokens: list[int]) -> Trellis:
    """The part of a trellis that is about these candidates, in every row."""
    order = [[row.index(token) for token in tokens] for row in trellis.candidates.tolist()]
    scores = np.array(trellis.scores)
    before = [order[0], *order[:-1]]
    lines = [scores[row][np.ix_(before[row], order[row])] for row in range(len(order))]
    candidates = np.array([tokens] * len(order), dtype=np.uint32)
    return Trellis(mx.array(candidates), mx.array(np.stack(lines)))


class World:
    """A tiny random pair behind every beginning of an answer."""

    def __init__(self, sharpness: float = 0.3) -> None:
        self.drafter = tiny_drafter(selector_top_k=VOCAB)
        self.target = join(tiny_target(), self.drafter)
        self.sharpness = sharpness
        self.logits = cache(self._logits)
        self.trellis = cache(self._trellis)

    def _logits(self, prefix: Prefix) -> mx.array:
        """The target's logits `[V]` of the next token, flattened so that every token has odds."""
        reading = self.target.read(mx.array([*PROMPT, *prefix]), self.target.make_caches())
        return self.sharpness * reading.logits[-1]

    def _trellis(self, prefix: Prefix, num_rows: int) -> Trellis:
        conversation = Conversation(self.target, self.drafter)
        conversation.prefill([*PROMPT, *prefix])
        anchor = mx.array(conversation.tokens[-1:], dtype=mx.uint32)
        trellis = self.drafter.propose(conversation.context, None, anchor, num_rows + 1)
        return narrowed(trellis, CANDIDATES)

    def block(self, prefix: Prefix, tokens: Prefix) -> mx.array:
        """The logits `[L, V]` that decide a block."""
        return mx.stack([self.logits((*prefix, *tokens[:n])) for n in range(len(tokens) + 1)])


WORLD = World()


def exact(params: SamplingParams, prefix: Prefix = (), share: float = 1.0) -> dict[Prefix, float]:
    """The probability of each beginning of three tokens, or less where the answer ends."""
    if len(prefix) == NUM_TOKENS or END in prefix:
        return {prefix: share}
    distribution = Distribution(params, VOCAB)
    raw = WORLD.logits(prefix)[None]
    logits = distribution.logits(raw, [*PROMPT, *prefix], mx.zeros((0,), dtype=mx.uint32))
    allowed = mx.zeros((VOCAB,)).at[mx.array(may_follow(prefix))].add(1) > 0
    rows = distribution.rows(mx.where(allowed, logits.astype(mx.float32), -mx.inf))
    ids = range(VOCAB) if rows.ids is None else rows.ids[0].tolist()
    shares = zip(ids, np.array(mx.softmax(rows.weights[0]), dtype=float), strict=True)
    following = [exact(params, (*prefix, t), share * p) for t, p in shares if p > 0]
    return {end: value for branch in following for end, value in branch.items()}


def simulate(params: SamplingParams, block: int, draws: int = NUM_DRAWS) -> Counter[Prefix]:
    """What as many seeds emit first, drafting in blocks: the engine's own walks and verdicts.

    Seeds with the same beginning and the same draft are decided together.
    """
    words = np.random.default_rng(7).integers(0, 2**32, (draws, 2), dtype=np.uint32)
    waiting: dict[Prefix, list[np.ndarray]] = {(): [words]}
    counts: Counter[Prefix] = Counter()
    while waiting:
        prefix = min(waiting, key=len)
        here = np.concatenate(waiting.pop(prefix))
        for draft, drawn in drafts(params, prefix, here, block):
            for outcome, chosen in verdicts(params, prefix, draft, drawn):
                if len(outcome) == NUM_TOKENS or END in outcome:
                    counts[outcome] += len(chosen)
                else:
                    waiting.setdefault(outcome, []).append(chosen)
    return counts


def drafts(
    params: SamplingParams, prefix: Prefix, words: np.ndarray, block: int
) -> Iterator[tuple[Draft, np.ndarray]]:
    """Each draft behind a beginning, with the seeds that make it."""
    chooser = chooser_behind(params, prefix)
    position, num_rows = len(PROMPT) + len(prefix), block - 1
    forced = chooser.forced(num_rows)
    if num_rows == 0 or forced.forced:
        yield forced, words
        return
    trellis = WORLD.trellis(prefix, num_rows)
    candidates, scores = np.array(trellis.candidates), np.array(trellis.scores)
    noise = np.array(mx.vmap(lambda w: noise_of(w, position, candidates.shape))(mx.array(words)))
    assert chooser.constraint is not None
    walks: dict[Prefix, Any] = {}
    seeds: dict[Prefix, list[int]] = {}
    for seed, gumbels in enumerate(noise):
        walk = chooser.constraint.walk(candidates, scores, gumbels, params.temperature)
        walks[tuple(walk.tokens)] = walk
        seeds.setdefault(tuple(walk.tokens), []).append(seed)
    for tokens, walk in walks.items():
        yield chooser._as_draft(walk), words[seeds[tokens]]


def noise_of(words: mx.array, position: int, shape: tuple[int, ...]) -> mx.array:
    return Randomness(words).gumbels(position, *shape, Purpose.DRAFT)


def verdicts(
    params: SamplingParams, prefix: Prefix, draft: Draft, words: np.ndarray
) -> Iterator[tuple[Prefix, np.ndarray]]:
    """What comes of a draft, cut to three tokens, with the seeds for which it does."""
    raw = WORLD.block(prefix, tuple(draft.tokens.tolist()))
    history, room = [*PROMPT, *prefix], NUM_TOKENS - len(prefix)

    def judge(seed: mx.array) -> mx.array:
        return Chooser(params, Randomness(seed), VOCAB).judge(raw, draft, len(history), history)

    outcomes: dict[Prefix, list[int]] = {}
    for seed, ruling in enumerate(np.array(mx.vmap(judge)(mx.array(words))).tolist()):
        tokens = ruling[1 : 2 + min(ruling[0], room - 1)]
        tokens = tokens[: tokens.index(END) + 1] if END in tokens else tokens
        outcomes.setdefault((*prefix, *tokens), []).append(seed)
    for outcome, seeds in outcomes.items():
        yield outcome, words[seeds]


def chooser_behind(params: SamplingParams, prefix: Prefix) -> Chooser:
    constraint = Constraint(GRAMMAR, grammar_tokenizer(byte_bpe(), VOCAB, {END}), VOCAB)
    constraint.commit(list(prefix))
    return Chooser(params, Randomness.from_seed(0), VOCAB, constraint)


def compared(counts: Mapping[Prefix, int], shares: Mapping[Prefix, float]) -> float:
    """p value of the draws."""
    outcomes = sorted({*counts, *shares})
    seen = np.array([counts.get(outcome, 0) for outcome in outcomes])
    return p_value(seen, np.array([shares.get(outcome, 0.0) for outcome in outcomes]))


FIELDS: dict[str, dict[str, Any]] = {
    "alone": {},
    "hot": {"temperature": 2.0},
    "top k": {"top_k": 2},
    "top p and bias": {"top_p": 0.9, "logit_bias": {97: 0.7, 261: -0.5}},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "penalty_context": 3},
}


@pytest.mark.parametrize(
    ("block", "name"), [(1, "alone"), (2, "alone"), (4, "alone"), *((3, name) for name in FIELDS)]
)
def test_three_tokens_are_distributed_as_the_masked_target(block: int, name: str) -> None:
    params = SamplingParams(**{"temperature": 1.0, **FIELDS[name]})
    shares = exact(params)
    assert len(shares) >= 4
    assert sum(shares.values()) == pytest.approx(1, abs=1e-4)
    assert compared(simulate(params, block), shares) > 1e-3


def test_a_masked_distribution_that_is_another_is_noticed() -> None:
    """Other draws of the same world: hotter, or with a token more likely."""
    params = SamplingParams(temperature=1.0)
    for other in ({"temperature": 1.5}, {"temperature": 1.0, "logit_bias": {97: 0.3}}):
        assert compared(simulate(SamplingParams(**other), 2), exact(params)) < 1e-6


def test_the_simulation_drafts_and_accepts() -> None:
    params = SamplingParams(temperature=1.0)
    words = np.random.default_rng(1).integers(0, 2**32, (500, 2), dtype=np.uint32)
    made = list(drafts(params, (), words, 4))
    assert len(made) > 5
    assert max(draft.tokens.size for draft, _ in made) == 3
    lengths = [len(end) for draft, drawn in made for end, _ in verdicts(params, (), draft, drawn)]
    assert {1, 2, 3} <= set(lengths)
