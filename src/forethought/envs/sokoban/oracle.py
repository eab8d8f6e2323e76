"""What a perfect model of Sokoban says: next states, differences, critiques, best actions.

For training and scoring world models (next-state, difference and critique objectives of Dyna-Think, arXiv 2506.00320)
with exact answers in place of a judge model. All text is this library's own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from forethought.envs.sokoban.level import ACTIONS, Level, State
from forethought.envs.sokoban.solver import SearchLimit, distances, is_stuck, solve

NO_CHANGE = "No changes."
TABLE_STATES = 50_000
"""Rooms with at most this many solvable states answer from a table, larger ones by search."""

Quality = Literal["solves", "best", "wasted", "ruins", "blocked", "lost"]


def next_state(level: Level, state: State, action: str) -> State:
    """Raises: KeyError: no such action."""
    return level.move(state, _number(action))


def _number(action: str) -> int:
    try:
        return ACTIONS.index(action)
    except ValueError:
        raise KeyError(f"{action!r} is no action; one of {', '.join(ACTIONS)}") from None


@functools.lru_cache(maxsize=256)
def _table(level: Level, n_boxes: int) -> dict[State, int] | None:
    try:
        return distances(level, n_boxes, TABLE_STATES)
    except SearchLimit:
        return None


def moves_left(level: Level, state: State) -> int | None:
    """Moves of a shortest solution, or None where there is none.

    Raises:
        SearchLimit: the room is too large to tell.
    """
    table = _table(level, len(state.boxes))
    if table is not None:
        return table.get(state)
    solution = solve(level, state)
    return None if solution is None else solution.moves


def best_actions(level: Level, state: State) -> list[str]:
    """All first actions of shortest solutions, in the order of ACTIONS; empty for solved and lost states."""
    left = moves_left(level, state)
    if not left:
        return []
    after = [level.move(state, number) for number in range(4)]
    return [ACTIONS[i] for i, s in enumerate(after) if s is not state and moves_left(level, s) == left - 1]


def plan(level: Level, state: State) -> list[str] | None:
    """A shortest solution (the first best action, again and again), or None where there is none."""
    if moves_left(level, state) is None:
        return None
    actions = []
    while not level.solved(state.boxes):
        actions.append(best_actions(level, state)[0])
        state = next_state(level, state, actions[-1])
    return actions


def quality(level: Level, state: State, action: str) -> Quality:
    """What an action does to the way that is left.

    solves: the room is solved. best: on a shortest way. wasted: solvable as before, but not on a shortest way. ruins: no
    solution any more. blocked: nothing moves. lost: there was no solution before.
    """
    before = moves_left(level, state)
    after = next_state(level, state, action)
    if before is None:
        return "lost"
    if after is state:
        return "blocked"
    if level.solved(after.boxes):
        return "solves"
    left = moves_left(level, after)
    if left is None:
        return "ruins"
    return "best" if left == before - 1 else "wasted"


def difference(level: Level, before: State, after: State) -> str:
    """What changed, in at most three sentences; `NO_CHANGE` where nothing did."""
    if before == after:
        return NO_CHANGE
    parts = []
    if before.player != after.player:
        parts.append(f"The player is now at {level.name(after.player)}.")
    gone, come = sorted(set(before.boxes) - set(after.boxes)), sorted(set(after.boxes) - set(before.boxes))
    for old, new in zip(gone, come, strict=True):
        where = " onto a target" if new in level.targets else " off its target" if old in level.targets else ""
        parts.append(f"A box moved from {level.name(old)} to {level.name(new)}{where}.")
    if level.solved(after.boxes):
        parts.append("The room is solved.")
    elif come and is_stuck(level, after.boxes):
        parts.append("A box is stuck.")
    return " ".join(parts)


@dataclass(frozen=True)
class Critique:
    """A judgement of a simulated outcome.

    Attributes:
        correct: the simulation names the true next state.
        hint: the agent's own next thought: "Yes, ..." or "Wait, ...".
        confidence: 5: the answer is exact.
    """

    correct: bool
    hint: str
    confidence: int = 5


def critique(level: Level, state: State, action: str, predicted: State | str | None) -> Critique:
    """Judge a predicted next state: a state, a text in either form (see `Level.text`), or None for no prediction."""
    after = next_state(level, state, action)
    guess = level.read(predicted) if isinstance(predicted, str) else predicted
    player, boxes = level.name(after.player), ", ".join(map(level.name, after.boxes))
    noun = "box" if len(after.boxes) == 1 else "boxes"
    truth = f"{action} puts me at {player} with the {noun} at {boxes}"
    if guess == after:
        return Critique(True, f"Yes, {truth}.")
    if guess is None:
        return Critique(False, f"Wait, I have not worked out what happens: {truth}.")
    wrong = []
    if guess.player != after.player:
        wrong.append(f"I would be at {player}, not {level.name(guess.player)}")
    if guess.boxes != after.boxes:
        wrong.append(f"the {noun} would be at {boxes}, not {', '.join(map(level.name, guess.boxes))}")
    return Critique(False, f"Wait, after {action} {' and '.join(wrong)}.")
