"""PPO against a plain implementation on padded rows, layout against layout, and resume against an unbroken run.

No peer stands in as the oracle: TRL dropped its PPO trainer. The reference here is the textbook on padded rows with
torch's own optimiser, and shares nothing with the package but the model and the sampled tokens.
"""

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from forethought.learn.online import Group
from forethought.learn.optim import OptimConfig
from forethought.learn.ppo import PartConfig, PPOConfig, PPOTrainer
from forethought.learn.session import fit
from forethought.models.critic import Critic
from forethought.models.load import load_model
from forethought.models.policy import Policy
from forethought.models.tiny import char_tokenizer, tiny_model
from forethought.models.torch_engine import TorchEngine
from forethought.rewards.reward import Reward
from forethought.rundir import RunDir
from forethought.tree.tree import Stop, TokenTree
from tinymodels import CONFIGS, IntTokenizer, tiny

OPTIM = OptimConfig(lr=0.003, weight_decay=0.01, grad_clip=1.0)
CONFIG = PPOConfig(
    steps=4,
    prompts_per_step=4,
    group_size=3,
    max_new_tokens=6,
    ppo_epochs=3,
    kl_coef=0.1,
    lam=0.9,
    gamma=0.98,
    value_coef=0.7,
    entropy_coef=0.01,
    optim=OPTIM,
    critic_optim=replace(OPTIM, lr=0.01),
)


def noisy(items):
    return [Reward(math.sin(3.0 * i), {"a": math.sin(3.0 * i), "b": 0.1 * i}) for i in range(len(items))]


def make(config, *, layout=None, family="llama", micro=None):
    model = tiny(family)
    policy = Policy(model, IntTokenizer(), layout=layout)
    sampled = Policy(model, IntTokenizer())  # the engine needs trees
    sampled.eos_ids = policy.eos_ids = (1, 11, 12, 13, 14, 15)  # responses of different lengths
    tasks = [{"id": str(i), "prompt": [5 + i, *[6] * i, 7]} for i in range(4)]
    config = config if micro is None else replace(config, micro_tokens=micro)
    return PPOTrainer(policy, TorchEngine(sampled), tasks, lambda t: t["prompt"], noisy, config)


# -- the textbook --------------------------------------------------------------------------------------------------------


