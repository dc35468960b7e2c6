"""macOS: the machine does not fall asleep while a request runs. Its display may."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def stay_awake() -> Iterator[None]:
    """Hold off idle sleep; does nothing on other systems, or where the tool for it is missing."""
    holder = _hold() if sys.platform == "darwin" else None
    try:
        yield
    finally:
        if holder is not None:
            holder.terminate()
            with suppress(subprocess.TimeoutExpired):
                holder.wait(timeout=1)


def _hold() -> "subprocess.Popen[bytes] | None":
    tool = shutil.which("caffeinate")
    if tool is None:
        return None
    # -w: it ends with this process, however that ends.
    command = [tool, "-i", "-w", str(os.getpid())]
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    except OSError:
        return None
