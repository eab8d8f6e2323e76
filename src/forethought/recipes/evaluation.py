"""`forethought eval`: a model on problems with known answers, with intervals.

Rows are written to rows.jsonl as they come, so that a long evaluation can be stopped and resumed; a row depends on the
seed, the problem's id and the sample's index only, so a resumed evaluation has the rows of an unbroken one. Headline:
the share of right responses, over problems (design: a sample that could not be judged stays in the denominator).
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forethought.config import from_dict, load_yaml
from forethought.data import read_jsonl
from forethought.errors import ConfigError, DataError
from forethought.evaluate.metrics import Row, has_box
from forethought.evaluate.stats import Difference, Estimate, bootstrap_ci, paired_bootstrap, pass_at_k
from forethought.evaluate.suites import EvalResult, evaluate
from forethought.files import append_whole, from_json, to_json, write_atomic
from forethought.learn.session import Interrupted
from forethought.progress import Progress
from forethought.recipes.inputs import (
    Columns,
    Judge,
    MathReward,
    Sampled,
    Say,
    Task,
    encode_prompts,
    load_prompts,
    short_name,
)
from forethought.recipes.own_job import cell, check_place, difference, share_estimate, verdict
from forethought.recipes.results import results
from forethought.recipes.session import Workbench, open_model
from forethought.rewards.verify import Extract, Mode, extract_answer
from forethought.rundir import RunDir
from forethought.tree.store import TreeStore
from forethought.tree.tree import Stop

CHUNK = 128
"""Rows that are sampled, judged and written together."""
_STORED = 8  # trees that are kept for the report
_SAME = ("data", "limit", "answer_column", "reward", "mode", "extract")  # what two comparable evaluations share


@dataclass(frozen=True, kw_only=True)
class EvalJob(Columns, Sampled):
    """Settings of `forethought eval`."""

    model: str
    data: str
    reward: tuple[str, ...] = ()
    """Rewards by name in place of the math verifier; at least 1 is right."""
    mode: Mode = "math-verify"
    extract: Extract = "box"
    device: str | None = None
    dtype: str | None = None
    against: str | None = None
    """Run folder of another evaluation on the same data, to compare with."""

    def __post_init__(self):
        if bad := self.sample_problems():
            raise ConfigError("; ".join(bad))
        self.sampling()

    @property
    def arm(self) -> str:
        return short_name(self.model)


@dataclass
class _Progress:
    """What has been done so far, over all sessions of the run."""

    rows: list[Row] = field(default_factory=list)
    wall_s: float = 0.0


def evaluate_model(args: argparse.Namespace, say: Say) -> Path:
    """Run the evaluation that the command line describes; returns its folder.

    Raises:
        ForethoughtError: bad input, before the model is loaded where possible. Interrupted: Ctrl-C; rows are kept.
    """
    given = {k: v for k, v in vars(args).items() if k in EvalJob.__dataclass_fields__ and v is not None}
    job = from_dict(EvalJob, given, source="eval")
    check_place(args)
    with Judge(job.reward or ("math",)) as judge:
        for math in filter(None, judge.math if not job.reward else ()):
            math.mode, math.extract = job.mode, job.extract
        tasks = load_prompts(job.data, job)
        judge.check(tasks, say)
        other = _other(job, tasks) if job.against else None
        bench = open_model(job.model, device=job.device, dtype=job.dtype, train=False, say=say)
        judge.bind(bench.decode)
        encode_prompts(bench, tasks, job.data, job.max_new_tokens, say)
        run = RunDir.create(args.out, job, resume=args.resume, overwrite=args.overwrite, may_change=("against",))
        with run:
            done = _sample(job, run, bench, tasks, judge)
            result = EvalResult("eval", [str(t["id"]) for t in tasks], job.samples, done.rows, job.sampling())
            say(str(result))
            run.truncate_metrics(-1)
            numbers = {f"eval/{name}": value for name, value in result.metrics().items()}
            run.log_metrics({"arm": job.arm, "seed": job.seed, **numbers}, step=0)
            run.write_json("results.json", _results(job, result, done.wall_s, other))
            return run.path


# -- sampling ----------------------------------------------------------------------------------------------------------


def _sample(job: EvalJob, run: RunDir, bench: Workbench, tasks: Sequence[Task], judge: Judge) -> _Progress:
    """All rows; those that are in rows.jsonl already are not made again."""
    path = run.path / "rows.jsonl"
    done = _read(run, path, job.samples) if run.resumed else _Progress()
    if not done.rows:
        write_atomic(path, b"")
    have = {row.task for row in done.rows}
    left = [t for t in tasks if str(t["id"]) not in have]
    size = max(1, CHUNK // job.samples)
    math = None if job.reward else judge.math[0]
    try:
        with Progress(len(tasks) * job.samples, "evaluating", start=len(done.rows)) as bar:
            for begin in range(0, len(left), size):
                began, ready = time.perf_counter(), len(done.rows)
                chunk = left[begin : begin + size]
                result = evaluate(
                    bench.engine,
                    chunk,
                    judge,
                    prompt_ids=bench.prompt_ids,
                    decode=bench.decode,
                    samples=job.samples,
                    sampling=job.sampling(),
                    extract=_reader(math) if math else None,
                    progress=lambda n, _, ready=ready: bar.update(ready + n),
                )
                done.rows += result.rows
                done.wall_s += time.perf_counter() - began
                bar.update(len(done.rows), accuracy=sum(r.right for r in done.rows) / len(done.rows))
                prompts = {str(t["id"]): t for t in chunk}
                lines = [_line(row, prompts[row.task]) for row in result.rows]
                append_whole(path, "".join(lines).encode())
                run.write_json("progress.json", {"rows": len(done.rows), "wall_s": done.wall_s})
                if not have and begin == 0:
                    _store(job, run, result)
    except KeyboardInterrupt:
        total = len(tasks) * job.samples
        message = f"stopped after {len(done.rows)} of {total} rows; they are kept in {path}; add --resume to go on"
        raise Interrupted(message) from None
    return done


def _reader(math: MathReward) -> Callable[[str], str | None]:
    return lambda text: extract_answer(text, extract=math.extract)


def _line(row: Row, task: Task) -> str:
    value = asdict(row) | {"stop": row.stop.name.lower(), "prompt": task["prompt"], "gold": task.get("answer")}
    return to_json(value) + "\n"


def _read(run: RunDir, path: Path, samples: int) -> _Progress:
    """The rows of earlier sessions; a kill inside a write leaves a cut line and a task without all its samples, which
    are dropped from the file."""
    data = path.read_bytes() if path.exists() else b""
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        write_atomic(path, whole)
    rows = [_row(line) for line in read_jsonl(path)] if whole else []
    count = Counter(row.task for row in rows)
    if any(n != samples for n in count.values()):
        lines = [line for line in whole.splitlines(keepends=True) if line.strip()]
        kept = [line for line, row in zip(lines, rows, strict=True) if count[row.task] == samples]
        write_atomic(path, b"".join(kept))
        rows = [row for row in rows if count[row.task] == samples]
    state = run.path / "progress.json"
    wall = from_json(state.read_text())["wall_s"] if rows and state.exists() else 0.0
    return _Progress(rows, wall)


def _row(line: dict[str, Any]) -> Row:
    known = {k: line[k] for k in Row.__dataclass_fields__}
    return Row(**{**known, "stop": Stop[line["stop"].upper()]})


def _store(job: EvalJob, run: RunDir, result: EvalResult) -> None:
    with TreeStore(run.path / "trees.sqlite") as store:
        store.truncate_after(-1)
        for tree in result.trees[:_STORED]:
            store.append(tree, task=tree.task, step=0, arm=job.arm, seed=job.seed, kind="eval")


# -- numbers -----------------------------------------------------------------------------------------------------------


def _results(job: EvalJob, result: EvalResult, wall_s: float, other: _Other | None) -> dict[str, Any]:
    arms = {job.arm: {name: cell(value) for name, value in estimates(result).items()}}
    found: dict[str, Any] = {
        "claim": "None: one evaluation measures and compares nothing (see --against).",
        "verdict": "not shown",
        "verdict_rule": "no comparison was asked for",
    }
    if other is not None:
        mine = dict(zip(result.tasks, result.task_means(), strict=True))
        change: Difference = paired_bootstrap(list(mine.values()), [other.means[t] for t in mine])
        arms = {f"against: {other.arm}": {"accuracy": other.accuracy}, **arms}
        found = {
            "claim": f"{job.arm} has a higher accuracy than {other.arm} on these {len(mine)} problems.",
            "verdict": verdict(change, better=1),
            "verdict_rule": "95% interval (bootstrap over problems) of the paired difference in accuracy, "
            f"{job.arm} - {other.arm}: all above 0 is shown, all below 0 is reversed, else not shown",
            "difference": difference(change),
        }
    judged = sum(r.stop is not Stop.ERROR for r in result.rows)
    return results(
        recipe="eval",
        profile="own data",
        model=job.model,
        seeds=[job.seed],
        arms=arms,
        budget={
            job.arm: {
                "tokens_generated": result.n_tokens,
                "tokens_trained": 0,
                "env_steps": 0,
                "verifier_calls": judged,
                "wall_s": wall_s,
            }
        },
        headline={"arm": job.arm, "metric": "accuracy"},
        judged_by={"reward": list(job.reward)} if job.reward else {"mode": job.mode, "extract": job.extract},
        **found,
    )


def estimates(result: EvalResult) -> dict[str, Estimate]:
    """Accuracy (with k > 1 samples also as avg@k), pass@k, maj@k, shares and lengths, each with its interval.

    Intervals are over problems, whose samples are not independent: Wilson where every problem's value is 0 or 1 (a
    bootstrap of equal values would have no width), else bootstrap.
    """
    k, tasks = result.samples, list(result.by_task().values())

    def share(holds: Callable[[Row], bool]) -> Estimate:
        return share_estimate([float(np.mean([holds(r) for r in rows])) for rows in tasks])

    out = {"accuracy": share(lambda r: r.right)}
    if k > 1:
        out[f"avg@{k}"] = out["accuracy"]
        sizes = sorted({*(2**i for i in range(1, k.bit_length()) if 2**i <= k), k})
        right = [sum(r.right for r in rows) for rows in tasks]
        out |= {f"pass@{n}": share_estimate([pass_at_k(k, c, n) for c in right]) for n in sizes}
        if any(r.answer is not None for r in result.rows):
            out[f"maj@{k}"] = result.majority()
    out |= {
        "boxed": share(lambda r: has_box(r.text)),
        "truncated": share(lambda r: r.stop is Stop.LENGTH),
        "repeated": share(lambda r: r.repeated),
        "length": bootstrap_ci([float(np.mean([r.length for r in rows])) for rows in tasks]),
    }
    if result.errors:
        out["errors"] = share(lambda r: r.error is not None)
    scores = [[r.score for r in rows if r.score is not None] for rows in tasks]
    if any(s not in (0, 1) for row in scores for s in row):
        out["score"] = bootstrap_ci([float(np.mean(s)) for s in scores if s])
    return out


# -- another evaluation ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Other:
    arm: str
    means: dict[str, float]
    accuracy: dict[str, Any]


def _other(job: EvalJob, tasks: Sequence[Task]) -> _Other:
    """The evaluation to compare with.

    Raises:
        DataError: it is none, is not complete, or was made on other data or by another judge.
    """
    folder = Path(str(job.against)).expanduser()
    if not (folder / "rows.jsonl").is_file():
        raise DataError(f"--against {folder}: holds no evaluation (no rows.jsonl); give the --out folder of one")
    config, own = load_yaml(folder / "config.yaml"), asdict(job)
    for name in _SAME:
        mine, theirs = own[name], config.get(name)
        if (list(mine) if isinstance(mine, tuple) else mine) != theirs:
            raise DataError(
                f"--against {folder}: it had {name}={theirs!r}, this evaluation has {mine!r}; such accuracies are not "
                "on one scale"
            )
    by_task: dict[str, list[float]] = {}
    for line in read_jsonl(folder / "rows.jsonl"):
        by_task.setdefault(line["task"], []).append(float(line["right"]))
    lacking = [str(t["id"]) for t in tasks if str(t["id"]) not in by_task]
    if lacking or len(by_task) != len(tasks):
        raise DataError(
            f"--against {folder}: it has {len(by_task)} problems, this evaluation {len(tasks)}: complete it"
        )
    means = {t: float(np.mean(values)) for t, values in by_task.items()}
    results_file = folder / "results.json"
    if not results_file.is_file():
        raise DataError(f"--against {folder}: it has no results.json: complete it with --resume")
    head = from_json(results_file.read_text())
    name = next(reversed(head["arms"]))
    return _Other(name, means, head["arms"][name]["accuracy"])
