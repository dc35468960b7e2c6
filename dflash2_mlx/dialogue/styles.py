"""How models write tool calls, by the name of mlx-lm's parser; what is not here is read whole."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import regex

_QUOTED = r"\"[^\"]*\"|'[^']*'|[^\s\"'<>]+"
_NO_SEP = r"(?:(?!<\|sep\|>).)*?"


@dataclass(frozen=True)
class Header:
    """A header, then the arguments as JSON. `header` has the groups `name` and `id`.

    `bare` begins a call without its outer tag; `tags` may stand around header and arguments.
    """

    header: str
    tags: str
    bare: str = ""
    strays: tuple[str, ...] = ()  # tags that may be left over in text

    @cached_property
    def pattern(self) -> Any:
        """The header, compiled."""
        return regex.compile(self.header, regex.DOTALL)

    def without_tags(self, text: str) -> str:
        """The text without inner tags."""
        return str(regex.sub(self.tags, "", text))


@dataclass(frozen=True)
class Markup:
    """Arguments one by one between tags.

    `call` opens a call and has the group `name`; `argument` is a whole argument with the groups
    `key` and `value`, begins with `opens` and ends with `ends`; `close` ends a call, unless the
    outer tag does.
    """

    call: str
    argument: str
    opens: str
    ends: str
    close: str = ""
    bare: str = ""
    strays: tuple[str, ...] = ()

    @cached_property
    def head(self) -> Any:
        """What opens a call, compiled."""
        return regex.compile(self.call, regex.DOTALL)

    @cached_property
    def part(self) -> Any:
        """What comes next in a call: its `end`, an argument, or one that is `unfinished`."""
        close = f"(?P<end>{regex.escape(self.close)})|" if self.close else ""
        unfinished = f"(?P<unfinished>{regex.escape(self.opens)})"
        return regex.compile(f"{close}{self.argument}|{unfinished}", regex.DOTALL)


def _keyed(prefix: str = "") -> Markup:
    key, value = f"{prefix}arg_key", f"{prefix}arg_value"
    return Markup(
        call=rf"^\s*(?P<name>[^\s<]+)\s*(?=<{key}>)",
        argument=rf"<{key}>(?P<key>.*?)</{key}>(?:\\n|\s)*<{value}>(?P<value>.*?)</{value}>",
        opens=f"<{key}>",
        ends=f"</{value}>",
    )


HEADERS: dict[str, Header] = {
    "kimi_k2": Header(
        r"(?P<id>(?:functions\.)?(?P<name>[^\s<>]+?):\d+)\s*<\|tool_call_argument_begin\|>\s*",
        tags=r"<\|tool_call_\w+\|>",
        bare="<|tool_call_begin|>",
        strays=("<|tool_call_end|>",),
    ),
    "mistral": Header(
        r"(?P<name>[\w-]+)\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?\[ARGS\]\s*",
        tags=r"\[TOOL_CALLS\]",
    ),
}
MARKUPS: dict[str, Markup] = {
    "qwen3_coder": Markup(
        call=r"<function=\s*(?P<name>[^\s<>]+)(?:>|(?=[\s<]))",
        argument=r"<parameter=\s*(?P<key>[^\s<>]+)>?(?P<value>.*?)</parameter>",
        opens="<parameter=",
        ends="</parameter>",
        close="</function>",
        bare="<function=",
    ),
    "glm47": _keyed(),
    "longcat": _keyed("longcat_"),
    "minimax_m2": Markup(
        call=rf"<invoke name=(?P<name>{_QUOTED})\s*>",
        argument=r"<parameter name=(?P<key>[^>]+)>(?P<value>.*?)</parameter>",
        opens="<parameter name=",
        ends="</parameter>",
        close="</invoke>",
        bare="<invoke name=",
    ),
    "minicpm5": Markup(
        call=rf"(?:<function\s+)?(?:name\s*=\s*)?(?P<name>{_QUOTED})\s*>",
        argument=rf"<param\s+name\s*=\s*(?P<key>{_QUOTED})\s*>(?P<value>.*?)</param>",
        opens="<param ",
        ends="</param>",
    ),
    "muse_spark": Markup(
        call=r"<atem:invoke\b[^>]*?\bname=\"(?P<name>[^\"]+)\">",
        argument=r"<atem:parameter\b[^>]*?\bname=\"(?P<key>[^\"]+)\"[^>]*?>"
        r"(?P<value>.*?)</atem:parameter>",
        opens="<atem:parameter",
        ends="</atem:parameter>",
        close="</atem:invoke>",
        bare="<atem:invoke",
    ),
    "kimi_k3": Markup(
        call=rf"<\|open\|>call{_NO_SEP}\btool=\"(?P<name>[^\"]+)\"{_NO_SEP}<\|sep\|>",
        argument=rf"<\|open\|>(?:argument{_NO_SEP}\bkey=\"(?P<key>[^\"]*)\"{_NO_SEP}|json{_NO_SEP})"
        r"<\|sep\|>(?P<value>.*?)<\|close\|>(?:argument|json)<\|sep\|>",
        opens="<|open|>",
        ends="<|sep|>",
        close="<|close|>call<|sep|>",
    ),
}
# None: the template knows no tools, and the model was told of them in words.
JSON = frozenset({"json_tools", None})


def style_name(tokenizer: Any) -> str | None:
    """The name of the tokenizer's tool parser, or None when mlx-lm knows none for it."""
    parser = getattr(tokenizer, "tool_parser", None)
    return None if parser is None else parser.__module__.rpartition(".")[2]


def style_of(name: str | None) -> Header | Markup | None:
    """How the style is read piece by piece, or None when it is not, or is JSON throughout."""
    return None if name is None else HEADERS.get(name) or MARKUPS.get(name)
