"""`forethought eval --env`: a model acting in a text environment, with intervals; what training in one measures, too.

Headline: the share of episodes that were won, over tasks. Episodes that failed to run are in no denominator, so the
results give the coverage beside it, and with failures the success in which they count as lost. Rows are written to
rows.jsonl as they come; a resumed evaluation has those of an unbroken one.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forethought.config import apply_overrides, from_dict
from forethought.data import read_jsonl
from forethought.envs.registry import EnvSource, find_env
from forethought.errors import ConfigError, DataError, EnvError
from forethought.evaluate.stats import Estimate, bootstrap_ci
from forethought.files import append_whole, from_json, to_json, write_atomic
from forethought.learn.episodes import Episode, EpisodeRules, Players
from forethought.learn.session import Interrupted
from forethought.models.engine import Sampling
from forethought.progress import Progress
from forethought.recipes.inputs import Sampled, Say, Task, short_name
from forethought.recipes.own_job import cell, check_place, keep_tokenizer, share_estimate
from forethought.recipes.results import results
from forethought.recipes.session import Workbench, open_model
from forethought.rundir import RunDir
from forethought.tree.store import TreeStore

CHUNK = 32
"""Episodes that are played and written together."""
STORED = 8
"""Tasks whose episodes are kept for the report."""
_ELSEWHERE = ("reward", "mode", "extract", "prompt_column", "answer_column", "suffix", "chat", "search", "against")

Row = dict[str, Any]
"""One episode: task, episode, stop, success, return, turns, invalid, tokens, actions, and error where it failed."""


@dataclass(frozen=True, kw_only=True)
class EnvEvalJob(EpisodeRules, Sampled):
    """Settings of `forethought eval --env`."""

    model: str
    env: str
    data: str | None = None
    """JSONL of tasks in place of the environment's own."""
    split: str = "heldout"
    tasks: int = 64
    limit: int | None = None
    max_new_tokens: int = 64
    device: str | None = None
    dtype: str | None = None

    def __post_init__(self):
        bad = self.rule_problems()
        bad += self.sample_problems()
        if self.tasks < 1:
            bad.append(f"tasks={self.tasks}: give at least 1")
        if bad:
            raise ConfigError("; ".join(bad))
        self.sampling()

    @property
    def arm(self) -> str:
        return short_name(self.model)


def env_tasks(
    source: EnvSource, data: str | None, count: int, seed: int, split: str, limit: int | None
) -> Sequence[Task]:
    """The environment's own tasks of a split, or those of a file (ids and seeds from the row numbers where it has none).

    Raises:
        DataError: the file cannot be used. ConfigError: no such split.
    """
    if data is None:
        return list(source.tasks(count, seed, split))[:limit]
    rows = [{"id": str(i), "seed": i, **row} for i, row in enumerate(read_jsonl(data))][:limit]
    if not rows:
        raise DataError(f"{data}: has no tasks")
    ids = Counter(str(r["id"]) for r in rows)
    if twice := [i for i, n in ids.items() if n > 1]:
        raise DataError(f"{data}: the id {twice[0]!r} stands in {ids[twice[0]]} rows; ids must differ")
    if odd := next((r for r in rows if not isinstance(r["seed"], int) or isinstance(r["seed"], bool)), None):
        raise DataError(f"{data}: task {odd['id']!r}: seed={odd['seed']!r}: give a whole number")
    return rows


def players(bench: Workbench, source: EnvSource, rules: EpisodeRules) -> Players:
    """What plays with a loaded model; a conversation ends at the chat template's end of turn."""
    policy = bench.policy
    policy.eos_ids = tuple(dict.fromkeys((*policy.eos_ids, *bench.renderer.end_ids)))
    return Players(bench.engine, bench.renderer, source, rules, policy.context)


