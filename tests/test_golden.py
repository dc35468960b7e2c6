"""The drafter's numbers equal the reference's, through the real context cache."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def check_golden(*folders: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/check_golden"), *map(str, folders)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_every_reference_round_is_met() -> None:
    done = check_golden(ROOT / "tests/golden")
    report = json.loads(done.stdout)
    assert (report["rounds"], report["passed"], done.returncode) == (57, 57, 0)
    assert report["worst_hidden"] < 2e-4
    assert report["worst_q"] < 1e-5


def test_a_wrong_number_is_noticed(tmp_path: Path) -> None:
    import mlx.core as mx

    case = ROOT / "tests/golden/qwen38_like"
    (tmp_path / "config.json").write_bytes((case / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((case / "model.safetensors").read_bytes())
    golden = dict(mx.load(str(case / "golden.safetensors")))
    golden["round3.hidden"] = golden["round3.hidden"] + 1e-3
    golden["round5.path"] = golden["round5.path"] + 1
    mx.save_safetensors(str(tmp_path / "golden.safetensors"), golden)
    done = check_golden(tmp_path)
    assert (json.loads(done.stdout)["passed"], done.returncode) == (9, 1)


def test_no_case_is_not_a_pass(tmp_path: Path) -> None:
    done = check_golden(tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no golden.safetensors below")
