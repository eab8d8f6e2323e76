"""Preference oracles: P(the first answer beats the second), for a prompt and two answers.

Kinds: `FunctionOracle` (a Python function of the user), `BradleyTerry` (any reward; P = sigmoid of the scaled
difference), `ModelOracle` (a language model that is asked for a letter and whose log-probs are read), `JudgeOracle` (the
same over an OpenAI-compatible endpoint). Each counts its `queries`, one for each comparison asked.

An oracle should be antisymmetric, P(a, b) + P(b, a) = 1; a judge that prefers what it reads first is not. `BothOrders`
asks both ways round and averages, and measures the violation; `check_oracle` does so before compute. A comparison that
fails is a `RewardError` in its place, never a number: not 0, and not 1/2 either.
"""

from __future__ import annotations

import inspect
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from forethought.config import derive_seed
from forethought.errors import ConfigError, RewardError
from forethought.models.chat import ChatRenderer
from forethought.models.engine import Engine
from forethought.rewards.isolate import Worker, WorkerDied, WorkerHung
from forethought.rewards.judge import (
    GUARD,
    ChatJudge,
    Messages,
    Reply,
    Unreadable,
    fence,
    letter_probability,
    prompt_text,
)
from forethought.rewards.loading import absolute_spec, describe, load_object
from forethought.rewards.runner import START_LIMIT, RewardRunner
from forethought.rewards.scorers import Combined, Item, Outcome, adapt, load_reward, parameters_of
from forethought.tree.tree import Kind, Stop, TokenTree

log = logging.getLogger(__name__)

Task = Mapping[str, Any]
Comparison = tuple[Task, str, str]
"""(task, first answer, second answer)."""
TOLERANCE = 1e-6
"""A violation of antisymmetry up to this is rounding."""
_SCORED_TOGETHER = 8  # comparisons in one forward of a local model


@runtime_checkable
class Oracle(Protocol):
    """Says how probable it is that the first of two answers wins.

    `queries` counts the comparisons asked so far. `compare` answers a batch in order, each with P in [0, 1] or, where
    that comparison failed, with a RewardError.
    """

    @property
    def queries(self) -> int: ...

    def compare(self, items: Sequence[Comparison]) -> list[float | RewardError]: ...


def bernoulli(p: float, *key: str | int) -> bool:
    """True with probability p: a draw that depends on the key alone, e.g. `bernoulli(p, seed, step, task_id, i, j)`.

    Raises:
        RewardError: p is not in [0, 1].
    """
    if not 0 <= p <= 1:
        raise RewardError(f"p={p}: a probability lies in [0, 1]")
    return derive_seed(*key) / 2.0**63 < p


# -- checks ------------------------------------------------------------------------------------------------------------


def probability(value: Any, what: str, item: Comparison | None = None) -> float:
    """A value as a probability.

    Raises:
        RewardError: no number, NaN, or outside of [0, 1] by more than rounding; names the item and the value.
    """
    place = "" if item is None else f" for task {item[0].get('id', '?')!r} ({item[1]!r:.60} against {item[2]!r:.60})"
    if not isinstance(value, bool | int | float | str) and getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()  # NumPy, or a tensor of one number
    if isinstance(value, bool):
        return float(value)
    if not isinstance(value, int | float):
        raise RewardError(f"{what} gave {value!r:.80} ({type(value).__name__}){place}; give a probability in [0, 1]")
    if not -1e-9 <= value <= 1 + 1e-9:  # NaN, too
        raise RewardError(f"{what} gave {value}{place}; give a probability in [0, 1]")
    return min(1.0, max(0.0, float(value)))


