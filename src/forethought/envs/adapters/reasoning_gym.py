"""Tasks of reasoning-gym, judged by their own verifiers (extra `reasoning-gym`).

    tasks = reasoning_gym_tasks("leg_counting", 256, seed=1)
    with ReasoningGymScorer() as score:                    # score(text, task) -> Reward; for ProblemEnv
        reward = adapt(score.reward, decode=decode)        # for training

A task names its dataset, settings and index, so it survives a JSON file; its entry is made again from these. Some
datasets depend on the order of sets, which differs from process to process, so entries are made in a child process with
a fixed hash seed, and a task whose question comes out differently (another version of the library) is an error.
Verifiers run in that child, too, under a time limit (an answer on which one hangs scores 0; the `why` says "limit").

Departures: some verifiers evaluate the answer as Python or sympy code. Here such an answer must first read as a plain
value or formula (numbers, names, + - * / **, lists, known functions); anything else scores 0 unseen. Countdown and the
24 puzzle are judged by `rewards.countdown`: 1 or 0, each number given exactly once.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import inspect
import json
import math
import re
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

from forethought.errors import ConfigError, DataError, MissingExtraError, RewardError, nearest
from forethought.rewards.countdown import score_countdown
from forethought.rewards.isolate import Worker, WorkerDied, WorkerHung
from forethought.rewards.loading import describe
from forethought.rewards.reward import Reward
from forethought.rewards.verify import extract_answer

Task = Mapping[str, Any]

START_LIMIT = 120.0
MAX_CHARACTERS = 10_000
_FUNCTIONS = {
    *("sin cos tan sec csc cot asin acos atan sinh cosh tanh asinh acosh atanh exp log ln sqrt abs Abs".split()),
}
_ALLOWED = (
    ast.Expression, ast.Constant, ast.Name, ast.Load, ast.BinOp, ast.UnaryOp, ast.List, ast.Tuple, ast.Call,
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.UAdd, ast.USub,
)  # fmt: skip


def _start() -> Worker:
    """The child process. Raises: MissingExtraError, RewardError."""
    try:
        found = importlib.util.find_spec("reasoning_gym")
    except ValueError:
        found = None
    if found is None:
        raise MissingExtraError("reasoning-gym tasks need reasoning-gym: pip install 'forethought[reasoning-gym]'")
    worker = Worker("forethought.envs.adapters.reasoning_gym:_serve", env={"PYTHONHASHSEED": "0"})
    try:
        worker.receive(START_LIMIT)
    except (WorkerHung, WorkerDied) as err:
        raise RewardError(f"the process for reasoning-gym did not start: {err}") from err
    return worker


@functools.cache
def _generator() -> Worker:
    """The child that makes tasks, kept for the next ones (its imports take about a second)."""
    return _start()


_GENERATING = threading.Lock()


def reasoning_gym_tasks(
    name: str, n: int, seed: int = 0, *, exclude: Collection[Task] = (), **settings: Any
) -> list[dict[str, Any]]:
    """`n` tasks with different questions: id, prompt, answer, and where they come from (`reasoning_gym`).

    Args:
        exclude: tasks whose questions must not occur, e.g. the training pool when drawing a held-out set: other seeds
            alone do not keep small worlds apart.
        settings: of the dataset, as reasoning-gym names them.

    Raises:
        MissingExtraError: not installed. ConfigError: unknown dataset (nearest named), or a setting that it refuses.
        DataError: it has fewer different questions.
    """
    if n < 1:
        raise ConfigError(f"n={n}: give at least 1")
    where = {"name": name, "seed": seed, "size": 20 * n + 100, "settings": settings}
    try:
        json.dumps(where, allow_nan=False)
    except (TypeError, ValueError) as err:
        raise ConfigError(f"reasoning-gym dataset {name!r}: settings must be plain values ({describe(err)})") from err
    seen = {t["prompt"] for t in exclude}
    with _GENERATING:  # one at a time: the child answers in order
        worker = _generator()
        try:
            worker.send(("generate", where, n, seen))
            kind, result = worker.receive(None)
        except BaseException as err:  # Ctrl-C, too: an answer that still comes would be taken for the next one's
            _generator.cache_clear()
            worker.close()
            if isinstance(err, WorkerDied):
                raise DataError(f"reasoning-gym dataset {name!r} could not be made: {err}") from err
            raise
    if kind != "done":
        raise (ConfigError if kind == "config" else DataError)(f"reasoning-gym {result}")
    return result


def read_answer(text: str) -> str | None:
    """The answer in a response: the last <answer></answer>, else the last box, else the last line; None if empty."""
    tagged = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    if tagged:
        return tagged[-1].strip()
    box = extract_answer(text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return box if box is not None else lines[-1] if lines else None


class ReasoningGymScorer:
    """Judges responses to tasks of `reasoning_gym_tasks`: `scorer(text, task) -> Reward` (for `ProblemEnv`).

    Values are the verifier's own (many give partial credit, some 0.01 for any answer); a response without an answer
    scores 0.

    Args:
        extract: response -> answer or None.
        timeout: seconds for one verification.

    Raises:
        RewardError: the verifier returned something that is no number, or its process cannot be used.
    """

    def __init__(self, *, extract: Callable[[str], str | None] = read_answer, timeout: float = 10.0):
        if not 0 < timeout < float("inf"):
            raise ConfigError(f"timeout={timeout}: give a positive number of seconds")
        self.extract, self.timeout = extract, timeout
        self._worker: Worker | None = _start()

    def __call__(self, text: str, task: Task) -> Reward:
        answer = self.extract(text)
        if answer is None:
            return Reward(0.0, why="no answer")
        if len(answer) > MAX_CHARACTERS:
            return Reward(0.0, why=f"limit: the answer is longer than {MAX_CHARACTERS} characters")
        try:
            if self._worker is None:
                self._worker = _start()
            self._worker.send(("verify", dict(task["reasoning_gym"]), answer))
            value, why = self._worker.receive(self.timeout)
        except WorkerHung:
            self.close()
            return Reward(0.0, why=f"limit: the verifier did not end within {self.timeout:g} s")
        except BaseException as err:  # Ctrl-C, too: an answer that still comes would be taken for the next one's
            self.close()
            if not isinstance(err, WorkerDied):
                raise
            raise RewardError(f"the verifier of {task['reasoning_gym']['name']!r} failed: {err}") from err
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise RewardError(f"the verifier of {task['reasoning_gym']['name']!r} gave {value!r}: {why}")
        return Reward(float(value), why=why)

    def reward(self, tree: Any, leaf: int, task: Task, text: str) -> Reward:
        """The same as a native reward function (see `rewards.adapters.adapt`)."""
        del tree, leaf
        return self(text, task)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def __enter__(self) -> ReasoningGymScorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -- the child's side --------------------------------------------------------------------------------------------------


def _serve(connection: Any) -> None:
    import reasoning_gym

    assert reasoning_gym
    connection.send("ready")
    datasets: dict[str, Any] = {}
    while True:
        job, where, *rest = connection.recv()
        if job == "generate":
            connection.send(_generate(where, *rest))
            continue
        index, question = where.pop("index"), where.pop("question")
        key = json.dumps(where, sort_keys=True)
        try:
            if key not in datasets:
                datasets[key] = _dataset(where)
            connection.send(_verify(datasets[key], where["name"], index, question, *rest))
        except Exception as err:
            connection.send((None, describe(err)))


def _dataset(where: Mapping[str, Any]) -> Any:
    from reasoning_gym.factory import create_dataset

    return create_dataset(where["name"], seed=where["seed"], size=where["size"], **where["settings"])


def _generate(where: dict[str, Any], n: int, seen: set[str]) -> tuple[str, Any]:
    from reasoning_gym.factory import DATASETS

    name, seed, settings = where["name"], where["seed"], where["settings"]
    if name not in DATASETS:
        return "config", f"has no dataset {name!r}{nearest(name, DATASETS)}"
    try:
        dataset = _dataset(where)
    except (TypeError, AssertionError, ValueError) as err:
        return "config", f"dataset {name!r}, settings {settings}: {describe(err)}"
    digest = "".join(f",{k}={settings[k]}" for k in sorted(settings))
    tasks: list[dict[str, Any]] = []
    for index in range(where["size"]):
        entry = dataset[index]
        if entry["question"] in seen:
            continue
        seen.add(entry["question"])
        tasks.append(
            {
                "id": f"reasoning-gym/{name}{digest}/{seed}/{index}",
                "prompt": entry["question"],
                "answer": None if entry["answer"] is None else str(entry["answer"]),
                "reasoning_gym": {**where, "index": index, "question": _digest(entry["question"])},
            }
        )
        if len(tasks) == n:
            return "done", tasks
    return "data", f"dataset {name!r}, seed {seed}: n={n}, but only {len(tasks)} different questions"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _verify(dataset: Any, name: str, index: int, question: str, answer: str) -> tuple[Any, str]:
    entry = dataset[index]
    if _digest(entry["question"]) != question:
        return None, "its question came out differently: make the tasks again with this version of reasoning-gym"
    if name in ("countdown", "puzzle24"):
        judged = score_countdown(
            answer, entry["metadata"]["numbers"], entry["metadata"].get("target", 24), use_all=True
        )
        return judged.score, "" if judged.score else judged.reason
    evaluates, symbolic = _evaluates(dataset)
    if evaluates and not _is_plain(answer, symbolic):
        return 0.0, "the answer is not a plain value or formula"
    value = dataset.score_answer(answer, entry)
    return float(value) if isinstance(value, bool | int | float) or hasattr(value, "item") else value, ""


def _evaluates(dataset: Any) -> tuple[bool, bool]:
    """Does this dataset's verifier evaluate the answer as code, and as a symbolic formula?"""
    source = inspect.getsource(type(dataset).score_answer)
    module = inspect.getmodule(type(dataset))
    own_parser = getattr(getattr(module, "parse_expr", None), "__module__", "").startswith("reasoning_gym")
    symbolic = bool(re.search(r"\bsympify\(", source)) or (
        bool(re.search(r"\bparse_expr\(", source)) and not own_parser
    )
    return symbolic or bool(re.search(r"(?<![\w.])(?:eval|exec)\(", source)), symbolic


def _is_plain(answer: str, symbolic: bool) -> bool:
    """A value or formula in which nothing can be called but known functions.

    Text that is no Python expression cannot be evaluated as one; a symbolic parser, which first rewrites its input,
    gets only what reads as an expression.
    """
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return not symbolic
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED):
            return False
        if isinstance(node, ast.Constant) and symbolic and isinstance(node.value, str | bytes):
            return False
        if isinstance(node, ast.Name) and "__" in node.id:
            return False
        if isinstance(node, ast.Call) and (not isinstance(node.func, ast.Name) or node.func.id not in _FUNCTIONS):
            return False
        if isinstance(node, ast.Call) and node.keywords:
            return False
    return True
