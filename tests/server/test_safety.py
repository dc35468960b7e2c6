"""Who may ask, and how much; nothing of this machine or of anybody's text leaks."""

import json
import logging
import socket
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from odd_requests import SOUND, bodies
from served import listening, saying_pair, served
from typer.testing import CliRunner

from dflash2_mlx.cli.app import app as program
from dflash2_mlx.errors import InvalidRequest
from dflash2_mlx.server import awake
from dflash2_mlx.server.rules import Rules
from dflash2_mlx.server.run import bind

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}


@pytest.fixture(scope="module")
def http() -> Any:
    with served() as http:
        yield http


def error(answer: Any) -> dict[str, Any]:
    content = answer.json()
    assert set(content) == {"error"}
    assert set(content["error"]) == {"message", "type", "param", "code"}
    assert "\n" not in content["error"]["message"]
    return content["error"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8080", "[::1]:8080", "LOCALHOST:1"])
def test_loopback_names_are_answered(http: Any, host: str) -> None:
    assert http.get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "", "[::1", "10.0.0.1"])
def test_a_name_that_was_pointed_here_is_refused(http: Any, host: str) -> None:
    refused = http.get("/v1/models", headers={"Host": host})
    assert refused.status_code == 403
    assert "Host" in error(refused)["message"]


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:3000"])
def test_pages_of_other_origins_are_refused_also_for_simple_requests(http, origin) -> None:
    headers = {"Origin": origin, "Content-Type": "text/plain"}
    refused = http.post(PATH, content=json.dumps(CHAT), headers=headers)
    assert refused.status_code == 403
    assert f"--allow-origin {origin}" in error(refused)["message"]
    preflight = http.options(PATH, headers={**headers, "Access-Control-Request-Method": "POST"})
    assert "access-control-allow-origin" not in preflight.headers
    assert (
        http.post(PATH, json=CHAT, headers={"Origin": "http://localhost:8080"}).status_code == 200
    )


# V21
@pytest.mark.parametrize("allowed", ["http://localhost:3000", "*"])
def test_an_allowed_origin_is_let_in_by_preflight_answer_and_stream(allowed: str) -> None:
    origin = {"Origin": "http://localhost:3000"}
    with served(rules=Rules(origins=(allowed,))) as http:
        asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a"}
        preflight = http.options(PATH, headers={**origin, **asks})
        assert preflight.status_code in (200, 204)
        assert "POST" in preflight.headers["access-control-allow-methods"]
        for stream in (False, True):
            answer = http.post(PATH, json={**CHAT, "stream": stream}, headers=origin)
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] in ("*", origin["Origin"])


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer s3cret"}, 200),
        ({"authorization": "bearer  s3cret"}, 200),
        ({"x-api-key": "s3cret"}, 200),
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Basic s3cret"}, 401),
        ({"x-api-key": "ü".encode()}, 401),
    ],
)
def test_a_key_is_asked_for_everywhere_but_on_health_and_the_page(headers, status) -> None:
    with served(rules=Rules(key="s3cret")) as http:
        for path in ("/v1/models", "/metrics", "/v1/models/tiny"):
            assert http.get(path, headers=headers).status_code == status
        answer = http.post(PATH, json=CHAT, headers=headers)
        assert answer.status_code == status
        if status == 401:
            assert error(answer)["code"] == "invalid_api_key"
            assert "s3cret" not in answer.text
        assert http.get("/health").status_code == 200


def test_a_host_that_others_can_reach_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DFLASH2_MLX_API_KEY", raising=False)
    for extra in ((), ("--api-key", " ")):
        line = ["serve", "--model", "tiny", "--host", "0.0.0.0", *extra]
        refused = CliRunner().invoke(program, line)
        assert isinstance(refused.exception, InvalidRequest)
        assert "--api-key" in str(refused.exception)


def test_a_port_that_is_taken_is_said_before_a_model_loads() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InvalidRequest, match=f"cannot listen on 127.0.0.1:{port}: .*--port"):
            bind("127.0.0.1", port)
    with pytest.raises(InvalidRequest, match="cannot listen"):
        bind("no.such.host.invalid", 0)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"", 400, "not JSON"),
        (b"{", 400, "not JSON"),
        (b"[]", 400, "is a list"),
        (b'"a"', 400, "is a str"),
        (b"\xff", 400, "not JSON"),
        (b'{"temperature": NaN}', 400, "NaN is no JSON number"),
        (b'{"a": "\\ud800"}', 400, "surrogate"),
        (b'{"metadata": {"a": [1e999]}}', 400, "beyond any float"),
        (b'{"seed": ' + b"9" * 5000 + b"}", 400, "not JSON"),
        (b'{"a":' * 100 + b"1" + b"}" * 100, 413, "nested deeper"),
        (b"[" * 100_000, 413, "nested deeper"),
        (b'{"a": "' + b"x" * 1000 + b'"}', 413, "larger than"),
    ],
)
def test_bodies_that_cannot_be_read_are_refused(monkeypatch, http, body, status, said) -> None:
    if said == "larger than":
        monkeypatch.setattr("dflash2_mlx.server.body.MAX_BYTES", 500)
    refused = http.post(PATH, content=body)
    assert refused.status_code == status
    assert said in error(refused)["message"]