def ask_oracle(oracle: Oracle, items: Sequence[Comparison]) -> list[float | RewardError]:
    """`oracle.compare`, with the answers checked: a value that is no probability becomes the error of its item.

    Raises:
        RewardError: another number of answers than items.
    """
    given = list(oracle.compare(items))
    name = type(oracle).__name__
    if len(given) != len(items):
        raise RewardError(
            f"oracle {name} gave {len(given)} answers to {len(items)} comparisons; give one each, in order"
        )
    out: list[float | RewardError] = []
    for item, value in zip(items, given, strict=True):
        try:
            out.append(value if isinstance(value, RewardError) else probability(value, f"oracle {name}", item))
        except RewardError as err:
            out.append(err)
    return out


@dataclass
class Violation:
    """How far P(a, b) + P(b, a) is from 1, over the pairs that were asked both ways round."""

    pairs: int = 0
    total: float = 0.0
    largest: float = 0.0
    worst: str = ""
    first: float = 0.0
    """Sum of P(what stood first wins): its mean is 1/2 without a bias to a position."""

    @property
    def mean(self) -> float:
        return self.total / self.pairs if self.pairs else 0.0

    def see(self, item: Comparison, forward: float, backward: float) -> None:
        size = abs(forward + backward - 1)
        self.pairs += 1
        self.total += size
        self.first += (forward + backward) / 2
        if size > self.largest:
            self.largest = size
            self.worst = (
                f"task {item[0].get('id', '?')!r}: P(a, b) = {forward:.6g}, P(b, a) = {backward:.6g} for "
                f"a = {item[1]!r:.60}, b = {item[2]!r:.60}"
            )

    def __str__(self) -> str:
        if self.largest <= TOLERANCE:
            return f"antisymmetric on {self.pairs} pairs (largest violation {self.largest:.2g})"
        return (
            f"not antisymmetric: |P(a, b) + P(b, a) - 1| is up to {self.largest:.4g}, {self.mean:.4g} on average over "
            f"{self.pairs} pairs (what stands first wins with {self.first / self.pairs:.3g}); the worst: {self.worst}"
        )


def _both_ways(compare: Callable, items: Sequence[Comparison], seen: Violation) -> list[float | RewardError]:
    """(P(a, b) + 1 - P(b, a)) / 2; missing where either way round failed, for half of it would carry the bias."""
    answers = list(compare([*items, *((task, b, a) for task, a, b in items)]))
    if len(answers) != 2 * len(items):
        raise RewardError(f"the oracle gave {len(answers)} answers to {2 * len(items)} comparisons; give one each")
    out: list[float | RewardError] = []
    for item, forward, backward in zip(items, answers[: len(items)], answers[len(items) :], strict=True):
        failed = next((p for p in (forward, backward) if isinstance(p, RewardError)), None)
        if failed is not None:
            out.append(failed)
        else:
            seen.see(item, forward, backward)
            out.append(0.5 + (forward - backward) / 2)
    return out


class BothOrders:
    """Another oracle asked both ways round and averaged, so that what is left is antisymmetric.

    `queries` are those of the inner oracle, two a comparison. `violation` holds what was measured; the first time it
    exceeds rounding, a warning says by how much.
    """

    def __init__(self, oracle: Oracle):
        self.oracle = oracle
        self.violation = Violation()
        self._told = False

    @property
    def queries(self) -> int:
        return self.oracle.queries

    def compare(self, items: Sequence[Comparison]) -> list[float | RewardError]:
        if not items:
            return []
        out = _both_ways(lambda both: ask_oracle(self.oracle, both), items, self.violation)
        if self.violation.largest > TOLERANCE and not self._told:
            self._told = True
            log.warning("oracle %s is %s; both orders are averaged", type(self.oracle).__name__, self.violation)
        return out


def check_oracle(oracle: Oracle, items: Sequence[Comparison]) -> Violation:
    """Trial questions before compute, both ways round, and what they say on antisymmetry (with a warning if broken).

    Args:
        items: a few comparisons; 2 queries each.

    Raises:
        RewardError: an answer is no probability in [0, 1], or a comparison failed; the item and the value are named.
    """
    seen = Violation()
    for answer in _both_ways(lambda both: ask_oracle(oracle, both), items, seen):
        if isinstance(answer, RewardError):
            raise RewardError(f"trial comparison before the run: {answer}")
    if seen.largest > TOLERANCE:
        log.warning("oracle %s is %s; BothOrders(oracle) averages both orders", type(oracle).__name__, seen)
    return seen


