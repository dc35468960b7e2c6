"""The budgets of CONTRIBUTING.md: small files, short functions, and a package list that is true."""

import ast
import statistics
import tomllib
from collections.abc import Iterator
from pathlib import Path

import dflash2_mlx

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("dflash2_mlx", "cli", "models")
FILES = sorted({path.resolve() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")})


def functions() -> Iterator[tuple[str, int]]:
    """Each function with its number of lines, docstring included."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                yield f"{path.relative_to(ROOT)}:{node.name}", num_lines


def test_files_are_small_and_named_for_what_they_do() -> None:
    num_lines = {str(path.relative_to(ROOT)): len(path.read_bytes().splitlines()) for path in FILES}
    assert {name.split("/")[0] for name in num_lines} == set(FOLDERS)
    assert {name: count for name, count in num_lines.items() if count > 400} == {}
    assert [name for name in num_lines if Path(name).stem in {"utils", "util", "helpers"}] == []


def test_functions_are_short() -> None:
    lengths = dict(functions())
    assert {name: length for name, length in lengths.items() if length > 80} == {}
    assert statistics.median(lengths.values()) <= 10
    assert statistics.quantiles(lengths.values(), n=20)[-1] <= 40


def test_every_package_on_disk_is_installed() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    folders = [path.parent.relative_to(ROOT) for path in FILES if path.name == "__init__.py"]
    names = {".".join(("dflash2_mlx", *folder.parts)) for folder in folders}
    on_disk = {name.replace("dflash2_mlx.dflash2_mlx", "dflash2_mlx") for name in names}
    assert set(setuptools["packages"]) == on_disk


def test_public_names_are_those_that_load_lazily() -> None:
    assert dflash2_mlx.__all__ == sorted(dflash2_mlx._HOMES)
