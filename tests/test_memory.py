"""Memory is shared out on faked machines of 16 to 128 GB, and what cannot fit is refused."""

from dataclasses import replace

import mlx.core as mx
import pytest
from reusing import PLENTY, Turn, chat, pair_for, run, text

from dflash2_mlx import budget, machine
from dflash2_mlx.borders import Marks
from dflash2_mlx.budget import Guard, plan_memory, sizes_of
from dflash2_mlx.errors import ContextExceeded, OutOfMemory
from dflash2_mlx.memory import GIB, Machine, Plan, Sizes, in_gb, make_plan
from dflash2_mlx.pair import Pair

GB = 10**9
# With what macOS recommends for the GPU: two thirds to three quarters.
MACS = {
    size: Machine(size * GIB, int(size * GIB * (0.67 if size < 36 else 0.75)))
    for size in (16, 32, 64, 128)
}
TRANSIENT = GIB


def sizes(weights_gb: float, drafter_gb: float = 2.0, per_token: int = 64 * 1024) -> Sizes:
    """A model of 27 billion parameters with 16 attending layers, unless said otherwise."""
    return Sizes(
        weights=int(weights_gb * GB),
        drafter=int(drafter_gb * GB),
        per_token=per_token,
        fixed=150 * 2**20,
        transient=lambda depth: TRANSIENT,
    )


def total(plan: Plan) -> int:
    return (
        plan.weights_bytes
        + plan.drafter_bytes
        + plan.state_bytes
        + plan.transient_bytes
        + plan.store_bytes
    )


@pytest.mark.parametrize("size", MACS)
@pytest.mark.parametrize("weights_gb", [0.1, 2.5, 6.0, 15.0, 30.0, 60.0])
def test_everything_together_stays_within_what_may_be_used(size: int, weights_gb: float) -> None:
    """(M01, M08)"""
    machine = MACS[size]
    try:
        plan = make_plan(machine, sizes(weights_gb, 0.5), 262_144)
    except OutOfMemory:
        assert weights_gb * GB > 0.6 * machine.limit_bytes - TRANSIENT
        return
    assert total(plan) <= plan.limit_bytes == machine.limit_bytes
    assert plan.limit_bytes + plan.reserve_bytes <= machine.memory_bytes
    assert plan.pool_bytes <= plan.limit_bytes / 8 + GIB
    assert 512 <= plan.context_tokens <= 262_144
    assert (plan.note is None) == (plan.context_tokens == 262_144)


def test_the_store_grows_with_the_machine_and_shrinks_with_the_weights() -> None:
    """No fixed 8 GiB (M08)."""
    stores = [make_plan(MACS[size], sizes(15.0), 262_144).store_bytes for size in (32, 64, 128)]
    assert stores == sorted(stores)
    assert stores[0] < 3 * GIB < 30 * GIB < stores[-1]
    small = make_plan(MACS[16], sizes(0.2, 0.1, 2000), 8192).store_bytes
    assert small == (MACS[16].limit_bytes - int(0.3 * GB)) // 2


def test_the_system_keeps_its_share() -> None:
    assert [round(mac.reserve_bytes / GIB) for mac in MACS.values()] == [3, 4, 8, 16]
    assert Machine(4 * GIB).limit_bytes == 2 * GIB
    assert Machine(64 * GIB).limit_bytes == 56 * GIB  # no GPU that says how much


def test_weights_are_wired_only_where_all_fits() -> None:
    """9 GB on 16, 95 GB on 128 (M09)."""
    nine = make_plan(MACS[16], sizes(9.0, 0.2), 8192)
    assert 0 < nine.wired_bytes <= nine.limit_bytes < 11 * GIB
    with pytest.raises(OutOfMemory, match=r"the weights take 120\.1 GiB, and 96\.0 GiB"):
        make_plan(MACS[128], sizes(129.0, 0.0), 8192)
    ninety_five = make_plan(MACS[128], sizes(95.0, 0.2), 8192)
    assert 0 < ninety_five.wired_bytes <= MACS[128].gpu_bytes
    assert make_plan(replace(MACS[128], gpu_bytes=None), sizes(95.0, 0.2), 8192).wired_bytes == 0
    beyond = make_plan(MACS[128], sizes(95.0, 0.2), 8192, limit=120 * GIB, store=0)
    assert beyond.wired_bytes <= MACS[128].gpu_bytes


