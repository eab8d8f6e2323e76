"""TRL environment classes as text environments.

A TRL environment is a plain class: `reset(**row) -> str | None`, public methods with typed arguments and Google-style
docstrings that become tools, optionally `get_reward() -> float` (read in TRL 1.16, `GRPOTrainer`, experimental there).
Here an action is the policy's text. A tool call in it, `{"name": ..., "arguments": {...}}` alone or in
<tool_call></tool_call>, runs the method and its result is the observation; a text without one is the final answer and
ends the episode. Unknown tools and wrong arguments are answered, not raised.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from forethought.envs.env import Step
from forethought.errors import ConfigError, EnvError, RewardError, nearest
from forethought.rewards.loading import describe

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class TRLEnv:
    """A TRL environment as one of ours.

    The reward comes with the last Step: `get_reward()`, or 0 for a class without it. TRL knows no success, so
    `info["success"]` is absent unless `success_at` is given.

    Args:
        factory: a TRL environment class, or a function that makes an instance.
        max_turns: actions after which the episode is truncated.
        success_at: reward from which on an ended episode counts as success.

    Raises:
        ConfigError: the class has no `reset`, or max_turns is below 1.
    """

    def __init__(self, factory: Callable[[], Any], *, max_turns: int = 16, success_at: float | None = None):
        if max_turns < 1:
            raise ConfigError(f"max_turns={max_turns}: give at least 1")
        self.max_turns, self.success_at = max_turns, success_at
        self.env = factory()
        methods = {n for n, _ in inspect.getmembers(type(self.env), inspect.isfunction) if not n.startswith("_")}
        if "reset" not in methods:
            raise ConfigError(f"TRL environment {type(self.env).__name__}: it has no method reset(**row)")
        self.has_reward = "get_reward" in methods
        self.tools = sorted(methods - {"reset", "get_reward"})
        self.turns, self.over, self.begun = 0, False, False

    def reset(self, task: Mapping[str, Any] | None = None, seed: int = 0) -> Step:
        """The task's prompt (text, or its last message's), followed by what the environment's reset returns.

        The class is given the task's columns, with `seed` where it names such a parameter and the task has none.
        """
        row = dict(task or {})
        if "seed" not in row and "seed" in inspect.signature(self.env.reset).parameters:
            row["seed"] = seed
        said = _finish(self.env.reset(**row))
        self.turns, self.over, self.begun = 0, False, True
        prompt = row.get("prompt", "")
        prompt = prompt if isinstance(prompt, str) else str(prompt[-1]["content"]) if prompt else ""
        return Step(prompt + ("" if said is None else str(said)), info={"tools": self.tools})

    def step(self, action: str) -> Step:
        """Run the tool calls of an action.

        Raises:
            EnvError: before reset or after the end. RewardError: `get_reward` failed or gave no finite number.
        """
        if not self.begun or self.over:
            raise EnvError(f"TRL environment: step {'after the end' if self.over else 'before reset'}")
        self.turns += 1
        calls = _calls(action)
        results = [self._run(call) for call in calls]
        terminated = not calls
        truncated = not terminated and self.turns >= self.max_turns
        self.over = terminated or truncated
        info: dict[str, Any] = {"tool_calls": len(calls)}
        reward = self._reward() if self.over else 0.0
        if self.over and self.success_at is not None:
            info["success"] = terminated and reward >= self.success_at
        return Step("\n".join(results), reward, terminated, truncated, info)

    def _run(self, call: Any) -> str:
        if isinstance(call, str):
            return call  # why the call cannot be read
        name, arguments = call.get("name"), call.get("arguments", {})
        if name not in self.tools:
            known = f"the tools are {', '.join(self.tools)}" if self.tools else "there are no tools"
            return f"Error: no tool {name!r}{nearest(str(name), self.tools)}; {known}."
        if not isinstance(arguments, dict):
            return f"Error: the arguments of {name} must be a JSON object."
        method = getattr(self.env, name)
        try:
            inspect.signature(method).bind(**arguments)
        except TypeError as err:
            return f"Error: {name}: {err}."
        try:
            return str(_finish(method(**arguments)))
        except Exception as err:  # as in TRL, a tool's exception is the tool's answer
            return f"Error: {describe(err)}"

    def _reward(self) -> float:
        if not self.has_reward:
            return 0.0
        name = f"{type(self.env).__name__}.get_reward"
        try:
            value = _finish(self.env.get_reward())
        except Exception as err:
            raise RewardError(f"{name} raised {describe(err)}") from err
        if isinstance(value, bool | int | float) and abs(value) < float("inf"):
            return float(value)
        raise RewardError(f"{name} returned {value!r}; return a finite number")

    def snapshot(self) -> Any:
        return copy.deepcopy((self.env, self.turns, self.over, self.begun))

    def restore(self, snapshot: Any) -> None:
        self.env, self.turns, self.over, self.begun = copy.deepcopy(snapshot)

    def state_key(self) -> str | None:
        return None


def _calls(action: str) -> list[Any]:
    """Tool calls of an action: dicts, or texts that say why one cannot be read."""
    texts = _CALL.findall(action)
    if not texts:
        stripped = action.strip()
        if not (stripped.startswith("{") and '"name"' in stripped):
            return []
        texts = [stripped]
    out: list[Any] = []
    for text in texts:
        try:
            call = json.loads(text)
        except (ValueError, RecursionError) as err:
            out.append(f"Error: the tool call is not JSON ({describe(err, 100)}).")
            continue
        fine = isinstance(call, dict) and isinstance(call.get("name"), str)
        out.append(call if fine else 'Error: a tool call looks like {"name": ..., "arguments": {...}}.')
    return out


def _finish(value: Any) -> Any:
    if not inspect.isawaitable(value):
        return value

    async def wait() -> Any:
        return await value

    return asyncio.run(wait())
