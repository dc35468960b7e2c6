"""The promise: greedy speculative decoding equals plain decoding, token for token."""

from collections.abc import Sequence

import mlx.core as mx
import pytest
from tiny import (
    END,
    TARGETS,
    VOCAB,
    ScriptedDrafter,
    cache_rows,
    pair_of,
    plain_ids,
    tiny_config,
    tiny_drafter,
    tiny_pair,
    tiny_target,
)

from dflash2_mlx import generate, stream_generate
from dflash2_mlx.decode import Conversation, decode
from dflash2_mlx.models.drafter import Drafter
from dflash2_mlx.pair import Pair
from dflash2_mlx.target import Target

PROMPT = list(b"A prompt that is longer than every window.")
NUM_TOKENS = 40
BLOCKS = [*range(1, 10), 12, 16]


def run(pair: Pair, block: int, max_tokens: int = NUM_TOKENS, prompt: Sequence[int] = PROMPT):
    """All steps of a decode, and the conversation it leaves behind."""
    conversation = Conversation(pair.target, pair.drafter)
    conversation.prefill(prompt)
    steps = list(
        decode(
            conversation,
            lambda: block,
            max_tokens=max_tokens,
            end_tokens=pair.end_tokens,
        )
    )
    return steps, conversation


def ids_of(steps) -> list[int]:
    return [token for step in steps for token in step.tokens]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("kind", TARGETS)
def test_a_random_drafter_changes_nothing(kind: str, block: int) -> None:
    pair = tiny_pair(kind)
    steps, _ = run(pair, block)
    assert ids_of(steps) == plain_ids(pair.target.model, PROMPT, NUM_TOKENS)
    assert steps[-1].finish_reason == "length"


SCRIPTS = {
    "always right": lambda truth, drafts: drafts,
    "always wrong": lambda truth, drafts: [(d + 1) % VOCAB for d in drafts],
    "proposes end tokens": lambda truth, drafts: [END] * len(drafts),
    **{
        f"wrong at {at}": lambda truth, drafts, at=at: [
            (d + 1) % VOCAB if i == at else d for i, d in enumerate(drafts)
        ]
        for at in range(7)
    },
}


def scripted_pair(kind: str, script: str, num_tokens: int = NUM_TOKENS):
    model = tiny_target(kind)
    truth = plain_ids(model, PROMPT, num_tokens + 16)
    change = SCRIPTS[script]

    def propose(position: int, width: int) -> list[int]:
        first = position + 1 - len(PROMPT)
        right = [*truth[first : first + width - 1], *[0] * width][: width - 1]
        return change(truth, right)

    return pair_of(Target(model, taps=[0]), ScriptedDrafter(propose)), truth