def test_a_window_that_was_asked_for_fits_or_is_refused() -> None:
    asked = make_plan(MACS[32], sizes(12.0), 262_144, window=65_536)
    assert asked.context_tokens == 65_536
    assert asked.store_bytes == asked.limit_bytes - total(replace(asked, store_bytes=0))
    with pytest.raises(
        OutOfMemory, match=r"262144 tokens takes 17\.1 GiB, and the weights leave 8"
    ):
        make_plan(MACS[32], sizes(12.0), 262_144, window=262_144)


def test_a_store_that_was_asked_for_is_given_or_refused() -> None:
    plan = make_plan(MACS[32], sizes(12.0), 262_144, store=4 * GIB)
    assert plan.store_bytes == 4 * GIB
    assert plan.context_tokens < 65_536
    assert make_plan(MACS[32], sizes(12.0), 262_144, store=0).store_bytes == 0
    with pytest.raises(OutOfMemory, match=r"4\.0 GiB of them for prompt states"):
        make_plan(MACS[32], sizes(12.0), 262_144, window=100_000, store=4 * GIB)


def test_a_plan_is_told_in_one_line() -> None:
    told = make_plan(MACS[64], sizes(15.0), 262_144).describe()
    assert told == (
        "memory 48.0 GiB of 64.0 GiB: weights 14.0 GiB, drafter 1.9 GiB, 262144 tokens 16.1 GiB, "
        "prefill 1.0 GiB, prompt states 15.0 GiB"
    )
    assert in_gb(5 * 2**20) == "5.0 MiB"


@pytest.mark.parametrize("kind", ["dense", "grouped sliding", "qwen3_5"])
def test_sizes_are_those_of_the_states_that_come_of_it(kind: str) -> None:
    """Within what a cache holds in reserve."""
    pair = pair_for(kind, budget=None)
    found = sizes_of(pair)
    from dflash2_mlx.decode import Conversation

    for length in (600, 3000):
        conversation = Conversation(pair.target, pair.drafter)
        conversation.prefill(text(1, length), step=pair.prefill_step)
        held = sum(array.nbytes for cache in conversation.leaf_caches for array in arrays(cache))
        assert held <= found.fixed + found.per_token * length + 2 * 256 * found.per_token
        assert found.per_token * length <= 1.2 * held


def arrays(cache: object) -> list[mx.array]:
    state = cache.cache if hasattr(cache, "cache") else cache.state
    return [array for array in state if array is not None]


def guarded(limit: int, store: int = PLENTY) -> Pair:
    pair = pair_for("dense")
    # What other tests hold in this process counts as in use.
    plan_memory(pair, limit=mx.get_active_memory() + limit, store=store, window=4000)
    return pair


def test_a_pair_keeps_to_its_plan() -> None:
    pair = pair_for("dense", budget=None)
    plan = plan_memory(pair, window=900)
    assert pair.context_limit == 900
    assert pair.prefix_cache is not None
    assert pair.prefix_cache.budget_bytes == plan.store_bytes > 0
    assert plan_memory(pair, store=0).store_bytes == 0
    assert pair.prefix_cache is None
    with pytest.raises(ContextExceeded, match="is 900 tokens"):
        run(pair, Turn(text(1, 901), Marks()))


