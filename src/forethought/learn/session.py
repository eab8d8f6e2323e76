"""A training session: a trainer's steps inside a run folder, with metrics, trees, checkpoints and exact resume.

The line of a step is written before its checkpoint; a resumed session drops the lines after its checkpoint and makes
them again. All lines of the resumed run equal those of an unbroken one, apart from the `time/` entries.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from forethought.learn.learner import Learner
from forethought.progress import Progress
from forethought.rundir import RunDir, rng_state, set_rng_state
from forethought.tree.store import TreeStore


class Interrupted(KeyboardInterrupt):
    """Ctrl-C: the state was saved; the message says how to go on."""


class Trainer(Protocol):
    learner: Learner
    step: int
    counts: dict[str, int]

    def train_step(self, progress: Callable[[int, int], None] | None = None) -> tuple[dict[str, float], list[Any]]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


Evaluate = Callable[[int], Mapping[str, float]]
"""step -> numbers to log, without touching the trainer's state."""

# Shown beside the bar, in this order.
_SHOWN = ("reward/mean", "loss", "rewards/accuracies", "h/mean", "eval/accuracy", "entropy", "completions/mean_length")


@contextmanager
def _soft_interrupt() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C only raises a flag, so that the step in flight is finished; the second one interrupts."""
    flag = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield flag.is_set
        return

    def handle(signum, frame):
        if flag.is_set():
            raise KeyboardInterrupt
        flag.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield flag.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def save(trainer: Trainer, run: RunDir, name: str, extra: Any = None) -> None:
    """A checkpoint: an HF folder with the weights, and resume.pt with everything else."""
    with run.checkpoint(trainer.step, name=name) as folder:
        trainer.learner.save_model(folder)
        state = {"trainer": trainer.state_dict(), "rng": rng_state(), "extra": extra}
        torch.save(state, folder / "resume.pt")


def load(trainer: Trainer, folder: Path) -> Any:
    """Restore what `save` wrote; returns `extra`."""
    state = torch.load(folder / "resume.pt", weights_only=False, map_location="cpu")
    trainer.load_state_dict(state["trainer"])
    set_rng_state(state["rng"])
    return state["extra"]


def _due(before: int, after: int, every: int) -> bool:
    """Was a multiple of `every` reached? A trainer may move on by more than one step at once."""
    return bool(every) and after // every > before // every


def fit(
    trainer: Trainer,
    run: RunDir,
    *,
    steps: int,
    name: str = "",
    tags: Mapping[str, Any] | None = None,
    title: str = "training",
    evaluate: Evaluate | None = None,
    eval_every: int = 0,
    save_every: int = 0,
    save_last: bool = True,
    store_groups: int = 0,
    until: Callable[[], bool] | None = None,
    extra: Callable[[], Any] | None = None,
    restore_extra: Callable[[Any], None] | None = None,
) -> None:
    """Train to `steps`, or go on to there from the run's newest checkpoint if it was resumed.

    Args:
        name: names this learner's checkpoints within the run (for runs with several).
        tags: written into every line, e.g. {"arm": "grpo", "seed": 0}; they tell this learner's lines from others'.
        evaluate: called before the first step, every `eval_every` steps and after the last.
        save_every: steps between checkpoints; 0: only at the end (if `save_last`) and on Ctrl-C.
        store_groups: trees a step that go to the run's tree store.
        until: asked after every step; True ends the training before `steps` (a spent budget, a saturated curve). It must
            follow from the trainer's state and from what `extra` saves.
        extra, restore_extra: further state to be saved and restored with the checkpoint.

    Raises:
        Interrupted: Ctrl-C, after the step in flight was finished and saved.
    """
    tags = dict(tags or {})
    main = trainer.learner.distributed.main
    store = TreeStore(run.path / "trees.sqlite") if store_groups and main else None
    match = {k: tags[k] for k in ("arm", "seed") if k in tags}
    try:
        found = run.latest_checkpoint(name) if run.resumed else None
        if found is not None:
            saved = load(trainer, found)
            if restore_extra:
                restore_extra(saved)
        if run.resumed:
            since = trainer.step if found is not None else -1
            run.truncate_metrics(since, **match)
            if store is not None:
                store.truncate_after(since, **match)
        if found is None and evaluate:
            run.log_metrics({**tags, **evaluate(trainer.step)}, step=trainer.step)
        with _soft_interrupt() as interrupted, Progress(steps, title, start=trainer.step) as bar:
            shown: dict[str, float] = {}
            last = trainer.step >= steps or (found is not None and until is not None and until())
            while not last:
                before = trainer.step
                metrics, groups = trainer.train_step()
                last = trainer.step >= steps or (until is not None and until())
                if evaluate and (last or _due(before, trainer.step, eval_every)):
                    metrics |= evaluate(trainer.step)
                shown |= {k: metrics[k] for k in _SHOWN if k in metrics}
                bar.update(trainer.step, **shown)
                if main:
                    run.log_metrics({**tags, **metrics}, step=trainer.step)
                if store is not None:
                    for tree, task in list({id(g.tree): (g.tree, g.task) for g in groups}.values())[:store_groups]:
                        store.append(tree, task=str(task["id"]), step=trainer.step, kind="train", **match)
                stop = interrupted()
                if main and (_due(before, trainer.step, save_every) or (last and save_last) or stop):
                    save(trainer, run, name, extra() if extra else None)
                if stop:
                    raise Interrupted(
                        f"stopped after step {trainer.step} of {steps}; saved in {run.path}; add --resume to go on"
                    )
    finally:
        if store is not None:
            store.close()
