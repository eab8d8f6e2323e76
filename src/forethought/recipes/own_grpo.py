"""Online learning on the user's records with the user's reward: `forethought train grpo`, and what PPO shares with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from forethought.errors import ConfigError, RewardError
from forethought.evaluate.stats import bootstrap_ci, paired_bootstrap, wilson
from forethought.evaluate.suites import EvalResult, evaluate
from forethought.learn.online import Group, OnlineConfig, OnlineTrainer, RolloutConfig, RolloutTrainer
from forethought.models.engine import Sampling
from forethought.progress import Progress
from forethought.recipes.inputs import NO_REWARD, Judge, Say, Task, encode_prompts, load_prompts
from forethought.recipes.own_job import (
    Job,
    Place,
    Session,
    cell,
    difference,
    load,
    overlap,
    overlap_note,
    rule,
    share_estimate,
    verdict,
    without_held_out,
)
from forethought.recipes.session import Workbench
from forethought.rundir import RunDir
from forethought.tree.store import TreeStore

STORED = 8
"""Evaluated trees and examples that are kept for the report."""


@dataclass(frozen=True, kw_only=True)
class RewardedJob(Job):
    """Settings of every job with a reward."""

    reward: tuple[str, ...] = ()
    """Rewards by name; several are added up."""
    reward_weights: tuple[float, ...] = ()
    reward_timeout: float = 60.0
    """Seconds for one call of a reward function: a sample for native and verl functions, a batch for TRL functions."""

    def check_timeout(self) -> None:
        """Raises: ConfigError."""
        if not 0 < self.reward_timeout < float("inf"):
            raise ConfigError(f"reward_timeout={self.reward_timeout}: give a positive number of seconds")


@dataclass(frozen=True, kw_only=True)
class GRPOJob(OnlineConfig, RewardedJob):
    """Settings of `forethought train grpo`."""

    method: Literal["grpo"] = "grpo"
    save_every: int = 50  # a job is not to lose hours

    def __post_init__(self):
        super().__post_init__()
        self.check_timeout()


class UserRewards(RolloutTrainer):
    """An online trainer with what a user's reward reports and needs to know: logs, failures, the step."""

    def __init__(self, *args: Any, rewards: Judge, say: Say, **settings: Any):
        super().__init__(*args, **settings)
        self.rewards, self.say, self.told = rewards, say, False

    def train_step(self, progress: Callable[[int, int], None] | None = None) -> tuple[dict[str, float], list[Group]]:
        before = self.sampler.state_dict()
        self.rewards.state.global_step = self.step
        try:
            metrics, groups = super().train_step(progress)
        except RewardError:
            self.sampler.load_state_dict(before)  # so that the step can be made again
            raise
        logs = self.rewards.runner.take_logs()
        metrics |= {f"reward_log/{name}": float(np.mean(values)) for name, values in logs.metrics.items()}
        leaves = [(g.tree, leaf) for g in groups for leaf in g.leaves]
        for name, values in logs.columns.items():
            if len(values) == len(leaves):
                for (tree, leaf), value in zip(leaves, values, strict=True):
                    tree.meta[leaf].setdefault("logged", {})[name] = value
        failed = [r for g in groups for r in g.results if isinstance(r, RewardError)]
        if failed and not self.told:
            self.told = True
            count = f"{len(failed)} of {len(leaves)} rewards failed (left out)"
            self.say(f"step {self.step}: {count}; the first: {failed[0]}")
        return metrics, groups


class _GRPOTrainer(UserRewards, OnlineTrainer):
    pass


def grpo(job: GRPOJob, at: Place, say: Say) -> Path:
    return online(job, at, say, lambda bench, *args, **kwargs: _GRPOTrainer(*args, **kwargs))


def online(job: Any, at: Place, say: Say, make: Callable[..., UserRewards]) -> Path:
    """An online job from its files to its results.

    Args:
        job: a `RolloutConfig` that is a `RewardedJob` with a `method`, too.
        make: (workbench, then what a trainer takes) -> trainer.
    """
    if not job.reward:
        raise ConfigError(NO_REWARD)
    with Judge(job.reward, job.reward_weights, timeout=job.reward_timeout) as judge:
        tasks = load_prompts(job.data, job)
        held_out = load_prompts(job.eval_data, job) if job.eval_data else []
        judge.check([*tasks, *held_out], say)
        shared = overlap(tasks, held_out, say)
        bench = load(job, job.seed, say)
        judge.bind(bench.decode)
        ids = encode_prompts(bench, tasks, job.data, job.max_new_tokens, say)
        if job.eval_data:
            encode_prompts(bench, held_out, job.eval_data, job.max_new_tokens, say)
        place = {str(t["id"]): i for i, t in enumerate(tasks)}
        trainer = make(
            bench,
            bench.policy,
            bench.engine,
            tasks,
            lambda task: ids[place[str(task["id"])]],
            judge,
            job,
            compute=bench.compute,
            rewards=judge,
            say=say,
        )
        judge.state.max_steps = job.steps
        say(batch_arithmetic(job, len(tasks)))
        run = at.open(bench)
        session = Session(trainer, run, job, job.method, job.steps, say, store_groups=job.store_groups)

        def measure(step: int) -> tuple[dict[str, float], dict[str, Any]]:
            judge.state.global_step = step
            result = _held_out(bench, held_out, judge, job)
            judge.runner.take_logs()
            if step in (0, job.steps):
                _store(run, result, step, job.method, job.seed)
            session.spent["tokens_generated"] += result.n_tokens
            session.spent["verifier_calls"] += len(result.rows)
            return _summary(result), {"rows": result.to_json()["rows"]}

        session.fit(measure if held_out else None)
        session.finish(_results(job, session, held_out) | overlap_note(shared))
        return run.path


