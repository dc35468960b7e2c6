"""Rewinding is exact: what a drafter guessed wrong is nowhere in the target afterwards."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from families import build
from mlx_lm.models.cache import ArraysCache, make_prompt_cache
from tiny import NUM_LAYERS, VOCAB, ScriptedDrafter, pair_of, plain_ids, tiny_drafter

from dflash2_mlx import decode, generate
from dflash2_mlx.decode import Conversation
from dflash2_mlx.models.cache import leaves
from dflash2_mlx.models.quantize import backbone_bits, quantize
from dflash2_mlx.models.recurrent import Tape
from dflash2_mlx.pair import Pair, join
from dflash2_mlx.target import Caches, Target

on_cpu = pytest.mark.skipif(mx.metal.is_available(), reason="bits are compared on CPU")

SHORT = [(7 * i * i + 3 * i) % 250 for i in range(20)]
LONG = [(5 * i * i + i) % 250 for i in range(90)]
VERIFIED = mx.arange(100, 108)
NUM_PASSES, WIDTH = 5, 5
NUM_TOKENS = 1 + (NUM_PASSES - 1) * WIDTH  # the first pass drafts nothing

# Eight layers, of which every fourth attends, as in Qwen3.8-27B.
SHAPES: dict[str, dict[str, Any]] = {"qwen3_5": {"num_hidden_layers": 2 * NUM_LAYERS}}
PRECISIONS = ("float32", "4 bits")
HYBRIDS = ("qwen3_5", "qwen3_next", "kimi_linear", "lfm2", "gear")


@cache
def hybrid(family: str, precision: str = "float32") -> nn.Module:
    """A tiny hybrid; "4 bits" are quantized weights among bfloat16 ones, as people run them."""
    model = build(family, **SHAPES.get(family, {}))
    if precision != "float32":
        model.set_dtype(mx.bfloat16)
    if precision == "4 bits":
        nn.quantize(model, class_predicate=quantizable, group_size=32, bits=4)
    mx.eval(model.parameters())
    return model


def quantizable(_: str, module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


@cache
def plain(family: str, precision: str, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    return plain_ids(hybrid(family, precision), prompt, num_tokens, ends=())


def state(caches: Caches) -> Iterator[mx.array]:
    for leaf in leaves(caches):
        yield from leaf.cache if isinstance(leaf, ArraysCache) else leaf.rows()


def recurrent_state(caches: Caches) -> list[mx.array]:
    return [
        array for leaf in leaves(caches) if isinstance(leaf, ArraysCache) for array in leaf.cache
    ]


def same_bits(ours: Sequence[mx.array], theirs: Sequence[mx.array]) -> bool:
    assert ours
    return all(mx.array_equal(one, other) for one, other in zip(ours, theirs, strict=True))


@on_cpu
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_recorded_verify_is_the_model_itself(family: str, precision: str) -> None:
    """Bit for bit, so that mlx-lm's numerics are followed when they change."""
    model = hybrid(family, precision)
    target, theirs = Target(model), make_prompt_cache(model)
    ours = target.make_caches()
    for tokens in (mx.array(SHORT), VERIFIED):
        reading = target.read(tokens, ours)
        assert mx.array_equal(reading.logits, model(tokens[None], cache=theirs)[0])
    assert same_bits(recurrent_state(ours), recurrent_state(theirs))


@on_cpu
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_rewind_leaves_what_mlx_lm_keeps_of_masked_rows(family: str, precision: str) -> None:
    """mlx-lm reads all rows with `lengths` set; we read them all and rewind: the same bits."""
    model = hybrid(family, precision)
    target = Target(model)
    for kept in range(1, VERIFIED.size):
        ours, theirs = target.make_caches(), make_prompt_cache(model)
        target.read(mx.array(SHORT), ours)
        target.rewind(ours, target.read(VERIFIED, ours), kept)
        model(mx.array([SHORT]), cache=theirs)
        for leaf in leaves(theirs):
            if isinstance(leaf, ArraysCache):
                leaf.lengths = mx.array([kept])
        model(VERIFIED[None], cache=theirs)
        assert same_bits(recurrent_state(ours), recurrent_state(theirs)), kept


Script = Callable[[list[int]], list[int]]


def wrong_at(*places: int) -> Script:
    return lambda drafts: [(d + 1) % VOCAB if i in places else d for i, d in enumerate(drafts)]


always_right, always_wrong = wrong_at(), wrong_at(*range(8))


def scripted(truth: Sequence[int], prompt: Sequence[int], script: Script) -> ScriptedDrafter:
    padded = [*truth, *[0] * 8]

    def propose(position: int, width: int) -> list[int]:
        first = position + 1 - len(prompt)
        return script(padded[first : first + width - 1])

    return ScriptedDrafter(propose)