class Mlx:
    """What MLX says of its memory; clearing empties the pool."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, active: int, pool: int = 0) -> None:
        self.active, self.pool, self.cleared = active, pool, 0
        monkeypatch.setattr(mx, "get_active_memory", lambda: self.active)
        monkeypatch.setattr(mx, "get_cache_memory", lambda: self.pool)
        monkeypatch.setattr(mx, "clear_cache", self.clear)
        monkeypatch.setattr(budget, "free_memory", lambda: 10**12)

    def clear(self) -> None:
        self.pool, self.cleared = 0, self.cleared + 1


def guard(limit: int, cache: object = None) -> Guard:
    plan = make_plan(MACS[64], sizes(15.0), 262_144, limit=limit)
    return Guard(plan, Sizes(0, 0, 1000, 0, lambda depth: 0), cache)  # type: ignore[arg-type]


def test_freed_memory_in_the_pool_is_no_reason_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """(M07)"""
    mlx = Mlx(monkeypatch, active=20 * GB, pool=10 * GB)
    guard(30 * GB).admit(1_000_000)
    assert mlx.cleared == 1
    guard(30 * GB).admit(1_000_000)
    assert mlx.cleared == 1


def test_a_request_that_cannot_fit_is_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """(M01)"""
    Mlx(monkeypatch, active=25 * GB, pool=10 * GB)
    with pytest.raises(OutOfMemory) as refused:
        guard(30 * GB).admit(6_000_000)
    assert str(refused.value) == (
        "6000000 tokens of prompt and answer take 5.6 GiB, and of 27.9 GiB 23.3 GiB are in use; "
        "0.9 GiB are missing: shorten the prompt or lower max_tokens"
    )
    assert (refused.value.status, refused.value.code) == (507, "insufficient_memory")


def test_other_programs_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    Mlx(monkeypatch, active=0)
    monkeypatch.setattr(budget, "free_memory", lambda: GB)
    with pytest.raises(OutOfMemory):
        guard(30 * GB).admit(2_000_000)


def test_the_oldest_prompt_states_go_before_a_request_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """(M01)"""
    pair = pair_for("dense")
    cache = pair.prefix_cache
    assert cache is not None
    for seed in range(4):
        run(pair, chat(text(seed, 60)), num_tokens=2)
    before = cache.used_bytes
    mlx = Mlx(monkeypatch, active=30 * GB - before // 2)
    shrink = cache.shrink

    def evict(to_bytes: int) -> int:
        freed = shrink(to_bytes)
        mlx.active -= freed
        return freed

    monkeypatch.setattr(cache, "shrink", evict)
    guard(30 * GB, cache).admit(before * 3 // 4 // 1000)
    assert before / 2 < cache.used_bytes < before
    assert run(pair, chat(text(3, 60)), num_tokens=2).cached_tokens > 0
    assert run(pair, chat(text(0, 60)), num_tokens=2).cached_tokens == 0


def test_a_session_that_grows_is_refused_before_it_takes_too_much() -> None:
    """Each request 400 tokens longer, the store at most what it may be (M01)."""
    pair = guarded(limit=60_000_000, store=1_000_000)
    assert pair.prefix_cache is not None
    for length in range(400, 4000, 400):
        run(pair, Turn(text(1, length), Marks()), num_tokens=1)
        assert pair.prefix_cache.used_bytes <= 1_000_000
    with pytest.raises(ContextExceeded, match="maximum context length is 4000"):
        run(pair, Turn(text(1, 4000), Marks()), num_tokens=1)
    assert pair.prefix_cache.stored.evicted > 0


def test_weights_that_cannot_fit_are_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 3000)
    (tmp_path / "weights.gguf").write_bytes(b"x" * 2000)
    monkeypatch.setattr(machine, "this_machine", lambda: Machine(9000))
    with pytest.raises(OutOfMemory, match="choose fewer bits or a smaller model"):
        machine.check_folders(tmp_path)
    monkeypatch.setattr(machine, "this_machine", lambda: Machine(11_000))
    machine.check_folders(tmp_path)


def test_a_container_has_the_memory_it_was_given(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine, "CGROUP_LIMIT", limit)
    whole = machine.this_machine().memory_bytes
    for text_, expected in (("max\n", whole), ("1000000\n", 1_000_000)):
        limit.write_text(text_)
        assert machine.this_machine().memory_bytes == expected


def test_a_hundred_requests_leave_memory_as_it_was() -> None:
    """Flat, with the store at its bound (M10)."""
    pair = guarded(limit=10**9, store=500_000)
    active = []
    for number in range(100):
        run(pair, Turn(text(number, 100), Marks()), num_tokens=2)
        mx.clear_cache()
        active.append(mx.get_active_memory())
    assert max(active[50:]) - min(active[50:]) < 600_000
