"""The demo pair answers to random schemas; `scripts/check_schemas` asks for many more."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dflash2_mlx.fetch import cached_folder

ROOT = Path(__file__).parents[1]


@pytest.mark.demo
def test_answers_to_random_schemas_validate() -> None:
    if cached_folder("smollm2-135m") is None:
        pytest.skip("the demo target is not fetched")
    options = ["--count", "5", "--block-size", "8", "--max-tokens", "256"]
    command = [sys.executable, str(ROOT / "scripts/check_schemas"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    report = json.loads(done.stdout)
    assert report["failures"] == []
    assert (report["schemas"], report["valid"], done.returncode) == (5, 5, 0)
    assert report["drafted"]["tokens_per_pass"] > 1.5
    assert report["compared"]["plain"]["tokens_per_pass"] == 1
