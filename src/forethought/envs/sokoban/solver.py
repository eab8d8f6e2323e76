"""Exact Sokoban: shortest solutions, exact distances, and states that cannot be solved.

- `distances` walks backwards from the solved states (moves undone, pushes undone as pulls), breadth first, and so gives
  the exact number of moves to go from every state of a small room.
- `solve` is A* from one state, for the fewest moves or the fewest pushes.
- `dead_squares` and `is_stuck` recognise, without search, boxes that can never get to a target. They are sound (what they
  flag has no solution) but not complete: the exact answer is `solve(...) is None`.

Dead squares and the freeze rule follow the usual definitions of the Sokoban solver literature (simple deadlocks, freeze
deadlocks).
"""

from __future__ import annotations

import functools
import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from forethought.envs.sokoban.level import ACTIONS, OPPOSITE, Level, State, reach
from forethought.errors import ConfigError, EnvError


class SearchLimit(EnvError):
    """A search visited more states than it was allowed to."""


@dataclass(frozen=True)
class Solution:
    """A shortest solution.

    Attributes:
        actions: names, in order; empty for a solved state.
        pushes: how many of them push a box.
        visited: states that the search expanded.
    """

    actions: tuple[str, ...]
    pushes: int
    visited: int

    @property
    def moves(self) -> int:
        return len(self.actions)


@functools.lru_cache(maxsize=4096)
def push_distances(level: Level) -> dict[int, int]:
    """For each cell from which a lone box can be pushed to a target: the fewest pushes that takes."""
    far = dict.fromkeys(level.targets, 0)
    queue = deque(sorted(level.targets))
    while queue:
        cell = queue.popleft()
        for action, near in enumerate(level.near):
            # A box at `came` was pushed by `action` onto `cell`; the player stood behind it.
            back = level.near[OPPOSITE[action]]
            came = back[cell]
            if came < 0 or back[came] < 0 or came in far:
                continue
            assert near[came] == cell
            far[came] = far[cell] + 1
            queue.append(came)
    return far


def dead_squares(level: Level) -> frozenset[int]:
    """Floor cells from which no box ever gets to a target, wherever the player stands and without other boxes."""
    return level.floor - push_distances(level).keys()


def is_stuck(level: Level, boxes: Iterable[int]) -> bool:
    """Whether a box stands on a dead square, or boxes block each other for ever with one of them off target."""
    boxes = set(boxes)
    alive = push_distances(level)
    if any(box not in alive for box in boxes):
        return True
    return any(box not in level.targets and _frozen(level, box, boxes, alive, set()) for box in boxes)


def _frozen(level: Level, box: int, boxes: set[int], alive: dict[int, int], fixed: set[int]) -> bool:
    """Whether a box can move neither way. Boxes in `fixed` are asked already and count as walls."""
    fixed = fixed | {box}
    for one, other in ((0, 1), (2, 3)):
        a, b = level.near[one][box], level.near[other][box]
        if a < 0 or b < 0 or (a not in alive and b not in alive) or a in fixed or b in fixed:
            continue
        if (a in boxes and _frozen(level, a, boxes, alive, fixed)) or (
            b in boxes and _frozen(level, b, boxes, alive, fixed)
        ):
            continue
        return False
    return True


def distances(level: Level, n_boxes: int, max_states: int = 200_000) -> dict[State, int]:
    """Moves to go from every state that can be solved; a state that is not in it cannot.

    Raises:
        SearchLimit: there are more than `max_states` such states.
    """
    table, complete = backwards(level, n_boxes, max_states)
    if not complete:
        raise SearchLimit(f"the room has more than max_states={max_states} solvable states; use solve()")
    return table


def backwards(level: Level, n_boxes: int, max_states: int) -> tuple[dict[State, int], bool]:
    """`distances`, or its nearest states with their exact distances, and whether that is all of them."""
    near = level.near
    table: dict[State, int] = {}
    queue: deque[State] = deque()
    for boxes in combinations(sorted(level.targets), n_boxes):
        for player in sorted(level.floor.difference(boxes)):
            state = State(player, boxes)
            table[state] = 0
            queue.append(state)
    while queue:
        state = queue.popleft()
        player, boxes = state
        moves = table[state] + 1
        for action in range(4):
            # The player came from `back` by this action; a box in front of it may have been pushed there.
            back = near[OPPOSITE[action]][player]
            if back < 0 or back in boxes:
                continue
            before = [State(back, boxes)]
            front = near[action][player]
            if front >= 0 and front in boxes:
                before.append(State(back, tuple(sorted([player if b == front else b for b in boxes]))))
            for earlier in before:
                if earlier not in table:
                    if len(table) >= max_states:
                        return table, False
                    table[earlier] = moves
                    queue.append(earlier)
    return table, True


