"""Verified text, in pieces that may split anywhere, read as reasoning, text and tool calls.

Tags never show. Whitespace that only stands between tags is theirs, and so are the line breaks
around a thought. Without tools, the tags of tool calls are text like any other.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import regex

from dflash2_mlx.dialogue.calls import Calls, Parser, new_id
from dflash2_mlx.dialogue.events import Event, Reasoning, Text, Tool
from dflash2_mlx.dialogue.json_calls import JsonReader
from dflash2_mlx.dialogue.readers import Reader
from dflash2_mlx.dialogue.sections import Bare, Marks, Tagged, bare_reader, reader_of
from dflash2_mlx.dialogue.styles import style_name, style_of
from dflash2_mlx.dialogue.toolless import CALL_END, CALL_START

NORMAL, REASONING, CALL, BARE = "normal", "reasoning", "tool", "bare"
Edges = dict[str, dict[str, str]]  # of each state, the marks that end it and what comes next


class Segmenter:
    """Reads one answer. `tokenizer` is mlx-lm's wrapper, or anything that lacks its tags.

    A call's name comes as soon as it is certain, and so does each piece of its arguments; in styles
    that name them one by one, each argument when it closes; in others all when the call closes.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Tool],
        *,
        starts_in_reasoning: bool = False,
        parallel: bool = True,
    ) -> None:
        self._style = style_name(tokenizer)
        start, self._call_end = _call_tags(tokenizer)
        self._parser = Parser(tokenizer, tools)
        self._edges = _edges(tokenizer)
        if tools:
            self._add_calls(start)
        self._marks = {state: Marks(edges) for state, edges in self._edges.items()}
        self._calls = Calls(
            lambda: new_id(self._style), self._marks[NORMAL].without, limit=None if parallel else 1
        )
        self._lone_json = _lone_json(tools) if tools else None
        self._section: Tagged | Bare | None = None
        first = getattr(tokenizer, "response_initial_state", None)
        self._state: str = first or (REASONING if starts_in_reasoning else NORMAL)
        self._stretch = _Stretch(is_first=True)
        self._text = ""  # not yet read
        self._unshown = ""  # text of states that are not shown
        self._is_silent = True
        self._share = _Share()
        self.num_reasoning = 0  # tokens, the closing tag included

    @property
    def done(self) -> bool:
        """Whether nothing more can come: a lone call was asked for, and it is whole."""
        return self._calls.full

    def feed(self, text: str, tokens: int = 0, from_draft: int = 0) -> list[Event]:
        """The events that `text` makes certain.

        It was made of `tokens` tokens, of which the draft proposed `from_draft`; each stretch gets
        its share of them by its length.
        """
        self._share.add(len(text), tokens, from_draft)
        self._text += text
        self._read()
        return self._take_events()

    def finish(self, cut: bool) -> list[Event]:
        """The last events.

        After a `cut`, a call that is not whole stays as it is, and the beginning of a tag is
        dropped; where the model stopped by itself, a call is completed and all else is text.
        """
        while self._section is not None:
            section, self._section = self._section, None
            self._go_on(section.finish(cut))
            self._read()
        if not cut:
            self._say(self._take(len(self._text)))
        if self._state == NORMAL and self._stretch.is_first:
            self._emit(self._stretch.held)
        events = self._take_events()
        return [Text(self._unshown)] if self._is_silent and self._unshown.strip() else events

    def _add_calls(self, start: str) -> None:
        normal, reasoning = self._edges[NORMAL], self._edges[REASONING]
        if known := style_of(self._style):
            normal |= {stray: NORMAL for stray in known.strays}
            normal |= {known.bare: BARE} if known.bare else {}
        normal |= {self._call_end: NORMAL} if self._call_end else {}
        if not any(CALL in marks.values() for marks in self._edges.values()):
            normal[start] = CALL
        reasoning[start] = CALL

    def _take_events(self) -> list[Event]:
        events = self._calls.take()
        self._is_silent = self._is_silent and not events
        return events

    def _read(self) -> None:
        while self._text and (self._read_call() if self._section else self._read_text()):
            pass

    def _read_call(self) -> bool:
        assert self._section is not None
        rest = self._section.feed(self._take(len(self._text)).text)
        if rest is None:
            return False
        self._section = None
        self._go_on(rest)
        return True

    def _go_on(self, rest: str) -> None:
        self._text = rest
        self._share.add(len(rest), 0, 0)

    def _read_text(self) -> bool:
        """Say text up to the next mark; False when more is needed to go on."""
        if self._lone_json and self._state == NORMAL and not self._stretch.said:
            found = self._lone_json.match(self._text, partial=True)
            if found is not None:
                if not found.partial:
                    opening = self._take(found.end()).text
                    self._open_bare(opening, JsonReader(self._calls, self._parser, once=True))
                return not found.partial
        before, mark, _ = self._marks[self._state].cut(self._text)
        self._say(self._take(len(before)))
        if mark:
            self._take(len(mark))
            self._pass(mark)
        return bool(mark)

    def _pass(self, mark: str) -> None:
        """Go on behind a mark."""
        after_thought = self._state == REASONING
        state = self._edges[self._state][mark]
        self._state = NORMAL if state in (CALL, BARE) else state
        self._stretch = _Stretch(after_thought=after_thought)
        if state == CALL:
            self._section = Tagged(self._call_end, self._make_reader, self._calls)
        elif state == BARE and (reader := bare_reader(self._style, self._calls, self._parser)):
            self._open_bare(mark, reader)

    def _open_bare(self, opening: str, reader: Reader) -> None:
        say = lambda text: self._say(_Piece(text))  # noqa: E731
        self._section = Bare(opening, reader, self._calls, say)

    def _make_reader(self, calls: Calls) -> Reader:
        return reader_of(self._style, calls, self._parser)

    def _take(self, num_chars: int) -> "_Piece":
        """The next characters, with their share of tokens."""
        text, self._text = self._text[:num_chars], self._text[num_chars:]
        piece = _Piece(text, *self._share.take(num_chars))
        if self._state == REASONING:
            self.num_reasoning += piece.tokens
        return piece

    def _say(self, piece: "_Piece") -> None:
        if self._state in (NORMAL, REASONING):
            self._emit(self._stretch.trim(piece, is_thought=self._state == REASONING))
        else:
            self._unshown += piece.text

    def _emit(self, piece: "_Piece") -> None:
        if not piece.text:
            return
        kind = Reasoning if self._state == REASONING else Text
        self._calls.say(kind(piece.text, piece.tokens, piece.from_draft))


