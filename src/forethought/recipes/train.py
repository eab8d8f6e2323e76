"""The user's own job: `forethought train sft|grpo` on a model and a file.

Everything that can be wrong is checked before the model is loaded where that is possible, and before the run folder is
made where it is not.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from forethought.config import dump_yaml
from forethought.errors import ConfigError, RunError
from forethought.recipes.inputs import Say
from forethought.recipes.own_grpo import GRPOJob, grpo
from forethought.recipes.own_job import Place, job_of
from forethought.recipes.own_sft import SFTJob, sft


def train(args: argparse.Namespace, say: Say) -> Path | None:
    """Run the job; returns its folder, or None after a dry run.

    Raises:
        ForethoughtError: bad input, before compute where possible. KeyboardInterrupt: Ctrl-C; the state was saved.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("`forethought train` runs in one process (WORLD_SIZE is set); start it without a launcher")
    job = job_of(SFTJob if args.method == "sft" else GRPOJob, args)
    if args.dry_run:
        print(dump_yaml(job), end="")
        return None
    job.require()
    try:
        with Place(job, args) as place:
            return sft(job, place, say) if isinstance(job, SFTJob) else grpo(job, place, say)
    except FloatingPointError as err:
        raise RunError(f"{err}; a smaller optim.lr helps, go on from the last checkpoint with --resume") from err
