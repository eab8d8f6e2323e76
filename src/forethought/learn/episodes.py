"""Episodes: a policy acts in text environments, many at once, on token trees.

All live episodes take a turn together: one `Engine.extend` over their leaves, then one call into each environment, then
the new observation is appended to each path. Token in, token out: an answer keeps the ids that were sampled, an
observation is encoded once, nothing that a model saw is made again from text. The engine keeps the keys and values of
live episodes (`TorchEngine.reuse`), so a turn prefills its new tokens only: the observation, and the one sampled token
that was never fed.

The episodes of a group (one task, one seed of the environment) stand in one tree with an empty root, and share the first
prompt where its ids are equal. What an episode samples depends on the sampling seed, its task, its number and the turn,
not on the others.

A prompt holds the first observation and then the transcript. With `history` k, or where the context is full and
`overflow` is "drop", it holds the first observation and the last turns only: a new branch of the tree below the first
prompt, made of the ids of the turns that stay. With history 0 it is the current observation alone.

Why an episode ended (`Episode.stop`): "won", "lost" (terminated, and the environment knows of success), "terminated"
(it does not); "truncated" (cut by the environment), "turns" (by `max_turns`), "context" (no room for another answer),
"invalid" (too many invalid actions), "unparsable" (a world model's prediction could not be read); "error" (the
environment raised, hung or broke its protocol). Done is not won: success is `info["success"]`, never the end itself.
Failed episodes are no evidence on the policy: they get no credit and are counted.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from forethought.envs.env import Env, Step
from forethought.errors import ConfigError, DataError, EnvError
from forethought.learn.env_calls import EnvCalls
from forethought.models.chat import ChatRenderer
from forethought.models.engine import Engine, Sampling
from forethought.tree.tree import Kind, TokenTree

Task = Mapping[str, Any]
ActionParser = Callable[[str], "str | None"]
"""Text of an answer -> the action for the environment; None: there is none, then the environment gets the text as it is
and the turn counts as invalid. (`envs.actions.read_action` is one.)"""

EndReason = Literal["won", "lost", "terminated", "truncated", "turns", "context", "invalid", "unparsable", "error"]
TERMINATED = ("won", "lost", "terminated")


@dataclass(frozen=True, kw_only=True)
class EpisodeRules:
    """How episodes are played."""

    max_turns: int = 30
    """Turns after which an episode is cut, beside the environment's own limit."""
    history: int | None = None
    """Turns before the current observation that a prompt shows; null: all of them."""
    overflow: Literal["stop", "drop"] = "stop"
    """When a prompt leaves less than max_new_tokens in the context: end the episode, or drop the oldest turns."""
    max_invalid: int = 0
    """Invalid actions after which an episode is cut; 0 is off."""
    system: str = ""
    """System text before the first observation."""
    env_workers: int = 0
    """Threads in which environments run; 0: in the main thread, without a time limit."""
    env_timeout: float = 60.0
    """Seconds for one call of an environment, with env_workers."""
    cache_tokens: int = 65_536
    """Tokens whose keys and values the engine keeps; beyond them episodes are prefilled again."""

    def rule_problems(self) -> list[str]:
        """What is wrong with the settings, each with its fix."""
        bad = []
        if self.max_turns < 1:
            bad.append(f"max_turns={self.max_turns}: give at least 1")
        if self.history is not None and self.history < 0:
            bad.append(f"history={self.history}: give 0 or more turns, or null for all")
        if self.overflow not in ("stop", "drop"):
            bad.append(f"overflow={self.overflow!r}: 'stop' or 'drop'")
        for name in ("max_invalid", "env_workers", "cache_tokens"):
            if getattr(self, name) < 0:
                bad.append(f"{name}={getattr(self, name)}: give 0 or more")
        if not 0 < self.env_timeout < math.inf:
            bad.append(f"env_timeout={self.env_timeout}: give a positive number of seconds")
        return bad


