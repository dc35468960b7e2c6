"""What each client has to be told to use a running server."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dflash2_mlx.config_files import JSON, TOML, YAML, Format
from dflash2_mlx.errors import ConnectFailed

DEFAULT_URL = "http://127.0.0.1:8080"
KEY_VARIABLE = "DFLASH2_MLX_API_KEY"
NO_KEY = "none"  # clients refuse to start without one
PROVIDER = "dflash2-mlx"
ANSWER_S = 5.0  # a server on this machine answers in milliseconds
MOST_OUTPUT = 32_000


@dataclass(frozen=True, slots=True)
class Server:
    """A running server: `url` without /v1, the name of its model, how many tokens that reads."""

    url: str
    model: str
    context: int | None = None
    key: str | None = None

    @property
    def api(self) -> str:
        """Where OpenAI's clients look."""
        return f"{self.url}/v1"

    @property
    def output(self) -> int | None:
        """Tokens that an answer may take of the context: clients keep them free."""
        return None if self.context is None else min(MOST_OUTPUT, self.context // 4)


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """What belongs into one file; `path` None is the shell's environment.

    `frame` is what only a file that was not there gets beside the content.
    """

    path: Path | None
    form: Format
    content: Any
    frame: Mapping[str, Any] = field(default_factory=dict)

    @property
    def whole(self) -> Any:
        """The file as it would be if it was not there."""
        return {**self.frame, **self.content} if self.frame else self.content


@dataclass(frozen=True, slots=True)
class Setup:
    """All that one client needs, and how it is started then."""

    files: tuple[ConfigFile, ...]
    start: str
    hints: tuple[str, ...] = ()


def ask_server(url: str, model: str | None = None, key: str | None = None) -> Server:
    """What the server at a URL serves.

    Raises `ConnectFailed` when none answers, or when it does not serve `model`.
    """
    root = url.rstrip("/").removesuffix("/v1")
    listed = _models(root, key)
    names = [name for entry in listed for name in (entry["id"], *entry.get("aliases", ()))]
    if model is not None and model not in names:
        raise ConnectFailed(f"{root} does not serve {model!r}, it serves {', '.join(names)}")
    chosen = next(e for e in listed if model in (None, e["id"], *e.get("aliases", ())))
    return Server(root, model or chosen["id"], chosen.get("context_length"), key)


def _models(root: str, key: str | None) -> list[dict[str, Any]]:
    if urlsplit(root).scheme not in ("http", "https"):
        raise ConnectFailed(f"{root!r} is no URL of a server, expected one like {DEFAULT_URL}")
    request = urllib.request.Request(f"{root}/v1/models")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    # A proxy for the web does not know this machine's servers.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=ANSWER_S) as answer:
            listed: list[dict[str, Any]] = json.load(answer)["data"]
            return [entry for entry in listed if isinstance(entry["id"], str)] or _nothing(root)
    except urllib.error.HTTPError as error:
        error.close()
        wanted = "; give its --api-key" if error.code == 401 else ""
        raise ConnectFailed(f"{root}/v1/models answers with status {error.code}{wanted}") from None
    except OSError as error:
        why = getattr(error, "reason", None) or error
        raise ConnectFailed(
            f"no server answers at {root} ({why}); start one with dflash2-mlx serve, or give --url"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise ConnectFailed(f"{root}/v1/models is not the list of models of a server") from None


def _nothing(root: str) -> list[dict[str, Any]]:
    raise ConnectFailed(f"{root} serves no model; start it with dflash2-mlx serve --model M")


def _codex(server: Server) -> Setup:
    provider: dict[str, Any] = {
        "name": PROVIDER,
        "base_url": server.api,
        "wire_api": "responses",
    }
    if server.key:
        provider["env_key"] = KEY_VARIABLE
    content: dict[str, Any] = {"model": server.model, "model_provider": PROVIDER}
    if server.context:
        content["model_context_window"] = server.context
    content["model_providers"] = {PROVIDER: provider}
    hints = (f"Codex reads the key from {KEY_VARIABLE}: export it",) if server.key else ()
    path = _folder("CODEX_HOME", "~/.codex") / "config.toml"
    return Setup((ConfigFile(path, TOML, content),), "codex", hints)


def _claude(server: Server) -> Setup:
    kinds = ("OPUS", "SONNET", "HAIKU")
    variables = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.key or NO_KEY,
        "ANTHROPIC_MODEL": server.model,
        **{f"ANTHROPIC_DEFAULT_{kind}_MODEL": server.model for kind in kinds},
        "CLAUDE_CODE_SUBAGENT_MODEL": server.model,
        # Without it each request begins with other words, and no prompt state can be kept.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "API_TIMEOUT_MS": "3600000",
    }
    if server.context:
        variables["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(server.context)
        variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(server.output)
    path = _folder("CLAUDE_CONFIG_DIR", "~/.claude") / "settings.json"
    return Setup((ConfigFile(path, JSON, {"env": variables}),), "claude")


def _opencode(server: Server) -> Setup:
    model: dict[str, Any] = {"name": server.model}
    if server.context:
        model["limit"] = {"context": server.context, "output": server.output}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": PROVIDER,
        "options": {"baseURL": server.api, "apiKey": server.key or NO_KEY},
        "models": {server.model: model},
    }
    frame = {"$schema": "https://opencode.ai/config.json"}
    content = {
        "model": f"{PROVIDER}/{server.model}",
        "provider": {PROVIDER: provider},
    }
    path = _folder("XDG_CONFIG_HOME", "~/.config") / "opencode" / "opencode.json"
    return Setup((ConfigFile(path, JSON, content, frame),), "opencode")


def _aider(server: Server) -> Setup:
    name = f"openai/{server.model}"
    content = {
        "model": name,
        "openai-api-base": server.api,
        "openai-api-key": server.key or NO_KEY,
        "show-model-warnings": False,
    }
    files = [ConfigFile(Path("~/.aider.conf.yml").expanduser(), YAML, content)]
    if server.context:
        known = {
            "litellm_provider": "openai",
            "mode": "chat",
            "max_input_tokens": server.context,
            "max_output_tokens": server.output,
            "input_cost_per_token": 0,
            "output_cost_per_token": 0,
        }
        path = Path("~/.aider.model.metadata.json").expanduser()
        files.append(ConfigFile(path, JSON, {name: known}))
    return Setup(tuple(files), "aider")


def _continue(server: Server) -> Setup:
    model: dict[str, Any] = {
        "name": f"{server.model} ({PROVIDER})",
        "provider": "openai",
        "model": server.model,
        "apiBase": server.api,
        "apiKey": server.key or NO_KEY,
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use"],
    }
    if server.context:
        limits = {"contextLength": server.context, "maxTokens": server.output}
        model["defaultCompletionOptions"] = limits
    frame = {"name": "Local", "version": "1.0.0", "schema": "v1"}
    path = _folder("CONTINUE_GLOBAL_DIR", "~/.continue") / "config.yaml"
    return Setup(
        (ConfigFile(path, YAML, {"models": [model]}, frame),), "Continue in your editor, or cn"
    )


def _llm(server: Server) -> Setup:
    import typer

    entry: dict[str, Any] = {
        "model_id": server.model,
        "model_name": server.model,
        "api_base": server.api,
        "supports_tools": True,
        "supports_schema": True,
    }
    if server.key:
        entry["api_key_name"] = PROVIDER
    hints = (f"keep the key with: llm keys set {PROVIDER}",) if server.key else ()
    folder = _folder("LLM_USER_PATH", typer.get_app_dir("io.datasette.llm"))
    file = ConfigFile(folder / "extra-openai-models.yaml", YAML, [entry])
    return Setup((file,), f"llm -m {server.model}", hints)


def _openwebui(server: Server) -> Setup:
    content = {
        "OPENAI_API_BASE_URL": server.api,
        "OPENAI_API_KEY": server.key or NO_KEY,
        "ENABLE_OLLAMA_API": "false",
    }
    form = Format("shell", str, _dump_environment)
    hints = (
        "it reads these at its first start; later: Admin Panel, Settings, Connections",
        "in a container the server is http://host.docker.internal, and serve needs "
        "--host 0.0.0.0 with an --api-key",
    )
    return Setup((ConfigFile(None, form, content),), "open-webui serve", hints)


def _dump_environment(variables: dict[str, str]) -> str:
    return "".join(f"export {name}={value}\n" for name, value in variables.items())


def _folder(variable: str, default: str) -> Path:
    return Path(os.environ.get(variable) or default).expanduser()


CLIENTS: dict[str, Callable[[Server], Setup]] = {
    "codex": _codex,
    "claude": _claude,
    "opencode": _opencode,
    "aider": _aider,
    "continue": _continue,
    "openwebui": _openwebui,
    "llm": _llm,
}


def setup(client: str, server: Server) -> Setup:
    """What a client needs to use a server; `client` is one of `CLIENTS`."""
    return CLIENTS[client](server)
