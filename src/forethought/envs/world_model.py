"""A world model in place of a world: an `Env` whose transition is a language model's prediction.

    model = WorldModel(engine, renderer, context=2048)
    env = WorldModelEnv(model, find_env("household:mini"))   # reset by the real world, steps by the model

The first observation is the real environment's (a model predicts what comes next, not where one begins). Each step shows
the model the first observation, the last turns, the current observation and the action, and reads from its answer

    <next_state>what is seen next</next_state>  and, where the episode ends there,  <end>won</end> or <end>lost</end>

the last complete pair of tags after any `</think>`. An answer without one is counted and ends the episode: truncated, with
`info["unparsable"]`. A prediction depends on what the model is shown and on the sampling seed only, and is remembered, so
that after `restore` the same action gives the same Step, exactly.

`prediction_messages` and `prediction_text` are the prompt and the target that a world model is trained on.
"""

from __future__ import annotations

import functools
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from forethought.envs.env import Env, Step
from forethought.errors import ConfigError, DataError, EnvError
from forethought.files import from_json, to_json, write_atomic
from forethought.models.chat import ChatRenderer
from forethought.models.engine import Engine, Sampling

SETTINGS_FILE = "world_model.json"
REMEMBERED = 50_000
"""Predictions that a world model keeps, the least recently used are dropped first."""
_STATE = re.compile(r"<next_state>(.*?)</next_state>", re.S)
_END = re.compile(r"<end>(won|lost)</end>")
_ASK = (
    "You know this world well. You see how it begins, what happened last, and an action that someone is about to take. "
    "Write what will be seen right after the action, in the style of the earlier observations, between <next_state> and "
    "</next_state>. If that ends the task, add <end>won</end> or <end>lost</end>. Do not choose an action yourself."
)


@dataclass(frozen=True)
class Prediction:
    """What a world model says comes next. won: None while it goes on."""

    observation: str
    won: bool | None = None


@dataclass(frozen=True)
class Context:
    """What a prediction is made from: how it began, the last turns as (action, observation), and what is seen now."""

    first: str
    turns: tuple[tuple[str, str], ...] = ()

    @property
    def current(self) -> str:
        return self.turns[-1][1] if self.turns else self.first

    def seen(self, history: int | None) -> Context:
        """With the last `history` turns only."""
        return self if history is None else Context(self.first, self.turns[max(0, len(self.turns) - history) :])


def prediction_messages(context: Context, action: str) -> list[dict[str, str]]:
    """The prompt of one prediction."""
    lines = [_ASK, "", "It begins:", context.first]
    for done, seen in context.turns:
        lines += ["", f"Action: {done}", seen]
    return [{"role": "user", "content": "\n".join([*lines, "", f"Next action: {action}"])}]


def prediction_text(prediction: Prediction) -> str:
    """The answer that says this; `read_prediction` is its inverse."""
    end = "" if prediction.won is None else f"<end>{'won' if prediction.won else 'lost'}</end>"
    return f"<next_state>{prediction.observation}</next_state>{end}"


def read_prediction(text: str) -> Prediction | None:
    """The last complete prediction after the thoughts; None where there is none (cut short, empty, no tags)."""
    _, closed, rest = text.rpartition("</think>")
    if not closed and "<think>" in text:
        return None
    found = list(_STATE.finditer(rest if closed else text))
    if not found or not found[-1][1].strip():
        return None
    end = _END.search((rest if closed else text)[found[-1].end() :])
    return Prediction(found[-1][1].strip(), None if end is None else end[1] == "won")


class Predictor(Protocol):
    """Predicts many transitions at once; None where an answer cannot be read."""

    def predict(self, asked: Sequence[tuple[Context, str]]) -> list[Prediction | None]: ...


