"""The docs say what the code does: generated parts are fresh, versions agree, links lead on."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dflash2_mlx

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/commands.md",
    "docs/families.md",
    "docs/server.md",
    "docs/speed.md",
    "docs/tuning.md",
)


def run_docs(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "scripts/docs.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the README with the script that refreshes it."""
    for file in ("scripts/docs.py", "README.md"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    return tmp_path


def test_generated_parts_are_fresh() -> None:
    checked = run_docs(ROOT, "--check")
    assert (checked.returncode, checked.stderr) == (0, "")


def test_a_stale_part_is_named_in_one_line_and_nothing_is_written(copy: Path) -> None:
    readme = copy / "README.md"
    stale = readme.read_text("utf-8").replace("| `smollm2-135m` |", "| `smollm3` |")
    readme.write_text(stale, "utf-8")
    checked = run_docs(copy, "--check", "README.md")
    assert checked.returncode == 1
    assert checked.stderr == "stale: README.md (models); run scripts/docs\n"
    assert readme.read_text("utf-8") == stale
    assert run_docs(copy, "README.md").returncode == 0
    assert readme.read_text("utf-8") == (ROOT / "README.md").read_text("utf-8")


def test_a_lost_marker_is_an_error(copy: Path) -> None:
    (copy / "README.md").write_text("# dflash2-mlx\n", "utf-8")
    checked = run_docs(copy, "--check", "README.md")
    assert checked.returncode == 1
    assert checked.stderr.startswith("error: README.md has no ")
    assert len(checked.stderr.splitlines()) == 1


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["version"] == dflash2_mlx.__version__
    assert dflash2_mlx.__version__ in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_the_commands_of_the_readme_and_of_ci_exist() -> None:
    named = set(re.findall(r"\./scripts/\w+", (ROOT / "README.md").read_text("utf-8")))
    assert named == {"./scripts/run", "./scripts/test"}
    ran = re.findall(r"^step (\S+)$", (ROOT / ".ci/run").read_text("utf-8"), re.MULTILINE)
    assert ran == ["./scripts/test", "./scripts/check"]
    for script in (*named, *ran, ".ci/run"):
        assert (ROOT / script).stat().st_mode & 0o100


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_the_dependencies_are_all_constrained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in wanted} - {"dflash2-mlx"}
    constrained = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert {normal(name) for name in names} <= {normal(name) for name in constrained}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