@dataclass(frozen=True, slots=True)
class _Piece:
    text: str
    tokens: int = 0
    from_draft: int = 0

    def __add__(self, other: "_Piece") -> "_Piece":
        tokens = self.tokens + other.tokens
        return _Piece(self.text + other.text, tokens, self.from_draft + other.from_draft)


class _Stretch:
    """Text between two tags: holds whitespace back until it is known to matter."""

    def __init__(self, *, is_first: bool = False, after_thought: bool = False) -> None:
        self.is_first = is_first
        self.said = False
        self.held = _Piece("")
        self._after_thought = after_thought

    def trim(self, piece: _Piece, *, is_thought: bool) -> _Piece:
        """What may be said of `piece` and what was held."""
        piece, self.held = self.held + piece, _Piece("")
        text = piece.text
        if not self.said:
            if not text.strip():
                self.held = piece
                return _Piece("")
            self.said = True
            text = text.lstrip("\n") if is_thought or self._after_thought else text
        if is_thought:
            kept = text.rstrip("\n")
            self.held = _Piece(text[len(kept) :])
            text = kept
        return _Piece(text, piece.tokens, piece.from_draft)


class _Share:
    """Spreads tokens over the characters that they became."""

    def __init__(self) -> None:
        self._chars = self._tokens = self._from_draft = 0

    def add(self, chars: int, tokens: int, from_draft: int) -> None:
        self._chars += chars
        self._tokens += tokens
        self._from_draft += from_draft

    def take(self, chars: int) -> tuple[int, int]:
        """The tokens of the next characters, and how many of them were drafted."""
        if not chars:
            return 0, 0
        tokens = self._tokens * chars // self._chars
        from_draft = self._from_draft * chars // self._chars
        self.add(-chars, -tokens, -from_draft)
        return tokens, from_draft


def _edges(tokenizer: Any) -> Edges:
    """The marks of each state as mlx-lm names them, calls apart, and those that may stray."""
    edges: Edges = {NORMAL: {}, REASONING: {}}
    for mark in getattr(tokenizer, "structural_markers", ()):
        edges[NORMAL][mark] = NORMAL
    if think_end := getattr(tokenizer, "think_end", None):
        edges[NORMAL] |= {think_end: NORMAL, tokenizer.think_start: REASONING}
        edges[REASONING] |= {think_end: NORMAL, tokenizer.think_start: REASONING}
    for state, transitions in getattr(tokenizer, "response_transitions", {}).items():
        edges.setdefault(state, {}).update(transitions)
    return edges


def _call_tags(tokenizer: Any) -> tuple[str, str]:
    """The tags around calls; a model whose template has none was told of some in words."""
    start = getattr(tokenizer, "tool_call_start", None)
    return (start, tokenizer.tool_call_end or "") if start else (CALL_START, CALL_END)


def _lone_json(tools: Sequence[Tool]) -> Any:
    """The beginning of a call of one of the tools as bare JSON."""
    names = "|".join(regex.escape(tool.name) for tool in tools)
    return regex.compile(
        rf'\s*\{{\s*"name"\s*:\s*"(?:{names})"\s*,\s*"(?:arguments|parameters)"\s*:\s*\{{'
    )


def opens_reasoning(
    tokenizer: Any, prompt_ids: Sequence[int], end_tokens: Collection[int] = ()
) -> bool:
    """Whether the prompt's end has opened a thought: then the answer begins inside it.

    A tag inside an earlier turn, which ended in one of `end_tokens`, does not count.
    """
    think_start = getattr(tokenizer, "think_start", None)
    if not think_start:
        return False
    ids = list(prompt_ids)
    ends = (place for place in range(len(ids), 0, -1) if ids[place - 1] in end_tokens)
    turn = tokenizer.decode(ids[next(ends, 0) :])
    return bool(turn.rfind(think_start) > turn.rfind(tokenizer.think_end))
