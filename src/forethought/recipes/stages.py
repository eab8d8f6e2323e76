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

from forethought.errors import ConfigError, ForethoughtError, RunError
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
    `start`). settings: what its run folder's config.yaml keeps; a finished or half-done stage with other settings is refused.
    """

    name: str
    function: Callable[[StageContext], Mapping[str, Any]]
    start: str | None = None
    settings: Any = None


def folder_of(root: Path, number: int, name: str) -> Path:
    """Where a stage lies."""
    return root / "stages" / f"{number}-{name.replace(' ', '-').replace('/', '-')}"


def run_stages(
    stages: Sequence[Stage], root: Path, *, first_model: Path | None = None, say: Callable[[str], None] = lambda _: None
) -> dict[str, dict[str, Any]]:
    """Run what is not done yet, in order; returns each stage's numbers, with `wall_s` and the folder of its `model`.

    Args:
        root: the folder of the whole chain.
        first_model: what the first stage begins with.

    Raises:
        ConfigError: no stages, a name twice, or a `start` that does not come before.
        ForethoughtError: a stage failed; the message names it. What was finished stays.
    """
    names = [s.name for s in stages]
    twice = next((n for n in names if names.count(n) > 1), None)
    if not stages or twice:
        raise ConfigError(f"stages: {f'{twice!r} stands twice' if twice else 'the chain is empty'}")
    for number, stage in enumerate(stages):
        if stage.start is not None and stage.start not in names[:number]:
            raise ConfigError(
                f"stage {stage.name!r}: start={stage.start!r} is none of the stages before it ({names[:number]})"
            )
    done: dict[str, dict[str, Any]] = {}
    for number, stage in enumerate(stages):
        place = folder_of(root, number, stage.name)
        before = stage.start or (names[number - 1] if number else None)
        model_in = Path(done[before]["model"]) if before else first_model
        settings = {"stage": stage.name, "start": before, "settings": stage.settings}
        finished = place / "done.json"
        with RunDir.create(place, settings, resume=(place / "config.yaml").is_file()) as run:
            if finished.is_file():
                done[stage.name] = json.loads(finished.read_text()) | {"model": str(place / "model")}
                continue
            say(f"stage {number + 1} of {len(stages)}: {stage.name}")
            began = time.perf_counter()
            try:
                found = dict(stage.function(StageContext(stage.name, run, model_in, place / "model", dict(done))))
            except ForethoughtError as err:
                raise type(err)(f"stage {stage.name!r}: {err}") from err
            if not (place / "model").is_dir():
                raise RunError(f"stage {stage.name!r} left no model in {place / 'model'}")
            found.setdefault("wall_s", time.perf_counter() - began)
            run.write_json("done.json", found)
            done[stage.name] = found | {"model": str(place / "model")}
    return done


def gains(done: Mapping[str, Mapping[str, Any]], stages: Sequence[Stage], metric: str) -> dict[str, float | None]:
    """What each stage added to `metric` over the stage that it began with; None for the first."""
    out: dict[str, float | None] = {}
    for number, stage in enumerate(stages):
        before = stage.start or (stages[number - 1].name if number else None)
        out[stage.name] = None if before is None else done[stage.name][metric] - done[before][metric]
    return out
