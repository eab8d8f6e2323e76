"""The environment checker: walks a user's environment and reports every rule that it breaks, by name, with the fix.

    report = check_env("my_env.py:Env")
    print(report.render()); report.ok

The environment runs in a child process that is killed and started again when a call exceeds its time limit or ends the
process, so that one fault does not hide the others. Rules and what they mean: `RULES`.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from forethought.envs import _walk
from forethought.envs.env import Env
from forethought.envs.registry import EnvSource, find_env
from forethought.errors import ConfigError
from forethought.rewards.isolate import Worker, WorkerDied, WorkerHung
from forethought.rewards.loading import USER_MODULE

RULES: dict[str, str] = {
    "load": "the file loads and names something that makes environments",
    "protocol": "reset, step, snapshot, restore and state_key are there",
    "reset": "reset(task, seed) returns a Step that awaits an action",
    "step": "step(action) returns a Step",
    "observation": "observations are text",
    "reward": "rewards are finite numbers",
    "flags": "terminated and truncated are bools, never both true",
    "success": "info['success'], where given, is a bool and true only with terminated",
    "info": "info is a dict that does not change after it was returned",
    "exceptions": "no call raises or ends the process",
    "hostile": "any text as action is answered with a Step",
    "time": "every call returns within the time limit",
    "after-done": "after the end, step raises EnvError or returns the end again with reward 0",
    "seed": "the same task, seed and actions give the same Steps, also in another process",
    "independent": "environments of one factory do not share state",
    "snapshot": "after restore the same actions give the same Steps, with rewards and infos",
    "snapshot-alias": "a snapshot can be restored twice, and several can be held at once",
    "state-key": "state_key() is equal for equal states",
    "portable": "snapshots work in another object and can be pickled (a warning only)",
}

LOAD_LIMIT = 120.0
"""Seconds for importing the user's file, which may import torch."""
MAX_LOST = 4
"""Hangs and ended processes after which the rest is skipped."""
MAX_SHOWN = 3
"""Messages shown of one rule."""

Status = Literal["pass", "fail", "warn", "skip"]


@dataclass(frozen=True)
class Finding:
    rule: str
    status: Status
    message: str


@dataclass
class Report:
    """What the checker found: one finding for each rule of `RULES`, in that order."""

    env: str
    findings: list[Finding] = field(default_factory=list)
    episodes: int = 0
    steps: int = 0
    ended: int = 0

    @property
    def ok(self) -> bool:
        """No rule is broken (warnings and skipped rules allowed)."""
        return all(f.status != "fail" for f in self.findings)

    def __getitem__(self, rule: str) -> Finding:
        return next(f for f in self.findings if f.rule == rule)

    def broken(self) -> list[str]:
        """Names of the broken rules."""
        return [f.rule for f in self.findings if f.status == "fail"]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        findings = [{"rule": f.rule, "status": f.status, "message": f.message} for f in self.findings]
        counts = {"episodes": self.episodes, "steps": self.steps, "ended": self.ended}
        return {"env": self.env, "ok": self.ok, **counts, "findings": findings}

    def render(self) -> str:
        """Plain lines for a terminal."""
        marks = {"pass": "ok", "fail": "FAIL", "warn": "warn", "skip": "-"}
        width = max(map(len, RULES))
        lines = [f"{self.env}: {self.episodes} episodes, {self.steps} steps, {self.ended} ended"]
        for f in self.findings:
            first, *rest = f.message.split("\n")
            lines.append(f"{marks[f.status]:4}  {f.rule:{width}}  {first}")
            lines += [f"{'':{width + 8}}{line}" for line in rest]
        bad = self.broken()
        lines.append(f"broken: {', '.join(bad)}" if bad else "no rule is broken")
        return "\n".join(lines)


def load_env(spec: str) -> Callable[[], Env]:
    """The factory that a spec names (see `registry.find_env`); call it for an environment.

    Raises:
        ConfigError: no such name, file or setting, the file fails to load, or it cannot be called.
    """
    return find_env(spec)