class Reference:
    """PPO with a shared head on padded rows; every formula written out."""

    def __init__(self, config, start, other):
        self.config, self.model, self.reference = config, start, other
        self.head = torch.nn.Linear(32, 1)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        c = config.optim
        self.actor = torch.optim.AdamW(
            [
                {"params": [p for p in start.parameters() if p.ndim > 1], "weight_decay": c.weight_decay},
                {"params": [p for p in start.parameters() if p.ndim < 2], "weight_decay": 0},
            ],
            lr=c.lr,
        )
        c = config.critic_optim
        self.critic = torch.optim.AdamW(
            [{"params": [self.head.weight], "weight_decay": c.weight_decay}, {"params": [self.head.bias]}],
            lr=c.lr,
            weight_decay=0,
        )

    def forward(self, model, ids, mask):
        out = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        logits = out.logits[:, :-1].log_softmax(-1)
        logp = logits.gather(2, ids[:, 1:, None])[:, :, 0]
        return logp, self.head(out.hidden_states[-1])[:, :, 0], -(logits.exp() * logits).sum(-1)

    def update(self, rows, begins, rewards):
        c = self.config
        longest = max(len(r) for r in rows)
        ids = torch.tensor([r + [0] * (longest - len(r)) for r in rows])
        mask = torch.tensor([[1] * len(r) + [0] * (longest - len(r)) for r in rows])
        action = mask[:, 1:].clone().bool()  # which of the predicted tokens the policy wrote
        for row, begin in zip(action, begins, strict=True):
            row[: begin - 1] = False
        with torch.no_grad():
            old, values, _ = self.forward(self.model, ids, mask)
            ref, _, _ = self.forward(self.reference, ids, mask)
            values = values[:, :-1]
            token_rewards = -c.kl_coef * (old - ref)
            for i, row in enumerate(action):
                token_rewards[i, row.nonzero()[-1, 0]] += rewards[i]
            advantages = torch.zeros_like(old)
            last = torch.zeros(len(rows))
            for t in reversed(range(longest - 1)):
                after = (
                    torch.where(action[:, t + 1], values[:, t + 1], 0) if t + 2 < longest else torch.zeros(len(rows))
                )
                last = torch.where(
                    action[:, t], token_rewards[:, t] + c.gamma * after - values[:, t] + c.gamma * c.lam * last, last
                )
                advantages[:, t] = last
            returns = advantages + values
            flat = advantages[action]
            advantages = (advantages - flat.mean()) / torch.sqrt(flat.var() + 1e-8)
        losses = []
        for _ in range(c.ppo_epochs):
            logp, new, entropy = self.forward(self.model, ids, mask)
            new = new[:, :-1]
            ratio = torch.exp(logp - old)
            policy = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)[action].mean()
            held = values + (new - values).clamp(-0.2, 0.2)
            value = 0.5 * torch.max((new - returns) ** 2, (held - returns) ** 2)[action].mean()
            loss = policy + c.value_coef * value - c.entropy_coef * entropy[action].mean()
            self.actor.zero_grad()
            self.critic.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), c.optim.grad_clip)
            torch.nn.utils.clip_grad_norm_(self.head.parameters(), c.critic_optim.grad_clip)
            self.actor.step()
            self.critic.step()
            losses.append([float(x.detach()) for x in (loss, policy, value)])
        return np.mean(losses, 0), advantages, returns, action


def test_two_rollouts_equal_the_textbook():
    trainer = make(CONFIG)
    plain = Reference(CONFIG, tiny("llama"), tiny("llama").requires_grad_(False))
    for step in range(2):
        metrics, groups = trainer.train_step()
        samples = [(g.tree, leaf, r) for g in groups for leaf, r in zip(g.leaves, g.rewards, strict=True)]
        assert len({int(t.length[leaf]) for t, leaf, _ in samples}) > 1
        got = plain.update(
            [t.path_ids(leaf) for t, leaf, _ in samples],
            [int(t.length[0]) for t, _, _ in samples],
            [float(r) for _, _, r in samples],
        )
        losses, advantages, returns, action = got
        for i, (tree, leaf, _) in enumerate(samples):
            span = tree.span(leaf)
            np.testing.assert_allclose(tree.advantage[span], advantages[i][action[i]], atol=2e-4)
            np.testing.assert_allclose(tree.column("return")[span], returns[i][action[i]], atol=2e-4)
        np.testing.assert_allclose(
            [metrics["loss"], metrics["loss/policy"], metrics["loss/value"]], losses, atol=2e-4, err_msg=str(step)
        )
        assert metrics["clip_ratio/high"] + metrics["clip_ratio/low"] > 0
    for (name, mine), theirs in zip(trainer.policy.model.named_parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-3, rtol=1e-2, msg=name)
    torch.testing.assert_close(trainer.critic.linear.weight, plain.head.weight, atol=2e-3, rtol=1e-2)


