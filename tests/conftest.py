"""Imports the package first, so that MLX runs on the fast BLAS in every test."""

from hypothesis import settings

import dflash2_mlx

__all__ = ["dflash2_mlx"]

# The same examples in every run; `pytest --hypothesis-profile=default` draws new ones.
settings.load_profile("ci")
