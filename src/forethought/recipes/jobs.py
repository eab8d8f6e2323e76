"""Independent pieces of a recipe (an arm with a seed) run side by side, one process and one torch thread each.

Every piece has a run folder of its own below `arms/`, so it resumes by itself, and leaves its numbers in done.json; the
parent gathers its metrics and trees into the run's own files when it is done. A finished piece is never run again.
"""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forethought.errors import ForethoughtError, RunError
from forethought.files import write_atomic
from forethought.progress import Progress
from forethought.rundir import RunDir, read_metrics
from forethought.tree.store import TreeStore


@dataclass(frozen=True)
class Job:
    """A piece of work: `function(job, run)` must be importable (top level of a module).

    arm, seed: what it is; settings: a mapping or dataclass for the piece's config.yaml and for the function.
    """

    arm: str
    seed: int
    function: Callable[[Job, RunDir], Mapping[str, Any]]
    settings: Any
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        return f"arms/{self.arm}/seed{self.seed}"


_stop: Any = None


def _begin(stop: Any) -> None:
    global _stop
    _stop = stop


def _work(job: Job, root: str, threads: int) -> tuple[dict[str, Any], float]:
    import torch

    if _stop is not None and _stop.is_set():
        raise RunError("stopped before it began")

    if threads:
        torch.set_num_threads(threads)
    place = Path(root) / job.folder
    began = time.perf_counter()
    with RunDir.create(place, job.settings, resume=(place / "config.yaml").is_file()) as run:
        out = dict(job.function(job, run))
        out.setdefault("wall_s", time.perf_counter() - began)
        run.write_json("done.json", out)
    return out, time.perf_counter() - began


def run_jobs(
    jobs: Sequence[Job], run: RunDir, *, title: str, workers: int | None = None
) -> dict[tuple[str, int], dict]:
    """Run what is not done yet; returns (arm, seed) -> the numbers that the job returned.

    Args:
        workers: processes; by default one per core. 1 runs everything in this process, with all threads.

    Raises:
        ForethoughtError: a piece failed; those that had finished stay finished, and `--resume` goes on.
    """
    workers = workers or os.cpu_count() or 1
    done: dict[tuple[str, int], dict] = {}
    todo: list[Job] = []
    for job in jobs:
        path = run.path / job.folder / "done.json"
        if path.is_file():
            done[job.arm, job.seed] = json.loads(path.read_text())
        else:
            todo.append(job)
    failed: list[tuple[Job, BaseException]] = []
    with Progress(len(jobs), title, start=len(done)) as bar:

        def finish(job: Job, out: dict) -> None:
            done[job.arm, job.seed] = out
            gather(job, run)
            numbers = {k: v for k, v in out.items() if isinstance(v, float) and k != "wall_s"}
            bar.update(len(done), last=f"{job.arm}/{job.seed}", **dict(list(numbers.items())[:2]))

        if workers == 1:
            for job in todo:
                finish(job, _work(job, str(run.path), 0)[0])
        elif todo:
            context = multiprocessing.get_context("spawn")
            # Before the children import torch: its thread pools are sized at import.
            before = os.environ.get("OMP_NUM_THREADS")
            os.environ["OMP_NUM_THREADS"] = "1"
            try:
                stop = context.Event()
                size = min(workers, len(todo))
                pool = concurrent.futures.ProcessPoolExecutor(
                    size, mp_context=context, initializer=_begin, initargs=(stop,)
                )
                try:
                    pending = {pool.submit(_work, job, str(run.path), 1): job for job in todo}
                    for future in concurrent.futures.as_completed(pending):
                        error = future.exception()
                        if error is not None:
                            failed.append((pending[future], error))
                        else:
                            finish(pending[future], future.result()[0])
                except KeyboardInterrupt:
                    stop.set()  # pieces that the pool holds ready do not begin; those in flight save themselves
                    raise KeyboardInterrupt(
                        f"stopped; what had finished is kept in {run.path}; add --resume to go on"
                    ) from None
                finally:
                    pool.shutdown(wait=True, cancel_futures=True)
            finally:
                if before is None:
                    os.environ.pop("OMP_NUM_THREADS")
                else:
                    os.environ["OMP_NUM_THREADS"] = before
    if failed:
        job, error = failed[0]
        if isinstance(error, ForethoughtError):
            raise error
        raise RunError(
            f"{len(failed)} of {len(jobs)} pieces failed; the first, {job.arm} seed {job.seed}: "
            f"{type(error).__name__}: {error}; what had finished is kept in {run.path}, go on with --resume"
        ) from error
    return done


def keep_tokenizer(jobs: Sequence[Job], run: RunDir) -> None:
    """The report shows texts: the run folder gets the tokenizer of its pieces."""
    for job in jobs:
        source = run.path / job.folder / "tokenizer.json"
        if source.is_file():
            write_atomic(run.path / "tokenizer.json", source.read_bytes())
            return


def gather(job: Job, run: RunDir) -> None:
    """Copy a finished piece's metrics, and its last few trees, into the run's own files."""
    copy_run(run.path / job.folder, run, arm=job.arm, seed=job.seed)


def copy_run(folder: Path, run: RunDir, *, arm: str, seed: int, trees: int = 8) -> None:
    """Copy the metrics of an inner run, and its last few trees, into `run` under this arm and seed; again is no harm."""
    run.truncate_metrics(-1, arm=arm, seed=seed)
    if (folder / "metrics.jsonl").is_file():
        for row in read_metrics(folder):
            step = row.pop("step")
            row.pop("nonfinite", None)
            run.log_metrics({**row, "arm": arm, "seed": seed}, step=step)
    if (folder / "trees.sqlite").is_file():
        with (
            TreeStore(folder / "trees.sqlite", readonly=True) as source,
            TreeStore(run.path / "trees.sqlite") as target,
        ):
            target.truncate_after(-1, arm=arm, seed=seed)
            for row in reversed(source.query(newest_first=True, limit=trees)):
                target.append(source.load(row.id), task=row.task, step=row.step, arm=arm, seed=seed, kind=row.kind)
