"""The reference runs in an environment of its own, answers line by line, and fails in one line."""

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from tiny import DRAFTER, tiny_drafter, tiny_pair

from dflash2_mlx import reference
from dflash2_mlx.bench import IN_A_TURN, REFERENCE, Pass
from dflash2_mlx.errors import DFlashError
from dflash2_mlx.models.drafter import load_drafter
from dflash2_mlx.models.quantize import backbone_bits, quantize, save
from dflash2_mlx.reference import (
    PACKAGE,
    Proposal,
    Reference,
    check_room,
    environment,
    unquantized,
)
from dflash2_mlx.target import most_bits

ANSWERING = """
import json, sys
setup = json.loads(sys.argv[1])
print(json.dumps({"block": 8}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["task"] == "propose":
        told = {"build_s": 1.0, "eval_s": 2.0, "nodes": len(asked)}
    elif asked["task"] == "begin":
        begun, told = asked, {
            "tokens": asked["ids"][:1], "passes": [[1, 0, 0]], "ttft_s": 0.5, "decode_s": 0.25,
            "peak_memory_bytes": 99,
        }
    elif begun:
        told = {
            "tokens": begun["ids"][1 : begun["max_tokens"]], "passes": [[2, 7, 1]], "ttft_s": 0,
            "decode_s": begun.get("block_size", 1) + begun.get("temperature", 0.0),
            "peak_memory_bytes": setup["in_a_turn"],
        }
        begun = None
    else:
        told = None
    print(json.dumps(told), flush=True)
"""
FAILING = "import sys; print('lots of text', file=sys.stderr); sys.exit('no such model')"
DYING = ANSWERING.replace("for line in sys.stdin:", "for line in [sys.exit('out of memory')]:")


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def start(script: str) -> Reference:
        worker = tmp_path / "worker.py"
        worker.write_text(script)
        monkeypatch.setattr(reference, "WORKER", worker)
        return Reference(Path(sys.executable), {"target": "here"})

    return start


def test_prompts_go_out_and_timed_answers_come_back(start: Any) -> None:
    with start(ANSWERING) as worker:
        assert worker.block == 8
        contender = worker.contender
        assert contender.name == REFERENCE
        for ids in ([5, 6, 7], [8, 9, 10]):
            first, second = contender.begin(ids, 3)
            answer = first + second
            assert answer.tokens == tuple(ids)
            assert answer.passes == (Pass(1, 0, 0), Pass(2, 7, 1))
            assert (answer.ttft_s, answer.decode_s, answer.peak_memory_bytes) == (0.5, 1.25, 99)
            assert second.peak_memory_bytes == IN_A_TURN


def test_an_answer_may_have_a_block_and_a_temperature(start: Any) -> None:
    with start(ANSWERING) as worker:
        _, second = worker.begin([5, 6, 7], 3, block_size=4, temperature=0.7, top_p=0.95)
        assert second.decode_s == 4.7


def test_a_draft_is_timed_by_itself(start: Any) -> None:
    with start(ANSWERING) as worker:
        proposal = worker.propose([5, 6, 7], new_rows=2, block_size=4)
        # task, ids, new_rows, block_size, temperature
        assert proposal == Proposal(1.0, 2.0, 5)
        assert proposal.seconds == 3.0


@pytest.mark.parametrize(("script", "last"), [(FAILING, "no such model"), (DYING, "out of memory")])
def test_a_worker_that_fails_is_one_line_with_its_last_words(
    start: Any, script: str, last: str
) -> None:
    def run() -> None:
        with start(script) as worker:
            list(worker.begin([1], 1))

    with pytest.raises(DFlashError, match=rf"^the reference \({PACKAGE}\) failed: {last}$"):
        run()


def test_the_worker_ends_with_the_benchmark(start: Any) -> None:
    with start(ANSWERING) as worker:
        process = worker._process
        assert process.poll() is None
    assert process.poll() is not None


def test_a_target_that_does_not_fit_twice_is_refused() -> None:
    check_room(5_000_000_000, memory=16 * 10**9)
    with pytest.raises(DFlashError, match=r"23\.0 GB are needed, this machine has 16\.0 GB"):
        check_room(10_000_000_000, memory=16 * 10**9)


# Its environment


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    monkeypatch.setenv("DFLASH2_MLX_CACHE", str(tmp_path))
    ran: list[list[str]] = []

    def run(command: list[str]) -> None:
        ran.append(command)
        if "venv" in command:
            Path(command[-1]).mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(reference, "_run", run)
    return ran


def test_the_environment_is_made_once_with_our_versions(commands: list[list[str]]) -> None:
    python = environment()
    venv, libraries, package = commands
    assert venv[:3] == [sys.executable, "-m", "venv"]
    assert str(python) == libraries[0]
    assert any(word.startswith("mlx-lm==") for word in libraries)
    assert package[-2:] == ["--no-deps", PACKAGE]
    assert environment() == python
    assert len(commands) == 3


def test_an_environment_that_was_not_finished_is_made_again(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = reference._run

    def broken(command: list[str]) -> None:
        run(command)
        if PACKAGE in command:
            raise DFlashError("no network")

    with monkeypatch.context() as without_network:
        without_network.setattr(reference, "_run", broken)
        with pytest.raises(DFlashError, match="no network"):
            environment()
    environment()
    assert [PACKAGE in command for command in commands] == [False, False, True] * 2


def test_an_installation_that_fails_is_one_line() -> None:
    with pytest.raises(DFlashError, match=r"^cannot install the reference .*: not today; it needs"):
        reference._run([sys.executable, "-c", "import sys; sys.exit('one\\nnot today')"])


# Its drafter


def test_a_drafter_in_full_precision_is_read_where_it_is(tmp_path: Path) -> None:
    save(tiny_drafter(), DRAFTER, tmp_path)
    assert unquantized(tmp_path) == tmp_path


def test_a_quantized_drafter_is_read_from_a_copy_without_quantization(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH2_MLX_CACHE", str(tmp_path / "cache"))
    stored = tiny_drafter()
    quantization = quantize(stored, backbone_bits(8))
    save(stored, {**DRAFTER, "quantization": quantization}, tmp_path / "stored")
    told: list[str] = []
    copy = unquantized(tmp_path / "stored", lambda label, *_: told.append(label))
    assert "quantization" not in json.loads((copy / "config.json").read_text())
    drafter = load_drafter(copy)
    assert most_bits(drafter) >= 16
    weight = mx.dequantize(
        stored.fc.weight, stored.fc.scales, stored.fc.biases, stored.fc.group_size, stored.fc.bits
    )
    assert mx.allclose(drafter.fc.weight, weight, atol=1e-2)
    assert unquantized(tmp_path / "stored") == copy
    assert told == ["writing a drafter without quantization for the reference"]


def test_both_sides_compute_in_the_same_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(reference, "environment", lambda _: Path("python"))
    monkeypatch.setattr(reference, "Reference", lambda _, setup: asked.update(setup))
    save(tiny_drafter(), DRAFTER, tmp_path)
    reference.start(tiny_pair(), Path("target"), tmp_path)
    assert asked["dtype"] == "float32"
    assert (asked["target"], asked["drafter"]) == ("target", str(tmp_path))