# -- a function of the user --------------------------------------------------------------------------------------------


class FunctionOracle:
    """A Python function `f(task, a, b) -> P(a wins)`.

    Args:
        fn: a function, or its name `file.py:NAME` / `package.module:NAME`.
        timeout: seconds for one comparison. A function given by name runs in a process of its own, which is killed when
            it exceeds the limit; any other in a thread, which is then left to itself. None: no limit, no thread.

    Raises:
        ConfigError: no such function, one that does not take (task, a, b), a timeout that is not positive.
    """

    def __init__(self, fn: Callable[[Task, str, str], float] | str, *, timeout: float | None = 60.0):
        if timeout is not None and not 0 < timeout < math.inf:
            raise ConfigError(f"timeout={timeout}: give a positive number of seconds, or None for no limit")
        self.spec = absolute_spec(fn) if isinstance(fn, str) else None
        self.fn: Callable[[Task, str, str], float] = load_object(fn, "oracle") if isinstance(fn, str) else fn
        self.name = fn if isinstance(fn, str) else getattr(fn, "__name__", type(fn).__name__)
        if not callable(self.fn) or isinstance(self.fn, type):
            raise ConfigError(f"oracle {self.name!r}: {self.fn!r:.80} is no function; write f(task, a, b) -> P(a wins)")
        try:
            inspect.signature(self.fn).bind({}, "a", "b")
        except TypeError as err:
            names = str(inspect.signature(self.fn))
            raise ConfigError(f"oracle {self.name!r} takes {names}; write f(task, a, b) -> P(a wins)") from err
        except ValueError as err:
            raise ConfigError(f"oracle {self.name!r}: its signature cannot be read; wrap it in a def") from err
        self.timeout = timeout
        self.queries = 0
        self._worker: Worker | None = None

    def compare(self, items: Sequence[Comparison]) -> list[float | RewardError]:
        self.queries += len(items)
        if self.timeout is None:
            made: list[Any] = [_call(self.fn, item) for item in items]
        elif self.spec is not None:
            made = self._in_process(items)
        else:
            made = [self._in_thread(item) for item in items]
        out: list[float | RewardError] = []
        for item, value in zip(items, made, strict=True):
            try:
                out.append(self._failed(value, item) if isinstance(value, _Raised) else self._probability(value, item))
            except RewardError as err:
                out.append(err)
        return out

    def _probability(self, value: Any, item: Comparison) -> float:
        return probability(value, f"oracle {self.name!r}", item)

    def _failed(self, raised: _Raised, item: Comparison) -> RewardError:
        return RewardError(f"oracle {self.name!r} {raised.what}, for task {item[0].get('id', '?')!r}")

    def _late(self) -> _Raised:
        return _Raised(f"did not answer within its time limit of {self.timeout:g} s")

    def _in_thread(self, item: Comparison) -> Any:
        box: list[Any] = []
        thread = threading.Thread(target=lambda: box.append(_call(self.fn, item)), daemon=True)
        thread.start()
        thread.join(self.timeout)
        return box[0] if box else self._late()

    def _in_process(self, items: Sequence[Comparison]) -> list[Any]:
        out: list[Any] = []
        while len(out) < len(items):
            try:
                worker = self._worker = self._worker or self._start()
                worker.send(list(items[len(out) :]))
                while len(out) < len(items):
                    out.append(worker.receive(self.timeout))
            except WorkerHung:
                self._worker = None
                out.append(self._late())
            except WorkerDied as err:
                self._worker = None
                out.append(_Raised(f"ended its process instead of answering: {err}"))
            except BaseException:  # Ctrl-C: answers that still come would be taken for those of the next batch
                self.close()
                raise
        return out

    def _start(self) -> Worker:
        assert self.spec is not None
        try:
            worker = Worker("forethought.rewards.oracles:_serve", self.spec)
            problem = worker.receive(START_LIMIT)
        except (WorkerHung, WorkerDied) as err:
            raise RewardError(f"oracle {self.name!r}: its process did not start: {err}") from err
        if problem:
            worker.close()
            raise RewardError(f"oracle {self.name!r}: its process did not start: {problem}")
        return worker

    def close(self) -> None:
        """End the child process."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None


@dataclass(frozen=True)
class _Raised:
    """What went wrong inside a function; it crosses the process border."""

    what: str


def _call(fn: Callable, item: Comparison) -> Any:
    try:
        value = fn(*item)
        return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value
    except (Exception, SystemExit) as err:
        return _Raised(f"raised {describe(err)}")


def _serve(connection, spec: str) -> None:
    """The child's side: load the function, then answer lists of comparisons."""
    try:
        fn = load_object(spec, "oracle")
    except ConfigError as err:
        connection.send(str(err))
        return
    connection.send("")
    while True:
        for item in connection.recv():
            value = _call(fn, item)
            try:
                connection.send(value)
            except (TypeError, AttributeError, ValueError) as err:  # not picklable
                connection.send(_Raised(f"gave {value!r:.80}, which cannot leave its process ({describe(err)})"))


