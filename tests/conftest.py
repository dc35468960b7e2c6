"""One thread of matrix products a process: the tests themselves run side by side.

Imports the package first, so that MLX runs on the fast BLAS in every test.
"""

import os

os.environ.setdefault("MKL_NUM_THREADS", "1")  # before MKL is loaded

import pytest
from hypothesis import settings

import dflash2_mlx

__all__ = ["dflash2_mlx"]

# The same examples in every run; `pytest --hypothesis-profile=default` draws new ones.
settings.load_profile("ci")


@pytest.fixture(autouse=True)
def _no_plans_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """`doctor` shows the plans of what people run."""
    monkeypatch.setattr("dflash2_mlx.budget.remember_plan", lambda pair, plan: None)
