"""One prompt's use of what earlier ones left behind, and what it leaves behind itself."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from dflash2_mlx.borders import Marks, kept_borders
from dflash2_mlx.prefix_cache import Node, PrefixCache
from dflash2_mlx.states import Point, arrays_in, point_of, put_together, rows_between

if TYPE_CHECKING:
    from dflash2_mlx.decode import Conversation


class Reuse:
    """Goes with one prefill. `cached_tokens` were not read again; `cause` says why not more."""

    def __init__(
        self, cache: PrefixCache, key: str, marks: Marks, session: str | None = None
    ) -> None:
        self.cached_tokens = 0
        self.cause = ""
        self._cache = cache
        self._key = key
        self._marks = marks
        self._session = session
        self._at: Node | None = None  # the chunk read last; None when nothing more can be kept
        self._kept: set[int] = set()

    def resume(self, conversation: "Conversation", borders: Sequence[int], step: int) -> int:
        """Fill an empty conversation with the longest state there is; gives its tokens."""
        held = "with" if conversation.drafter else "without"
        key = f"{self._key}, {held} the drafter's context"
        self._kept = kept_borders(list(borders), self._marks, step)
        found = self._cache.find(key, conversation.tokens, borders)
        self._at, self.cause = found.node, found.cause
        self.cached_tokens = found.node.end
        if found.node.point is not None:
            self._cache.touch(found.node, self._session)
            rows = [node.rows for node in found.node.path()]
            put_together(conversation.leaf_caches, rows, found.node.point, found.node.end)
        return self.cached_tokens

    def keep(self, conversation: "Conversation", start: int, end: int) -> None:
        """Leave behind the chunk `start .. end-1`, which was just read."""
        if self._at is None:
            return
        caches = conversation.leaf_caches
        rows = rows_between(caches, start, end)
        point: Point | None = point_of(caches)
        if arrays_in(point) and end not in self._kept:
            point = None
        mx.eval(arrays_in(rows), arrays_in(point))
        ids = conversation.tokens[start:end]
        self._at = self._cache.add(self._at, ids, rows, point, self._session)
        if self._at is not None:
            if end == self._marks.stem:
                self._at.is_stem = True
                self._cache.persist(self._at)
        else:
            self.cause = f"{self.cause or 'all is known'}; no room to keep token {start} and on"
