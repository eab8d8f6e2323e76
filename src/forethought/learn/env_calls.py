"""Calls into environments: many at once, each with a time limit, and a failure that stays with its own call.

Python cannot end a thread, so a call that hangs keeps its thread, which is replaced; it dies with the process.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from forethought.errors import EnvError


@dataclass
class _Job:
    call: Callable[[], Any]
    done: threading.Event
    began: float | None = None
    result: Any = None
    finished: bool = False
    given_up: bool = False


@dataclass
class EnvCalls:
    """Runs calls and gives their results; an exception or a hang becomes an `EnvError` in the result's place.

    Args:
        workers: threads; 0 runs calls in the caller's thread, one after another, without a time limit.
        limit: seconds a call may take, from the moment it starts.
    """

    workers: int = 0
    limit: float = 60.0
    hung: int = 0
    _jobs: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    _threads: int = 0

    def __call__(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Results in the order of the calls."""
        if not self.workers:
            return [_guarded(call) for call in calls]
        event = threading.Event()
        jobs = [_Job(call, event) for call in calls]
        while self._threads < self.workers:
            self._start()
        for job in jobs:
            self._jobs.put(job)
        waiting = list(range(len(jobs)))
        out: list[Any] = [None] * len(jobs)
        while waiting:
            event.clear()
            now = time.monotonic()
            left = []
            nearest = self.limit
            for i in waiting:
                job = jobs[i]
                if job.finished:
                    out[i] = job.result
                elif job.began is not None and now - job.began >= self.limit:
                    out[i] = EnvError(f"the environment did not return within {self.limit:g} s")
                    self.hung += 1
                    job.given_up = True
                    self._start()  # in place of the thread that hangs
                else:
                    left.append(i)
                    if job.began is not None:
                        nearest = min(nearest, job.began + self.limit - now)
            waiting = left
            if waiting:
                event.wait(max(nearest, 0.001))
        return out

    def _start(self) -> None:
        self._threads += 1
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            job.began = time.monotonic()
            job.result = _guarded(job.call)
            job.finished = True
            job.done.set()
            if job.given_up:  # and this thread was replaced
                return

    def close(self) -> None:
        """End the threads that do not hang."""
        for _ in range(self._threads):
            self._jobs.put(None)
        self._threads = 0
        self._jobs = queue.SimpleQueue()


def _guarded(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as err:  # an environment raises whatever it likes
        return err if isinstance(err, EnvError) else EnvError(f"{type(err).__name__}: {err}")
