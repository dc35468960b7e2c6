"""Imports the package first, so that MLX runs on the fast BLAS in every test."""

import dflash2_mlx

__all__ = ["dflash2_mlx"]