def test_a_body_is_not_read_beyond_its_limit(http: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash2_mlx.server.body.MAX_BYTES", 500)
    read: list[int] = []

    def pieces() -> Any:
        for number in range(100):
            read.append(number)
            yield b"x" * 100

    assert http.post(PATH, content=pieces()).status_code == 413


@pytest.mark.parametrize("field", ["response_format", "tools"])
def test_a_schema_is_limited_in_size(http: Any, field: str) -> None:
    big = {"type": "object", "description": "x" * 300_000}
    tool = {"type": "function", "function": {"name": "a", "parameters": big}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": big}}
    refused = http.post(PATH, json={**CHAT, field: [tool] if field == "tools" else form})
    assert refused.status_code == 413
    assert "characters" in error(refused)["message"]


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: local"])
def test_a_head_that_does_not_end_closes_its_connection_and_only_that(monkeypatch, sent) -> None:
    monkeypatch.setattr("dflash2_mlx.server.run.HEAD_S", 0.05)
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with listening() as (address, _), socket.create_connection(address, timeout=20) as slow:
        for _ in range(2):
            with socket.create_connection(address, timeout=20) as sound:
                sound.sendall(whole)
                assert b" 200 " in sound.recv(4096)
        slow.sendall(sent)
        assert slow.recv(4096) == b""


def test_a_body_that_does_not_end_is_a_400(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash2_mlx.server.body.BODY_S", 0.05)
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{{"
    with listening() as (address, _), socket.create_connection(address, timeout=20) as slow:
        slow.sendall(head.encode())
        assert b" 400 " in slow.recv(4096)


def test_a_full_line_is_a_503_that_says_when_to_try_again() -> None:
    go, started = threading.Event(), threading.Event()
    pair = saying_pair()

    def before_read(count: int) -> None:
        started.set()
        assert go.wait(20)

    pair.target.before_read = before_read
    with served(pair, max_queue=1) as http:
        statuses: list[int] = []
        worker = http.app.state.desk.worker

        def ask() -> None:
            statuses.append(http.post(PATH, json=CHAT).status_code)

        threads = [threading.Thread(target=ask) for _ in range(2)]
        threads[0].start()
        assert started.wait(20)
        threads[1].start()
        with worker._changed:
            assert worker._changed.wait_for(lambda: len(worker._queue) == 1, 20)
        refused = http.post(PATH, json=CHAT)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "5"
        assert error(refused)["code"] == "server_busy"
        go.set()
        for thread in threads:
            thread.join()
    assert statuses == [200, 200]


def test_the_log_has_figures_and_no_text_of_anybody(caplog: pytest.LogCaptureFixture) -> None:
    said = "a secret of mine"
    with caplog.at_level(logging.INFO, "dflash2_mlx.server"), served() as http:
        message = {"role": "user", "content": said}
        http.post(PATH, json={"messages": [message]})
        http.post(PATH, json={"messages": [message], "temperature": -1})
    assert "request done" in caplog.text
    assert said not in caplog.text


# V32
@pytest.mark.parametrize("system", ["darwin", "linux"])
def test_idle_sleep_is_held_off_on_macos_only_and_only_for_a_while(monkeypatch, system) -> None:
    log: list[Any] = []

    class Process:
        def __init__(self, command: list[str], **_: Any) -> None:
            log.append(command[1:3])

        def terminate(self) -> None:
            log.append("terminated")

        def wait(self, timeout: float) -> None:
            log.append("waited")

    monkeypatch.setattr(awake.sys, "platform", system)
    monkeypatch.setattr(awake.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(awake.subprocess, "Popen", Process)
    with awake.stay_awake():
        during = list(log)
    assert during == ([["-i", "-w"]] if system == "darwin" else [])
    assert log == during + (["terminated", "waited"] if system == "darwin" else [])


def test_a_missing_tool_to_hold_off_sleep_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awake.sys, "platform", "darwin")
    monkeypatch.setattr(awake.shutil, "which", lambda name: None)
    with awake.stay_awake():
        pass


ASKED = st.sampled_from(list(SOUND)).flatmap(lambda path: st.tuples(st.just(path), bodies(path)))


@settings(max_examples=200, deadline=None)
@given(ASKED)
def test_no_body_makes_the_server_fail(http: Any, asked: tuple[str, bytes]) -> None:
    path, body = asked
    answer = http.post(path, content=body)
    assert answer.status_code in (200, 400, 404, 413), answer.text
    assert http.get("/health").status_code == 200
