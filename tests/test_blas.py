"""On Linux x86-64 the library we preload is the one MLX multiplies with."""

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dflash2_mlx import blas

on_linux_cpu = pytest.mark.skipif(
    blas.preload_blas().path is None, reason=f"no BLAS preloaded: {blas.preload_blas().reason}"
)


SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
IN_PYTHON = [path for path in sorted(SCRIPTS.iterdir()) if b"python3\n" in path.read_bytes()[:30]]


@pytest.mark.parametrize("script", IN_PYTHON, ids=lambda path: path.name)
def test_scripts_import_the_package_before_mlx(script: Path) -> None:
    """Sorted imports put MLX first, which then multiplies ten times more slowly."""
    modules = []
    for node in ast.parse(script.read_text("utf-8")).body:
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules.append(node.module or "")
    roots = [module.partition(".")[0] for module in modules]
    users = [place for place, root in enumerate(roots) if root in ("mlx", "mlx_lm", "tiny")]
    assert not users or roots.index("dflash2_mlx") < users[0]


@on_linux_cpu
def test_mlx_binds_to_the_preloaded_library(tmp_path: Path) -> None:
    """Asked of the dynamic linker itself, in a fresh process."""
    code = "import dflash2_mlx, mlx.core as mx; mx.eval(mx.ones((64, 64)) @ mx.ones((64, 64)))"
    debug = {"LD_DEBUG": "bindings", "LD_DEBUG_OUTPUT": str(tmp_path / "ld")}
    subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **debug}, check=True, timeout=60
    )
    log = "".join(file.read_text(errors="replace") for file in tmp_path.iterdir())
    bound = [line for line in log.splitlines() if "libmlx" in line and "`cblas_sgemm'" in line]
    assert bound
    assert all(str(blas.preload_blas().path) in line.split(" to ")[1] for line in bound)


@on_linux_cpu
def test_the_library_in_force_is_named() -> None:
    assert blas.blas_in_force() == blas.preload_blas().path


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "_state", None)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a library was loaded")

    monkeypatch.setattr(blas.ctypes, "CDLL", never)


@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("linux", "aarch64")])
def test_a_no_op_elsewhere(monkeypatch: pytest.MonkeyPatch, system: str, machine: str) -> None:
    forget(monkeypatch)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(blas.platform, "machine", lambda: machine)
    assert blas.preload_blas().path is None


def test_a_no_op_with_a_cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(blas.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert "no CPU build" in blas.preload_blas().reason


def test_too_late_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)
    monkeypatch.setitem(sys.modules, "mlx.core", ModuleType("mlx.core"))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(blas.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name == "mlx" else None)
    assert "imported before" in blas.preload_blas().reason
