"""Any environment as the world of a search: states by snapshot, or by replay where there are none.

Actions are listed by a policy when a state is reached; an action is played when its edge is first followed, so a state
with five actions costs no step until one of them is chosen. Values: see `forest`; rewards are those of the environment,
seen by the player who moved; in a game of several, `info["player"]` of a Step says who moves next (0 without it).

An environment without snapshots is replayed: a new one is made for every visit of a state, and each of its Steps must
equal the recorded one, or the search is refused, because its states would not be what the tree says they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from forethought.envs.env import Env, Step
from forethought.errors import ConfigError, EnvError
from forethought.files import from_json, to_json
from forethought.rewards.loading import describe
from forethought.search.critics import Judgement, read_judgements
from forethought.search.mcts import Answers, Requests, Status, new_counts

Merge = Literal["none", "siblings", "path", "share"]


@dataclass(frozen=True, kw_only=True)
class EnvRoot:
    """Where a search begins: `reset(task, seed)` and these actions."""

    task: Any = None
    seed: int = 0
    actions: tuple[str, ...] = ()
    name: str = ""
    """Stable name; default: the task's id, else its place among the roots."""


@dataclass
class State:
    """A state as policies and critics see it.

    tree, parent, action: the name of the tree, the state it was reached from and by which action (None at the root).
    history: (action, Step) from the reset on, whose action is None; committed actions of the root included.
    env(): an environment in this state, to be played on freely; the next call of any env() of the tree ends its use.
    """

    tree: str
    history: tuple[tuple[str | None, Step], ...]
    depth: int
    env: Callable[[], Env]
    parent: State | None = None
    action: str | None = None
    node: int = -1
    """Number in its tree; -1 until the search has taken it in."""
    root: EnvRoot = field(default_factory=EnvRoot)
    memo: dict[str, Any] = field(default_factory=dict)
    """Room for the policy's and critic's own notes on the state (token nodes ...)."""

    @property
    def step(self) -> Step:
        return self.history[-1][1]

    @property
    def observation(self) -> str:
        return self.step.observation

    @property
    def actions(self) -> list[str]:
        return [action for action, _ in self.history if action is not None]

    @property
    def player(self) -> int:
        return int(self.step.info.get("player", 0))


@dataclass(frozen=True)
class Proposal:
    """Actions of a state and their priors (None: uniform). An action of None is a dead end that ends the episode with
    value 0, unplayed; no actions at all make the state a leaf."""

    actions: tuple[str | None, ...]
    priors: tuple[float, ...] | None = None


class Policy(Protocol):
    """Lists the actions of states; an exception in the place of a Proposal is a failure of that state alone."""

    def __call__(self, states: Sequence[State]) -> Sequence[Proposal | Exception]: ...


class Critic(Protocol):
    """Values of states for their player to move; an exception in the place of one is a failure of that state alone."""

    def __call__(self, states: Sequence[State]) -> Sequence[float | Judgement | Exception]: ...


class _Seat:
    """The environments of one tree, and how to put one into a recorded state."""

    def __init__(self, factory: Callable[[], Env], root: EnvRoot, name: str, counts: defaultdict, tree: int):
        self.factory, self.root, self.name, self.counts, self.tree = factory, root, name, counts, tree
        self.env = factory()
        self.first: list[tuple[str | None, Step]] = []
        self._play_root(self.env, record=True)
        try:
            self.snapshots: dict[int, Any] | None = {0: self.env.snapshot()}
        except (AttributeError, NotImplementedError):
            self.snapshots = None
            self._play_root(self.factory(), record=False)

    def _play_root(self, env: Env, *, record: bool) -> None:
        steps = [None, *self.root.actions]
        for i, action in enumerate(steps):
            if action is None:
                step = env.reset(self.root.task, self.root.seed)
            else:
                step = env.step(action)
                self.counts["env_steps" if record else "replayed_steps"][self.tree] += 1
            if not isinstance(step, Step):
                raise EnvError(f"task {self.name!r}: the environment answered {type(step).__name__}, not a Step")
            if record:
                if step.done and i < len(steps) - 1:
                    raise EnvError(f"task {self.name!r}: the episode ended after {i} of the root's actions")
                self.first.append((action, step))
            else:
                self.same(step, self.first[i][1], action)

    def same(self, step: Step, recorded: Step, action: str | None) -> None:
        a, b = ((s.observation, s.reward, s.terminated, s.truncated) for s in (step, recorded))
        if a != b:
            raise EnvError(
                f"task {self.name!r}: replayed, {'reset' if action is None else repr(action)} gave {a!r}, not {b!r} as "
                "before; an environment without snapshots must be deterministic: give it snapshot() and restore()"
            )

    def start(self) -> Env:
        return self.go(0, ())

    def go(self, node: int, path: Sequence[tuple[str, Step]]) -> Env:
        """An environment in the state of `node`, which `path` leads to from the root of the tree."""
        if self.snapshots is not None and node in self.snapshots:
            self.env.restore(self.snapshots[node])
            return self.env
        env = self.env = self.factory()
        self._play_root(env, record=False)
        for action, recorded in path:
            self.counts["replayed_steps"][self.tree] += 1
            self.same(env.step(action), recorded, action)
        if self.snapshots is not None:
            self.snapshots[node] = env.snapshot()
        return env