@dataclass
class Turn:
    """One answer of the policy and what came of it.

    node: the sampled node. state: `Env.state_key()` before the action, or the observation where there is none.
    reward: of the environment. after: ids that the next observation added behind the answer.
    """

    node: int
    text: str
    state: str
    observation: str = ""
    reward: float = 0.0
    invalid: bool = False
    after: list[int] = field(default_factory=list)


@dataclass
class Episode:
    """One episode: its place in a tree, its turns, and how it ended.

    number: of the episode within its task and rollout. prompt: node of the first prompt. end: last node of its path.
    success: what the environment says; None where it does not know. dropped: turns that left the prompt for want of
    room. branches: prompts that began a new branch.
    """

    task: Task
    number: int
    tree: TokenTree
    env: Env
    seed: int
    prompt: int = 0
    end: int = 0
    turns: list[Turn] = field(default_factory=list)
    stop: EndReason | None = None
    success: bool | None = None
    error: str | None = None
    dropped: int = 0
    branches: int = 0
    shown: int = 0  # turns in the prompt at hand
    observation: str = ""

    @property
    def failed(self) -> bool:
        """The environment failed, so the episode says nothing on the policy."""
        return self.stop == "error"

    @property
    def terminated(self) -> bool:
        return self.stop in TERMINATED

    @property
    def truncated(self) -> bool:
        """Cut, not ended: a value target bootstraps from the last state."""
        return self.stop is not None and not self.terminated and not self.failed

    @property
    def invalid(self) -> int:
        """Turns with an invalid action."""
        return sum(t.invalid for t in self.turns)

    @property
    def rewards(self) -> list[float]:
        return [t.reward for t in self.turns]

    @property
    def total(self) -> float:
        """Sum of the environment's rewards."""
        return float(sum(self.rewards))


def env_task(task: Task) -> Task | None:
    """What `Env.reset` gets: None where the task is nothing but a seed."""
    return task if set(task) - {"id", "seed", "prompt"} or task.get("prompt") else None


