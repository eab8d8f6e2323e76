"""A room, its state, what commands do and what is seen: the rules and the texts of ALFWorld (grammar of 0.4 and later).

The rules are those of ALFWorld's PDDL domain: one object can be carried; heating needs the object in hand and the agent
at a microwave (open or not), cooling a fridge, cleaning a sinkbasin; heating undoes cooling and the other way round; a
lamp, once used, is on; one cannot go to where one is already, and of objects only the one in hand can be examined (so
does the package's engine, whose domain reads otherwise). Lists of objects are sorted by name and number; receptacles are
listed by name, largest number first. `adapters.textworld` plays the same rooms in the package's own engine, and the
tests compare the two, text by text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from forethought.envs.household.kinds import (
    CLEANABLE,
    COOLABLE,
    HEATABLE,
    KNIVES,
    LAMPS,
    OBJECTS,
    OPENABLE,
    RECEPTACLES,
    SLICEABLE,
    can_hold,
)
from forethought.errors import DataError, nearest

NOTHING = "Nothing happens."
WELCOME = "-= Welcome to TextWorld, ALFRED! =-"
HELP = """Available commands:
  look:                             look around your current location
  inventory:                        check your current inventory
  go to (receptacle):               move to a receptacle
  open (receptacle):                open a receptacle
  close (receptacle):               close a receptacle
  take (object) from (receptacle):  take an object from a receptacle
  move (object) to (receptacle):  place an object in or on a receptacle
  examine (something):              examine a receptacle or an object
  use (object):                     use an object
  heat (object) with (receptacle):  heat an object using a receptacle
  clean (object) with (receptacle): clean an object using a receptacle
  cool (object) with (receptacle):  cool an object using a receptacle
  slice (object) with (object):     slice an object using a sharp object
"""
FAMILIES = (
    *("go to", "open", "close", "take", "move", "heat", "clean", "cool", "use", "slice"),
    *("examine", "look", "inventory", "help", "invalid"),
)
"""Kinds of transitions; "invalid" is whatever the room answers with `NOTHING`."""

GOALS: dict[str, tuple[str, str]] = {
    "pick_and_place_simple": ("put a {object} in {receptacle}", "put some {object} on {receptacle}"),
    "pick_clean_then_place_in_recep": (
        "put a clean {object} in {receptacle}",
        "clean some {object} and put it in {receptacle}",
    ),
    "pick_heat_then_place_in_recep": (
        "put a hot {object} in {receptacle}",
        "heat some {object} and put it in {receptacle}",
    ),
    "pick_cool_then_place_in_recep": (
        "put a cool {object} in {receptacle}",
        "cool some {object} and put it in {receptacle}",
    ),
    "pick_two_obj_and_place": ("put two {object} in {receptacle}", "find two {object} and put them in {receptacle}"),
    "look_at_obj_in_light": ("look at {object} under the {receptacle}", "examine the {object} with the {receptacle}"),
}
"""Goal families and their wordings; for the last one the receptacle is a lamp."""
_CHANGE = {
    "pick_clean_then_place_in_recep": "clean",
    "pick_heat_then_place_in_recep": "heat",
    "pick_cool_then_place_in_recep": "cool",
}


@dataclass(frozen=True)
class Goal:
    """What is to be done; `receptacle` is the lamp's kind in "look_at_obj_in_light"."""

    family: str
    object: str
    receptacle: str
    wording: int = 0

    def __str__(self) -> str:
        return GOALS[self.family][self.wording].format(object=self.object, receptacle=self.receptacle)

    @property
    def change(self) -> str | None:
        """clean, heat, cool, or None."""
        return _CHANGE.get(self.family)


class State(NamedTuple):
    """What changes. Objects and receptacles are numbers of the room's lists; sets are bit masks.

    at: the receptacle where the agent stands, -1 in the middle of the room. place: for each object the receptacle that
    holds it, -1 for the one in hand.
    """

    at: int
    held: int
    opened: int
    place: tuple[int, ...]
    clean: int = 0
    hot: int = 0
    cool: int = 0
    sliced: int = 0
    used: int = 0


