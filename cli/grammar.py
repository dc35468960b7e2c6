"""The options that hold an answer to a form."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from dflash2_mlx.cli.options import answer_option
from dflash2_mlx.cli.texts import file_text

if TYPE_CHECKING:
    from dflash2_mlx.grammar import Grammar


@dataclass(frozen=True, slots=True)
class GrammarOptions:
    """What the answer has to obey, in at most one of three languages."""

    json_schema: Annotated[
        str | None,
        answer_option(
            metavar="FILE|-",
            help="Answer in JSON that fits this JSON schema; - reads it from stdin.",
        ),
    ] = None
    regex: Annotated[
        str | None,
        answer_option(
            metavar="TEXT", help="Answer with text that matches this regular expression as a whole."
        ),
    ] = None
    grammar: Annotated[
        str | None,
        answer_option(
            metavar="FILE|-",
            help="Answer with text that this Lark grammar describes; - reads it from stdin.",
        ),
    ] = None

    def __post_init__(self) -> None:
        options = {
            "--json-schema": self.json_schema,
            "--regex": self.regex,
            "--grammar": self.grammar,
        }
        given = [option for option, value in options.items() if value is not None]
        if len(given) > 1:
            raise typer.BadParameter(f"cannot be used with {given[0]}", param_hint=given[1])

    @property
    def from_stdin(self) -> str | None:
        """The option that reads stdin, or None."""
        if self.json_schema == "-":
            return "--json-schema"
        return "--grammar" if self.grammar == "-" else None

    def read(self) -> "Grammar | None":
        """The grammar that was asked for, checked as far as it can be without a model.

        Raises:
            InvalidRequest: a file cannot be read, or what it holds is no grammar.
        """
        grammar = self._read()
        if grammar is not None:
            grammar.check()
        return grammar

    def _read(self) -> "Grammar | None":
        from dflash2_mlx.grammar import Grammar

        if self.json_schema is not None:
            return Grammar.json_schema(file_text(self.json_schema, "--json-schema"))
        if self.regex is not None:
            return Grammar.regex(self.regex)
        if self.grammar is not None:
            return Grammar.lark(file_text(self.grammar, "--grammar"))
        return None