def batch_arithmetic(job: RolloutConfig, records: int) -> str:
    """What a step consists of, in one line.

    >>> batch_arithmetic(OnlineConfig(steps=100), 200)
    '8 prompts x 8 samples = 64 rollouts a step, 1 update; 100 steps = 4 passes over 200 records'
    """
    prompts, samples, steps = job.prompts_per_step, job.group_size, job.steps
    updates = f"{job.updates} update{'s' if job.updates > 1 else ''}"
    each = f"{samples} sample{'s' if samples > 1 else ''}"
    text = f"{prompts} prompts x {each} = {prompts * samples} rollouts a step, {updates}; {steps} steps"
    count = f"{records} record{'s' if records > 1 else ''}"
    if records < prompts:
        by_prompt = isinstance(job, OnlineConfig) and job.group_by == "prompt"
        how = "the samples of a record as one group" if by_prompt else f"repeated to {prompts} groups"
        return f"{text}, each on all {count}, {how}"
    per_pass = -(-records // prompts)
    last = records - (per_pass - 1) * prompts
    short = f" (the last step of a pass has {last} prompts)" if last < prompts else ""
    return f"{text} = {steps / per_pass:.3g} passes over {count}{short}"


def _held_out(bench: Workbench, tasks: Sequence[Task], judge: Judge, job: Any) -> EvalResult:
    """Greedy responses to the held-out records."""
    with Progress(len(tasks), "evaluating") as bar:
        result = evaluate(
            bench.engine,
            tasks,
            judge,
            prompt_ids=bench.prompt_ids,
            decode=bench.decode,
            sampling=Sampling(max_tokens=job.max_new_tokens, temperature=0.0, stop=job.stop, seed=job.seed),
            name="held-out",
            progress=lambda done, _: bar.update(done),
        )
    if result.errors == len(result.rows):
        raise RewardError(f"every reward of the evaluation failed; the first: {result.rows[0].error}")
    return result


def _store(run: RunDir, result: EvalResult, step: int, arm: str, seed: int) -> None:
    with TreeStore(run.path / "trees.sqlite") as store:
        for tree in result.trees[:STORED]:
            store.append(tree, task=tree.task, step=step, arm=arm, seed=seed, kind="eval")


def _summary(result: EvalResult) -> dict[str, float]:
    own = result.metrics()
    out = {"eval/reward": own["score"], "eval/length": own["length/mean"], "eval/truncated": own["truncated"]}
    out |= {f"eval/reward/{name[6:]}": value for name, value in own.items() if name.startswith("score/")}
    return out | ({"eval/failed": own["errors"]} if own["errors"] else {})


def _results(job: Any, session: Session, held_out: Sequence[Task]) -> dict[str, Any]:
    if not session.before or not session.after:
        return without_held_out(session, "reward/mean", "training_reward", "--eval-data FILE measures held-out reward")
    sides = {"before": session.before, "after": session.after}
    scores = {side: {r["task"]: r["score"] for r in found["rows"]} for side, found in sides.items()}
    arms: dict[str, Any] = {}
    for side, found in sides.items():
        rows = found["rows"]
        known = [s for s in scores[side].values() if s is not None]
        arms[side] = {
            "reward": cell(share_estimate(known)),
            "length": cell(bootstrap_ci([r["length"] for r in rows])),
            "truncated": cell(wilson(sum(r["stop"] == "length" for r in rows), len(rows))),
        }
        if len(known) < len(rows):
            arms[side]["failed"] = cell(wilson(len(rows) - len(known), len(rows)))
    both = [t for t in scores["before"] if scores["before"][t] is not None and scores["after"][t] is not None]
    if not both:
        raise RewardError("no held-out record was judged both before and after: their rewards failed")
    change = paired_bootstrap([scores["after"][t] for t in both], [scores["before"][t] for t in both])
    texts = {side: {r["task"]: r["text"] for r in found["rows"]} for side, found in sides.items()}
    examples = []
    for task in held_out[:STORED]:
        key = str(task["id"])
        entry = {"prompt": task["prompt"], "before": texts["before"][key], "after": texts["after"][key]}
        entry |= {"reward before": scores["before"][key], "reward after": scores["after"][key]}
        examples.append(entry | ({"answer": task["answer"]} if task.get("answer") is not None else {}))
    return {
        "claim": f"Training raises the mean reward on {len(both)} held-out records (greedy responses).",
        "arms": arms,
        "verdict": verdict(change, better=1),
        "verdict_rule": rule("mean reward", "above", "below"),
        "difference": difference(change),
        "examples": examples,
        "headline": {"arm": "after", "metric": "reward"},
    }
