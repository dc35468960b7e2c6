"""What memory is for what: one plan, made from sizes before anything large is allocated.

Pure arithmetic. Weights, drafter, the state of one conversation as long as the context window, what
a prefill needs in passing, and the store of prompt states share what the system leaves them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dflash2_mlx.errors import OutOfMemory

GIB = 2**30
LEAST_RESERVE, RESERVE_SHARE = 3 * GIB, 8  # for the system and other programs: 3 GiB or an eighth
WINDOW_SHARE = 0.6  # of what weights leave, where a full context window is more than that
LEAST_POOL = 256 * 2**20
LEAST_WINDOW = 512  # tokens; with less a model is of no use
ROUND_TO = 256


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes of memory, and how many of them its GPU may use (None: as many as a program may)."""

    memory_bytes: int
    gpu_bytes: int | None = None

    @property
    def reserve_bytes(self) -> int:
        """What the system keeps."""
        return min(max(LEAST_RESERVE, self.memory_bytes // RESERVE_SHARE), self.memory_bytes // 2)

    @property
    def limit_bytes(self) -> int:
        """What this program may use."""
        usable = self.memory_bytes - self.reserve_bytes
        return usable if self.gpu_bytes is None else min(usable, self.gpu_bytes)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a loaded pair, and of a conversation with it.

    A state takes `per_token` bytes for each token and `fixed` ones (windows, recurrent layers).
    `transient` is what reading a chunk takes in passing, at a depth in tokens.
    """

    weights: int
    drafter: int
    per_token: int
    fixed: int
    transient: Callable[[int], int]

    def needed(self, num_tokens: int) -> int:
        """Bytes of a conversation of so many tokens, while it is read."""
        return self.fixed + self.per_token * num_tokens + self.transient(num_tokens)

    def longest(self, room: int) -> int:
        """Tokens of the longest conversation that fits into `room` bytes."""
        low, high = 0, 2**31
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.needed(middle) <= room else (low, middle)
        return low


@dataclass(frozen=True, slots=True)
class Plan:
    """How `limit_bytes` are shared out. `pool_bytes` bound what MLX keeps of freed memory;
    `wired_bytes` may not be swapped out, 0 where they would not fit. `note` tells of a context
    window cut to fit."""

    memory_bytes: int
    reserve_bytes: int
    limit_bytes: int
    weights_bytes: int
    drafter_bytes: int
    context_tokens: int
    state_bytes: int
    transient_bytes: int
    store_bytes: int
    pool_bytes: int
    wired_bytes: int
    note: str | None = None

    def describe(self) -> str:
        """One line."""
        shares = {
            "weights": self.weights_bytes,
            "drafter": self.drafter_bytes,
            f"{self.context_tokens} tokens": self.state_bytes,
            "prefill": self.transient_bytes,
            "prompt states": self.store_bytes,
        }
        told = ", ".join(f"{name} {in_gb(size)}" for name, size in shares.items())
        return f"memory {in_gb(self.limit_bytes)} of {in_gb(self.memory_bytes)}: {told}"


def make_plan(
    machine: Machine,
    sizes: Sizes,
    context: int,
    *,
    window: int | None = None,
    limit: int | None = None,
    store: int | None = None,
) -> Plan:
    """Share out the memory for a model that reads `context` tokens.

    `window` tokens must fit where that is given; else the context is cut to what fits. `limit` and
    `store` are bytes, in place of those that the machine suggests. Raises `OutOfMemory` with the
    numbers where weights, window or store do not fit.
    """
    limit = machine.limit_bytes if limit is None else limit
    check_weights(sizes.weights + sizes.drafter, limit, machine)
    rest = limit - sizes.weights - sizes.drafter
    fits = _window_that_fits(sizes, context, window, rest, store)
    needed, transient = sizes.needed(fits), sizes.transient(fits)
    total = sizes.weights + sizes.drafter + needed
    can_wire = machine.gpu_bytes is not None and total <= min(machine.gpu_bytes, limit)
    return Plan(
        memory_bytes=machine.memory_bytes,
        reserve_bytes=machine.reserve_bytes,
        limit_bytes=limit,
        weights_bytes=sizes.weights,
        drafter_bytes=sizes.drafter,
        context_tokens=fits,
        state_bytes=needed - transient,
        transient_bytes=transient,
        store_bytes=min(rest - needed, rest // 2) if store is None else store,
        pool_bytes=max(LEAST_POOL, min(transient, rest // 8)),
        wired_bytes=total if can_wire else 0,
        note=_note(fits, min(context, window or context), limit),
    )


def check_weights(num_bytes: int, limit: int, machine: Machine) -> None:
    """Raise `OutOfMemory` unless weights of so many bytes leave room for anything else."""
    if num_bytes >= limit:
        raise OutOfMemory(
            f"the weights take {in_gb(num_bytes)}, and {in_gb(limit)} of the machine's "
            f"{in_gb(machine.memory_bytes)} may be used; choose fewer bits or a smaller model"
        )


def _window_that_fits(
    sizes: Sizes, context: int, window: int | None, rest: int, store: int | None
) -> int:
    """The tokens of the context window; raises `OutOfMemory` for too few, or fewer than asked."""
    wanted = min(context, window or context)
    least = wanted if window is not None else min(LEAST_WINDOW, wanted)
    room = rest - (store or 0)
    if window is None and store is None and sizes.needed(wanted) > WINDOW_SHARE * rest:
        room = int(WINDOW_SHARE * rest)
    longest = sizes.longest(room)
    fits = wanted if longest >= wanted else longest // ROUND_TO * ROUND_TO
    if fits < least:
        beside = f", {in_gb(store)} of them for prompt states" if store else ""
        raise OutOfMemory(
            f"a conversation of {least} tokens takes {in_gb(sizes.needed(least))}, and the weights "
            f"leave {in_gb(rest)}{beside}: {max(0, longest)} tokens fit"
        )
    return fits


def _note(fits: int, wanted: int, limit: int) -> str | None:
    if fits == wanted:
        return None
    return f"context window of {fits} tokens: more of them do not fit into {in_gb(limit)}"


def in_gb(num_bytes: int) -> str:
    """Bytes in words."""
    small = num_bytes < GIB / 10
    return f"{num_bytes / 2**20:.1f} MiB" if small else f"{num_bytes / GIB:.1f} GiB"
