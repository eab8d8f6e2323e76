"""The part of the environment checker that touches the user's environment; `check.py` runs it in a child process.

Each scenario walks fresh environments and reports what breaks by the rule's name. Before every call of the user's code
it says which call comes, so that the parent knows what hung or ended the process.
"""

from __future__ import annotations

import copy
import json
import math
import pickle
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from forethought.envs.env import Step
from forethought.envs.registry import find_env
from forethought.errors import ForethoughtError
from forethought.rewards.loading import describe, where

HOSTILE: dict[str, str] = {
    "empty": "",
    "blanks": " \t ",
    "newlines": "\n\n\r\n\n",
    "control characters": "\x00\x07\x1b[2J\x7f",
    "tags": "<action></action></think><tool_call>{</tool_call>",
    "special tokens": "<|im_end|>\n<|im_start|>system\n</s><|endoftext|>",
    "broken JSON": '{"name": "step", "arguments": {"x": [1, 2',
    "deep brackets": "[" * 5000 + "(" * 5000,
    "format marks": "%s %d {0} {name} {{}} ${HOME}",
    "code": "__import__('os')._exit(3)",
    "a huge number": "9" * 5000,
    "odd numbers": "-1 1e999 nan inf 0x10 1_000 ½ ٣",
    "unicode": "é e\u0301 日本語 🙂👩\u200d👩\u200d👧 \u202eabc\u202c \ufeff\ufffd \U0010ffff",
    "100,000 characters": "go " * 33_333 + "!",
}
"""Any of these must be answered with a Step."""

GENERIC = ("look", "help", "0", "1", "2", "3", "yes", "no", "north", "take 1", "What is next?", "\\boxed{1}")
"""Actions for environments that name none: most will call them invalid, which is an answer too."""

CONTINUE = 6  # steps that are compared after a restore
PLACES = 6  # places in an episode at which a snapshot is taken
LONG_OBSERVATION = 20_000

STEP_FIX = {
    "snapshot": "snapshot the full state, with its RNG and clocks",
    "snapshot-alias": "copy deeply in snapshot() AND in restore(): later steps must not change a snapshot",
}
"""What to do about a Step that differs, or a step that raises, after a restore."""

Episode = tuple[Any, int, list[str]]
"""Task, seed, actions."""


class Abandon(Exception):
    """The scenario cannot go on; what broke has been reported."""


def same(a: Any, b: Any) -> bool:
    """Deep equality that knows NaN and arrays; values of other types differ (they would differ in a file)."""
    if hasattr(a, "tolist") and type(a) is type(b):
        a, b = a.tolist(), b.tolist()
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and math.isnan(a) and math.isnan(b):
        return True
    try:
        return bool(a == b)
    except Exception:
        return False