class EnvDomain:
    """Environments as the world of a search; see `mcts.Domain`.

    Args:
        factory: makes a fresh environment. roots: one a tree.
        policy, critic: see the protocols. critic None: all values are 0 (rewards alone).
        scale: (lowest, highest) value of the critic; a number outside it ends the search with an error.
        merge: what equal `state_key`s mean. "siblings": a state that equals a sibling's, and "path": also one that
            equals an ancestor's (a circle), is no new node and its edge is closed. "share": states of equal key at
            equal depth are one node. "none": nothing.
        judge_ended: ended states are judged by the critic too; else they are worth 0 (their reward says it all).
        value_roots: roots are judged (their value counts only where a rule reads it, or with `count_root`).
    """

    grows = False
    lists_all = False

    def __init__(
        self,
        factory: Callable[[], Env],
        roots: Sequence[EnvRoot],
        policy: Policy,
        critic: Critic | None = None,
        *,
        scale: tuple[float, float] | None = None,
        merge: Merge = "none",
        judge_ended: bool = False,
        value_roots: bool = False,
    ):
        if merge not in ("none", "siblings", "path", "share"):
            raise ConfigError(f"merge={merge!r}: give 'none', 'siblings', 'path' or 'share'")
        if not roots:
            raise ConfigError("search: no roots; give at least one")
        self.factory, self.given, self.policy, self.critic = factory, list(roots), policy, critic
        self.scale, self.merge, self.judge_ended, self.value_roots = scale, merge, judge_ended, value_roots
        self.columns: tuple[str, ...] = tuple(getattr(critic, "columns", ()))
        self.names = [r.name or _name(r.task, i) for i, r in enumerate(self.given)]
        if len(set(self.names)) < len(self.names):
            twice = next(n for n in self.names if self.names.count(n) > 1)
            raise ConfigError(f"search: two roots are named {twice!r}; give EnvRoot(name=...)")
        self.counts: defaultdict[str, np.ndarray] = new_counts(len(self.names))
        for attached in (policy, critic):
            join = getattr(attached, "attach", None)
            if join is not None:  # it spends tokens of its own
                join(self.names, self.counts)
        self.seats: list[_Seat | None] = []
        self.states: list[list[State]] = [[] for _ in self.names]
        self.actions: list[list[tuple[str | None, ...]]] = [[] for _ in self.names]
        self._below: list[dict[int, list[int]]] = [{} for _ in self.names]
        self._keys: list[dict[int, str | None]] = [{} for _ in self.names]
        self._shared: list[dict[tuple[int, str], int]] = [{} for _ in self.names]

    # -- the protocol --
    def roots(self) -> Answers:
        answers = Answers.blank(len(self.names), self.columns)
        states: list[State | None] = []
        self.seats = []
        for t, root in enumerate(self.given):
            try:
                seat = _Seat(self.factory, root, self.names[t], self.counts, t)
            except EnvError:
                raise
            except Exception as err:
                raise EnvError(f"task {self.names[t]!r}: the environment's reset raised {describe(err)}") from err
            self.seats.append(seat)
            state = State(self.names[t], tuple(seat.first), 0, seat.start, root=root)
            states.append(state)
        answers.state = [(s, key) for s, key in zip(states, self._root_keys(), strict=True)]
        self._fill(answers, states, np.array([s.step.done for s in states if s]), judge=self.value_roots)
        return answers

    def _root_keys(self) -> list[str | None]:
        return [self._key(seat.env, self.names[t]) if seat else None for t, seat in enumerate(self.seats)]

    def open(self, requests: Requests) -> Answers:
        answers = Answers.blank(len(requests), self.columns)
        answers.same = np.full(len(requests), -1)
        states: list[State | None] = [None] * len(requests)
        keys: list[str | None] = [None] * len(requests)
        taken: set[tuple] = set()
        for i, (tree, node, slot) in enumerate(
            zip(requests.trees.tolist(), requests.parents.tolist(), requests.slots.tolist(), strict=True)
        ):
            before, action = self.states[tree][node], self.actions[tree][node][slot]
            if action is None:
                step = Step("", terminated=True, info={"player": before.player})
                states[i] = self._after(before, None, step, tree)
                answers.value[i] = 0.0
                continue
            env = self._go(tree, node)
            try:
                step = env.step(action)
                if not isinstance(step, Step):
                    raise EnvError(f"step answered {type(step).__name__}, not a Step")
                keys[i] = self._key(env, self.names[tree])
            except Exception:
                answers.status[i] = Status.FAILED
                continue
            self.counts["env_steps"][tree] += 1
            state = self._after(before, action, step, tree)
            answers.reward[i] = step.reward
            verdict = self._merged(tree, node, state, keys[i], taken)
            if isinstance(verdict, Status):
                answers.status[i] = verdict
            elif verdict is not None:
                answers.status[i], answers.same[i] = Status.SHARED, verdict
            if verdict is None:
                states[i] = state
                seat = self.seats[tree]
                if seat is not None and seat.snapshots is not None and not step.done:
                    state.memo["snapshot"] = env.snapshot()
        answers.state = list(zip(states, keys, strict=True))
        self._fill(answers, states, requests.final, judge=True)
        return answers

    def store(self, answers: Answers, index: np.ndarray, trees: np.ndarray, nodes: np.ndarray) -> None:
        for i, tree, node in zip(index.tolist(), trees.tolist(), nodes.tolist(), strict=True):
            state, key = answers.state[i]
            state.node = node
            self.states[tree].append(state)
            if state.parent is not None:
                self._below[tree].setdefault(state.parent.node, []).append(node)
            self.actions[tree].append(state.memo.pop("actions", ()))
            state.env = lambda tree=tree, node=node: self._go(tree, node)
            seat = self.seats[tree]
            snapshot = state.memo.pop("snapshot", None)
            if seat is not None and seat.snapshots is not None and snapshot is not None:
                seat.snapshots[node] = snapshot
            self._keys[tree][node] = key
            if key is not None:
                self._shared[tree].setdefault((state.depth, key), node)

    # -- states --
    def _go(self, tree: int, node: int) -> Env:
        seat = self.seats[tree]
        assert seat is not None
        path = self.states[tree][node].history[len(seat.first) :] if node else ()
        return seat.go(node, path)  # type: ignore[arg-type]

    def _after(self, before: State, action: str | None, step: Step, tree: int) -> State:
        def env() -> Env:
            snapshot = state.memo.get("snapshot")
            seat = self.seats[tree]
            assert seat is not None
            if snapshot is None:  # not stored yet, and no snapshots: play on from the parent
                fresh = before.env()
                fresh.step(action or "")
                return fresh
            seat.env.restore(snapshot)
            return seat.env

        history = (*before.history, (action, step))
        state = State(before.tree, history, before.depth + 1, env, before, action, root=before.root)
        return state

    def _key(self, env: Env, name: str) -> str | None:
        if self.merge == "none":
            return None
        key = env.state_key()
        if key is None:
            raise ConfigError(f"merge={self.merge!r}, but the environment of {name!r} has no state_key; use 'none'")
        return key

    def _merged(self, tree: int, node: int, state: State, key: str | None, taken: set[tuple]) -> Status | int | None:
        """None: a new state; a number: the node it is; or why it becomes no node."""
        if self.merge == "none" or key is None:
            return None
        if self.merge == "share":
            known = self._shared[tree].get((state.depth, key))
            if known is not None:
                return known
            mine = (tree, state.depth, key)
        else:
            known_keys = {self._keys[tree][n] for n in self._below[tree].get(node, ())}
            up = state.parent if self.merge == "path" else None
            while up is not None:
                known_keys.add(self._keys[tree][up.node])
                up = up.parent
            if key in known_keys:
                return Status.MERGED
            mine = (tree, node, key)
        if mine in taken:
            return Status.AGAIN
        taken.add(mine)
        return None

    # -- policy and critic --
    def _fill(self, answers: Answers, states: Sequence[State | None], final: np.ndarray, *, judge: bool) -> None:
        """Values, parts and actions of the states that were reached."""
        reached = [i for i, s in enumerate(states) if s is not None and answers.status[i] == Status.OK]
        for i in reached:
            state = states[i]
            assert state is not None
            answers.ended[i] = state.step.done
            answers.player[i] = state.player
        wanted = [i for i in reached if judge and np.isnan(answers.value[i])]
        judged = [i for i in wanted if self.judge_ended or not answers.ended[i]]
        for i in set(wanted) - set(judged):
            answers.value[i] = 0.0
        if self.critic is None:
            for i in judged:
                answers.value[i] = 0.0
        elif judged:
            for i in judged:
                self.counts["evaluations"][self.names.index(states[i].tree)] += 1  # type: ignore[union-attr]
            results = ask_all(self.critic, [states[i] for i in judged])
            names = [states[i].tree for i in judged]  # type: ignore[union-attr]
            read_judgements(answers, judged, results, names, self.scale)
        listed = [i for i in reached if answers.status[i] == Status.OK and not answers.ended[i] and not bool(final[i])]
        proposals = ask_all(self.policy, [states[i] for i in listed]) if listed else []
        answers.edges = np.zeros(len(states), np.int32)
        rows: dict[int, np.ndarray] = {}
        for i, proposal in zip(listed, proposals, strict=True):
            if isinstance(proposal, Exception):
                answers.status[i] = Status.FAILED
                continue
            state = states[i]
            assert state is not None
            rows[i] = _priors(proposal, state)
            state.memo["actions"] = proposal.actions
            answers.edges[i] = len(proposal.actions)
        answers.prior = np.full((len(states), max([1, *map(len, rows.values())])), np.nan)
        for i, prior in rows.items():
            answers.prior[i, : len(prior)] = prior

    # -- reading and storing --
    def action(self, tree: int, node: int, slot: int) -> str:
        """Text of an edge."""
        action = self.actions[tree][node][slot]
        return "(none)" if action is None else action

    def to_json(self) -> list[Any]:
        """Steps and actions of all nodes; what of an info is not JSON is left out."""
        out = []
        for states, actions in zip(self.states, self.actions, strict=True):
            out.append(
                [
                    {
                        "parent": -1 if s.parent is None else s.parent.node,
                        "action": s.action,
                        "step": _plain_step(s.step),
                        "actions": list(listed),
                        "memo": _plain(s.memo),
                    }
                    for s, listed in zip(states, actions, strict=True)
                ]
            )
        return out

    def from_json(self, stored: list[Any]) -> None:
        """Take over the nodes of `to_json`; environments are put into their states by replay, which is verified.

        Raises:
            EnvError: the environments answer otherwise than they did. KeyError, TypeError, ValueError: not such a list.
        """
        self.seats = [_Seat(self.factory, root, self.names[t], self.counts, t) for t, root in enumerate(self.given)]
        for t, rows in enumerate(stored):
            for node, row in enumerate(rows):
                step = Step(**row["step"])
                seat = self.seats[t]
                assert seat is not None
                if node == 0:
                    seat.same(seat.first[-1][1], step, None)
                    state = State(self.names[t], tuple(seat.first), 0, seat.start, root=self.given[t])
                else:
                    state = self._after(self.states[t][row["parent"]], row["action"], step, t)
                state.memo |= {**row["memo"], "actions": tuple(row["actions"])}
                key = None
                if self.merge != "none" and (state.action is not None or not node):
                    before = self._go(t, state.parent.node) if state.parent else seat.env
                    if state.action is not None:
                        before.step(state.action)
                    key = self._key(before, self.names[t])
                place = np.array([0])
                answers = Answers.blank(1)
                answers.state = [(state, key)]
                self.store(answers, place, np.array([t]), np.array([node]))


