"""`forethought train chain`: several methods one after the other, each on the model that the one before it left.

    model: smollm2-135m-instruct
    chat: true
    eval_data: heldout.jsonl
    measure: {reward: [math], extract: last_number}
    stages:
    - {name: mid-training, method: sft, data: traces.jsonl, bin_length: 2048}
    - {name: clean, method: sft, data: clean.jsonl}
    - {method: dpo, data: pairs.jsonl}
    - {method: grpo, data: problems.jsonl, reward: [math:last_number]}

A stage is a job of `forethought train METHOD` with that method's settings; what stands beside `stages` holds for all of
them. With `eval_data` the model at the start and after each stage answers the same questions with the same seeds, so
what each stage adds is one paired difference.
"""

from __future__ import annotations

import os
import shutil
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from forethought.config import from_dict, to_dict
from forethought.data import read_jsonl, read_rows
from forethought.errors import ConfigError, DataError, ForethoughtError, nearest
from forethought.evaluate.stats import paired_bootstrap
from forethought.files import from_json, write_atomic
from forethought.recipes.evaluation import EvalJob, evaluate_model
from forethought.recipes.inputs import Columns, Judge, Sampled, Say
from forethought.recipes.own_job import MAY_CHANGE, Job, Place, difference, verdict
from forethought.recipes.results import results
from forethought.recipes.stages import Stage, StageContext, check_chain, gather_stages, run_stages, start_of
from forethought.recipes.train import METHODS
from forethought.rewards.verify import Extract, Mode
from forethought.rundir import RunDir

START = "start"
"""Arm of the model that the chain begins with."""
_RULE = (
    "95% interval (bootstrap over questions) of the paired difference between the model of the last stage and the one at "
    "the start, on the held-out questions: all above 0 is shown, all below 0 is reversed, else not shown"
)


@dataclass(frozen=True, kw_only=True)
class Measure(Sampled):
    """How every model of the chain answers the questions of `eval_data`, and what judges it: as in `forethought eval`."""

    reward: tuple[str, ...] = ()
    """Rewards by name in place of the math verifier."""
    mode: Mode = "math-verify"
    extract: Extract = "box"

    def __post_init__(self):
        self.job("", Job())

    def job(self, model: str, chain: Job) -> EvalJob:
        """The evaluation of one model. Raises: ConfigError for settings that make none."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        columns = {f.name: getattr(chain, f.name) for f in fields(Columns)}
        return EvalJob(
            model=model, data=chain.eval_data or "", device=chain.device, dtype=chain.dtype, **own, **columns
        )


@dataclass(frozen=True, kw_only=True)
class ChainJob(Job):
    """Settings of `forethought train chain`. A setting of every job that stands here holds for all stages."""

    method: Literal["chain"] = "chain"
    stages: tuple[dict[str, Any], ...] = ()
    """name (default: its method), method, start (name of an earlier stage, default: the one before), and that method's
    settings."""
    measure: Measure = field(default_factory=Measure)

    def __post_init__(self):
        problems, full, starts = [], [], []
        for number, given in enumerate(self.stages):
            stage = dict(given)
            method = stage.get("method")
            name = stage.setdefault("name", method)
            known = [m for m in METHODS if m != "chain"]
            if method not in known:
                hint = nearest(str(method), known) or f"; known: {', '.join(known)}"
                problems.append(f"stages[{number}]: method={method!r}: give the way that this stage trains{hint}")
                continue
            if not isinstance(name, str) or not name or name == START:
                problems.append(f"stages[{number}]: name={name!r}: give text other than {START!r}")
                continue
            if "model" in stage:
                problems.append(
                    f"stage {name!r}: model={stage['model']!r}: it begins with the model of the stage before"
                )
                continue
            try:
                job = self._job_of(stage)
            except ConfigError as err:
                problems.append(str(err))
                continue
            starts.append((name, stage.get("start")))
            shared = {f.name for f in fields(Job)} - set(stage)
            own = {k: v for k, v in to_dict(job).items() if k not in shared}
            full.append({"name": name, "method": method, "start": stage.get("start"), **own})
        if not problems and starts:
            try:
                check_chain(starts)
            except ConfigError as err:
                problems.append(f"{err}; give each stage a name of its own" if "twice" in str(err) else str(err))
        if self.measure != Measure() and not self.eval_data:
            problems.append("measure: there are no questions to measure on: give eval_data")
        if problems:
            raise ConfigError("chain: " + "; ".join(problems))
        object.__setattr__(self, "stages", tuple(full))  # resolved: what config.yaml keeps

    def _job_of(self, stage: Mapping[str, Any]) -> Job:
        """A stage as a job without its model. Raises: ConfigError that names the stage."""
        cls, _ = METHODS[stage["method"]].load()
        shared = {f.name: to_dict(getattr(self, f.name)) for f in fields(Job) if f.name not in ("model", "eval_data")}
        own = {k: v for k, v in stage.items() if k not in ("name", "start")}
        if isinstance(own.get("reward"), str):
            own["reward"] = [own["reward"]]
        return from_dict(cls, {**shared, **own}, source=f"stage {stage['name']!r}")

    def jobs(self) -> dict[str, Job]:
        """Stage -> its job, without a model."""
        return {stage["name"]: self._job_of(stage) for stage in self.stages}

    def require(self) -> None:
        bad = [] if self.model else ["model: give --model, or `model:` in the config file"]
        if not self.stages:
            bad.append("stages: give them in a file: --config chain.yaml")
        bad += [f"stage {name!r}: data: give its file" for name, job in self.jobs().items() if not job.data]
        if bad:
            raise ConfigError("train chain: " + "; ".join(bad))

    def may_change(self) -> tuple[str, ...]:
        """Also the stages: one that has saved nothing yet may be mended, others are compared by themselves."""
        return (*MAY_CHANGE, "stages")


class _Inside(Place):
    """A stage's run folder as the place of its job."""

    def __init__(self, job: Job, run: RunDir):
        self.job, self.run = job, run


