"""ALFWorld games in the package's own engine (extra `alfworld`: the packages `alfworld` and `textworld[pddl]`).

    env = AlfworldEnv(rooms="kitchen")                  # nothing to download: see below
    env = AlfworldEnv(games="~/.cache/alfworld")        # the published games, after `alfworld-download`

The package ships the domain (alfred.pddl) and the text grammar (alfred.twl2), but no games. Without `games`, the
household's generated rooms are written out as PDDL problems and played in the real engine, so the tasks of
`envs.household` are tasks here, too, with the same texts.

Snapshots: the engine (Fast Downward behind a C interface) cannot copy a state. A snapshot holds the operators applied
so far; restore rewinds the engine to the start and applies them again, without making the texts in between.

Published games carry their own grammar; those from before ALFWorld 0.4 want "put ... in/on ...", not "move ... to ...".
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import random
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forethought.config import derive_seed
from forethought.envs.actions import read_action
from forethought.envs.env import Step
from forethought.envs.household.env import HouseholdEnv, room_of
from forethought.envs.household.generate import RULES, generate, household_tasks
from forethought.envs.household.kinds import CLEANABLE, COOLABLE, HEATABLE, LAMPS, OPENABLE, SLICEABLE, can_hold
from forethought.envs.household.world import GOALS, NOTHING, Goal, Room
from forethought.envs.pools import SPLITS
from forethought.errors import ConfigError, DataError, EnvError, MissingExtraError, nearest

_TRANSLATING = threading.Lock()
_FREE: list[Any] = []  # engines that nobody plays on: loading the library again costs 30 MB, and unloading it crashes
_SPLIT_FOLDERS = {"train": "train", "validation": "valid_seen", "heldout": "valid_unseen"}


def _data_folder() -> Path:
    """Where the package keeps its domain and grammar. Importing it is avoided: it makes a folder in the home."""
    missing = [name for name in ("alfworld", "textworld", "fast_downward") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"ALFWorld games need {', '.join(missing)}: pip install 'forethought[alfworld]' (it compiles a planner: cmake "
            "and a C++ compiler must be there). The environment 'household' plays games of the same form without it"
        )
    found = importlib.util.find_spec("alfworld")
    assert found is not None and found.submodule_search_locations
    return Path(found.submodule_search_locations[0]) / "data"


# -- games from rooms ----------------------------------------------------------------------------------------------


def to_game(room: Room) -> dict[str, Any]:
    """A household room as a game: the package's domain and grammar, and a PDDL problem of our own; `names` by id.

    Ids sort as the household lists things, since the engine sorts by them.

    Raises:
        MissingExtraError: the extra is not installed.
    """
    data = _data_folder()
    problem, names = to_pddl(room)
    return {
        "pddl_domain": (data / "alfred.pddl").read_text(),
        "grammar": (data / "alfred.twl2").read_text().replace("UNKNOWN GOAL", str(room.goal)),
        "pddl_problem": problem,
        "solvable": True,
        "names": names,
    }


def to_pddl(room: Room) -> tuple[str, dict[str, str]]:
    """The room and its goal as a problem of ALFWorld's PDDL domain, and the names of its ids ("cabinet 2")."""
    order = sorted(range(len(room.receptacles)), key=lambda i: (room.receptacle_kinds[i], -i))
    places = {i: f"r{rank:03d}_{room.receptacles[i].replace(' ', '_')}" for rank, i in enumerate(order)}
    things = {i: f"o{i:03d}_{name.replace(' ', '_')}" for i, name in enumerate(room.objects)}
    kinds = set(room.object_kinds) | {"knife", "butterknife"}  # the domain names these types itself
    rooms = set(room.receptacle_kinds) | {"fridge", "microwave", "sinkbasin"}
    facts = ["atLocation agent1 l000"]
    for i, place in places.items():
        kind = room.receptacle_kinds[i]
        facts += [f"receptacleAtLocation {place} l{i + 1:03d}", f"receptacleType {place} {kind}Type"]
        facts += [f"openable {place}"] if kind in OPENABLE else []
    for i, thing in things.items():
        kind, where = room.object_kinds[i], room.start.place[i]
        facts += [f"objectType {thing} {kind}Type", f"inReceptacle {thing} {places[where]}"]
        facts += [f"objectAtLocation {thing} l{where + 1:03d}"]
        facts.append(f"{'toggleable' if kind in LAMPS else 'pickupable'} {thing}")
        able = {"heatable": HEATABLE, "coolable": COOLABLE, "cleanable": CLEANABLE, "sliceable": SLICEABLE}
        facts += [f"{name} {thing}" for name, some in able.items() if kind in some]
    facts += [f"canContain {r}Type {o}Type" for r in sorted(rooms) for o in sorted(kinds) if can_hold(r, o)]
    objects = {
        "agent": ["agent1"],
        "location": [f"l{i:03d}" for i in range(len(places) + 1)],
        "receptacle": list(places.values()),
        "object": list(things.values()),
        "rtype": [f"{kind}Type" for kind in sorted(rooms)],
        "otype": [f"{kind}Type" for kind in sorted(kinds)],
    }
    listed = "\n".join(f"{' '.join(names)} - {kind}" for kind, names in objects.items() if names)
    initial = "\n".join(f"({fact})" for fact in facts)
    problem = f"(define (problem room)\n(:domain alfred)\n(:objects\n{listed})\n(:init\n{initial})\n(:goal {_goal(room.goal)}))"
    names = {place: room.receptacles[i] for i, place in places.items()}
    return problem, names | {thing: room.objects[i] for i, thing in things.items()}


