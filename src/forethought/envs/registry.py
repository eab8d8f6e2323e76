"""Environments by name: what `--env` takes.

    source = find_env("sokoban:boxes=2,size=7")
    tasks = source.tasks(64, seed=1, split="train")
    env = source()                       # a fresh one for each episode
    step = env.reset(tasks[0], tasks[0]["seed"])

A spec is a name of `ENVS`, or `my_env.py:Env` or `package.module:Env`. Settings follow a colon, separated by commas; a
bare word first sets the one that the name is usually asked with: `household:mini,max_steps=20`,
`household:[kitchen,bathroom]`. An environment of your own may have a function `tasks(n, seed, split)` (a
staticmethod of the class, or an attribute of the factory) that makes its tasks.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from forethought.config import apply_overrides, derive_seed
from forethought.envs.env import Env
from forethought.errors import ConfigError, nearest
from forethought.rewards.loading import load_object

Task = Mapping[str, Any]


@dataclass(frozen=True)
class Entry:
    """A name that `--env` takes.

    Attributes:
        make: `package.module:Name` of what makes an environment; its keyword arguments are the settings.
        tasks: `package.module:name` of a function (n, seed, split, settings) -> tasks; None: tasks are seeds.
        first: the setting that a bare word sets.
        line: one line on it.
        extra: of this package that it needs.
    """

    make: str
    line: str
    tasks: str | None = None
    first: str | None = None
    extra: str | None = None


ENVS: dict[str, Entry] = {
    "sokoban": Entry(
        "forethought.envs.sokoban:SokobanEnv",
        "push boxes onto targets; rooms of measured difficulty",
        tasks="forethought.envs.registry:_sokoban_tasks",
    ),
    "household": Entry(
        "forethought.envs.household:HouseholdEnv",
        "ALFWorld's texts and goals in generated rooms",
        tasks="forethought.envs.registry:_household_tasks",
        first="rooms",
    ),
    "alfworld": Entry(
        "forethought.envs.adapters.alfworld:AlfworldEnv",
        "ALFWorld's own engine, on the household's rooms or the published games",
        tasks="forethought.envs.adapters.alfworld:tasks",
        first="rooms",
        extra="alfworld",
    ),
    "textworld": Entry(
        "forethought.envs.adapters.textworld:TextWorldEnv", "TextWorld's own generated games", extra="textworld"
    ),
    "tools": Entry(
        "forethought.envs.adapters.tau2:Tau2Env",
        "tau2's tool domains: airline, retail, telecom, mock",
        tasks="forethought.envs.adapters.tau2:tasks",
        first="domain",
        extra="tools",
    ),
    "wm": Entry(
        "forethought.envs.world_model:world_model_env",
        "a world model in place of its environment: wm:FOLDER",
        tasks="forethought.envs.world_model:world_model_tasks",
        first="folder",
    ),
    "gym": Entry(
        "forethought.envs.registry:_gym",
        "a Gymnasium environment by its id",
        first="make",
        extra="gym",
    ),
}


@dataclass(frozen=True)
class EnvSource:
    """A factory of environments with its tasks. Call it for a fresh environment.

    Attributes:
        spec: as it was asked for. settings: of the environment, read and checked.
        make: what is called with the settings.
        own_tasks: makes tasks; None: tasks are seeds.
    """

    spec: str
    make: Callable[..., Env]
    settings: dict[str, Any] = field(default_factory=dict)
    own_tasks: Callable[[int, int, str, dict[str, Any]], list[dict[str, Any]]] | None = None

    def __call__(self) -> Env:
        return self.make(**self.settings)

    def tasks(self, n: int, seed: int = 0, split: str = "train") -> list[dict[str, Any]]:
        """`n` tasks for `reset(task, task["seed"])`: at least id, prompt, seed.

        The world's own tasks where it has them; else each is a seed, and the splits have seeds of their own.

        Raises:
            ConfigError: n below 1. What the world's own tasks raise.
        """
        if n < 1:
            raise ConfigError(f"n={n}: give at least 1")
        if self.own_tasks is not None:
            tasks = self.own_tasks(n, seed, split, self.settings)
        else:
            tasks = [{"id": f"{split}/{seed}/{i}", "prompt": ""} for i in range(n)]
        return [{"seed": derive_seed("task", split, str(task["id"])) % 2**31, **task} for task in tasks]


def find_env(spec: str) -> EnvSource:
    """The environments that a spec names; their settings are checked by making one.

    Raises:
        ConfigError: no such name (with the nearest one), an unknown setting or a value out of range, a file that cannot
            be loaded, or an object that makes no environments. MissingExtraError: the name needs an extra.
    """
    name, _, rest = spec.partition(":")
    entry = ENVS.get(name)
    if entry is None:
        if re.fullmatch(r".+:[A-Za-z_][\w.]*", spec):
            return _of_object(spec)
        hint = nearest(name, ENVS) or f"; one of {', '.join(ENVS)}"
        raise ConfigError(f"environment {spec!r}: no such name{hint}; for your own write 'file.py:NAME'")
    make = load_object(entry.make, "environment")
    settings = _settings(spec, make, _items(rest, entry.first, spec))
    tasks = load_object(entry.tasks, "tasks of an environment") if entry.tasks else None
    make(**settings)
    return EnvSource(spec, make, settings, tasks)


def _of_object(spec: str) -> EnvSource:
    try:
        make: Any = load_object(spec, "environment")
    except ConfigError as err:
        raise ConfigError(f"{err}{nearest(spec.partition(':')[0], ENVS)}") from err
    if not callable(make):
        hint = "; name its class, or a function that makes one" if hasattr(make, "reset") else ""
        raise ConfigError(
            f"environment {spec!r}: {make!r} ({type(make).__name__}) cannot be called to make an environment{hint}"
        )
    tasks: Any = getattr(make, "tasks", None)
    if tasks is not None and not callable(tasks):
        raise ConfigError(
            f"environment {spec!r}: its tasks are no function; make it tasks(n, seed, split) -> list of dicts"
        )

    def own(n: int, seed: int, split: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
        return typing.cast(Any, tasks)(n, seed, split)

    return EnvSource(spec, typing.cast(Any, make), {}, None if tasks is None else own)


def _items(text: str, first: str | None, spec: str) -> list[str]:
    """`name=value` for each part; commas inside brackets do not separate."""
    parts = [part.strip() for part in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", text)]
    for i, part in enumerate(parts):
        if not re.match(r"[\w.]+=", part):
            if i or first is None:
                raise ConfigError(f"environment {spec!r}: {part!r}: write name=value")
            parts[0] = f"{first}={part}"
    return parts


def _settings(spec: str, make: Callable[..., Env], items: list[str]) -> dict[str, Any]:
    """The given settings by name, read by the parameters' types."""
    function: Any = make.__init__ if inspect.isclass(make) else make
    hints: dict[str, Any] = typing.get_type_hints(function)
    parameters = inspect.signature(make).parameters.values()
    given = {item.partition("=")[0].strip() for item in items}
    if missing := [p.name for p in parameters if p.default is p.empty and p.name not in given]:
        name = spec.partition(":")[0]
        raise ConfigError(f"environment {spec!r}: {missing[0]} is missing; write {name}:{missing[0]}=...")
    fields = [(p.name, hints[p.name], field(default=None if p.default is p.empty else p.default)) for p in parameters]
    cls = dataclasses.make_dataclass("Settings", fields, frozen=True, kw_only=True)
    read = apply_overrides(cls(), items, source=f"environment {spec!r}")
    return {p.name: getattr(read, p.name) for p in parameters if p.name in given}


def _sokoban_tasks(n: int, seed: int, split: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    from forethought.envs.sokoban import SokobanEnv, sokoban_tasks

    env = SokobanEnv(**settings)
    return [{**task, "prompt": env.instructions} for task in sokoban_tasks(n, seed, split, env.difficulty)]


def _household_tasks(n: int, seed: int, split: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    from forethought.envs.household import HouseholdEnv, household_tasks

    return household_tasks(n, seed, split, HouseholdEnv(**settings).what)


def _gym(*, make: str, max_turns: int | None = None, snapshot: Literal["deepcopy", "replay"] = "deepcopy") -> Env:
    from forethought.envs.adapters.gymnasium import GymnasiumEnv

    return GymnasiumEnv(make, max_turns=max_turns, snapshot=snapshot)