def chain(job: ChainJob, at: Place, say: Say) -> Path:
    """The chain from its files to its results."""
    jobs = job.jobs()
    _check_inputs(job, jobs, say)
    run = at.start()
    if job.eval_data:
        _measure(job, job.model, run.path / "stages" / "start", say)
    stages = [
        Stage(
            stage["name"],
            _function(job, jobs[stage["name"]], say),
            stage["start"],
            settings=jobs[stage["name"]],
            may_change=MAY_CHANGE,
        )
        for stage in job.stages
    ]
    done = run_stages(stages, run.path, first_model=Path(job.model), say=say)
    gather_stages(done, run, seed=job.seed)
    last = Path(done[stages[-1].name]["model"])
    write_atomic(run.path / "tokenizer.json", (last.parent / "tokenizer.json").read_bytes())
    with run.save_folder("model") as folder:
        shutil.copytree(_whole(last), folder, dirs_exist_ok=True, copy_function=_link)
    say(f"model: {run.path / 'model'}")
    run.write_json("results.json", _results(job, run, stages, done))
    return run.path


def _link(source: str, target: str) -> None:
    """The same file under a second name where the disk allows it: models are large and never changed in place."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _whole(model: Path) -> Path:
    """The model to go on with: an adapter goes on merged."""
    merged = model.parent / "model-merged"
    return merged if merged.is_dir() else model


def _check_inputs(job: ChainJob, jobs: Mapping[str, Job], say: Say) -> None:
    """Files and rewards of all stages, before the first one costs hours.

    Raises:
        ForethoughtError: names the stage.
    """
    for name, stage in jobs.items():
        try:
            for path in filter(None, (stage.data, stage.eval_data)):
                read_rows(path, limit=1)
            if reward := getattr(stage, "reward", ()):
                with Judge(reward, getattr(stage, "reward_weights", ())):
                    pass
        except ForethoughtError as err:
            raise type(err)(f"stage {name!r}: {err}") from err
    if job.eval_data:
        read_rows(job.eval_data, limit=1)
        with Judge(job.measure.reward or ("math",)):
            pass


def _function(chain: ChainJob, job: Job, say: Say) -> Callable[[StageContext], dict[str, Any]]:
    """What a stage does: its own job, and the measurement of the model that it leaves."""

    def function(context: StageContext) -> dict[str, Any]:
        assert context.model_in is not None
        first = context.model_in == Path(chain.model)  # which may be a name that is no folder
        model = chain.model if first else str(_whole(context.model_in))
        mine = replace(job, model=model)
        _, work = METHODS[job.method].load()  # type: ignore[attr-defined]
        work(mine, _Inside(mine, context.run), say)
        found = from_json((context.run.path / "results.json").read_text())
        out = {"arms": found["arms"], "budget": found["budget"], "verdict": found["verdict"]}
        if chain.eval_data:
            _measure(chain, str(_whole(context.model_out)), context.run.path, say)
        return out

    return function


# -- the same questions for every model --------------------------------------------------------------------------------


def _measure(chain: ChainJob, model: str, place: Path, say: Say) -> None:
    """Evaluate a model into `place`/eval, unless that was done; one that was stopped goes on."""
    folder = place / "eval"
    if (folder / "results.json").is_file():
        return
    settings = {k: v for k, v in to_dict(chain.measure.job(model, chain)).items() if v is not None}
    args = Namespace(**settings, out=str(folder), resume=(folder / "config.yaml").is_file(), overwrite=False)
    try:
        evaluate_model(args, say)
    except DataError as err:
        raise DataError(f"eval_data: {err}") from err


@dataclass(frozen=True)
class _Measured:
    """arms: metric -> cell; values: question -> mean score (share of right answers where the judge only knows 0 and 1)."""

    arms: dict[str, Any]
    budget: dict[str, float]
    values: dict[str, float]


def _read(place: Path) -> _Measured:
    found = from_json((place / "eval" / "results.json").read_text())
    (name,) = found["arms"]
    scores: dict[str, list[float]] = {}
    graded = "score" in found["arms"][name]
    for row in read_jsonl(place / "eval" / "rows.jsonl"):
        value = row["score"] if graded else float(row["right"])
        if value is not None:
            scores.setdefault(row["task"], []).append(float(value))
    arms = {k: found["arms"][name][k] for k in ("score", "accuracy", "truncated", "length") if k in found["arms"][name]}
    return _Measured(arms, found["budget"][name], {t: float(np.mean(v)) for t, v in scores.items()})


def _gain(after: _Measured, before: _Measured) -> Any:
    both = [t for t in before.values if t in after.values]
    if not both:
        raise DataError("eval_data: no question was judged for both models that are compared")
    return paired_bootstrap([after.values[t] for t in both], [before.values[t] for t in both])


# -- numbers -----------------------------------------------------------------------------------------------------------


def _results(job: ChainJob, run: RunDir, stages: list[Stage], done: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    names = [s.name for s in stages]
    budget: dict[str, dict[str, float]] = {}
    for name in names:
        budget[name] = {}
        for side in done[name]["budget"].values():
            for key, value in side.items():
                budget[name][key] = budget[name].get(key, 0) + value
    arms: dict[str, dict[str, Any]] = {}
    found: dict[str, Any] = {
        "claim": "None: the chain was measured on no common questions (give eval_data).",
        "verdict": "not shown",
        "verdict_rule": "without common questions the stages cannot be compared",
    }
    if job.eval_data:
        measured = {START: _read(run.path / "stages" / START)}
        measured |= {name: _read(Path(done[name]["model"]).parent) for name in names}
        graded = any("score" in m.arms for m in measured.values())
        # Scores that are all 0 or 1 are the accuracy.
        arms = {n: {"score": m.arms["accuracy"], **m.arms} if graded else dict(m.arms) for n, m in measured.items()}
        gained = {}
        for number, name in enumerate(names):
            before = start_of(stages, number) or START
            gained[f"{name} minus {before}"] = change = difference(_gain(measured[name], measured[before]))
            arms[name] = {"gain": {**change, "per_seed": [change["mean"]]}, **arms[name]}
            for key, value in measured[name].budget.items():
                budget[name][key] = budget[name].get(key, 0) + value
        budget = {START: dict(measured[START].budget), **budget}
        whole = _gain(measured[names[-1]], measured[START])
        metric = "score" if graded else "accuracy"
        found = {
            "claim": f"The chain raises the {metric} on {len(measured[START].values)} held-out questions.",
            "verdict": verdict(whole, better=1),
            "verdict_rule": _RULE,
            "difference": difference(whole),
            "differences": gained,
            "headline": {"arm": names[-1], "metric": metric},
            "notes": [f"gain: difference in {metric} to the model that the stage begins with, on the same questions."],
        }
    for name in names:  # what each stage's own job compared
        before, after = done[name]["arms"].get("before", {}), done[name]["arms"].get("after", {})
        arms.setdefault(name, {})
        for metric in after:
            if metric in before:
                arms[name] |= {f"own {metric}/before": before[metric], f"own {metric}/after": after[metric]}
    return results(
        recipe="train chain", profile="own job", model=job.model, seeds=[job.seed], arms=arms, budget=budget, **found
    )
