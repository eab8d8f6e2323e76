"""A PPO update against our own GRPO update on the same batch, in one run.

    python benchmarks/ppo_step.py [--dtype bf16|fp32|both] [--case 256/32 ...] [--critic shared separate]

4 prompts x 8 samples; cases are prompt/response tokens. An update is all that follows sampling and judging: for GRPO
credit, packing, forward, backward and AdamW; for PPO the values of the rollout, GAE, and the same with both losses (one
pass, one minibatch, as GRPO has one update). `_kl`: with a KL, which GRPO has in the loss and PPO in the reward, so that it
needs old log-probs beside those of the reference. Each kind of critic takes turns with GRPO, so that both see the same
machine. The last line is one JSON object with the ratios (PPO over GRPO).
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from typing import Any

import common
import torch

from forethought.learn.online import OnlineConfig, OnlineTrainer
from forethought.learn.optim import OptimConfig
from forethought.learn.ppo import PPOConfig, PPOTrainer
from forethought.models.load import load_model
from forethought.models.policy import Policy
from forethought.models.torch_engine import TorchEngine
from forethought.rewards.reward import Reward

PROMPTS, SAMPLES = 4, 8


def make(args, model, tokenizer, texts, response: int, dtype: torch.dtype, critic: Any, kl: float) -> Any:
    """A trainer with weights of its own: GRPO if `critic` is None."""
    policy = Policy(copy.deepcopy(model), tokenizer)
    policy.eos_ids = ()  # every row runs to the full length
    tasks = [{"id": str(i), "prompt": t} for i, t in enumerate(texts)]
    judge = lambda items: [Reward(float(i % 2)) for i in range(len(items))]  # noqa: E731
    common_settings = {
        "steps": 100,
        "prompts_per_step": PROMPTS,
        "group_size": SAMPLES,
        "max_new_tokens": response,
        "micro_tokens": args.micro_tokens,
        "kl_coef": kl,
        "optim": OptimConfig(lr=1e-6),
    }
    arguments = (policy, TorchEngine(policy), tasks, lambda t: tokenizer(t["prompt"])["input_ids"], judge)
    if critic is None:
        return OnlineTrainer(*arguments, OnlineConfig(**common_settings), compute=dtype)
    config = PPOConfig(**common_settings, critic=critic, critic_optim=OptimConfig(lr=1e-5))
    return PPOTrainer(*arguments, config, compute=dtype)


def rolled(trainer) -> list:
    """Judged groups of one rollout."""
    groups = trainer.rollout()
    trainer.judge_groups(groups)
    return groups


def update(trainer, groups) -> float:
    """Seconds from judged groups to stepped weights."""
    for group in groups:
        group.tree.weight[:] = 0
        group.tree.advantage[:] = 0
    began = time.perf_counter()
    trainer.update(trainer.assign(groups))
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    common.add_arguments(parser)
    parser.add_argument("--case", action="append", help="prompt/response tokens; default 256/32")
    parser.add_argument("--micro-tokens", type=int, default=4096, help="packed tokens per forward")
    parser.add_argument("--critic", nargs="+", default=["shared", "detached", "separate"], help="kinds to time")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result: dict = {"benchmark": "ppo_step", "peer": "our GRPO update", "cases": {}}
    model, tokenizer = load_model(args.model, dtype=torch.float32, device="cpu")
    for case in args.case or ["256/32"]:
        prompt, response = (int(x) for x in case.split("/"))
        texts = common.word_prompts(tokenizer, PROMPTS, prompt)
        for name, dtype in common.dtypes(args.dtype).items():
            row: dict = {}
            for label, kl in (("", 0.0), ("_kl", 0.05)):
                peer = make(args, model, tokenizer, texts, response, dtype, None, kl)
                theirs = rolled(peer)
                every: list[float] = []  # of GRPO, beside each kind
                for critic in args.critic:
                    trainer = make(args, model, tokenizer, texts, response, dtype, critic, kl)
                    ours = rolled(trainer)
                    pairs = [(update(peer, theirs), update(trainer, ours)) for _ in range(args.repeats + 1)][1:]
                    every += [a for a, _ in pairs]
                    row[f"{critic}{label}_s"] = round(statistics.median(b for _, b in pairs), 2)
                    row[f"{critic}{label}_ratio"] = round(statistics.median(b / a for a, b in pairs), 2)
                    ratio = row[f"{critic}{label}_ratio"]
                    print(
                        f"{name} {case} {critic}{label}: {row[f'{critic}{label}_s']} s, {ratio} GRPO updates",
                        flush=True,
                    )
                    del trainer, ours
                row[f"grpo{label}_s"] = round(statistics.median(every), 2)
                del peer, theirs
            result["cases"][f"{name} {case}"] = row
    common.finish(result)


if __name__ == "__main__":
    main()
