"""Toy tasks with a known optimum, exact resume, and the switches of the loop."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from forethought.errors import ConfigError, DataError, RewardError
from forethought.learn.learner import Learner
from forethought.learn.online import Group, OnlineConfig, OnlineTrainer
from forethought.learn.optim import OptimConfig
from forethought.models.policy import Policy
from forethought.models.torch_engine import TorchEngine
from forethought.rewards.reward import Reward
from forethought.tree.tree import TokenTree
from tinymodels import CONFIGS, IntTokenizer, tiny


def make(config, *, judge=None, tasks=None, seed=0, family="llama", **kwargs):
    policy = Policy(tiny(family, seed), IntTokenizer())
    tasks = tasks or [{"id": str(i), "prompt": [5 + i, 6, 7]} for i in range(4)]

    def want_ten(items):
        """Reward the share of tokens that are id 10: the optimum is 1."""
        return [Reward(float(np.mean(tree.ids[tree.span(leaf)] == 10))) for tree, leaf, _ in items]

    return OnlineTrainer(policy, TorchEngine(policy), tasks, lambda t: t["prompt"], judge or want_ten, config, **kwargs)


FAST = dict(prompts_per_step=4, group_size=8, max_new_tokens=4, optim=OptimConfig(lr=0.01))


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"reduction": "sequence-mean", "advantage_std": "none"},
        {"reduction": "dr-grpo", "advantage_std": "none"},
        {"advantage": "leave-one-out"},
        {"updates_per_rollout": 2, "clip_high": 0.28},
        {"ratio": "behaviour", "drop_zero_variance": True},
        {"kl_coef": 0.001, "entropy_coef": 0.001},
    ],
)
def test_learns_the_optimum(switches):
    trainer = make(OnlineConfig(steps=40, **{**FAST, **switches}))
    rewards = [trainer.train_step()[0]["reward/mean"] for _ in range(40)]
    assert np.mean(rewards[:3]) < 0.2 and np.mean(rewards[-5:]) > 0.9


def test_the_sampler_and_the_learner_agree():
    trainer = make(OnlineConfig(steps=2, **FAST))
    metrics, _ = trainer.train_step()
    assert metrics["logprob_gap/max"] < 1e-4 and metrics["tokens/packed"] <= 4 * (3 + 8 * 4)
    assert metrics["clip_ratio/low"] == metrics["clip_ratio/high"] == 0


def test_one_prompt_as_128_groups_of_8():
    """Acceptance 4 of the One-Shot RLVR spec: groups by row, one tree, nothing copied."""
    config = OnlineConfig(steps=1, prompts_per_step=128, group_size=8, max_new_tokens=2)
    trainer = make(config, tasks=[{"id": "pi1", "prompt": [5, 6, 7]}])
    groups = trainer.rollout()
    assert len(groups) == 128 and {len(g.leaves) for g in groups} == {8}
    assert len({id(g.tree) for g in groups}) == 1 and trainer.engine.stats.tokens_prefilled == 3
    for g in groups:
        g.rewards = np.array([1.0, 1, 0, 0, 0, 0, 0, 0])
    trainer.assign(groups)
    before = groups[0].advantages.copy()
    np.testing.assert_allclose(before, [1.62018] * 2 + [-0.54006] * 6, atol=1e-5)
    for g in groups[1:2]:
        g.rewards = np.ones(8)
    for g in groups:
        g.tree.weight[:] = 0
    trainer.assign(groups)
    np.testing.assert_array_equal(groups[0].advantages, before)
    assert (groups[1].advantages == 0).all() and np.isfinite(groups[1].advantages).all()


def test_groups_by_prompt_are_one_group():
    config = OnlineConfig(steps=1, prompts_per_step=3, group_size=4, group_by="prompt", max_new_tokens=1)
    (group,) = make(config, tasks=[{"id": "a", "prompt": [5]}]).rollout()
    assert len(group.leaves) == 12


def test_fewer_tasks_than_groups_are_repeated_and_none_is_lost():
    """Acceptance 12: never zero steps."""
    trainer = make(OnlineConfig(steps=3, prompts_per_step=10, group_size=2, max_new_tokens=1))
    drawn = [dict(trainer.draw()) for _ in range(3)]
    assert all(sum(d.values()) == 10 and set(d) == {0, 1, 2, 3} for d in drawn)


def test_more_tasks_than_groups_see_each_task_once_an_epoch():
    trainer = make(
        OnlineConfig(steps=3, prompts_per_step=4, group_size=2),
        tasks=[{"id": str(i), "prompt": [5]} for i in range(10)],
    )
    drawn = [[i for i, c in trainer.draw() for _ in range(c)] for _ in range(6)]
    assert [len(d) for d in drawn] == [4, 4, 2, 4, 4, 2]  # case H33
    assert sorted(sum(drawn[:3], [])) == sorted(sum(drawn[3:], [])) == list(range(10))


def test_a_saturated_problem_moves_weights_only_through_kl_entropy_and_decay():
    """Acceptance 13."""
    ones = lambda items: [Reward(1.0) for _ in items]  # noqa: E731

    def moved(**kwargs):
        optim = OptimConfig(lr=0.01, weight_decay=kwargs.pop("weight_decay", 0.0))
        trainer = make(OnlineConfig(steps=50, **{**FAST, "optim": optim, **kwargs}), judge=ones)
        before = {n: p.detach().clone() for n, p in trainer.policy.model.named_parameters()}
        for _ in range(50 if not kwargs and not optim.weight_decay else 2):
            metrics, _ = trainer.train_step()
            assert metrics["frac_reward_zero_std"] == 1 and math.isfinite(metrics["loss"])
        return max(float((p.detach() - before[n]).abs().max()) for n, p in trainer.policy.model.named_parameters())

    assert moved() == 0.0
    assert moved(entropy_coef=0.001) > 0
    assert moved(weight_decay=0.1) > 0


def test_zero_variance_groups_can_be_dropped():
    judge = lambda items: [Reward(1.0 if t["id"] == "0" else float(leaf % 2)) for _, leaf, t in items]  # noqa: E731
    kept = make(OnlineConfig(steps=1, **FAST), judge=judge).train_step()[0]
    dropped = make(OnlineConfig(steps=1, **FAST, drop_zero_variance=True), judge=judge).train_step()[0]
    assert kept["frac_reward_zero_std"] == dropped["frac_reward_zero_std"] == 0.25
    assert dropped["tokens/trained"] < kept["tokens/trained"]
    all_equal = make(
        OnlineConfig(steps=1, **FAST, drop_zero_variance=True), judge=lambda items: [Reward(1.0)] * len(items)
    )
    metrics, _ = all_equal.train_step()  # nothing to train on is a step without an update, not a crash
    assert "loss" not in metrics and all_equal.step == 1


def test_failed_rewards_leave_the_group_and_are_counted():
    """Case H05: a rejected sample does not move its group's baseline."""

    def judge(items):
        return [RewardError("grader died") if i % 8 == 3 else Reward(float(i % 2)) for i in range(len(items))]

    trainer = make(OnlineConfig(steps=1, **FAST), judge=judge)
    groups = trainer.rollout()
    trainer.judge_groups(groups)
    trainer.assign(groups)
    for g in groups:
        assert np.isnan(g.rewards[3]) and g.advantages[3] == 0
        assert g.tree.weight[g.tree.span(g.leaves[3])].sum() == 0
        assert g.tree.meta[g.leaves[3]]["error"] == "grader died"
        assert g.advantages.sum() == pytest.approx(0)
    with pytest.raises(RewardError, match="every sample's reward failed; the first: grader died"):
        make(OnlineConfig(steps=1, **FAST), judge=lambda items: [RewardError("grader died")] * len(items)).train_step()
    with pytest.raises(RewardError, match="1 results for 32 samples"):
        make(OnlineConfig(steps=1, **FAST), judge=lambda items: [Reward(1.0)]).train_step()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"group_size": 1}, "group_size=1: advantages compare"),
        ({"steps": 0}, "steps=0"),
        ({"temperature": 0}, "temperature=0"),
        ({"updates_per_rollout": 9}, "updates_per_rollout=9 exceeds"),
        ({"clip_low": 1.5}, "clip_low=1.5"),
        ({"kl_coef": -1}, "kl_coef=-1"),
    ],
)
def test_config_refuses(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        OnlineConfig(**kwargs)


def test_bad_tasks_are_refused_before_compute():
    with pytest.raises(DataError, match="'x': its prompt of 300 tokens leaves no room in the context of 256"):
        make(OnlineConfig(), tasks=[{"id": "x", "prompt": [5] * 300}])
    with pytest.raises(DataError, match="'x': its prompt has no tokens"):
        make(OnlineConfig(), tasks=[{"id": "x", "prompt": []}])


def test_bf16_keeps_fp32_masters():
    trainer = make(OnlineConfig(steps=3, **{**FAST, "optim": OptimConfig(lr=1e-6)}), compute=torch.bfloat16)
    start = {n: m.clone() for n, m in trainer.learner.optimizer.master_state().items()}
    for _ in range(3):
        metrics, _ = trainer.train_step()
    masters = trainer.learner.optimizer.master_state()
    assert all(m.dtype == torch.float32 for m in masters.values()) and trainer.policy.dtype == torch.bfloat16
    # a step of 1e-6 is far below bf16's resolution of weights near 1, and is kept all the same
    assert any(bool((masters[n] != start[n]).any()) for n in masters)
    assert metrics["logprob_gap/mean"] < 0.1


def test_accumulation_is_exact():
    """Case H01: micro-batches only add up; 2-token and 6-token samples weigh by tokens."""
    trees = []
    for size in (2, 6, 4):
        tree = TokenTree([5, 6])
        node = tree.add(0, [11] * size, sampled=True, logprobs=[-1.0] * size)
        tree.weight[tree.span(node)] = 1
        tree.advantage[tree.span(node)] = size
        trees.append(tree)
    from forethought.learn.offline import sft_objective

    found = []
    for micro in (None, 8):
        policy = Policy(tiny("llama"), IntTokenizer())
        learner = Learner(policy, OptimConfig(lr=0.1), total_steps=1, micro_tokens=micro)
        metrics = learner.update(trees, sft_objective)
        found.append((metrics["loss"], metrics["grad_norm"], policy.head.weight.detach().clone()))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-6) and found[0][1] == pytest.approx(found[1][1], rel=1e-5)
    torch.testing.assert_close(found[0][2], found[1][2], atol=1e-5, rtol=1e-4)


