"""The household as a text environment: ALFWorld's texts and commands, success by goal state.

Rewards: `step_reward` for each step that does not end the episode, `success_reward` for the step that reaches the goal,
0 for the step that ends it otherwise, minus `invalid_penalty` for a command that the room answers with "Nothing
happens.". The defaults are those of verl-agent's ALFWorld (10 for success, 0.1 off for invalid commands); with
`step_reward=-0.1` they are Dyna-Mind's (arXiv 2510.09577), with `success_reward=1` plain success.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from forethought.envs.actions import read_action
from forethought.envs.env import Step
from forethought.envs.household.generate import RULES, Rooms, generate
from forethought.envs.household.world import GOALS, NOTHING, Goal, Room, State
from forethought.errors import ConfigError, DataError, EnvError


class HouseholdEnv:
    """One room and one goal: reset, then step until the goal holds or the episode is cut.

    `reset(task, seed)`: a task with `contents` and `goal` (see `household_tasks`) is that room; without one the room is
    generated from `seed`. info: actions (the admissible commands, sorted), success, invalid, effective (the state
    changed), family (kind of transition, of `world.FAMILIES`), goal (its family), steps, invalid_actions (so far).

    Args:
        rooms, goals: of generated rooms: a name or several, of `kinds.ROOMS` and `world.GOALS`; goals None: all that the
            rooms allow.
        max_steps: commands, valid or not, after which the episode is truncated; the goal reached with the last one is
            terminated, not truncated.
        rules: whether the first observation begins with the instructions.
        show_actions: whether observations end with the admissible commands (they tell what is there: leave them out
            where a world model is to be trained).
        success_reward, step_reward, invalid_penalty: see the module's text.

    Raises:
        ConfigError: a setting is out of range.
    """

    instructions = RULES

    def __init__(
        self,
        *,
        rooms: tuple[str, ...] | str = ("kitchen", "livingroom", "bedroom", "bathroom"),
        goals: tuple[str, ...] | str | None = None,
        max_steps: int = 30,
        rules: bool = True,
        show_actions: bool = False,
        success_reward: float = 10.0,
        step_reward: float = 0.0,
        invalid_penalty: float = 0.1,
    ):
        names = (rooms,) if isinstance(rooms, str) else tuple(rooms)
        if goals is None:
            self.what = possible_rooms(names)
        else:
            self.what = Rooms(names, (goals,) if isinstance(goals, str) else tuple(goals))
        if max_steps < 1:
            raise ConfigError(f"max_steps={max_steps}: give at least 1")
        numbers = {"success_reward": success_reward, "step_reward": step_reward, "invalid_penalty": invalid_penalty}
        for name, value in numbers.items():
            if not math.isfinite(value):
                raise ConfigError(f"{name}={value}: give a finite number")
        if invalid_penalty < 0:
            raise ConfigError(f"invalid_penalty={invalid_penalty}: give 0 or more; it is subtracted")
        self.max_steps, self.rules, self.show_actions = max_steps, rules, show_actions
        self.success_reward, self.step_reward, self.invalid_penalty = success_reward, step_reward, invalid_penalty
        self.room: Room | None = None
        self.state = State(-1, -1, 0, ())
        self.steps, self.invalid, self.over = 0, 0, False

    def reset(self, task: Mapping[str, Any] | None = None, seed: int = 0) -> Step:
        """Raises: DataError: the task's room or goal is not sound (see `Room`)."""
        if task is not None and "contents" in task:
            room = room_of(task)
        else:
            room = generate(seed, self.what)
        self.room, self.state = room, room.start
        self.steps, self.invalid, self.over = 0, 0, False
        actions = room.admissible(room.start)
        text = self._shown(room.introduction(), actions)
        return Step(f"{RULES}\n\n{text}" if self.rules else text, info={"actions": actions, "goal": room.goal.family})

    def _shown(self, text: str, actions: list[str]) -> str:
        return f"{text}\n\nCommands: {', '.join(actions)}." if self.show_actions else text

    def step(self, action: str) -> Step:
        """Raises: EnvError: before reset, or after the end."""
        room = self.room
        if room is None or self.over:
            raise EnvError(f"household: step {'before reset' if room is None else 'after the end; reset it'}")
        before = self.state
        after, text, family = room.apply(before, read_action(action) or NOTHING)
        self.state = after
        self.steps += 1
        invalid = family == "invalid"
        self.invalid += invalid
        effective = after is not before and after != before
        won = effective and room.won(after)
        truncated = self.steps >= self.max_steps and not won
        self.over = won or truncated
        reward = self.success_reward if won else 0.0 if truncated else self.step_reward
        actions = room.admissible(after)
        return Step(
            self._shown(text, actions),
            reward - self.invalid_penalty if invalid else reward,
            won,
            truncated,
            {
                "actions": actions,
                "success": won,
                "invalid": invalid,
                "effective": effective,
                "family": family,
                "goal": room.goal.family,
                "steps": self.steps,
                "invalid_actions": self.invalid,
            },
        )

    def snapshot(self) -> Any:
        """All values are immutable, so the snapshot shares them."""
        return self.room, self.state, self.steps, self.invalid, self.over

    def restore(self, snapshot: Any) -> None:
        self.room, self.state, self.steps, self.invalid, self.over = snapshot

    def state_key(self) -> str | None:
        """The room and its state, without the step count: states met twice in an episode are equal."""
        return None if self.room is None else f"{self.room.key} {tuple(self.state)}"


def possible_rooms(rooms: Sequence[str]) -> Rooms:
    """Rooms of these kinds with all goals that at least one of them allows."""
    goals = []
    for goal in GOALS:
        try:
            Rooms(tuple(rooms), (goal,))
        except ConfigError as err:
            if not str(err).startswith("goals"):
                raise
        else:
            goals.append(goal)
    return Rooms(tuple(rooms), tuple(goals))


def room_of(task: Mapping[str, Any]) -> Room:
    """The room of a task. Raises: DataError."""
    try:
        goal = Goal(**task["goal"])
        return _room(json.dumps(task["contents"]), goal)
    except (KeyError, TypeError, AttributeError) as err:
        raise DataError(
            f"task {task.get('id')!r}: contents must be a mapping of receptacles to lists of objects, goal one of family, "
            f"object, receptacle and wording ({type(err).__name__}: {err})"
        ) from err


@functools.lru_cache(maxsize=1024)
def _room(contents: str, goal: Goal) -> Room:
    return Room(json.loads(contents), goal)
