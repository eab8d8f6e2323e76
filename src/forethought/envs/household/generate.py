"""Household rooms and goals from a seed, and tasks whose held-out rooms were never trained on.

A room is drawn in three steps: how many receptacles of each kind (the layout), a goal that the kind of room allows, and
what lies where, by the weights of `kinds.ROOMS`. Draws use `random()` alone, whose sequence Python promises to keep.

Splits follow ALFWorld's. "heldout" (its valid_unseen): layouts that the other splits never have. "validation" (its
valid_seen): layouts of the training split with other contents and goals. All by hashes of what they are, so they hold
for all seeds and settings.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from forethought.config import derive_seed
from forethought.envs.household.kinds import CLEANABLE, COOLABLE, HEATABLE, LAMPS, ROOMS, can_hold
from forethought.envs.household.world import GOALS, Goal, Room
from forethought.envs.pools import MAX_MISSES, SPLITS, split_of, task_id
from forethought.errors import ConfigError, DataError, nearest

T = TypeVar("T")

_APPLIANCE = {
    "pick_clean_then_place_in_recep": (CLEANABLE, "sinkbasin"),
    "pick_heat_then_place_in_recep": (HEATABLE, "microwave"),
    "pick_cool_then_place_in_recep": (COOLABLE, "fridge"),
}
RULES = (
    "You are in a room of a house and have a task to do. Commands: go to (receptacle), open (receptacle), close "
    "(receptacle), take (object) from (receptacle), move (object) to (receptacle), heat (object) with (receptacle), cool "
    "(object) with (receptacle), clean (object) with (receptacle), slice (object) with (object), use (object), examine "
    "(something), look, inventory. You can carry one object at a time. Answer with one command in <action></action>."
)


@dataclass(frozen=True)
class Rooms:
    """What to generate.

    Attributes:
        rooms: kinds of rooms, of `kinds.ROOMS`.
        goals: goal families, of `world.GOALS`; those that a room does not allow are left out there.
    """

    rooms: tuple[str, ...] = ("kitchen", "livingroom", "bedroom", "bathroom")
    goals: tuple[str, ...] = tuple(GOALS)

    def __post_init__(self):
        for field, names, known in (("rooms", self.rooms, ROOMS), ("goals", self.goals, GOALS)):
            if not names:
                raise ConfigError(f"{field}=(): give at least one of {', '.join(known)}")
            for name in names:
                if name not in known:
                    raise ConfigError(f"{field}: {name!r} is none of {', '.join(known)}{nearest(name, known)}")
        for goal in self.goals:
            if not any(_possible(room, goal) for room in self.rooms):
                raise ConfigError(
                    f"goals: {goal!r} is not possible in rooms={', '.join(self.rooms)}; name another room"
                )


@functools.cache
def _possible(room: str, family: str) -> tuple[tuple[str, str], ...]:
    """Pairs of an object and a receptacle (or lamp) kind that a family may ask for in a kind of room."""
    kind = ROOMS[room]
    things = [o for o in kind.objects if o not in LAMPS]
    if family == "look_at_obj_in_light":
        lamps = [o for o, (fewest, _) in kind.objects.items() if o in LAMPS and fewest]
        return tuple((o, lamp) for o in things for lamp in lamps)
    if family in _APPLIANCE:
        able, appliance = _APPLIANCE[family]
        things = [o for o in things if o in able] if appliance in kind.receptacles else []
    if family == "pick_two_obj_and_place":
        things = [o for o in things if kind.objects[o][1] > 1]
    # Elsewhere: an object must have a place to start from other than the receptacle it is to be put in.
    return tuple(
        (o, r) for o in things for r in kind.receptacles if can_hold(r, o) and any(w != r for w in kind.places[o])
    )


def generate(seed: int, what: Rooms | None = None) -> Room:
    """The room of a seed, of any split."""
    return _generate(seed, what or Rooms())


@functools.lru_cache(maxsize=256)
def _generate(seed: int, what: Rooms) -> Room:
    rng = random.Random(derive_seed("household", *what.rooms, "|", *what.goals, seed))
    while True:
        kind, layout = _layout(rng, what)
        room = _furnish(rng, what, kind, layout)
        if room is not None:
            return room


def _layout(rng: random.Random, what: Rooms) -> tuple[str, dict[str, int]]:
    rooms = [room for room in what.rooms if any(_possible(room, goal) for goal in what.goals)]
    kind = _pick(rng, rooms)
    return kind, {r: low + int(rng.random() * (high - low + 1)) for r, (low, high) in ROOMS[kind].receptacles.items()}


def _furnish(rng: random.Random, what: Rooms, kind: str, layout: dict[str, int]) -> Room | None:
    """None where the layout lacks what the drawn goal needs."""
    table = ROOMS[kind]
    family = _pick(rng, [goal for goal in what.goals if _possible(kind, goal)])
    pairs = [(o, r) for o, r in _possible(kind, family) if r in LAMPS or layout[r]]
    if not pairs:
        return None
    wanted, target = _pick(rng, pairs)
    contents: dict[str, list[str]] = {f"{r} {i + 1}": [] for r, count in layout.items() for i in range(count)}
    for thing, (low, high) in table.objects.items():
        if thing == wanted:
            low = max(low, 2 if family == "pick_two_obj_and_place" else 1)
        places = {r: w for r, w in table.places[thing].items() if layout[r]}
        if thing == wanted and family in ("pick_and_place_simple", "pick_two_obj_and_place"):
            places.pop(target, None)
        count = low + int(rng.random() * (high - low + 1))
        if not places and thing == wanted:
            return None
        for number in range(count if places else 0):
            where = _weighted(rng, places)
            contents[f"{where} {1 + int(rng.random() * layout[where])}"].append(f"{thing} {number + 1}")
    if family == "look_at_obj_in_light" and not any(o.startswith(target) for some in contents.values() for o in some):
        return None
    return Room(contents, Goal(family, wanted, target, int(rng.random() * 2)))


def _pick(rng: random.Random, items: Sequence[T]) -> T:
    return items[int(rng.random() * len(items))]


def _weighted(rng: random.Random, weights: dict[str, float]) -> str:
    left = rng.random() * sum(weights.values())
    for name, weight in weights.items():
        left -= weight
        if left < 0:
            return name
    return name  # rounding at the upper end


def layout_of(room: Room) -> str:
    """The receptacle kinds and how many there are of each: what rooms of the same layout share."""
    kinds = room.receptacle_kinds
    return ", ".join(f"{kind} {kinds.count(kind)}" for kind in sorted(set(kinds)))


def split_of_room(room: Room) -> str:
    """The split that owns a room with its contents and goal; see the module's text."""
    if split_of("household-layout", layout_of(room)) == "heldout":
        return "heldout"
    return "train" if split_of("household", room.key) == "train" else "validation"


