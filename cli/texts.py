"""Text that comes from stdin or a file."""

import sys
from pathlib import Path

from dflash2_mlx.errors import InvalidRequest


def stdin_text(what: str) -> str:
    """All of stdin, without the newline that a shell puts at its end.

    Raises:
        InvalidRequest: it is not UTF-8.
    """
    return _decoded(sys.stdin.buffer.read(), f"{what}: stdin").removesuffix("\n")


def file_text(name: str, what: str) -> str:
    """All of a file, or of stdin for `-`.

    Raises:
        InvalidRequest: it cannot be read, or is not UTF-8.
    """
    if name == "-":
        return stdin_text(what)
    try:
        return _decoded(Path(name).expanduser().read_bytes(), f"{what}: {name}")
    except OSError as error:
        raise InvalidRequest(f"{what}: cannot read {name}: {error.strerror}") from None
    except ValueError:
        raise InvalidRequest(f"{what}: {name!r} is no file name") from None


def _decoded(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        seen = f"byte {data[error.start]:#04x} at {error.start}"
        raise InvalidRequest(f"{source} is not UTF-8 ({seen}); convert it first") from None
