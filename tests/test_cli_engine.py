"""The commands on the real engine, with a tiny random target."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from served import ChatTokenizer, last_line, saying_pair
from tiny import ByteTokenizer, ScriptedDrafter, pair_of, plain_ids, tiny_pair, tiny_target
from typer.testing import CliRunner, Result

from dflash2_mlx.cli.app import app
from dflash2_mlx.pair import Pair
from dflash2_mlx.target import Target

PROMPT = "Once upon"
FIELDS = (
    "text, token_ids, finish_reason, prompt_tokens, completion_tokens, cached_tokens, passes, "
    "accepted, redecided, tokens_per_pass, decode_tokens_per_s, prefill_tokens_per_s, ttft_s, "
    "peak_memory_bytes, effective, from_draft, tokens_from_draft"
)
STATE = "target, drafter, target_bits, drafter_bits, block_size, drafting, reason, seed"


def run(monkeypatch: pytest.MonkeyPatch, pair: Pair, *args: str, stdin: str = "") -> Result:
    monkeypatch.setattr("dflash2_mlx.pair.load_pair", lambda *_, **__: pair)
    result = CliRunner().invoke(app, [args[0], "--model", "tiny", *args[1:]], input=stdin)
    assert result.exit_code == 0, result.output
    return result


def generate(monkeypatch: pytest.MonkeyPatch, pair: Pair, *options: str) -> Result:
    return run(monkeypatch, pair, "generate", "--prompt", PROMPT, "--raw", *options)


def pair_that_is_always_right() -> Pair:
    """Its drafter knows the target's next 80 tokens; nothing ends an answer."""
    ids = plain_ids(tiny_target(), list(PROMPT.encode()), 80, ends=())
    first = len(PROMPT) - 1
    drafter = ScriptedDrafter(lambda at, width: ids[at - first :][: width - 1])
    return pair_of(Target(tiny_target(), taps=[0]), drafter, end_tokens=frozenset())


def test_json_has_every_field_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: dict[str, Any] = json.loads(
        generate(monkeypatch, tiny_pair(), "--json", "--max-tokens", "3").stdout
    )
    assert ", ".join(printed) == FIELDS
    assert ", ".join(printed["effective"]) == STATE


def test_json_has_log_probabilities_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--json", "--max-tokens", "3", "--logprobs", "2", "--temperature", "1")
    printed: dict[str, Any] = json.loads(generate(monkeypatch, tiny_pair(), *options).stdout)
    assert ", ".join(printed) == FIELDS + ", logprobs"
    assert [entry["token"] for entry in printed["logprobs"]] == printed["token_ids"]
    assert [len(entry["top"]) for entry in printed["logprobs"]] == [2, 2, 2]


@pytest.mark.parametrize("block", [1, 2, 4, 8])
def test_block_size_is_the_width_of_every_pass_but_the_first(
    monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    pair = pair_that_is_always_right()
    options = ("--block-size", str(block), "--max-tokens", "25", "--json")
    printed = json.loads(generate(monkeypatch, pair, *options).stdout)
    assert printed["accepted"] == [1] + [block] * (24 // block)
    assert set(pair.drafter.widths) == ({block} if block > 1 else set())
    assert printed["effective"]["block_size"] == block


def test_a_drafter_drafts_without_being_told_how_deep(monkeypatch: pytest.MonkeyPatch) -> None:
    result = generate(monkeypatch, pair_that_is_always_right(), "--max-tokens", "41")
    state, figures = result.stderr.splitlines()
    assert "drafting on: block 8" in state
    assert "6.83 tokens per pass · drafting on: block 8" in figures


def test_an_answer_without_a_limit_goes_on_to_the_end_of_the_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = pair_of(Target(tiny_target()), end_tokens=frozenset(), context_limit=109)
    assert "stopped at 100 tokens" in generate(monkeypatch, pair).stderr


def test_a_chat_remembers_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_of(Target(tiny_target()), end_tokens=frozenset())
    said: list[list[dict[str, str]]] = []
    encode = pair.encode_chat
    monkeypatch.setattr(pair, "encode_chat", lambda turns: said.append(turns) or encode(turns))
    options = ("--max-tokens", "3", "--prompt-cache", "0")  # which renders prompts alone
    run(monkeypatch, pair, "chat", *options, stdin="Hi\nBye\n")
    roles = [turn["role"] for turn in said[1]]
    assert roles == ["user", "assistant", "user"]
    assert (said[1][0]["content"], said[1][2]["content"]) == ("Hi", "Bye")


def test_the_second_turn_of_a_chat_reads_only_what_is_new(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DFLASH2_MLX_CACHE", str(tmp_path))
    turns = "Tell me of rivers.\nAnd of lakes.\n"
    told = {}

    class Asking(ByteTokenizer):
        def apply_chat_template(
            self, messages: list[dict[str, str]], **variables: Any
        ) -> list[int]:
            asked = variables.get("add_generation_prompt")
            return [*super().apply_chat_template(messages), *(b"assistant: " if asked else b"")]

    for size in ("1", "0"):
        options = ("--max-tokens", "8", "--block-size", "4", "--prompt-cache", size)
        pair = tiny_pair()
        pair.tokenizer = Asking()
        told[size] = run(monkeypatch, pair, "chat", *options, stdin=turns)
    assert told["1"].stdout == told["0"].stdout
    known = re.findall(r"(\d+) of (\d+) prompt tokens known", told["1"].stderr)
    assert len(known) == 1
    assert 0 < int(known[0][0]) < int(known[0][1])
    assert "known" not in told["0"].stderr


def test_a_drafted_thought_is_apart_in_the_terminal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Thinking(ChatTokenizer):
        think_start, think_end = "<think>", "</think>"

    def script(prompt: str) -> str:
        answer = f"A line {prompt.count('A line')}"
        return f"<think>\nThey said {last_line(prompt)}.\n</think>\n\n{answer}"

    pair = saying_pair(script, Thinking())
    result = run(monkeypatch, pair, "chat", "--block-size", "4", stdin="Hi\nBye\n")
    assert result.stdout == "A line 0\nA line 1\n"
    thoughts = [line for line in result.stderr.splitlines() if line.startswith("They")]
    assert thoughts == ["They said Hi.", "They said Bye."]
    assert "41 tokens, 23 of them thought · " in result.stderr
