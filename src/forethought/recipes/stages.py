"""A chain of training stages: each begins with the model that an earlier one left, and can be gone on with at any point.

A stage has a run folder of its own below `stages/`, so that it resumes inside itself; what it found lies in its
done.json and its model in `model/`. A finished stage is never run again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forethought.config import diff, load_yaml
from forethought.errors import ConfigError, ForethoughtError, RunError
from forethought.recipes.jobs import copy_run
from forethought.rundir import RunDir


@dataclass(frozen=True)
class StageContext:
    """What a stage works with.

    run: its own run folder (for `learn.session.fit` and the model); model_in: folder of the model that it begins with,
    None for the first one; model_out: where it leaves its model (`run.save_folder("model")`); done: numbers of the stages
    before it.
    """

    name: str
    run: RunDir
    model_in: Path | None
    model_out: Path
    done: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Stage:
    """One link of the chain.

    function: trains, saves a model in `context.model_out`, returns numbers (JSON). start: the stage whose model it
    begins with, by default the one before it (a stage that only branches off is left out of the line by the next one's
    `start`). settings: what its run folder's config.yaml keeps. may_change: settings that may differ when a half-done
    stage is gone on with. A stage that has saved nothing yet may be begun anew with any settings; a finished one keeps
    those that it was made with.
    """

    name: str
    function: Callable[[StageContext], Mapping[str, Any]]
    start: str | None = None
    settings: Any = None
    may_change: tuple[str, ...] = ()


def folder_of(root: Path, number: int, name: str) -> Path:
    """Where a stage lies."""
    return root / "stages" / f"{number}-{name.replace(' ', '-').replace('/', '-')}"


def check_chain(starts: Mapping[str, str | None] | Sequence[tuple[str, str | None]]) -> None:
    """(name, start) of every stage in order.

    Raises:
        ConfigError: no stages, a name twice, or a `start` that does not come before.
    """
    pairs = list(starts.items()) if isinstance(starts, Mapping) else list(starts)
    names = [name for name, _ in pairs]
    twice = next((n for n in names if names.count(n) > 1), None)
    if not pairs or twice:
        raise ConfigError(f"stages: {f'{twice!r} stands twice' if twice else 'the chain is empty'}")
    for number, (name, start) in enumerate(pairs):
        if start is not None and start not in names[:number]:
            raise ConfigError(f"stage {name!r}: start={start!r} is none of the stages before it ({names[:number]})")


def run_stages(
    stages: Sequence[Stage], root: Path, *, first_model: Path | None = None, say: Callable[[str], None] = lambda _: None
) -> dict[str, dict[str, Any]]:
    """Run what is not done yet, in order; returns each stage's numbers, with `wall_s` and the folder of its `model`.

    Args:
        root: the folder of the whole chain.
        first_model: what the first stage begins with.

    Raises:
        ConfigError: see `check_chain`.
        ForethoughtError, FloatingPointError, KeyboardInterrupt: of a stage; the message names it. What was finished
        stays.
    """
    check_chain([(s.name, s.start) for s in stages])
    done: dict[str, dict[str, Any]] = {}
    for number, stage in enumerate(stages):
        place = folder_of(root, number, stage.name)
        before = start_of(stages, number)
        model_in = Path(done[before]["model"]) if before else first_model
        settings = {"stage": stage.name, "start": before, "settings": stage.settings}
        finished = place / "done.json"
        if not finished.is_file():
            say(f"stage {number + 1} of {len(stages)}: {stage.name}")
        try:
            with _open(place, settings, stage, finished.is_file()) as run:
                if finished.is_file():
                    done[stage.name] = json.loads(finished.read_text()) | {"model": str(place / "model")}
                    continue
                began = time.perf_counter()
                found = dict(stage.function(StageContext(stage.name, run, model_in, place / "model", dict(done))))
                if not (place / "model").is_dir():
                    raise RunError(f"it left no model in {place / 'model'}")
                found.setdefault("wall_s", time.perf_counter() - began)
                run.write_json("done.json", found)
                done[stage.name] = found | {"model": str(place / "model")}
        except (ForethoughtError, FloatingPointError, KeyboardInterrupt) as err:
            raise type(err)(f"stage {stage.name!r}: {str(err) or 'interrupted'}") from err
    return done


def _open(place: Path, settings: Mapping[str, Any], stage: Stage, finished: bool) -> RunDir:
    """The stage's folder: gone on with, or begun anew where other settings are given and nothing was saved yet."""
    begun = (place / "config.yaml").is_file()
    anew = begun and not finished and not (place / "checkpoints").is_dir()
    if anew and not diff(load_yaml(place / "config.yaml"), settings):
        anew = False
    may_change = () if finished else tuple(f"settings.{name}" for name in stage.may_change)
    return RunDir.create(place, settings, resume=begun and not anew, overwrite=anew, may_change=may_change)


def start_of(stages: Sequence[Stage], number: int) -> str | None:
    """The stage whose model the stage with this number begins with."""
    return stages[number].start or (stages[number - 1].name if number else None)


def gains(done: Mapping[str, Mapping[str, Any]], stages: Sequence[Stage], metric: str) -> dict[str, float | None]:
    """What each stage added to `metric` over the stage that it began with; None for the first."""
    out: dict[str, float | None] = {}
    for number, stage in enumerate(stages):
        before = start_of(stages, number)
        out[stage.name] = None if before is None else done[stage.name][metric] - done[before][metric]
    return out


def gather_stages(done: Mapping[str, Mapping[str, Any]], run: RunDir, *, seed: int) -> None:
    """Copy the stages' metrics and their last few trees into the run's own files, each under its stage's name."""
    for name, found in done.items():
        copy_run(Path(found["model"]).parent, run, arm=name, seed=seed)
