"""What was read of earlier prompts, kept in a tree whose branches are chunks of tokens.

A node is one chunk behind its parent's. It holds the chunk's rows, and at positions worth it a
point: what makes a whole state of the rows up to there (see `states`). A shared beginning is
there once. Since a path is a sequence of chunks, whoever follows it has read the same chunks.
"""

import hashlib
import logging
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dflash2_mlx.disk_tier import DiskTier
from dflash2_mlx.states import Point, Rows, nbytes

NUM_REMEMBERED = 10_000  # digests of what was evicted, to tell why it is not there
log = logging.getLogger("dflash2_mlx.server")


class Node:
    """One chunk, `ids` (4 bytes a token), that ends behind position `end`."""

    def __init__(self, parent: "Node | None", ids: bytes, end: int, rows: Rows) -> None:
        self.parent = parent
        self.ids = ids
        self.end = end
        self.rows = rows
        self.point: Point | None = None
        self.children: dict[bytes, Node] = {}
        self.is_stem = False  # behind system message and tools
        self.used = 0  # when, on the cache's own clock
        self.session: str | None = None
        self.digest: bytes = digest_of(parent.digest if parent else b"", ids)
        self.rows_nbytes, self.point_nbytes = nbytes(rows), 0

    @property
    def start(self) -> int:
        """The position of the chunk's first token."""
        return self.end - len(self.ids) // 4

    @property
    def nbytes(self) -> int:
        """Bytes of rows and point."""
        return self.rows_nbytes + self.point_nbytes

    def path(self) -> "list[Node]":
        """The nodes from the first chunk to this one, the root left out."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(frozen=True, slots=True)
class Found:
    """The node to go on from (the root: none), and why not from a later one."""

    node: Node
    cause: str


@dataclass(frozen=True, slots=True)
class Stored:
    """What the cache holds now, in bytes and numbers of chunks and points."""

    used_bytes: int
    budget_bytes: int
    chunks: int
    points: int
    evicted: int


class PrefixCache:
    """States of prompts up to `budget_bytes`, the least recently used evicted first.

    A key separates what different models left behind. What is on `disk` is taken in where it helps.
    Not for use by several threads, but for `stored`.
    """

    def __init__(self, budget_bytes: int, disk: DiskTier | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.disk = disk
        self.used_bytes = 0
        self._roots: dict[str, Node] = {}
        self._clock = 0
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._gone: OrderedDict[bytes, None] = OrderedDict()
        self._num_evicted = 0
        self._num_chunks = self._num_points = 0

    def root(self, key: str) -> Node:
        """Where the prompts of one key begin; of no use to go on from."""
        if key not in self._roots:
            root = Node(None, b"", 0, [])
            root.digest = digest_of(b"", key.encode())
            self._roots[key] = root
        return self._roots[key]

    def find(self, key: str, tokens: Sequence[int], borders: Sequence[int]) -> Found:
        """The last state that lies on the way of a prompt read in chunks up to `borders`."""
        if self.disk is not None:
            self._take_in(self.disk, key, tokens, borders)
        last = usable = root = self.root(key)
        for border in borders:
            child = last.children.get(packed(tokens[last.end : border]))
            if child is None:
                break
            last = child
            if child.point is not None:
                usable = child
        rest = [border for border in borders if border > last.end]
        cause = self._cause(root, usable, last, tokens, rest)
        return Found(usable, cause)

    def touch(self, node: Node, session: str | None) -> None:
        """Note that a prompt went on from here; the stem on its way is noted too."""
        self._clock += 1
        if session:
            self._sessions[session] = self._clock
            self._sessions.move_to_end(session)
            while len(self._sessions) > NUM_REMEMBERED:
                self._sessions.popitem(last=False)
        for known in node.path():
            if known is node or known.is_stem:
                known.used, known.session = self._clock, session or known.session

    def add(
        self, parent: Node, ids: Sequence[int], rows: Rows, point: Point | None, session: str | None
    ) -> Node | None:
        """Keep a chunk behind `parent`, or a point at a chunk that is kept; None if it cannot fit.

        `rows` are ignored where the chunk is there.
        """
        key = packed(ids)
        node = parent.children.get(key) or Node(parent, key, parent.end + len(ids), rows)
        is_new = key not in parent.children
        wants_point = point is not None and node.point is None
        needed = (node.rows_nbytes if is_new else 0) + (nbytes(point) if wants_point else 0)
        if not self._make_room(needed, node if not is_new else parent):
            return None if is_new else node
        if is_new:
            parent.children[key] = node
            self._num_chunks += 1
        if wants_point:
            node.point, node.point_nbytes = point, nbytes(point)
            self._num_points += 1
        self.used_bytes += needed
        self._gone.pop(node.digest, None)
        self.touch(node, session)
        return node

    def persist(self, node: Node) -> None:
        """Write the state behind a chunk to disk, where there is one."""
        if self.disk is not None and node.point is not None:
            path = node.path()
            rows = [before.rows for before in path]
            self.disk.write(node.digest, [before.ids for before in path], rows, node.point)

    def _take_in(
        self, disk: DiskTier, key: str, tokens: Sequence[int], borders: Sequence[int]
    ) -> None:
        """Add the longest state from disk that a prompt can use, unless memory has it."""
        root = self.root(key)
        node: Node | None = root
        digest, start, found = root.digest, 0, b""
        for border in borders:
            ids = packed(tokens[start:border])
            digest, start = digest_of(digest, ids), border
            node = node and node.children.get(ids)
            if node is not None and node.point is not None:
                found = b""
            elif disk.has(digest):
                found = digest
        kept = disk.read(found) if found else None
        at: Node | None = root
        for number, ids in enumerate(kept.ids if kept else ()):
            if kept is None or at is None:
                return
            point = kept.point if number == len(kept.ids) - 1 else None
            at = self.add(at, unpacked(ids), kept.rows[number], point, None)
            if at is not None:
                at.is_stem = point is not None

    def shrink(self, to_bytes: int) -> int:
        """Evict until no more than `to_bytes` are used; gives the bytes that became free."""
        before = self.used_bytes
        while self.used_bytes > to_bytes and self._evict_one(None):
            pass
        return before - self.used_bytes

    @property
    def stored(self) -> Stored:
        """What it holds now."""
        return Stored(
            self.used_bytes,
            self.budget_bytes,
            self._num_chunks,
            self._num_points,
            self._num_evicted,
        )

    def nodes(self) -> Iterator[Node]:
        """All chunks, the roots left out."""
        waiting = [child for root in self._roots.values() for child in root.children.values()]
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            yield node

    def _make_room(self, needed: int, held: Node) -> bool:
        if needed > self.budget_bytes:
            return False
        while self.used_bytes + needed > self.budget_bytes:
            if not self._evict_one(held):
                return False
        return True

    def _evict_one(self, held: Node | None) -> bool:
        """Drop the oldest point, or a chunk nothing lies behind; never what `held` stands on."""
        droppable = [
            node
            for node in self.nodes()
            if node is not held and (not node.children or node.point_nbytes)
        ]
        if not droppable:
            return False
        oldest = min(droppable, key=lambda node: (self._recency(node), -node.end))
        self._num_evicted += 1
        if oldest.children:
            self._drop_point(oldest)
        else:
            self._drop(oldest, held)
        return True

    def _recency(self, node: Node) -> int:
        """When it was used, or anything else of its session: a hint from the client."""
        session = self._sessions.get(node.session, 0) if node.session else 0
        return max(node.used, session)

    def _drop_point(self, node: Node) -> None:
        self.used_bytes -= node.point_nbytes
        node.point, node.point_nbytes = None, 0
        self._num_points -= 1
        self._remember(node)

    def _drop(self, node: Node, held: Node | None) -> None:
        """Drop a chunk, and those before it that now lead nowhere."""
        parent = node.parent
        assert parent is not None
        if node.point is not None:
            self._drop_point(node)
        del parent.children[node.ids]
        self.used_bytes -= node.rows_nbytes
        self._num_chunks -= 1
        self._remember(node)
        leads_nowhere = not parent.children and parent.point is None
        if parent.parent is not None and parent is not held and leads_nowhere:
            self._drop(parent, held)

    def _remember(self, node: Node) -> None:
        self._gone[node.digest] = None
        if len(self._gone) > NUM_REMEMBERED:
            self._gone.popitem(last=False)

    def _cause(
        self, root: Node, usable: Node, last: Node, tokens: Sequence[int], rest: Sequence[int]
    ) -> str:
        if last is not usable:
            evicted = last.digest in self._gone
            why = "the state there was evicted" if evicted else "no state was kept there"
            return f"the same up to token {last.end}, but {why}"
        if not rest:
            return ""
        if digest_of(last.digest, packed(tokens[last.end : rest[0]])) in self._gone:
            return f"what followed token {last.end} was evicted"
        if not root.children:
            return "nothing is stored yet"
        same = last.end + self._most_shared(last, tokens[last.end : rest[-1]])
        if same >= rest[0]:
            return f"the same up to token {same}, but read in other chunks behind {last.end}"
        # Right behind a known state it is no miss but what is new.
        return "" if same == last.end > 0 else f"token {same} is the first that differs"

    @staticmethod
    def _most_shared(node: Node, tokens: Sequence[int]) -> int:
        return max((shared(unpacked(ids), tokens) for ids in node.children), default=0)


def packed(ids: Sequence[int]) -> bytes:
    """Token ids as bytes, four each."""
    return array("I", ids).tobytes()


def unpacked(ids: bytes) -> Sequence[int]:
    """The inverse of `packed`."""
    return array("I", ids)


def shared(ones: Sequence[int], others: Sequence[int]) -> int:
    """How many first tokens are the same."""
    for count, (one, other) in enumerate(zip(ones, others, strict=False)):
        if one != other:
            return count
    return min(len(ones), len(others))


def digest_of(before: bytes, ids: bytes) -> bytes:
    """Names a chunk with all that lies before it."""
    return hashlib.blake2b(before + ids, digest_size=16).digest()
