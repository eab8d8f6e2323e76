"""PPO: the acceptance values of the RLSP spec, toy tasks with a known optimum, and both kinds of critic."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from forethought.errors import ConfigError, DataError, RewardError
from forethought.learn.losses import kl, policy_loss, reduction_coefficients, value_loss
from forethought.learn.optim import OptimConfig
from forethought.learn.ppo import PartConfig, PPOConfig, PPOTrainer, adapted_kl_coef, shaped_rewards
from forethought.models.critic import Critic
from forethought.models.policy import Policy
from forethought.models.torch_engine import TorchEngine
from forethought.rewards.reward import Reward
from forethought.tree import credit
from forethought.tree.tree import Stop, TokenTree
from tinymodels import IntTokenizer, tiny

FAST = dict(
    steps=40,
    prompts_per_step=32,
    max_new_tokens=4,
    kl_coef=0.0,
    optim=OptimConfig(lr=0.01),
    critic_optim=OptimConfig(lr=0.01),
)
KL = {"kl_coef": 0.01}


def want_ten(items):
    """Reward the share of tokens that are id 10: the optimum is 1."""
    return [Reward(float(np.mean(tree.ids[tree.span(leaf)] == 10))) for tree, leaf, _ in items]


def alternate(items):
    return [Reward(float(i % 2)) for i in range(len(items))]


def make(config, *, judge=want_ten, family="llama", layout=None, tasks=4, **kwargs):
    policy = Policy(tiny(family), IntTokenizer(), layout=layout)
    policy.eos_ids = ()  # every response has its four tokens
    tasks = [{"id": str(i), "prompt": [5 + i, 6, 7]} for i in range(tasks)]
    return PPOTrainer(policy, TorchEngine(policy), tasks, lambda t: t["prompt"], judge, config, **kwargs)


def weights(module):
    return {n: p.detach().clone() for n, p in module.named_parameters()}


def moved(module, before):
    return any(bool((p.detach() != before[n]).any()) for n, p in module.named_parameters())


# -- values of the spec ------------------------------------------------------------------------------------------------


def test_token_rewards():
    """Acceptance 5."""
    got = shaped_rewards(np.array([0, 0, 1.0]), np.array([0.1, -0.2, 0.4]), kl_coef=0.05, clip=10)
    np.testing.assert_allclose(got, [-0.005, 0.01, 0.98], atol=1e-12)
    np.testing.assert_array_equal(shaped_rewards(np.array([-20.0]), np.zeros(1), kl_coef=0, clip=10), [-10])
    np.testing.assert_array_equal(shaped_rewards(np.array([-20.0]), np.zeros(1), kl_coef=0), [-20])
    with pytest.raises(DataError, match="a reward is inf: give a finite number"):
        shaped_rewards(np.array([math.inf]), np.zeros(1), kl_coef=0, clip=10)


def test_gae_values():
    """Acceptance 6: advantages and returns; what stands after the end is no part of the path."""
    values = np.array([0.2, 0.4, 0.6])
    got = credit.gae_values([0, 0, 1], values, gamma=1, lam=0.95)
    np.testing.assert_allclose(got, [0.751, 0.58, 0.4], atol=1e-9)
    np.testing.assert_allclose(got + values, [0.951, 0.98, 1.0], atol=1e-9)
    np.testing.assert_allclose(credit.gae_values([0, 0, 1], values, gamma=1, lam=1), [0.8, 0.6, 0.4], atol=1e-9)


def test_value_and_policy_loss():
    """Acceptance 7."""
    one = torch.ones(1)
    out = value_loss(one * 0.5, one * 0.2, one, one, clip=0.2)
    assert float(out.loss) == pytest.approx(0.18) and out.metrics["value/clip_ratio"] == 1
    assert float(value_loss(one * 0.5, one * 0.2, one, one, clip=None).loss) == pytest.approx(0.125)
    # The other side: the value moved away from the target, so the plain error is the larger one and has a gradient.
    v = torch.tensor([0.0], requires_grad=True)
    out = value_loss(v, one * 0.5, one, one, clip=0.2)
    out.loss.backward()
    assert float(out.loss.detach()) == pytest.approx(0.5) and out.metrics["value/clip_ratio"] == 0
    assert float(v.grad) == pytest.approx(-1.0)
    for advantage, ratio, want in ((1.0, 1.5, -1.2), (-1.0, 0.5, 0.8)):
        got = policy_loss(one * math.log(ratio), one * 0, one * advantage, one)
        assert float(got.loss) == pytest.approx(want)


def test_nothing_behind_a_mask_reaches_the_value_loss():
    """Case H04, in the critic."""
    v = torch.tensor([0.5, math.nan], requires_grad=True)
    out = value_loss(v, torch.tensor([0.5, math.nan]), torch.tensor([1.0, math.nan]), torch.tensor([1.0, 0.0]))
    out.loss.backward()
    assert float(out.loss.detach()) == pytest.approx(0.125) and v.grad.tolist() == [-0.5, 0.0]
    with pytest.raises(DataError, match="returns is nan at target 1"):
        value_loss(torch.zeros(2), torch.zeros(2), torch.tensor([1.0, math.nan]), torch.ones(2))
    with pytest.raises(ConfigError, match="value clip=0"):
        value_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), torch.ones(1), clip=0)


def test_whitening():
    """Acceptance 8: masked mean 0 and variance 1; one token and equal numbers give zeros, exactly."""
    rng = np.random.default_rng(0)
    values = np.append(rng.normal(3, 2, 50), np.nan)
    white = credit.batch_whitened(values)
    assert white[:50].mean() == pytest.approx(0) and white[:50].var(ddof=1) == pytest.approx(1) and white[50] == 0
    for equal in ([0.7], [0.1] * 3, [0.1, 0.1, np.nan]):
        np.testing.assert_array_equal(credit.batch_whitened(equal), np.zeros(len(equal)))
    # A weight of two is two tokens.
    np.testing.assert_allclose(
        credit.batch_whitened([1.0, 4.0], weight=[2, 1]), credit.batch_whitened([1.0, 1.0, 4.0])[1:]
    )


def test_the_two_averaging_rules():
    """Acceptance 17, the hand-made case: losses 1,1 | 0,0,0,0,0 | 1,1,1."""
    losses = torch.tensor([1.0, 1, 0, 0, 0, 0, 0, 1, 1, 1])
    ids = torch.tensor([0, 0, 1, 1, 1, 1, 1, 2, 2, 2])
    found = [
        float((reduction_coefficients(torch.ones(10), ids, rule) * losses).sum())
        for rule in ("token-mean", "sequence-mean")
    ]
    assert found == pytest.approx([0.5, 2 / 3])
    # The same for values: errors of 1 and 0, halved.
    for rule, want in (("token-mean", 0.25), ("sequence-mean", 1 / 3)):
        out = value_loss(losses, losses, torch.zeros(10), reduction_coefficients(torch.ones(10), ids, rule))
        assert float(out.loss) == pytest.approx(want)


def test_kl_estimators_are_named():
    """Case H31: which one stands in the reward and which in the loss is a setting, and k1 is never a loss."""
    logp, ref = torch.tensor([-1.0]), torch.tensor([-1.5])
    assert [round(float(kl(logp, ref, e)), 6) for e in ("k1", "k2", "k3")] == [0.5, 0.125, 0.106531]
    assert PPOConfig().kl_placement == "reward" and PPOConfig().kl_estimator == "k1"
    with pytest.raises(ConfigError, match="kl_placement='loss' with kl_estimator='k1'"):
        PPOConfig(kl_placement="loss")


def test_adaptive_kl():
    assert adapted_kl_coef(0.1, 0.02, target=0.01, horizon=100, samples=10) == pytest.approx(0.1 * 1.02)
    assert adapted_kl_coef(0.1, 0.011, target=0.01, horizon=100, samples=10) == pytest.approx(0.1 * 1.01)
    assert adapted_kl_coef(0.1, -1.0, target=0.01, horizon=100, samples=10) == pytest.approx(0.1 * 0.98)


def test_a_frozen_actor_does_not_adapt_the_kl():
    trainer = make(PPOConfig(**{**FAST, **KL, "kl_target": 0.1, "kl_horizon": 64, "critic_warmup": 2}), judge=alternate)
    found = [trainer.train_step()[0]["kl/coef"] for _ in range(4)]
    assert found[:3] == [0.01] * 3 and found[3] == pytest.approx(0.01 * (1 - 0.2 * 32 / 64))


# -- learning ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"critic": "detached", "minibatches": 4, "ppo_epochs": 2},
        {"critic": "separate", "reduction": "sequence-mean"},
        {**KL, "ratio": "behaviour", "kl_target": 1.0, "kl_horizon": 64, "kl_coef": 0.001},
        {"kl_placement": "loss", "kl_estimator": "k3", "kl_coef": 0.001, "entropy_coef": 0.001},
        {"group_size": 4, "prompts_per_step": 8, "bootstrap_truncated": True, "return_lam": 1.0, "gamma": 0.99},
    ],
)
def test_learns_the_optimum(switches):
    trainer = make(PPOConfig(**{**FAST, **switches}))
    rewards = [trainer.train_step()[0]["reward/mean"] for _ in range(40)]
    assert np.mean(rewards[:3]) < 0.2 and np.mean(rewards[-5:]) > 0.9


@pytest.mark.parametrize("critic", ["shared", "detached", "separate"])
def test_critic_warm_up(critic):
    """Acceptance 9: actor identical after iterations 1-4, changed after 5; critic changed after 1."""
    config = PPOConfig(**{**FAST, **KL, "critic": critic, "critic_warmup": 4, "minibatches": 2})
    trainer = make(config, judge=alternate)
    actor, values = weights(trainer.policy.model), weights(trainer.critic.model)
    for iteration in range(1, 6):
        metrics, _ = trainer.train_step()
        assert moved(trainer.policy.model, actor) == (iteration == 5)
        assert moved(trainer.critic.model, values)
        assert ("loss/policy" in metrics) == (iteration == 5) and metrics["loss/value"] > 0
    assert trainer.learner.optimizer.step_index == 2 and trainer.critic_learner.optimizer.step_index == 10
    assert trainer.config.total_updates == 36 * 2
    # A frozen actor is trained on nothing; what the critic saw is counted.
    passes = 1 if critic != "separate" else 2
    assert trainer.counts["tokens_trained"] == trainer.counts["tokens_generated"] // 5 * (4 + passes)


def test_the_value_loss_moves_the_trunk_only_where_it_may():
    for critic in ("shared", "detached", "separate"):
        trainer = make(PPOConfig(**{**FAST, "critic": critic, "policy_coef": 0.0, "minibatches": 2}), judge=alternate)
        before = weights(trainer.policy.model)
        for _ in range(2):  # the head begins at 0 and passes no gradient on in the first update
            trainer.train_step()
        assert moved(trainer.policy.model, before) == (critic == "shared")


def test_explained_variance_grows():
    """The critic learns which prompt pays."""
    pays = lambda items: [Reward(float(task["id"] in "01")) for _, _, task in items]  # noqa: E731
    config = PPOConfig(**{**FAST, "critic": "separate", "critic_warmup": 20, "minibatches": 2})
    trainer = make(config, judge=pays)
    found = [trainer.train_step()[0]["value/explained_variance"] for _ in range(20)]
    assert found[0] == pytest.approx(0) and found[-1] > 0.9


def test_a_saturated_task_trains_nobody_but_the_critic():
    ones = lambda items: [Reward(1.0) for _ in items]  # noqa: E731
    trainer = make(PPOConfig(**{**FAST, "critic": "detached", "lam": 1.0}), judge=ones)
    metrics, groups = trainer.train_step()
    assert metrics["value/mean"] == 0 and metrics["return/mean"] == 1 and "value/explained_variance" not in metrics
    assert all((g.tree.advantage == 0).all() for g in groups) and metrics["loss/policy"] == 0


# -- what stands on the trees ------------------------------------------------------------------------------------------


def rolled(config, **kwargs):
    trainer = make(config, **kwargs)
    groups = trainer.rollout()
    trainer.judge_groups(groups)
    return trainer, groups


def test_columns_hold_what_the_equations_say():
    trainer, groups = rolled(PPOConfig(**{**FAST, "kl_coef": 0.1, "whiten": False, "lam": 0.9, "gamma": 0.95}))
    with torch.no_grad():
        trainer.critic.linear.weight.normal_(std=0.3)
        for p in trainer.reference.model.parameters():
            p.mul_(1.01)
    trainer.assign(groups)
    for group in groups[:4]:
        tree, leaf = group.tree, group.leaves[0]
        ids = torch.tensor([tree.path_ids(leaf)])
        begin = int(tree.length[0])
        with torch.no_grad():
            hidden = trainer.policy.decoder(input_ids=ids).last_hidden_state[0, begin - 1 : -1]
            values = trainer.critic.linear(hidden)[:, 0].numpy()
            mine, other = (
                p.core(input_ids=ids).logits[0, begin - 1 : -1].log_softmax(-1).gather(1, ids[0, begin:, None])[:, 0]
                for p in (trainer.policy, trainer.reference)
            )
        span = tree.span(leaf)
        np.testing.assert_allclose(tree.column("value")[span], values, atol=1e-4)
        rewards = -0.1 * (mine - other).numpy()
        rewards[-1] += tree.reward[leaf]
        want = credit.gae_values(rewards, values, gamma=0.95, lam=0.9)
        np.testing.assert_allclose(tree.advantage[span], want, atol=1e-4)
        np.testing.assert_allclose(tree.column("return")[span], want + values, atol=1e-4)


def test_old_logprobs_are_those_of_the_sampling_temperature():
    """Case H12: the ratio of the first update is 1."""
    for ratio in ("recompute", "behaviour"):
        trainer = make(PPOConfig(**{**FAST, **KL, "temperature": 0.5, "ratio": ratio}))
        metrics, groups = trainer.train_step()
        assert metrics["ratio/max"] == pytest.approx(1, abs=1e-4) and metrics["kl/reward"] == pytest.approx(0, abs=1e-5)
        if ratio == "recompute":
            tree = groups[0].tree
            span = tree.span(groups[0].leaves[0])
            np.testing.assert_allclose(tree.column("old_logprob")[span], tree.logprob[span], atol=1e-4)


def test_only_a_cut_response_bootstraps():
    """Case H19: the value after the end counts where the length limit cut a response, and nowhere else."""
    for on in (True, False):
        trainer, groups = rolled(PPOConfig(**{**FAST, "whiten": False, "bootstrap_truncated": on}))
        with torch.no_grad():
            trainer.critic.linear.bias.fill_(0.5)
            trainer.critic.linear.weight.normal_(std=0.3)
        tree, ended = groups[0].tree, groups[0].leaves[0]
        cut = groups[1].leaves[0]
        assert groups[1].tree.stop[cut] == Stop.LENGTH
        tree.stop[ended] = Stop.EOS
        trainer.assign(groups)
        for group, leaf, after in ((groups[0], ended, 0.0), (groups[1], cut, on)):
            t = group.tree
            v = t.column("value")[t.span(leaf)].astype(np.float64)
            end = float(t.value[leaf]) if after else 0.0
            want = credit.gae_values([0, 0, 0, t.reward[leaf]], v, gamma=1, lam=0.95, bootstrap=end)
            np.testing.assert_allclose(t.advantage[t.span(leaf)], want, atol=1e-5)
            assert math.isnan(t.value[leaf]) == (not after)
        if on:
            ids = torch.tensor([groups[1].tree.path_ids(cut)])
            with torch.no_grad():
                want = trainer.critic.linear(trainer.policy.decoder(input_ids=ids).last_hidden_state[0, -1])
            assert float(groups[1].tree.value[cut]) == pytest.approx(float(want), abs=1e-4)


def test_observations_take_no_credit():
    """Case H06: a1 o1 a2 o2, reward 1 at the end, values 0: A(a2) = 1, A(a1) = gamma, nothing on what the world wrote."""
    for gamma in (0.9, 0.0):
        trainer, groups = rolled(PPOConfig(**{**FAST, "whiten": False, "gamma": gamma, "lam": 1.0}))
        tree = TokenTree([5, 6])
        last = 0
        for ids, mine in (([7], True), ([8], False), ([9], True), ([10], False)):
            last = tree.add(last, ids, sampled=mine, logprobs=[-1.0] if mine else None)
        tree.reward[last] = 1.0
        group = replace(groups[0], tree=tree, leaves=[last], rewards=np.array([1.0]), results=[Reward(1.0)])
        trainer.assign([group])
        assert tree.advantage.tolist() == pytest.approx([0, 0, gamma, 0, 1, 0])
        assert tree.weight.tolist() == [0, 0, 1, 0, 1, 0]


def test_failed_rewards_leave_the_buffer():
    """Case H05: a sample without a reward is counted and moves nothing, neither whitening nor loss."""

    def some(items):
        return [RewardError("grader died") if i == 3 else Reward(100.0 * (i == 3) + i % 2) for i in range(len(items))]

    trainer = make(PPOConfig(**{**FAST, "whiten": True}), judge=some)
    metrics, groups = trainer.train_step()
    assert metrics["reward/failed"] == metrics["reward/missing"] == 1
    where = [(g, leaf) for g in groups for leaf in g.leaves]
    lost, leaf = where[3]
    span = lost.tree.span(leaf)
    assert (lost.tree.weight[span] == 0).all() and (lost.tree.advantage[span] == 0).all()
    kept = np.concatenate([g.tree.advantage[g.tree.weight > 0] for g in {id(g.tree): g for g in groups}.values()])
    assert len(kept) == 31 * 4 == metrics["tokens/trained"]
    assert kept.mean() == pytest.approx(0, abs=1e-6) and kept.var(ddof=1) == pytest.approx(1, abs=1e-5)
    nothing = make(PPOConfig(**FAST), judge=lambda items: [Reward(math.nan) for _ in items])
    before = weights(nothing.policy.model)
    metrics, _ = nothing.train_step()
    assert metrics["reward/missing"] == 32 and "loss" not in metrics and not moved(nothing.policy.model, before)


def test_rewards_are_clipped_and_counted():
    huge = lambda items: [Reward(-50.0 if i % 2 else 0.5) for i in range(len(items))]  # noqa: E731
    trainer, groups = rolled(PPOConfig(**{**FAST, "whiten": False, "lam": 1.0}), judge=huge)
    trainer.assign(groups)
    ends = sorted({float(g.tree.column("return")[g.tree.span(leaf)][-1]) for g in groups for leaf in g.leaves})
    assert ends == [-10.0, 0.5] and trainer._numbers["reward/clipped"] == 0.5


# -- several reward parts ----------------------------------------------------------------------------------------------


def two_parts(items):
    own = want_ten(items)
    return [Reward(r.value, {"right": r.value, "long": 0.1 * i}) for i, r in enumerate(own)]


def test_one_part_of_weight_one_is_the_scalar_case_exactly():
    named = lambda items: [Reward(r.value, {"all": r.value}) for r in want_ten(items)]  # noqa: E731
    config = PPOConfig(**{**FAST, **KL, "minibatches": 2, "critic": "separate"})
    one = make(config, judge=named)
    two = make(replace(config, parts=(PartConfig(name="all"),)), judge=named)
    for _ in range(3):
        a, b = one.train_step()[0], two.train_step()[0]
        assert a["loss"] == b["loss"] and a["loss/value"] == b["loss/value"] and a["grad_norm"] == b["grad_norm"]
    assert not moved(two.policy.model, weights(one.policy.model))
    assert not moved(two.critic.model, weights(one.critic.model))


def test_parts_are_whitened_before_they_are_weighted():
    parts = (PartConfig(name="right", weight=0.8), PartConfig(name="long", weight=0.2, lam=1.0))
    trainer, groups = rolled(PPOConfig(**{**FAST, **KL, "parts": parts}), judge=two_parts)
    trainer.assign(groups)
    trees = {id(g.tree): g.tree for g in groups}.values()

    def column(name):
        return np.concatenate([t.column(name)[t.weight > 0] for t in trees]).astype(np.float64)

    white = [credit.batch_whitened(column(f"advantage/{n}")) for n in ("right", "long")]
    np.testing.assert_allclose(column("advantage"), 0.8 * white[0] + 0.2 * white[1], atol=1e-5)
    assert all((column(f"value/{n}") == 0).all() for n in ("right", "long"))
    # lambda 1 and values 0: every token of a response gets its own part's reward.
    span = groups[5].tree.span(groups[5].leaves[0])
    np.testing.assert_allclose(groups[5].tree.column("advantage/long")[span], 0.1 * 5, atol=1e-6)
    metrics = trainer.update(groups)
    assert metrics["loss/value"] == pytest.approx(
        0.5 * (metrics["value/error/right"] + metrics["value/error/long"]), rel=1e-4
    )


def test_a_weight_schedule_and_dense_rewards():
    config = PPOConfig(
        **{**FAST, "whiten": False, "lam": 1.0}, parts=(PartConfig(name="right"), PartConfig(name="long"))
    )
    schedule = lambda step: {"long": 0.2 * (1 - step / 2)}  # noqa: E731
    dense = lambda group, leaf: {"long": np.full(4, 0.25)}  # noqa: E731
    trainer, groups = rolled(config, judge=two_parts, part_weights=schedule, token_rewards=dense)
    trainer.assign(groups)
    tree = groups[3].tree
    span = tree.span(groups[3].leaves[0])
    want = 0.3 + 0.25 * np.array([4, 3, 2, 1])
    np.testing.assert_allclose(tree.column("advantage/long")[span], want, atol=1e-6)
    np.testing.assert_allclose(tree.advantage[span], tree.column("advantage/right")[span] + 0.2 * want, atol=1e-5)
    found = [make(config, judge=two_parts, part_weights=schedule).train_step()[0]["weight/long"]]
    trainer.step = 1
    trainer.assign(groups)
    assert found == [0.2] and trainer._numbers["weight/long"] == pytest.approx(0.1)
    bad = make(config, judge=two_parts, token_rewards=lambda g, leaf: np.zeros(9))
    with pytest.raises(RewardError, match=r"token_rewards gave \(9,\) for the part 'right'.*has 4 policy tokens"):
        bad.train_step()


def test_a_missing_part_leaves_the_sample_out():
    config = PPOConfig(**FAST, parts=(PartConfig(name="right"), PartConfig(name="long")))

    def some(items):
        return [Reward(1.0, {"right": 1.0, **({"long": 0.5} if i % 4 else {})}) for i in range(len(items))]

    metrics, _ = make(config, judge=some).train_step()
    assert metrics["reward/missing"] == 8 and metrics["reward/failed"] == 0 and metrics["tokens/trained"] == 24 * 4
    with pytest.raises(RewardError, match="no reward has the part 'long'; its parts are: right"):
        make(config, judge=lambda items: [Reward(1.0, {"right": 1.0})] * len(items)).train_step()


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"ppo_epochs": 0}, "ppo: ppo_epochs=0: give at least 1"),
        ({"minibatches": 65}, "minibatches=65 exceeds prompts_per_step=64"),
        ({"lam": 1.1}, r"lam=1.1: give a number in \[0, 1\]"),
        ({"gamma": -0.1}, "gamma=-0.1"),
        ({"return_lam": 2.0}, "return_lam=2.0"),
        ({"value_coef": 0.0}, "value_coef=0: the critic would never learn"),
        ({"value_clip": -1.0}, "value_clip=-1.0: give 0 or more"),
        ({"reward_clip": math.inf}, "reward_clip=inf"),
        ({"critic_warmup": 100}, "critic_warmup=100: give 0 or more, and fewer than steps=100"),
        ({"kl_coef": 0.0, "kl_target": 0.1}, "kl_target=0.1, kl_coef=0.0: adapting needs both"),
        ({"kl_target": 0.1, "kl_horizon": 1}, "kl_horizon=1: give at least half the samples"),
        ({"kl_placement": "both"}, "kl_placement='both' with kl_estimator='k1'"),
        ({"parts": (PartConfig(name="a"), PartConfig(name="a"))}, r"parts=\['a', 'a'\]: name each part once"),
        ({"parts": (PartConfig(name="a", lam=3.0),)}, "parts 'a' lam=3.0"),
        ({"parts": (PartConfig(name="a", weight=math.nan),)}, "parts 'a' weight=nan"),
        ({"group_size": 0}, "group_size=0: give at least 1"),
    ],
)
def test_config_refuses(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        PPOConfig(**kwargs)


def test_a_critic_that_does_not_fit_is_refused():
    policy = Policy(tiny("llama"), IntTokenizer())
    arguments = (policy, TorchEngine(policy), [{"id": "0", "prompt": [5]}], lambda t: t["prompt"], want_ten)
    with pytest.raises(ConfigError, match=r"the critic is separate with heads \('value',\), the settings say shared"):
        PPOTrainer(*arguments, PPOConfig(), critic=Critic(policy, kind="separate"))
    with pytest.raises(ConfigError, match=r"heads \('a',\), the settings say shared with heads \('value',\)"):
        PPOTrainer(*arguments, PPOConfig(), critic=Critic(policy, heads=("a",)))
    other = Policy(tiny("llama"), IntTokenizer())
    with pytest.raises(ConfigError, match="a shared critic is made of this very policy"):
        PPOTrainer(*arguments, PPOConfig(), critic=Critic(other))