# -- layouts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("critic", ["shared", "detached", "separate"])
@pytest.mark.parametrize("reduction", ["token-mean", "sequence-mean", "dr-grpo"])
def test_packed_trees_equal_padded_rows(critic, reduction):
    """Acceptance 17: the same loss and gradient from trees, from padded rows, and from small micro-batches."""
    parts = (PartConfig(name="a"), PartConfig(name="b", weight=0.3))
    config = replace(CONFIG, critic=critic, reduction=reduction, ppo_epochs=1, kl_placement="both", kl_estimator="k3")
    config = replace(config, parts=parts, bootstrap_truncated=True)
    found = []
    for layout, micro in (("tree", None), ("linear", None), ("tree", 12)):
        trainer = make(config, layout=layout, micro=micro)
        with torch.no_grad():
            torch.manual_seed(0)
            trainer.critic.linear.weight.normal_(std=0.1)
        gradients = []
        for optimizer in (trainer.learner.optimizer, trainer.critic_learner.optimizer):
            optimizer.adamw.register_step_pre_hook(
                lambda adamw, *_, to=gradients: to.extend(
                    p.grad.clone() for g in adamw.param_groups for p in g["params"]
                )
            )
        metrics, groups = trainer.train_step()
        assert any(g.tree.stop[leaf] == Stop.LENGTH for g in groups for leaf in g.leaves)
        found.append((metrics, gradients, [g.tree.ids.tolist() for g in groups]))
    (want, gradients, ids), *others = found
    for got, theirs, same in others:
        assert same == ids
        for name in ("loss/policy", "loss/value", "grad_norm", "critic/grad_norm", "value/error/a", "return/mean/b"):
            assert got[name] == pytest.approx(want[name], rel=1e-3, abs=1e-6), name
        for mine, other in zip(gradients, theirs, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-3)


def test_three_sequences_of_lengths_2_5_3():
    """Acceptance 17: packed equals padded under each averaging rule, and the two rules differ."""
    found: dict[str, list[float]] = {"token-mean": [], "sequence-mean": []}
    for reduction, losses in found.items():
        for layout in ("tree", "linear"):
            trainer = make(replace(CONFIG, reduction=reduction, ppo_epochs=1, kl_coef=0.0), layout=layout)
            groups = []
            for i, size in enumerate((2, 5, 3)):
                tree = TokenTree([5 + i, 7], task=str(i))
                leaf = tree.add(0, range(20, 20 + size), sampled=True, logprobs=[-2.0] * size)
                tree.reward[leaf] = i
                groups.append(Group({"id": str(i)}, tree, [leaf], np.array([float(i)]), [Reward(float(i))]))
            metrics = trainer.update(trainer.assign(groups))
            assert metrics["tokens/trained"] == 10
            losses += [metrics["loss/value"], metrics["loss/policy"], metrics["grad_norm"]]
    for packed in found.values():
        np.testing.assert_allclose(packed[:3], packed[3:], rtol=1e-4)
    # Values are 0, so the value loss is half the mean of squared returns: rewards 0, 1, 2, discounted.
    squares = [
        [(r * 0.98 ** (n - 1 - t) * 0.9 ** (n - 1 - t)) ** 2 for t in range(n)] for r, n in ((0, 2), (1, 5), (2, 3))
    ]
    assert found["token-mean"][0] == pytest.approx(0.5 * sum(map(sum, squares)) / 10, rel=1e-4)
    assert found["sequence-mean"][0] == pytest.approx(0.5 * np.mean([np.mean(s) for s in squares]), rel=1e-4)


@pytest.mark.parametrize("family", list(CONFIGS))
def test_every_family_trains(family):
    trainer = make(replace(CONFIG, ppo_epochs=1), family=family)
    metrics, _ = trainer.train_step()
    assert metrics["logprob_gap/max"] < 1e-3 and metrics["grad_norm"] > 0 and metrics["ratio/max"] < 1.001


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_bf16_keeps_fp32_masters(critic):
    config = replace(CONFIG, critic=critic, optim=OptimConfig(lr=1e-6), critic_optim=OptimConfig(lr=1e-6))
    policy = Policy(tiny("llama"), IntTokenizer())
    tasks = [{"id": str(i), "prompt": [5 + i, 7]} for i in range(4)]
    trainer = PPOTrainer(
        policy, TorchEngine(policy), tasks, lambda t: t["prompt"], noisy, config, compute=torch.bfloat16
    )
    masters = trainer.critic_learner.optimizer.master_state()
    before = {n: m.clone() for n, m in masters.items()}
    for _ in range(2):
        metrics, _ = trainer.train_step()
    masters = trainer.critic_learner.optimizer.master_state()
    assert all(m.dtype == torch.float32 for m in masters.values())
    assert all(bool((masters[n] != before[n]).any()) for n in before) and math.isfinite(metrics["loss/value"])
    assert trainer.policy.dtype == torch.bfloat16