def check_env(
    env: str | Callable[[], Env],
    *,
    tasks: Sequence[Any] = (None,),
    actions: Sequence[str] | None = None,
    seeds: int | Sequence[int] = 2,
    max_steps: int = 30,
    call_limit: float = 5.0,
) -> Report:
    """Walk an environment and report every rule that it breaks.

    Args:
        env: what `registry.find_env` takes (`sokoban:boxes=2`, `my_env.py:Env`, `package.module:Name`), or a factory. A
            factory that a child process cannot import by name (a closure, something of `__main__`) is checked in a
            thread: a call that hangs then ends the check.
        tasks: passed to reset; the first three are walked.
        actions: what to play; else `info["actions"]` where the environment gives a list of legal actions, else words
            that most environments will call invalid (give actions, or the end of an episode is hardly ever seen).
        seeds: each task is walked once with each seed; a number n stands for the seeds 0 to n - 1.
        max_steps: steps an episode.
        call_limit: seconds a single call may take.

    Raises:
        ConfigError: a setting is out of range. What the environment does wrong is reported, never raised.
    """
    seeds = range(seeds) if isinstance(seeds, int) else seeds
    if not tasks or not seeds or max_steps < 1 or not call_limit > 0:
        raise ConfigError(
            f"check_env: tasks={len(tasks)}, seeds={len(seeds)}, max_steps={max_steps}, call_limit={call_limit}: "
            "give at least one task and seed, and positive limits"
        )
    return _Check(env, call_limit, max_steps).run(list(tasks)[:3], list(seeds), actions)


class _Lost(Exception):
    """The scenario was cut off; it has been reported."""


class _Check:
    """The parent's side: asks for scenarios, listens, and keeps the time."""

    def __init__(self, env: str | Callable[[], Env], call_limit: float, max_steps: int):
        self.target, self.name = _target(env)
        self.call_limit, self.max_steps = call_limit, max_steps
        self.worker: Worker | _Thread | None = None
        self.checked: set[str] = set()
        self.broken: dict[str, list[str]] = {}
        self.warned: dict[str, list[str]] = {}
        self.missing: list[str] = []
        self.lost = 0
        self.report = Report(self.name)

    def run(self, tasks: list[Any], seeds: list[int], actions: Sequence[str] | None) -> Report:
        try:
            self.walk_through(tasks, seeds, actions)
        except _Lost:
            pass
        finally:
            if self.worker is not None:
                self.worker.close()
        self.report.findings = [self.finding(rule) for rule in RULES]
        return self.report

    def walk_through(self, tasks: list[Any], seeds: list[int], actions: Sequence[str] | None) -> None:
        self.start()
        self.ask("protocol")
        if {"reset", "step"} & set(self.missing) or self.broken:
            return
        plan = [(task, seed) for task in tasks for seed in seeds]
        transcripts = [self.ask("walk", task, seed, actions) for task, seed in plan]
        episodes = [
            (task, seed, [action for action, _ in transcript if action is not None])
            for (task, seed), transcript in zip(plan, transcripts, strict=True)
        ]
        self.report.episodes = sum(1 for t in transcripts if t)
        self.report.steps = sum(len(played) for _, _, played in episodes)
        if not self.report.episodes:
            return  # reset itself is broken
        for name in _walk.HOSTILE:
            self.ask("hostile", tasks[0], name, episodes[0][2])
        if "state_key" not in self.missing:
            for episode in episodes:
                self.ask("seeds", episode)
        if not {"snapshot", "restore", "state_key"} & set(self.missing):
            for episode in episodes[:2]:
                self.ask("snapshots", episode)
            if episodes[0][2]:
                self.ask("portable", episodes[0])
        if isinstance(self.target, str) and "seed" in self.checked and "seed" not in self.broken and not self.lost:
            self.elsewhere(plan[0], actions, transcripts[0])

    def elsewhere(self, episode: tuple[Any, int], actions: Sequence[str] | None, first: list) -> None:
        """The first episode again in another process: nothing may hang on object addresses or hash seeds."""
        assert self.worker is not None
        self.worker.close()
        self.start()
        ended = self.report.ended
        second = self.ask("walk", *episode, actions)
        self.report.ended = ended
        for i, ((_, a), (_, b)) in enumerate(zip(first, second, strict=False)):
            if a != b:
                change = next(f"{x!r} became {y!r}" for x, y in zip(a, b, strict=True) if x != y)[:200]
                what = f"the same seed gave another episode in another process: after {i} actions {change}"
                fix = "do not let it depend on hash(), the order of a set, id() or the time"
                self.add(self.broken, "seed", f"{what}; {fix}")
                return

    # -- talking to the child --
    def start(self) -> None:
        if isinstance(self.target, str):
            self.worker = Worker("forethought.envs._walk:serve", self.target, self.max_steps)
        else:
            self.worker = _Thread(_walk.serve, self.target, self.max_steps)
        self.checked.add("load")
        try:
            _, problem = self.worker.receive(LOAD_LIMIT)
        except WorkerHung:
            problem = f"loading did not end within {LOAD_LIMIT:g} s"
        except WorkerDied as err:
            problem = f"loading failed: {err}"
        if problem:
            self.add(self.broken, "load", problem)
            raise _Lost

    def ask(self, scenario: str, *args: Any) -> list[tuple[str | None, Any]]:
        """Run a scenario; what it walked: (action, digest of the Step), the first with action None."""
        walked: list[tuple[str | None, Any]] = []
        last = scenario
        assert self.worker is not None
        try:
            self.checked.add("time")
            self.worker.send((scenario, args))
            while True:
                kind, *rest = self.worker.receive(self.call_limit)
                if kind == "done":
                    return walked
                if kind == "call":
                    last = rest[0]
                elif kind == "checked":
                    self.checked.add(rest[0])
                elif kind == "broken":
                    self.add(self.broken, rest[0], rest[1])
                elif kind == "warn":
                    self.add(self.warned, rest[0], rest[1])
                elif kind == "walked":
                    walked.append((rest[0], rest[1]))
                elif kind == "ended":
                    self.report.ended += 1
                elif kind == "missing":
                    self.missing = rest[0]
        except WorkerHung:
            self.add(self.broken, "time", f"{last} did not return within {self.call_limit:g} s; bound its work")
        except WorkerDied as err:
            rule = "hostile" if scenario == "hostile" else "exceptions"
            self.add(
                self.broken, rule, f"{last} ended the process ({err}); never exit, and never run an action as code"
            )
        self.lost += 1
        if self.lost >= MAX_LOST or isinstance(self.worker, _Thread) or last.startswith(("the factory", "reset")):
            raise _Lost
        self.start()
        return walked

    @staticmethod
    def add(where: dict[str, list[str]], rule: str, message: str) -> None:
        message = " ".join(message.split())  # one line each: errors may quote actions and texts of several
        known = where.setdefault(rule, [])
        if message not in known:
            known.append(message)

    def finding(self, rule: str) -> Finding:
        for status, where in (("fail", self.broken), ("warn", self.warned)):
            if messages := where.get(rule):
                more = [f"(and {len(messages) - MAX_SHOWN} more)"] if len(messages) > MAX_SHOWN else []
                return Finding(rule, status, "\n".join(messages[:MAX_SHOWN] + more))  # type: ignore[arg-type]
        if rule in self.checked:
            return Finding(rule, "pass", RULES[rule])
        return Finding(rule, "skip", f"not reached: {self.why_skipped(rule)}")

    def why_skipped(self, rule: str) -> str:
        if rule == "success" and self.report.episodes:
            return "info has no 'success'"
        if rule == "after-done" and self.report.episodes and not self.report.ended:
            return "no episode ended; give actions that end one (or a larger max_steps)"
        return f"broken before: {', '.join(self.broken) or 'nothing'}"