class Room:
    """What does not change, and the rules.

    Args:
        contents: receptacle -> objects in or on it at the start, by full names ("mug 2"). Names are a kind and a number.
        goal: see `Goal`.

    Raises:
        DataError: a name is of no known kind, an object lies where it cannot, or in two places; the goal is of no known
            family, has kinds that the room lacks, or cannot be reached.
    """

    def __init__(self, contents: Mapping[str, Sequence[str]], goal: Goal):
        def by_name(name: str) -> tuple[str, int]:
            kind, _, number = name.rpartition(" ")
            return kind, int(number)

        for name in [*contents, *(o for objects in contents.values() for o in objects)]:
            kind, _, number = name.rpartition(" ")
            known = RECEPTACLES if name in contents else OBJECTS
            if kind not in known or not (number.isascii() and number.isdigit()):
                what = "receptacle" if name in contents else "object"
                raise DataError(f"household room: {name!r} is no {what} with a number{nearest(kind, known)}")
        self.receptacles = tuple(sorted(contents, key=by_name))
        self.objects = tuple(sorted((o for objects in contents.values() for o in objects), key=by_name))
        if len(set(self.objects)) < len(self.objects):
            twice = next(o for o in self.objects if self.objects.count(o) > 1)
            raise DataError(f"household room: {twice!r} lies in two places")
        self.receptacle_kinds = tuple(name.rpartition(" ")[0] for name in self.receptacles)
        self.object_kinds = tuple(name.rpartition(" ")[0] for name in self.objects)
        self.goal = goal
        self._receptacle = {name: i for i, name in enumerate(self.receptacles)}
        self._object = {name: i for i, name in enumerate(self.objects)}
        place = {o: self._receptacle[r] for r, objects in contents.items() for o in objects}
        for name, where in place.items():
            if not can_hold(self.receptacle_kinds[where], name.rpartition(" ")[0]):
                raise DataError(f"household room: {name!r} cannot lie in or on {self.receptacles[where]!r}")
        self.start = State(-1, -1, 0, tuple(place[o] for o in self.objects))
        self.key = hashlib.blake2b(repr((self.receptacles, self.objects, self.start.place, goal)).encode()).hexdigest()[
            :16
        ]
        self._prepare()
        self._check_goal()

    def _prepare(self) -> None:
        kinds, places = self.object_kinds, self.receptacle_kinds
        self._openable = [k in OPENABLE for k in places]
        self._fits = [[can_hold(r, o) for r in places] for o in kinds]
        self._portable = [k not in LAMPS for k in kinds]
        self._goal_receptacles = frozenset(i for i, k in enumerate(places) if k == self.goal.receptacle)
        self._goal_objects = tuple(i for i, k in enumerate(kinds) if k == self.goal.object)
        self._lamps = tuple(i for i, k in enumerate(kinds) if k == self.goal.receptacle)
        self._wanted = len(self._goal_objects) >= (2 if self.goal.family == "pick_two_obj_and_place" else 1)
        self._appliance = {
            verb: frozenset(i for i, k in enumerate(places) if k == appliance)
            for verb, appliance in (("heat", "microwave"), ("clean", "sinkbasin"), ("cool", "fridge"))
        }
        self._changeable = {
            verb: frozenset(i for i, k in enumerate(kinds) if k in some)
            for verb, some in (("heat", HEATABLE), ("clean", CLEANABLE), ("cool", COOLABLE))
        }
        self._listed = [f"a {name}" for name in self.objects]
        order = sorted(range(len(places)), key=lambda i: (places[i], -i))
        self._overview = _list([f"a {self.receptacles[i]}" for i in order])
        self._go = [f"go to {name}" for name in self.receptacles]

    def _check_goal(self) -> None:
        goal = self.goal
        if goal.family not in GOALS:
            raise DataError(f"household goal: family {goal.family!r}{nearest(goal.family, GOALS)}")
        if goal.wording not in (0, 1):
            raise DataError(f"household goal: wording {goal.wording}: 0 or 1")
        changed = {"heat": HEATABLE, "clean": CLEANABLE, "cool": COOLABLE}
        if not self._wanted:
            why = f"the room has {len(self._goal_objects)} {goal.object}"
        elif goal.family == "look_at_obj_in_light":
            why = "" if goal.receptacle in LAMPS and self._lamps else f"the room has no lamp {goal.receptacle!r}"
        elif not self._goal_receptacles:
            why = f"the room has no {goal.receptacle}"
        elif not can_hold(goal.receptacle, goal.object):
            why = f"a {goal.receptacle} cannot hold a {goal.object}"
        elif goal.change and (goal.object not in changed[goal.change] or not self._appliance[goal.change]):
            why = f"there is no way to {goal.change} a {goal.object} here"
        else:
            why = ""
        if not why and self.won(self.start):
            why = "it is reached at the start"
        if why:
            raise DataError(f"household goal {str(goal)!r}: {why}")

    # -- what is seen --
    def introduction(self) -> str:
        """The first observation."""
        return f"{WELCOME}\n\n{self._middle()}\n\nYour task is to: {self.goal}."

    def _middle(self) -> str:
        return f"You are in the middle of a room. Looking quickly around you, you see {self._overview}."

    def contents(self, state: State, receptacle: int) -> str:
        """A receptacle as it looks to an agent in front of it."""
        name = self.receptacles[receptacle]
        if self._openable[receptacle]:
            if not state.opened >> receptacle & 1:
                return f"The {name} is closed."
            start = f"The {name} is open. In it, you see "
        else:
            start = f"On the {name}, you see "
        listed = self._listed
        return f"{start}{_list([listed[i] for i, where in enumerate(state.place) if where == receptacle])}."

    def visible(self, state: State, receptacle: int) -> bool:
        """Whether what it holds can be seen by an agent in front of it."""
        return not self._openable[receptacle] or bool(state.opened >> receptacle & 1)

    # -- what can be done --
    def fits(self, thing: int, receptacle: int) -> bool:
        """Whether an object may be put in or on a receptacle."""
        return self._fits[thing][receptacle]

    def admissible(self, state: State) -> list[str]:
        """The commands that do not answer `NOTHING`, sorted."""
        at, held = state.at, state.held
        out = ["help", "inventory", "look", *self._go]
        if held >= 0:
            out.append(f"examine {self.objects[held]}")
        if at < 0:
            out.sort()
            return out
        name = self.receptacles[at]
        out.remove(f"go to {name}")
        out.append(f"examine {name}")
        if self._openable[at]:
            out.append(f"{'close' if state.opened >> at & 1 else 'open'} {name}")
        visible = self.visible(state, at)
        objects, kinds = self.objects, self.object_kinds
        knife = held >= 0 and kinds[held] in KNIVES
        for i, where in enumerate(state.place):
            if where != at:
                continue
            if not self._portable[i]:
                out.append(f"use {objects[i]}")
            elif visible and held < 0:
                out.append(f"take {objects[i]} from {name}")
            if knife and kinds[i] in SLICEABLE:
                out.append(f"slice {objects[i]} with {objects[held]}")
        if held >= 0:
            if visible and self._fits[held][at]:
                out.append(f"move {objects[held]} to {name}")
            for verb, appliances in self._appliance.items():
                if at in appliances and held in self._changeable[verb]:
                    out.append(f"{verb} {objects[held]} with {name}")
        out.sort()
        return out

    def apply(self, state: State, command: str) -> tuple[State, str, str]:
        """A command's outcome: the state after it, what is seen, and its family (see `FAMILIES`)."""
        words = command.split(" ")
        verb, n = words[0], len(words)
        at, held = state.at, state.held
        if verb == "go" and n == 4 and words[1] == "to":
            to = self._receptacle.get(f"{words[2]} {words[3]}", -1)
            if to >= 0 and to != at:
                return (
                    state._replace(at=to),
                    f"You arrive at {self.receptacles[to]}. {self.contents(state, to)}",
                    "go to",
                )
        elif n == 1:
            if verb == "look":
                facing = f"You are facing the {self.receptacles[at]}. Next to it, you see nothing." if at >= 0 else ""
                return state, facing or self._middle(), "look"
            if verb == "inventory":
                carried = f"You are carrying: {self._listed[held]}." if held >= 0 else "You are not carrying anything."
                return state, carried, "inventory"
            if verb == "help":
                return state, HELP, "help"
        elif n == 3:
            return self._on_one(state, verb, f"{words[1]} {words[2]}")
        elif n == 6:
            return self._on_two(state, verb, f"{words[1]} {words[2]}", words[3], f"{words[4]} {words[5]}")
        return state, NOTHING, "invalid"

    def _on_one(self, state: State, verb: str, name: str) -> tuple[State, str, str]:
        """open, close, examine, use."""
        at = state.at
        here = at >= 0 and self._receptacle.get(name, -1) == at
        if verb in ("open", "close") and here and self._openable[at]:
            bit = 1 << at
            if verb == "open" and not state.opened & bit:
                after = state._replace(opened=state.opened | bit)
                return after, f"You open the {name}. {self.contents(after, at)}", "open"
            if verb == "close" and state.opened & bit:
                return state._replace(opened=state.opened ^ bit), f"You close the {name}.", "close"
        elif verb == "examine" and here:
            return state, self.contents(state, at), "examine"
        elif verb == "examine" and state.held >= 0 and self.objects[state.held] == name:
            return state, self._examined(state, state.held), "examine"
        elif verb == "use":
            thing = self._object.get(name, -1)
            if thing >= 0 and at >= 0 and state.place[thing] == at and not self._portable[thing]:
                return state._replace(used=state.used | 1 << thing), f"You turn on the {name}.", "use"
        return state, NOTHING, "invalid"

    def _examined(self, state: State, thing: int) -> str:
        name = self.objects[thing]
        clean, hot, cool, sliced = (mask >> thing & 1 for mask in (state.clean, state.hot, state.cool, state.sliced))
        heat = "hot" if hot else "cool" if cool else ""
        if sliced:
            words = [" and ".join(filter(None, [heat, "clean" if clean else ""])), "sliced", name]
            return f"This is a {' '.join(filter(None, words))}."
        if clean:
            return f"This is a {heat + ' and ' if heat else ''}clean {name}."
        if heat:
            return f"This is a {'hot' if hot else 'cold'} {name}."
        return f"There's nothing special about {name}."

    def _on_two(self, state: State, verb: str, first: str, link: str, second: str) -> tuple[State, str, str]:
        """take, move, heat, clean, cool, slice."""
        at, held = state.at, state.held
        thing = self._object.get(first, -1)
        if thing < 0 or at < 0:
            return state, NOTHING, "invalid"
        here = self._receptacle.get(second, -1) == at
        if verb == "take" and link == "from":
            if here and held < 0 and state.place[thing] == at and self._portable[thing] and self.visible(state, at):
                after = state._replace(held=thing, place=_put(state.place, thing, -1))
                return after, f"You pick up the {first} from the {second}.", "take"
        elif verb == "move" and link == "to":
            if here and held == thing and self._fits[thing][at] and self.visible(state, at):
                after = state._replace(held=-1, place=_put(state.place, thing, at))
                return after, f"You move the {first} to the {second}.", "move"
        elif verb in self._appliance and link == "with":
            if here and held == thing and at in self._appliance[verb] and thing in self._changeable[verb]:
                bit = 1 << thing
                if verb == "clean":
                    after = state._replace(clean=state.clean | bit)
                elif verb == "heat":
                    after = state._replace(hot=state.hot | bit, cool=state.cool & ~bit)
                else:
                    after = state._replace(cool=state.cool | bit, hot=state.hot & ~bit)
                return after, f"You {verb} the {first} using the {second}.", verb
        elif verb == "slice" and link == "with":
            sliceable = state.place[thing] == at and self.object_kinds[thing] in SLICEABLE
            knife = held >= 0 and self.objects[held] == second and self.object_kinds[held] in KNIVES
            if sliceable and knife:
                after = state._replace(sliced=state.sliced | 1 << thing)
                return after, f"You sliced the {first} with the {second}.", "slice"
        return state, NOTHING, "invalid"

    def won(self, state: State) -> bool:
        """Whether the goal holds."""
        goal, place = self.goal, state.place
        if goal.family == "look_at_obj_in_light":
            lit = any(state.used >> lamp & 1 and place[lamp] == state.at for lamp in self._lamps)
            return lit and state.held in self._goal_objects
        targets = self._goal_receptacles
        if goal.family == "pick_two_obj_and_place":
            where = [place[i] for i in self._goal_objects if place[i] in targets]
            return len(set(where)) < len(where)
        done = {"clean": state.clean, "heat": state.hot, "cool": state.cool}.get(goal.change or "", -1)
        return any(place[i] in targets and done >> i & 1 for i in self._goal_objects)

    def to_task(self) -> dict[str, Any]:
        """`contents` and `goal` as plain values."""
        contents: dict[str, list[str]] = {name: [] for name in self.receptacles}
        for name, where in zip(self.objects, self.start.place, strict=True):
            contents[self.receptacles[where]].append(name)
        goal = self.goal
        told = {"family": goal.family, "object": goal.object, "receptacle": goal.receptacle, "wording": goal.wording}
        return {"contents": contents, "goal": told}


def _put(place: tuple[int, ...], thing: int, where: int) -> tuple[int, ...]:
    return (*place[:thing], where, *place[thing + 1 :])


def _list(items: Sequence[str]) -> str:
    """ALFWorld's lists: `a`, `a, and b`, `a, b, and c`, `nothing`."""
    if len(items) < 2:
        return items[0] if items else "nothing"
    return f"{', '.join(items[:-1])}, and {items[-1]}"
