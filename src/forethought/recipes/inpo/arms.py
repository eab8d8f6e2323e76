"""The arms: which loss on which pairs; and the jobs that play one arm with one seed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forethought.errors import ConfigError, nearest
from forethought.recipes.inpo.measure import ByIteration, Exact, Versus
from forethought.recipes.inpo.tables import play_all
from forethought.recipes.inpo.world import (
    MAX_TOKENS,
    RoleOracle,
    answer_text,
    game_of,
    open_files,
    pretrain,
    rows_of,
    seeded,
)
from forethought.recipes.jobs import Job
from forethought.rundir import RunDir

if TYPE_CHECKING:
    from forethought.learn.preference_game import GameConfig
    from forethought.recipes.inpo import INPOConfig

REFERENCE, SCALAR = "reference", "INPO, scalar reward"
ARMS: tuple[str, ...] = (
    REFERENCE,
    "INPO",
    "INPO, soft labels",
    "INPO, tournament",
    "INPO, tau 0",
    SCALAR,
    "DPO",
    "DPO, tuned beta",
    "DPO, base previous",
    "IPO",
    "SPPO",
    "Nash-MD",
)
"""reference: the policy that all arms begin with, as it is. INPO, scalar reward: compared by the best
scalar reward (Bradley-Terry), miniature only."""


def check_arm(name: str) -> None:
    if name not in ARMS:
        raise ConfigError(f"arms: {name!r} is not known{nearest(name, ARMS)} known: {', '.join(ARMS)}")


def game_config(config: INPOConfig, arm: str, seed: int) -> GameConfig:
    """The settings of the loop for an arm.

    Raises:
        ConfigError: see `GameConfig`; names the arm.
    """
    growing = config.eta_schedule == "growing"
    inpo = {
        "loss": "inpo",
        "eta": None if growing else config.eta,
        "tau": config.tau,
        "eta_schedule": config.eta_schedule,
        "pair_mode": config.pair_mode,
    }
    dpo = {"loss": "dpo", "pair_mode": config.dpo_pair_mode}
    settings: dict[str, dict[str, Any]] = {
        "INPO": inpo,
        "INPO, soft labels": inpo | {"pair_mode": "soft"},
        "INPO, tournament": inpo | {"pair_mode": "tournament"},
        "INPO, tau 0": inpo | {"tau": 0.0, "eta": config.eta, "eta_schedule": "constant"},
        SCALAR: inpo,
        "DPO": dpo | {"beta": config.dpo_beta},
        "DPO, tuned beta": dpo | {"beta": config.dpo_tuned_beta},
        "DPO, base previous": dpo | {"beta": config.dpo_previous_beta, "base": "previous"},
        "IPO": dpo | {"loss": "ipo", "beta": config.ipo_beta},
        "SPPO": {"loss": "sppo", "beta": config.sppo_beta, "pair_mode": config.sppo_pair_mode},
        "Nash-MD": {
            "loss": "nash_md",
            "beta": config.nash_md_beta,
            "mixture": config.nash_md_mixture,
            "epochs": 1,
            "valid_share": 0.0,
            "patience": 1,
        },
    }
    rates = {"dpo": config.dpo_lr, "ipo": config.ipo_lr, "sppo": config.sppo_lr, "nash_md": config.nash_md_lr}
    own = config.dpo_previous_lr if arm == "DPO, base previous" else rates.get(settings[arm]["loss"])
    lr = own or config.game.optim.lr
    try:
        return replace(
            config.game,
            **settings[arm],
            seed=seeded(seed, arm),
            optim=replace(config.game.optim, lr=lr),
        )
    except ConfigError as err:
        raise ConfigError(f"arm {arm!r}: {err}") from None


# -- jobs --------------------------------------------------------------------------------------------------------------


def table_job(job: Job, run: RunDir) -> Mapping[str, Any]:
    return play_all(job.settings)


def pretrain_job(job: Job, run: RunDir) -> Mapping[str, Any]:
    return pretrain(job.extra["config"].miniature, run)


def arm_job(job: Job, run: RunDir) -> Mapping[str, Any]:
    """Play one arm with one seed and return its numbers."""
    import torch

    from forethought.learn.preference_game import GameTrainer
    from forethought.learn.session import fit
    from forethought.models.chat import ChatRenderer
    from forethought.models.load import load_model
    from forethought.models.policy import Policy
    from forethought.models.torch_engine import TorchEngine

    config: INPOConfig = job.extra["config"]
    mini = config.model == "miniature"
    began = time.perf_counter()
    base = str(Path(job.extra["root"]) / "arms" / "pretraining" / "seed0" / "model")
    model, tokenizer = load_model(base if mini else config.model, dtype=torch.float32, device=config.device)
    renderer = ChatRenderer(tokenizer)
    policy = Policy(model, tokenizer, end_ids=() if mini else renderer.end_ids)
    engine = TorchEngine(policy, max_rows=config.max_rows)
    tokenizer.save_pretrained(run.path)
    settings = game_config(config, "INPO" if job.arm == REFERENCE else job.arm, job.seed)
    decode = answer_text(tokenizer, mini)

    def encode(task: Mapping[str, Any]) -> list[int]:
        return renderer.prompt_ids(task["prompt"])

    oracle: Any
    too_long = 0
    if mini:
        tasks = rows_of(config.miniature, settings.prompts_per_iteration)
        oracle = RoleOracle(game_of(config.miniature, "bradley-terry" if job.arm == SCALAR else config.oracle))
        settings = replace(settings, max_new_tokens=MAX_TOKENS)
        look: Exact | Versus = Exact(config, policy)
    else:
        world = open_files(config.files, config.oracle, renderer, job.seed)
        tasks, oracle, too_long = world.tasks, world.oracle, world.dropped
        look = Versus(world, engine, encode, decode, settings, job.seed)
    try:
        if job.arm == REFERENCE:
            run.log_metrics(look(0), step=0)
            return {
                **look.final(),
                "tokens_evaluated": look.tokens,
                "too_long": too_long,
                "wall_s": time.perf_counter() - began,
            }

        def keep(t: int, policy: Policy) -> None:
            if config.keep_models and (config.output == "mixture" or t == settings.iterations):
                with run.save_folder("model" if config.output == "last" else f"iterates/{t:04d}") as folder:
                    trainer.learner.save_model(folder)

        trainer = GameTrainer(
            policy,
            engine,
            tasks,
            encode,
            oracle,
            settings,
            decode=decode,
            compute=config.compute_dtype(),
            on_iteration=keep,
        )
        fit(
            ByIteration(trainer) if mini else trainer,
            run,
            steps=settings.iterations if mini else settings.total_steps,
            title=f"{job.arm}, seed {job.seed}",
            evaluate=look,
            eval_every=1 if mini else settings.inner_steps,
            save_every=config.save_every,
            save_last=False,
            store_groups=config.store_groups,
            extra=look.state_dict,
            restore_extra=look.load_state_dict,
        )
    finally:
        look.close()
    rows = run.metrics()
    dropped = sorted({k for row in rows for k in row if k.startswith("pairs/dropped/")})
    return {
        **look.final(),
        **trainer.counts,
        "tokens_evaluated": look.tokens,
        "too_long": too_long,
        "answers": settings.iterations * settings.prompts_per_iteration * settings.samples,
        "pairs": sum(int(row.get("pairs/made") or 0) for row in rows),
        "dropped": {k.removeprefix("pairs/dropped/"): sum(int(row.get(k) or 0) for row in rows) for k in dropped},
        "wall_s": time.perf_counter() - began,
    }
