"""Scorers: a user's reward function together with its calling convention. `adapters.py` is the public face.

- native: `f(tree, leaf, task)` returns a Reward, a number or None; a parameter `text` gets the decoded response. An
  object with `batch(items) -> list[Reward | RewardError]` is called once for a batch.
- trl: `f(prompts=, completions=, completion_ids=, **columns)`, once for a batch, returns a number or None for each
  completion. Completions are texts, or message lists where the prompt is a message list.
- verl: `f(data_source=, solution_str=, ground_truth=, extra_info=)`, once for a sample, returns a number or a dict with
  "score". verl-batch: the same in the plural (`data_sources=` ...), once for a batch.

Functions may be asynchronous. TRL's `trainer_state`, `log_extra`, `log_metric` and `environments` are handed to
functions that name them or take **kwargs. None means "not applicable" and becomes a NaN value. Everything else that is
no reward (an exception, a wrong length, NaN, infinity, text) becomes a `RewardError` in the sample's place: a failed
reward never turns into 0. What a function sees is the response alone, never prompt plus response.

Departures: TRL hands its functions all columns and fails on one without **kwargs; here a function gets what it can
take. A TRL function that raises fails its whole batch, as in TRL: to call it again on single samples would give other
rewards where it compares the samples.

Signatures read from TRL 1.16 (`GRPOTrainer._calculate_rewards`) and verl's reward managers.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from forethought.errors import ConfigError, DataError, RewardError
from forethought.rewards.loading import absolute_spec, describe, load_object
from forethought.rewards.reward import Reward
from forethought.tree.tree import Kind, TokenTree

Task = Mapping[str, Any]
Item = tuple[TokenTree, int, Task]
"""One trajectory to be judged: tree, leaf, task."""
Outcome = Reward | RewardError
Decode = Callable[[list[int]], str]
"""Token ids to text without special tokens, e.g. `lambda ids: tokenizer.decode(ids, skip_special_tokens=True)`."""
Style = Literal["native", "trl", "verl", "verl-batch"]

_TRL_OWN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
_VERL_OWN = ("data_source", "solution_str", "ground_truth", "extra_info")
_GROUND_TRUTHS = ("reward_model.ground_truth", "ground_truth", "answer")


@dataclass
class TrainerState:
    """What a TRL function can read about the run."""

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0


@dataclass
class RewardLogs:
    """What functions logged: `log_metric(name, value)` and `log_extra(column, values)`."""

    metrics: dict[str, list[float]] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def log_metric(self, name: str, value: float) -> None:
        self.metrics.setdefault(name, []).append(float(value))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        # As text, because they may have to leave the process and end in a file.
        plain = (v if v is None or isinstance(v, str | bool | int | float) else str(v) for v in values)
        self.columns.setdefault(column, []).extend(plain)

    def add(self, other: RewardLogs) -> None:
        for name, values in other.metrics.items():
            self.metrics.setdefault(name, []).extend(values)
        for name, values in other.columns.items():
            self.columns.setdefault(name, []).extend(values)


@dataclass(frozen=True)
class Call:
    """One call of a user's function: its arguments, and the positions (in the batch) of the samples it judges."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    members: tuple[int, ...]


# -- what a function sees of a trajectory ------------------------------------------------------------------------------


def response_nodes(tree: TokenTree, leaf: int) -> list[int]:
    """Nodes of the response: the path from its first sampled node on, observations in between included.

    A tree without sampled nodes (demonstrations) counts as prompt its root only.
    """
    path = tree.path(leaf)
    first = next((i for i, node in enumerate(path) if tree.sampled[node]), 1)
    return path[first:]


def _ids(tree: TokenTree, nodes: Sequence[int]) -> list[int]:
    return [token for node in nodes for token in tree.node_ids(node)]


def response_text(tree: TokenTree, leaf: int, decode: Decode) -> str:
    """The decoded response, without the prompt."""
    return decode(_ids(tree, response_nodes(tree, leaf)))


def response_messages(tree: TokenTree, leaf: int, decode: Decode) -> list[dict[str, str]]:
    """The response as chat messages; neighbouring nodes of one role are one message."""
    roles = {Kind.SYSTEM: "system", Kind.USER: "user", Kind.OBSERVATION: "tool", Kind.TOOL: "tool"}
    runs: list[tuple[str, list[int]]] = []
    for node in response_nodes(tree, leaf):
        role = roles.get(Kind(int(tree.kind[node])), "assistant")
        if runs and runs[-1][0] == role:
            runs[-1][1].append(node)
        else:
            runs.append((role, [node]))
    return [{"role": role, "content": decode(_ids(tree, nodes))} for role, nodes in runs]


