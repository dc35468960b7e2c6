"""The one thread that owns MLX: it loads, prefills, decodes and unloads; requests wait in line."""

import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dflash2_mlx.dialogue.events import Ask, Done, Failed
from dflash2_mlx.errors import DFlashError, EngineFailed, ServerBusy, unexpected
from dflash2_mlx.server.about import About, without_weights
from dflash2_mlx.server.job import Afterwards, Cancelled, Deliver, Job, Tell
from dflash2_mlx.server.metrics import Outcome, Tally

if TYPE_CHECKING:
    from dflash2_mlx.dialogue.prompt import Prepared
    from dflash2_mlx.pair import Pair

STALL_S = 120.0  # without a beat; a prefill chunk of the largest models takes half a minute
log = logging.getLogger("dflash2_mlx.server")

State = Literal["loading", "ready", "busy", "unloaded", "failed", "closed"]
Answer = Callable[["Pair", "Ask | Prepared", Tell], Afterwards | None]


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
        self.reading: Pair | None = None  # the pair without its weights, kept while it is unloaded
        self._load, self._answer, self._keep_awake = load, answer, keep_awake
        self._max_queue, self._idle_unload_s, self._stall_s = max_queue, idle_unload_s, stall_s
        self._clock = clock
        self._changed = threading.Condition()
        self._queue: deque[Job] = deque()
        self._running: Job | None = None
        self._afterwards: Afterwards | None = None
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

        Raises `ServerBusy` when the line is full or the worker is closing, and `EngineFailed` when
        a dead thread cannot be started anew. Else exactly one `Done` or `Failed` is delivered.
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
            if self._dead:
                self._start_thread()
            self._queue.append(job)
            job.move_to(len(self._queue) - 1)
            self._changed.notify_all()
        return job

    def withdraw(self, job: Job) -> None:
        """Take a request out of the line, if it is still there."""
        with self._changed:
            if job not in self._queue:
                return
            self._queue.remove(job)
            self.tally.end("cancelled")
            self._move_up()
            self._changed.notify_all()
        job.end(_unwanted())

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
            job.stop(Failed(ServerBusy("the server is shutting down")))
        if thread is not None:
            thread.join()

    # What follows runs on the worker's thread, but for `_start_thread`.

    def _start_thread(self) -> None:
        self.beat()
        thread = threading.Thread(target=self._serve, name="dflash2-mlx worker", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._state, self._reason = "failed", f"no thread for the engine: {error}"
            raise EngineFailed(f"the system gives no thread for the engine: {error}") from None
        self._thread = thread

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
        last: Done | Failed = _died()
        try:
            outcome, last = self._outcome(job)
        finally:  # also when the thread dies of it
            self._finish(job, outcome, last)
        self._do_afterwards()

    def _do_afterwards(self) -> None:
        """What the answer left to do, until another request waits."""

        def go_on(done: int, total: int) -> None:
            self.beat()
            if self._queue or self._closing:
                raise Cancelled

        afterwards, self._afterwards = self._afterwards, None
        try:
            if afterwards is not None and not self._closing:
                afterwards(go_on)
        except Cancelled:
            return
        except Exception:
            log.exception("the next turn could not be read ahead")

    def _outcome(self, job: Job) -> tuple[Outcome, Done | Failed]:
        try:
            with self._keep_awake():
                job.tell()
                self._afterwards = self._answer(self._loaded(), job.ask, job.tell)
        except Cancelled:
            return "cancelled", _unwanted()
        except DFlashError as error:
            return "failed", Failed(_bare(error))
        except Exception as error:
            log.exception("a request failed")
            return "failed", Failed(unexpected(error))
        if job.done is None:
            return "failed", Failed(EngineFailed("the engine stopped without an end to its answer"))
        return "done", job.done

    def _finish(self, job: Job, outcome: Outcome, last: Done | Failed) -> None:
        try:
            self._count(outcome, job.done)
        finally:
            with self._changed:
                self._running = None
            job.end(last)

    def _count(self, outcome: Outcome, done: Done | None) -> None:
        try:
            self.tally.end(outcome)
            if done is not None:
                self.tally.take(done)
            log.info("%s", _summary(outcome, done))
        except Exception:
            log.exception("an answer could not be counted")

    def _loaded(self) -> "Pair":
        if self.pair is None:
            self._set("loading")
            try:
                self.pair = pair = self._load()
            except Exception as error:
                raise self._not_loaded(error) from None
            reading, about = without_weights(pair), About.of(pair)
            with self._changed:  # who waits for it finds the state that belongs to it
                self.reading, self.about = reading, about
                self._set("busy")
        return self.pair

    def _not_loaded(self, error: Exception) -> DFlashError:
        if isinstance(error, DFlashError):
            failure = _bare(error)
        else:
            log.exception("loading failed")
            failure = EngineFailed(str(unexpected(error)))
        with self._changed:
            self._load_error = failure
            self._set("failed", f"loading failed: {failure}")
        return failure

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
        with self._changed:
            self.pair, self._thread = None, None
            self._restarts += 1
            self._set("failed", f"the worker died: {type(death).__name__}; a request restarts it")
            orphan, self._running = self._running, None
            left = self._restart()
        for job in [*left, *([orphan] if orphan else [])]:
            job.end(_died())
        with suppress(Exception):  # a log that cannot be written stops nobody
            log.critical("the worker died", exc_info=death)

    def _restart(self) -> list[Job]:
        """Go on with those that wait; gives back those that no thread can be had for."""
        try:
            if self._queue:
                self._start_thread()
            return []
        except EngineFailed:
            left = list(self._queue)
            self._queue.clear()
            return left


def _died() -> Failed:
    return Failed(EngineFailed("the engine died under this request; send it again"))


def _unwanted() -> Failed:
    return Failed(DFlashError("nobody waits for this answer any more"))


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
