"""One thread of matrix products a process: the tests themselves run side by side.

Imports the package first, so that MLX runs on the fast BLAS in every test.
"""

import os

os.environ.setdefault("MKL_NUM_THREADS", "1")  # before MKL is loaded

from hypothesis import settings

import dflash2_mlx

__all__ = ["dflash2_mlx"]

# The same examples in every run; `pytest --hypothesis-profile=default` draws new ones.
settings.load_profile("ci")
