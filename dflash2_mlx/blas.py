"""A fast BLAS under MLX on Linux x86-64 CPUs.

The CPU wheel of MLX ships the reference BLAS (about 2 GFLOP/s in float32). A BLAS that is loaded
with RTLD_GLOBAL before `mlx.core` takes its place, since the dynamic linker looks there first.
"""

import ctypes
import ctypes.util
import importlib.metadata
import importlib.util
import platform
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class BlasState:
    """What `preload_blas` did: the library it loaded, or why it loaded none."""

    path: Path | None
    reason: str


_state: BlasState | None = None


def preload_blas() -> BlasState:
    """Load MKL or OpenBLAS for MLX; a no-op off Linux x86-64 and with a CUDA build."""
    global _state
    if _state is None:
        _state = _preload()
    return _state


def _preload() -> BlasState:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return BlasState(None, "not needed: MLX uses this platform's own BLAS")
    if importlib.util.find_spec("mlx_cuda") or not importlib.util.find_spec("mlx"):
        return BlasState(None, "not needed: no CPU build of MLX here")
    if "mlx.core" in sys.modules:
        return BlasState(None, "mlx.core was imported before dflash2_mlx: MLX keeps its slow BLAS")
    for path in _candidates():
        try:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return BlasState(path, "preloaded")
    return BlasState(None, "no fast BLAS found: pip install 'dflash2-mlx[blas]'")


def _candidates() -> list[Path]:
    """MKL from the `mkl` package (137 GFLOP/s measured), then a system OpenBLAS (20)."""
    found = []
    try:
        files = importlib.metadata.files("mkl") or []
        found += [
            Path(str(f.locate())).resolve() for f in files if f.name.startswith("libmkl_rt.so")
        ]
    except importlib.metadata.PackageNotFoundError:
        pass
    if openblas := ctypes.util.find_library("openblas"):
        found.append(Path(openblas))
    return found


class _DlInfo(ctypes.Structure):
    _fields_ = [
        ("dli_fname", ctypes.c_char_p),
        ("dli_fbase", ctypes.c_void_p),
        ("dli_sname", ctypes.c_char_p),
        ("dli_saddr", ctypes.c_void_p),
    ]


def blas_in_force() -> Path | None:
    """The library whose `cblas_sgemm` MLX resolves to when none is nearer, or None (MLX's own)."""
    try:
        program = ctypes.CDLL(None)
        address = ctypes.cast(program.cblas_sgemm, ctypes.c_void_p)
        info = _DlInfo()
        found = program.dladdr(address, ctypes.byref(info))
    except (AttributeError, OSError):
        return None
    return Path(info.dli_fname.decode()) if found and info.dli_fname else None
