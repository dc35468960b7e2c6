"""Every family of mlx-lm: drafting changes no token and leaves no trace, or is off and says why."""

import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from families import TESTED, build
from mlx_lm.models import afm7
from mlx_lm.models.cache import make_prompt_cache
from tiny import VOCAB, ScriptedDrafter, pair_of, plain_ids, tiny_drafter

from dflash2_mlx import decode, generate
from dflash2_mlx.models.cache import leaves
from dflash2_mlx.pair import Pair, join
from dflash2_mlx.target import Caches, Target

PROMPT = [(7 * i * i + 3 * i) % 250 for i in range(61)]
BLOCK = mx.arange(100, 108)
BLOCK_SIZES = (2, 5, 8)
NUM_TOKENS = 8
CHUNKS = (2048, 7, 59)  # tokens that a prefill reads at a time; of the last, one is left over
TOLERANCE = 1e-4

NO_DRAFTING = {
    "baichuan_m1": "its recurrent state is not kept by modules of its own",
    "deepseek_v41": "its cache kind LayerCache cannot be rewound",
    "gemma3n": "its decoder layers do not hand on one hidden state per token",
    "iquestloopcoder": "its decoder layers do not hand on one hidden state per token",
    "phi3small": "its tokens see later ones in mlx-lm",
    "plamo3": "its masks look further back than its caches",
}
DRAFTED = [family for family in TESTED if family not in NO_DRAFTING]

SCRIPTS = {
    "always right": lambda drafts: drafts,
    "always wrong": lambda drafts: [(d + 1) % VOCAB for d in drafts],
    "wrong at 2": lambda drafts: [
        *drafts[:2],
        *[(d + 1) % VOCAB for d in drafts[2:3]],
        *drafts[3:],
    ],
}
ALL_SCRIPTS = list(itertools.product(SCRIPTS, BLOCK_SIZES))
SOME_SCRIPTS = list(zip(SCRIPTS, (8, 2, 5), strict=True))


@cache
def model_of(family: str) -> nn.Module:
    return build(family)


@cache
def truth_of(family: str) -> list[int]:
    """Greedy ids by mlx-lm's own loop."""
    return plain_ids(model_of(family), PROMPT, NUM_TOKENS, ends=())


def random_pair(family: str) -> Pair:
    drafter = tiny_drafter()
    return pair_of(join(model_of(family), drafter), drafter, end_tokens=frozenset())


def scripted_pair(family: str, target: Target, script: str) -> Pair:
    truth = [*truth_of(family), *[0] * max(BLOCK_SIZES)]

    def propose(position: int, width: int) -> list[int]:
        first = position + 1 - len(PROMPT)
        return SCRIPTS[script](truth[first : first + width - 1])

    return pair_of(target, ScriptedDrafter(propose), end_tokens=frozenset())


def only_grows(target: Target) -> bool:
    """Whether nothing but keys without a window is kept: rewinding is a shorter length."""
    return all(getattr(leaf, "window", 0) is None for leaf in leaves(target.make_caches()))


def ids_of(pair: Pair, block_size: int) -> list[int]:
    return list(generate(pair, PROMPT, max_tokens=NUM_TOKENS, block_size=block_size).token_ids)


def rows_of(caches: Caches) -> Iterator[mx.array]:
    """All state that a next token depends on."""
    for leaf in leaves(caches):
        if hasattr(leaf, "rows"):
            yield from leaf.rows() if not leaf.empty() else ()
        else:
            yield from (array for array in leaf.cache if array is not None)


def distance(ours: Caches, theirs: Caches) -> float:
    pairs = list(zip(rows_of(ours), rows_of(theirs), strict=True))
    assert pairs
    assert all(one.shape == other.shape for one, other in pairs)
    return max(
        (mx.abs(one - other).max() / mx.maximum(1, mx.abs(other).max())).item()
        for one, other in pairs
        if one.size
    )


def test_the_families_without_drafting_are_these() -> None:
    reasons = {family: Target(model_of(family)).undraftable for family in TESTED}
    assert {family: reason for family, reason in reasons.items() if reason} == NO_DRAFTING


@pytest.mark.parametrize("family", DRAFTED)
def test_a_random_drafter_changes_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, truth = random_pair(family), truth_of(family)
    assert pair.effective().drafting
    assert len(set(truth)) >= 4
    for block_size, chunk in zip(BLOCK_SIZES, CHUNKS, strict=True):
        monkeypatch.setattr(decode, "PREFILL_STEP", chunk)
        assert ids_of(pair, block_size) == truth, (block_size, chunk)


@pytest.mark.parametrize("family", DRAFTED)
def test_no_script_changes_anything(family: str) -> None:
    target, truth = Target(model_of(family), taps=[0]), truth_of(family)
    for script, block_size in SOME_SCRIPTS if only_grows(target) else ALL_SCRIPTS:
        pair = scripted_pair(family, target, script)
        assert ids_of(pair, block_size) == truth, (script, block_size)


@pytest.mark.parametrize("family", DRAFTED)
def test_a_rewound_target_never_read_more(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Keys of afm7 are rounded to whole numbers; which way a tie falls depends on a block's rows.
    monkeypatch.setattr(afm7, "fake_8bit_quant", lambda rows, scale: rows)
    target = Target(model_of(family))
    prompt = mx.array(PROMPT[:20])
    clean = target.make_caches()
    target.read(prompt, clean)
    for kept in range(len(BLOCK) + 1):
        if kept:
            target.read(BLOCK[kept - 1 : kept], clean)
        used = target.make_caches()
        target.read(prompt, used)
        target.rewind(used, target.read(BLOCK, used), kept)
        assert distance(used, clean) < TOLERANCE, kept


@pytest.mark.parametrize("family", DRAFTED)
def test_taps_are_what_the_layers_return(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(family)
    target, tokens = Target(model, taps=range(len(model.layers))), mx.array(PROMPT)
    outputs: dict[int, Any] = {}
    for kind in {type(layer) for layer in model.layers}:

        def call(self: nn.Module, *args: Any, forward: Any = kind.__call__, **kwargs: Any) -> Any:
            output = forward(self, *args, **kwargs)
            outputs[id(self)] = output[0] if isinstance(output, tuple) else output
            return output

        monkeypatch.setattr(kind, "__call__", call)
    logits = model(tokens[None], cache=make_prompt_cache(model))[0]
    monkeypatch.undo()
    expected = mx.concatenate([outputs[id(layer)] for layer in model.layers], axis=-1)
    reading = target.read(tokens, target.make_caches())
    assert mx.array_equal(reading.taps, expected)
    assert mx.array_equal(reading.logits, logits)


@pytest.mark.parametrize("family", NO_DRAFTING)
def test_plain_decoding_works_without_drafting(family: str) -> None:
    drafter = tiny_drafter()
    target = Target(model_of(family), taps=(0, 2))
    pair = pair_of(target, drafter, end_tokens=frozenset())
    result = generate(pair, PROMPT, max_tokens=NUM_TOKENS)
    assert list(result.token_ids) == truth_of(family)
    assert (result.effective.drafting, result.effective.reason) == (False, NO_DRAFTING[family])


@pytest.mark.parametrize("family", TESTED)
def test_tokens_see_no_later_ones_where_drafting_is_on(family: str) -> None:
    model = model_of(family)
    one, other = ([*PROMPT, token] for token in (3, 40))
    logits = [
        model(mx.array([ids]), cache=make_prompt_cache(model))[0, :-1] for ids in (one, other)
    ]
    sees_later_ones = not mx.allclose(*logits, atol=TOLERANCE).item()
    assert sees_later_ones == (family == "phi3small")