@dataclass
class Players:
    """What plays: engine, renderer, a factory of environments, and the rules.

    Args:
        make: called once for each episode.
        context: longest sequence of the model, in tokens.
        parse: see `ActionParser`; None: the environment reads the text itself.
    """

    engine: Engine
    renderer: ChatRenderer
    make: Callable[[], Env]
    rules: EpisodeRules
    context: int
    parse: ActionParser | None = None

    def play(
        self,
        groups: Sequence[tuple[Task, int]],
        sampling: Sampling,
        *,
        seed: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[list[Episode]]:
        """Play `count` episodes of each (task, count); one tree a group.

        A task's "seed" is that of its environments; its "id" and the episode's number seed the sampling, so groups of
        one task in one call get different numbers.

        Args:
            sampling: of each answer; max_tokens is the room that an answer needs in the context.
            seed: of the trees.
            progress: called with (episodes that ended, all).

        Raises:
            ConfigError: the rules are wrong. EngineError: of the engine. What an environment does wrong ends its
            episode.
        """
        if bad := self.rules.rule_problems():
            raise ConfigError("episodes: " + "; ".join(bad))
        calls = EnvCalls(self.rules.env_workers, self.rules.env_timeout)
        cache = getattr(self.engine, "reuse", None)
        try:
            with cache(self.rules.cache_tokens) if cache and self.rules.cache_tokens else contextlib.nullcontext():
                return self._play(groups, sampling, seed, calls, progress)
        finally:
            calls.close()

    def _play(self, groups, sampling: Sampling, seed: int, calls: EnvCalls, progress) -> list[list[Episode]]:
        numbers: Counter[str] = Counter()
        out: list[list[Episode]] = []
        for task, count in groups:
            name = str(task["id"])
            tree = TokenTree(task=name, seed=seed)
            first = numbers[name]
            numbers[name] += count
            out.append([Episode(task, first + i, tree, _Missing(), int(task.get("seed", 0))) for i in range(count)])
        every = [e for group in out for e in group]
        self._reset(every, calls, sampling.max_tokens)
        live = [e for e in every if e.stop is None]
        while live:
            if progress:
                progress(len(every) - len(live), len(every))
            self._turn(live, sampling, calls)
            live = [e for e in live if e.stop is None]
        for episode in every:
            _note(episode)
        if progress:
            progress(len(every), len(every))
        return out

    # -- beginning --
    def _reset(self, episodes: list[Episode], calls: EnvCalls, room: int) -> None:
        def begin(episode: Episode) -> Callable[[], tuple[Env, Any]]:
            def call():
                env = self.make()
                return env, env.reset(env_task(episode.task), episode.seed)

            return call

        for episode, found in zip(episodes, calls([begin(e) for e in episodes]), strict=True):
            if isinstance(found, EnvError):
                self._fail(episode, f"reset: {found}")
                continue
            episode.env, step = found
            if problem := _problem(step):
                self._fail(episode, f"reset: {problem}")
            elif step.done:
                self._fail(episode, "reset: the episode is over before its first action")
            else:
                self._first(episode, step.observation, room)

    def _first(self, episode: Episode, observation: str, room: int) -> None:
        episode.observation = observation
        try:
            leaf_tree, leaf = self.renderer.start(self._messages(observation))
        except DataError as err:
            self._fail(episode, f"reset: its observation cannot be encoded: {err}")
            return
        ids, tree = leaf_tree.path_ids(leaf), episode.tree
        same = next((n for n in tree.children(0) if tree.node_ids(n) == ids), None)
        if same is None:
            same = tree.add(0, ids, kind=Kind.PROMPT, meta=leaf_tree.meta[leaf])
        episode.prompt = episode.end = same
        if len(ids) + room > self.context:
            episode.stop = "context"

    def _messages(self, observation: str) -> list[dict[str, str]]:
        head = [{"role": "system", "content": self.rules.system}] if self.rules.system else []
        return [*head, {"role": "user", "content": observation}]

    # -- a turn of all live episodes --
    def _turn(self, live: list[Episode], sampling: Sampling, calls: EnvCalls) -> None:
        leaves = [(e.tree, e.end) for e in live]
        names = [f"{e.task['id']}\x1f{e.number}\x1f{len(e.turns)}" for e in live]
        new = self.engine.extend(leaves, 1, sampling, names=names)
        actions = []
        for episode, (node,) in zip(live, new, strict=True):
            text = self.renderer.text(episode.tree.node_ids(node))
            action = self.parse(text) if self.parse else text
            episode.turns.append(Turn(node, text, episode.observation, invalid=action is None))
            episode.shown += 1
            episode.end = node
            actions.append(text if action is None else action)

        found = _acted(live, actions, calls)
        for episode, result in zip(live, found, strict=True):
            if isinstance(result, EnvError):
                self._fail(episode, f"turn {len(episode.turns)}: {result}")
                continue
            key, step = result
            if problem := _problem(step):
                self._fail(episode, f"turn {len(episode.turns)}: {problem}")
                continue
            self._record(episode, key, step)
            self._observe(episode, step, sampling.max_tokens)

    def _record(self, episode: Episode, key: str | None, step: Step) -> None:
        turn, rules = episode.turns[-1], self.rules
        turn.state = turn.state if key is None else key
        turn.reward = float(step.reward)
        turn.observation = step.observation
        turn.invalid = turn.invalid or step.info.get("invalid") is True
        episode.tree.reward[turn.node] = turn.reward
        if turn.invalid:
            episode.tree.meta[turn.node]["invalid"] = True
        success = step.info.get("success")
        if isinstance(success, bool):
            episode.success = success and step.terminated
        if step.terminated:
            known = isinstance(success, bool)
            episode.stop = ("won" if episode.success else "lost") if known else "terminated"
        elif step.truncated:
            episode.stop = "unparsable" if step.info.get("unparsable") is True else "truncated"
        elif rules.max_invalid and episode.invalid >= rules.max_invalid:
            episode.stop = "invalid"
        elif len(episode.turns) >= rules.max_turns:
            episode.stop = "turns"

    def _observe(self, episode: Episode, step: Step, room: int) -> None:
        """Append the observation (the last one, too: it is what a truncated episode's value is read from)."""
        episode.observation = step.observation
        tree, turn = episode.tree, episode.turns[-1]
        try:
            node = self.renderer.extend_turn(tree, turn.node, step.observation, kind=Kind.OBSERVATION)
        except DataError as err:
            self._fail(episode, f"turn {len(episode.turns)}: its observation cannot be encoded: {err}")
            return
        linear = int(tree.parent[node]) == turn.node
        turn.after = tree.node_ids(node) if linear else []
        episode.branches += not linear
        episode.end = node
        if episode.stop is not None:
            return
        limit = self.context - room
        keep = episode.shown if self.rules.history is None else min(episode.shown, self.rules.history)
        if keep < episode.shown:
            self._window(episode, keep)
        while tree.path_length(episode.end) > limit:
            if self.rules.overflow == "stop" or episode.shown == 0:
                episode.stop = "context"
                return
            sizes = [int(tree.length[t.node]) + len(t.after) for t in episode.turns[-episode.shown :]]
            over, keep = tree.path_length(episode.end) - limit, episode.shown
            while over > 0 and keep:
                over -= sizes[len(sizes) - keep]
                keep -= 1
            episode.dropped += episode.shown - keep
            self._window(episode, keep)

    def _window(self, episode: Episode, keep: int) -> None:
        """A new branch with the last `keep` turns; the prompt to go on from is its end."""
        tree = episode.tree
        episode.shown = keep
        episode.branches += 1
        turns = episode.turns[len(episode.turns) - keep :]
        if not keep:
            ids = self.renderer.prompt_ids(self._messages(episode.observation))
            messages = self._messages(episode.observation)
            episode.end = tree.add(0, ids, kind=Kind.PROMPT, meta={"messages": messages})
        elif all(t.after for t in turns):
            at = episode.prompt
            for turn in turns:
                at = tree.add(at, tree.node_ids(turn.node), kind=Kind.ASSISTANT)
                at = tree.add(
                    at,
                    turn.after,
                    kind=Kind.OBSERVATION,
                    meta={"messages": [{"role": "user", "content": turn.observation}]},
                )
            episode.end = at
        else:  # the template rewrites earlier turns, so their ids cannot stand behind others
            messages = [dict(m) for m in tree.meta[episode.prompt]["messages"]]
            for turn in turns:
                messages.append({"role": "assistant", "content": turn.text})
                messages.append({"role": "user", "content": turn.observation})
            ids = self.renderer.prompt_ids(messages)
            episode.end = tree.add(0, ids, kind=Kind.OBSERVATION, meta={"messages": messages, "rerendered": True})

    @staticmethod
    def _fail(episode: Episode, why: str) -> None:
        episode.stop, episode.error, episode.success = "error", f"task {episode.task['id']!r}, {why}", None


def _acted(live: Sequence[Episode], actions: Sequence[str], calls: EnvCalls) -> list[Any]:
    """(state key before, answer) of each environment's step, or an EnvError.

    Environments of one class with a static `step_many(envs, actions) -> Steps` (world models) step in one call.
    """
    kinds = {type(e.env) for e in live}
    together = getattr(next(iter(kinds)), "step_many", None) if len(kinds) == 1 else None
    if together is not None:
        (found,) = calls([lambda: ([e.env.state_key() for e in live], together([e.env for e in live], actions))])
        return [found] * len(live) if isinstance(found, EnvError) else list(zip(*found, strict=True))

    def act(episode: Episode, action: str) -> Callable[[], tuple[str | None, Any]]:
        return lambda: (episode.env.state_key(), episode.env.step(action))

    return calls([act(e, a) for e, a in zip(live, actions, strict=True)])


class _Missing:
    """Stands for the environment of an episode that was not made yet."""

    def reset(self, task: Any = None, seed: int = 0) -> Step:
        raise EnvError("the environment was not made")

    def step(self, action: str) -> Step:
        raise EnvError("the environment was not made")

    def snapshot(self) -> Any:
        raise EnvError("the environment was not made")

    def restore(self, snapshot: Any) -> None:
        raise EnvError("the environment was not made")

    def state_key(self) -> str | None:
        raise EnvError("the environment was not made")


def _problem(step: Any) -> str | None:
    """What is wrong with an environment's answer."""
    if not isinstance(step, Step):
        return f"the environment returned {type(step).__name__}, not a Step"
    if not isinstance(step.observation, str):
        return f"the observation is {type(step.observation).__name__}, not text"
    reward = step.reward
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        return f"the reward is {reward!r}, not a finite number"
    if step.terminated and step.truncated:
        return "terminated and truncated are both true"
    return None


_WORDS = {"turns": "out of turns", "context": "out of context", "invalid": "too many invalid actions"}


def _note(episode: Episode) -> None:
    """What the report and the store read: the whole return and the reason on every leaf of the episode."""
    tree = episode.tree
    if not episode.turns:  # a node of its own below the prompt, which other episodes share
        episode.end = tree.add(episode.end, [], kind=Kind.OBSERVATION)
    last = {episode.end: len(episode.turns)}  # leaf -> turns of the episode until then
    for number, turn in enumerate(episode.turns, 1):
        for leaf in tree.leaves(turn.node):
            last[leaf] = max(number, last.get(leaf, 0))
    count = len(episode.turns)
    how = f"{_WORDS.get(episode.stop or '', episode.stop)} after {count} turn{'s' if count != 1 else ''}"
    for node, number in last.items():
        if tree.children(node):
            continue
        if episode.failed:
            tree.meta[node]["error"] = episode.error
            continue
        tree.meta[node]["return"] = episode.total
        tree.meta[node]["why"] = how if number == count else f"{how}; this is turn {number}"


# -- counts and shares -------------------------------------------------------------------------------------------------


def coverage(episodes: Sequence[Episode]) -> dict[str, Any]:
    """How many episodes there were, how many failed to run, and tasks without any that ran (by id).

    A success rate says nothing without them: episodes that failed to run are in no denominator.
    """
    ran = [e for e in episodes if not e.failed]
    tasks = {str(e.task["id"]) for e in episodes}
    seen = {str(e.task["id"]) for e in ran}
    return {
        "episodes": len(episodes),
        "ran": len(ran),
        "failed": len(episodes) - len(ran),
        "tasks": len(tasks),
        "tasks_evaluated": len(seen),
        "not_evaluated": sorted(tasks - seen),
    }


def successes(episodes: Sequence[Episode]) -> list[bool] | None:
    """Who won, of episodes that ran; None where the environment never says.

    An environment that speaks of success only at the end has not said that an episode that was cut failed, but it did.
    """
    return [bool(e.success) for e in episodes] if any(e.success is not None for e in episodes) else None


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Means over the episodes that ran, shares of stop reasons over all; NaN where there is nothing to average."""
    ran = [e for e in episodes if not e.failed]
    turns = sum(len(e.turns) for e in episodes)
    won = [len(e.turns) for e in ran if e.success]
    lengths = [int(e.tree.length[t.node]) for e in episodes for t in e.turns]
    out = {
        "episodes/return": _mean([e.total for e in ran]),
        "episodes/success": _mean([float(s) for s in successes(ran) or []]),
        "episodes/turns": _mean([len(e.turns) for e in ran]),
        "episodes/turns_of_successes": _mean(won),
        "episodes/invalid": sum(e.invalid for e in episodes) / turns if turns else math.nan,
        "episodes/failed": float(len(episodes) - len(ran)),
        "episodes/dropped_turns": float(sum(e.dropped for e in episodes)),
        "completions/mean_length": _mean(lengths),
        "tokens/generated": float(sum(lengths)),
        "env/steps": float(turns),
    }
    reasons = Counter(e.stop for e in episodes)
    return out | {f"stop/{reason}": n / len(episodes) for reason, n in sorted(reasons.items(), key=str)}


def _mean(values: Sequence[float]) -> float:
    return float(sum(values) / len(values)) if values else math.nan