def load_oracle(spec: str, *, timeout: float | None = 60.0) -> Oracle:
    """What `file.py:NAME` names as an oracle: an object with `compare(items)` as it is, or a function f(task, a, b).

    Raises:
        ConfigError: neither of these, or see `FunctionOracle`.
    """
    found = load_object(spec, "oracle")
    if hasattr(found, "compare"):
        if isinstance(found, type):
            raise ConfigError(f"oracle {spec!r}: this is a class; name an instance of it")
        if not hasattr(found, "queries"):
            raise ConfigError(f"oracle {spec!r}: it needs a count `queries` beside `compare(items)`")
        return found
    return FunctionOracle(spec, timeout=timeout)


# -- any reward --------------------------------------------------------------------------------------------------------


def codepoints(ids: Sequence[int]) -> str:
    """The `decode` of rewards that judge `text_item`s."""
    return "".join(map(chr, ids))


def text_item(task: Task, text: str, *, truncated: bool = False) -> Item:
    """A text as the trajectory that reward functions judge; its token ids are its code points (see `codepoints`)."""
    tree = TokenTree([ord("?")], task=str(task.get("id", "")))
    ids = [ord(c) for c in text]
    stop = Stop.LENGTH if truncated else Stop.EOS
    leaf = tree.add(0, ids, kind=Kind.ASSISTANT, sampled=True, logprobs=[0.0] * len(ids), stop=stop)
    return tree, leaf, task


