"""Suites: sample every task, judge every sample, keep every row.

What is counted is fixed before the first token: tasks x samples rows, checked at the end. A sample that could not be
judged stays in the denominator as wrong, and both numbers are given, with coverage. Greedy evaluation is one sample a
task; with several samples the headline is the mean of the problems' means (avg@k), and its interval resamples problems,
because the samples of one problem are not independent.

A row depends on (seed, task id, sample index), not on the order or the number of tasks; see `engine.row_seed`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from forethought.errors import ConfigError, DataError, EngineError, RewardError
from forethought.evaluate import metrics
from forethought.evaluate.metrics import Row
from forethought.evaluate.stats import (
    Difference,
    Estimate,
    PassRates,
    bootstrap_ci,
    majority_vote,
    paired_bootstrap,
    pass_at_k,
    pass_hat_k,
    pass_rates,
    wilson,
)
from forethought.models.engine import Engine, Sampling
from forethought.rewards.reward import Reward
from forethought.tree.tree import Kind, Stop, TokenTree

Task = Mapping[str, Any]
Judge = Callable[[Sequence[tuple[TokenTree, int, Task]]], Sequence[Reward | RewardError]]
"""Rewards of a batch of trajectories, a failed one as a RewardError in its place (`rewards.adapters.RewardRunner`)."""


@dataclass
class EvalResult:
    """All rows of a suite, and what follows from them. `tasks`: ids in order; `samples`: rows a task."""

    name: str
    tasks: list[str]
    samples: int
    rows: list[Row]
    sampling: Sampling | None = None
    trees: list[TokenTree] = field(default_factory=list)

    def __post_init__(self):
        twice = [t for t, count in Counter(self.tasks).items() if count > 1]
        if not self.tasks or twice:
            problem = f"task id {twice[0]!r} stands twice" if twice else "no tasks: the suite is empty"
            raise DataError(f"suite {self.name!r}: {problem}")
        have = Counter((r.task, r.sample) for r in self.rows)
        want = {(task, i) for task in self.tasks for i in range(self.samples)}
        if set(have) != want or len(self.rows) != len(want):
            missing = sorted(want - set(have)) or sorted(k for k, c in have.items() if c > 1 or k not in want)
            raise DataError(
                f"suite {self.name!r}: {len(self.rows)} rows for {len(self.tasks)} tasks x {self.samples} samples; "
                f"the first that is missing or too many: task {missing[0][0]!r}, sample {missing[0][1]}"
            )

    # -- numbers --
    def by_task(self) -> dict[str, list[Row]]:
        """Rows of each task, by sample."""
        out: dict[str, list[Row]] = {task: [] for task in self.tasks}
        for row in sorted(self.rows, key=lambda r: r.sample):
            out[row.task].append(row)
        return out

    @property
    def errors(self) -> int:
        """Rows that could not be judged."""
        return sum(r.error is not None for r in self.rows)

    @property
    def n_tokens(self) -> int:
        """Tokens generated."""
        return sum(r.length for r in self.rows)

    def task_means(self) -> np.ndarray:
        """Share of right samples of each task, [tasks], in order."""
        return np.array([np.mean([r.right for r in rows]) for rows in self.by_task().values()])

    def accuracy(self, conf: float = 0.95) -> Estimate:
        """Mean of the problems' means (with one sample: the share of right ones), errors counted as wrong.

        One sample a task: Wilson interval. Several: bootstrap over problems.
        """
        means = self.task_means()
        if self.samples == 1:
            return wilson(int(means.sum()), len(means), conf)
        return bootstrap_ci(means, conf=conf)

    def rates(self, k: int, measure: Callable[[int, int, int], float] = pass_at_k) -> PassRates:
        """pass@k (or pass^k with `stats.pass_hat_k`): with errors as failures, with errors left out, and coverage."""
        trials = {t: [r.right if r.error is None else None for r in rows] for t, rows in self.by_task().items()}
        return pass_rates(trials, k, measure)

    def majority(self, *, seed: int | None = None) -> Estimate:
        """Accuracy of the majority answer of each task (maj@k); no answer at all is wrong.

        Raises:
            DataError: no row has an answer (the suite was run without `extract`).
        """
        if all(r.answer is None for r in self.rows):
            raise DataError(f"suite {self.name!r}: no row has an answer; run it with extract=... to vote on answers")
        won = 0
        for rows in self.by_task().values():
            answer = majority_vote([r.answer for r in rows], seed=seed)
            won += answer is not None and any(r.right for r in rows if r.answer == answer)
        return wilson(won, len(self.tasks))

    def metrics(self) -> dict[str, float]:
        """Flat numbers for metrics.jsonl: `metrics.summary`, n/tasks, n/rows, n/errors, and with k > 1 samples avg@k,
        pass@k, pass^k, and maj@k where answers were extracted. With errors: accuracy/without_errors too."""
        k = self.samples
        out = metrics.summary(self.rows)
        out |= {"n/tasks": len(self.tasks), "n/rows": len(self.rows), "n/errors": self.errors}
        if self.errors:
            judged = [r.right for r in self.rows if r.error is None]
            if judged:
                out["accuracy/without_errors"] = sum(judged) / len(judged)
        if k > 1:
            out[f"avg@{k}"] = float(self.task_means().mean())
            out[f"pass@{k}"] = self.rates(k).errors_as_failures
            out[f"pass^{k}"] = self.rates(k, pass_hat_k).errors_as_failures
            if any(r.answer is not None for r in self.rows):
                out[f"maj@{k}"] = self.majority().mean
        return out

    def answers(self, task: str) -> list[tuple[str | None, int]]:
        """Distinct answers to one task with counts.

        Raises:
            DataError: no such task.
        """
        if task not in self.tasks:
            raise DataError(f"suite {self.name!r} has no task {task!r}")
        return metrics.distinct_answers(r.answer for r in self.by_task()[task])

    def __str__(self) -> str:
        got = self.accuracy()
        where = "" if got.low is None else f" [{got.low:.3f}, {got.high:.3f}]"
        label = "accuracy" if self.samples == 1 else f"avg@{self.samples}"
        text = f"{self.name}: {label} {got.mean:.3f}{where}, "
        text += f"{len(self.tasks)} tasks x {self.samples} = {len(self.rows)} rows"
        if self.errors:
            text += f"; {self.errors} could not be judged (counted as wrong); pass@1 {self.rates(1)}"
        return text

    def to_json(self, *, rows: bool = True) -> dict[str, Any]:
        """Strict JSON: name, samples, sampling, accuracy with interval, metrics, and all rows (without their trees)."""
        out: dict[str, Any] = {
            "name": self.name,
            "samples": self.samples,
            "sampling": None if self.sampling is None else asdict(self.sampling),
            "accuracy": self.accuracy().to_json(),
            "metrics": self.metrics(),
        }
        if rows:
            out["rows"] = [asdict(r) | {"stop": r.stop.name.lower()} for r in self.rows]
        return out


def evaluate(
    engine: Engine,
    tasks: Sequence[Task],
    judge: Judge,
    *,
    prompt_ids: Callable[[Task], Sequence[int]],
    decode: Callable[[list[int]], str],
    samples: int = 1,
    sampling: Sampling | None = None,
    success: Callable[[Reward], bool] = lambda reward: reward.value >= 1,
    extract: Callable[[str], str | None] | None = None,
    name: str = "eval",
    expected: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> EvalResult:
    """Sample `samples` responses to every task and judge them.

    Args:
        tasks: dicts with a unique "id".
        judge: see `Judge`; it gets the response through tree and leaf, never the prompt's text.
        prompt_ids: task -> ids of the rendered prompt.
        decode: response ids -> text, for the text metrics and `extract`.
        sampling: greedy by default; several samples need a temperature.
        success: which rewards count as right; by default a full mark (value of at least 1).
        extract: response text -> answer, for votes and answer counts; None where it finds none.
        expected: how many tasks there should be; a suite of another size is refused rather than quietly scored.
        progress: called with (rows done, all rows) while sampling.

    Raises:
        DataError: no tasks, an id missing or twice, another number of tasks than `expected`, an empty prompt.
        ConfigError: samples below 1, or several samples at temperature 0.
        EngineError, RewardError: the engine or the judge gave another number of results than was asked for.
    """
    sampling = sampling or Sampling(temperature=0.0)
    ids = _check(tasks, samples, sampling, name, expected)
    trees = []
    for task, key in zip(tasks, ids, strict=True):
        prompt = list(prompt_ids(task))
        if not prompt:
            raise DataError(f"suite {name!r}: task {key!r} has an empty prompt; begin with at least one token")
        trees.append(TokenTree(prompt, kind=Kind.PROMPT, task=key, seed=sampling.seed))
    new = engine.extend([(tree, 0) for tree in trees], samples, sampling, progress=progress)
    if [len(nodes) for nodes in new] != [samples] * len(trees):
        raise EngineError(
            f"suite {name!r}: asked for {samples} samples of each of {len(trees)} tasks; the engine gave others"
        )
    places = [(i, j, node) for i, nodes in enumerate(new) for j, node in enumerate(nodes)]
    sound = [p for p in places if trees[p[0]].stop[p[2]] != Stop.ERROR]
    verdicts = list(judge([(trees[i], node, tasks[i]) for i, _, node in sound])) if sound else []
    if len(verdicts) != len(sound):
        raise RewardError(f"suite {name!r}: the judge gave {len(verdicts)} results for {len(sound)} samples")
    judged: dict[tuple[int, int], Reward | RewardError] = {
        (i, j): v for (i, j, _), v in zip(sound, verdicts, strict=True)
    }
    rows = []
    for i, j, node in places:
        tree = trees[i]
        verdict = judged.get((i, j)) or RewardError(
            f"sampling failed: {tree.meta[node].get('error', 'no reason given')}"
        )
        rows.append(_row(tree, node, ids[i], j, verdict, decode, success, extract))
    return EvalResult(name, ids, samples, rows, sampling, trees)


def _check(tasks: Sequence[Task], samples: int, sampling: Sampling, name: str, expected: int | None) -> list[str]:
    if samples < 1:
        raise ConfigError(f"suite {name!r}: samples={samples}: give at least 1")
    if samples > 1 and sampling.temperature == 0:
        raise ConfigError(
            f"suite {name!r}: samples={samples} at temperature 0 would all be the same; give a temperature, or 1 sample"
        )
    if expected is not None and len(tasks) != expected:
        raise DataError(
            f"suite {name!r}: {len(tasks)} tasks, but {expected} are expected; its score would be another's"
        )
    ids = []
    for number, task in enumerate(tasks):
        if "id" not in task:
            raise DataError(f"suite {name!r}: task {number} has no 'id'; rows are kept by id")
        ids.append(str(task["id"]))
    twice = [t for t, count in Counter(ids).items() if count > 1]
    if not ids or twice:
        raise DataError(f"suite {name!r}: " + (f"task id {twice[0]!r} stands twice" if twice else "no tasks"))
    return ids


def _row(tree, node, task, sample, verdict, decode, success, extract) -> Row:
    ids = tree.node_ids(node)
    text = decode(ids)
    error, score, right, parts = None, None, False, {}
    if isinstance(verdict, RewardError):
        error = str(verdict) or "the reward failed without a message"
    elif not math.isfinite(verdict.value):
        error = "not applicable" if math.isnan(verdict.value) else f"the reward is {verdict.value}"
        error += f": {verdict.why}" if verdict.why else ""
    else:
        score, right = float(verdict.value), bool(success(verdict))
        parts = {name: float(value) for name, value in verdict.parts.items() if math.isfinite(value)}
        tree.reward[node] = score
    return Row(
        task=task,
        sample=sample,
        right=right,
        score=score,
        text=text,
        answer=extract(text) if extract else None,
        length=len(ids),
        stop=Stop(int(tree.stop[node])),
        repeated=metrics.is_repeated(ids),
        error=error,
        parts=parts,
    )


def compare(a: EvalResult, b: EvalResult, *, conf: float = 0.95, seed: int = 0) -> Difference:
    """Paired difference a - b of the problems' means over the same tasks, by id.

    Raises:
        DataError: the task sets differ; the message names one that only one side has.
    """
    other = dict(zip(b.tasks, b.task_means(), strict=True))
    alone = sorted(set(a.tasks) ^ set(other))
    if alone:
        side = a.name if alone[0] in a.tasks else b.name
        raise DataError(f"{a.name!r} and {b.name!r} have different tasks: {alone[0]!r} stands in {side!r} only")
    return paired_bootstrap(a.task_means(), [other[task] for task in a.tasks], conf=conf, seed=seed)
