"""TextWorld's own games (extra `textworld`): generated and compiled by the package, nothing is downloaded.

    env = TextWorldEnv(world_size=3, quest_length=4)      # find and use things; one quest a game
    env = TextWorldEnv(game="my_game.z8")                  # a game file of yours

A generated game is compiled by Inform 7, which the package carries (about two seconds, kept for the process). Snapshots
hold the commands so far; restore starts the game anew and plays them (games are deterministic). ALFWorld's games have an
environment of their own, `adapters.alfworld`; the household needs no extra.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import importlib.util
import io
import math
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forethought.config import derive_seed
from forethought.envs.actions import read_action
from forethought.envs.env import Step
from forethought.errors import ConfigError, DataError, EnvError, MissingExtraError

_BANNER = set("_|$\\/> ")  # the title is a drawing of these
_ENDED = "Would you like to RESTART, RESTORE a saved game"


def _need() -> None:
    if importlib.util.find_spec("textworld") is None:
        raise MissingExtraError(
            "TextWorld games need textworld: pip install 'forethought[textworld]'. The environment 'household' needs no extra"
        )


@functools.cache
def _folder() -> Path:
    folder = tempfile.mkdtemp(prefix="textworld-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@functools.lru_cache(maxsize=512)
def make_game(seed: int, world_size: int, nb_objects: int, quest_length: int) -> str:
    """The file of a generated game. Raises: MissingExtraError. EnvError: the package could not make it."""
    _need()
    generator: Any = importlib.import_module("textworld.generator")

    options = generator.GameOptions()
    options.seeds = seed
    options.nb_rooms, options.nb_objects = world_size, nb_objects
    options.quest_length = quest_length
    options.path = str(_folder() / f"{seed}-{world_size}-{nb_objects}-{quest_length}.z8")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return generator.compile_game(generator.make_game(options), options)
    except Exception as err:
        raise EnvError(f"TextWorld could not make the game of seed {seed}: {type(err).__name__}: {err}") from err


def _check_file(path: Path) -> None:
    """The interpreter ends the process on what is no game, so that is found first."""
    if not path.is_file():
        raise DataError(f"TextWorld game {path}: there is no such file; give a .z8 file, or leave game= out")
    head = path.read_bytes()[:64]
    if len(head) < 64 or not 1 <= head[0] <= 8:
        raise DataError(f"TextWorld game {path}: it is no Z-machine game; give a .z8 file")


class TextWorldEnv:
    """A TextWorld game: reset, then commands until it is won, lost or cut.

    `reset(task, seed)`: a task with `game` plays that file; else the settings' game, else one generated from the seed.
    info: actions (admissible commands, sorted), success, invalid (the command was not admissible), effective (score, place
    or possessions changed), family (the command's verb), steps, invalid_actions.

    Args:
        game: a game file (.z8); None: generated ones.
        world_size: rooms. nb_objects: things besides those of the quest. quest_length: commands of the shortest solution.
        max_steps: commands, valid or not, after which the episode is truncated.
        success_reward, step_reward, invalid_penalty: as in the other worlds.

    Raises:
        MissingExtraError: the extra is not installed. ConfigError: a setting is out of range.
    """

    instructions = "You are in a text adventure. Answer with one command in <action></action>."

    def __init__(
        self,
        *,
        game: str | None = None,
        world_size: int = 3,
        nb_objects: int = 5,
        quest_length: int = 3,
        max_steps: int = 30,
        rules: bool = True,
        success_reward: float = 10.0,
        step_reward: float = 0.0,
        invalid_penalty: float = 0.1,
    ):
        _need()
        for name, value in {"world_size": world_size, "nb_objects": nb_objects, "quest_length": quest_length}.items():
            if not 1 <= value <= 50:
                raise ConfigError(f"{name}={value}: give 1 to 50")
        if max_steps < 1:
            raise ConfigError(f"max_steps={max_steps}: give at least 1")
        numbers = {"success_reward": success_reward, "step_reward": step_reward, "invalid_penalty": invalid_penalty}
        for name, value in numbers.items():
            if not math.isfinite(value) or (name == "invalid_penalty" and value < 0):
                raise ConfigError(f"{name}={value}: give a finite number, 0 or more for the penalty")
        self.game, self.generated, self.max_steps, self.rules = (
            game,
            (world_size, nb_objects, quest_length),
            max_steps,
            rules,
        )
        self.success_reward, self.step_reward, self.invalid_penalty = success_reward, step_reward, invalid_penalty
        self.env: Any = None
        self.what: str | int = ""  # a file, or the seed of a generated game
        self.now: Any = None
        self.played: list[str] = []
        self.steps, self.invalid, self.over = 0, 0, False

    def reset(self, task: Mapping[str, Any] | None = None, seed: int = 0) -> Step:
        """Raises: DataError: the game's file cannot be played. EnvError: it could not be made."""
        game = self.game if task is None else task.get("game", self.game)
        self._open(derive_seed("textworld", seed) % 2**16 if game is None else str(game))
        self.steps, self.invalid, self.over = 0, 0, False
        lines = self._text(self.now.feedback).split("\n")
        while lines and not set(lines[0]) - _BANNER:
            lines.pop(0)
        text = "\n".join(lines)
        if self.rules:
            text = f"{self.instructions}\n\n{text}"
        return Step(text, info={"actions": sorted(self.now.admissible_commands)})

    def _open(self, what: str | int) -> None:
        textworld: Any = importlib.import_module("textworld")

        if self.env is None or what != self.what:
            if isinstance(what, str):
                _check_file(Path(what))
            file = what if isinstance(what, str) else make_game(what, *self.generated)
            infos = textworld.EnvInfos(
                won=True, lost=True, admissible_commands=True, score=True, location=True, inventory=True
            )
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # that the interpreter cannot tell scores: TextWorld can
                    self.env = textworld.start(file, infos)
            except Exception as err:
                raise DataError(f"TextWorld game {what}: cannot be played ({type(err).__name__}: {err})") from err
            self.what = what
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.now = self.env.reset()
        self.played = []

    @staticmethod
    def _text(feedback: str) -> str:
        """Without the interpreter's status line and its question after the end."""
        lines = [line for line in str(feedback).partition(_ENDED)[0].split("\n") if not line.startswith(">")]
        return "\n".join(lines).strip()

    def _place(self) -> tuple:
        now = self.now
        return str(now.get("location")), str(now.get("inventory")), now.get("score"), sorted(now.admissible_commands)

    def step(self, action: str) -> Step:
        """Raises: EnvError: before reset, or after the end."""
        if self.env is None or self.over:
            raise EnvError(f"TextWorld: step {'before reset' if self.env is None else 'after the end; reset it'}")
        before = self._place()
        wanted = read_action(action) or ""
        command = next((c for c in self.now.admissible_commands if c.lower() == wanted), None)
        text = "That's not possible here."
        if command is not None:
            self.now = self.env.step(command)[0]
            self.played.append(command)
            text = self._text(self.now.feedback)
        self.steps += 1
        self.invalid += command is None
        won, lost = bool(self.now.won), bool(self.now.lost)
        truncated = self.steps >= self.max_steps and not (won or lost)
        self.over = won or lost or truncated
        reward = self.success_reward if won else 0.0 if self.over else self.step_reward
        return Step(
            text,
            reward - self.invalid_penalty if command is None else reward,
            won or lost,
            truncated,
            {
                "actions": [] if won or lost else sorted(self.now.admissible_commands),
                "success": won,
                "invalid": command is None,
                "effective": self._place() != before,
                "family": "invalid" if command is None else command.partition(" ")[0],
                "steps": self.steps,
                "invalid_actions": self.invalid,
            },
        )

    def snapshot(self) -> Any:
        return None if self.env is None else (self.what, tuple(self.played), self.steps, self.invalid, self.over)

    def restore(self, snapshot: Any) -> None:
        if snapshot is None:
            self.env = None
            return
        what, played, self.steps, self.invalid, self.over = snapshot
        self._open(what)
        for command in played:
            self.now = self.env.step(command)[0]
        self.played = list(played)

    def state_key(self) -> str | None:
        """The game and the commands that were played: what else changed the game is not visible from outside."""
        return None if self.env is None else f"textworld/{self.what}/{derive_seed(*self.played):016x}"