class BradleyTerry:
    """Any reward as an oracle: P(a wins) = sigmoid(scale * (r(a) - r(b))); antisymmetric by construction.

    A text is scored once for a task and remembered; `scored` counts the reward calls.

    Args:
        reward: a reward function of any style or its name (see `rewards.adapters`), a `Combined` or a `RewardRunner`
            (whose decode must be `codepoints`), or any judge `f(items) -> outcomes` over (tree, leaf, task).
        scale: what rewards are multiplied by; their unit is nats of preference.
        timeout: seconds for one call of a function; see `RewardRunner`.

    Raises:
        ConfigError: scale is not positive; or see `load_reward`.
    """

    def __init__(self, reward: Any, *, scale: float = 1.0, timeout: float | None = 60.0):
        if not 0 < scale < math.inf:
            raise ConfigError(f"scale={scale}: give a positive number")
        self.scale = scale
        self.runner: RewardRunner | None = None
        if isinstance(reward, str):
            reward = load_reward(reward, decode=codepoints)
        if isinstance(reward, Combined):
            reward = Combined([(name, adapt(part, decode=codepoints), weight) for name, part, weight in reward.parts])
        if isinstance(reward, RewardRunner) or _takes_items(reward):
            self.judge: Callable[[Sequence[Item]], Sequence[Outcome]] = reward
        else:
            self.judge = self.runner = RewardRunner(reward, timeout=timeout, decode=codepoints)
        self.queries = self.scored = 0
        self._known: dict[tuple[str, str], float] = {}

    def scores(self, items: Sequence[tuple[Task, str]]) -> list[float | RewardError]:
        """Rewards of (task, text); a reward that does not apply is an error here, for it compares with nothing."""
        keys = [(_task_key(task), text) for task, text in items]
        new = {key: item for key, item in zip(keys, items, strict=True) if key not in self._known}
        failed: dict[tuple[str, str], RewardError] = {}
        if new:
            self.scored += len(new)
            outcomes = list(self.judge([text_item(task, text) for task, text in new.values()]))
            if len(outcomes) != len(new):
                raise RewardError(f"the reward gave {len(outcomes)} results for {len(new)} answers; give one each")
            for key, outcome in zip(new, outcomes, strict=True):
                if isinstance(outcome, RewardError):
                    failed[key] = outcome
                elif not math.isfinite(outcome.value):
                    failed[key] = RewardError(f"the reward is {outcome.value} ({outcome.why or 'not applicable'})")
                else:
                    self._known[key] = float(outcome.value)
        return [failed[key] if key in failed else self._known[key] for key in keys]

    def compare(self, items: Sequence[Comparison]) -> list[float | RewardError]:
        self.queries += len(items)
        sides = self.scores([(task, text) for task, a, b in items for text in (a, b)])
        out: list[float | RewardError] = []
        for a, b in zip(sides[0::2], sides[1::2], strict=True):
            failed = next((r for r in (a, b) if isinstance(r, RewardError)), None)
            out.append(failed if failed is not None else _sigmoid(self.scale * (float(a) - float(b))))  # type: ignore[arg-type]
        return out

    def close(self) -> None:
        """End the child processes of a reward that this oracle started."""
        if self.runner is not None:
            self.runner.close()


# -- language models ---------------------------------------------------------------------------------------------------

BETTER = (
    "You compare two answers to one question and say which is better: the one that is right and answers what was asked; "
    "among right ones the more helpful and clearer one. The order in which they stand, their length and their "
    "formatting do not count."
)
"""What makes an answer better, unless told otherwise."""


def comparison_request(item: Comparison, criteria: str, letters: tuple[str, str], limit: int) -> Messages:
    """The question and the two answers, fenced, and what to reply with."""
    task, a, b = item
    one, two = letters
    system = f"{criteria.strip()}\n\n{GUARD}\n\nReply with one letter, {one} or {two}, and nothing else."
    shown = [fence(prompt_text(task), "question", limit=limit)]
    shown += [fence(a, f"answer {one}", limit=limit), fence(b, f"answer {two}", limit=limit)]
    shown.append(f"Which answer is better, {one} or {two}?")
    return [{"role": "system", "content": system}, {"role": "user", "content": "\n\n".join(shown)}]


