"""Problems as an environment: a prompt, an answer, a score.

`reset` shows a task's prompt, optionally after worked examples (shots); `step` scores the policy's text. With more than
one attempt, a failed one is answered with the scorer's reason and the next one is awaited.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forethought.data import load_tasks
from forethought.envs.env import Step
from forethought.errors import ConfigError, DataError, EnvError, RewardError
from forethought.rewards.loading import describe
from forethought.rewards.reward import Reward

Task = Mapping[str, Any]
Scorer = Callable[[str, Task], Reward | float | bool]
"""Score of a response (its text alone, without the prompt) to a task."""


class ProblemEnv:
    """One problem: reset, then one step for each attempt.

    The reward of the last attempt is the episode's; earlier, failed attempts pay 0. `info["success"]` says whether the
    score reached `success_at`. An episode whose attempts are used up is terminated: that is an end of its own.

    Args:
        tasks: what `reset(None, seed)` draws from; `reset(task)` takes any task.
        scorer: see `Scorer`. If it raises, step raises RewardError: a failed reward never turns into 0.
        attempts: steps an episode may take.
        shots: tasks with an `answer`, or a `solution`, that are shown before the problem; a task is never its own shot.
        n_shots: how many of the shots, drawn by the seed; None shows all, in order.
        success_at: the score that counts as success.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        scorer: Scorer,
        *,
        attempts: int = 1,
        shots: Sequence[Task] = (),
        n_shots: int | None = None,
        success_at: float = 1.0,
    ):
        if not tasks:
            raise DataError("problem environment: no tasks: the data is empty")
        if attempts < 1:
            raise ConfigError(f"attempts={attempts}: give at least 1")
        if n_shots is not None and not 0 <= n_shots <= len(shots):
            raise ConfigError(f"n_shots={n_shots}: give a number from 0 to {len(shots)}, the number of shots")
        for task in [*tasks, *shots]:
            if "prompt" not in task:
                raise DataError(f"task {task.get('id')!r} has no column 'prompt'; it has {sorted(task)}")
        for shot in shots:
            if "solution" not in shot and "answer" not in shot:
                raise DataError(f"shot {shot.get('id')!r} has neither 'solution' nor 'answer'; it has {sorted(shot)}")
        self.tasks, self.scorer, self.attempts = tasks, scorer, attempts
        self.shots, self.n_shots, self.success_at = shots, n_shots, success_at
        self.state: dict[str, Any] | None = None

    def reset(self, task: Task | None = None, seed: int = 0) -> Step:
        rng = random.Random(seed)
        chosen = self.tasks[rng.randrange(len(self.tasks))] if task is None else task
        if "prompt" not in chosen:
            raise DataError(f"task {chosen.get('id')!r} has no column 'prompt'; it has {sorted(chosen)}")
        others = [s for s in self.shots if s.get("id") is None or s.get("id") != chosen.get("id")]
        if self.n_shots is not None:
            others = rng.sample(others, min(self.n_shots, len(others)))
        messages = [m for s in others for m in _as_messages(s["prompt"]) + [_worked(s)]] + _as_messages(
            chosen["prompt"]
        )
        self.state = {"task": chosen, "left": self.attempts, "tried": [], "done": False}
        return Step(_as_text(messages), info={"task": chosen.get("id"), "messages": messages})

    def step(self, action: str) -> Step:
        """Score an attempt.

        Raises:
            EnvError: before reset, or after the end. RewardError: the scorer failed.
        """
        if self.state is None:
            raise EnvError("problem environment: step before reset")
        if self.state["done"]:
            raise EnvError("problem environment: the episode is over; make a new environment")
        reward = self._score(action)
        self.state["left"] -= 1
        self.state["tried"].append(action)
        success = reward.value >= self.success_at
        self.state["done"] = done = success or self.state["left"] == 0
        info: dict[str, Any] = {"task": self.state["task"].get("id"), "success": success, "parts": dict(reward.parts)}
        if reward.why:
            info["why"] = reward.why
        if done:
            return Step("Right." if success else "Wrong.", reward.value, terminated=True, info=info)
        why = f" ({reward.why})" if reward.why else ""
        return Step(f"That is not right{why}. Try again; attempts left: {self.state['left']}.", info=info)

    def _score(self, action: str) -> Reward:
        assert self.state is not None
        name = f"scorer of task {self.state['task'].get('id')!r}"
        try:
            score = self.scorer(action, self.state["task"])
        except RewardError:
            raise
        except Exception as err:
            raise RewardError(f"{name} raised {describe(err)}") from err
        reward = score if isinstance(score, Reward) else None
        value = reward.value if reward else score
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise RewardError(f"{name} returned {value!r}; return a finite number or a Reward")
        return reward or Reward(float(value))

    def snapshot(self) -> Any:
        return copy.deepcopy(self.state)

    def restore(self, snapshot: Any) -> None:
        self.state = copy.deepcopy(snapshot)

    def state_key(self) -> str | None:
        if self.state is None:
            return None
        return repr((self.state["task"].get("id"), self.state["tried"], self.state["done"]))


def problem_factory(
    path: str | Path,
    scorer: Scorer,
    *,
    prompt_column: str = "prompt",
    answer_column: str = "answer",
    limit: int | None = None,
    **settings: Any,
) -> Callable[[], ProblemEnv]:
    """A factory of `ProblemEnv` on the tasks of a JSONL or parquet file, read once (see `data.load_tasks`)."""
    tasks = load_tasks(path, prompt_column, answer_column, limit)
    ProblemEnv(tasks, scorer, **settings)  # settings are checked now, not at the first episode
    return lambda: ProblemEnv(tasks, scorer, **settings)


def _as_messages(prompt: str | Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [{"role": m["role"], "content": m["content"]} for m in prompt]


def _worked(shot: Task) -> dict[str, str]:
    return {"role": "assistant", "content": str(shot["solution"] if "solution" in shot else shot["answer"])}


def _as_text(messages: Sequence[Mapping[str, str]]) -> str:
    """A lone user message as it is; several as paragraphs with their roles."""
    if len(messages) == 1 and messages[0]["role"] == "user":
        return messages[0]["content"]
    return "\n\n".join(f"{m['role']}: {m['content']}" for m in messages)
