"""Whatever breaks, each request hears exactly one end, and the next one is answered."""

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hearing import DONE, WAIT_S, Client, pair

from dflash2_mlx.dialogue.events import Ask, Done, Failed, Text
from dflash2_mlx.errors import EngineFailed
from dflash2_mlx.server.worker import Worker


class Scene:
    """A worker of which something breaks, once, under the request `bad`."""

    def __init__(self) -> None:
        self.broken = False
        self.worker = Worker(self.load, self.answer, keep_awake=self.awake)
        self.before_end: Callable[[], None] = lambda: None
        self.told: tuple[Any, ...] = (Text("a"), DONE)
        self.on_enter = self.on_exit = self.on_load = lambda: None

    def load(self) -> Any:
        self.on_load()
        return pair()

    def answer(self, pair: Any, ask: Any, tell: Any) -> None:
        if ask.prompt == "bad":
            self.before_end()
            tell(*self.told)
        else:
            tell(DONE)

    @contextmanager
    def awake(self) -> Iterator[None]:
        self.on_enter()
        yield
        self.on_exit()

    def once(self, error: BaseException) -> Callable[..., Any]:
        """Something that raises, the first time."""

        def fail(*_: Any, **__: Any) -> Any:
            if not self.broken:
                self.broken = True
                raise error

        return fail


def break_tally(patch: pytest.MonkeyPatch, scene: Scene) -> None:
    patch.setattr(type(scene.worker.tally), "take", scene.once(ValueError("no")))


def break_count(patch: pytest.MonkeyPatch, scene: Scene) -> None:
    patch.setattr(type(scene.worker.tally), "end", scene.once(ValueError("no")))


def break_log(patch: pytest.MonkeyPatch, scene: Scene) -> None:
    """The terminal is gone: every line of the log raises."""
    handler = logging.Handler()
    handler.emit = scene.once(BrokenPipeError())  # type: ignore[method-assign]
    log = logging.getLogger("dflash2_mlx.server")
    patch.setattr(log, "handlers", [handler])
    patch.setattr(log, "level", logging.INFO)


def break_summary(patch: pytest.MonkeyPatch, scene: Scene) -> None:
    scene.told = (dataclasses.replace(DONE, timings={}, effective={}),)


def forget_the_end(patch: pytest.MonkeyPatch, scene: Scene) -> None:
    scene.told = (Text("a"),)


def break_entering(patch: pytest.MonkeyPatch, scene: Scene) -> None:
    scene.on_enter = scene.once(OSError("no caffeinate"))


def break_leaving(patch: pytest.MonkeyPatch, scene: Scene) -> None:
    scene.on_exit = scene.once(OSError("no caffeinate"))


def break_answer(patch: pytest.MonkeyPatch, scene: Scene) -> None:
    scene.before_end = scene.once(MemoryError())


def break_thread(patch: pytest.MonkeyPatch, scene: Scene) -> None:
    scene.before_end = scene.once(SystemExit())


def break_thread_and_log(patch: pytest.MonkeyPatch, scene: Scene) -> None:
    def breaking(record: Any) -> None:
        raise BrokenPipeError

    handler = logging.Handler()
    handler.emit = breaking  # type: ignore[method-assign]
    patch.setattr(logging.getLogger("dflash2_mlx.server"), "handlers", [handler])
    scene.before_end = scene.once(SystemExit())


def break_rest(patch: pytest.MonkeyPatch, scene: Scene) -> None:
    patch.setattr("mlx.core.clear_cache", scene.once(RuntimeError("no")))


def break_taking(patch: pytest.MonkeyPatch, scene: Scene) -> None:
    patch.setattr(scene.worker, "_move_up", scene.once(RuntimeError("no")))


FAULTS = [value for name, value in list(globals().items()) if name.startswith(("break_", "forget"))]


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.worker.close()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_each_request_hears_exactly_one_end(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    scene.worker.start()
    scene.worker.wait_until_loaded()
    fault(monkeypatch, scene)
    bad, good = Client(), Client()
    scene.worker.submit(Ask(prompt="bad"), bad.events.put)
    bad.last()
    scene.worker.submit(Ask(prompt="good"), good.events.put)
    assert good.last() == DONE
    assert scene.worker.health().running == 0
    scene.worker.close()
    ends = [event for event in [*bad.heard, *bad.rest()] if isinstance(event, Done | Failed)]
    assert len(ends) == 1


def test_an_engine_that_forgets_the_end_is_said_to_have_failed(scene: Scene) -> None:
    scene.told = (Text("a"),)
    scene.worker.start()
    client = Client()
    scene.worker.submit(Ask(prompt="bad"), client.events.put)
    last = client.last()
    assert isinstance(last, Failed)
    assert isinstance(last.error, EngineFailed)


def test_closing_while_a_request_ends_gives_it_one_end(scene: Scene) -> None:
    for _ in range(30):
        racing = Scene()
        racing.worker.start()
        clients = [Client() for _ in range(3)]
        for client in clients:
            racing.worker.submit(Ask(prompt="good"), client.events.put)
        racing.worker.close()
        for client in clients:
            client.last()
            assert client.rest() == []


def test_one_that_is_cancelled_hears_one_end_too(scene: Scene) -> None:
    held, reached = threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        assert held.wait(WAIT_S)

    scene.before_end = hold
    scene.worker.start()
    clients = [Client(), Client()]
    jobs = [scene.worker.submit(Ask(prompt="bad"), client.events.put) for client in clients]
    assert reached.wait(WAIT_S)
    for job in reversed(jobs):
        job.cancel()
        job.cancel()
    held.set()
    for client in clients:
        assert isinstance(client.last(), Failed)
    scene.worker.close()
    assert [client.rest() for client in clients] == [[], []]


@pytest.mark.parametrize("num_waiting", [0, 2])
def test_where_no_thread_can_be_had_those_who_wait_are_told(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, num_waiting: int
) -> None:
    held = threading.Event()

    def die() -> None:
        assert held.wait(WAIT_S)
        raise SystemExit

    scene.before_end = die
    scene.worker.start()
    scene.worker.wait_until_loaded()
    clients = [Client() for _ in range(1 + num_waiting)]
    for client in clients:
        scene.worker.submit(Ask(prompt="bad"), client.events.put)

    class NoThread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr("dflash2_mlx.server.worker.threading.Thread", NoThread)
    held.set()
    for client in clients:
        last = client.last()
        assert isinstance(last, Failed)
        assert last.error.status == 503
    assert scene.worker.wait_for_state("failed", timeout_s=WAIT_S)
    with pytest.raises(EngineFailed, match="no thread"):
        scene.worker.submit(Ask(prompt="good"), Client().events.put)
    assert scene.worker.health().queued == 0
    monkeypatch.undo()
    client = Client()
    scene.worker.submit(Ask(prompt="good"), client.events.put)
    assert client.last() == DONE
