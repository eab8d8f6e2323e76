"""An expert for the household: demonstrations, upper bounds, and the first policy to collect transitions with.

A hand-coded planner. `knows="all"` walks straight to what it needs. `knows="seen"` knows a receptacle's contents once it
has looked at them, and looks in the likeliest places first, by the world's placement weights: what an agent that has
learned the world would do.
"""

from __future__ import annotations

import functools
from typing import Literal

from forethought.envs.household.env import HouseholdEnv
from forethought.envs.household.kinds import ROOMS
from forethought.envs.household.world import Room, State
from forethought.errors import ConfigError, EnvError

_WITH = {"heat": "microwave", "clean": "sinkbasin", "cool": "fridge"}


class Expert:
    """Gives the next command for an environment; ask once before each step, from the first on.

    Args:
        env: reset already.
        knows: "seen" or "all", see the module's text.
    """

    def __init__(self, env: HouseholdEnv, knows: Literal["seen", "all"] = "seen"):
        if knows not in ("seen", "all"):
            raise ConfigError(f"knows={knows!r}: 'seen' or 'all'")
        if env.room is None:
            raise EnvError("household expert: reset the environment first")
        self.env, self.room = env, env.room
        self.seen = set(range(len(self.room.receptacles))) if knows == "all" else set()

    def action(self) -> str:
        """The next command."""
        room, state = self.room, self.env.state
        if state.at >= 0 and room.visible(state, state.at):
            self.seen.add(state.at)
        goal = room.goal
        if goal.family == "look_at_obj_in_light":
            return self._look(room, state)
        wanted = [i for i, kind in enumerate(room.object_kinds) if kind == goal.object]
        targets = [i for i, kind in enumerate(room.receptacle_kinds) if kind == goal.receptacle]
        two = goal.family == "pick_two_obj_and_place"
        # Two objects must come to one receptacle: the one that holds one already, where that is known.
        holding = [r for r in targets if r in self.seen and any(state.place[i] == r for i in wanted)]
        target = holding[0] if two and holding else targets[0]
        if state.held in wanted:
            if goal.change and not self._changed(state, state.held):
                appliance = room.receptacle_kinds.index(_WITH[goal.change])
                words = f"{goal.change} {room.objects[state.held]} with {room.receptacles[appliance]}"
                return words if state.at == appliance else self._go(appliance)
            return self._move(room, state, target)
        open_ones = [i for i in wanted if not (two and state.place[i] == target)]
        return self._fetch(room, state, open_ones, goal.object)

    def _changed(self, state: State, thing: int) -> bool:
        mask = {"heat": state.hot, "clean": state.clean, "cool": state.cool}[self.room.goal.change or ""]
        return bool(mask >> thing & 1)

    def _look(self, room: Room, state: State) -> str:
        goal = room.goal
        if state.held < 0 or room.object_kinds[state.held] != goal.object:
            wanted = [i for i, kind in enumerate(room.object_kinds) if kind == goal.object]
            return self._fetch(room, state, wanted, goal.object)
        lamps = [i for i, kind in enumerate(room.object_kinds) if kind == goal.receptacle]
        known = [i for i in lamps if state.place[i] in self.seen]
        if not known:
            return self._search(room, state, goal.receptacle)
        if state.place[known[0]] != state.at:
            return self._go(state.place[known[0]])
        return f"use {room.objects[known[0]]}"

    def _fetch(self, room: Room, state: State, wanted: list[int], kind: str) -> str:
        if state.held >= 0:  # something else: put it down where it fits
            fits = [r for r in range(len(room.receptacles)) if room.fits(state.held, r)]
            return self._move(room, state, state.at if state.at in fits else fits[0])
        known = [i for i in wanted if state.place[i] in self.seen]
        if not known:
            return self._search(room, state, kind)
        here = [i for i in known if state.place[i] == state.at]
        thing = (here or known)[0]
        where = state.place[thing]
        if where != state.at:
            return self._go(where)
        if not room.visible(state, where):
            return f"open {room.receptacles[where]}"
        return f"take {room.objects[thing]} from {room.receptacles[where]}"

    def _move(self, room: Room, state: State, target: int) -> str:
        if state.at != target:
            return self._go(target)
        if not room.visible(state, target):
            return f"open {room.receptacles[target]}"
        return f"move {room.objects[state.held]} to {room.receptacles[target]}"

    def _search(self, room: Room, state: State, kind: str) -> str:
        if state.at >= 0 and not room.visible(state, state.at):
            return f"open {room.receptacles[state.at]}"
        kinds = room.receptacle_kinds
        likely = _likely(kind)
        unseen = [r for r in range(len(kinds)) if r not in self.seen]
        return self._go(max(unseen, key=lambda r: (likely.get(kinds[r], 0.0) / kinds.count(kinds[r]), -r)))

    def _go(self, receptacle: int) -> str:
        return f"go to {self.room.receptacles[receptacle]}"


@functools.cache
def _likely(kind: str) -> dict[str, float]:
    """Receptacle kind -> the share of an object kind's instances there, over all kinds of rooms."""
    shares: dict[str, float] = {}
    for room in ROOMS.values():
        places = room.places.get(kind, {})
        for where, weight in places.items():
            shares[where] = shares.get(where, 0.0) + weight / sum(places.values())
    return shares