@dataclass
class WorldModel:
    """A language model that predicts transitions. Predictions are remembered: make another one for other weights.

    Args:
        engine, renderer, context: what samples, what renders, and the longest sequence in tokens.
        sampling: of an answer; greedy by default.
        history: turns that a prompt shows; None: as many as fit. What does not fit is left out, oldest turns first.
        messages, read: prompt and reader of another format.

    Attributes:
        asked, unparsable: predictions that were sampled, and those that could not be read.
    """

    engine: Engine
    renderer: ChatRenderer
    context: int
    sampling: Sampling = field(default_factory=lambda: Sampling(max_tokens=256, temperature=0.0))
    history: int | None = None
    messages: Callable[[Context, str], list[dict[str, str]]] = prediction_messages
    read: Callable[[str], Prediction | None] = read_prediction
    asked: int = 0
    unparsable: int = 0
    _known: OrderedDict[tuple[Context, str], Prediction | None] = field(default_factory=OrderedDict)

    def predict(self, asked: Sequence[tuple[Context, str]]) -> list[Prediction | None]:
        """See `Predictor`. A prompt that does not fit even without turns counts as unreadable."""
        keys = [(context.seen(self.history), action) for context, action in asked]
        new = [key for key in dict.fromkeys(keys) if key not in self._known]
        leaves, names, placed = [], [], []
        for key in new:
            leaf = self._leaf(*key)
            if leaf is None:
                self._known[key] = None
                continue
            leaves.append(leaf)
            names.append(to_json([key[0].first, list(key[0].turns), key[1]]))
            placed.append(key)
        if leaves:
            for (tree, _), key, (node,) in zip(
                leaves, placed, self.engine.extend(leaves, 1, self.sampling, names=names), strict=True
            ):
                self._known[key] = self.read(self.renderer.text(tree.node_ids(node)))
        self.asked += len(new)
        self.unparsable += sum(self._known[key] is None for key in new)
        out = []
        for key in keys:
            out.append(self._known[key])
            self._known.move_to_end(key)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return out

    def _leaf(self, context: Context, action: str):
        """A tree with the prompt; None where it does not fit."""
        room = self.context - self.sampling.max_tokens
        for keep in range(len(context.turns), -1, -1):
            try:
                tree, leaf = self.renderer.start(self.messages(context.seen(keep), action))
            except DataError:  # the vocabulary cannot say it
                return None
            if tree.path_length(leaf) <= room:
                return tree, leaf
        return None


class WorldModelEnv:
    """An episode in a world model.

    Rewards: `success_reward` where the model says that the task is won, `step_reward` for a step after which it goes on,
    0 for any other end. info: success, unparsable.

    Args:
        model: a `WorldModel`, shared by many episodes.
        real: makes the environment that begins an episode.
        max_steps: actions after which the episode is truncated.
    """

    def __init__(
        self,
        model: Predictor,
        real: Callable[[], Env],
        *,
        max_steps: int = 30,
        success_reward: float = 1.0,
        step_reward: float = 0.0,
    ):
        if max_steps < 1:
            raise ConfigError(f"max_steps={max_steps}: give at least 1")
        self.model, self.real, self.max_steps = model, real, max_steps
        self.success_reward, self.step_reward = success_reward, step_reward
        self.state: Context | None = None
        self.over = False

    def reset(self, task: Any = None, seed: int = 0) -> Step:
        step = self.real().reset(task, seed)
        self.state, self.over = Context(step.observation), False
        return Step(step.observation)

    def step(self, action: str) -> Step:
        """Raises: EnvError: before reset, or after the end."""
        return self.step_many([self], [action])[0]

    @staticmethod
    def step_many(envs: Sequence[WorldModelEnv], actions: Sequence[str]) -> list[Step]:
        """A step of many episodes, with one call of each model."""
        for env in envs:
            if env.state is None or env.over:
                raise EnvError(
                    f"world model: step {'before reset' if env.state is None else 'after the end; reset it'}"
                )
        found: dict[int, Prediction | None] = {}
        for model in {id(env.model): env.model for env in envs}.values():
            mine = [i for i, env in enumerate(envs) if env.model is model]
            predicted = model.predict([(_state(envs[i]), actions[i]) for i in mine])
            found |= dict(zip(mine, predicted, strict=True))
        return [env._take(action, found[i]) for i, (env, action) in enumerate(zip(envs, actions, strict=True))]

    def _take(self, action: str, prediction: Prediction | None) -> Step:
        state = _state(self)
        if prediction is None:
            self.over = True
            return Step(state.current, truncated=True, info={"success": False, "unparsable": True})
        self.state = Context(state.first, (*state.turns, (action, prediction.observation)))
        ended = prediction.won is not None
        truncated = not ended and len(self.state.turns) >= self.max_steps
        self.over = ended or truncated
        won = prediction.won is True
        reward = self.success_reward if won else 0.0 if self.over else self.step_reward
        return Step(prediction.observation, reward, ended, truncated, {"success": won, "unparsable": False})

    def snapshot(self) -> Any:
        """Immutable, so it is shared."""
        return self.state, self.over

    def restore(self, snapshot: Any) -> None:
        self.state, self.over = snapshot

    def state_key(self) -> str | None:
        """All that a prediction may depend on."""
        return None if self.state is None else to_json([self.state.first, [list(t) for t in self.state.turns]])