@pytest.mark.parametrize("block", [2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("kind", ["grouped-query", "sliding"])
def test_no_script_changes_ids_counts_or_caches(kind: str, script: str, block: int) -> None:
    pair, truth = scripted_pair(kind, script)
    steps, conversation = run(pair, block)
    assert ids_of(steps) == truth[:NUM_TOKENS]
    plain, plain_conversation = run(pair_of(Target(pair.target.model)), 1)
    assert ids_of(plain) == truth[:NUM_TOKENS]
    assert conversation.length == plain_conversation.length == len(PROMPT) - 1 + NUM_TOKENS
    assert conversation.context[0].offset + len(conversation._unseen) == conversation.length
    for ours, theirs in zip(cache_rows(conversation), cache_rows(plain_conversation), strict=True):
        assert ours.shape == theirs.shape
        assert mx.allclose(ours, theirs, atol=1e-4)


def test_an_always_right_drafter_fills_every_pass() -> None:
    pair, _ = scripted_pair("dense", "always right")
    steps, _ = run(pair, 5)
    assert [len(step.tokens) for step in steps] == [1] + [5] * (NUM_TOKENS // 5 - 1) + [4]
    assert [step.from_draft for step in steps] == [0] + [4] * (NUM_TOKENS // 5)


def test_flags_and_totals_equal_the_script() -> None:
    pair, _ = scripted_pair("dense", "wrong at 2")
    steps, _ = run(pair, 6)
    assert {(len(step.tokens), step.from_draft) for step in steps[1:-1]} == {(3, 2)}
    assert [step.drafted for step in steps[:5]] == [0, 5, 5, 5, 5]


def test_a_bonus_token_is_not_counted_as_drafted() -> None:
    pair, _ = scripted_pair("dense", "always wrong")
    steps, _ = run(pair, 4)
    assert all((len(step.tokens), step.from_draft) == (1, 0) for step in steps)


def test_nan_logits_of_a_drafter_cost_speed_only() -> None:
    model, drafter = tiny_target(), tiny_drafter()
    drafter.bind(Target(model).embedding, lambda hidden: mx.full((hidden.shape[0], VOCAB), mx.nan))
    pair = pair_of(Target(model, drafter.config.target_layer_ids), drafter)
    steps, _ = run(pair, 6)
    assert ids_of(steps) == plain_ids(model, PROMPT, NUM_TOKENS)


@pytest.mark.parametrize("place", range(5))
def test_an_end_token_ends_the_output_anywhere_in_a_block(place: int) -> None:
    """First, in the middle, last of the drafts, and as the target's own token."""
    pair, truth = scripted_pair("sliding", "always right")
    end = truth[10 + place]
    first = truth.index(end)
    pair.end_tokens = frozenset({end})
    steps, conversation = run(pair, 5)
    assert ids_of(steps) == truth[: first + 1]
    assert steps[-1].finish_reason == "stop"
    assert conversation.length == len(PROMPT) - 1 + first + 1
    assert all(cache.offset == conversation.length for cache in conversation.caches)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
@pytest.mark.parametrize("block", [1, 4, 8])
def test_max_tokens_is_exact_and_nothing_comes_twice(block: int, max_tokens: int) -> None:
    pair, truth = scripted_pair("dense", "always right")
    result = generate(pair, PROMPT, max_tokens=max_tokens, block_size=block)
    assert list(result.token_ids) == truth[:max_tokens]
    assert result.completion_tokens == sum(result.accepted) == max_tokens
    assert result.finish_reason == "length"


@pytest.mark.parametrize("num_steps", [0, 1, 3])
@pytest.mark.parametrize("kind", ["dense", "sliding"])
def test_closing_early_leaves_sound_caches(kind: str, num_steps: int) -> None:
    pair, truth = scripted_pair(kind, "wrong at 2")
    conversation = Conversation(pair.target, pair.drafter)
    conversation.prefill(PROMPT)
    steps = decode(conversation, lambda: 6, max_tokens=NUM_TOKENS, end_tokens=frozenset())
    taken = [next(steps) for _ in range(num_steps)]
    steps.close()
    emitted = ids_of(taken)
    assert emitted == truth[: len(emitted)]
    assert conversation.length == len(PROMPT) - 1 + len(emitted)
    assert {cache.offset for cache in conversation.caches} == {conversation.length}
    # ... so that the same conversation can go on as if nothing had happened.
    more = decode(
        conversation,
        lambda: 3,
        max_tokens=8,
        end_tokens=frozenset(),
    )
    assert ids_of(more) == truth[len(emitted) : len(emitted) + 8]


def test_real_tokens_with_the_mask_id_stay() -> None:
    """Slots are cut by position: a committed token may well have the mask's id."""
    model = tiny_target()
    truth = plain_ids(model, PROMPT, NUM_TOKENS)
    drafter = Drafter(tiny_config(mask_token_id=truth[3]))
    pair = pair_of(Target(model, drafter.config.target_layer_ids), drafter)
    drafter.bind(pair.target.embedding, pair.target.head)
    assert list(generate(pair, PROMPT, max_tokens=NUM_TOKENS).token_ids) == truth


def test_requests_of_any_length_follow_each_other() -> None:
    pair = tiny_pair("sliding")
    for length in (200, 20, 1, 2, 90):
        prompt = [(7 * i) % 250 for i in range(length)]
        ids = generate(pair, prompt, max_tokens=20, block_size=6).token_ids
        assert list(ids) == plain_ids(pair.target.model, prompt, 20)


def test_the_block_asked_for_is_the_block_that_runs() -> None:
    pair, _ = scripted_pair("dense", "always wrong")
    for block in (2, 4, 8):
        pair.drafter.widths.clear()
        generate(pair, PROMPT, max_tokens=NUM_TOKENS, block_size=block)
        assert max(pair.drafter.widths) == block
    pair.drafter.widths.clear()
    result = generate(pair, PROMPT, max_tokens=NUM_TOKENS)
    assert max(pair.drafter.widths) == result.effective.block_size == 8


def test_a_step_comes_after_the_next_pass_was_launched() -> None:
    pair, _ = scripted_pair("dense", "wrong at 2")
    steps = stream_generate(pair, PROMPT, max_tokens=NUM_TOKENS, block_size=4)
    next(steps)
    assert len(pair.drafter.widths) == 1
    next(steps)
    assert len(pair.drafter.widths) == 2
    steps.close()
