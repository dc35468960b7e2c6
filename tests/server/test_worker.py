"""One thread owns the engine: what waits, what stops, what is said when something breaks."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
from hearing import DONE, WAIT_S, Client, pair

from dflash2_mlx.dialogue.events import Ask, Event, Failed, Prefilling, Queued, Text
from dflash2_mlx.errors import BadCheckpoint, DFlashError, EngineFailed, ServerBusy
from dflash2_mlx.server.job import Job
from dflash2_mlx.server.worker import Worker


class Engine:
    """An answer that goes on when `go` allows it, pass by pass, and tells when it is in one."""

    def __init__(self, num_passes: int = 3) -> None:
        self.num_passes = num_passes
        self.threads: set[int] = set()
        self.started: SimpleQueue[str] = SimpleQueue()
        self.go = threading.Semaphore(0)
        self.passes: list[str] = []

    def __call__(self, pair: Any, ask: Any, tell: Callable[..., None]) -> None:
        self.threads.add(threading.get_ident())
        tell(Prefilling(0, 10))
        self.started.put(ask.prompt)
        for number in range(self.num_passes):
            assert self.go.acquire(timeout=WAIT_S)
            self.passes.append(ask.prompt)
            tell(Text(str(number)))
        tell(DONE)


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Any:
    """Starts workers, and closes them behind the test."""

    def run(answer: Any, load: Callable[[], Any] = pair, **options: Any) -> Worker:
        worker = Worker(load, answer, **options)
        request.addfinalizer(worker.close)
        worker.start()
        return worker

    return run


def ask(worker: Worker, name: str = "a") -> tuple[Client, Job]:
    client = Client()
    return client, worker.submit(Ask(prompt=name), client.events.put)


def free(engine: Engine) -> Engine:
    """An engine that nothing holds back."""
    engine.go.release(10_000)
    return engine


# V01
def test_loading_and_answering_happen_on_one_thread_that_is_not_ours(run) -> None:
    loaded: list[int] = []

    def load() -> Any:
        loaded.append(threading.get_ident())
        return pair()

    engine = free(Engine())
    worker = run(engine, load)
    for _ in range(3):
        assert ask(worker)[0].last() == DONE
    assert engine.threads == set(loaded)
    assert len(loaded) == 1
    assert threading.get_ident() not in engine.threads


def test_requests_are_answered_in_turn_and_hear_their_place(run) -> None:
    engine = Engine(num_passes=1)
    worker = run(engine)
    first, _ = ask(worker, "a")
    assert engine.started.get(timeout=WAIT_S) == "a"
    others = [ask(worker, name)[0] for name in "bc"]
    engine.go.release(3)
    assert [client.last() for client in (first, *others)] == [DONE] * 3
    assert engine.passes == ["a", "b", "c"]
    places = [event.position for event in others[1].heard if isinstance(event, Queued)]
    assert places == [1, 0]


def test_a_full_line_is_refused_and_says_when_to_try_again(run) -> None:
    engine = Engine(num_passes=1)
    worker = run(engine, max_queue=2)
    ask(worker)
    engine.started.get(timeout=WAIT_S)
    waiting = [ask(worker)[0] for _ in range(2)]
    with pytest.raises(ServerBusy, match="2 requests are waiting") as refused:
        ask(worker)
    assert (refused.value.status, refused.value.retry_after_s) == (503, 5)
    engine.go.release(3)
    assert [client.last() for client in waiting] == [DONE, DONE]
    assert worker.tally.outcomes["refused"] == 1


def test_a_waiting_request_that_is_cancelled_never_runs(run) -> None:
    engine = Engine(num_passes=1)
    worker = run(engine)
    first, _ = ask(worker, "a")
    engine.started.get(timeout=WAIT_S)
    _, gone = ask(worker, "b")
    last, _ = ask(worker, "c")
    gone.cancel()
    engine.go.release(2)
    assert first.last() == last.last() == DONE
    assert engine.passes == ["a", "c"]
    places = [event.position for event in last.heard if isinstance(event, Queued)]
    assert places == [1, 0]


def test_a_running_request_that_is_cancelled_stops_within_a_pass(run) -> None:
    engine = Engine(num_passes=1000)
    worker = run(engine)
    _, job = ask(worker, "a")
    engine.started.get(timeout=WAIT_S)
    engine.go.release(1)
    job.cancel()
    engine.go.release(1)
    after, _ = ask(worker, "b")
    assert engine.started.get(timeout=WAIT_S) == "b"
    assert engine.passes.count("a") <= 2
    engine.go.release(1000)
    assert after.last() == DONE
    assert worker.tally.outcomes["cancelled"] == 1


def test_a_receiver_that_is_gone_is_a_client_that_is_gone(run) -> None:
    def deliver(event: Event) -> None:
        raise RuntimeError("Event loop is closed")

    engine = free(Engine(num_passes=1000))
    worker = run(engine)
    worker.submit(Ask(prompt="a"), deliver)
    assert ask(worker, "b")[0].last() == DONE
    assert engine.passes.count("a") == 0


def test_a_bug_fails_its_own_request_without_details_and_the_next_is_answered(run) -> None:
    def answer(pair: Any, ask: Any, tell: Any) -> None:
        if ask.prompt == "bad":
            raise ValueError("/secret/path")
        tell(DONE)

    worker = run(answer)
    failed = ask(worker, "bad")[0].last()
    assert isinstance(failed, Failed)
    assert failed.error.status == 500
    assert "ValueError" in str(failed.error)
    assert "secret" not in str(failed.error)
    assert ask(worker, "good")[0].last() == DONE
    assert worker.tally.outcomes == {"failed": 1, "done": 1}


def test_an_error_keeps_no_frames_alive(run) -> None:
    def answer(pair: Any, ask: Any, tell: Any) -> None:
        try:
            raise KeyError
        except KeyError:
            raise DFlashError("no") from None

    failed = ask(run(answer))[0].last()
    assert isinstance(failed, Failed)
    assert failed.error.__traceback__ is None
    assert failed.error.__context__ is None


# M04
def test_a_dying_thread_fails_its_request_and_the_others_are_answered_by_a_new_one(run) -> None:
    engine = free(Engine())
    loads: list[int] = []

    def answer(pair: Any, ask: Any, tell: Any) -> None:
        if ask.prompt == "deadly":
            assert held.wait(WAIT_S)
            raise SystemExit
        engine(pair, ask, tell)

    def load() -> Any:
        loads.append(threading.get_ident())
        return pair()

    held = threading.Event()
    worker = run(answer, load)
    victim, _ = ask(worker, "deadly")
    waiting, _ = ask(worker, "a")
    held.set()
    failed = victim.last()
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, EngineFailed)
    assert failed.error.status == 503
    assert waiting.last() == DONE
    assert worker.health().restarts == 1
    assert len(loads) == 2


def test_health_is_red_with_the_reason_until_a_request_restarts_a_dead_worker(run) -> None:
    def answer(pair: Any, ask: Any, tell: Any) -> None:
        if ask.prompt == "deadly":
            raise SystemExit
        tell(DONE)

    worker = run(answer)
    ask(worker, "deadly")[0].last()
    assert worker.wait_for_state("failed", timeout_s=WAIT_S)
    state = worker.health()
    assert not state.ok
    assert "SystemExit" in state.reason
    assert ask(worker, "a")[0].last() == DONE
    assert worker.wait_for_state("ready", timeout_s=WAIT_S)
    assert worker.health().ok


def test_health_is_red_when_an_answer_gives_no_sign_of_life(run) -> None:
    now = [0.0]
    engine = Engine(num_passes=1)
    worker = run(engine, clock=lambda: now[0], stall_s=60)
    client, _ = ask(worker)
    engine.started.get(timeout=WAIT_S)
    now[0] = 59.0
    assert worker.health().ok
    now[0] = 61.0
    state = worker.health()
    assert not state.ok
    assert (state.state, state.running) == ("busy", 1)
    assert "no sign of life for 61 seconds" in state.reason
    engine.go.release(1)
    assert client.last() == DONE
    assert worker.wait_for_state("ready", timeout_s=WAIT_S)
    now[0] = 1000.0
    assert worker.health().ok


def test_what_cannot_be_loaded_is_told_to_starter_and_requests_alike(run) -> None:
    broken = [True]

    def load() -> Any:
        if broken[0]:
            raise BadCheckpoint("tiny: no config.json")
        return pair()

    worker = run(free(Engine()), load)
    with pytest.raises(BadCheckpoint, match=r"no config\.json"):
        worker.wait_until_loaded()
    assert not worker.health().ok
    failed = ask(worker)[0].last()
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, BadCheckpoint)
    broken[0] = False
    assert ask(worker)[0].last() == DONE


def test_what_others_wait_for_changes_together_with_the_state_that_belongs_to_it(request) -> None:
    loose: list[str] = []

    class Watched(Worker):
        def __setattr__(self, name: str, value: Any) -> None:
            object.__setattr__(self, name, value)
            shared = name in ("about", "reading", "_load_error", "_state", "_reason", "_running")
            if shared and getattr(self, "_thread", None) and not self._changed._is_owned():  # type: ignore[attr-defined]
                loose.append(name)

    broken = [True]

    def load() -> Any:
        if broken[0]:
            raise BadCheckpoint("tiny: no config.json")
        return pair()

    worker = Watched(load, free(Engine()), idle_unload_s=0.0)
    request.addfinalizer(worker.close)
    worker.start()
    with pytest.raises(BadCheckpoint):
        worker.wait_until_loaded()
    broken[0] = False
    assert ask(worker)[0].last() == DONE
    assert worker.wait_for_state("unloaded", timeout_s=WAIT_S)
    assert worker.about is not None
    assert loose == []


# M11
def test_an_idle_pair_is_freed_and_the_next_request_loads_it_again(run) -> None:
    loads: list[int] = []

    def load() -> Any:
        loads.append(1)
        return pair()

    worker = run(free(Engine()), load, idle_unload_s=0.0)
    assert worker.wait_until_loaded().name == "tiny"
    for count in (1, 2, 3):
        assert worker.wait_for_state("unloaded", timeout_s=WAIT_S)
        assert worker.pair is None
        assert worker.health().ok
        assert len(loads) == count
        assert worker.about is not None
        assert ask(worker)[0].last() == DONE


# M07
def test_memory_kept_for_later_is_given_back_when_idle(run, monkeypatch) -> None:
    cleared = threading.Event()
    monkeypatch.setattr("mlx.core.clear_cache", cleared.set)
    worker = run(free(Engine()))
    worker.wait_until_loaded()
    cleared.clear()
    assert ask(worker)[0].last() == DONE
    assert cleared.wait(WAIT_S)


# V32
def test_the_machine_is_kept_awake_only_while_a_request_runs(run) -> None:
    log: list[str] = []

    class Awake:
        def __enter__(self) -> None:
            log.append("awake")

        def __exit__(self, *error: object) -> None:
            log.append("free")

    def answer(pair: Any, ask: Any, tell: Any) -> None:
        log.append(ask.prompt)
        tell(DONE)

    worker = run(answer, keep_awake=Awake)
    worker.wait_until_loaded()
    assert log == []
    for name in "ab":
        assert ask(worker, name)[0].last() == DONE
    assert log == ["awake", "a", "free", "awake", "b", "free"]


def test_closing_fails_what_runs_and_waits_and_refuses_what_comes(run) -> None:
    engine = Engine(num_passes=1000)
    worker = run(engine)
    running, _ = ask(worker, "a")
    engine.started.get(timeout=WAIT_S)
    waiting, _ = ask(worker, "b")
    closing = threading.Thread(target=worker.close)
    closing.start()
    for client in (running, waiting):
        failed = client.last()
        assert isinstance(failed, Failed)
        assert failed.error.status == 503
    engine.go.release(1)
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert worker.pair is None
    with pytest.raises(ServerBusy, match="shutting down"):
        ask(worker)
    assert len(engine.passes) <= 1


def test_everything_is_counted_when_the_last_event_is_heard(run) -> None:
    worker = run(free(Engine()))
    for _ in range(2):
        ask(worker)[0].last()
        assert worker.health().running == 0
    totals = worker.tally.totals
    assert (totals["prompt_tokens"], totals["completion_tokens"]) == (14, 6)
    assert (totals["drafted_tokens"], totals["accepted_tokens"]) == (6, 4)
    assert (totals["prefill_seconds"], totals["decode_seconds"]) == (1.0, 0.5)
    text = worker.tally.text({"x": ("Words.", 1.5)})
    assert 'dflash2_requests_total{outcome="done"} 2' in text
    assert text.endswith("# HELP dflash2_x Words.\n# TYPE dflash2_x gauge\ndflash2_x 1.5\n")
