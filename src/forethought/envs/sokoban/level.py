"""Sokoban rooms as numbers: cells, moves, and the two texts of a state.

A cell is `row * width + column`, counted from the top left of the whole grid, outer walls included, from 0; its name is
`r2c3`. Boxes are pushed, never pulled, one at a time. The room is solved when each target holds a box.

Texts. "grid": one row a line, cells separated by tabs: # wall, _ floor, O target, X box, √ box on a target, P player,
S player on a target (the symbols of verl-agent's Sokoban). "coordinates": a line each for player, boxes, targets, inner
walls and size; short for small models.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from forethought.errors import DataError

ACTIONS = ("up", "down", "left", "right")
UP, DOWN, LEFT, RIGHT = range(4)
OPPOSITE = (DOWN, UP, RIGHT, LEFT)
Text = Literal["grid", "coordinates"]

WALL, FLOOR, TARGET, BOX, STORED, PLAYER, PLAYER_STORED = "#_OX√PS"
_XSB = str.maketrans(" .$*@+", "_OX√PS")
MAX_SIDE = 50
_CELL = re.compile(r"r(\d{1,3})c(\d{1,3})")


class State(NamedTuple):
    """What moves: the player's cell and the boxes' cells, sorted."""

    player: int
    boxes: tuple[int, ...]


class Level:
    """What stands still. Cells that the player can never reach count as walls.

    Args:
        height, width: of the grid with its outer walls.
        floor: cells that are no wall (targets included). targets: cells to put boxes on.
    """

    __slots__ = ("height", "width", "floor", "targets", "near", "_grid", "_still")

    def __init__(self, height: int, width: int, floor: Iterable[int], targets: Iterable[int]):
        self.height, self.width = height, width
        self.floor, self.targets = frozenset(floor), frozenset(targets)
        # near[action][cell]: the neighbouring cell, or -1 where a wall or the outside is.
        self.near: tuple[list[int], ...] = tuple(
            [self._beside(cell, dr, dc) for cell in range(height * width)]
            for dr, dc in ((-1, 0), (1, 0), (0, -1), (0, 1))
        )
        rows = [
            "\t".join(
                TARGET if cell in self.targets else FLOOR if cell in self.floor else WALL
                for cell in range(row * width, (row + 1) * width)
            )
            for row in range(height)
        ]
        self._grid = list("\n".join(rows))  # cell c stands at place 2c: each cell is followed by a tab or a line end
        inner = [r * width + c for r in range(1, height - 1) for c in range(1, width - 1)]
        walls = " ".join(self.name(c) for c in inner if c not in self.floor)
        targets_text = " ".join(map(self.name, sorted(self.targets)))
        self._still = f"\ntarget {targets_text}\nwalls {walls or 'none'}\nsize {height}x{width}"

    def _beside(self, cell: int, down: int, right: int) -> int:
        row, column = divmod(cell, self.width)
        row, column = row + down, column + right
        inside = 0 <= row < self.height and 0 <= column < self.width
        return row * self.width + column if inside and row * self.width + column in self.floor else -1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Level) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __reduce__(self):
        return Level, self._identity()

    def _identity(self) -> tuple[int, int, frozenset[int], frozenset[int]]:
        return self.height, self.width, self.floor, self.targets

    def name(self, cell: int) -> str:
        """`r2c3`."""
        return f"r{cell // self.width}c{cell % self.width}"

    def solved(self, boxes: Iterable[int]) -> bool:
        return self.targets.issuperset(boxes)

    def move(self, state: State, action: int) -> State:
        """The state after an action (0 to 3: up, down, left, right); the same state where the way is blocked."""
        near = self.near[action]
        to = near[state.player]
        if to < 0:
            return state
        boxes = state.boxes
        if to not in boxes:
            return State(to, boxes)
        beyond = near[to]
        if beyond < 0 or beyond in boxes:
            return state
        return State(to, tuple(sorted([beyond if b == to else b for b in boxes])))

    def text(self, state: State, kind: Text = "grid") -> str:
        """The observation; see the module's text."""
        if kind == "coordinates":
            boxes = " ".join([self.name(b) for b in state.boxes])
            return f"player {self.name(state.player)}\nbox {boxes}{self._still}"
        grid = self._grid.copy()
        for box in state.boxes:
            grid[2 * box] = STORED if box in self.targets else BOX
        grid[2 * state.player] = PLAYER_STORED if state.player in self.targets else PLAYER
        return "".join(grid)

    def rows(self, state: State) -> str:
        """The grid without tabs: for files and keys."""
        return self.text(state).replace("\t", "")

    def read(self, text: str) -> State | None:
        """The state that a text in either form describes, or None where it is none of this level's.

        For predictions of a world model: walls, targets and size must be right as well.
        """
        text = text.strip()
        if text.startswith("player"):
            match = re.fullmatch(
                rf"player ({_CELL.pattern})\nbox ({_CELL.pattern}(?: {_CELL.pattern})*)(.*)", text, re.S
            )
            if not match or match.group(match.re.groups) != self._still:
                return None
            cells = [int(r) * self.width + int(c) for r, c in _CELL.findall(text[: match.start(match.re.groups)])]
            state = State(cells[0], tuple(sorted(cells[1:])))
        else:
            try:
                level, state = parse_level(text)
            except DataError:
                return None
            if level != self:
                return None
        distinct = len({state.player, *state.boxes}) == len(self.targets) + 1
        return state if distinct and self.floor.issuperset((state.player, *state.boxes)) else None