class JudgeOracle:
    """A chat model as an oracle, over an OpenAI-compatible endpoint.

    It is shown the question and the two answers and chooses a letter. P is read off the log-probs of that letter where
    the server gives them (`ChatJudge(logprobs=True)`), else it is the share of `samples` replies that chose the first.
    Both orders are asked and averaged, unless told otherwise; `violation` holds the bias to a position that this took
    away. One comparison is one query; the judge counts its calls.

    Args:
        judge: who is asked; replies of one letter need few `max_tokens`, a judge that thinks needs more.
        criteria: what makes an answer better. letters: names of the two answers.
        samples: replies to each question; several need a judge with a temperature.
        limit: characters shown of a text.

    Raises:
        ConfigError: samples below 1, or several at temperature 0.
    """

    def __init__(
        self,
        judge: ChatJudge,
        *,
        criteria: str = BETTER,
        letters: tuple[str, str] = ("A", "B"),
        samples: int = 1,
        both_orders: bool = True,
        limit: int = 20_000,
    ):
        if samples < 1:
            raise ConfigError(f"samples={samples}: give at least 1")
        if samples > 1 and judge.sampling.temperature == 0:
            raise ConfigError(f"samples={samples} at temperature 0 would all be the same; give the judge a temperature")
        self.judge, self.criteria, self.letters, self.samples = judge, criteria, letters, samples
        self.both_orders, self.limit = both_orders, limit
        self.violation = Violation()
        self.queries = 0

    def compare(self, items: Sequence[Comparison]) -> list[float | RewardError]:
        self.queries += len(items)
        return _both_ways(self._one_way, items, self.violation) if self.both_orders else self._one_way(items)

    def _one_way(self, items: Sequence[Comparison]) -> list[float | RewardError]:
        requests = [comparison_request(item, self.criteria, self.letters, self.limit) for item in items]
        return self.judge.ask(requests, self._read, n=self.samples)

    def _read(self, replies: list[Reply]) -> float:
        """Mean over the replies that can be read."""
        found, problem = [], Unreadable("no reply")
        for reply in replies:
            try:
                found.append(letter_probability(reply, self.letters))
            except Unreadable as err:
                problem = err
        if not found:
            raise problem
        return sum(found) / len(found)


class ModelOracle:
    """A local language model as an oracle: P is the softmax over its log-probs of the two letters as the next token.

    A pairwise preference model (one that was trained to name the better of two answers) is such a model. A causal
    model has a bias to a position, so both orders are averaged unless told otherwise.

    Args:
        engine: one that scores (`TorchEngine`). renderer: of its model.
        request: (comparison, letters) -> messages or text that end where the letter is due; by default the question of
            `JudgeOracle`. letters: each must begin another token.

    Raises:
        ConfigError: the letters begin with the same token.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: ChatRenderer,
        *,
        request: Callable[[Comparison, tuple[str, str]], str | Messages] | None = None,
        letters: tuple[str, str] = ("A", "B"),
        both_orders: bool = True,
    ):
        self.engine, self.renderer, self.letters, self.both_orders = engine, renderer, letters, both_orders
        self.request = request or (lambda item, names: comparison_request(item, BETTER, names, 20_000))
        self.ids = [renderer.encode(letter)[0] for letter in letters]
        if self.ids[0] == self.ids[1]:
            raise ConfigError(f"letters={letters}: both begin with token {self.ids[0]} of this model; choose others")
        self.violation = Violation()
        self.queries = 0

    def compare(self, items: Sequence[Comparison]) -> list[float | RewardError]:
        self.queries += len(items)
        return _both_ways(self._one_way, items, self.violation) if self.both_orders else self._one_way(items)

    def _one_way(self, items: Sequence[Comparison]) -> list[float | RewardError]:
        out: list[float | RewardError] = []
        for begin in range(0, len(items), _SCORED_TOGETHER):
            leaves = []
            for item in items[begin : begin + _SCORED_TOGETHER]:
                tree, place = self.renderer.start(self.request(item, self.letters))
                leaves += [(tree, tree.add(place, [letter], kind=Kind.ASSISTANT)) for letter in self.ids]
            scores = [float(row[-1]) for row in self.engine.score(leaves)]
            out += [_sigmoid(a - b) for a, b in zip(scores[0::2], scores[1::2], strict=True)]
        return out


def _takes_items(judge: Any) -> bool:
    """Is this a judge over batches, `f(items)`, and not a reward function?"""
    if hasattr(judge, "style") or hasattr(judge, "batch"):
        return False
    return callable(judge) and next(iter(parameters_of(judge)[0]), "") == "items"


def _task_key(task: Task) -> str:
    return f"{task.get('id', '')}\x1f{task.get('prompt', '')}"


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