def _name(task: Any, place: int) -> str:
    ident = task.get("id") if isinstance(task, dict) else None
    return str(place) if ident is None else str(ident)


def ask_all(helper: Callable[[Sequence[Any]], Sequence[Any]], states: Sequence[Any]) -> Sequence[Any]:
    """One answer a state; a helper that fails as a whole fails for all of them.

    Raises:
        ConfigError: from the helper: it can do nothing at all as it is. EnvError: another number of answers than states.
    """
    try:
        answers = helper(states)
    except ConfigError:
        raise
    except Exception as err:
        return [err] * len(states)
    if len(answers) != len(states):
        raise EnvError(f"{type(helper).__name__} gave {len(answers)} answers for {len(states)} states; give one each")
    return answers


def _priors(proposal: Proposal, state: State) -> np.ndarray:
    count = len(proposal.actions)
    if proposal.priors is None:
        return np.full(count, 1 / count) if count else np.zeros(0)
    prior = np.asarray(proposal.priors, np.float64)
    if prior.shape != (count,) or not np.isfinite(prior).all() or (prior < 0).any():
        raise ConfigError(
            f"task {state.tree!r}: priors {proposal.priors!r} for {count} actions; give one finite number from 0 each"
        )
    return prior


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """What of a dict is JSON."""
    out = {}
    for key, value in values.items():
        try:
            out[key] = from_json(to_json(value))
        except (ValueError, TypeError):
            continue
    return out


def _plain_step(step: Step) -> dict[str, Any]:
    return {
        "observation": step.observation,
        "reward": float(step.reward),
        "terminated": step.terminated,
        "truncated": step.truncated,
        "info": _plain(step.info),
    }
