"""What a caller of the library sees: text, counts, reasons, refusals."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from test_decode import PROMPT, scripted_pair
from tiny import END, VOCAB, ScriptedDrafter, pair_of, plain_ids, tiny_pair, tiny_target

import dflash2_mlx
from dflash2_mlx import SamplingParams, generate, stream_generate
from dflash2_mlx.canary import NUM_PASSES
from dflash2_mlx.errors import ContextExceeded, InvalidRequest
from dflash2_mlx.pair import end_tokens
from dflash2_mlx.target import Target


def scripted_target(text: bytes) -> "ScriptedTarget":
    return ScriptedTarget([*text, END])


class ScriptedTarget(Target):
    """A real tiny model whose logits are replaced: position i of the answer is `script[i]`."""

    def __init__(self, script: list[int]) -> None:
        super().__init__(tiny_target("dense"), taps=[0])
        self.script = script

    def read(self, tokens, caches, **options):
        position = caches[0].offset
        reading = super().read(tokens, caches, **options)
        rows = range(position - len(PROMPT) + 1, position - len(PROMPT) + 1 + tokens.size)
        chosen = [self.script[row] if 0 <= row < len(self.script) else END for row in rows]
        logits = mx.eye(VOCAB)[mx.array(chosen)] + 0 * reading.logits
        return dataclasses.replace(reading, logits=logits)


def answer(text: bytes, *, block: int = 4, right: bool = True, **options):
    script = [*text, END]

    def propose(position: int, width: int) -> list[int]:
        first = position + 1 - len(PROMPT)
        drafts = [*script[first : first + width - 1], *[END] * width][: width - 1]
        return drafts if right else [65] * (width - 1)

    pair = pair_of(scripted_target(text), ScriptedDrafter(propose))
    sampling = {name: options.pop(name) for name in ("stop", "logprobs") if name in options}
    return stream_generate(pair, PROMPT, SamplingParams(**sampling), block_size=block, **options)


@pytest.mark.parametrize("block", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("right", [True, False])
def test_text_is_one_decode_of_the_ids(block: int, right: bool) -> None:
    text = "Ahoj ď 😀 漢字 e\u0301 end"
    generation = answer(text.encode(), block=block, right=right)
    pieces = [step.text for step in generation]
    result = generation.result
    assert "".join(pieces) == result.text == text
    assert result.token_ids == (*text.encode(), END)
    assert result.finish_reason == "stop"


@pytest.mark.parametrize("block", [1, 3, 4, 8])
def test_a_stop_string_ends_text_and_ids_across_blocks(block: int) -> None:
    generation = answer(b"alpha beta gamma delta", block=block, stop=("beta gamma",))
    assert "".join(step.text for step in generation) == "alpha "
    result = generation.result
    assert (result.text, result.finish_reason) == ("alpha ", "stop")
    assert bytes(result.token_ids) == b"alpha beta gamma"
    assert sum(result.accepted) == result.completion_tokens == len(result.token_ids)


def test_a_stream_cut_inside_a_character_is_no_fault() -> None:
    generation = answer("😀".encode(), max_tokens=2)
    assert "".join(step.text for step in generation) == "\ufffd"
    assert generation.result.finish_reason == "length"


@pytest.mark.parametrize("block", [1, 4, 8])
def test_special_tokens_do_not_show(block: int) -> None:
    pair = pair_of(ScriptedTarget([97, 280, 98, END]), end_tokens=frozenset({98, END}))
    assert generate(pair, PROMPT, block_size=block).text == "a"


def test_the_result_holds_the_fields_of_json() -> None:
    pair, truth = scripted_pair("dense", "wrong at 2")
    result = generate(pair, PROMPT, max_tokens=12, block_size=6)
    shown = json.loads(json.dumps(result.to_dict()))
    assert list(shown) == [
        "text",
        "token_ids",
        "finish_reason",
        "prompt_tokens",
        "completion_tokens",
        "cached_tokens",
        "passes",
        "accepted",
        "redecided",
        "tokens_per_pass",
        "decode_tokens_per_s",
        "prefill_tokens_per_s",
        "ttft_s",
        "peak_memory_bytes",
        "effective",
        "from_draft",
        "tokens_from_draft",
    ]
    assert list(shown["effective"]) == [
        "target",
        "drafter",
        "target_bits",
        "drafter_bits",
        "block_size",
        "drafting",
        "reason",
        "seed",
    ]
    assert shown["token_ids"] == truth[:12]
    assert shown["accepted"] == [1, 3, 3, 3, 2]
    assert (shown["passes"], shown["tokens_per_pass"]) == (5, 12 / 5)
    assert shown["prompt_tokens"] == len(PROMPT)
    # Each pass ends in a token of the target's own: the first, and one behind two drafts that stood
    # (the last pass is cut by max_tokens).
    drafted = [False] + [True, True, False] * 3 + [True, False]
    assert (shown["from_draft"], shown["tokens_from_draft"]) == (drafted, 7)


def test_log_probabilities_are_in_the_result_when_asked_for() -> None:
    pair = tiny_pair()
    result = generate(pair, PROMPT, SamplingParams(logprobs=2), max_tokens=5)
    shown = result.to_dict()
    assert list(shown)[-1] == "logprobs"
    for entry, token in zip(
        json.loads(json.dumps(shown["logprobs"])), result.token_ids, strict=True
    ):
        assert list(entry) == ["token", "logprob", "top"]
        assert entry["token"] == entry["top"][0][0] == token
        assert entry["logprob"] == entry["top"][0][1] >= entry["top"][1][1]
    bare = generate(pair, PROMPT, SamplingParams(logprobs=0), max_tokens=5).to_dict()
    assert [entry["top"] for entry in bare["logprobs"]] == [[]] * 5
    assert generate(pair, PROMPT, max_tokens=5).logprobs is None


@pytest.mark.parametrize("stop", [b"beta", b"a beta g"])
def test_a_stop_string_cuts_logprobs_and_draft_flags_with_the_ids(stop: bytes) -> None:
    generation = answer(b"alpha beta gamma", block=5, stop=(stop.decode(),), logprobs=0)
    for _ in generation:
        pass
    result = generation.result
    assert b"alpha beta gamma".find(bytes(result.token_ids)) == 0
    assert len(result.logprobs) == len(result.from_draft) == len(result.token_ids)
    # Every pass but the first is four drafts that stood and one token of the target's own.
    flags = [False] + [True, True, True, True, False] * 4
    assert list(result.from_draft) == flags[: len(result.token_ids)]
    assert result.tokens_from_draft == sum(result.from_draft)


def test_a_seed_left_out_is_fresh_and_reported() -> None:
    pair = tiny_pair()
    seeds = {generate(pair, PROMPT, max_tokens=1).effective.seed for _ in range(4)}
    assert len(seeds) == 4
    given = generate(pair, PROMPT, SamplingParams(seed=0), max_tokens=1)
    assert given.effective.seed == 0


@pytest.mark.parametrize(
    ("prompt", "options", "error", "said"),
    [
        ([], {}, InvalidRequest, "prompt is empty"),
        ([1, VOCAB], {}, InvalidRequest, "prompt token 300 is outside 0 to 299"),
        ([-1], {}, InvalidRequest, "prompt token -1"),
        ([1], {"max_tokens": 0}, InvalidRequest, "max_tokens is 0"),
        ([1], {"block_size": 0}, InvalidRequest, "block size is 0"),
        ([1], {"block_size": 65}, InvalidRequest, "block size is 65"),
        ([1], {"block_size": "big"}, InvalidRequest, "block size is 'big'"),
        ([1] * 64, {}, ContextExceeded, "has 64 tokens.*maximum context length is 64"),
    ],
)
def test_impossible_requests_are_refused_before_anything_runs(prompt, options, error, said) -> None:
    pair = pair_of(Target(tiny_target()), context_limit=64)
    with pytest.raises(error, match=said):
        stream_generate(pair, prompt, **options)


def test_generation_ends_at_the_context_limit() -> None:
    pair = tiny_pair()
    pair.context_limit = len(PROMPT) + 10
    result = generate(pair, PROMPT)
    assert (result.completion_tokens, result.finish_reason) == (10, "length")
    assert list(result.token_ids) == plain_ids(pair.target.model, PROMPT, 10)


@pytest.mark.parametrize("field", ["top_p", "min_p"])
def test_an_impossible_field_is_named(field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{field} is 2"):
        SamplingParams(**{field: 2})


def test_a_drafter_that_never_stands_is_stopped_with_the_reason() -> None:
    pair, _ = scripted_pair("dense", "always wrong", NUM_PASSES + 40)
    truth = plain_ids(pair.target.model, PROMPT, NUM_PASSES + 20)
    generation = stream_generate(pair, PROMPT, max_tokens=NUM_PASSES + 20, block_size=4)
    drafted = [step.drafted for step in generation]
    result = generation.result
    assert list(result.token_ids) == truth
    assert max(drafted[:NUM_PASSES]) == 3
    assert set(drafted[NUM_PASSES + 3 :]) == {0}
    assert not result.effective.drafting
    assert f"stood in 0 of {NUM_PASSES} passes" in result.effective.reason
    # The next request drafts again: another text may suit the drafter.
    assert generate(pair, PROMPT, max_tokens=4).effective.drafting


def test_the_safer_dtype_is_tried_first() -> None:
    pair = tiny_pair()
    pair.drafter.set_dtype(mx.bfloat16)
    result = generate(pair, PROMPT, max_tokens=2 * NUM_PASSES + 40, block_size=3)
    assert pair.drafter.dtype == mx.float32
    assert "now in float32" in result.effective.reason or not result.effective.drafting
    assert list(result.token_ids) == plain_ids(pair.target.model, PROMPT, 2 * NUM_PASSES + 40)


@pytest.mark.parametrize("limit", [len(PROMPT) - 1, len(PROMPT), len(PROMPT) + 1, len(PROMPT) + 20])
def test_beyond_the_drafters_positions_decoding_is_plain(limit: int) -> None:
    pair, truth = scripted_pair("dense", "wrong at 2")
    pair.drafter.config.max_position_embeddings = limit
    generation = stream_generate(pair, PROMPT, max_tokens=40, block_size=4)
    position, drafted = len(PROMPT), []
    for step in generation:
        position += len(step.tokens)
        drafted.append((position, step.drafted))
    assert list(generation.result.token_ids) == truth[:40]
    assert all(width == 0 for position, width in drafted if position > limit)
    assert any(width > 0 for _, width in drafted) == (limit > len(PROMPT) + 4)
    assert generation.result.effective.reason == f"past the {limit} tokens the drafter can read"
    # Decided for each request: a short one drafts again.
    assert max(s.drafted for s in stream_generate(pair, [1, 2], max_tokens=9, block_size=4)) == 3


def test_a_sound_drafter_is_left_alone() -> None:
    pair, _ = scripted_pair("dense", "wrong at 2", 3 * NUM_PASSES)
    assert generate(pair, PROMPT, max_tokens=2 * NUM_PASSES, block_size=4).effective.drafting


def test_end_tokens_are_the_union_of_all_sources(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": 5}}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')

    class Tokenizer:
        eos_token_ids = frozenset({3})

    assert end_tokens(Tokenizer(), tmp_path) == {2, 3, 5, 7}


def test_public_names_are_importable_and_listed() -> None:
    for name in dflash2_mlx.__all__:
        assert getattr(dflash2_mlx, name).__module__.startswith("dflash2_mlx.")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        dflash2_mlx.nothing  # noqa: B018


def test_a_prefill_tells_of_its_chunks_and_can_be_given_up(monkeypatch) -> None:
    monkeypatch.setattr("dflash2_mlx.decode.PREFILL_STEP", 4)
    pair, heard = tiny_pair(), []
    prompt = [1] * 11

    def hear(done: int, total: int) -> None:
        heard.append((done, total))
        if done >= 8:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        next(stream_generate(pair, prompt, on_prefill=hear))
    assert heard == [(4, 10), (8, 10)]
    truth = plain_ids(pair.target.model, prompt, 6)
    assert list(generate(pair, prompt, max_tokens=6).token_ids) == truth


def test_another_thread_than_the_one_that_imported_can_load_and_generate() -> None:
    code = """
import threading
import mlx.core as mx
import dflash2_mlx.generation
from tiny import tiny_pair
from dflash2_mlx import SamplingParams, generate

def work():
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(temperature=temperature, seed=1)
        print(generate(tiny_pair(), [1, 2, 3], sampling, max_tokens=8).completion_tokens)
    mx.clear_streams()

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=True,
    )
    assert ran.stdout.split() == ["8", "8"], ran.stderr