def _target(env: str | Callable[[], Env]) -> tuple[str | Callable[[], Env], str]:
    """What the child loads (a spec), or the factory itself where no child could; and its name."""
    if isinstance(env, str):
        return env, env
    if isinstance(env, EnvSource):
        return env.spec, env.spec
    module, name = getattr(env, "__module__", None) or "", getattr(env, "__qualname__", None) or ""
    found: Any = sys.modules.get(module)
    shown = f"{module}:{name}" if name else repr(env)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not env or module == "__main__":
        return env, shown
    if module.startswith(USER_MODULE):  # loaded from a file by `load_env`
        return f"{sys.modules[module].__file__}:{name}", shown
    return shown, shown


class _Thread:
    """The child's side in a thread of this process, with the same calls as `Worker`."""

    def __init__(self, serve: Callable[..., None], *args: Any):
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.outbox: queue.SimpleQueue = queue.SimpleQueue()
        end = _End(self.inbox, self.outbox)
        threading.Thread(target=end.run, args=(serve, *args), daemon=True).start()

    def send(self, message: Any) -> None:
        self.inbox.put(message)

    def receive(self, timeout: float) -> Any:
        try:
            return self.outbox.get(timeout=timeout)
        except queue.Empty:
            raise WorkerHung(f"nothing within {timeout:g} s") from None

    def close(self) -> None:
        self.inbox.put(None)


class _End:
    """The thread's end of the two queues; None on the inbox ends the thread."""

    def __init__(self, inbox: queue.SimpleQueue, outbox: queue.SimpleQueue):
        self.inbox, self.outbox = inbox, outbox

    def run(self, serve: Callable[..., None], *args: Any) -> None:
        try:
            serve(self, *args)
        except EOFError:
            pass

    def recv(self) -> Any:
        message = self.inbox.get()
        if message is None:
            raise EOFError
        return message

    def send(self, message: Any) -> None:
        self.outbox.put(message)