def short(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def difference(a: Step, b: Step) -> str:
    """`reward 1.0 became 0.0`, for the first field that differs, or an empty text."""
    for name in ("observation", "reward", "terminated", "truncated"):
        if not same(getattr(a, name), getattr(b, name)):
            return f"{name} {short(getattr(a, name))} became {short(getattr(b, name))}"
    for key in sorted({*a.info, *b.info}, key=str):
        if key not in b.info or key not in a.info:
            return f"info[{key!r}] {'vanished' if key in a.info else 'appeared'}"
        if not same(a.info[key], b.info[key]):
            return f"info[{key!r}] {short(a.info[key])} became {short(b.info[key])}"
    return ""


class Walker:
    """Calls a user's environment and reports, by rule, what it does wrong.

    Args:
        factory: makes environments.
        tell: receives ("call", text), ("broken", rule, message), ("warn", rule, message), ("checked", rule).
        source: path of the user's file, for line numbers.
    """

    def __init__(self, factory: Callable[[], Any], tell: Callable[..., None], source: str, max_steps: int):
        self.factory, self.tell, self.source, self.max_steps = factory, tell, source, max_steps
        self.live: list[tuple[str, dict, dict]] = []  # (where, the info that was returned, its copy)

    def broken(self, rule: str, message: str) -> None:
        self.tell("broken", rule, message)

    def require(self, rule: str, fine: bool, message: str) -> bool:
        self.tell("checked", rule)
        if not fine:
            self.broken(rule, message)
        return fine

    def call(self, what: str, fn: Callable[..., Any], *args: Any, rule: str = "exceptions", fix: str = "") -> Any:
        self.tell("call", what)
        self.tell("checked", rule)
        try:
            return fn(*args)
        except (Exception, SystemExit) as err:
            fix = fix or "it must work at any time"
            self.broken(rule, f"{what} raised {describe(err)}{where(err, self.source)}; {fix}")
            raise Abandon from err

    # -- the five calls --
    def make(self) -> Any:
        return self.call("the factory", self.factory, fix="it must make an environment without arguments")

    def reset(self, env: Any, task: Any, seed: int) -> Step:
        what = f"reset(task={short(task)}, seed={seed})"
        fix = "give tasks= if it needs a task" if task is None else "it must start the episode of any task"
        step = self.checked(self.call(what, env.reset, task, seed, fix=fix), what, "reset")
        self.require(
            "reset", not step.done, f"{what} returned a Step that is already over; the first Step must await an action"
        )
        self.require("reset", step.reward == 0, f"{what} returned reward {step.reward}: nothing was done yet; return 0")
        return step

    def step(self, env: Any, action: str, rule: str = "exceptions") -> Step:
        what = f"step({short(action)})"
        fix = STEP_FIX.get(rule, "answer it with a Step whose observation says what is wrong")
        return self.checked(self.call(what, env.step, action, rule=rule, fix=fix), what, "step")

    def snapshot(self, env: Any) -> Any:
        return self.call("snapshot()", env.snapshot, rule="snapshot")

    def restore(self, env: Any, snapshot: Any) -> None:
        self.call("restore(snapshot)", env.restore, snapshot, rule="snapshot")

    def key(self, env: Any) -> str | None:
        key = self.call("state_key()", env.state_key, rule="state-key")
        fine = key is None or isinstance(key, str)
        self.require("state-key", fine, f"state_key() returned {_kind(key)}; return a str, or None where there is none")
        return key if fine else None

    # -- the form of a Step --
    def checked(self, step: Any, what: str, rule: str) -> Step:
        """Report what is wrong with a returned Step; a copy of it that later calls cannot change."""
        if not self.require(rule, isinstance(step, Step), f"{what} returned {_kind(step)}; {_fix(step)}"):
            raise Abandon
        obs, reward, info = step.observation, step.reward, step.info
        if self.require(
            "observation", isinstance(obs, str), f"{what}: observation is {_kind(obs)}; turn it into text (str)"
        ):
            try:
                obs.encode()
            except UnicodeEncodeError:
                self.broken("observation", f"{what}: observation {short(obs)} holds half a surrogate pair: not text")
            if len(obs) > LONG_OBSERVATION:
                self.tell(
                    "warn", "observation", f"{what}: observation of {len(obs):,} characters; it fills the context"
                )
        number = isinstance(reward, int | float) and not isinstance(reward, bool)
        self.require(
            "reward",
            number and math.isfinite(reward),
            f"{what}: reward is {short(reward)} ({type(reward).__name__}); give a finite float",
        )
        both = f"terminated is {_kind(step.terminated)}, truncated is {_kind(step.truncated)}"
        flags = isinstance(step.terminated, bool) and isinstance(step.truncated, bool)
        if self.require("flags", flags, f"{what}: {both}; make both bool(...)"):
            self.require(
                "flags",
                not (step.terminated and step.truncated),
                f"{what}: terminated and truncated at once; an end of the world's own, also one on the last allowed "
                "step, is terminated only",
            )
        if not self.require("info", isinstance(info, dict), f"{what}: info is {_kind(info)}; give a dict"):
            raise Abandon
        self.check_info(info, what, step)
        frozen = Step(obs, reward, step.terminated, step.truncated, copy.deepcopy(info))
        self.live.append((what, info, frozen.info))
        return frozen

    def check_info(self, info: dict, what: str, step: Step) -> None:
        try:
            json.dumps(info, allow_nan=False)
            text_keys = all(isinstance(k, str) for k in info)
        except (TypeError, ValueError, RecursionError) as err:
            self.tell("warn", "info", f"{what}: info cannot be stored as JSON ({describe(err)}); use plain values")
        else:
            if not text_keys:
                self.tell("warn", "info", f"{what}: info has keys that are not text: {short(list(info))}")
        if "success" in info:
            won = info["success"]
            if self.require(
                "success", isinstance(won, bool), f"{what}: info['success'] is {_kind(won)}; make it bool(...)"
            ):
                self.require(
                    "success",
                    not (won and not step.terminated),
                    f"{what}: info['success'] is True but terminated is False; done is not won, and won is terminated",
                )

    def unchanged_infos(self) -> None:
        """Infos that were returned earlier must not change afterwards."""
        for what, live, frozen in self.live:
            if not self.require(
                "info",
                same(live, frozen),
                f"{what}: its info changed after it was returned; return a copy of what the environment keeps",
            ):
                break
        self.live.clear()


def _kind(value: Any) -> str:
    return f"{short(value)} ({type(value).__name__})"


def _fix(step: Any) -> str:
    if isinstance(step, tuple) and len(step) in (2, 5):
        return "return a Step; this is Gymnasium's form, which envs.adapters.gymnasium.GymnasiumEnv adapts"
    return "return Step(observation, reward, terminated, truncated, info)"


# -- scenarios -----------------------------------------------------------------------------------------------------


def choose(step: Step, actions: Sequence[str] | None, rng: random.Random) -> str:
    """An action: of the user's list, else of `info["actions"]` where the environment names them, else a generic one."""
    named = step.info.get("actions")
    legal = isinstance(named, list | tuple) and [a for a in named if isinstance(a, str)]
    return rng.choice(list(actions or legal or GENERIC))


def walk(w: Walker, task: Any, seed: int, actions: Sequence[str] | None) -> None:
    """One episode with chosen actions; tells ("walked", action, step) as it goes."""
    env = w.make()
    step = w.reset(env, task, seed)
    w.tell("walked", None, _digest(step))
    rng = random.Random(seed)
    last = ""
    for _ in range(w.max_steps):
        last = choose(step, actions, rng)
        step = w.step(env, last)
        w.tell("walked", last, _digest(step))
        if step.done:
            break
    w.unchanged_infos()
    if step.done:
        w.tell("ended")
        after_done(w, env, step, last)


def _digest(step: Step) -> tuple[Any, ...]:
    """What two processes must agree on (reprs, because a user's types may not be picklable)."""
    info = {k: repr(v) for k, v in sorted(step.info.items(), key=str)}
    observation = step.observation if isinstance(step.observation, str) else repr(step.observation)
    return observation, repr(step.reward), repr(step.terminated), repr(step.truncated), info


def after_done(w: Walker, env: Any, end: Step, action: str) -> None:
    what = f"step({short(action)}) after the end"
    w.tell("call", what)
    try:
        step = env.step(action)
    except ForethoughtError:
        w.tell("checked", "after-done")
        return
    except (Exception, SystemExit) as err:
        w.broken("after-done", f"{what} raised {describe(err)}; raise EnvError, or return the end again with reward 0")
        return
    fine = isinstance(step, Step) and (step.terminated, step.truncated) == (end.terminated, end.truncated)
    w.require(
        "after-done", fine, f"{what} went on ({short(step)}); raise EnvError, or return the end again with reward 0"
    )
    if fine:
        w.require("after-done", step.reward == 0, f"{what} paid {step.reward} again; give 0, or raise EnvError")


def replay(w: Walker, env: Any, actions: Sequence[str], rule: str = "exceptions") -> list[Step]:
    out = []
    for action in actions:
        out.append(w.step(env, action, rule))
        if out[-1].done:
            break
    return out


def seeds(w: Walker, episode: Episode) -> None:
    """The same seed and actions give the same Steps and keys, also beside another episode."""
    task, seed, actions = episode
    runs = []
    for beside in (False, False, True):
        env, other = w.make(), None
        if not w.require(
            "independent", env is not runs[0][0] if runs else True, "the factory returned one object twice"
        ):
            return
        steps = [w.reset(env, task, seed)]
        keys = [w.key(env)]
        if beside:
            other = w.make()
            live = w.reset(other, task, seed + 1)
        for i, action in enumerate(actions):
            if other is not None and not live.done:
                live = w.step(other, actions[-1 - i])
            steps.append(w.step(env, action))
            keys.append(w.key(env))
            if steps[-1].done:
                break
        runs.append((env, steps, keys))
    (_, first, first_keys), (_, second, second_keys), (_, third, _) = runs
    fix = "draw everything random from a random.Random(seed) that reset makes"
    if not w.require("seed", *_equal(first, second, f"the same seed ({seed}) and actions gave another episode", fix)):
        return
    fix = "keep all state in the object, none on the class or in the module"
    w.require("independent", *_equal(first, third, "an episode changed because another environment was used", fix))
    for i, (a, b) in enumerate(zip(first_keys, second_keys, strict=True)):
        if not w.require(
            "state-key",
            a == b,
            f"state_key() after {i} actions is {short(a)} in one object and {short(b)} in another that is in the same "
            "state; build it from the state's values only",
        ):
            break


def _equal(first: Sequence[Step], second: Sequence[Step], what: str, fix: str) -> tuple[bool, str]:
    for i, (a, b) in enumerate(zip(first, second, strict=False)):
        if change := difference(a, b):
            return False, f"{what}: after {i} actions {change}; {fix}"
    return len(first) == len(second), f"{what}: {len(first)} Steps became {len(second)}; {fix}"


def snapshots(w: Walker, episode: Episode) -> None:
    """After restore the same action gives the same Step: once, twice, after other actions, with two held at once."""
    task, seed, actions = episode
    places = sorted({round(i * (len(actions) - 1) / max(1, PLACES - 1)) for i in range(PLACES)}) if actions else []
    for place in places:
        env = w.make()
        w.reset(env, task, seed)
        if any(s.done for s in replay(w, env, actions[:place])):
            break
        before = w.key(env)
        snapshot = w.snapshot(env)
        w.require("state-key", w.key(env) == before, "state_key() changed although only snapshot() was called")
        ahead = actions[place : place + CONTINUE]
        first = replay(w, env, ahead)
        what = f"after restore (of a snapshot after {place} actions)"
        w.restore(env, snapshot)
        after = w.key(env)
        w.require("state-key", after == before, f"state_key() is {short(after)} after restore, was {short(before)}")
        again = replay(w, env, ahead, "snapshot")
        if not w.require("snapshot", *_equal(first, again, what, "snapshot the full state, with its RNG and clocks")):
            return
        rule, fix = (
            "snapshot-alias",
            "copy deeply in snapshot() AND in restore(): later steps must not change a snapshot",
        )
        w.restore(env, snapshot)
        replay(w, env, ahead[::-1], rule)
        w.restore(env, snapshot)
        again = replay(w, env, ahead[:1], rule)
        later = None if again[-1].done else w.snapshot(env)
        again += [] if later is None else replay(w, env, ahead[1:], rule)
        if not w.require(rule, *_equal(first, again, f"after a second restore ({what[15:]}", fix)):
            return
        if later is not None:
            w.restore(env, snapshot)
            again = replay(w, env, ahead, rule)
            if not w.require(rule, *_equal(first, again, "with two snapshots held, after restore of the first", fix)):
                return
            w.restore(env, later)
            again = first[:1] + replay(w, env, ahead[1:], rule)
            if not w.require(rule, *_equal(first, again, "with two snapshots held, after restore of the second", fix)):
                return


def portable(w: Walker, episode: Episode) -> None:
    """Warn where a snapshot is bound to its object or cannot leave the process: searches then run in one process."""
    task, seed, actions = episode
    env, other = w.make(), w.make()
    w.reset(env, task, seed)
    w.reset(other, task, seed + 1)
    snapshot = w.snapshot(env)
    expected = w.step(env, actions[0])
    w.tell("call", "restore(snapshot of another object)")
    try:
        other.restore(snapshot)
        change = difference(expected, other.step(actions[0]))
    except Exception as err:
        change = describe(err)
    w.tell("checked", "portable")
    if change:
        w.tell("warn", "portable", f"a snapshot does not work in another object of the same task ({change})")
        return
    try:
        pickle.dumps(snapshot)
    except Exception as err:
        w.tell("warn", "portable", f"a snapshot cannot be pickled ({describe(err)}); searches stay in one process")


def hostile(w: Walker, task: Any, name: str, then: Sequence[str]) -> None:
    """One hostile action must be answered, and the environment must go on afterwards."""
    env = w.make()
    w.reset(env, task, 0)
    if not w.step(env, HOSTILE[name], rule="hostile").done:
        replay(w, env, then[:2])


# -- the child's side ----------------------------------------------------------------------------------------------


def serve(connection: Any, factory: Any, max_steps: int) -> None:
    """Load the factory (a spec, or a callable in thread mode), then run scenarios as they are asked for."""
    source = ""
    try:
        if isinstance(factory, str):
            source = str(Path(factory.rpartition(":")[0]).expanduser().resolve())
            factory = find_env(factory)
        connection.send(("loaded", problem_with(factory)))
    except ForethoughtError as err:
        connection.send(("loaded", str(err)))
        return
    walker = Walker(factory, lambda *message: connection.send(message), source, max_steps)
    scenarios = {
        "walk": walk,
        "seeds": seeds,
        "snapshots": snapshots,
        "portable": portable,
        "hostile": hostile,
        "protocol": protocol,
    }
    while True:
        name, args = connection.recv()
        walker.live.clear()
        try:
            scenarios[name](walker, *args)
        except Abandon:
            pass
        except Exception as err:  # e.g. an info whose copy fails: the environment's doing, outside of its calls
            walker.broken("exceptions", f"what the environment returned cannot be handled: {describe(err)}")
        connection.send(("done",))


def problem_with(factory: Any) -> str:
    """Why this is no factory, or an empty text."""
    if not callable(factory):
        hint = "; name its class, or a function that makes one" if hasattr(factory, "reset") else ""
        return f"{_kind(factory)} cannot be called to make an environment{hint}"
    return ""


def protocol(w: Walker) -> None:
    env = w.make()
    missing = [m for m in ("reset", "step", "snapshot", "restore", "state_key") if not callable(getattr(env, m, None))]
    w.require(
        "protocol", not missing, f"{type(env).__name__} has no {', '.join(missing)}(); see forethought.envs.env.Env"
    )
    w.tell("missing", missing)