def after(
    script: Script, family: str, precision: str = "float32", prompt: Sequence[int] = SHORT
) -> tuple[int, list[mx.array], mx.array]:
    """Passes made, state left and next logits, once a script has drafted NUM_TOKENS."""
    truth = plain(family, precision, tuple(prompt), NUM_TOKENS)
    target = Target(hybrid(family, precision), taps=[0])
    conversation = Conversation(target, scripted(truth, prompt, script))
    conversation.prefill(prompt)
    steps = list(
        decode.decode(conversation, lambda: WIDTH, max_tokens=NUM_TOKENS, end_tokens=frozenset())
    )
    assert [token for step in steps for token in step.tokens] == truth
    final = [mx.array(array) for array in state(conversation.caches)]
    return len(steps), final, target.read(mx.array(truth[-1:]), conversation.caches).logits


@on_cpu
@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize(
    ("family", "precision"),
    [
        ("qwen3_5", "bfloat16"),
        ("qwen3_5", "4 bits"),
        ("qwen3_next", "4 bits"),
        ("lfm2", "bfloat16"),
    ],
)
def test_no_guess_of_a_drafter_is_left_in_the_state(
    family: str, precision: str, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Always right or always wrong: the same bits after the same text (z-lab/dflash#172)."""
    monkeypatch.setattr(decode, "PREFILL_STEP", len(prompt) - 2)  # the last chunk: one token
    passes, right, logits = after(always_right, family, precision, prompt)
    assert passes == NUM_PASSES
    for script in (always_wrong, wrong_at(2)):
        passes, wrong, wrong_logits = after(script, family, precision, prompt)
        assert passes > NUM_PASSES
        assert same_bits(wrong, right)
        assert mx.array_equal(wrong_logits, logits)


@pytest.mark.parametrize("family", HYBRIDS)
def test_in_float32_right_and_wrong_differ_by_rounding_only(family: str) -> None:
    _, right, _ = after(always_right, family)
    _, wrong, _ = after(always_wrong, family)
    assert relative_distance(right, wrong) < 1e-5


def relative_distance(ones: Sequence[mx.array], others: Sequence[mx.array]) -> float:
    pairs = zip(ones, others, strict=True)
    return max((mx.abs(one - other).max() / mx.abs(one).max()).item() for one, other in pairs)


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_state_that_is_not_rewound_would_be_noticed(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tape, "rewind", lambda tape, kept: None)
    with pytest.raises(AssertionError):
        after(always_wrong, family)


@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["without thinking", "with thinking"])
@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
def test_a_single_draft_per_pass_changes_nothing(family: str, prompt: list[int]) -> None:
    """The least that drafting can do, over 64 tokens (vllm-project/vllm#54928)."""
    drafter = tiny_drafter(num_target_layers=len(hybrid(family).layers))
    pair = pair_of(join(hybrid(family), drafter), drafter, end_tokens=frozenset())
    result = generate(pair, prompt, max_tokens=64, block_size=2)
    assert list(result.token_ids) == plain(family, "float32", tuple(prompt), 64)


def qwen_pair() -> Pair:
    """Shaped like Qwen3.8-27B with its drafter: eight layers, both in 4 bits."""
    model = hybrid("qwen3_5", "4 bits")
    drafter = tiny_drafter(num_target_layers=len(model.layers), target_layer_ids=[1, 3, 6])
    quantize(drafter, backbone_bits(4))
    return pair_of(join(model, drafter), drafter, end_tokens=frozenset())


def test_a_hybrid_in_4_bits_drafts_from_the_first_request_on() -> None:
    """Not at the first completion, as where states cannot be trimmed (ml-explore/mlx-lm#1446)."""
    pair = qwen_pair()
    effective = pair.effective()
    assert (effective.drafting, effective.target_bits, pair.drafter.fc.bits) == (True, 4, 4)
    for prompt in (LONG, SHORT[:1], SHORT):
        for block in (2, 5, 8):
            result = generate(pair, prompt, max_tokens=12, block_size=block)
            assert list(result.token_ids) == plain("qwen3_5", "4 bits", tuple(prompt), 12)


@pytest.mark.parametrize("script", [always_right, always_wrong, wrong_at(2)])
@pytest.mark.parametrize("block", [2, 5, 8])
def test_no_script_changes_a_hybrid_in_4_bits(script: Script, block: int) -> None:
    truth = plain("qwen3_5", "4 bits", tuple(SHORT), 12)
    target = Target(hybrid("qwen3_5", "4 bits"), taps=[0])
    pair = pair_of(target, scripted(truth, SHORT, script), end_tokens=frozenset())
    assert list(generate(pair, SHORT, max_tokens=12, block_size=block).token_ids) == truth


def test_a_full_window_is_rewound_at_every_second_draft() -> None:
    """Window 16, 40 tokens: rejected ones leave it (ml-explore/mlx-swift-lm#424)."""
    model = build("llama", sliding_window=16)
    truth = plain_ids(model, SHORT, 40, ends=())
    drafter = scripted(truth, SHORT, wrong_at(1, 3, 5))
    pair = pair_of(Target(model, taps=[0]), drafter, end_tokens=frozenset())
    windows = {leaf.window for leaf in leaves(pair.target.make_caches())}
    assert windows == {16, None}
    result = generate(pair, SHORT, max_tokens=40, block_size=7)
    assert list(result.token_ids) == truth
    assert set(result.accepted[1:-1]) == {2}
