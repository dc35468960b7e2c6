"""Rewrite the parts of the docs that are made from the code.

A part stands between `<!-- begin: NAME -->` and `<!-- end: NAME -->`. With --check nothing is
written: stale parts are named in one line, and the exit code is 1.
"""

import argparse
import dataclasses
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PART = re.compile(r"(<!-- begin: (?P<name>[\w-]+) -->\n).*?(<!-- end: (?P=name) -->)", re.DOTALL)

# Read by rich and Typer at import: the same text on every machine and terminal.
for name in ("FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS"):
    os.environ.pop(name, None)
os.environ |= {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "96", "TERMINAL_WIDTH": "96"}


def commands() -> dict[str, str]:
    """The first sentence of each command's help, by name."""
    from typer.main import get_command

    from dflash2_mlx.cli.app import app

    group = get_command(app)
    found = getattr(group, "commands")  # noqa: B009 - typed as a single command
    return {name: command.get_short_help_str(120) for name, command in found.items()}


def help_of(name: str) -> str:
    """What `dflash2-mlx NAME --help` prints on a terminal 96 columns wide."""
    from typer.testing import CliRunner

    from dflash2_mlx.cli.app import app

    shown = CliRunner().invoke(app, [name, "--help"], prog_name="dflash2-mlx")
    if shown.exit_code != 0:
        raise SystemExit(f"error: `dflash2-mlx {name} --help` exits {shown.exit_code}")
    return "\n".join(line.rstrip() for line in shown.output.strip("\n").splitlines())


def commands_table() -> str:
    rows = [(f"`dflash2-mlx {name}`", text) for name, text in commands().items()]
    return table(("Command", "What it does"), rows)


def commands_help() -> str:
    blocks = (f"## {name}\n\n```text\n{help_of(name)}\n```\n" for name in commands())
    return "\n" + "\n".join(blocks) + "\n"


def models_table() -> str:
    from dflash2_mlx.catalogue import load_catalogue

    rows = [
        (
            f"`{entry.name}`",
            entry.target,
            str(entry.target_bits),
            "in this package" if entry.drafter_is_embedded else entry.drafter,
            entry.kind,
            f"{entry.licence}; {entry.drafter_licence}",
            entry.undraftable or ("yes" if entry.verified else "not yet"),
        )
        for entry in load_catalogue().values()
    ]
    heads = ("Name", "Target", "Bits", "Drafter", "Kind", "Licences", "Seen working")
    return table(heads, rows)


def families_table() -> str:
    sys.path.insert(0, str(ROOT / "tests"))
    import families

    rows = [dataclasses.astuple(families.describe(family)) for family in families.ALL]
    return table(("Family", "Caches in mlx-lm", "Drafting", "Why not"), rows)


def table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"commands": commands_table, "models": models_table},
    "docs/commands.md": {"help": commands_help},
    "docs/families.md": {"families": families_table},
}


def refreshed(file: str, text: str) -> str:
    """`text`, the content of `file`, with each of its parts made anew.

    Raises SystemExit when a part has lost its markers.
    """
    parts = PARTS[file]
    for name in parts.keys() - {match["name"] for match in PART.finditer(text)}:
        raise SystemExit(f"error: {file} has no `<!-- begin: {name} -->` with its end")
    return PART.sub(lambda match: match[1] + parts[match["name"]]() + match[3], text)


def stale_parts(old: str, new: str) -> list[str]:
    pairs = zip(PART.finditer(old), PART.finditer(new), strict=True)
    return [before["name"] for before, after in pairs if before[0] != after[0]]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Rewrite the generated parts of the docs.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    parser.add_argument("files", nargs="*", help="pages to look at; all of them if none is named")
    arguments = parser.parse_args(argv)
    check, stale = arguments.check, list[str]()
    for file in arguments.files or PARTS:
        old = (ROOT / file).read_text("utf-8")
        new = refreshed(file, old)
        stale += [f"{file} ({name})" for name in stale_parts(old, new)]
        if not check:
            (ROOT / file).write_text(new, "utf-8")
    if stale and check:
        print(f"stale: {', '.join(stale)}; run scripts/docs", file=sys.stderr)
    elif stale:
        print(f"rewritten: {', '.join(stale)}", file=sys.stderr)
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
