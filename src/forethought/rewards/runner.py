"""Runs reward functions on whole batches, each call under a time limit; a failure marks its samples, never a 0."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

from forethought.errors import ConfigError, RewardError
from forethought.rewards.isolate import Worker, WorkerDied, WorkerHung
from forethought.rewards.loading import describe
from forethought.rewards.scorers import (
    Call,
    Combined,
    Decode,
    Item,
    Outcome,
    RewardLogs,
    Scorer,
    Task,
    TrainerState,
    adapt,
    load_reward,
)

START_LIMIT = 120.0
"""Seconds for a worker to import the user's file, which may import torch."""


class RewardRunner:
    """A reward function under a time limit, as the `judge` of the online loop: `runner(items) -> outcomes`.

    Args:
        fn: a `Scorer` (`load_reward`, `from_trl` ...), a `Combined`, or a function whose style is detected.
        timeout: seconds for one call: a sample for native and verl functions, a batch for TRL functions. None: no
            limit, and everything runs in the caller's thread.
        isolation: where calls run. "process": in a child that is killed when it exceeds the limit, and started again;
            only for functions loaded by name (`load_reward`), which the child loads for itself. "thread": in a thread
            of this process, which is left to itself when it exceeds the limit; it cannot be stopped, and one that
            never lets go of the interpreter stops everything. "auto": process where possible.
        decode: token ids to text, for a bare function.

    `state` is what TRL functions see as `trainer_state`; its `global_step` counts batches unless the caller sets it.

    Raises:
        ConfigError: a timeout that is not positive, or process isolation of a function that was not loaded by name.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        timeout: float | None = 60.0,
        isolation: Literal["auto", "thread", "process"] = "auto",
        decode: Decode | None = None,
    ):
        if timeout is not None and not 0 < timeout < float("inf"):
            raise ConfigError(f"timeout={timeout}: give a positive number of seconds, or None for no limit")
        if isolation not in ("auto", "thread", "process"):
            raise ConfigError(f"isolation={isolation!r}: 'auto', 'thread' or 'process'")
        self.fn = fn if isinstance(fn, Combined) else adapt(fn, decode=decode)
        self.timeout, self.isolation = timeout, isolation
        self.state = TrainerState()
        self._logs = RewardLogs()
        self._workers: dict[str, Worker] = {}
        for scorer in self._scorers():
            if isolation == "process" and scorer.spec is None:
                raise ConfigError(
                    f"isolation='process' needs a function that the child can load by name; load {scorer.name!r} with "
                    "load_reward('file.py:NAME'), or use isolation='thread'"
                )

    def _scorers(self) -> list[Scorer]:
        return [s for _, s, _ in self.fn.parts] if isinstance(self.fn, Combined) else [self.fn]

    def check(self, tasks: Sequence[Task]) -> None:
        """Before compute: every task has the columns that the functions need. Raises: DataError."""
        self.fn.check(tasks)

    def __call__(self, items: Sequence[Item], *, environments: Sequence[Any] | None = None) -> list[Outcome]:
        """Judge a batch; one outcome per item, in order.

        Args:
            environments: per item, for TRL functions that read them (these then run in this process).
        """
        columns = [self._judge(scorer, items, environments) for scorer in self._scorers()]
        self.state.global_step += 1
        return self.fn.merge(columns) if isinstance(self.fn, Combined) else columns[0]

    def take_logs(self) -> RewardLogs:
        """What TRL functions logged since the last call."""
        logs, self._logs = self._logs, RewardLogs()
        return logs

    def close(self) -> None:
        """End the child processes."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _judge(self, scorer, items, environments) -> list[Outcome]:
        calls, errors = scorer.calls(items, environments)
        out: dict[int, Outcome] = dict(errors)
        if self.timeout is None:
            made = [scorer.run(call, self._logs, self.state) for call in calls]
        elif scorer.spec is not None and self.isolation != "thread" and environments is None:
            made = self._in_process(scorer, calls)
        else:
            made = [self._in_thread(scorer, call) for call in calls]
        for call, outcomes in zip(calls, made, strict=True):
            out |= dict(zip(call.members, outcomes, strict=True))
        return [out[i] for i in range(len(items))]

    def _too_long(self, scorer: Scorer) -> str:
        return (
            f"reward function {scorer.name!r} did not answer within its time limit of {self.timeout:g} s; "
            "make it faster, or raise the timeout"
        )

    def _in_thread(self, scorer: Scorer, call: Call) -> list[Outcome]:
        # The thread writes to logs of its own, so that one that was given up cannot write into a later batch.
        logs, box = RewardLogs(), []
        thread = threading.Thread(target=lambda: box.append(scorer.run(call, logs, self.state)), daemon=True)
        thread.start()
        thread.join(self.timeout)
        if not box:
            ended = f"reward function {scorer.name!r} ended its thread without a result"
            why = self._too_long(scorer) if thread.is_alive() else ended
            return [RewardError(why) for _ in call.members]
        self._logs.add(logs)
        return box[0]

    def _in_process(self, scorer: Scorer, calls: Sequence[Call]) -> list[list[Outcome]]:
        assert self.timeout is not None and scorer.spec is not None
        out: list[list[Outcome]] = []
        while len(out) < len(calls):
            call = calls[len(out)]
            try:
                worker = self._workers.get(scorer.spec) or self._start(scorer)
                worker.send((calls[len(out) :], self.state))
                while len(out) < len(calls):
                    call = calls[len(out)]
                    outcomes, logs = worker.receive(self.timeout)
                    self._logs.add(logs)
                    out.append(outcomes)
            except (WorkerHung, WorkerDied) as err:
                self._workers.pop(scorer.spec, None)
                dead = f"reward function {scorer.name!r} ended its process instead of answering: {err}"
                why = self._too_long(scorer) if isinstance(err, WorkerHung) else dead
                out.append([RewardError(why) for _ in call.members])
            except (pickle.PicklingError, TypeError, AttributeError) as err:
                # Pickling fails before anything is sent.
                raise ConfigError(
                    f"reward function {scorer.name!r}: its arguments cannot be sent to another process "
                    f"({describe(err)}); use isolation='thread'"
                ) from err
            except BaseException:
                # Ctrl-C: answers that still come would be taken for those of the next batch.
                if stale := self._workers.pop(scorer.spec, None):
                    stale.close()
                raise
        return out

    def _start(self, scorer: Scorer) -> Worker:
        assert scorer.spec is not None
        try:
            worker = Worker("forethought.rewards.runner:_serve", scorer.spec)
            problem = worker.receive(START_LIMIT)
        except (WorkerHung, WorkerDied) as err:
            raise RewardError(f"reward function {scorer.spec!r}: its process did not start: {err}") from err
        if problem:
            worker.close()
            raise RewardError(f"reward function {scorer.spec!r}: its process did not start: {problem}")
        self._workers[scorer.spec] = worker
        return worker


def _serve(connection, spec: str) -> None:
    """The child's side: load the function, then answer lists of calls."""
    try:
        scorer = load_reward(spec)
    except ConfigError as err:
        connection.send(str(err))
        return
    connection.send("")
    while True:
        calls, state = connection.recv()
        for call in calls:
            logs = RewardLogs()
            outcomes = scorer.run(call, logs, state)
            connection.send((outcomes, logs))
