"""Sokoban as a text environment.

Rewards: `step_reward` for each step that does not end the episode, `success_reward` for the step that solves the room,
0 for the step that ends it unsolved, and `box_reward` for each box that comes onto a target, minus it for each that
leaves one. The defaults are Dyna-Mind's (arXiv 2510.09577): solved at step 6: 5 x -0.1 + 10 = 9.5; unsolved after 30:
-2.9. With `box_reward=1` they are gym-sokoban's, but for the -0.1 that it charges for the last step, too;
`success_reward=1, step_reward=0` is plain success.

An action that is none of the four (read by `actions.read_action`) changes nothing but the counts, is answered with a
line that says so, and costs `invalid_penalty` on top. Departure from verl-agent's Sokoban, where such an action does not
count as a step: here it does, so that a policy that never writes a valid action comes to an end.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

from forethought.envs.actions import read_action
from forethought.envs.env import Step
from forethought.envs.sokoban.generate import RULES, RULES_COORDINATES, Difficulty, generate
from forethought.envs.sokoban.level import ACTIONS, Level, State, Text, parse_level
from forethought.envs.sokoban.solver import is_stuck
from forethought.errors import ConfigError, DataError, EnvError

INVALID = "That is no action: write up, down, left or right."
_parsed = functools.lru_cache(maxsize=4096)(parse_level)  # a group plays the same room many times
_NUMBER = {name: number for number, name in enumerate(ACTIONS)}


class SokobanEnv:
    """One room: reset, then step until it is solved or cut.

    `reset(task, seed)`: a task with `level` (grid symbols, see `level.parse_level`) is that room; without one the room
    is generated from `seed`. info: actions, success, invalid (this action was none), effective (the state changed),
    family (walk, push, store, unstore, blocked or invalid: what kind of transition), steps, invalid_actions (so far).

    Args:
        size: side of the square grid with its outer walls, or (rows, columns).
        boxes, min_moves, max_moves: of generated rooms; moves of the shortest solution.
        max_steps: actions, valid or not, after which the episode is truncated. A room solved with the last one is
            terminated, not truncated.
        text: "grid" or "coordinates", see `level`.
        rules: whether the first observation begins with the instructions.
        success_reward, step_reward, box_reward: see the module's text.
        invalid_penalty: subtracted for an action that is none.
        end_when_stuck: end (terminated, without success) once a box can never get to a target (`solver.is_stuck`).

    Raises:
        ConfigError: a setting is out of range.
    """

    def __init__(
        self,
        *,
        size: int | tuple[int, int] = 6,
        boxes: int = 1,
        min_moves: int = 4,
        max_moves: int = 10,
        max_steps: int = 15,
        text: Text = "grid",
        rules: bool = True,
        success_reward: float = 10.0,
        step_reward: float = -0.1,
        box_reward: float = 0.0,
        invalid_penalty: float = 0.1,
        end_when_stuck: bool = False,
    ):
        sides = (size, size) if isinstance(size, int) else tuple(size)
        self.difficulty = Difficulty(sides, boxes, min_moves, max_moves)  # type: ignore[arg-type]
        if max_steps < 1:
            raise ConfigError(f"max_steps={max_steps}: give at least 1")
        if text not in ("grid", "coordinates"):
            raise ConfigError(f"text={text!r}: 'grid' or 'coordinates'")
        for name, value in (
            ("success_reward", success_reward),
            ("step_reward", step_reward),
            ("box_reward", box_reward),
            ("invalid_penalty", invalid_penalty),
        ):
            if not math.isfinite(value):
                raise ConfigError(f"{name}={value}: give a finite number")
        if invalid_penalty < 0:
            raise ConfigError(f"invalid_penalty={invalid_penalty}: give 0 or more; it is subtracted")
        self.max_steps, self.rules = max_steps, rules
        self.text: Text = text
        self.success_reward, self.step_reward, self.box_reward = success_reward, step_reward, box_reward
        self.invalid_penalty, self.end_when_stuck = invalid_penalty, end_when_stuck
        self.level: Level | None = None
        self.state = State(0, ())
        self.steps, self.invalid, self.over = 0, 0, False

    @property
    def instructions(self) -> str:
        return RULES if self.text == "grid" else RULES_COORDINATES

    def reset(self, task: Mapping[str, Any] | None = None, seed: int = 0) -> Step:
        """Raises: DataError: the task's level cannot be read, or is solved already. ConfigError: see `generate`."""
        if task is not None and "level" in task:
            rows = task["level"]
            level, state = _parsed(rows if isinstance(rows, str) else "\n".join(rows))
            if level.solved(state.boxes):
                raise DataError(f"task {task.get('id')!r}: its level is solved already")
        else:
            room = generate(seed, self.difficulty)
            level, state = room.level, room.start
        self.level, self.state = level, state
        self.steps, self.invalid, self.over = 0, 0, False
        text = level.text(state, self.text)
        return Step(f"{self.instructions}\n\n{text}" if self.rules else text, info={"actions": list(ACTIONS)})

    def step(self, action: str) -> Step:
        """Raises: EnvError: before reset, or after the end."""
        level = self.level
        if level is None or self.over:
            raise EnvError(f"Sokoban: step {'before reset' if level is None else 'after the end; reset it'}")
        before = self.state
        number = _NUMBER.get(action)
        if number is None:
            number = _NUMBER.get(read_action(action) or "")
        after = before if number is None else level.move(before, number)
        self.state = after
        self.steps += 1
        pushed = after.boxes is not before.boxes and after.boxes != before.boxes
        solved = pushed and level.solved(after.boxes)
        stuck = pushed and self.end_when_stuck and not solved and is_stuck(level, after.boxes)
        truncated = self.steps >= self.max_steps and not (solved or stuck)
        over = self.over = solved or stuck or truncated
        stored = 0
        if pushed:
            targets = level.targets
            stored = sum([b in targets for b in after.boxes]) - sum([b in targets for b in before.boxes])
        if number is None:
            self.invalid += 1
            family = "invalid"
        elif after is before:
            family = "blocked"
        else:
            family = "walk" if not pushed else "store" if stored > 0 else "unstore" if stored < 0 else "push"
        reward = self.success_reward if solved else 0.0 if over else self.step_reward
        text = level.text(after, self.text)
        return Step(
            text if number is not None else f"{INVALID}\n{text}",
            reward + self.box_reward * stored - (self.invalid_penalty if number is None else 0.0),
            solved or stuck,
            truncated,
            {
                "actions": list(ACTIONS),
                "success": solved,
                "invalid": number is None,
                "effective": after is not before,
                "family": family,
                "steps": self.steps,
                "invalid_actions": self.invalid,
            },
        )

    def snapshot(self) -> Any:
        """All values are immutable, so the snapshot shares them."""
        return self.level, self.state, self.steps, self.invalid, self.over

    def restore(self, snapshot: Any) -> None:
        self.level, self.state, self.steps, self.invalid, self.over = snapshot

    def state_key(self) -> str | None:
        """The room and where all stands in it, without the step count: states met twice in an episode are equal."""
        return None if self.level is None else self.level.rows(self.state)