def household_tasks(n: int, seed: int = 0, split: str = "train", what: Rooms | None = None) -> list[dict[str, Any]]:
    """`n` different tasks of a split: id, family, split, prompt, contents, goal. The first k of n are those that n = k gives.

    Raises:
        ConfigError: no such split, or n below 1. DataError: the split has fewer tasks than n.
    """
    if split not in SPLITS:
        raise ConfigError(f"split={split!r}: one of {', '.join(SPLITS)}{nearest(split, SPLITS)}")
    if n < 1:
        raise ConfigError(f"n={n}: give at least 1")
    what = what or Rooms()
    rng = random.Random(derive_seed("household-tasks", *what.rooms, "|", *what.goals, split, seed))
    tasks: dict[str, dict[str, Any]] = {}
    misses = 0
    while len(tasks) < n:
        room = _furnish(rng, what, *_layout(rng, what))
        if room is None or room.key in tasks or split_of_room(room) != split:
            misses += 1
            if misses >= MAX_MISSES:
                raise DataError(f"household, split {split!r}: n={n}, but only {len(tasks)} tasks were found")
            continue
        misses = 0
        head = {"id": task_id("household", room.key), "family": "household", "split": split, "prompt": RULES}
        tasks[room.key] = head | room.to_task()
    return list(tasks.values())