def test_a_non_finite_loss_changes_nothing():
    policy = Policy(tiny("llama"), IntTokenizer())
    learner = Learner(policy, OptimConfig(), total_steps=1)
    before = policy.head.weight.detach().clone()
    tree = TokenTree([5])
    node = tree.add(0, [6])
    tree.weight[tree.span(node)] = 1
    from forethought.learn.losses import LossOut

    with pytest.raises(FloatingPointError, match="no weight was changed"):
        learner.update([tree], lambda t: LossOut(t.logp.sum() * float("nan"), {}))
    assert torch.equal(policy.head.weight, before)
    with pytest.raises(DataError, match="nothing to train on"):
        learner.update([TokenTree([5, 6])], lambda t: LossOut(t.logp.sum(), {}))


@pytest.mark.parametrize("family", list(CONFIGS))
def test_every_family_trains(family):
    alternate = lambda items: [Reward(float(i % 2)) for i in range(len(items))]  # noqa: E731
    trainer = make(OnlineConfig(steps=2, **FAST), family=family, judge=alternate)
    metrics, _ = trainer.train_step()
    assert metrics["logprob_gap/max"] < 1e-4 and metrics["grad_norm"] > 0


SCRIPT = """
import sys
sys.path[:0] = {paths!r}
from test_online import FAST, make
from forethought.learn.online import OnlineConfig
from forethought.learn.session import fit
from forethought.rundir import RunDir
config = OnlineConfig(steps=12, save_every=3, **dict(FAST, updates_per_rollout=2, kl_coef=0.01))
with RunDir.create(sys.argv[1], config, resume=sys.argv[2] == "resume") as run:
    trainer = make(config)
    def evaluate(step):
        return {{"eval/sum": float(trainer.policy.head.weight.detach().double().sum())}}
    fit(trainer, run, steps=12, tags={{"arm": "a", "seed": 0}}, evaluate=evaluate, eval_every=2, save_every=3,
        store_groups=1)
"""