def test_a_non_finite_critic_changes_nothing():
    """Actor and head step together or not at all."""
    trainer = make(CONFIG)
    trainer.train_step()
    groups = trainer.rollout()
    trainer.judge_groups(groups)
    trainer.assign(groups)
    trainer.critic.linear.weight.register_hook(lambda g: g * math.inf)
    before = trainer.policy.head.weight.detach().clone()
    with pytest.raises(FloatingPointError, match="the gradient norm is"):
        trainer.update(groups)
    assert torch.equal(trainer.policy.head.weight, before)
    assert all(p.grad is None for p in (*trainer.policy.model.parameters(), *trainer.critic.model.parameters()))


# -- resume ------------------------------------------------------------------------------------------------------------


def worker(folder, critic, mode):
    """Ten rollouts in a run folder; "kill": the process dies in the middle of the seventh; "crash": it raises there."""
    tokenizer = char_tokenizer("0123456789")
    policy = Policy(tiny_model(len(tokenizer), width=16, heads=2, layers=1, init_std=0.3), tokenizer)
    tasks = [{"id": str(i), "prompt": [3 + i]} for i in range(5)]
    config = PPOConfig(
        steps=10,
        prompts_per_step=4,
        group_size=2,
        max_new_tokens=3,
        minibatches=2,
        ppo_epochs=2,
        kl_target=0.01,
        kl_horizon=20,
        critic_warmup=2,
        critic=critic,
        optim=OptimConfig(lr=0.003, schedule="cosine"),
        critic_optim=OptimConfig(lr=0.01, schedule="linear"),
    )

    def die(step, groups):
        if step == 6 and mode == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 6 and mode == "crash":
            raise EOFError

    with RunDir.create(folder, config, resume=mode == "resume") as run:
        trainer = PPOTrainer(policy, TorchEngine(policy), tasks, lambda t: t["prompt"], noisy, config, on_groups=die)
        fit(trainer, run, steps=10, tags={"arm": "ppo", "seed": 0}, save_every=2)
    return trainer


def lines(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_kill_dash_nine_and_resume_equals_an_unbroken_run(tmp_path, critic):
    whole = worker(tmp_path / "whole", critic, "new")
    if critic == "shared":
        paths = [str(Path(__file__).parent), str(Path(__file__).parents[1]), *sys.path]
        code = f"import sys; sys.path[:0] = {paths!r}\nfrom test_ppo_parity import worker\n"
        code += f"worker({str(tmp_path / 'killed')!r}, {critic!r}, 'kill')"
        done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120)
        assert done.returncode == -signal.SIGKILL
    else:
        with pytest.raises(EOFError):
            worker(tmp_path / "killed", critic, "crash")
    assert len(lines(tmp_path / "killed")) == 6
    again = worker(tmp_path / "killed", critic, "resume")
    assert lines(tmp_path / "killed") == lines(tmp_path / "whole")
    coefficients = {row["kl/coef"] for row in lines(tmp_path / "whole") if row.get("kl/coef")}
    assert len(coefficients) > 1 and again.kl_coef == whole.kl_coef
    for a, b in ((whole.policy.model, again.policy.model), (whole.critic.model, again.critic.model)):
        assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    # The checkpoint is a folder of the policy with the critic beside it.
    folder = sorted((tmp_path / "whole" / "checkpoints").glob("step_*"))[-1]
    policy = Policy(*load_model(folder, dtype="fp32", device="cpu"))
    assert torch.equal(Critic.load(folder, policy).linear.weight, whole.critic.linear.weight)
