"""Where the next prompt of a conversation will go on from this one, found by rendering beginnings.

A mark is as far as a prompt agrees with the rendered beginning of its own messages: behind each
question and each answer. What a template drops or moves in later turns (thoughts, say) only makes
the agreement shorter, never wrong.
"""

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from dflash2_mlx.borders import Marks
from dflash2_mlx.errors import InvalidRequest
from dflash2_mlx.pair import Message, Pair

MAX_REMEMBERED = 4_000_000  # tokens of rendered beginnings: 16 MB
RAW_SPACING = 512  # tokens between the marks of a prompt that has no messages
Ids = NDArray[np.uint32]


class Marker:
    """Finds the marks of one pair's prompts; safe on any thread.

    Beginnings are rendered once and remembered: a conversation grows by two with every turn.
    """

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._lock = threading.Lock()
        self._rendered: OrderedDict[bytes, Ids | None] = OrderedDict()
        self._num_tokens = 0

    def marks(
        self, messages: Sequence[Message], ids: Sequence[int], variables: dict[str, Any]
    ) -> Marks:
        """Marks of a prompt `ids`, rendered from `messages` with the template's `variables`."""
        prompt = np.asarray(ids, dtype=np.uint32)
        answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        ends = {self._agreement(prompt, messages, variables)}
        for place in answers:
            ends.add(self._agreement(prompt, messages[:place], variables))
            ends.add(self._end_before(place + 1, prompt, messages, variables))
        stem = self._stem(prompt, messages, variables)
        return Marks(tuple(sorted(ends - {0})), stem)

    def end_before(
        self, place: int, messages: Sequence[Message], ids: Sequence[int], variables: dict[str, Any]
    ) -> int:
        """Where what lies before the message at `place` ends, whatever that message says."""
        return self._end_before(place, np.asarray(ids, dtype=np.uint32), messages, variables)

    def _end_before(
        self, place: int, prompt: Ids, messages: Sequence[Message], variables: dict[str, Any]
    ) -> int:
        if place >= len(messages):
            return 0
        # The message is there, since templates drop thoughts by what follows them. Of two texts a
        # message agrees with one at most, and whitespace shows where tokens may merge.
        others = [{**messages[place], "content": text} for text in ("a", "\n\nb")]
        return min(
            self._agreement(prompt, [*messages[:place], other], variables) for other in others
        )

    def _stem(self, prompt: Ids, messages: Sequence[Message], variables: dict[str, Any]) -> int:
        """Where system message and tools end."""
        has_system = bool(messages) and messages[0]["role"] == "system"
        if not has_system and not variables.get("tools"):
            return 0
        question = {"role": "user", "content": ""}
        return self._end_before(
            int(has_system), prompt, [*messages[:has_system], question], variables
        )

    def _agreement(
        self, prompt: Ids, messages: Sequence[Message], variables: dict[str, Any]
    ) -> int:
        """How far a prompt agrees with the rendered messages."""
        digest = hashlib.blake2b(_dumped([variables, list(messages)])).digest()
        with self._lock:
            known = digest in self._rendered
            rendered = self._rendered.get(digest)
        if not known:
            rendered = self._render(messages, variables)
            self._remember(digest, rendered)
        return 0 if rendered is None else agreement(prompt, rendered)

    def _render(self, messages: Sequence[Message], variables: dict[str, Any]) -> Ids | None:
        try:
            ids = self._pair.encode_chat(messages, **{**variables, "add_generation_prompt": False})
        except InvalidRequest:  # some templates refuse what is no whole conversation
            return None
        return np.asarray(ids, dtype=np.uint32)

    def _remember(self, digest: bytes, rendered: Ids | None) -> None:
        with self._lock:
            self._rendered[digest] = rendered
            self._num_tokens += 0 if rendered is None else rendered.size
            while self._num_tokens > MAX_REMEMBERED and self._rendered:
                _, oldest = self._rendered.popitem(last=False)
                self._num_tokens -= 0 if oldest is None else oldest.size


_markers: WeakKeyDictionary[Pair, Marker] = WeakKeyDictionary()


def marker_of(pair: Pair) -> Marker:
    """The pair's marker, with what it has rendered."""
    if pair not in _markers:
        _markers[pair] = Marker(pair)
    return _markers[pair]


def marks_of(
    pair: Pair, messages: Sequence[Message], ids: Sequence[int], variables: dict[str, Any]
) -> Marks | None:
    """The marks of a prompt rendered from messages; None where the pair keeps no states."""
    if pair.prefix_cache is None:
        return None
    return marker_of(pair).marks(messages, ids, variables)


def raw_marks(pair: Pair, num_tokens: int) -> Marks | None:
    """Marks of a prompt without messages, which may grow anywhere."""
    if pair.prefix_cache is None:
        return None
    return Marks(tuple(range(RAW_SPACING, num_tokens, RAW_SPACING)))


def agreement(ones: Ids, others: Ids) -> int:
    """How many first ids are the same."""
    length = min(ones.size, others.size)
    differing = np.flatnonzero(ones[:length] != others[:length])
    return int(differing[0]) if differing.size else length


def _dumped(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, default=str).encode()