def _run(folder: Path, mode: str, kill_after: float | None = None) -> int:
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1]), *sys.path]
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(paths=paths), str(folder), mode],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
    )
    if kill_after is not None:
        end = time.monotonic() + 60
        while time.monotonic() < end and not (folder / "metrics.jsonl").exists():
            time.sleep(0.01)
        time.sleep(kill_after)
        process.send_signal(signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert kill_after is not None or process.returncode == 0, err.decode()
    return process.returncode


def _lines(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def test_kill_dash_nine_and_resume_equals_an_unbroken_run(tmp_path):
    _run(tmp_path / "whole", "new")
    want = _lines(tmp_path / "whole")
    assert [r["step"] for r in want] == list(range(13))
    for number, delay in enumerate((0.05, 0.35)):
        folder = tmp_path / f"killed{number}"
        _run(folder, "new", kill_after=delay)
        _run(folder, "resume")
        assert _lines(folder) == want
    from forethought.tree.store import TreeStore

    rows = [
        [r.step for r in TreeStore(tmp_path / f / "trees.sqlite", readonly=True).query()] for f in ("whole", "killed1")
    ]
    assert rows[0] == rows[1] == list(range(1, 13))


def test_group_is_explicit():
    group = Group({"id": "a"}, TokenTree([5]), [])
    group.rewards = np.array([1.0, 1.0, np.nan])
    assert group.zero_variance