def _goal(goal: Goal) -> str:
    thing = f"(objectType ?o {goal.object}Type)"
    if goal.family == "look_at_obj_in_light":
        lamp = f"(objectType ?t {goal.receptacle}Type) (toggleable ?t) (isToggled ?t) (inReceptacle ?t ?r)"
        return (
            "(and (exists (?t - object ?r - receptacle ?a - agent ?l - location) "
            f"(and {lamp} (receptacleAtLocation ?r ?l) (atLocation ?a ?l))) "
            f"(exists (?o - object ?a - agent) (and {thing} (holds ?a ?o))))"
        )
    place = f"(receptacleType ?r {goal.receptacle}Type)"
    changed = {None: "", "clean": "(isClean ?o)", "heat": "(isHot ?o)", "cool": "(isCool ?o)"}[goal.change]
    more = ""
    if goal.family == "pick_two_obj_and_place":
        other = f"(not (= ?o ?p)) (objectType ?p {goal.object}Type) (inReceptacle ?p ?r)"
        more = f" (exists (?p - object) (and {other}))"
    inner = f"(and {thing} {place} {changed} (inReceptacle ?o ?r){more})"
    return f"(exists (?r - receptacle) (exists (?o - object) {inner}))"


def published_names(ids: list[str]) -> dict[str, str]:
    """Names of a published game's ids, numbered as ALFWorld numbers them: in the order of the ids, largest number first."""
    kinds = {}
    for name in sorted(ids):
        kind, bar, _ = name.partition("_bar_")
        if bar:
            kinds[name] = kind + ("basin" if "basin" in name and not kind.endswith("basin") else "")
    left = Counter(kinds.values())
    names = {}
    for name, kind in kinds.items():
        names[name] = f"{kind} {left[kind]}"
        left[kind] -= 1
    return names


# -- the engine ----------------------------------------------------------------------------------------------------


class _Engine:
    """A game that is played; no other that is alive shares its copy of the C library."""

    def __init__(self, game: Mapping[str, Any]):
        textworld: Any = importlib.import_module("textworld")
        from textworld.envs.pddl import PddlEnv

        try:
            self.env = _FREE.pop()
        except IndexError:
            self.env = PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True))
        weakref.finalize(self, _FREE.append, self.env).atexit = False
        with _TRANSLATING:
            argv = sys.argv
            try:  # the translator takes its settings from module variables and overwrites sys.argv
                self.env.load(dict(game))
                infos = self.env._entity_infos
                names = game.get("names") or published_names(list(infos))
                for info in infos.values():
                    info.name = names.get(info.id, info.name)
                self.first = str(self.env.reset().feedback).strip()
            finally:
                sys.argv = argv
        self.facts = list(self.env._pddl_state.facts)
        self.applied: list[tuple[int, int]] = []  # operators: id, number of effects

    @property
    def commands(self) -> list[str]:
        return list(self.env.state["admissible_commands"])

    @property
    def won(self) -> bool:
        return bool(self.env.state["won"])

    def step(self, command: str) -> str | None:
        """What is seen, or None where the command is not admissible."""
        state = self.env.state
        if command not in state["_valid_commands"]:
            return None
        action = state["_valid_actions"][state["_valid_commands"].index(command)]
        operator = self.env._pddl_state._operators[action.id]
        self.applied.append((operator.id, operator.nb_effect_atoms))
        return str(self.env.step(command)[0].feedback)

    def rewind(self, applied: list[tuple[int, int]]) -> None:
        """To the start, then forward by these operators."""
        from textworld.core import GameState
        from textworld.envs.pddl.logic import Atom

        state = self.env._pddl_state
        state.downward_lib.load_sas(state.sas.encode())
        state.remove_facts(list(state.facts))
        state.add_facts(self.facts)
        for operator, count in applied:
            effects = (Atom * count)()
            state.downward_lib.apply_operator(ctypes.c_int(operator), effects)
            for effect in effects:
                fact = effect.get_fact(state.name2type)
                state.remove_fact(fact.negate())
                state.add_fact(fact)
        self.applied = list(applied)
        self.env.state = GameState()
        self.env._last_action = None
        self.env._gather_infos()


