"""The user's own job, the part that every method shares: settings, the run folder, and how a job ends.

A job ends with the model as a Hugging Face folder and, with held-out records, with a paired comparison of before and
after; without them it claims nothing.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from forethought.config import apply_overrides, derive_seed, from_dict, load_yaml
from forethought.errors import ConfigError, EnvError, RewardError, RunError
from forethought.evaluate.stats import Difference, Estimate, bootstrap_ci, wilson
from forethought.files import from_json, remove_whole, write_atomic
from forethought.learn.session import Trainer, fit
from forethought.learn.session import save as save_checkpoint
from forethought.models.load import LoRA, save_pretrained
from forethought.recipes.inputs import Columns, Say
from forethought.recipes.results import Verdict, results
from forethought.recipes.session import Workbench, open_model
from forethought.rundir import RunDir

MAY_CHANGE = ("steps", "epochs", "iterations", "eval_every", "save_every", "store_groups")
"""Settings that a resumed run may have otherwise than before."""
_FLAGS = (
    *("model", "env", "data", "eval_data", "reward", "oracle", "device", "dtype"),
    *("prompt_column", "answer_column", "suffix", "chat", "limit"),
)

J = TypeVar("J", bound="Job")


# -- settings ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Job(Columns):
    """Settings of every training job."""

    model: str = ""
    """Registry name, Hugging Face id or local folder."""
    data: str = ""
    """JSONL or parquet file."""
    eval_data: str | None = None
    """Held-out records in the same columns."""
    device: str | None = None
    dtype: Literal["fp32", "bf16"] | None = None
    """Compute precision; by default that of the device. Master weights are fp32 in any case."""
    lora: LoRA | None = None
    """Train a LoRA adapter instead of all weights."""
    seed: int = 0
    eval_every: int = 0
    """Steps between evaluations on the held-out records, beside those before and after."""
    save_every: int = 50
    """Steps between checkpoints, beside those at the end and on Ctrl-C."""

    def require(self) -> None:
        """Raises: ConfigError where what has no default is missing."""
        missing = [f"{n}: give --{n}, or `{n}:` in the config file" for n in ("model", "data") if not getattr(self, n)]
        if missing:
            raise ConfigError("train: " + "; ".join(missing))

    def may_change(self) -> tuple[str, ...]:
        """Settings that a resumed run may have otherwise than before."""
        return MAY_CHANGE


def job_of(cls: type[J], args: argparse.Namespace) -> J:
    """The job that the command line describes: the config file, then flags, then key=value settings.

    Raises:
        ConfigError: all problems of a source at once.
    """
    given = load_yaml(args.config) if args.config else {}
    if isinstance(given.get("reward"), str):
        given["reward"] = [given["reward"]]
    for name in ("env", "reward", "oracle"):
        if getattr(args, name) and name not in cls.__dataclass_fields__:
            raise ConfigError(f"--{name}: {args.method} has no {name}; leave it out, or take a method that has one")
    flags = {name: getattr(args, name) for name in _FLAGS if getattr(args, name) is not None}
    judge = {name: value for name, value in (("url", args.judge_url), ("model", args.judge_model)) if value is not None}
    if judge:
        if "judge" not in cls.__dataclass_fields__:
            raise ConfigError(f"--judge-url, --judge-model: {args.method} has no oracle; leave them out")
        flags["judge"] = {**(given.get("judge") or {}), **judge}
    if args.lora and not given.get("lora"):
        flags["lora"] = {}
    job = from_dict(cls, {**given, **flags}, source=args.config or "command line")
    return apply_overrides(job, args.settings)


def check_place(args: argparse.Namespace) -> None:
    """Before anything costs time: can --out become, or go on being, a run folder?

    Raises:
        RunError: it holds a run or other files, is a file, or is not writable.
    """
    path = Path(args.out).expanduser().resolve()
    if path.exists() and not path.is_dir():
        raise RunError(f"{path}: is a file; --out names a folder")
    RunDir._check_place(path, args.resume, args.overwrite)
    there = next(p for p in (path, *path.parents) if p.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        raise RunError(f"{there}: not writable; choose another --out or change its permissions")


class Place:
    """The run folder. An existing run is opened and its config compared at once; a new one is made, and an old one
    overwritten, only when everything that can be checked is checked."""

    def __init__(self, job: Job, args: argparse.Namespace):
        self.job, self.args = job, args
        self.run: RunDir | None = None
        if args.resume:
            self.run = self._create()
        else:
            check_place(args)

    def _create(self) -> RunDir:
        args, may_change = self.args, self.job.may_change()
        return RunDir.create(args.out, self.job, resume=args.resume, overwrite=args.overwrite, may_change=may_change)

    def start(self) -> RunDir:
        """The run folder, made now if it is not there yet."""
        if self.run is None:
            self.run = self._create()
            if (self.run.path / "model-merged").exists():  # of a run that was overwritten
                remove_whole(self.run.path / "model-merged")
        return self.run

    def open(self, bench: Workbench) -> RunDir:
        """The run folder, with the tokenizer in it."""
        run = self.start()
        backend = getattr(bench.policy.tokenizer, "backend_tokenizer", None)
        if backend is not None:  # the report shows tokens before the model is saved
            write_atomic(run.path / "tokenizer.json", backend.to_str())
        return run

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        if self.run is not None:
            self.run.close()


def keep_tokenizer(run: RunDir, bench: Workbench) -> None:
    """For the report, which shows texts where no model was saved (yet)."""
    backend = getattr(bench.policy.tokenizer, "backend_tokenizer", None)
    if backend is not None:
        write_atomic(run.path / "tokenizer.json", backend.to_str())


def load(job: Job, seed: int, say: Say) -> Workbench:
    torch.manual_seed(derive_seed(seed, "weights"))  # a fresh adapter is random
    return open_model(job.model, device=job.device, dtype=job.dtype, lora=job.lora, train=True, say=say)


# -- what both end in --------------------------------------------------------------------------------------------------

Measure = Callable[[int], tuple[dict[str, float], dict[str, Any]]]
"""step -> (numbers for metrics.jsonl, what the comparison of before and after needs)."""


class Session:
    """A trainer in its run folder: training with evaluations, the saved model, results.json."""

    def __init__(
        self,
        trainer: Trainer,
        run: RunDir,
        job: Job,
        method: str,
        total: int,
        say: Say,
        *,
        store_groups: int = 0,
    ):
        self.trainer, self.run, self.job, self.method, self.total, self.say = trainer, run, job, method, total, say
        self.store_groups = store_groups
        self.spent = {"wall_s": 0.0, "tokens_generated": 0, "verifier_calls": 0, "env_steps": 0}
        self.before: dict[str, Any] = {}
        self.after: dict[str, Any] = {}
        self._began = time.perf_counter()

    def _extra(self) -> dict[str, Any]:
        now = time.perf_counter()
        self.spent["wall_s"] += now - self._began
        self._began = now
        return dict(self.spent)

    def fit(self, measure: Measure | None) -> None:
        """Train to the end; see `learn.session.fit`.

        Raises:
            RewardError, EnvError: all rewards, or all episodes, of a step failed; the state before it was saved.
        """
        trainer, run = self.trainer, self.run

        def evaluated(step: int) -> dict[str, float]:
            assert measure is not None
            began = time.perf_counter()
            numbers, kept = measure(step)
            if step == 0:
                kept["used"] = {**self.spent, "wall_s": time.perf_counter() - began}
            run.write_json(f"eval_{'after' if step else 'before'}.json", {"step": step, **numbers, **kept})
            return numbers

        try:
            fit(
                trainer,
                run,
                steps=self.total,
                tags={"arm": self.method, "seed": self.job.seed},
                title=self.method,
                evaluate=evaluated if measure else None,
                eval_every=self.job.eval_every,
                save_every=self.job.save_every,
                store_groups=self.store_groups,
                extra=self._extra,
                restore_extra=self.spent.update,
            )
        except (RewardError, EnvError) as err:
            if not trainer.step:
                raise
            save_checkpoint(trainer, run, "", self._extra())
            raise type(err)(f"{err}; saved after step {trainer.step}, go on with --resume") from err
        if trainer.step > self.total:
            raise RunError(f"{run.path}: the run is at step {trainer.step} already, steps={self.total} lies before it")
        if measure:
            self.before = self._read("before")
            self.after = self._read("after") if (run.path / "eval_after.json").exists() else {}
            if self.after.get("step") != self.total:  # the evaluation at the end had failed
                evaluated(self.total)
                self.after = self._read("after")
        self._extra()

    def _read(self, name: str) -> dict[str, Any]:
        path = self.run.path / f"eval_{name}.json"
        try:
            return from_json(path.read_text())
        except (OSError, ValueError) as err:
            raise RunError(f"{path}: the evaluation {name} training cannot be read: {err}") from None

    def finish(self, found: dict[str, Any]) -> None:
        """Save the model and write results.json."""
        run, learner = self.run, self.trainer.learner
        with run.save_folder("model") as folder:
            learner.save_model(folder)
        self.say(f"model: {run.path / 'model'}")
        if self.job.lora is not None:
            policy, masters = learner.policy, learner.optimizer.master_state()
            with run.save_folder("model-merged") as folder:
                save_pretrained(policy.model, policy.tokenizer, folder, state=masters, merge=True)
            self.say(f"adapter merged into the model: {run.path / 'model-merged'}")
        none = {"tokens_generated": 0, "tokens_trained": 0, "env_steps": 0, "verifier_calls": 0}
        budget = {"after": {**none, **self.trainer.counts, "wall_s": self.spent["wall_s"]}}
        for name in ("tokens_generated", "verifier_calls", "env_steps"):
            budget["after"][name] += self.spent[name]
        if self.before:
            used = self.before["used"]
            budget = {"before": {**none, **used}, **budget}
            for name, value in used.items():
                budget["after"][name] -= value
        body = results(
            recipe=f"train {self.method}",
            profile="own job",
            model=self.job.model,
            seeds=[self.job.seed],
            budget=budget,
            **found,
        )
        run.write_json("results.json", body)


def overlap(records: Sequence[Mapping[str, Any]], held_out: Sequence[Mapping[str, Any]], say: Say) -> int:
    """How many held-out records have a prompt that is also trained on; said if there are any."""

    def key(record: Mapping[str, Any]) -> str:
        return str(next(record[name] for name in ("messages", "prompt", "text") if name in record))

    seen = {key(r) for r in records}
    found = sum(key(r) in seen for r in held_out)
    if found:
        say(f"{found} of {len(held_out)} held-out records are also in the training data: the comparison is not clean")
    return found


def overlap_note(found: int) -> dict[str, Any]:
    return {"notes": [f"{found} held-out records are also in the training data."]} if found else {}


def without_held_out(session: Session, metric: str, name: str, advice: str) -> dict[str, Any]:
    """Results of a job that nothing was held out from: what training logged, and no claim."""
    values = [row[metric] for row in session.run.metrics() if row.get(metric) is not None]
    window = max(1, len(values) // 10)
    arms = {}
    for side, part in (("before", values[:window]), ("after", values[-window:])):
        mean = float(np.mean(part)) if part else None
        arms[side] = {name: {"mean": mean, "ci95": [None, None], "n": len(part), "per_seed": [mean]}}
    return {
        "claim": "None: no records were held out.",
        "arms": arms,
        "verdict": "not shown",
        "verdict_rule": "without held-out records nothing can be shown",
        "notes": [f"{name}: mean over the first and the last tenth of the steps, on the training records. {advice}."],
        "headline": {"arm": "after", "metric": name},
    }


def share_estimate(values: Sequence[float]) -> Estimate:
    """Mean with its interval: Wilson's where all values are 0 or 1, else a bootstrap over them."""
    if all(v in (0, 1) for v in values):
        return wilson(int(sum(values)), len(values))
    return bootstrap_ci(list(values))


def cell(estimate: Estimate) -> dict[str, Any]:
    return {
        "mean": estimate.mean,
        "ci95": [estimate.low, estimate.high],
        "n": estimate.n,
        "per_seed": [estimate.mean],
    }


def difference(change: Difference) -> dict[str, Any]:
    return {"mean": change.mean, "ci95": [change.low, change.high], "n": change.n}


def rule(what: str, good: str, bad: str) -> str:
    return (
        f"95% interval (bootstrap over records) of the paired difference after - before in {what} on the held-out "
        f"records: all {good} 0 is shown, all {bad} 0 is reversed, else not shown"
    )


def verdict(change: Difference, better: int) -> Verdict:
    if not change.clear:
        return "not shown"
    return "shown" if change.mean * better > 0 else "reversed"
