"""The memory plan of a loaded pair, and what keeps to it while requests run."""

from contextlib import suppress
from dataclasses import asdict
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from dflash2_mlx.borders import PREFILL_STEP, step_at
from dflash2_mlx.disk_tier import DiskTier
from dflash2_mlx.errors import OutOfMemory
from dflash2_mlx.folders import cache_root, read_object, write_object
from dflash2_mlx.machine import this_machine
from dflash2_mlx.memory import Plan, Sizes, in_gb, make_plan
from dflash2_mlx.models.cache import STEP, KVCache, leaves
from dflash2_mlx.pair import Pair
from dflash2_mlx.precision import free_memory
from dflash2_mlx.prefix_cache import PrefixCache
from dflash2_mlx.target import Target, parameters

PLANS = "memory.json"  # in the cache folder
SPARE_ROWS = 9 / 8  # a cache grows by an eighth at a time


class Guard:
    """Lets in what fits, after freeing what can be freed."""

    def __init__(self, plan: Plan, sizes: Sizes, cache: PrefixCache | None) -> None:
        self.plan = plan
        self._sizes = sizes
        self._cache = cache

    def admit(self, num_tokens: int) -> None:
        """Make room for a conversation of so many tokens; raises `OutOfMemory` with the numbers."""
        needed = self._sizes.needed(num_tokens)
        if self._shortfall(needed) <= 0:
            return
        mx.clear_cache()  # what MLX keeps for later is no reason to refuse
        if (short := self._shortfall(needed)) > 0 and self._cache is not None:
            self._cache.shrink(max(0, self._cache.used_bytes - short))
            mx.clear_cache()
        if (short := self._shortfall(needed)) > 0:
            raise OutOfMemory(
                f"{num_tokens} tokens of prompt and answer take {in_gb(needed)}, and of "
                f"{in_gb(self.plan.limit_bytes)} {in_gb(mx.get_active_memory())} are in use; "
                f"{in_gb(short)} are missing: shorten the prompt or lower max_tokens"
            )

    def _shortfall(self, needed: int) -> int:
        """Bytes missing, by the plan or because other programs took them."""
        used = mx.get_active_memory() + mx.get_cache_memory()
        return max(used + needed - self.plan.limit_bytes, needed - free_memory())

    def told(self) -> dict[str, Any]:
        """Plan and store, for those who ask."""
        store = None if self._cache is None else asdict(self._cache.stored)
        return {"plan": asdict(self.plan), "store": store}


def plan_memory(
    pair: Pair,
    *,
    window: int | None = None,
    limit: int | None = None,
    store: int | None = None,
    disk: int = 0,
) -> Plan:
    """Plan the memory of a pair, and let the pair keep to it: window, prompt states, guard, MLX.

    Arguments as for `memory.make_plan`; `store` 0 keeps no prompt states, and `disk` bytes of them
    are kept on disk too.
    """
    sizes = sizes_of(pair)
    plan = make_plan(
        this_machine(), sizes, pair.context_limit, window=window, limit=limit, store=store
    )
    pair.context_limit = plan.context_tokens
    tier = DiskTier(cache_root() / "prompts", disk) if disk and plan.store_bytes else None
    pair.prefix_cache = PrefixCache(plan.store_bytes, tier) if plan.store_bytes else None
    pair.guard = Guard(plan, sizes, pair.prefix_cache)
    mx.set_cache_limit(plan.pool_bytes)
    if plan.wired_bytes and mx.metal.is_available():
        mx.set_wired_limit(plan.wired_bytes)
    return plan


def remember_plan(pair: Pair, plan: Plan) -> None:
    """Let `doctor` show the plan; not being able to is no reason to stop."""
    with suppress(OSError):
        write_object(cache_root() / PLANS, made_plans() | {pair.name: _shown(plan)})


def made_plans() -> dict[str, Any]:
    """The last plan made for each pair on this machine."""
    return read_object(cache_root() / PLANS)


def _shown(plan: Plan) -> dict[str, Any]:
    return {**asdict(plan), "detail": plan.describe()}


def sizes_of(pair: Pair) -> Sizes:
    """Bytes of a pair and its states, from a forward that is never evaluated."""
    target, drafter = pair.target, pair.drafter
    step = pair.prefill_step or PREFILL_STEP
    caches = target.make_caches()
    reading = target.read(mx.array([0, 0]), caches)
    states = list(leaves(caches))
    if drafter is not None and reading.taps is not None:
        context = drafter.make_context()
        drafter.extend(context, reading.taps)
        states += context
    per_token, fixed = 0.0, 0.0
    for cache in states:
        bytes_per_token, bytes_fixed = _cost(cache, step)
        per_token, fixed = per_token + bytes_per_token, fixed + bytes_fixed
    return Sizes(
        weights=target.nbytes,
        drafter=0 if drafter is None else _nbytes(drafter),
        per_token=round(per_token),
        fixed=round(fixed),
        transient=lambda depth: transient_bytes(target, step, depth),
    )


def transient_bytes(target: Target, step: int, depth: int) -> int:
    """What reading a chunk takes in passing: its widest activations, and where attention is not
    fused (on a CPU) its scores."""
    args = getattr(target.model, "args", None)
    rows = step_at(depth, step)
    experts = int(getattr(args, "num_experts_per_tok", 0) or 1)
    heads = int(getattr(args, "num_attention_heads", 0) or 32)
    widest = max((_width(array, experts) for array in _layer_weights(target)), default=0)
    values = rows * (4 * widest + (6 + len(target.taps)) * target.hidden_size)
    scores = 0 if mx.metal.is_available() else 2 * heads * rows * (depth + rows)
    return 4 * (values + scores)


def _layer_weights(target: Target) -> list[mx.array]:
    return [
        array
        for layer in target.model.layers
        for array in parameters(layer).values()
        if array.ndim >= 2
    ]


def _width(array: mx.array, experts: int) -> int:
    """Values that a weight `[out, in]`, or `[experts, out, in]`, gives for a token."""
    return int(array.shape[-2]) * (experts if array.ndim == 3 else 1)


def _cost(cache: Any, step: int) -> tuple[float, float]:
    """Bytes for each token, and for all of them."""
    if not isinstance(cache, KVCache):
        fixed = isinstance(cache, ArraysCache)
        nbytes = float(getattr(cache, "nbytes", 0))
        return (0.0, nbytes) if fixed else (nbytes / STEP, 0.0)
    row = sum(array.nbytes / array.shape[2] for array in cache.state)
    if cache.window is None:
        return SPARE_ROWS * row, 0.0
    return 0.0, row * (cache.window + cache.reserve + STEP + step)


def _nbytes(model: Any) -> int:
    return sum(array.nbytes for array in parameters(model).values())
