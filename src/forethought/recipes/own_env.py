"""`forethought train grpo --env`: GRPO or GiGPO on episodes in a text environment.

Tasks are those of the environment's training split (or of --data); before and after, and every `eval_every` steps, the
policy plays the tasks of another split (or of --eval-data), greedily by default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from forethought.config import derive_seed
from forethought.envs.registry import find_env
from forethought.errors import ConfigError, EnvError
from forethought.evaluate.stats import paired_bootstrap
from forethought.learn.episode_trainer import EpisodeConfig, EpisodeTrainer
from forethought.learn.episodes import Players
from forethought.learn.online import Group
from forethought.models.engine import Sampling
from forethought.progress import Progress
from forethought.recipes import env_eval
from forethought.recipes.inputs import Columns, Say, Task
from forethought.recipes.own_job import (
    Job,
    Place,
    Session,
    cell,
    difference,
    load,
    rule,
    verdict,
    without_held_out,
)


@dataclass(frozen=True, kw_only=True)
class EnvGRPOJob(EpisodeConfig, Job):
    """Settings of `forethought train grpo --env`."""

    method: Literal["grpo"] = "grpo"
    env: str = ""
    """Environment: a name with settings, or FILE.py:NAME."""
    train_tasks: int = 1000
    """Different tasks to train on."""
    eval_tasks: int = 64
    """Tasks to evaluate on; 0: no evaluation."""
    eval_split: str = "validation"
    eval_temperature: float = 0.0
    save_every: int = 50  # a job is not to lose hours

    def __post_init__(self):
        super().__post_init__()
        bad = []
        if self.train_tasks < 1:
            bad.append(f"train_tasks={self.train_tasks}: give at least 1")
        if self.eval_tasks < 0:
            bad.append(f"eval_tasks={self.eval_tasks}: give 0 or more")
        bad += [
            f"{f.name}={getattr(self, f.name)!r}: an environment writes the prompts; leave it out"
            for f in fields(Columns)
            if f.name != "limit" and getattr(self, f.name) != f.default
        ]
        if bad:
            raise ConfigError("train grpo --env: " + "; ".join(bad))

    def require(self) -> None:
        """Raises: ConfigError where what has no default is missing."""
        if not self.model:
            raise ConfigError("train: model: give --model, or `model:` in the config file")


class _Trainer(EpisodeTrainer):
    """Says what fails, once."""

    def __init__(self, *args: Any, say: Say, **settings: Any):
        super().__init__(*args, **settings)
        self.say, self.told = say, False

    def train_step(self, progress: Callable[[int, int], None] | None = None) -> tuple[dict[str, float], list[Group]]:
        metrics, groups = super().train_step(progress)
        failed = [e for g in groups for e in getattr(g, "episodes", ()) if e.failed]
        if failed and not self.told:
            self.told = True
            count = f"{len(failed)} of {len(groups) * self.config.group_size} episodes failed (left out)"
            self.say(f"step {self.step}: {count}; the first: {failed[0].error}")
        return metrics, groups


def env_grpo(job: EnvGRPOJob, at: Place, say: Say) -> Path:
    """The job from its environment to its results."""
    source = find_env(job.env)
    tasks = env_eval.env_tasks(source, job.data or None, job.train_tasks, job.seed, "train", job.limit)
    held_out: Sequence[Task] = []
    if job.eval_data or job.eval_tasks:
        seed = derive_seed(job.seed, "eval-tasks") % 2**31
        held_out = env_eval.env_tasks(source, job.eval_data, job.eval_tasks, seed, job.eval_split, None)
    bench = load(job, job.seed, say)
    player = env_eval.players(bench, source, job)
    trainer = _Trainer(bench.policy, bench.engine, tasks, source, bench.renderer, job, compute=bench.compute, say=say)
    episodes = job.prompts_per_step * job.group_size
    say(
        f"{job.prompts_per_step} tasks x {job.group_size} episodes = {episodes} episodes a step, at most "
        f"{job.max_turns} turns each; {job.steps} steps over {len(tasks)} tasks of {source.spec}"
    )
    run = at.open(bench)
    session = Session(trainer, run, job, job.method, job.steps, say, store_groups=job.store_groups)

    def measure(step: int) -> tuple[dict[str, float], dict[str, Any]]:
        rows = _measured(player, held_out, job, run if step in (0, job.steps) else None, step)
        session.spent["tokens_generated"] += sum(r["tokens"] for r in rows)
        session.spent["env_steps"] += sum(r["turns"] for r in rows)
        found = env_eval.estimates(rows)
        numbers = {f"eval/{name.replace(' ', '_').replace(',', '')}": value.mean for name, value in found.items()}
        return numbers, {"rows": rows}

    session.fit(measure if held_out else None)
    session.finish(_results(session, len(held_out)))
    return run.path


def _measured(player: Players, tasks: Sequence[Task], job: EnvGRPOJob, run: Any, step: int) -> list[env_eval.Row]:
    sampling = Sampling(
        max_tokens=job.max_new_tokens,
        temperature=job.eval_temperature,
        stop=job.stop,
        seed=derive_seed(job.seed, "eval"),
    )
    rows: list[env_eval.Row] = []
    stored = 0
    with Progress(len(tasks), "evaluating") as bar:

        def done(episodes) -> None:
            nonlocal stored
            rows.extend(map(env_eval.row, episodes))
            if run is not None:
                stored = env_eval.store(run, episodes, stored, step, job.method, job.seed)
            bar.update(len(rows))

        env_eval.play(player, tasks, 1, sampling, done)
    return rows


def _results(session: Session, held_out: int) -> dict[str, Any]:
    if not session.before or not session.after:
        return without_held_out(session, "reward/mean", "training_reward", "eval_tasks=64 measures held-out success")
    sides = {"before": session.before["rows"], "after": session.after["rows"]}
    metric = "success" if all(env_eval.knows_success(rows) for rows in sides.values()) else "return"
    of = env_eval.won if metric == "success" else lambda r: r["return"]
    scores = {side: env_eval.score(rows, of) for side, rows in sides.items()}
    both = [t for t in scores["before"] if t in scores["after"]]
    if not both:
        raise EnvError("no held-out task was played both before and after: their episodes failed")
    change = paired_bootstrap([scores["after"][t] for t in both], [scores["before"][t] for t in both])
    notes = [f"{side}: {note}" for side, rows in sides.items() for note in env_eval.notes_on(rows)]
    return {
        "claim": f"Training raises the mean {metric} on {len(both)} held-out tasks.",
        "arms": {
            side: {name: cell(value) for name, value in env_eval.estimates(rows).items()}
            for side, rows in sides.items()
        },
        "verdict": verdict(change, better=1),
        "verdict_rule": rule(f"mean {metric}", "above", "below").replace("records", "tasks"),
        "difference": difference(change),
        "coverage": {side: env_eval.coverage_of(rows) for side, rows in sides.items()},
        "notes": notes,
        "headline": {"arm": "after", "metric": metric},
    }