def _state(env: WorldModelEnv) -> Context:
    assert env.state is not None
    return env.state


# -- `--env wm:FOLDER` -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WorldModelSettings:
    """What stands in `world_model.json`, beside the model's files."""

    env: str
    """The environment that begins episodes and has the tasks."""
    history: int | None = None
    max_new_tokens: int = 256
    max_steps: int = 30
    success_reward: float = 1.0
    step_reward: float = 0.0


def describe_world_model(folder: Path | str, settings: WorldModelSettings) -> None:
    """Make `wm:FOLDER` an environment: write down how the model in this folder is used."""
    from forethought.config import to_dict

    write_atomic(Path(folder) / SETTINGS_FILE, (to_json(to_dict(settings)) + "\n").encode())


def read_settings(folder: str) -> WorldModelSettings:
    """Raises: ConfigError: no such folder, no such file in it, or wrong settings."""
    from forethought.config import from_dict

    path = Path(folder).expanduser() / SETTINGS_FILE
    if not path.is_file():
        raise ConfigError(
            f"environment 'wm:{folder}': {path} is not there; it says which environment begins the episodes, such as "
            '{"env": "household:mini"}'
        )
    try:
        given = from_json(path.read_text())
    except ValueError as err:
        raise ConfigError(f"{path}: {err}") from err
    if not isinstance(given, Mapping):
        raise ConfigError(f"{path}: give an object with 'env'")
    settings = from_dict(WorldModelSettings, given, source=str(path))
    if settings.env.startswith("wm:"):
        raise ConfigError(f"{path}: env={settings.env!r}: a world model begins in a real environment")
    return settings


@functools.lru_cache(maxsize=2)
def _loaded(folder: str) -> WorldModel:
    """The world model of a folder, once a process."""
    import torch

    from forethought.models.load import load_model
    from forethought.models.policy import Policy
    from forethought.models.torch_engine import TorchEngine

    settings = read_settings(folder)
    model, tokenizer = load_model(folder, dtype=torch.float32)
    renderer = ChatRenderer(tokenizer)
    policy = Policy(model, tokenizer, end_ids=renderer.end_ids)
    return WorldModel(
        TorchEngine(policy),
        renderer,
        policy.context,
        Sampling(max_tokens=settings.max_new_tokens, temperature=0.0),
        settings.history,
    )


class _Late:
    """A world model that is loaded when it is first asked."""

    def __init__(self, folder: str):
        self.folder = folder

    def predict(self, asked: Sequence[tuple[Context, str]]) -> list[Prediction | None]:
        return _loaded(self.folder).predict(asked)


_late = functools.lru_cache(maxsize=8)(_Late)


def world_model_env(*, folder: str) -> WorldModelEnv:
    """What `wm:FOLDER` makes. Raises: ConfigError: see `read_settings` and `registry.find_env`."""
    from forethought.envs.registry import find_env

    settings = read_settings(folder)
    return WorldModelEnv(
        _late(str(Path(folder).expanduser().resolve())),
        find_env(settings.env),
        max_steps=settings.max_steps,
        success_reward=settings.success_reward,
        step_reward=settings.step_reward,
    )


def world_model_tasks(n: int, seed: int, split: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The tasks of the environment behind a world model."""
    from forethought.envs.registry import find_env

    return find_env(read_settings(settings["folder"]).env).tasks(n, seed, split)
