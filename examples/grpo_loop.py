"""A complete GRPO loop with nothing hidden: rollout, reward, credit, update. Under a minute on one core.

The task: after "3+4=" write "7". The model is random and tiny, so it starts near the reward of guessing, 0.1, and ends
above 0.9 (sampled at temperature 1, mean of the last 20 steps). GRPO: Shao et al., arXiv 2402.03300.

    python examples/grpo_loop.py
"""

import random
import time

from forethought import (
    Learner,
    OptimConfig,
    Policy,
    Reward,
    Sampling,
    Targets,
    TokenTree,
    TorchEngine,
    char_tokenizer,
    credit,
    losses,
    tiny_model,
)

STEPS, PROMPTS, GROUP = 400, 32, 16


def judge(text: str, answer: str) -> Reward:
    return Reward(float(text == answer), why=f"{text!r} against {answer!r}")


def objective(t: Targets) -> losses.LossOut:
    """Clipped policy loss and a little entropy, so that no group agrees on a wrong digit too early.

    With one update a rollout the policy before the update is the policy now, without its gradient.
    """
    assert t.entropy is not None
    clipped = losses.policy_loss(t.logp, t.logp.detach(), t.advantage, t.coef, clip_low=0.2, clip_high=0.2)
    spread = losses.entropy_bonus(t.entropy, t.coef)
    return losses.LossOut(clipped.loss + 0.05 * spread.loss, clipped.metrics | spread.metrics)


def train(steps: int = STEPS, seed: int = 0, log_every: int = 40) -> list[float]:
    """Train; returns the mean reward of every step."""
    tokenizer = char_tokenizer("0123456789+=")
    policy = Policy(tiny_model(len(tokenizer), width=64, layers=2, context=16, seed=seed), tokenizer)
    engine = TorchEngine(policy)  # shares the policy's weights
    learner = Learner(policy, OptimConfig(lr=1e-3), total_steps=steps)
    problems = [(f"{a}+{b}=", str(a + b)) for a in range(10) for b in range(10 - a)]
    rng, curve, began = random.Random(seed), [], time.perf_counter()
    for step in range(steps):
        # Rollout: one tree a prompt; its samples share the prompt's tokens.
        chosen = rng.sample(problems, PROMPTS)
        trees = [TokenTree(tokenizer.encode(prompt), task=prompt) for prompt, _ in chosen]
        samples = engine.extend([(tree, 0) for tree in trees], GROUP, Sampling(max_tokens=1, seed=step))

        # Reward: a number on the last node of every sample.
        for tree, leaves, (_, answer) in zip(trees, samples, chosen, strict=True):
            for leaf in leaves:
                text = tokenizer.decode(tree.node_ids(leaf), skip_special_tokens=True)
                tree.reward[leaf] = judge(text, answer).value

        # Credit: the rewards of a group, normalised, become the advantages of its tokens.
        groups = [[(tree, leaf) for leaf in leaves] for tree, leaves in zip(trees, samples, strict=True)]
        credit.assign_groups(groups, credit.group_normalised)

        # Update: the trees are packed, so each prompt is computed once; the mean runs over all sampled tokens.
        numbers = learner.update(trees, objective, reduction="token-mean", entropy=True)

        curve.append(sum(float(credit.rewards_of(group).mean()) for group in groups) / PROMPTS)
        if log_every and (step % log_every == 0 or step == steps - 1):
            silent = credit.zero_variance_share(groups)
            print(
                f"step {step:3d}  reward {curve[-1]:.2f}  groups without signal {silent:.2f}  "
                f"entropy {numbers['entropy']:.2f}  {time.perf_counter() - began:.0f} s"
            )
    return curve


if __name__ == "__main__":
    train()