class AlfworldEnv:
    """A game of ALFWorld's engine as one of our environments.

    `reset(task, seed)`: a task with `contents` and `goal` (of `household_tasks`) or with `game` (a path, of
    `alfworld_tasks`); without one, a game is generated, or drawn from `games`, by the seed. Observations, rewards and
    info are those of `HouseholdEnv`.

    Args:
        games: folder of published games (`$ALFWORLD_DATA`, `~` and variables are filled in); None: generated ones.
        rooms, goals: of generated games; goals also choose among the published ones.
        max_steps, rules, show_actions, success_reward, step_reward, invalid_penalty: as in `HouseholdEnv`.

    Raises:
        MissingExtraError: the extra is not installed. ConfigError: a setting is out of range.
    """

    instructions = RULES

    def __init__(
        self,
        *,
        games: str | None = None,
        rooms: tuple[str, ...] | str = ("kitchen", "livingroom", "bedroom", "bathroom"),
        goals: tuple[str, ...] | str | None = None,
        max_steps: int = 30,
        rules: bool = True,
        show_actions: bool = False,
        success_reward: float = 10.0,
        step_reward: float = 0.0,
        invalid_penalty: float = 0.1,
    ):
        _data_folder()
        self.like = HouseholdEnv(  # checks the settings
            rooms=rooms,
            goals=goals,
            max_steps=max_steps,
            rules=rules,
            show_actions=show_actions,
            success_reward=success_reward,
            step_reward=step_reward,
            invalid_penalty=invalid_penalty,
        )
        self.games, self.goals = games, tuple(GOALS) if goals is None else self.like.what.goals
        self.engine: _Engine | None = None
        self.played: Any = None  # what the engine plays: a task's room, or a file's path
        self.steps, self.invalid, self.over = 0, 0, False

    def reset(self, task: Mapping[str, Any] | None = None, seed: int = 0) -> Step:
        """Raises: DataError: the task's room or game cannot be played, or there are no games."""
        if task is not None and "game" in task:
            what = str(task["game"])
        elif task is not None and "contents" in task:
            what = room_of(task).to_task()
        elif self.games is not None:
            what = alfworld_tasks(self.games, 1, seed, goals=self.goals)[0]["game"]
        else:
            what = generate(seed, self.like.what).to_task()
        self._play(what)
        assert self.engine is not None
        self.engine.rewind([])
        self.steps, self.invalid, self.over = 0, 0, False
        actions = self.engine.commands
        text = self._shown(self.engine.first, actions)
        return Step(
            f"{RULES}\n\n{text}" if self.like.rules else text, info={"actions": actions, "goal": self._family()}
        )

    def _play(self, what: Any) -> None:
        if self.engine is None or self.played != what:
            self.engine = _Engine(read_game(what) if isinstance(what, str) else to_game(room_of(what)))
            self.played = what

    def _family(self) -> str:
        if isinstance(self.played, str):
            return next((goal for goal in GOALS if goal in self.played), "")
        return self.played["goal"]["family"]

    def _shown(self, text: str, actions: list[str]) -> str:
        return f"{text}\n\nCommands: {', '.join(actions)}." if self.like.show_actions else text

    def step(self, action: str) -> Step:
        """Raises: EnvError: before reset, or after the end."""
        engine, like = self.engine, self.like
        if engine is None or self.over:
            raise EnvError(f"ALFWorld: step {'before reset' if engine is None else 'after the end; reset it'}")
        before = self.state_key()
        command = read_action(action) or ""
        text = engine.step(command)
        self.steps += 1
        self.invalid += text is None
        won = engine.won
        truncated = self.steps >= like.max_steps and not won
        self.over = won or truncated
        reward = like.success_reward if won else 0.0 if truncated else like.step_reward
        actions = engine.commands
        family = "invalid" if text is None else "go to" if command.startswith("go to ") else command.partition(" ")[0]
        return Step(
            self._shown(NOTHING if text is None else text, actions),
            reward - like.invalid_penalty if text is None else reward,
            won,
            truncated,
            {
                "actions": actions,
                "success": won,
                "invalid": text is None,
                "effective": self.state_key() != before,
                "family": "move" if family == "put" else family,
                "goal": self._family(),
                "steps": self.steps,
                "invalid_actions": self.invalid,
            },
        )

    def snapshot(self) -> Any:
        """The operators so far; see the module's text."""
        applied = None if self.engine is None else list(self.engine.applied)
        return self.played, applied, self.steps, self.invalid, self.over

    def restore(self, snapshot: Any) -> None:
        played, applied, self.steps, self.invalid, self.over = snapshot
        if applied is None:
            self.engine, self.played = None, None
            return
        self._play(played)
        assert self.engine is not None
        self.engine.rewind(applied)

    def state_key(self) -> str | None:
        """The game and the facts that hold; "checked" (looked at before) is no part of it."""
        if self.engine is None:
            return None
        facts = sorted(str(f) for f in self.engine.env._pddl_state.facts if not f.name.startswith(("checked", "not_")))
        return f"{json.dumps(self.played)} {derive_seed(*facts):016x}"


