"""`verify` passes what is sound, takes ties for ties, and finds planted faults."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from test_exact import PROMPT, Wavering, pair_of_kind
from test_exactness import WideReadsOff
from tiny import pair_of, tiny_pair, tiny_target
from typer.testing import CliRunner, Result

from dflash2_mlx import chooser, exactness
from dflash2_mlx.cli.app import app
from dflash2_mlx.errors import DFlashError
from dflash2_mlx.pair import Pair
from dflash2_mlx.parity import Difference, compare, first_difference, load_prompts
from dflash2_mlx.target import Caches, Reading, Target
from dflash2_mlx.verify import Check, check_ids, check_sampling, spread, verify

NAMES = ["widths", "logits", "ids", "rewind", "sampling"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DFLASH2_MLX_CACHE", str(tmp_path))
    monkeypatch.setattr("dflash2_mlx.verify.NUM_PROMPTS", 2)
    monkeypatch.setattr(exactness, "BLOCKS", (5,))


def run(pair: Pair, **options: Any) -> dict[str, Check]:
    return {check.name: check for check in verify(pair, max_tokens=8, **options)}


def outcomes(checks: dict[str, Check]) -> list[bool | None]:
    return [check.ok for check in checks.values()]


def test_a_sound_pair_passes_and_is_remembered() -> None:
    told: list[str] = []
    pair = tiny_pair("sliding")
    checks = run(pair, notify=told.append)
    assert list(checks) == NAMES
    assert outcomes(checks) == [True] * 5
    assert checks["ids"].figures["equal"] == 2
    assert checks["ids"].figures["tokens"] == 16
    assert checks["rewind"].figures["depth"] == 64
    assert len(told) == 3
    assert exactness.load(pair) is not None


def test_wide_reads_that_are_wrong_are_found() -> None:
    pair = tiny_pair()
    pair.target.__class__ = WideReadsOff
    checks = run(pair, block_size=5)
    assert (checks["logits"].ok, checks["widths"].ok) == (False, True)
    assert exactness.load(pair) is None


def test_answers_that_leave_the_plain_ones_are_found() -> None:
    class Careless(Target):
        """Takes low ids for another one, in passes of four rows only."""

        def read(self, tokens: mx.array, caches: Caches, **options: Any) -> Reading:
            wrong = mx.maximum(tokens, 99) if tokens.size == 4 else tokens
            return super().read(wrong, caches, **options)

    pair = tiny_pair()
    pair.target.__class__ = Careless
    parity = compare(pair, load_prompts()[:2], max_tokens=24, block_size=4)
    check = check_ids(parity, 1e-3)
    assert check.ok is False
    assert "NO TIE" in check.more[0]


def test_a_rewind_that_forgets_too_little_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = tiny_pair()

    def rewind(caches: Any, reading: Any, kept: int) -> None:
        for cache in caches[1:]:  # the first layer keeps its refused rows
            cache.trim(reading.length - kept)

    monkeypatch.setattr(pair.target, "rewind", rewind)
    assert run(pair)["rewind"].ok is False


def test_drafts_that_stand_too_often_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = tiny_pair()
    assert check_sampling(pair).ok is True
    accept = chooser.accept_sampled

    def credulous(drafts: Any, candidates: Any, q: Any, rows: Any, uniforms: Any) -> Any:
        return accept(drafts, candidates, q, rows, 0 * uniforms)

    monkeypatch.setattr(chooser, "accept_sampled", credulous)
    found = check_sampling(pair)
    assert found.ok is False
    assert found.figures["outcomes"] >= 5


def test_a_tie_is_no_fault_and_exact_settles_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, _ = pair_of_kind("dense")
    monkeypatch.setattr(pair, "encode_chat", lambda *_, **__: list(PROMPT))
    told: Any = {"max_tokens": 24, "block_size": 4}
    prompts = load_prompts()[:1]
    usual = check_ids(compare(pair, prompts, **told), 1e-3)
    assert usual.figures["differences"][0]["index"] == 5
    assert isinstance(pair.target, Wavering)
    monkeypatch.setattr(
        "dflash2_mlx.generation.exactness_of",
        lambda pair: exactness.Exactness(
            exactness.this_machine(), "tiny", "float32", (), exactness.Deviation(5e-4, 1e-5)
        ),
    )
    settled = check_ids(compare(pair, prompts, exact=True, **told), 1e-3)
    assert settled.ok is True
    assert settled.figures["equal"] == 1
    assert settled.figures["redecided"] > 0


def test_what_cannot_be_checked_is_said() -> None:
    pair = pair_of(Target(tiny_target()), why_plain="turned off (--no-draft)")
    assert outcomes(run(pair)) == [True, True, True, True, None]
    pair.target.undraftable = "its cache kind X cannot be rewound"
    checks = run(pair)
    assert outcomes(checks) == [True, None, True, None, None]
    assert "X cannot be rewound" in checks["rewind"].detail


@pytest.mark.parametrize(
    ("margin", "tolerance", "tie"),
    [
        (9e-4, 0.0, True),
        (2e-3, 0.0, False),
        (0.2, 0.25, True),
        (0.3, 0.25, False),
        (None, 9, False),
    ],
)
def test_a_tie_is_within_what_was_measured(margin: Any, tolerance: float, tie: bool) -> None:
    assert Difference(0, 0, margin).is_tie(tolerance) is tie


def test_the_first_difference() -> None:
    assert first_difference([1, 2, 3], (1, 2, 3)) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_prompts_of_every_kind_ship_with_the_package() -> None:
    prompts = load_prompts()
    assert len(prompts) == 24
    chosen = spread(prompts, 8)
    assert len({prompt.prompt for prompt in chosen}) == 8
    assert len({prompt.kind for prompt in chosen}) >= 5


class TestCommand:
    def run(self, monkeypatch: pytest.MonkeyPatch, pair: Pair, *options: str) -> Result:
        monkeypatch.setattr("dflash2_mlx.pair.load_pair", lambda *_, **__: pair)
        args = ["verify", "--model", "tiny", "--max-tokens", "6", *options]
        return CliRunner().invoke(app, args)

    def test_a_sound_pair_is_exit_code_0(self, monkeypatch: pytest.MonkeyPatch) -> None:
        result = self.run(monkeypatch, tiny_pair())
        assert result.exit_code == 0, result.output
        rows = [line.split() for line in result.stdout.splitlines()]
        assert [row[:2] for row in rows if row[1] == "ok"] == [[name, "ok"] for name in NAMES]

    def test_json_is_one_object(self, monkeypatch: pytest.MonkeyPatch) -> None:
        result = self.run(monkeypatch, tiny_pair(), "--json", "--block-size", "3")
        report = json.loads(result.stdout)
        assert result.stdout.count("\n") == 1
        assert list(report) == ["target", "state", "machine", "ok", "checks"]
        assert list(report["checks"]) == NAMES
        assert report["ok"] is True
        assert "block 3 as asked" in report["state"]
        assert set(report["machine"]) == {"chip", "mlx", "blas"}
        assert report["checks"]["widths"]["equal"][0] == 1
        assert report["checks"]["logits"]["tolerance"] == (
            2 * report["checks"]["logits"]["largest"]
        )

    def test_a_planted_fault_is_exit_code_1_and_named(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pair = tiny_pair()
        pair.target.__class__ = WideReadsOff
        result = self.run(monkeypatch, pair, "--json")
        assert isinstance(result.exception, DFlashError)
        assert str(result.exception).startswith("verify: logits")
        assert json.loads(result.stdout)["ok"] is False

    def test_it_drafts_even_where_plain_decoding_is_faster(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pair = tiny_pair()
        state = json.loads(self.run(monkeypatch, pair, "--json").stdout)["state"]
        assert f"block {pair.drafter.config.block_size}" in state
