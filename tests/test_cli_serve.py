"""`serve` from the command line: what is said, what is refused, what its options reach."""

import logging
import socket
import threading
from typing import Any

import pytest
from served import ChatTokenizer, saying_pair
from starlette.testclient import TestClient
from typer.testing import CliRunner

from dflash2_mlx.cli import serve as command
from dflash2_mlx.cli.app import app
from dflash2_mlx.errors import BadCheckpoint

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


class Running:
    """Stands in for uvicorn: `during` is called with a client of the application, once."""

    def __init__(self) -> None:
        self.during: Any = lambda client: None
        self.worker: Any = None

    def make_server(self, application: Any, worker: Any) -> "Running":
        self.application, self.worker = application, worker
        return self

    def run(self, sockets: list[Any]) -> None:
        address = sockets[0].getsockname()
        assert address[0] == "127.0.0.1"
        socket.create_connection(address).close()
        with TestClient(self.application, base_url="http://localhost") as client:
            self.during(client)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command with a pair that is loaded from nowhere."""
    monkeypatch.delenv("DFLASH2_MLX_API_KEY", raising=False)
    running, loads = Running(), list[dict[str, Any]]()
    monkeypatch.setattr("dflash2_mlx.server.run.make_server", running.make_server)

    def load_pair(target: str, drafter: Any = None, **options: Any) -> Any:
        loads.append({"target": target, "drafter": drafter, **options})
        if target == "broken":
            raise BadCheckpoint("broken: the drafter has unknown tensors: x")
        pair = saying_pair(tokenizer=ChatTokenizer())
        pair.name, pair.drafter_name = target, "/home/me/drafters/mine"
        return pair

    monkeypatch.setattr("dflash2_mlx.pair.load_pair", load_pair)

    def serve(*options: str, during: Any = None, **kwargs: Any) -> Any:
        if during is not None:
            running.during = during
        model = [] if "--model" in options else ["--model", "tiny"]
        line = ["serve", *model, "--port", "0", *options]
        result = CliRunner().invoke(app, line, **kwargs)
        result.loads, result.worker = loads, running.worker
        return result

    return serve


def test_it_says_where_it_answers_as_what_and_how(serve: Any) -> None:
    done = serve(during=lambda client: client.post("/v1/chat/completions", json=CHAT))
    assert done.exit_code == 0, done.output
    assert done.stdout == ""
    line = next(line for line in done.stderr.splitlines() if "answers as" in line)
    assert line.startswith("http://127.0.0.1:")
    assert "/v1 answers as tiny: target tiny" in line
    assert "drafting on" in line
    assert "request done: 10 tokens read (0 known), 3 written at" in done.stderr
    assert done.worker.health().state == "closed"


def test_options_reach_the_server(serve: Any) -> None:
    def during(client: TestClient) -> None:
        (model,) = client.get("/v1/models", headers=key).json()["data"]
        assert (model["id"], model["context_length"]) == ("mine", 100)
        assert model["aliases"] == ["tiny", "default"]
        assert client.get("/v1/models").status_code == 401
        origin = {**key, "Origin": "http://localhost:3000"}
        allowed = client.get("/v1/models", headers=origin).headers
        assert allowed["access-control-allow-origin"] == "http://localhost:3000"
        too_long = {"messages": [{"role": "user", "content": "x" * 200}]}
        refused = client.post("/v1/chat/completions", json=too_long, headers=key)
        assert "maximum context length is 100 tokens" in refused.text
        seen.append(client)

    key, seen = {"Authorization": "Bearer k"}, list[Any]()
    options = ["--served-name", "mine", "--context-window", "100", "--api-key", "k"]
    options += [
        "--allow-origin",
        "http://localhost:3000",
        "--max-queue",
        "3",
        "--idle-unload",
        "60",
    ]
    done = serve(*options, "--drafter", "d", "--drafter-bits", "8", during=during)
    assert done.exit_code == 0, done.output
    assert len(seen) == 1
    assert done.worker._max_queue == 3
    assert done.worker._idle_unload_s == 60
    (load,) = done.loads
    assert (load["drafter"], load["drafter_bits"]) == ("d", 8)


def test_a_key_in_the_environment_counts(serve: Any) -> None:
    def during(client: TestClient) -> None:
        statuses.append(client.get("/v1/models").status_code)

    statuses: list[int] = []
    serve(during=during, env={"DFLASH2_MLX_API_KEY": "k"})
    assert statuses == [401]


def test_a_folder_is_served_by_its_name_and_its_path_is_never_told(serve: Any) -> None:
    def during(client: TestClient) -> None:
        for path in ("/v1/models", "/health"):
            told.append(client.get(path).text)
        told.append(client.post("/v1/chat/completions", json={**CHAT, "model": "my model"}).text)
        refused.append(client.post("/v1/chat/completions", json={**CHAT, "model": "nope"}))

    told, refused = list[str](), list[Any]()
    serve("--model", "/home/me/my model/", during=during)
    assert all("my model" in text and "/home" not in text for text in told)
    assert refused[0].status_code == 404
    assert "/home" not in refused[0].text


# V31
def test_a_model_that_cannot_be_loaded_ends_it_in_one_line(serve: Any) -> None:
    done = serve("--model", "broken")
    assert done.exit_code == 1
    assert isinstance(done.exception, BadCheckpoint)
    assert "unknown tensors" in str(done.exception)
    assert "answers as" not in done.stderr


def test_ctrl_c_ends_it_cleanly(serve: Any) -> None:
    def during(client: TestClient) -> None:
        raise KeyboardInterrupt

    done = serve(during=during)
    assert done.exit_code == 0
    assert done.stderr.splitlines()[-1] == "stopped"
    assert done.worker.health().state == "closed"
    assert not [t for t in threading.enumerate() if t.name == "dflash2-mlx worker"]


@pytest.mark.parametrize("own", [0.0, 0.6])
def test_exact_says_at_the_start_where_the_models_own_temperature_stands_in_its_way(
    serve: Any, monkeypatch: pytest.MonkeyPatch, own: float
) -> None:
    monkeypatch.setattr("dflash2_mlx.exactness.exactness_of", lambda pair, notify: None)
    make = saying_pair

    def warm_pair(**options: Any) -> Any:
        pair = make(**options)
        pair.default_sampling = pair.sampling(temperature=own)
        return pair

    monkeypatch.setitem(globals(), "saying_pair", warm_pair)
    done = serve("--exact")
    assert done.exit_code == 0, done.output
    assert ("this model's own is 0.6" in done.stderr) is (own > 0)


@pytest.mark.parametrize(
    ("options", "is_held"), [([], True), (["--let-sleep"], False)], ids=["awake", "let sleep"]
)
def test_the_machine_is_kept_awake_unless_told_otherwise(serve, monkeypatch, options, is_held):
    held: list[int] = []

    class Awake:
        def __enter__(self) -> None:
            held.append(1)

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr("dflash2_mlx.server.awake.stay_awake", Awake)
    serve(*options, during=lambda client: client.post("/v1/chat/completions", json=CHAT))
    assert bool(held) is is_held


@pytest.mark.parametrize(
    "options",
    [
        ("--port", "70000"),
        ("--port", "x"),
        ("--context-window", "0"),
        ("--max-queue", "0"),
        ("--idle-unload", "0"),
        ("--block-size", "four"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_refused_before_anything_is_loaded(serve: Any, options: Any) -> None:
    done = serve(*options)
    assert done.exit_code == 2
    assert options[0] in done.stderr
    assert not done.loads


def test_a_terminal_that_is_gone_breaks_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(command, "note", gone)
    monkeypatch.setattr(logging, "raiseExceptions", False)
    record = logging.LogRecord("x", logging.INFO, "", 1, "words", (), None)
    command._Notes().handle(record)


def test_the_url_of_an_ipv6_address_has_brackets() -> None:
    assert command._url("::1", 1) == "http://[::1]:1"