# -- published games -----------------------------------------------------------------------------------------------


def read_game(path: str) -> dict[str, Any]:
    """A published game file (game.tw-pddl). Raises: DataError."""
    try:
        game = json.loads(Path(path).read_text())
    except (OSError, ValueError) as err:
        raise DataError(f"ALFWorld game {path}: cannot be read ({err})") from err
    if not isinstance(game, dict):
        raise DataError(f"ALFWorld game {path}: holds no object; give a game.tw-pddl file")
    missing = [key for key in ("pddl_domain", "grammar", "pddl_problem") if key not in game]
    if missing:
        raise DataError(f"ALFWorld game {path}: it has no {', '.join(missing)}; give a game.tw-pddl file")
    return game


def alfworld_tasks(
    games: str, n: int, seed: int = 0, split: str = "train", goals: tuple[str, ...] = tuple(GOALS)
) -> list[dict[str, Any]]:
    """`n` published games of a split as tasks: id, family, split, prompt, game (the file), goal (its family).

    train, validation and heldout are ALFWorld's train, valid_seen and valid_unseen. As ALFWorld does, games with movable
    receptacles or slices and games marked unsolvable are left out.

    Raises:
        DataError: no folder, or fewer games than n. ConfigError: no such split.
    """
    if split not in SPLITS:
        raise ConfigError(f"split={split!r}: one of {', '.join(SPLITS)}{nearest(split, SPLITS)}")
    root = Path(os.path.expandvars(games)).expanduser()
    folder = next(
        (f for f in (root / _SPLIT_FOLDERS[split], root / "json_2.1.1" / _SPLIT_FOLDERS[split]) if f.is_dir()), None
    )
    advice = "fetch the games with alfworld-download (into $ALFWORLD_DATA), or leave games= out to play generated rooms"
    if folder is None:
        raise DataError(
            f"games={games!r}: there is no folder {_SPLIT_FOLDERS[split]} in {root} or in its json_2.1.1; {advice}"
        )
    files = [
        path
        for path in sorted(folder.rglob("game.tw-pddl"))
        if "movable" not in str(path) and "Sliced" not in str(path) and any(goal in str(path) for goal in goals)
    ]
    random.Random(derive_seed("alfworld", split, seed)).shuffle(files)
    tasks: list[dict[str, Any]] = []
    for path in files:
        if len(tasks) == n:
            break
        if read_game(str(path)).get("solvable", False):
            goal = next(goal for goal in goals if goal in str(path))
            name = str(path.parent.relative_to(folder))
            head = {"id": f"alfworld/{name}", "family": "alfworld", "split": split, "prompt": RULES}
            tasks.append({**head, "game": str(path), "goal": goal})
    if len(tasks) < n:
        raise DataError(
            f"games={games!r}, split {split!r}: n={n}, but there are {len(tasks)} games in {folder}; {advice}"
        )
    return tasks


def tasks(n: int, seed: int, split: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Tasks for the registry: published games where `games` is set, else generated ones."""
    env = AlfworldEnv(**settings)
    if env.games is not None:
        return alfworld_tasks(env.games, n, seed, split, env.goals)
    return household_tasks(n, seed, split, env.like.what)