def play(
    player: Players,
    tasks: Sequence[Task],
    samples: int,
    sampling: Sampling,
    done: Callable[[list[Episode]], None] | None = None,
) -> list[Episode]:
    """Episodes of all tasks, in chunks; `done` is called with those of each chunk."""
    out: list[Episode] = []
    size = max(1, CHUNK // samples)
    for begin in range(0, len(tasks), size):
        chunk = player.play([(task, samples) for task in tasks[begin : begin + size]], sampling)
        episodes = [e for group in chunk for e in group]
        if done:
            done(episodes)
        out += episodes
    return out


def row(episode: Episode) -> Row:
    tree = episode.tree
    out: Row = {
        "task": str(episode.task["id"]),
        "episode": episode.number,
        "stop": episode.stop,
        "success": episode.success,
        "return": episode.total,
        "turns": len(episode.turns),
        "invalid": episode.invalid,
        "dropped_turns": episode.dropped,
        "tokens": sum(int(tree.length[t.node]) for t in episode.turns),
        "actions": [t.text for t in episode.turns],
    }
    return out | ({"error": episode.error} if episode.failed else {})


def knows_success(rows: Sequence[Row]) -> bool:
    return any(r["success"] is not None for r in rows)


def score(rows: Sequence[Row], of: Callable[[Row], float]) -> dict[str, float]:
    """Task -> mean over its episodes that ran; tasks of which none did are missing."""
    by_task: dict[str, list[float]] = {}
    for r in rows:
        if r["stop"] != "error":
            by_task.setdefault(r["task"], []).append(of(r))
    return {task: float(np.mean(values)) for task, values in by_task.items()}


def won(r: Row) -> float:
    return float(bool(r["success"]))


def estimates(rows: Sequence[Row]) -> dict[str, Estimate]:
    """What the episodes say, each with its interval over tasks.

    Raises:
        EnvError: no episode ran.
    """
    ran = [r for r in rows if r["stop"] != "error"]
    if not ran:
        raise EnvError(f"every episode failed; the first: {rows[0]['error']}")
    out: dict[str, Estimate] = {}
    if knows_success(ran):
        out["success"] = share_estimate(list(score(rows, won).values()))
        if len(ran) < len(rows):
            lost = [{**r, "stop": "lost"} if r["stop"] == "error" else r for r in rows]
            out["success, failed as lost"] = share_estimate(list(score(lost, won).values()))
    out["return"] = bootstrap_ci(list(score(rows, lambda r: r["return"]).values()))
    out["turns"] = bootstrap_ci(list(score(rows, lambda r: r["turns"]).values()))
    if winners := [r for r in ran if r["success"]]:
        out["turns of successes"] = bootstrap_ci(list(score(winners, lambda r: r["turns"]).values()))
    acted = [r for r in ran if r["turns"]]
    if acted:
        out["invalid actions"] = bootstrap_ci(list(score(acted, lambda r: r["invalid"] / r["turns"]).values()))
    failed = Counter(r["task"] for r in rows if r["stop"] == "error")
    if failed:
        every = Counter(r["task"] for r in rows)
        out["failed"] = share_estimate([failed[t] / n for t, n in every.items()])
    return out


def coverage_of(rows: Sequence[Row]) -> dict[str, Any]:
    """As `episodes.coverage`, of rows, with the stop reasons."""
    tasks = {r["task"] for r in rows}
    seen = {r["task"] for r in rows if r["stop"] != "error"}
    failed = sum(r["stop"] == "error" for r in rows)
    return {
        "episodes": len(rows),
        "ran": len(rows) - failed,
        "failed": failed,
        "tasks": len(tasks),
        "tasks_evaluated": len(seen),
        "not_evaluated": sorted(tasks - seen),
        "stops": dict(sorted(Counter(r["stop"] for r in rows).items())),
    }


def notes_on(rows: Sequence[Row]) -> list[str]:
    """The coverage and the ends, in words."""
    found = coverage_of(rows)
    text = (
        f"{found['ran']} of {found['episodes']} episodes ran, on {found['tasks_evaluated']} of {found['tasks']} tasks"
    )
    notes = [text + "; they ended: " + ", ".join(f"{name} {n}" for name, n in found["stops"].items()) + "."]
    if found["failed"]:
        first = next(r["error"] for r in rows if r["stop"] == "error")
        notes.append(f"{found['failed']} episodes failed to run and are in no denominator; the first: {first}")
    if found["not_evaluated"]:
        names = found["not_evaluated"]
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        notes.append(f"Not evaluated: {', '.join(names[:5])}{more}.")
    if not knows_success(rows):
        notes.append("The environment never says info['success'], so there is no success rate.")
    return notes


# -- the command -------------------------------------------------------------------------------------------------------


def job_from(args: argparse.Namespace) -> EnvEvalJob:
    """Raises: ConfigError: a flag that episodes do not have, or a value out of range."""
    if given := [n for n in _ELSEWHERE if getattr(args, n, None) is not None]:
        raise ConfigError(f"--{given[0].replace('_', '-')}: not with --env, where the environment judges")
    known = EnvEvalJob.__dataclass_fields__
    named = {k: v for k, v in vars(args).items() if k in known and v is not None}
    return apply_overrides(from_dict(EnvEvalJob, named, source="eval --env"), args.settings)


def evaluate_in_env(args: argparse.Namespace, say: Say) -> Path:
    """Run the evaluation that the command line describes; returns its folder.

    Raises:
        ForethoughtError: bad input, before the model is loaded where possible. Interrupted: Ctrl-C; rows are kept.
    """
    job = job_from(args)
    check_place(args)
    source = find_env(job.env)
    tasks = env_tasks(source, job.data, job.tasks, job.seed, job.split, job.limit)
    bench = open_model(job.model, device=job.device, dtype=job.dtype, train=False, say=say)
    with RunDir.create(args.out, job, resume=args.resume, overwrite=args.overwrite) as run:
        keep_tokenizer(run, bench)
        rows, wall_s = _played(job, run, bench, source, tasks)
        found = estimates(rows)
        run.truncate_metrics(-1)
        numbers = {f"eval/{name.replace(' ', '_').replace(',', '')}": value.mean for name, value in found.items()}
        run.log_metrics({"arm": job.arm, "seed": job.seed, **numbers}, step=0)
        metric = "success" if "success" in found else "return"
        body = results(
            recipe="eval",
            profile="episodes",
            model=job.model,
            seeds=[job.seed],
            claim="None: one evaluation measures and compares nothing.",
            arms={job.arm: {name: cell(value) for name, value in found.items()}},
            budget={
                job.arm: {
                    "tokens_generated": sum(r["tokens"] for r in rows),
                    "tokens_trained": 0,
                    "env_steps": sum(r["turns"] for r in rows),
                    "verifier_calls": 0,
                    "wall_s": wall_s,
                }
            },
            verdict="not shown",
            verdict_rule="no comparison was asked for",
            headline={"arm": job.arm, "metric": metric},
            coverage=coverage_of(rows),
            notes=notes_on(rows),
        )
        run.write_json("results.json", body)
        say(notes_on(rows)[0])
        return run.path


def _played(
    job: EnvEvalJob, run: RunDir, bench: Workbench, source: EnvSource, tasks: Sequence[Task]
) -> tuple[list[Row], float]:
    """All rows, and seconds; those that are in rows.jsonl already are not made again."""
    path = run.path / "rows.jsonl"
    rows, wall_s = _kept(run, path, job.samples) if run.resumed else ([], 0.0)
    if not rows:
        write_atomic(path, b"")
    have = {r["task"] for r in rows}
    left = [t for t in tasks if str(t["id"]) not in have]
    total, stored = len(tasks) * job.samples, len(have)
    began = time.perf_counter()
    with Progress(total, "episodes", start=len(rows)) as bar:

        def done(episodes: list[Episode]) -> None:
            nonlocal began, wall_s, stored
            new = [row(e) for e in episodes]
            append_whole(path, "".join(to_json(r) + "\n" for r in new).encode())
            rows.extend(new)
            now = time.perf_counter()
            wall_s, began = wall_s + now - began, now
            run.write_json("progress.json", {"rows": len(rows), "wall_s": wall_s})
            stored = store(run, episodes, stored, 0, job.arm, job.seed)
            bar.update(len(rows), success=float(np.mean([won(r) for r in rows if r["stop"] != "error"] or [0.0])))

        try:
            play(players(bench, source, job), left, job.samples, job.sampling(), done)
        except KeyboardInterrupt:
            message = f"stopped after {len(rows)} of {total} episodes; they are kept in {path}; add --resume to go on"
            raise Interrupted(message) from None
    return rows, wall_s


def store(run: RunDir, episodes: Sequence[Episode], stored: int, step: int, arm: str, seed: int) -> int:
    """Keep the first trees for the report; returns how many there are now."""
    trees = list({id(e.tree): e.tree for e in episodes}.values())[: max(0, STORED - stored)]
    if trees:
        with TreeStore(run.path / "trees.sqlite") as kept:
            for tree in trees:
                kept.append(tree, task=tree.task, step=step, arm=arm, seed=seed, kind="eval")
    return stored + len(trees)


def _kept(run: RunDir, path: Path, samples: int) -> tuple[list[Row], float]:
    """The rows of earlier sessions; a line that a kill cut, and tasks without all their episodes, are dropped."""
    data = path.read_bytes() if path.exists() else b""
    rows: list[Mapping[str, Any]] = [from_json(line) for line in data[: data.rfind(b"\n") + 1].decode().splitlines()]
    count = Counter(r["task"] for r in rows)
    whole = [dict(r) for r in rows if count[r["task"]] == samples]
    write_atomic(path, "".join(to_json(r) + "\n" for r in whole).encode())
    state = run.path / "progress.json"
    return whole, from_json(state.read_text())["wall_s"] if whole and state.exists() else 0.0
