"""Gymnasium environments as text environments, and text environments as Gymnasium ones (extra `gym`).

In: `GymnasiumEnv(make, observe=..., act=...)` shows observations as text and reads actions from text. What cannot be
read is answered, without a step of the world. Out: `to_gymnasium(factory)`.

Departure from Gymnasium: where a world reports terminated and truncated at once (won on the last allowed step), the
end of its own counts and truncated is False, so that only episodes that were cut bootstrap a value.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from forethought.envs.env import Env, Step
from forethought.errors import ConfigError, EnvError, MissingExtraError
from forethought.rewards.loading import describe

MAX_LISTED = 50
"""Discrete actions that are listed in `info["actions"]`."""


def _gymnasium() -> Any:
    try:
        import gymnasium
    except ImportError as err:
        raise MissingExtraError("Gymnasium environments need gymnasium: pip install 'forethought[gym]'") from err
    return gymnasium


# -- in ----------------------------------------------------------------------------------------------------------------


class GymnasiumEnv:
    """A Gymnasium environment with text in and out.

    Args:
        make: id of a registered environment ("FrozenLake-v1"), or a function that makes one.
        observe: (observation, info) -> text. Default: numbers, arrays, dicts and tuples written out.
        act: text -> action of the action space; raises ValueError for what is no action. Default: a number for Discrete
            spaces (or a name of `actions`), the text itself for Text spaces, a JSON list for Box and MultiDiscrete.
        actions: names of a Discrete space's actions, in order.
        snapshot: "deepcopy" copies the environment; "replay" stores the actions and plays them again in a fresh one,
            for worlds that cannot be copied (their episodes must then follow from the seed).
        max_turns: steps and unreadable actions after which the episode is truncated; None: the world's own limit only.
        key: environment -> `state_key`; default None (no key).

    `reset(task, seed)`: a task that is a mapping is passed as Gymnasium's `options`. Infos are turned into plain
    values; `is_success` becomes `success`.

    Raises:
        MissingExtraError: gymnasium is not installed. ConfigError: unknown id, or an action space that needs `act`.
    """

    def __init__(
        self,
        make: str | Callable[[], Any],
        *,
        observe: Callable[[Any, Mapping[str, Any]], str] | None = None,
        act: Callable[[str], Any] | None = None,
        actions: Sequence[str] | None = None,
        snapshot: Literal["deepcopy", "replay"] = "deepcopy",
        max_turns: int | None = None,
        key: Callable[[Any], str] | None = None,
    ):
        gymnasium = _gymnasium()
        if snapshot not in ("deepcopy", "replay"):
            raise ConfigError(f"snapshot={snapshot!r}: 'deepcopy' or 'replay'")
        if max_turns is not None and max_turns < 1:
            raise ConfigError(f"max_turns={max_turns}: give at least 1, or None")
        self.make = make if callable(make) else lambda: gymnasium.make(make)
        try:
            self.env = self.make()
        except gymnasium.error.Error as err:
            raise ConfigError(f"Gymnasium environment {make!r}: {describe(err)}") from err
        self.observe = observe or (lambda observation, info: to_text(observation))
        self.act, self.legal, self.hint = _reader(self.env.action_space, act, actions)
        self.mode, self.max_turns, self.key = snapshot, max_turns, key
        self.played: list[Any] = []  # what was done, None for unreadable actions
        self.start: tuple[Any, int] | None = None
        self.over = False

    def reset(self, task: Any = None, seed: int = 0) -> Step:
        options = dict(task) if isinstance(task, Mapping) else None
        observation, info = self.env.reset(seed=seed, options=options)
        self.start, self.played, self.over = (task, seed), [], False
        return Step(self.observe(observation, info), info=self._info(info))

    def step(self, action: str) -> Step:
        if self.start is None or self.over:
            raise EnvError(f"Gymnasium environment: step {'after the end' if self.over else 'before reset'}")
        try:
            done = self.act(action)
        except (ValueError, TypeError, OverflowError, RecursionError):
            self.played.append(None)
            self.over = self._spent()
            shown = action if len(action) <= 40 else action[:40] + "..."
            text = f"{shown!r} is not an action. {self.hint}"
            return Step(text, truncated=self.over, info={"invalid": True, **self._info({})})
        self.played.append(done)
        observation, reward, terminated, truncated, info = self.env.step(done)
        if not math.isfinite(float(reward)):
            raise EnvError(f"the Gymnasium environment gave the reward {reward}; it must be finite")
        terminated = bool(terminated)
        truncated = not terminated and (bool(truncated) or self._spent())
        self.over = terminated or truncated
        return Step(self.observe(observation, info), float(reward), terminated, truncated, self._info(info))

    def _spent(self) -> bool:
        return self.max_turns is not None and len(self.played) >= self.max_turns

    def _info(self, info: Mapping[str, Any]) -> dict[str, Any]:
        out = {str(k): plain(v) for k, v in info.items()}
        if "is_success" in out and "success" not in out:
            out["success"] = bool(out["is_success"])
        return out | ({"actions": list(self.legal)} if self.legal else {})

    def snapshot(self) -> Any:
        """Raises: EnvError where the environment cannot be copied."""
        state = {"start": self.start, "played": list(self.played), "over": self.over}
        return {**state, "env": self._copy(self.env)} if self.mode == "deepcopy" else state

    def restore(self, snapshot: Any) -> None:
        self.start, self.played, self.over = snapshot["start"], list(snapshot["played"]), snapshot["over"]
        if self.mode == "deepcopy":
            self.env = self._copy(snapshot["env"])
            return
        self.env.close()
        self.env = self.make()
        if self.start is not None:
            task, seed = self.start
            self.env.reset(seed=seed, options=dict(task) if isinstance(task, Mapping) else None)
            for done in self.played:
                if done is not None:
                    self.env.step(copy.deepcopy(done))

    @staticmethod
    def _copy(env: Any) -> Any:
        try:
            return copy.deepcopy(env)
        except Exception as err:
            raise EnvError(
                f"this Gymnasium environment cannot be copied ({describe(err)}); use snapshot='replay'"
            ) from err

    def state_key(self) -> str | None:
        return self.key(self.env) if self.key else None


def _reader(
    space: Any, act: Callable[[str], Any] | None, names: Sequence[str] | None
) -> tuple[Callable[[str], Any], list[str], str]:
    """How text becomes an action, the legal actions if they can be listed, and what to tell a policy."""
    kinds = _gymnasium().spaces
    if isinstance(space, kinds.Discrete):
        first, count = int(space.start), int(space.n)
        if names is not None and len(names) != count:
            raise ConfigError(f"actions: {len(names)} names for {count} actions; name each, in order")
        legal = list(names) if names else [str(first + i) for i in range(count)] if count <= MAX_LISTED else []
        known = {name.lower(): first + i for i, name in enumerate(names or ())}
        hint = (
            f"Choose one of: {', '.join(legal)}." if legal else f"Choose a number from {first} to {first + count - 1}."
        )

        def discrete(text: str) -> int:
            text = text.strip()
            if text.lower() in known:
                return known[text.lower()]
            if len(text) > 20 or not text.isascii():
                raise ValueError(text)
            number = int(text)
            if not first <= number < first + count:
                raise ValueError(text)
            return number

        return act or discrete, legal, hint
    if names is not None:
        raise ConfigError(f"actions: only a Discrete space's actions have names; this one is {space}")
    if act is not None:
        return act, [], f"The actions are {space}."
    if isinstance(space, kinds.Text):

        def text_action(text: str) -> str:
            if not space.contains(text):
                raise ValueError(text)
            return text

        return text_action, [], f"Write {space.min_length} to {space.max_length} allowed characters."
    if isinstance(space, kinds.Box | kinds.MultiDiscrete | kinds.MultiBinary):

        def array(text: str) -> np.ndarray:
            value = np.asarray(json.loads(text[:10_000]), dtype=float)
            action = value.astype(space.dtype)
            if not (action == value).all() and space.dtype.kind in "iub":
                raise ValueError(text)
            if not space.contains(action):
                raise ValueError(text)
            return action

        return array, [], f"Write a JSON list of shape {list(space.shape)}."
    raise ConfigError(f"action space {space}: give act=, a function from text to an action")


def to_text(value: Any) -> str:
    """An observation as compact text."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "\n".join(f"{k}: {to_text(v)}" for k, v in value.items())
    if isinstance(value, tuple | list):
        return ", ".join(map(to_text, value))
    if isinstance(value, np.ndarray) and value.ndim:
        return np.array2string(value, precision=4, separator=", ", threshold=2000)
    value = plain(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def plain(value: Any) -> Any:
    """A value as JSON can hold it: arrays as lists, numbers that are not finite as None, the unknown as text."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)


# -- out ---------------------------------------------------------------------------------------------------------------


def to_gymnasium(factory: Callable[[], Env], tasks: Sequence[Any] = (None,)) -> Any:
    """A text environment as a `gymnasium.Env` with text spaces.

    Each reset makes a fresh environment (ours are single use). Its task is `options["task"]`, else one drawn from
    `tasks`; its seed comes from Gymnasium's generator, so `reset(seed=s)` repeats an episode.

    Raises:
        MissingExtraError: gymnasium is not installed.
    """
    gymnasium = _gymnasium()

    class Words(gymnasium.spaces.Space):
        """Any text."""

        def __init__(self):
            super().__init__(shape=(), dtype=None)

        def contains(self, x: Any) -> bool:
            return isinstance(x, str)

        def sample(self, mask: Any = None, probability: Any = None) -> str:
            letters = self.np_random.integers(ord("a"), ord("z") + 1, size=self.np_random.integers(0, 12))
            return "".join(map(chr, letters))

        def __eq__(self, other: Any) -> bool:
            return type(other).__name__ == "Words"

        def __repr__(self) -> str:
            return "Words()"

    class TextEnv(gymnasium.Env):
        metadata = {"render_modes": []}

        def __init__(self):
            self.observation_space = Words()
            self.action_space = Words()
            self.inner: Env | None = None

        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
            super().reset(seed=seed)
            drawn = tasks[int(self.np_random.integers(len(tasks)))]
            task = (options or {}).get("task", drawn)
            self.inner = factory()
            first = self.inner.reset(task, int(self.np_random.integers(2**31)))
            return first.observation, copy.deepcopy(first.info)

        def step(self, action: str):
            if self.inner is None:
                raise EnvError("step before reset")
            step = self.inner.step(action)
            return step.observation, step.reward, step.terminated, step.truncated, copy.deepcopy(step.info)

    return TextEnv()
