"""`dflash2-mlx connect`: the configuration with which a client uses a running server."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from dflash2_mlx.cli.console import note, write
from dflash2_mlx.config_files import Written, write_merged
from dflash2_mlx.connect import DEFAULT_URL, KEY_VARIABLE, Server, Setup, ask_server, setup
from dflash2_mlx.errors import ConnectFailed

Client = Literal["codex", "claude", "opencode", "aider", "continue", "openwebui", "llm"]


def connect(
    client: Annotated[Client, typer.Argument(help="The program that is to use the server.")],
    url: Annotated[str, typer.Option(metavar="URL", help="Where the server is.")] = DEFAULT_URL,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model, where it goes by several names.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", envvar=KEY_VARIABLE, help="The server's key.", show_default=False
        ),
    ] = None,
    write_files: Annotated[
        bool,
        typer.Option("--write", help="Merge it into the client's own file, and keep a backup."),
    ] = False,
) -> None:
    """Show how a coding agent or chat program is set up for the running server."""
    server = ask_server(url, model, api_key)
    found = setup(client, server)
    if write_files:
        _write_all(client, server, found)
    else:
        _show(found)
    for hint in found.hints:
        note(hint)
    note(f"then start: {found.start}")


def _show(found: Setup) -> None:
    for file in found.files:
        place = "for your shell" if file.path is None else f"for {_short(file.path)}"
        note(f"{place}:")
        write(file.form.dump(file.whole))
    if any(file.path is not None for file in found.files):
        note("--write puts it there")


def _write_all(client: str, server: Server, found: Setup) -> None:
    for file in found.files:
        if file.path is None:
            raise ConnectFailed(f"{client} has no file for this; leave --write out, and export it")
        written = write_merged(
            file.path, file.form, file.content, file.frame, private=server.key is not None
        )
        write(f"{written.path}\n")
        note(_told(written))


def _told(written: Written) -> str:
    if not written.changed:
        return f"{_short(written.path)} had all of it already"
    if written.backup is None:
        return f"{_short(written.path)} is new"
    return f"{_short(written.path)} was merged, its old content is in {written.backup.name}"


def _short(path: Path) -> str:
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)
