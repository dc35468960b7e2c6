"""Token ids to text as they arrive: detokenizing, and stop strings.

mlx-lm's own detokenizers trim spaces and show special tokens, and `tokenizers`' DecodeStream raises
on invalid bytes; both were tried. A window over the tokenizer's `decode` has neither fault.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from string import hexdigits
from typing import Any

from dflash2_mlx.tags import tag_ids

_BYTE_TOKENS = frozenset(f"<0x{high}{low}>" for high, low in product(hexdigits, repeat=2))
_REPLACEMENT = "\ufffd"

# Of _WINDOW ids only the last _CONTEXT are kept. At one byte or more each, they hold the four
# characters that fix how a leading space is cut and whether a character is still incomplete.
# A pattern or more ids at once would ask for 1 KB of memory in one piece: then glibc first tidies
# up the thousands of small ones that a pass has let go of, which takes 1 to 2 ms.
_WINDOW = 32
_CONTEXT = 16
_MIN_CONTEXT_CHARS = 4


class Detokenizer:
    """Turns ids into text piece by piece.

    The joined pieces equal one `tokenizer.decode` of all ids without special tokens, wherever the
    stream is split. `tokenizer` is mlx-lm's wrapper, a transformers tokenizer, or anything with
    `decode(ids) -> str`; the ids in `hidden` are dropped, as the special tokens are.
    """

    def __init__(self, tokenizer: Any, hidden: Collection[int] = ()) -> None:
        self._decode = _decoder(tokenizer)
        self._token_of = getattr(tokenizer, "convert_ids_to_tokens", None)
        self._hidden = special_ids(tokenizer) | set(hidden)
        self._ids: list[int] = []
        self._num_sent = 0  # characters of decode(_ids) already returned

    def add(self, tokens: Sequence[int]) -> str:
        """Returns the text that no later token can change."""
        visible = [token for token in tokens if token not in self._hidden]
        self._ids += visible
        if not visible or self._ends_in_byte_token():
            return ""
        text = self._decode(self._ids)
        fresh = text[self._num_sent : _num_settled(text)]
        self._num_sent += len(fresh)
        if len(self._ids) >= _WINDOW:
            self._forget()
        return fresh

    def finish(self) -> str:
        """Returns the rest; a character that was cut off shows as U+FFFD."""
        rest = self._decode(self._ids)[self._num_sent :] if self._ids else ""
        self._ids, self._num_sent = [], 0
        return rest

    def _ends_in_byte_token(self) -> bool:
        # One invalid byte turns the whole run of byte tokens around it into U+FFFD, so no part of
        # a run is settled before it ends.
        if self._token_of is None:
            return False
        token = self._token_of(self._ids[-1])
        return token in _BYTE_TOKENS

    def _forget(self) -> None:
        recent = self._ids[-_CONTEXT:]
        text = self._decode(recent)
        if len(text) >= _MIN_CONTEXT_CHARS:
            self._ids, self._num_sent = recent, _num_settled(text)


def special_ids(tokenizer: Any) -> frozenset[int]:
    """The ids that never show as text: end of turn, padding and the like, but no tags of thoughts
    and tool calls, be they ordinary tokens or special ones."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    named = getattr(tokenizer, "all_special_ids", ())
    special = frozenset(named) | {id_ for id_, token in added.items() if token.special}
    return special - tag_ids(tokenizer)


def _decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    # The clean-up of transformers removes spaces before punctuation, which corrupts code.
    is_transformers = hasattr(tokenizer, "clean_up_tokenization_spaces")
    options = {"clean_up_tokenization_spaces": False} if is_transformers else {}
    return partial(tokenizer.decode, **options)


def _num_settled(text: str) -> int:
    # A final U+FFFD may be a character whose last bytes have not arrived.
    return len(text) - text.endswith(_REPLACEMENT)


class StopStrings:
    """Watches a stream of text for stop strings.

    The stop that completes first wins; of several that complete at the same character, the longest.
    So the result does not depend on how the text was split. Only a tail that could still become a
    stop is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._matchers = [_Matcher(stop) for stop in stops]
        self._held = ""
        self._reached = False

    def feed(self, text: str) -> tuple[str, bool]:
        """Returns the text that is safe to send, and whether a stop was reached; the text ends
        right before the stop, and everything after it is dropped."""
        if self._reached:
            return "", True
        seen = self._held + text
        for end in range(len(self._held), len(seen)):
            if length := self._completed(seen[end]):
                self._held, self._reached = "", True
                return seen[: end + 1 - length], True
        num_safe = len(seen) - max((matcher.num_matched for matcher in self._matchers), default=0)
        self._held = seen[num_safe:]
        return seen[:num_safe], False

    def finish(self) -> str:
        """Returns the text that was held back for a stop that never came."""
        rest, self._held = self._held, ""
        return rest

    def _completed(self, char: str) -> int:
        """The length of the longest stop that `char` completes, or 0."""
        return max((matcher.step(char) for matcher in self._matchers), default=0)


class _Matcher:
    """How much of one stop string the text ends with, in the manner of Knuth, Morris and Pratt."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._border = [0, 0]  # of each prefix, the longest shorter prefix it ends with
        self.num_matched = 0
        for char in stop[1:]:
            self._border.append(self._advance(self._border[-1], char))

    def step(self, char: str) -> int:
        """Returns the length of the stop when `char` completes it, else 0."""
        self.num_matched = self._advance(self.num_matched, char)
        return len(self._stop) if self.num_matched == len(self._stop) else 0

    def _advance(self, num_matched: int, char: str) -> int:
        while num_matched and self._stop[num_matched] != char:
            num_matched = self._border[num_matched]
        return num_matched + (self._stop[num_matched] == char)


@dataclass(frozen=True, slots=True)
class Segment:
    """What one step adds to the text.

    `num_read` tokens of the step were read: all of them, or those up to and including the one that
    completed a stop string.
    """

    text: str
    num_read: int
    stopped: bool


class TextReader:
    """Reads the token ids of each step as text, up to the first stop string."""

    def __init__(
        self, tokenizer: Any, stops: Sequence[str] = (), hidden: Collection[int] = ()
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, hidden)
        self._stops = StopStrings(stops) if stops else None

    def read(self, tokens: Sequence[int]) -> Segment:
        """Reads one step; tokens after a completed stop string are left unread."""
        if self._stops is None:
            return Segment(self._detokenizer.add(tokens), len(tokens), False)
        pieces: list[str] = []
        for num_read, token in enumerate(tokens, start=1):
            piece, stopped = self._stops.feed(self._detokenizer.add([token]))
            pieces.append(piece)
            if stopped:
                return Segment("".join(pieces), num_read, True)
        return Segment("".join(pieces), len(tokens), False)

    def finish(self) -> Segment:
        """Returns the text still held back; even this can complete a stop string."""
        rest = self._detokenizer.finish()
        if self._stops is None:
            return Segment(rest, 0, False)
        piece, stopped = self._stops.feed(rest)
        return Segment(piece + self._stops.finish(), 0, stopped)
