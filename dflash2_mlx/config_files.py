"""Config files of other programs: merged into, never replaced, with a backup and in one step."""

import io
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from dflash2_mlx.errors import ConnectFailed

NAMES = ("name", "model_id")  # what tells the entries of a list apart


@dataclass(frozen=True, slots=True)
class Format:
    """How a kind of file is read and written; comments stay where the format has them."""

    name: str
    parse: Callable[[str], Any]
    dump: Callable[[Any], str]


@dataclass(frozen=True, slots=True)
class Written:
    """What became of a file; `backup` is its old content, `changed` False if it had it all."""

    path: Path
    backup: Path | None
    changed: bool


def merge(old: Any, new: Any) -> Any:
    """`old` with what `new` says, in place; entries of lists that have one name are one entry."""
    if isinstance(old, MutableMapping) and isinstance(new, Mapping):
        for key, value in new.items():
            old[key] = merge(old[key], value) if key in old else value
        return old
    if isinstance(old, list) and isinstance(new, list):
        for entry in new:
            place = next((n for n, other in enumerate(old) if _same(other, entry)), None)
            if place is None:
                old.append(entry)
            else:
                old[place] = merge(old[place], entry)
        return old
    return new


def write_merged(
    path: Path,
    form: Format,
    content: Any,
    frame: Mapping[str, Any] | None = None,
    *,
    private: bool = False,
) -> Written:
    """Merge content into a file, or make it, then with the frame around it.

    `private` keeps a new file from other users. Raises `ConnectFailed` where the file cannot be
    read as its format, and leaves it as it was.
    """
    path = path.resolve()  # a link into somebody's dotfiles stays a link
    old = _read(path)
    text = _merged(path, form, old or "", content, {**frame, **content} if frame else content)
    if text == old:
        return Written(path, None, False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        backup = None if old is None else _back_up(path)
        _replace(path, text, 0o600 if private else 0o644)
    except OSError as error:
        raise ConnectFailed(f"{path} cannot be written: {error.strerror}") from None
    return Written(path, backup, True)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConnectFailed(f"{path} cannot be read: {error}") from None


def _merged(path: Path, form: Format, old: str, content: Any, whole: Any) -> str:
    try:
        parsed = form.parse(old) if old.strip() else None
    except Exception as error:  # three parsers, each with errors of its own
        fault = " ".join(str(error).split())
        raise ConnectFailed(
            f"{path} is no plain {form.name} ({fault}); leave --write out and add the lines by hand"
        ) from None
    if parsed is None:  # nothing, or only comments
        return old + form.dump(whole)
    if isinstance(parsed, Mapping) != isinstance(content, Mapping):
        raise ConnectFailed(
            f"{path} holds a {type(parsed).__name__}; leave --write out and add the lines by hand"
        )
    return form.dump(merge(parsed, content if parsed else whole))


def _back_up(path: Path) -> Path:
    stem = f"{path.name}.{time.strftime('%Y%m%d-%H%M%S')}"
    names = (f"{stem}{extra}.bak" for extra in ("", *(f"-{n}" for n in range(2, 1000))))
    backup = next(path.with_name(name) for name in names if not path.with_name(name).exists())
    shutil.copy2(path, backup)
    return backup


def _replace(path: Path, text: str, mode: int) -> None:
    """One step: a reader sees the old file or the new one."""
    mode = path.stat().st_mode & 0o777 if path.exists() else mode
    with NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
        file.write(text)
    try:
        os.chmod(file.name, mode)
        os.replace(file.name, path)
    except OSError:
        os.unlink(file.name)
        raise


def _same(one: Any, other: Any) -> bool:
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        return bool(one == other)
    return any(name in one and one.get(name) == other.get(name) for name in NAMES)


def _parse_toml(text: str) -> Any:
    import tomlkit

    return tomlkit.parse(text)


def _dump_toml(content: Any) -> str:
    import tomlkit

    return tomlkit.dumps(content)


def _yaml() -> Any:
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 4096
    yaml.indent(mapping=2, sequence=4, offset=2)
    return yaml


def _dump_yaml(content: Any) -> str:
    stream = io.StringIO()
    _yaml().dump(content, stream)
    return stream.getvalue()


def _dump_json(content: Any) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


TOML = Format("TOML", _parse_toml, _dump_toml)
YAML = Format("YAML", lambda text: _yaml().load(text), _dump_yaml)
JSON = Format("JSON", json.loads, _dump_json)
