"""`dflash2-mlx serve`: an endpoint on this machine that OpenAI's clients can use."""

import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from dflash2_mlx.cli.console import note
from dflash2_mlx.cli.memory import MemoryOptions
from dflash2_mlx.cli.options import ModelOptions, spread
from dflash2_mlx.errors import InvalidRequest
from dflash2_mlx.server.rules import LOOPBACK, Rules

if TYPE_CHECKING:
    from dflash2_mlx.pair import Pair

server_option = functools.partial(typer.Option, rich_help_panel="Server")
safety_option = functools.partial(typer.Option, rich_help_panel="Who may ask")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where it listens, and how many wait for how long."""

    host: Annotated[
        str, server_option(metavar="ADDRESS", help="Listen here; others need --api-key.")
    ] = "127.0.0.1"
    port: Annotated[
        int, server_option(metavar="N", min=0, max=65535, help="0 takes a free one.")
    ] = 8080
    served_name: Annotated[
        str | None,
        server_option(metavar="NAME", help="Call the model this.", show_default="as --model"),
    ] = None
    context_window: Annotated[
        int | None,
        server_option(
            metavar="N",
            min=16,
            help="Refuse prompts of more tokens, and stop answers there.",
            show_default="the model's own, or what fits into memory",
        ),
    ] = None
    max_queue: Annotated[
        int, server_option(metavar="N", min=1, help="This many requests may wait.")
    ] = 16
    idle_unload: Annotated[
        float | None,
        server_option(
            metavar="S",
            min=1,
            help="Free the model's memory after this many seconds without a request.",
            show_default="never",
        ),
    ] = None
    let_sleep: Annotated[
        bool,
        server_option("--let-sleep", help="macOS: let the machine sleep during an answer."),
    ] = False


@dataclass(frozen=True, slots=True)
class SafetyOptions:
    """Who may ask."""

    api_key: Annotated[
        str | None,
        safety_option(
            metavar="K",
            envvar="DFLASH2_MLX_API_KEY",
            help="Answer only with this key, sent as Bearer or x-api-key.",
        ),
    ] = None
    allow_origin: Annotated[
        list[str] | None,
        safety_option(
            metavar="O",
            help="Let pages of this origin ask, like http://localhost:3000; repeatable.",
        ),
    ] = None

    def rules(self, host: str) -> Rules:
        """What the server checks; raises `InvalidRequest` where others could ask without a key."""
        if self.api_key is not None and not self.api_key.strip():
            raise InvalidRequest("--api-key is empty; give it some text or leave it out")
        if host not in LOOPBACK and self.api_key is None:
            raise InvalidRequest(
                f"--host {host} lets other machines ask; give --api-key too, or leave --host out"
            )
        hosts = LOOPBACK if host in LOOPBACK else None
        return Rules(hosts, tuple(self.allow_origin or ()), self.api_key)


@spread
def serve(
    model: ModelOptions, server: ServerOptions, memory: MemoryOptions, safety: SafetyOptions
) -> None:
    """Answer coding agents and other clients at http://127.0.0.1:8080/v1, until Ctrl-C."""
    rules = safety.rules(server.host)

    from contextlib import nullcontext

    from dflash2_mlx.server.answer import Answerer
    from dflash2_mlx.server.app import make_app
    from dflash2_mlx.server.awake import stay_awake
    from dflash2_mlx.server.exchange import Desk
    from dflash2_mlx.server.run import bind, make_server
    from dflash2_mlx.server.worker import Worker

    _tell_log()
    with bind(server.host, server.port) as socket:
        worker = Worker(
            lambda: _load(model, memory, server.context_window),
            Answerer(model.block(), model.exact),
            max_queue=server.max_queue,
            idle_unload_s=server.idle_unload,
            keep_awake=nullcontext if server.let_sleep else stay_awake,
        )
        worker.start()
        try:
            about = worker.wait_until_loaded()
            desk = Desk(worker, names(model.model, server.served_name))
            url = _url(server.host, socket.getsockname()[1])
            socket.listen()  # who reads the next line may connect at once
            note(f"{url}/v1 answers as {desk.model}: {about.effective.describe()}", "accent")
            make_server(make_app(desk, rules), worker).run(sockets=[socket])
        except KeyboardInterrupt:
            note("stopped")
        finally:
            worker.close()


def names(model: str, served_name: str | None) -> tuple[str, ...]:
    """What the served model may be called: the name given, the model's, its last part."""
    last = _last_part(model)
    known = [served_name, last] if _is_path(model) else [served_name, model, last]
    return tuple(dict.fromkeys(name for name in known if name))


def _is_path(model: str) -> bool:
    return model.startswith((".", "/", "~")) or model.count("/") > 1


def _last_part(model: str) -> str:
    return model.rstrip("/").rsplit("/", 1)[-1].split("@", 1)[0]


def _load(model: ModelOptions, memory: MemoryOptions, context_window: int | None) -> "Pair":
    pair = model.load()
    note(memory.plan(pair, context_window).describe())
    if model.exact and (own := pair.sampling().temperature) > 0:
        note(
            f"--exact settles answers at temperature 0, and this model's own is {own:g}: requests "
            "have to ask for 0; answers at others are sampled, and say so in dflash.notes",
            "warn",
        )
    # Answers carry these names, and a path is nobody's business.
    pair.name = _last_part(pair.name) if _is_path(pair.name) else pair.name
    if pair.drafter_name and _is_path(pair.drafter_name):
        pair.drafter_name = _last_part(pair.drafter_name)
    return pair


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Notes(logging.Handler):
    """The server's log, line by line on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._tell(record)
        except Exception:  # a terminal that is gone is no reason to stop answering
            self.handleError(record)

    def _tell(self, record: logging.LogRecord) -> None:
        note(self.format(record), "warn" if record.levelno >= logging.WARNING else "muted")


def _tell_log() -> None:
    log = logging.getLogger("dflash2_mlx.server")
    log.setLevel(logging.INFO)
    log.propagate = False
    log.handlers = [_Notes()]
    # It warns of every write to a client that has just left, which is no news here.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
