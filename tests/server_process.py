"""A server in a process of its own: the real command, or a real pair that is tiny and random."""

import http.client
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_S = 120.0
TINY = "tiny"


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """Where it listens, and what it is."""

    process: subprocess.Popen[str]
    port: int

    @property
    def address(self) -> tuple[str, int]:
        """For sockets."""
        return "127.0.0.1", self.port

    def health(self) -> dict[str, Any]:
        """What `/health` says."""
        connection = http.client.HTTPConnection(*self.address, timeout=60)
        try:
            connection.request("GET", "/health")
            content: dict[str, Any] = json.loads(connection.getresponse().read())
            return content
        finally:
            connection.close()

    def wait_until_idle(self, timeout_s: float = 120.0) -> dict[str, Any]:
        """Its health once nothing runs and nothing waits, or as it is when that takes too long."""
        deadline = time.monotonic() + timeout_s
        while (state := self.health())["state"] != "ready" and time.monotonic() < deadline:
            time.sleep(0.02)
        return state

    def resident_bytes(self) -> int:
        """Memory of the process that is in RAM."""
        told = subprocess.run(
            ["ps", "-o", "rss=", "-p", str(self.process.pid)], capture_output=True, check=True
        )
        return 1024 * int(told.stdout)

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.process.poll() is None


@contextmanager
def server_process(model: str, *options: str) -> Iterator[ServerProcess]:
    """`dflash2-mlx serve`, or for `tiny` the random pair of the tests; its log is left out."""
    if model == TINY:
        command = [sys.executable, __file__]
    else:
        program = Path(sys.executable).with_name("dflash2-mlx")
        command = [str(program), "serve", "--model", model, "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield ServerProcess(process, _port(process))
    finally:
        process.terminate()
        process.wait()


def _port(process: "subprocess.Popen[str]") -> int:
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
            # Nobody reads the rest, and a full pipe would stop the server.
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return int(found.group(1))
    raise SystemExit("the server did not start")


def serve_tiny() -> None:
    """The random pair, on a free port, until this process is told to end."""
    from served import random_pair

    from dflash2_mlx.server.answer import Answerer
    from dflash2_mlx.server.app import make_app
    from dflash2_mlx.server.exchange import Desk
    from dflash2_mlx.server.run import bind, make_server
    from dflash2_mlx.server.worker import Worker

    pair = random_pair()
    pair.prefill_step = 128  # prompts of the crowd take several chunks
    worker = Worker(lambda: pair, Answerer(4), max_queue=64)
    worker.start()
    worker.wait_until_loaded()
    with bind("127.0.0.1", 0) as socket:
        socket.listen()  # who reads the line may connect at once
        print(f"http://127.0.0.1:{socket.getsockname()[1]}", file=sys.stderr, flush=True)
        make_server(make_app(Desk(worker, (TINY,))), worker).run(sockets=[socket])


if __name__ == "__main__":
    serve_tiny()
