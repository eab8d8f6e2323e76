"""`forethought pairs`: preference pairs from a model's (or a teacher's) samples, judged by a reward or an oracle.

K samples of every prompt, then one of: verified right against wrong (`--reward`), or i.i.d. pairs, soft pairs, a
tournament, best against worst by an oracle (`--oracle`). The folder holds

    rollouts.jsonl   a line per prompt with all its samples
    judged.jsonl     a line per prompt with what was said of them, the pairs, and what was left out
    pairs.jsonl      the pairs, in TRL's preference format (prompt, chosen, rejected) with p, lengths, ids and reasons

A prompt that stands in these files is neither sampled nor judged again, so a long job can be stopped and resumed;
prompts of which a sample or a judgement failed are tried again on resume. Samples and pairs depend on the seed and the
prompt's id only.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np

from forethought.data import read_jsonl, read_rows, write_jsonl
from forethought.errors import ConfigError, DataError, EngineError, RewardError
from forethought.evaluate.stats import bootstrap_ci, wilson
from forethought.files import append_whole, from_json, to_json, write_atomic
from forethought.learn.session import Interrupted
from forethought.models.chat import as_messages
from forethought.models.engine import Engine, Leaf
from forethought.models.openai_engine import OpenAIEngine
from forethought.progress import Progress
from forethought.recipes.inputs import Judge, Say, Task, encode_prompts, load_prompts
from forethought.recipes.judging import close_oracle, open_oracle, trial
from forethought.recipes.own_job import cell, check_place
from forethought.recipes.preference_job import PairsJob, job_of
from forethought.recipes.results import results
from forethought.recipes.session import Workbench, open_model
from forethought.rewards.judge import ChatJudge
from forethought.rewards.oracles import Oracle, text_item
from forethought.rewards.pairs import Pair as PairOf
from forethought.rewards.pairs import (
    PairCounts,
    Sample,
    Verdict,
    check_tournament,
    distinct_records,
    oracle_pairs,
    preference_records,
    verified_pairs,
)
from forethought.rewards.reward import Reward
from forethought.rundir import RunDir
from forethought.tree.tree import Kind, Stop, TokenTree

CHUNK = 128
"""Samples that are made, judged and written together."""
MAY_CHANGE = ("max_queries", "judge.calls", "judge.parallel", "reward_timeout")
_GIVE_UP = 3  # chunks in a row of which nothing could be judged


def make_pairs(args: argparse.Namespace, say: Say) -> Path:
    """Run the job that the command line describes; returns its folder.

    Raises:
        ForethoughtError: bad input, before compute where possible; DataError where no pair is left, which says what
        removed them. Interrupted: Ctrl-C; what was done is kept.
    """
    job = job_of(args)
    job.require()
    check_place(args)
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        judge = Judge(job.reward, job.reward_weights, timeout=job.reward_timeout) if job.reward else None
        work = _Work(job, stack.enter_context(judge) if judge else None, say)
        stack.callback(work.close)
        run = RunDir.create(args.out, job, resume=args.resume, overwrite=args.overwrite, may_change=MAY_CHANGE)
        with run:
            files = _Files(run, [str(t["id"]) for t in work.tasks])
            work.open(run, files)
            try:
                work.all_prompts(run, files)
            except KeyboardInterrupt:
                done = f"{len(files.judged)} of {len(work.tasks)} prompts are judged and kept in {run.path}"
                raise Interrupted(f"stopped; {done}; add --resume to go on") from None
            finally:
                files.spend(work.spent(time.perf_counter() - began))
            return _finish(job, run, files, work, say)


# -- the files ---------------------------------------------------------------------------------------------------------


class _Files:
    """What has been done, by prompt id: rollouts.jsonl and judged.jsonl, and what it cost over all sessions."""

    def __init__(self, run: RunDir, ids: Sequence[str]):
        self.folder = run.path
        if not run.resumed:
            for name in ("rollouts", "judged", "pairs", "judge_replies"):
                write_atomic(self.folder / f"{name}.jsonl", b"")
        self.rollouts = self._read("rollouts", set(ids), lambda row: all(not s.get("error") for s in row["samples"]))
        self.judged = self._read("judged", set(self.rollouts), lambda row: not row["failed"])
        costs = self.folder / "costs.json"
        self.costs: dict[str, float] = from_json(costs.read_text()) if run.resumed and costs.exists() else {}

    def _read(self, name: str, ids: set[str], whole: Callable[[dict[str, Any]], bool]) -> dict[str, dict[str, Any]]:
        """The rows of earlier sessions, without a line that a kill has cut and without what failed."""
        path = self.folder / f"{name}.jsonl"
        data = path.read_bytes() if path.exists() else b""
        kept = data[: data.rfind(b"\n") + 1]
        if kept != data:
            write_atomic(path, kept)
        rows = {row["id"]: row for row in read_jsonl(path)} if kept else {}
        good = {key: row for key, row in rows.items() if key in ids and whole(row)}
        if len(good) < len(rows):
            write_jsonl(path, good.values())
        return good

    def add(self, name: Literal["rollouts", "judged"], rows: Iterable[dict[str, Any]]) -> None:
        rows = list(rows)
        append_whole(self.folder / f"{name}.jsonl", "".join(to_json(row) + "\n" for row in rows).encode())
        getattr(self, name).update({row["id"]: row for row in rows})

    def spend(self, costs: Mapping[str, float]) -> None:
        for name, number in costs.items():
            self.costs[name] = self.costs.get(name, 0) + number
        write_atomic(self.folder / "costs.json", to_json(self.costs))


# -- the work ----------------------------------------------------------------------------------------------------------


class _Work:
    """The prompts, who samples and who judges."""

    def __init__(self, job: PairsJob, judge: Judge | None, say: Say):
        self.job, self.judge, self.say = job, judge, say
        self.oracle: Oracle | None = None
        self.chat_judge: ChatJudge | None = None
        self.bench: Workbench | None = None
        self.engine: Engine | None = None
        self.given: dict[str, list[dict[str, Any]]] = {}
        self.verifier_calls = 0
        if job.rollouts is None:
            self.tasks = load_prompts(job.data, job)
        else:
            self.tasks, self.given = _given_rollouts(job)
        if self.judge is not None:
            self.judge.check(self.tasks, say)

    def close(self) -> None:
        """End the processes of the oracle."""
        close_oracle(self.oracle)

    def open(self, run: RunDir, files: _Files) -> None:
        """The oracle, with trial questions; then the model, which takes longer."""
        job = self.job
        if job.oracle:
            self.oracle = open_oracle(
                job.oracle,
                reward=self.judge,
                judge=job.judge,
                scale=job.scale,
                both_orders=job.both_orders,
                timeout=job.reward_timeout,
                seed=job.seed,
                cache=run.path / "judge_replies.jsonl",
            )
            self.chat_judge = getattr(self.oracle, "judge", None) if job.oracle == "judge" else None
            trial(self.oracle, self.tasks, self.say)
        if job.rollouts is not None or len(files.judged) == len(self.tasks):
            return
        if job.endpoint is not None:
            self.engine = OpenAIEngine(job.endpoint, job.model)
            return
        self.bench = open_model(job.model, device=job.device, dtype=job.dtype, train=False, say=self.say)
        encode_prompts(self.bench, self.tasks, job.data, job.max_new_tokens, self.say)
        self.engine = self.bench.engine
        if self.judge is not None and job.how == "verified":
            self.judge.bind(self.bench.decode)

    def spent(self, wall_s: float) -> dict[str, float]:
        out = {"wall_s": wall_s, "verifier_calls": self.verifier_calls}
        if self.engine is not None:
            out["tokens_generated"] = self.engine.stats.tokens_generated
        if self.oracle is not None:
            out["queries"] = self.oracle.queries
            out["verifier_calls"] += getattr(self.oracle, "scored", 0)
        if self.chat_judge is not None:
            out |= {"judge_calls": self.chat_judge.calls, "judge_tokens": self.chat_judge.tokens}
        return out

    # -- sampling and judging --
    def all_prompts(self, run: RunDir, files: _Files) -> None:
        job = self.job
        size = max(1, CHUNK // job.samples)
        left = [t for t in self.tasks if str(t["id"]) not in files.judged]
        barren = 0
        k = job.samples
        with Progress(len(self.tasks) * k, "samples", start=len(files.judged) * k) as bar:
            while left:
                chunk = left[: self._affordable(size, left, files)]
                if not chunk:
                    self.say(
                        f"max_queries={job.max_queries} is used up: {len(left)} of {len(self.tasks)} prompts stay "
                        "unjudged; --resume with a higher max_queries goes on"
                    )
                    return
                ready = (len(self.tasks) - len(left)) * k
                self._sample(chunk, files, lambda done, _, ready=ready: bar.update(ready + done))
                try:
                    files.add("judged", self._judged(chunk, files))
                    barren = 0
                except RewardError as err:
                    barren += 1
                    if not files.judged or barren == _GIVE_UP:
                        raise RewardError(f"{err}; the samples are kept in {run.path}, go on with --resume") from err
                    self.say(f"{len(chunk)} prompts stay unjudged, --resume tries them again: {err}")
                left = left[len(chunk) :]
                made = sum(len(row["pairs"]) for row in files.judged.values())
                bar.update((len(self.tasks) - len(left)) * k, pairs=made)

    def _affordable(self, size: int, left: Sequence[Task], files: _Files) -> int:
        """How many of the next prompts the budget of comparisons allows."""
        job = self.job
        if self.oracle is None or job.max_queries is None:
            return size
        rest = job.max_queries - files.costs.get("queries", 0) - self.oracle.queries
        count = 0
        for task in left[:size]:
            rest -= job.cost(len(self.given.get(str(task["id"]), ())) or job.samples) * (2 if job.both_orders else 1)
            if rest < 0:
                break
            count += 1
        return count

    def _sample(self, chunk: Sequence[Task], files: _Files, progress: Callable[[int, int], None]) -> None:
        new = [t for t in chunk if str(t["id"]) not in files.rollouts]
        if not new:
            return
        if self.given:
            files.add("rollouts", [_rollout(t, self.given[str(t["id"])]) for t in new])
            return
        assert self.engine is not None
        job = self.job
        leaves = [self._start(task) for task in new]
        try:
            nodes = self.engine.extend(leaves, job.samples, job.sampling(), progress=progress)
        except EngineError as err:
            raise EngineError(f"{err}; what was sampled before is kept, go on with --resume") from err
        rows = []
        for task, (tree, _), mine in zip(new, leaves, nodes, strict=True):
            rows.append(_rollout(task, [self._row(tree, node) for node in mine]))
        files.add("rollouts", rows)

    def _start(self, task: Task) -> Leaf:
        if self.bench is not None:
            ids = self.bench.prompt_ids(task)
            return TokenTree(ids, kind=Kind.PROMPT, task=str(task["id"]), seed=self.job.seed), 0
        assert isinstance(self.engine, OpenAIEngine)
        return self.engine.renderer.start(as_messages(task["prompt"]), task=str(task["id"]), seed=self.job.seed)

    def _row(self, tree: TokenTree, node: int) -> dict[str, Any]:
        ids = tree.node_ids(node)
        stop = Stop(int(tree.stop[node]))
        row: dict[str, Any] = {"stop": stop.name.lower(), "length": len(ids)}
        if self.bench is not None:
            row = {"text": self.bench.decode(ids), **row, "ids": list(ids)}
        else:
            assert isinstance(self.engine, OpenAIEngine)
            row = {"text": self.engine.renderer.text(ids), **row}
        return row | ({"error": str(tree.meta[node].get("error", "sampling failed"))} if stop is Stop.ERROR else {})

    def _judged(self, chunk: Sequence[Task], files: _Files) -> list[dict[str, Any]]:
        """Lines of judged.jsonl. Raises: RewardError where nothing of the chunk could be judged."""
        samples = [[_sample(row) for row in files.rollouts[str(t["id"])]["samples"]] for t in chunk]
        if self.oracle is not None:
            return self._compared(chunk, samples)
        return self._verified(chunk, samples, files)

    def _compared(self, chunk: Sequence[Task], samples: list[list[Sample]]) -> list[dict[str, Any]]:
        job = self.job
        assert self.oracle is not None and job.how != "verified"
        found = oracle_pairs(
            self.oracle,
            list(zip(chunk, samples, strict=True)),
            job.how,
            seed=job.seed,
            keep_truncated=job.keep_truncated,
            max_length=job.max_length,
        )
        out = []
        for task, (pairs, counts) in zip(chunk, found, strict=True):
            failed = sum(n for name, n in counts.dropped.items() if name.endswith("not judged"))
            out.append(_line(task, pairs, counts, failed))
        return out

    def _verified(self, chunk: Sequence[Task], samples: list[list[Sample]], files: _Files) -> list[dict[str, Any]]:
        job = self.job
        assert self.judge is not None
        places = [(t, i) for t, mine in enumerate(samples) for i, s in enumerate(mine) if not s.failed]
        items = [self._item(chunk[t], files.rollouts[str(chunk[t]["id"])]["samples"][i]) for t, i in places]
        self.verifier_calls += len(items)
        outcomes = self.judge(items)
        errors = [o for o in outcomes if isinstance(o, RewardError)]
        if errors and len(errors) == len(outcomes):
            raise RewardError(f"all {len(errors)} rewards failed; the first: {errors[0]}")
        said: list[dict[int, dict[str, Any]]] = [{} for _ in chunk]
        for (t, i), outcome in zip(places, outcomes, strict=True):
            said[t][i] = verdict_of(outcome, right_at=job.right_at, no_answer=job.no_answer)
        out = []
        for task, mine, words in zip(chunk, samples, said, strict=True):
            mine = [_sample_with(s, words.get(i, {"verdict": "unknown"})) for i, s in enumerate(mine)]
            counts = PairCounts()
            pairs = verified_pairs(
                mine,
                cap=job.pairs_per_prompt,
                seed=job.seed,
                key=(str(task["id"]),),
                keep_truncated=job.keep_truncated,
                max_length=job.max_length,
                counts=counts,
            )
            failed = [w["why"] for w in words.values() if w.get("failed")]
            counts.failure = failed[0] if failed else ""
            line = _line(task, pairs, counts, len(failed))
            kept = [{k: v for k, v in words.get(i, {}).items() if k != "failed"} for i in range(len(mine))]
            out.append(line | {"samples": kept})
        return out

    def _item(self, task: Task, row: Mapping[str, Any]):
        """A stored sample as a trajectory: by its token ids where the model is at hand, else by its text."""
        if self.bench is None or "ids" not in row:
            return text_item(task, row["text"], truncated=row.get("stop") == "length")
        tree = TokenTree(self.bench.prompt_ids(task), kind=Kind.PROMPT, task=str(task["id"]), seed=self.job.seed)
        none = [float("nan")] * len(row["ids"])
        stop = Stop[row["stop"].upper()]
        return tree, tree.add(0, row["ids"], kind=Kind.ASSISTANT, sampled=True, logprobs=none, stop=stop), task


def verdict_of(
    outcome: Reward | RewardError, *, right_at: float = 1.0, no_answer: Literal["unknown", "wrong"] = "unknown"
) -> dict[str, Any]:
    """What a reward says of a sample: {"verdict": "right" | "wrong" | "unknown", "reward"?, "why"?, "failed"?}.

    Unknown: the reward failed, does not apply, or ran into its time limit; and, unless told otherwise, no answer was
    found in the sample (a parts entry `extracted` of 0), for a form that was missed is no wrong answer.
    """
    if isinstance(outcome, RewardError):
        return {"verdict": "unknown", "why": str(outcome), "failed": True}
    why = {"why": outcome.why} if outcome.why else {}
    if not np.isfinite(outcome.value):
        return {"verdict": "unknown", **why}
    last = {name.rpartition("/")[2]: value for name, value in outcome.parts.items()}
    verdict: Verdict = "right" if outcome.value >= right_at else "wrong"
    if last.get("timed_out"):
        verdict = "unknown"
    elif last.get("extracted") == 0 and verdict == "wrong":
        verdict = no_answer
    return {"verdict": verdict, "reward": float(outcome.value), **why}


def _rollout(task: Task, samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": str(task["id"]), "prompt": task["prompt"], "samples": samples}


def _line(task: Task, pairs: Sequence[PairOf], counts: PairCounts, failed: int) -> dict[str, Any]:
    return {"id": str(task["id"]), "pairs": [asdict(p) for p in pairs], "counts": counts.to_json(), "failed": failed}


def _sample(row: Mapping[str, Any]) -> Sample:
    return Sample(row["text"], row.get("length"), row.get("stop") == "length", row.get("error", ""))


def _sample_with(sample: Sample, said: Mapping[str, Any]) -> Sample:
    return Sample(
        sample.text,
        sample.length,
        sample.truncated,
        sample.failed,
        said["verdict"],
        said.get("reward"),
        said.get("why", ""),
    )


def _given_rollouts(job: PairsJob) -> tuple[list[Task], dict[str, list[dict[str, Any]]]]:
    """Prompts and samples of a file; samples are texts, or objects with `text` (and `length`, `stop`).

    Raises:
        DataError: a row without usable samples, named with its id.
    """
    path = str(job.rollouts)
    read_rows(path, required=("samples",), limit=job.limit)
    tasks = load_prompts(path, job)
    given = {}
    for task in tasks:
        rows = []
        what = f"{path}: record {task['id']!r}: samples"
        if not isinstance(task["samples"], list) or len(task["samples"]) < 2:
            raise DataError(f"{what} is {task['samples']!r:.60}; give a list of at least 2")
        for i, sample in enumerate(task["samples"]):
            row = {"text": sample} if isinstance(sample, str) else sample
            if not isinstance(row, Mapping) or not isinstance(row.get("text"), str):
                raise DataError(f"{what}[{i}] is {sample!r:.60}; give text, or an object with 'text'")
            rows.append({k: row[k] for k in ("text", "length", "stop", "error") if row.get(k) is not None})
        if job.how == "tournament":
            try:
                check_tournament(len(rows))
            except ConfigError as err:
                raise DataError(f"{what}: {err}") from None
        given[str(task["id"])] = rows
    return [{k: v for k, v in task.items() if k != "samples"} for task in tasks], given


# -- the end -----------------------------------------------------------------------------------------------------------


def _finish(job: PairsJob, run: RunDir, files: _Files, work: _Work, say: Say) -> Path:
    """Write pairs.jsonl and results.json, and say what was left out."""
    counts = PairCounts()
    records: list[dict[str, Any]] = []
    for task in work.tasks:
        row = files.judged.get(str(task["id"]))
        if row is None:
            continue
        counts.add(PairCounts.from_json(row["counts"]))
        samples = [_sample(s) for s in files.rollouts[row["id"]]["samples"]]
        if "samples" in row:
            samples = [
                _sample_with(s, w or {"verdict": "unknown"}) for s, w in zip(samples, row["samples"], strict=True)
            ]
        records += preference_records(task, samples, [PairOf(**p) for p in row["pairs"]])
    records = distinct_records(records, counts)
    write_jsonl(run.path / "pairs.jsonl", records)
    unjudged = len(work.tasks) - len(files.judged)
    violation = getattr(work.oracle, "violation", None)
    notes = [str(counts), *([f"{unjudged} prompts were not judged"] if unjudged else [])]
    notes += [f"oracle: {violation}"] if violation is not None and violation.pairs else []
    run.write_json("results.json", _results(job, files, records, counts, notes))
    run.truncate_metrics(-1)
    run.log_metrics({"arm": job.how, "seed": job.seed, **counts.metrics()}, step=0)
    for note in notes:
        say(note)
    if unjudged and not files.judged:
        raise DataError(f"{run.path}: no prompt was judged: {notes[-1]}")
    counts.require(f"{run.path}")
    say(f"pairs: {run.path / 'pairs.jsonl'}; look at them with: forethought show {run.path / 'pairs.jsonl'}")
    return run.path


def _results(job: PairsJob, files: _Files, records, counts: PairCounts, notes: list[str]) -> dict[str, Any]:
    arm: dict[str, Any] = {}
    if counts.prompts:
        with_pair = sum(bool(row["pairs"]) for row in files.judged.values())
        arm["share of prompts with a pair"] = cell(wilson(with_pair, counts.prompts))
    for side in ("chosen", "rejected"):
        lengths = [r[f"{side}_length"] for r in records if f"{side}_length" in r]
        if lengths:
            arm[f"{side} length"] = cell(bootstrap_ci(lengths))
    if records:
        arm["p"] = cell(bootstrap_ci([r["p"] for r in records]))
    costs = {"tokens_generated": 0, "tokens_trained": 0, "env_steps": 0, "verifier_calls": 0, **files.costs}
    return results(
        recipe="pairs",
        profile="own data",
        model=job.model or str(job.rollouts),
        seeds=[job.seed],
        claim="None: this makes training data.",
        arms={job.how: arm},
        budget={job.how: costs},
        verdict="not shown",
        verdict_rule="nothing is compared",
        notes=notes,
        counts=counts.to_json(),
    )