def solve(
    level: Level, state: State, metric: Literal["moves", "pushes"] = "moves", max_states: int = 500_000
) -> Solution | None:
    """A solution with the fewest moves (or pushes), or None where there is none.

    Raises:
        SearchLimit: more than `max_states` states were expanded. ConfigError: no such metric.
    """
    if metric == "moves":
        return _fewest_moves(level, state, max_states)
    if metric == "pushes":
        return _fewest_pushes(level, state, max_states)
    raise ConfigError(f"metric={metric!r}: 'moves' or 'pushes'")


def _bound(far: dict[int, int], boxes: tuple[int, ...]) -> int:
    return sum([far[box] for box in boxes])


def _fewest_moves(level: Level, start: State, max_states: int) -> Solution | None:
    far = push_distances(level)
    if is_stuck(level, start.boxes):
        return None
    came: dict[State, tuple[State, int] | None] = {start: None}
    cost = {start: 0}
    heap = [(_bound(far, start.boxes), 0, start)]
    visited = 0
    while heap:
        _, moves, state = heapq.heappop(heap)
        moves = -moves
        if moves > cost[state]:
            continue
        if level.solved(state.boxes):
            actions = _trace(came, state)
            return Solution(tuple(ACTIONS[a] for a in actions), _count_pushes(level, start, actions), visited)
        visited += 1
        if visited > max_states:
            raise SearchLimit(
                f"no answer after max_states={max_states} states; raise max_states or take a smaller room"
            )
        for action in range(4):
            after = level.move(state, action)
            if after is state or cost.get(after, moves + 2) <= moves + 1:
                continue
            if after.boxes != state.boxes and is_stuck(level, after.boxes):
                continue
            cost[after] = moves + 1
            came[after] = (state, action)
            heapq.heappush(heap, (moves + 1 + _bound(far, after.boxes), -(moves + 1), after))
    return None


def _fewest_pushes(level: Level, start: State, max_states: int) -> Solution | None:
    """States are the boxes and the player's region, named by its smallest cell; edges are pushes."""
    far = push_distances(level)
    if is_stuck(level, start.boxes):
        return None
    first = State(min(reach(level, start.player, start.boxes)), start.boxes)
    came: dict[State, tuple[State, int, int] | None] = {first: None}  # (region before, pushed box, action)
    cost = {first: 0}
    heap = [(_bound(far, start.boxes), 0, first)]
    visited = 0
    while heap:
        _, pushes, region = heapq.heappop(heap)
        pushes = -pushes
        if pushes > cost[region]:
            continue
        if level.solved(region.boxes):
            return _walk_pushes(level, start, came, region, visited)
        visited += 1
        if visited > max_states:
            raise SearchLimit(
                f"no answer after max_states={max_states} states; raise max_states or take a smaller room"
            )
        free = reach(level, region.player, region.boxes)
        for box in region.boxes:
            for action in range(4):
                behind, beyond = level.near[OPPOSITE[action]][box], level.near[action][box]
                if behind not in free or beyond < 0 or beyond in region.boxes:
                    continue
                boxes = tuple(sorted([beyond if b == box else b for b in region.boxes]))
                if is_stuck(level, boxes):
                    continue
                after = State(min(reach(level, box, boxes)), boxes)
                if cost.get(after, pushes + 2) <= pushes + 1:
                    continue
                cost[after] = pushes + 1
                came[after] = (region, box, action)
                heapq.heappush(heap, (pushes + 1 + _bound(far, boxes), -(pushes + 1), after))
    return None


def _trace(came: dict, state: State) -> list[int]:
    actions = []
    while came[state] is not None:
        state, action = came[state]
        actions.append(action)
    return actions[::-1]


def _count_pushes(level: Level, state: State, actions: Iterable[int]) -> int:
    pushes = 0
    for action in actions:
        after = level.move(state, action)
        pushes += after.boxes != state.boxes
        state = after
    return pushes


def _walk_pushes(level: Level, start: State, came: dict, region: State, visited: int) -> Solution:
    """The pushes with the shortest walk between each two of them."""
    pushes = []
    while came[region] is not None:
        region, box, action = came[region]
        pushes.append((box, action))
    state, actions = start, []
    for box, action in reversed(pushes):
        for step in _walk(level, state, level.near[OPPOSITE[action]][box]) + [action]:
            actions.append(ACTIONS[step])
            state = level.move(state, step)
    return Solution(tuple(actions), len(pushes), visited)


def _walk(level: Level, state: State, to: int) -> list[int]:
    """A shortest walk without a push."""
    came: dict[int, tuple[int, int] | None] = {state.player: None}
    queue = deque([state.player])
    while to not in came:
        cell = queue.popleft()
        for action in range(4):
            beside = level.near[action][cell]
            if beside >= 0 and beside not in came and beside not in state.boxes:
                came[beside] = (cell, action)
                queue.append(beside)
    steps = []
    while (link := came[to]) is not None:
        to, action = link
        steps.append(action)
    return steps[::-1]
