"""The user's own job: `forethought train METHOD` on a model and a file.

`METHODS` names the methods; a new one is one line there. Everything that can be wrong is checked before the model is
loaded where that is possible, and before the run folder is made where it is not. This file imports no method, so that
the command's help stays quick.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forethought.config import dump_yaml, load_yaml
from forethought.errors import ConfigError, RunError


@dataclass(frozen=True)
class Method:
    """A way to train: where it stands and what it is.

    module: below `forethought.recipes`; job: its settings, a subclass of `own_job.Job`; function: runs
    `function(job, place, say) -> run folder`; line: what it does, for the help.
    """

    module: str
    job: str
    function: str
    line: str

    def load(self) -> tuple[type, Callable[..., Path]]:
        """The job class and the function."""
        module: Any = importlib.import_module(f"forethought.recipes.{self.module}")
        return getattr(module, self.job), getattr(module, self.function)


METHODS: dict[str, Method] = {
    "sft": Method("own_sft", "SFTJob", "sft", "supervised, on conversations or prompts with completions"),
    "grpo": Method("own_grpo", "GRPOJob", "grpo", "online, with a reward; samples of a prompt are compared as a group"),
    "ppo": Method("own_ppo", "PPOJob", "ppo", "online, with a reward and a critic; one sample of a prompt is enough"),
    "dpo": Method(
        "own_pairs", "DPOJob", "offline_pairs", "offline, on preference pairs (cDPO, robust, hinge: see form)"
    ),
    "ipo": Method("own_pairs", "IPOJob", "offline_pairs", "offline, on preference pairs, with a bounded margin"),
    "inpo": Method("own_game", "INPOJob", "game", "a preference game: pairs of its own samples, compared by an oracle"),
    "sppo": Method("own_game", "SPPOJob", "game", "the same by win probabilities among all samples of a prompt"),
    "online-dpo": Method("own_game", "OnlineDPOJob", "game", "the same with the loss of DPO, IPO or Nash-MD"),
    "chain": Method(
        "own_chain", "ChainJob", "chain", "several of these as stages, each on the model of the one before"
    ),
}
"""What `forethought train` knows, by name."""

IN_WORLDS: dict[str, Method] = {
    "grpo": Method("own_env", "EnvGRPOJob", "env_grpo", "on episodes in a text environment; GiGPO with credit=gigpo"),
}
"""The same with --env."""


def method_of(args: argparse.Namespace) -> Method:
    """The method that the command line names, by --env (or `env:` in the config file) the one for environments.

    Raises:
        ConfigError: the method does not act in environments.
    """
    told = args.config and Path(args.config).is_file() and load_yaml(args.config).get("env")
    if not (args.env or told):
        return METHODS[args.method]
    if args.method not in IN_WORLDS:
        raise ConfigError(f"--env: {args.method} does not act in environments; {', '.join(IN_WORLDS)} does")
    return IN_WORLDS[args.method]


def train(args: argparse.Namespace, say: Callable[[str], None]) -> Path | None:
    """Run the job; returns its folder, or None after a dry run.

    Raises:
        ForethoughtError: bad input, before compute where possible. KeyboardInterrupt: Ctrl-C; the state was saved.
    """
    from forethought.recipes.own_job import Place, job_of

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("`forethought train` runs in one process (WORLD_SIZE is set); start it without a launcher")
    cls, function = method_of(args).load()
    job = job_of(cls, args)
    if args.dry_run:
        print(dump_yaml(job), end="")
        return None
    job.require()
    try:
        with Place(job, args) as place:
            return function(job, place, say)
    except FloatingPointError as err:
        raise RunError(f"{err}; a smaller optim.lr helps, go on from the last checkpoint with --resume") from err
