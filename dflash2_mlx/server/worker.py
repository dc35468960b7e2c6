"""The one thread that owns MLX: it loads, prefills, decodes and unloads; requests wait in line."""

import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from dflash2_mlx.errors import DFlashError, EngineFailed, ServerBusy
from dflash2_mlx.server.events import Ask, Done, Event, Failed, Queued
from dflash2_mlx.server.metrics import Outcome, Tally

if TYPE_CHECKING:
    from dflash2_mlx.pair import Effective, Pair
    from dflash2_mlx.server.prompt import Prepared

STALL_S = 120.0  # without a beat; a prefill chunk of the largest models takes half a minute
log = logging.getLogger("dflash2_mlx.server")

State = Literal["loading", "ready", "busy", "unloaded", "failed", "closed"]
Deliver = Callable[[Event], None]


class Tell(Protocol):
    """Hears the events of an answer, and raises `Cancelled` when nobody waits for them."""

    def __call__(self, *events: Event) -> None: ...


Answer = Callable[["Pair", "Ask | Prepared", Tell], None]


class Cancelled(Exception):
    """Nobody waits for this answer any more."""


class Job:
    """One request, from the queue to its end."""

    def __init__(self, worker: "Worker", ask: "Ask | Prepared", deliver: Deliver) -> None:
        self.ask = ask
        self.position: int | None = None
        self.done: Done | None = None  # sent when all is counted and the next one may begin
        self._worker = worker
        self._deliver = deliver
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Give up, from any thread and in any state; events may still arrive for a moment."""
        self._cancelled.set()
        self._worker.withdraw(self)

    def tell(self, *events: Event) -> None:
        """Hand events on; called once for every pass, also without any.

        Raises `Cancelled` when nobody waits for them.
        """
        self._worker.beat()
        if self._cancelled.is_set():
            raise Cancelled
        for event in events:
            if isinstance(event, Done):
                self.done = event
            else:
                self.send(event)

    def send(self, event: Event) -> None:
        """Hand one event on; a receiver that is gone is a client that is gone."""
        try:
            self._deliver(event)
        except Exception:  # its event loop was closed
            self._cancelled.set()

    def move_to(self, position: int) -> None:
        """Say how many requests are before this one, if that is news."""
        if position != self.position:
            self.position = position
            self.send(Queued(position))


@dataclass(frozen=True, slots=True)
class About:
    """What was loaded last; known on while it is unloaded."""

    name: str
    context_limit: int
    effective: "Effective"
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Health:
    """How the worker is; `ok` is False when it is dead, stalled or could not load."""

    ok: bool
    state: State
    reason: str
    running: int
    queued: int
    since_beat_s: float
    restarts: int


class Worker:
    """Answers requests one after another on a thread of its own.

    `load` gives the pair, on that thread; `idle_unload_s` without a request frees it again, until
    the next one. At most `max_queue` requests wait. `keep_awake` is entered while one runs.
    """

    def __init__(
        self,
        load: Callable[[], "Pair"],
        answer: Answer,
        *,
        max_queue: int = 16,
        idle_unload_s: float | None = None,
        stall_s: float = STALL_S,
        keep_awake: Callable[[], AbstractContextManager[object]] = nullcontext,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tally = Tally()
        self.pair: Pair | None = None  # other threads may look at it, and not compute with it
        self.about: About | None = None
        self._load, self._answer, self._keep_awake = load, answer, keep_awake
        self._max_queue, self._idle_unload_s, self._stall_s = max_queue, idle_unload_s, stall_s
        self._clock = clock
        self._changed = threading.Condition()
        self._queue: deque[Job] = deque()
        self._running: Job | None = None
        self._thread: threading.Thread | None = None
        self._state: State = "unloaded"
        self._reason = ""
        self._load_error: DFlashError | None = None
        self._beat = clock()
        self._restarts = 0
        self._closing = False

    def start(self) -> None:
        """Start the thread, which loads the pair first."""
        with self._changed:
            self._state = "loading"
            self._start_thread()

    def wait_until_loaded(self) -> About:
        """What was loaded; raises the `DFlashError` that loading failed with."""
        with self._changed:
            self._changed.wait_for(lambda: self.about or self._load_error or self._dead)
            if self.about is None:
                raise self._load_error or EngineFailed(self._reason)
            return self.about

    def wait_for_state(self, *states: State, timeout_s: float | None = None) -> bool:
        """Whether one of the states was reached in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._state in states, timeout_s)

    def submit(self, ask: "Ask | Prepared", deliver: Deliver) -> Job:
        """Put a request in line; `deliver` is called from the worker's thread and from this one.

        Raises `ServerBusy` when the line is full or the worker is closing.
        """
        job = Job(self, ask, deliver)
        with self._changed:
            if self._closing:
                raise ServerBusy("the server is shutting down; send the request again later")
            if len(self._queue) >= self._max_queue:
                self.tally.end("refused")
                raise ServerBusy(
                    f"{len(self._queue)} requests are waiting, which is all that may; "
                    f"try again in {ServerBusy.retry_after_s} seconds"
                )
            self._queue.append(job)
            job.move_to(len(self._queue) - 1)
            if self._dead:
                self._start_thread()
            self._changed.notify_all()
        return job

    def withdraw(self, job: Job) -> None:
        """Take a request out of the line, if it is still there."""
        with self._changed:
            if job in self._queue:
                self._queue.remove(job)
                self.tally.end("cancelled")
                self._move_up()
                self._changed.notify_all()

    @property
    def _dead(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def beat(self) -> None:
        """A sign of life."""
        self._beat = self._clock()

    def health(self) -> Health:
        """How the worker is now."""
        with self._changed:
            since_beat_s = self._clock() - self._beat
            stalled = self._state == "busy" and since_beat_s > self._stall_s
            reason = self._reason
            if stalled:
                reason = f"no sign of life for {since_beat_s:.0f} seconds while answering"
            elif self._dead and not reason:
                reason = "the worker's thread is not running"
            return Health(
                ok=not (stalled or self._dead or self._state == "failed"),
                state=self._state,
                reason=reason,
                running=int(self._running is not None),
                queued=len(self._queue),
                since_beat_s=since_beat_s,
                restarts=self._restarts,
            )

    def close(self) -> None:
        """Stop: what runs or waits fails with `ServerBusy`, the pair is freed, the thread ends."""
        with self._changed:
            self._closing = True
            stopped = [*self._queue, *([self._running] if self._running else [])]
            self._queue.clear()
            self._changed.notify_all()
            thread = self._thread
        for job in stopped:
            job.send(Failed(ServerBusy("the server is shutting down")))
            job.cancel()
        if thread is not None:
            thread.join()

    # What follows runs on the worker's thread, but for `_start_thread`.

    def _start_thread(self) -> None:
        self.beat()
        self._thread = threading.Thread(target=self._serve, name="dflash2-mlx worker", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            if self._state == "loading":
                self._preload()
            while (job := self._next()) is not None:
                self._run(job)
            self._unload("closed")
        except BaseException as death:
            self._die(death)
        finally:
            import mlx.core as mx

            mx.clear_streams()  # without it about every second process aborted at its end

    def _preload(self) -> None:
        try:
            self._loaded()
        except DFlashError:
            return  # told by `wait_until_loaded` and `health`; the next request tries again
        self._set("ready")

    def _next(self) -> Job | None:
        """The next request, or None to end; frees the pair when none comes for long."""
        while True:
            if not self._queue:
                self._rest()
            with self._changed:
                idle_s = self._idle_unload_s if self.pair is not None else None
                if self._changed.wait_for(lambda: self._queue or self._closing, idle_s):
                    return self._take()
            self._unload("unloaded")

    def _rest(self) -> None:
        if self.pair is not None:
            import mlx.core as mx

            mx.clear_cache()  # what MLX keeps for later would count as used
            self._set("ready")

    def _take(self) -> Job | None:
        if not self._queue:
            return None
        self._running = self._queue.popleft()
        self._move_up()
        self._set("busy")
        return self._running

    def _move_up(self) -> None:
        for position, job in enumerate(self._queue):
            job.move_to(position)

    def _run(self, job: Job) -> None:
        outcome: Outcome = "failed"
        last: Event | None = None
        try:
            with self._keep_awake():
                job.tell()
                self._answer(self._loaded(), job.ask, job.tell)
            outcome, last = "done", job.done
        except Cancelled:
            outcome = "cancelled"
        except DFlashError as error:
            last = Failed(_bare(error))
        except Exception as error:
            log.exception("a request failed")
            last = Failed(DFlashError(_broke(error)))
        except BaseException:
            last = Failed(EngineFailed("the engine died under this request; send it again"))
            raise
        finally:
            self._finish(job, outcome, last)

    def _finish(self, job: Job, outcome: Outcome, last: Event | None) -> None:
        self.tally.end(outcome)
        if job.done is not None:
            self.tally.take(job.done)
        log.info("%s", _summary(outcome, job.done))
        with self._changed:
            self._running = None
        if last is not None:
            job.send(last)

    def _loaded(self) -> "Pair":
        if self.pair is None:
            self._set("loading")
            try:
                self.pair = pair = self._load()
            except Exception as error:
                raise self._not_loaded(error) from None
            self.about = About(pair.name, pair.context_limit, pair.effective(), pair.notes)
            self._set("busy")
        return self.pair

    def _not_loaded(self, error: Exception) -> DFlashError:
        if isinstance(error, DFlashError):
            self._load_error = _bare(error)
        else:
            log.exception("loading failed")
            self._load_error = EngineFailed(_broke(error))
        self._set("failed", f"loading failed: {self._load_error}")
        return self._load_error

    def _unload(self, state: State) -> None:
        self.pair = None
        gc.collect()
        import mlx.core as mx

        mx.clear_cache()
        self._set(state)

    def _set(self, state: State, reason: str = "") -> None:
        self.beat()
        with self._changed:
            self._state, self._reason = state, reason
            self._changed.notify_all()

    def _die(self, death: BaseException) -> None:
        """Say so, and let a new thread take care of the requests that wait."""
        log.critical("the worker died", exc_info=death)
        with self._changed:
            self.pair, self._thread = None, None
            self._restarts += 1
            self._set("failed", f"the worker died: {type(death).__name__}; a request restarts it")
            if self._queue:
                self._start_thread()


def _bare(error: DFlashError) -> DFlashError:
    """The error without its frames, which would keep caches alive."""
    error.__context__ = None
    return error.with_traceback(None)


def _summary(outcome: Outcome, done: Done | None) -> str:
    if done is None:
        return f"request {outcome}"
    usage, timings = done.usage, done.timings
    return (
        f"request {outcome}: {usage.prompt} tokens read ({usage.cached} known), "
        f"{usage.completion} written at {timings['predicted_per_second']:.1f} tok/s, "
        f"{done.effective['tokens_per_pass']:.2f} per pass, finish {done.finish}"
    )


def _broke(error: Exception) -> str:
    return f"an unexpected {type(error).__name__} inside the server; its log says more"
