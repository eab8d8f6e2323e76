"""Small worlds with a known optimum that PPO must find."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from forethought.learn.optim import OptimConfig
from forethought.learn.ppo import PPOConfig, PPOTrainer
from forethought.models.policy import Policy
from forethought.models.tiny import char_tokenizer, tiny_model
from forethought.models.torch_engine import TorchEngine
from forethought.rewards.reward import Reward

CHARS = "0123456789+="


def make(config, prompts, reward, **kwargs):
    """`reward(prompt, answer) -> number`; the answer is a list of tokens as text."""
    tokenizer = char_tokenizer(CHARS)
    policy = Policy(tiny_model(len(tokenizer), width=32, heads=2, layers=1, init_std=0.1), tokenizer)
    policy.eos_ids = ()
    tasks = [{"id": p, "prompt": p} for p in prompts]

    def judge(items):
        texts = [[tokenizer.decode([i]) for i in tree.node_ids(leaf)] for tree, leaf, _ in items]
        return [Reward(float(reward(t["prompt"], text))) for (_, _, t), text in zip(items, texts, strict=True)]

    def encode(task):
        return tokenizer(task["prompt"])["input_ids"]

    return PPOTrainer(policy, TorchEngine(policy), tasks, encode, judge, config, **kwargs)


def settings(**kwargs):
    own = {"optim": OptimConfig(lr=0.005), "critic_optim": OptimConfig(lr=0.02), "kl_coef": 0.0, "prompts_per_step": 32}
    return PPOConfig(**{**own, **kwargs})


def run(trainer, steps):
    return [trainer.train_step()[0]["reward/mean"] for _ in range(steps)]


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_bandit(critic):
    """One token; arms pay 0 to 9. The best arm pays 9, and nothing else does."""
    pays = lambda prompt, answer: int(answer[0]) if answer[0].isdigit() else -1  # noqa: E731
    trainer = make(settings(steps=60, max_new_tokens=1, ppo_epochs=2, critic=critic), ["="], pays)
    rewards = run(trainer, 60)
    assert rewards[0] < 6 and np.mean(rewards[-5:]) > 8.7


def two_steps(prompt, answer):
    """The first token earns 1 if it is even, the second 3; each is chosen without knowing what the other earns."""
    even = [c.isdigit() and int(c) % 2 == 0 for c in answer]
    return even[0] + 3 * even[1]


def even(ids):
    """Of token ids of this alphabet (digits begin at 3)."""
    return (ids >= 3) & (ids < 13) & (ids % 2 == 1)


def test_gae_gives_each_step_its_own_credit():
    """With a critic that knows the states, lambda 0 takes the second token's luck out of the first one's advantage."""
    spread, error = {}, {}
    for lam in (0.0, 1.0):
        config = settings(
            steps=41, max_new_tokens=2, prompts_per_step=256, critic="separate", critic_warmup=40, minibatches=4
        )
        config = replace(config, critic_optim=OptimConfig(lr=0.01, schedule="linear"))
        trainer = make(replace(config, lam=lam, return_lam=1.0, whiten=False), ["3="], two_steps)
        for _ in range(40):
            trainer.train_step()
        groups = trainer.rollout()
        trainer.judge_groups(groups)
        trainer.assign(groups)
        leaves = [(g.tree, leaf) for g in groups for leaf in g.leaves]
        tokens = np.array([t.node_ids(leaf) for t, leaf in leaves])
        first, second = np.array([t.advantage[t.span(leaf)] for t, leaf in leaves]).T
        luck = even(tokens[:, 1])
        assert second[luck].mean() - second[~luck].mean() == pytest.approx(3, abs=0.3)
        # Within one first token, what is left of its advantage is the luck of the second one.
        same = tokens[:, 0] == np.bincount(tokens[:, 0]).argmax()
        spread[lam] = first[same].std()
        # The true advantage: what this first token earns, and makes likely, beyond the mean.
        begins = torch.tensor([[*trainer.prompts[0], t] for t in range(15)])
        with torch.no_grad():
            out = trainer.policy.core(input_ids=begins).logits.softmax(-1).double().numpy()
        worth = even(np.arange(15)) + 3 * out[:, -1] @ even(np.arange(15))
        error[lam] = np.median(np.abs(first - (worth - out[0, -2] @ worth)[tokens[:, 0]]))
    assert spread[0.0] < 0.01 and spread[1.0] > 0.5
    assert error[0.0] < 0.15 and error[1.0] > 0.5


def test_both_steps_of_the_credit_problem_are_learnt():
    trainer = make(settings(steps=50, max_new_tokens=2, minibatches=2, lam=0.5), ["3="], two_steps)
    rewards = run(trainer, 50)
    assert np.mean(rewards[:2]) < 2.5 and np.mean(rewards[-5:]) > 3.8


def test_numbers():
    """Say the next number: from a random model to the right answer on every prompt."""
    prompts = [f"{n}+1=" for n in range(9)]
    right = lambda prompt, answer: answer == [str(int(prompt[0]) + 1)]  # noqa: E731
    trainer = make(
        settings(steps=100, max_new_tokens=1, prompts_per_step=72, minibatches=2, entropy_coef=0.02), prompts, right
    )
    rewards = run(trainer, 100)
    assert np.mean(rewards[:3]) < 0.2 and np.mean(rewards[-5:]) > 0.9
