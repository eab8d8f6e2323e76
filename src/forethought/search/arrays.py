"""A world of arrays: a model that steps many states at once and always has the same actions (games, learned dynamics).

Shapes: T trees, R requests, A actions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from forethought.errors import ConfigError
from forethought.search.mcts import Answers, Requests, new_counts


@dataclass
class ArrayStep:
    """States and what is known of them, arrays [R].

    states [R, ...]: whatever the model steps from. value: for the player to move. prior [R, A], or None: uniform.
    reward: earned by the action that led here, seen by the player who took it. ended: no action is left (the value
    counts all the same: 0 where the reward says it all). player: who moves.
    """

    states: np.ndarray
    value: np.ndarray
    prior: np.ndarray | None = None
    reward: np.ndarray | float = 0.0
    ended: np.ndarray | bool = False
    player: np.ndarray | int = 0


class ArrayModel(Protocol):
    """actions: A, the same in every state."""

    actions: int

    def roots(self) -> ArrayStep:
        """One state a tree."""
        ...

    def step(self, states: np.ndarray, actions: np.ndarray) -> ArrayStep:
        """[R, ...] states, one action [R] for each."""
        ...


class ArrayDomain:
    """An `ArrayModel` as the world of a search; see `mcts.Domain`."""

    grows = False
    lists_all = True
    columns: tuple[str, ...] = ()

    def __init__(self, model: ArrayModel, names: Sequence[str] | None = None):
        if model.actions < 1:
            raise ConfigError(f"model with actions={model.actions}: it needs at least 1")
        self.model = model
        self._roots = model.roots()
        trees = len(self._roots.states)
        self.names = [str(i) for i in range(trees)] if names is None else list(names)
        if len(self.names) != trees:
            raise ConfigError(f"{len(self.names)} names for {trees} roots: give one each")
        self.counts: defaultdict[str, np.ndarray] = new_counts(trees)
        first = self._roots.states
        self._states = np.zeros((trees, 64, *first.shape[1:]), first.dtype)

    def _answers(self, step: ArrayStep) -> Answers:
        size, actions = len(step.states), self.model.actions

        def column(value: Any, dtype: type) -> np.ndarray:
            if isinstance(value, np.ndarray):
                return value if value.dtype == dtype else value.astype(dtype)
            return np.full(size, value, dtype)

        return Answers(
            status=np.zeros(size, np.int8),
            reward=column(step.reward, np.float64),
            value=column(step.value, np.float64),
            ended=column(step.ended, np.bool_),
            player=column(step.player, np.int8),
            prior=np.full((size, actions), 1 / actions) if step.prior is None else step.prior,
            edges=np.full(size, actions, np.int32),
            state=step.states,
        )

    def roots(self) -> Answers:
        return self._answers(self._roots)

    def open(self, requests: Requests) -> Answers:
        self.counts["evaluations"][requests.trees] += 1
        return self._answers(self.model.step(self._states[requests.trees, requests.parents], requests.slots))

    def store(self, answers: Answers, index: np.ndarray, trees: np.ndarray, nodes: np.ndarray) -> None:
        most = int(nodes.max(initial=0))
        if most >= self._states.shape[1]:
            shape = (len(self._states), max(most + 1, self._states.shape[1]), *self._states.shape[2:])
            self._states = np.concatenate([self._states, np.zeros(shape, self._states.dtype)], 1)
        self._states[trees, nodes] = answers.state[index]
