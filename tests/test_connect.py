"""`connect` tells each client of the server, and changes its files without losing anything."""

import json
import stat
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, get_args

import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner, Result

from dflash2_mlx.cli.app import app
from dflash2_mlx.cli.connect import Client
from dflash2_mlx.config_files import JSON, TOML, merge, write_merged
from dflash2_mlx.connect import CLIENTS, Server, ask_server, setup
from dflash2_mlx.errors import ConnectFailed

MODEL = {"id": "qwen", "object": "model", "aliases": ["big", "default"], "context_length": 40_000}
SERVER = Server("http://127.0.0.1:8080", "qwen", 40_000)
FILED = [name for name in CLIENTS if name != "openwebui"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("CODEX_HOME", "CLAUDE_CONFIG_DIR", "XDG_CONFIG_HOME", "CONTINUE_GLOBAL_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path / "llm"))
    monkeypatch.delenv("DFLASH2_MLX_API_KEY", raising=False)
    return tmp_path


@contextmanager
def listening(body: Any, status: int = 200, key: str | None = None) -> Iterator[str]:
    """The URL of a server whose list of models is `body`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = key is None or self.headers["Authorization"] == f"Bearer {key}"
            code = status if allowed else 401
            self.send_response(code if self.path == "/v1/models" else 404)
            self.end_headers()
            self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def run(client: str, *args: str) -> Result:
    with listening({"data": [MODEL]}) as url:
        return CliRunner().invoke(app, ["connect", client, "--url", url, *args])


def parsed(path: Path) -> Any:
    text = path.read_text()
    if path.suffix == ".toml":
        return tomllib.loads(text)
    return json.loads(text) if path.suffix == ".json" else YAML(typ="safe").load(text)


def test_the_command_line_knows_the_same_clients() -> None:
    assert get_args(Client) == tuple(CLIENTS)


# The server


@pytest.mark.parametrize("tail", ["", "/", "/v1", "/v1/"])
def test_the_server_is_asked_what_it_serves(tail: str) -> None:
    with listening({"data": [MODEL]}) as url:
        assert ask_server(url + tail) == Server(url, "qwen", 40_000)
        assert ask_server(url, "big").model == "big"


def test_a_key_is_sent() -> None:
    with listening({"data": [MODEL]}, key="secret") as url:
        assert ask_server(url, key="secret").key == "secret"
        with pytest.raises(ConnectFailed, match="status 401; give its --api-key"):
            ask_server(url)


def test_a_proxy_is_not_asked_for_a_server_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with listening({"data": [MODEL]}) as url:
        assert ask_server(url).model == "qwen"


def test_no_server_is_one_clear_line() -> None:
    with listening({}) as url:
        pass  # the port is free again
    result = CliRunner().invoke(app, ["connect", "codex", "--url", url])
    assert isinstance(result.exception, ConnectFailed)
    assert str(result.exception).startswith(f"no server answers at {url} (")
    assert "dflash2-mlx serve" in str(result.exception)


@pytest.mark.parametrize(
    ("body", "status", "model", "said"),
    [
        (b"<html>", 200, None, "is not the list of models"),
        ({"data": [{"name": "x"}]}, 200, None, "is not the list of models"),
        ({"models": []}, 200, None, "is not the list of models"),
        ({"data": []}, 200, None, "serves no model"),
        ({"data": [MODEL]}, 200, "small", "does not serve 'small', it serves qwen, big, default"),
        ({}, 503, None, "answers with status 503"),
    ],
)
def test_a_strange_server_is_told_of(body: Any, status: int, model: Any, said: str) -> None:
    with listening(body, status) as url, pytest.raises(ConnectFailed, match=said):
        ask_server(url, model)


def test_what_is_no_url_is_told_of() -> None:
    with pytest.raises(ConnectFailed, match="expected one like http"):
        ask_server("localhost:8080")


# What each client gets


def test_codex_gets_a_provider_of_responses() -> None:
    shown = tomllib.loads(run("codex").stdout)
    provider = shown["model_providers"][shown["model_provider"]]
    assert (shown["model"], shown["model_context_window"]) == ("qwen", 40_000)
    assert provider["wire_api"] == "responses"
    assert provider["base_url"].endswith("/v1")
    assert "env_key" not in provider


def test_claude_gets_one_model_for_all_of_its_tiers() -> None:
    (file,) = setup("claude", SERVER).files
    variables = file.content["env"]
    models = {value for name, value in variables.items() if name.endswith("_MODEL")}
    assert models == {"qwen"}
    assert variables["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8080"  # it adds /v1/messages
    assert variables["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "40000"
    assert all(isinstance(value, str) for value in variables.values())


def test_opencode_gets_a_provider_with_limits() -> None:
    (file,) = setup("opencode", SERVER).files
    name, _, model = file.content["model"].partition("/")
    provider = file.content["provider"][name]
    assert provider["options"]["baseURL"] == "http://127.0.0.1:8080/v1"
    assert provider["models"][model]["limit"] == {"context": 40_000, "output": 10_000}


def test_aider_gets_its_endpoint_and_the_size_of_the_model() -> None:
    conf, known = setup("aider", SERVER).files
    assert conf.content["openai-api-base"] == "http://127.0.0.1:8080/v1"
    assert known.content[conf.content["model"]]["max_input_tokens"] == 40_000


def test_continue_and_llm_get_an_entry_in_their_lists() -> None:
    (file,) = setup("continue", SERVER).files
    assert file.whole["schema"] == "v1"
    assert file.content["models"][0]["apiBase"] == "http://127.0.0.1:8080/v1"
    (file,) = setup("llm", SERVER).files
    assert file.content[0]["api_base"] == "http://127.0.0.1:8080/v1"


def test_open_webui_gets_lines_for_a_shell() -> None:
    lines = run("openwebui").stdout.splitlines()
    assert lines[0].startswith("export OPENAI_API_BASE_URL=http://127.0.0.1:")
    assert lines[0].endswith("/v1")
    assert isinstance(run("openwebui", "--write").exception, ConnectFailed)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_model_without_a_known_limit_sets_none(client: str) -> None:
    for file in setup(client, Server("http://127.0.0.1:8080", "qwen")).files:
        assert "None" not in file.form.dump(file.whole)
        assert "null" not in file.form.dump(file.whole)


def test_a_key_stays_out_of_what_can_read_it_elsewhere() -> None:
    server = Server("http://127.0.0.1:8080", "qwen", 40_000, "secret")
    told = {name: str([file.whole for file in setup(name, server).files]) for name in CLIENTS}
    assert {name for name, text in told.items() if "secret" not in text} == {"codex", "llm"}
    assert "DFLASH2_MLX_API_KEY" in told["codex"]


# Files


@pytest.mark.parametrize("client", FILED)
def test_what_is_shown_is_what_a_new_file_holds(client: str, home: Path) -> None:
    with listening({"data": [MODEL]}) as url:
        args = ["connect", client, "--url", url]
        shown = CliRunner().invoke(app, args).stdout
        assert not list(home.rglob("*.*"))
        written = CliRunner().invoke(app, [*args, "--write"])
        again = CliRunner().invoke(app, [*args, "--write"])
    paths = [Path(line) for line in written.stdout.splitlines()]
    assert "".join(path.read_text() for path in paths) == shown
    assert all(parsed(path) for path in paths)
    assert again.stdout == written.stdout
    assert again.stderr.count("had all of it already") == len(paths)
    assert not list(home.rglob("*.bak"))


def test_other_settings_and_comments_stay(home: Path) -> None:
    path = home / ".codex" / "config.toml"
    path.parent.mkdir()
    old = (
        "# mine\n"
        'model = "gpt"  # for work\n'
        'approval_policy = "never"\n\n'
        "[model_providers.other]\n"
        'name = "Other"\n\n'
        '[projects."/work"]\n'
        'trust_level = "trusted"\n'
    )
    path.write_text(old)
    path.chmod(0o600)
    result = run("codex", "--write")
    text, new = path.read_text(), parsed(path)
    assert result.exit_code == 0
    assert text.startswith("# mine\n")
    assert (new["model"], new["model_provider"]) == ("qwen", "dflash2-mlx")
    assert new["approval_policy"] == "never"
    assert new["projects"] == {"/work": {"trust_level": "trusted"}}
    assert set(new["model_providers"]) == {"other", "dflash2-mlx"}
    (backup,) = path.parent.glob("*.bak")
    assert backup.read_text() == old
    assert backup.name in result.stderr
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_entry_of_a_list_is_renewed_and_others_stay(home: Path) -> None:
    path = home / ".continue" / "config.yaml"
    path.parent.mkdir()
    path.write_text(
        "name: Mine # keep\nversion: 2.0.0\nschema: v1\nmodels:\n"
        "  - name: other\n    provider: openai\n"
        "  - name: qwen (dflash2-mlx)\n    apiBase: http://127.0.0.1:1/v1\n    roles: [chat]\n"
    )
    run("continue", "--write")
    new = parsed(path)
    assert path.read_text().startswith("name: Mine # keep\n")
    assert [model["name"] for model in new["models"]] == ["other", "qwen (dflash2-mlx)"]
    assert new["models"][1]["apiBase"] != "http://127.0.0.1:1/v1"


def test_a_file_of_comments_keeps_them(home: Path) -> None:
    path = home / ".aider.conf.yml"
    path.write_text("# nothing yet\n")
    run("aider", "--write")
    assert path.read_text().startswith("# nothing yet\n")
    assert parsed(path)["model"] == "openai/qwen"


def test_a_file_that_cannot_be_read_stays_as_it_was(home: Path) -> None:
    path = home / ".claude" / "settings.json"
    path.parent.mkdir()
    path.write_text('{"env": {}, // a comment\n}')
    result = run("claude", "--write")
    assert isinstance(result.exception, ConnectFailed)
    assert "by hand" in str(result.exception)
    assert [file.name for file in path.parent.iterdir()] == ["settings.json"]
    assert path.read_text().endswith("// a comment\n}")


def test_a_linked_file_stays_a_link(home: Path) -> None:
    real, link = home / "dotfiles.toml", home / "config.toml"
    real.write_text('a = "b"\n')
    link.symlink_to(real)
    write_merged(link, TOML, {"c": 1})
    assert link.is_symlink()
    assert parsed(real) == {"a": "b", "c": 1}


def test_a_new_file_with_a_key_is_private(home: Path) -> None:
    written = write_merged(home / "deep" / "settings.json", JSON, {"a": 1}, private=True)
    assert stat.S_IMODE(written.path.stat().st_mode) == 0o600


def test_a_file_of_another_kind_is_refused(home: Path) -> None:
    path = home / "settings.json"
    path.write_text("[1]")
    with pytest.raises(ConnectFailed, match="holds a list"):
        write_merged(path, JSON, {"a": 1})


def test_merging_goes_into_tables_and_named_entries() -> None:
    old = {"a": {"b": 1, "c": 2}, "l": [{"name": "x", "v": 1}, 3], "keep": True}
    new = {"a": {"b": 9}, "l": [{"name": "x", "w": 2}, {"name": "y"}, 3]}
    assert merge(old, new) == {
        "a": {"b": 9, "c": 2},
        "l": [{"name": "x", "v": 1, "w": 2}, 3, {"name": "y"}],
        "keep": True,
    }