def parse_level(text: str | Sequence[str]) -> tuple[Level, State]:
    """A room in grid symbols (tabs or spaces between cells allowed) or in the usual ones (`# .$*@+` and spaces).

    Raises:
        DataError: with row and column: an unknown symbol, no or several players, another number of boxes than of
            targets, none at all, a box or target that the player cannot get to, or a grid that is too large.
    """
    rows = text.split("\n") if isinstance(text, str) else list(text)
    while rows and not rows[0].strip():
        rows.pop(0)
    while rows and not rows[-1].strip():
        rows.pop()
    ours = any(symbol in row for row in rows for symbol in "_OX√PS")
    rows = ["".join(row.split()) if ours else row.rstrip().translate(_XSB) for row in rows]
    height, width = len(rows), max(map(len, rows), default=0)
    if not 1 <= height <= MAX_SIDE or width > MAX_SIDE:
        raise DataError(
            f"Sokoban level of {height} rows and {width} columns: give at least one, at most {MAX_SIDE} each"
        )
    found: dict[str, list[int]] = {symbol: [] for symbol in "#_OX√PS"}
    for r, row in enumerate(rows):
        for c, symbol in enumerate(row):
            if symbol not in found:
                raise DataError(f"Sokoban level, row {r}, column {c}: {symbol!r} is no symbol; use # _ O X √ P S")
            found[symbol].append(r * width + c)
    players = found[PLAYER] + found[PLAYER_STORED]
    if len(players) != 1:
        raise DataError(f"Sokoban level: {len(players)} players (P or S); give exactly one")
    boxes, targets = found[BOX] + found[STORED], found[TARGET] + found[STORED] + found[PLAYER_STORED]
    if len(boxes) != len(targets) or not boxes:
        raise DataError(f"Sokoban level: {len(boxes)} boxes and {len(targets)} targets; give as many, and at least one")
    inside = Level(height, width, [cell for symbol in "_OX√PS" for cell in found[symbol]], targets)
    reached = reach(inside, players[0], ())
    for what, cells in (("box", boxes), ("target", targets)):
        for cell in cells:
            if cell not in reached:
                raise DataError(f"Sokoban level: the player cannot get to the {what} at {inside.name(cell)}")
    return Level(height, width, reached, targets), State(players[0], tuple(sorted(boxes)))


def reach(level: Level, player: int, boxes: Iterable[int]) -> set[int]:
    """Cells that the player can walk to without a push."""
    seen = {player}
    stack = [player]
    near = level.near
    boxes = set(boxes)
    while stack:
        cell = stack.pop()
        for beside in near:
            to = beside[cell]
            if to >= 0 and to not in seen and to not in boxes:
                seen.add(to)
                stack.append(to)
    return seen