# -- what a function may return ----------------------------------------------------------------------------------------


def _scalar(value: Any) -> Any:
    """NumPy scalars and one-element tensors as Python numbers; everything else unchanged."""
    if not isinstance(value, bool | int | float | str) and getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    return value


def _number(value: Any, what: str) -> float:
    """Raises: RewardError."""
    value = _scalar(value)
    if not isinstance(value, bool | int | float):
        raise RewardError(f"{what} is {_short(value)}, not a number; return a finite number, or None if not applicable")
    value = float(value)
    if not math.isfinite(value):
        raise RewardError(f"{what} is {value}; return a finite number, or None if not applicable")
    return value


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        text = "(no repr)"
    return f"{text if len(text) <= 80 else text[:80] + ' ...'} ({type(value).__name__})"


def parameters_of(fn: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """Parameters by name, and whether it takes **kwargs."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError) as err:
        raise ConfigError(f"reward function {_name(fn)}: its signature cannot be read; wrap it in a def") from err
    kinds = [p.kind for p in parameters.values()]
    return dict(parameters), inspect.Parameter.VAR_KEYWORD in kinds


def _name(fn: Any) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", None) or type(fn).__name__


def _finish(value: Any) -> Any:
    """The result of an awaitable (also when this thread already runs an event loop)."""
    if not inspect.isawaitable(value):
        return value

    async def wait(awaitable: Awaitable[Any]) -> Any:
        return await awaitable

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(wait(value))
    box: list[Any] = []

    def target() -> None:
        try:
            box.append((True, asyncio.run(wait(value))))
        except BaseException as err:
            box.append((False, err))

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join()
    fine, result = box[0]
    if fine:
        return result
    raise result


# -- the adapters ------------------------------------------------------------------------------------------------------


class Scorer:
    """A reward function with its calling convention. Callable as `f(tree, leaf, task) -> Reward`.

    Attributes: name (for logs and messages), fn, spec (`file.py:NAME` it was loaded from, or None), style.
    """

    style: Style = "native"

    def __init__(self, fn: Callable[..., Any], *, decode: Decode | None, name: str | None, spec: str | None = None):
        self.fn, self.decode, self.spec = fn, decode, spec
        self.name = name or _name(fn)
        self.parameters, self.takes_any = parameters_of(fn)

    def accepts(self, name: str) -> bool:
        return name in self.parameters or self.takes_any

    def _decode(self) -> Decode:
        if self.decode is None:
            raise ConfigError(
                f"reward function {self.name!r} reads text: give decode=, a function from token ids to text, "
                "e.g. lambda ids: tokenizer.decode(ids, skip_special_tokens=True)"
            )
        return self.decode

    def required(self) -> tuple[str, ...]:
        """Task columns without which the function cannot be called."""
        return ()

    def missing(self, task: Task) -> list[str]:
        return [c for c in self.required() if c not in task]

    def check(self, tasks: Sequence[Task]) -> None:
        """Check before compute that every task has the columns that the function needs.

        Raises:
            DataError: names the function, the columns, the first task and the number of tasks.
        """
        bad = [(t, m) for t in tasks if (m := self.missing(t))]
        if bad:
            task, columns = bad[0]
            raise DataError(
                f"reward function {self.name!r} needs the column(s) {', '.join(map(repr, columns))}, which "
                f"{len(bad)} of {len(tasks)} tasks lack; the first is task {task.get('id')!r} with the columns "
                f"{sorted(task)}"
            )

    def calls(
        self, items: Sequence[Item], environments: Sequence[Any] | None = None
    ) -> tuple[list[Call], dict[int, RewardError]]:
        """Calls that judge the items, and errors of items that cannot be judged (a column is missing)."""
        errors: dict[int, RewardError] = {}
        for i, (_, _, task) in enumerate(items):
            if missing := self.missing(task):
                columns = ", ".join(map(repr, missing))
                errors[i] = RewardError(
                    f"reward function {self.name!r}: task {task.get('id')!r} lacks the column(s) {columns}"
                )
        good = [i for i in range(len(items)) if i not in errors]
        return (self._calls(items, good, environments) if good else []), errors

    def _calls(self, items: Sequence[Item], good: list[int], environments: Sequence[Any] | None) -> list[Call]:
        raise NotImplementedError

    def _read(self, output: Any, count: int) -> list[Any]:
        """Checks the form of an output; one value per sample. Raises: RewardError."""
        return [output]

    def _reward(self, value: Any) -> Reward:
        """One value as a Reward. Raises: RewardError."""
        what = f"the result of reward function {self.name!r}"
        if value is None:
            return Reward(math.nan, why="not applicable")
        if not isinstance(value, Reward):
            return Reward(_number(value, what))
        total = _scalar(value.value)
        not_applicable = isinstance(total, float) and math.isnan(total)
        total = math.nan if not_applicable else _number(total, f"{what}: value")
        parts = {str(k): _number(v, f"{what}: part {k!r}") for k, v in value.parts.items()}
        return Reward(total, parts, str(value.why))

    def run(self, call: Call, logs: RewardLogs, state: TrainerState) -> list[Outcome]:
        """Make a call; a failure is a RewardError for each of its samples."""
        del state, logs
        return self._run(call)

    def _run(self, call: Call) -> list[Outcome]:
        count = len(call.members)
        try:
            values = self._read(_finish(self.fn(*call.args, **call.kwargs)), count)
        except RewardError as err:
            return [RewardError(f"reward function {self.name!r}: {err}") for _ in range(count)]
        except (Exception, SystemExit, asyncio.CancelledError) as err:
            return [RewardError(f"reward function {self.name!r} raised {describe(err)}") for _ in range(count)]
        out: list[Outcome] = []
        for value in values:
            try:
                out.append(self._reward(value))
            except RewardError as err:
                out.append(err)
        return out

    def batch(self, items: Sequence[Item]) -> list[Outcome]:
        """Judge a batch here and now, without a time limit."""
        calls, errors = self.calls(items)
        logs, state = RewardLogs(), TrainerState()
        out: dict[int, Outcome] = dict(errors)
        for call in calls:
            out |= dict(zip(call.members, self.run(call, logs, state), strict=True))
        return [out[i] for i in range(len(items))]

    def __call__(self, tree: TokenTree, leaf: int, task: Task) -> Reward:
        outcome = self.batch([(tree, leaf, task)])[0]
        if isinstance(outcome, RewardError):
            raise outcome
        return outcome


class NativeReward(Scorer):
    """Our own convention. A number stands for Reward(number), None for Reward(NaN)."""

    def __init__(self, fn: Callable[..., Any], *, decode: Decode | None, name: str | None, spec: str | None = None):
        self.batched = hasattr(fn, "batch")
        called = fn.batch if self.batched else fn  # type: ignore[attr-defined]
        super().__init__(called, decode=decode, name=name or _name(fn), spec=spec)

    def _calls(self, items, good, environments):
        if self.batched:
            return [Call(([items[i] for i in good],), {}, tuple(good))]
        wants_text = "text" in self.parameters
        out = []
        for i in good:
            tree, leaf, task = items[i]
            text = {"text": response_text(tree, leaf, self._decode())} if wants_text else {}
            out.append(Call((tree, leaf, task), text, (i,)))
        return out

    def _read(self, output, count):
        return _per_sample(output, count, "result") if self.batched else [output]

    def _reward(self, value):
        if isinstance(value, RewardError):
            raise value
        return super()._reward(value)


def _per_sample(output: Any, count: int, one: str) -> list[Any]:
    if hasattr(output, "tolist") and getattr(output, "ndim", 0) == 1:
        output = output.tolist()
    if not isinstance(output, list | tuple):
        raise RewardError(f"returned {_short(output)}, not a list; return a list of {count}, one {one} per completion")
    if len(output) != count:
        raise RewardError(f"returned {len(output)} {one}s for {count} completions; return one per completion")
    return list(output)


class TRLReward(Scorer):
    """A TRL function: called once a batch, by keyword."""

    style: Style = "trl"

    def __init__(self, fn: Callable[..., Any], *, decode: Decode | None, name: str | None, spec: str | None = None):
        super().__init__(fn, decode=decode, name=name, spec=spec)
        fixed = [p.name for p in self.parameters.values() if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
        if fixed:
            raise ConfigError(
                f"reward function {self.name!r}: TRL functions are called by keyword, but {', '.join(fixed)} "
                "is positional-only; remove the '/' of its signature"
            )

    def required(self):
        plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        named = [p.name for p in self.parameters.values() if p.kind in plain and p.default is p.empty]
        return tuple(n for n in named if n not in _TRL_OWN)

    def _calls(self, items, good, environments):
        if "environments" in self.parameters and environments is None:
            if self.parameters["environments"].default is inspect.Parameter.empty:
                raise ConfigError(
                    f"reward function {self.name!r} reads `environments`, but this run has none; "
                    "train with environments, or give the parameter a default"
                )
        decode = self._decode()
        prompts, completions, ids = [], [], []
        for i in good:
            tree, leaf, task = items[i]
            prompts.append(task["prompt"])
            chat = not isinstance(task["prompt"], str)
            completions.append(response_messages(tree, leaf, decode) if chat else response_text(tree, leaf, decode))
            ids.append(_ids(tree, response_nodes(tree, leaf)))
        own = ("prompt", "completion", "completion_ids")
        columns = dict.fromkeys(c for i in good for c in items[i][2] if c not in own)
        kwargs: dict[str, Any] = {c: [items[i][2].get(c) for i in good] for c in columns}
        kwargs |= {"prompts": prompts, "completions": completions, "completion_ids": ids}
        if environments is not None:
            kwargs["environments"] = [environments[i] for i in good]
        return [Call((), {k: v for k, v in kwargs.items() if self.accepts(k)}, tuple(good))]

    def run(self, call, logs, state):
        extra = {"trainer_state": state, "log_extra": logs.log_extra, "log_metric": logs.log_metric}
        given = call.kwargs | {k: v for k, v in extra.items() if self.accepts(k)}
        return self._run(Call(call.args, given, call.members))

    def _read(self, output, count):
        return _per_sample(output, count, "reward")


class VerlReward(Scorer):
    """A verl function, one sample a call. A dict's other numbers become parts, its other entries the `why`.

    The ground truth is the task's `reward_model.ground_truth`, else `ground_truth`, else `answer`; `data_source` is ""
    and `extra_info` {} where the task has none.
    """

    style: Style = "verl"

    def missing(self, task):
        truth = self.accepts("ground_truth") or self.accepts("ground_truths")
        if truth and _ground_truth(task) is _ABSENT:
            return ["reward_model.ground_truth (or ground_truth, or answer)"]
        return []

    def _columns(self, item: Item) -> dict[str, Any]:
        tree, leaf, task = item
        return {
            "data_source": task.get("data_source", ""),
            "solution_str": response_text(tree, leaf, self._decode()),
            "ground_truth": _ground_truth(task),
            "extra_info": task.get("extra_info") or {},
        }

    def _calls(self, items, good, environments):
        rows = ((i, self._columns(items[i])) for i in good)
        return [Call((), {k: v for k, v in row.items() if self.accepts(k)}, (i,)) for i, row in rows]

    def _reward(self, value):
        if not isinstance(value, Mapping):
            return super()._reward(value)
        key = "score" if "score" in value else "reward"
        if key not in value:
            raise RewardError(
                f"reward function {self.name!r} returned a dict with the keys {sorted(map(str, value))}; "
                'it needs a "score"'
            )
        total = super()._reward(value[key])
        parts, why = {}, []
        for name, entry in value.items():
            entry = _scalar(entry)
            if name == key or entry is None:
                continue
            if isinstance(entry, bool | int | float) and math.isfinite(entry):
                parts[str(name)] = float(entry)
            else:
                why.append(f"{name}={entry}")
        return Reward(total.value, parts, total.why or "; ".join(why)[:1000])


class VerlBatchReward(VerlReward):
    """A verl function of the batch reward manager: all samples in one call, plural names."""

    style: Style = "verl-batch"

    def _calls(self, items, good, environments):
        rows = [self._columns(items[i]) for i in good]
        plural = {"solution_str": "solution_strs", "data_source": "data_sources", "ground_truth": "ground_truths"}
        plural["extra_info"] = "extra_infos"
        kwargs = {plural[k]: [r[k] for r in rows] for k in _VERL_OWN if self.accepts(plural[k])}
        return [Call((), kwargs, tuple(good))]

    def _read(self, output, count):
        return _per_sample(output, count, "score")


_ABSENT = object()


def _ground_truth(task: Task) -> Any:
    for name in _GROUND_TRUTHS:
        value: Any = task
        for key in name.split("."):
            value = value[key] if isinstance(value, Mapping) and key in value else _ABSENT
        if value is not _ABSENT:
            return value
    return _ABSENT


# -- any function, and several together -------------------------------------------------------------------------------


def style_of(fn: Any) -> Style:
    """The calling convention, by the names of the parameters.

    Raises:
        ConfigError: none fits; the message shows the signature and the accepted ones.
    """
    if hasattr(fn, "batch"):
        return "native"
    parameters, _ = parameters_of(fn)
    if "solution_strs" in parameters:
        return "verl-batch"
    if "solution_str" in parameters:
        return "verl"
    if "completions" in parameters or "prompts" in parameters or "environments" in parameters:
        return "trl"
    if list(parameters)[:3] == ["tree", "leaf", "task"]:
        return "native"
    raise ConfigError(
        f"reward function {_name(fn)}{inspect.signature(fn)}: its parameters fit no known style. Write one of "
        "f(completions, **kwargs) (TRL), f(data_source, solution_str, ground_truth, extra_info=None) (verl), "
        "f(tree, leaf, task) (native)"
    )


def adapt(
    fn: Callable[..., Any], *, decode: Decode | None = None, name: str | None = None, spec: str | None = None
) -> Scorer:
    """Any reward function with its style detected; a `Scorer` keeps its own, and gets what it lacks."""
    if isinstance(fn, Scorer):
        scorer = copy.copy(fn)
        scorer.decode, scorer.spec = fn.decode or decode, fn.spec or spec
        return scorer
    if inspect.isclass(fn):
        raise ConfigError(f"reward function {name or _name(fn)}: this is a class; name an instance of it or a function")
    if not callable(fn) and not hasattr(fn, "batch"):
        raise ConfigError(f"reward function {name or spec or ''}: {_short(fn)} cannot be called")
    kinds = {"native": NativeReward, "trl": TRLReward, "verl": VerlReward, "verl-batch": VerlBatchReward}
    return kinds[style_of(fn)](fn, decode=decode, name=name, spec=spec)


def load_reward(spec: str, *, decode: Decode | None = None) -> Scorer:
    """A reward function from a user's file, `my.py:score` or `package.module:score`; its style is detected.

    Raises:
        ConfigError: no such file or name, the file fails to load, or the signature fits no style.
    """
    found = load_object(spec, "reward function")
    return adapt(found, decode=decode, spec=absolute_spec(spec))


class Combined:
    """The weighted sum of several rewards; made by `combine`."""

    def __init__(self, parts: Sequence[tuple[str, Scorer, float]]):
        self.parts = list(parts)
        self.name = "+".join(name for name, _, _ in parts)

    def check(self, tasks: Sequence[Task]) -> None:
        for _, scorer, _ in self.parts:
            scorer.check(tasks)

    def merge(self, columns: Sequence[Sequence[Outcome]]) -> list[Outcome]:
        """Outcomes [parts][samples] -> the weighted sums [samples]."""
        return [self._merge(row) for row in zip(*columns, strict=True)]

    def _merge(self, row: Sequence[Outcome]) -> Outcome:
        total, applicable = 0.0, False
        named: dict[str, float] = {}
        whys = []
        for (name, _, weight), outcome in zip(self.parts, row, strict=True):
            if isinstance(outcome, RewardError):
                return RewardError(f"part {name!r}: {outcome}")
            if outcome.why:
                whys.append(f"{name}: {outcome.why}")
            named |= {f"{name}/{k}": v for k, v in outcome.parts.items()}
            if not math.isnan(outcome.value):
                applicable = True
                named[name] = outcome.value
                total += weight * outcome.value
        return Reward(total if applicable else math.nan, named, "; ".join(whys))

    def batch(self, items: Sequence[Item]) -> list[Outcome]:
        """Judge a batch here and now, without a time limit."""
        return self.merge([scorer.batch(items) for _, scorer, _ in self.parts])

    def __call__(self, tree: TokenTree, leaf: int, task: Task) -> Reward:
        outcome = self.batch([(tree, leaf, task)])[0]
        if isinstance(outcome, RewardError):
            raise outcome
        return outcome
