"""Sokoban rooms of a chosen difficulty, from a seed.

1. Carve: a walk that keeps its direction more often than not stamps small shapes into solid wall until a drawn share of
   the interior is floor.
2. Play backwards: targets are drawn, and `solver.backwards` walks back from every solved state, breadth first, so the
   exact number of moves of each state it meets is known.
3. Draw the number of moves evenly among those of the range that occur, then a state with that number.

So the difficulty is chosen, where the usual generator (reverse play to a fixed depth, see gym-sokoban) leaves half of
the 6x6 rooms with solutions of three moves or fewer. A seed gives the same room everywhere: draws use `random()` alone,
the one generator whose sequence Python promises to keep, and no hash of any object.

Rooms are divided into splits by a hash of walls, targets, boxes and player (see `envs.pools`), the same for a room and
its rotations and mirror images: the training split and the held-out one share no room, whatever the settings and seeds.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from forethought.config import derive_seed
from forethought.envs.pools import draw
from forethought.envs.sokoban.level import ACTIONS, Level, State, parse_level
from forethought.envs.sokoban.solver import backwards, solve
from forethought.errors import ConfigError

T = TypeVar("T")

SHAPES: tuple[tuple[tuple[int, int], ...], ...] = (
    ((0, 0),),
    ((0, 0), (0, 1)),
    ((0, 0), (1, 0)),
    ((0, 0), (0, 1), (1, 0)),
    ((0, 0), (0, 1), (1, 0), (1, 1)),
    ((0, 0), (-1, 0), (1, 0), (0, 1)),
)
KEEP_DIRECTION = 0.6
FLOOR_SHARE = (0.5, 0.9)
MAX_STATES = 20_000
"""States walked back from the solved ones; rooms with more are known as far as that."""
MAX_ATTEMPTS = 400
"""Carved rooms after which a range of difficulty counts as not to be had."""
SMALLEST, LARGEST = 4, 16


@dataclass(frozen=True)
class Room:
    """A generated room.

    Attributes:
        level, start: see `level`.
        moves: of the shortest solution, exactly.
    """

    level: Level
    start: State
    moves: int


@dataclass(frozen=True)
class Difficulty:
    """What to generate.

    Attributes:
        size: rows and columns of the grid with its outer walls.
        boxes: boxes and targets.
        min_moves, max_moves: range of the shortest solution's moves.
    """

    size: tuple[int, int] = (6, 6)
    boxes: int = 1
    min_moves: int = 4
    max_moves: int = 10

    def __post_init__(self):
        if len(self.size) != 2 or not all(SMALLEST <= side <= LARGEST for side in self.size):
            raise ConfigError(
                f"size={self.size}: give rows and columns from {SMALLEST} to {LARGEST}, outer walls included"
            )
        if not 1 <= self.boxes <= 6:
            raise ConfigError(f"boxes={self.boxes}: give 1 to 6")
        if not 1 <= self.min_moves <= self.max_moves:
            raise ConfigError(
                f"min_moves={self.min_moves}, max_moves={self.max_moves}: give 1 <= min_moves <= max_moves"
            )
        interior = (self.size[0] - 2) * (self.size[1] - 2)
        if interior < 2 * self.boxes + 1:
            raise ConfigError(f"boxes={self.boxes}: too many for the {interior} inner cells of size={self.size}")


def generate(seed: int, difficulty: Difficulty | None = None) -> Room:
    """The room of a seed.

    Raises:
        ConfigError: no room in the range of moves was found.
    """
    return _generate(seed, difficulty or Difficulty())


@functools.lru_cache(maxsize=1024)
def _generate(seed: int, d: Difficulty) -> Room:
    rng = random.Random(derive_seed("sokoban", d.size[0], d.size[1], d.boxes, d.min_moves, d.max_moves, seed))
    return _draw(rng, d)


def _draw(rng: random.Random, d: Difficulty) -> Room:
    for _ in range(MAX_ATTEMPTS):
        height, width = d.size
        floor = _carve(rng, d)
        if len(floor) <= d.boxes:
            continue
        level = Level(height, width, floor, _pick_several(rng, sorted(floor), d.boxes))
        table, _ = backwards(level, d.boxes, MAX_STATES)
        by_moves: dict[int, list[State]] = {}
        for state, moves in table.items():  # in the order of the search, which is fixed
            if d.min_moves <= moves <= d.max_moves:
                by_moves.setdefault(moves, []).append(state)
        if by_moves:
            moves = _pick(rng, sorted(by_moves))
            return Room(level, _pick(rng, by_moves[moves]), moves)
    raise ConfigError(
        f"no Sokoban room of size {d.size[0]}x{d.size[1]} with boxes={d.boxes} and {d.min_moves} to {d.max_moves} moves "
        f"in {MAX_ATTEMPTS} tries; lower min_moves or raise size"
    )


def _carve(rng: random.Random, d: Difficulty) -> set[int]:
    height, width = d.size
    inside = [(r, c) for r in range(1, height - 1) for c in range(1, width - 1)]
    low, high = FLOOR_SHARE
    wanted = round((low + (high - low) * rng.random()) * len(inside))
    row, column = _pick(rng, inside)
    direction = (0, 1)
    floor: set[int] = set()
    while len(floor) < wanted:
        for down, right in _pick(rng, SHAPES):
            r, c = row + down, column + right
            if 1 <= r < height - 1 and 1 <= c < width - 1:
                floor.add(r * width + c)
        if rng.random() >= KEEP_DIRECTION:
            direction = _pick(rng, ((-1, 0), (1, 0), (0, -1), (0, 1)))
        r, c = row + direction[0], column + direction[1]
        if 1 <= r < height - 1 and 1 <= c < width - 1:
            row, column = r, c
        else:
            direction = _pick(rng, ((-1, 0), (1, 0), (0, -1), (0, 1)))
    return floor


def _pick(rng: random.Random, items: Sequence[T]) -> T:
    return items[int(rng.random() * len(items))]


def _pick_several(rng: random.Random, items: Sequence[T], n: int) -> list[T]:
    pool = list(items)
    return [pool.pop(int(rng.random() * len(pool))) for _ in range(n)]


def sokoban_tasks(
    n: int, seed: int = 0, split: str = "train", difficulty: Difficulty | None = None
) -> list[dict[str, Any]]:
    """`n` different rooms of a split as tasks: id, family, split, prompt, level (grid symbols), moves, pushes, solution.

    `pushes` is the smallest number of pushes of any solution; `solution` is one of the fewest moves (action names).

    Two tasks are never the same room turned or mirrored.

    Raises:
        ConfigError: no such split, no such rooms. DataError: the split has fewer rooms than n.
    """
    d = difficulty or Difficulty()

    def make(rng: random.Random) -> tuple[str, dict[str, Any]]:
        room = _draw(rng, d)
        text = room.level.rows(room.start)
        return canonical(text), {"prompt": RULES, "level": text, "moves": room.moves}

    tasks = draw("sokoban", make, n, seed, split)
    for task in tasks:
        level, start = parse_level(task["level"])
        fewest_pushes, fewest_moves = solve(level, start, "pushes"), solve(level, start)
        assert fewest_pushes is not None and fewest_moves is not None and fewest_moves.moves == task["moves"]
        task["pushes"] = fewest_pushes.pushes
        task["solution"] = list(fewest_moves.actions)
    return tasks


def canonical(rows: str) -> str:
    """The smallest text among a room's rotations and mirror images."""
    grid = rows.split("\n")
    images = []
    for _ in range(4):
        grid = ["".join(column) for column in zip(*grid[::-1], strict=True)]  # turned by 90 degrees
        images += ["\n".join(grid), "\n".join(row[::-1] for row in grid)]
    return min(images)


RULES = (
    "You are the player P in a room with walls #. Push every box X onto a target O. You push a box by walking into it; "
    "you cannot pull it, push it into a wall or push two at once. A box on a target is √, you on a target are S, _ is "
    f"floor. Actions: {', '.join(ACTIONS)}. Answer with one action in <action></action>."
)
"""Instructions for the grid text."""
RULES_COORDINATES = (
    "You are the player in a room of cells, r2c3 is row 2 from the top, column 3 from the left, from 0. The outermost "
    "cells and the named walls are solid. Push every box onto a target. You push a box by walking into it; you cannot "
    f"pull it, push it into a wall or push two at once. Actions: {', '.join(ACTIONS)}. Answer with one action in "
    "<action></action>."
)
"""Instructions for the coordinates text."""
