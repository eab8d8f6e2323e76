"""The recipe end to end: smoke profile, resume, arms, verdict, the paper profile with a tiny model in place of the large one."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from forethought import recipes
from forethought.config import apply_overrides, from_dict, to_dict
from forethought.envs.congruence import mixture, pieces, puzzles
from forethought.errors import ConfigError, DataError, RewardError
from forethought.learn.offline import SFTConfig, SFTTrainer, sft_objective
from forethought.learn.online import Group
from forethought.learn.ppo import PPOConfig, PPOTrainer
from forethought.models.chat import ChatRenderer
from forethought.models.load import save_pretrained
from forethought.models.policy import Policy
from forethought.models.tiny import byte_tokenizer, piece_tokenizer, tiny_model
from forethought.models.torch_engine import TorchEngine
from forethought.recipes import rlsp
from forethought.recipes.jobs import Job
from forethought.recipes.rlsp.arms import ARMS, _trainer, _Watch, hard_tasks
from forethought.recipes.rlsp.estimators import ReinforceConfig, ReinforceTrainer, online_config
from forethought.recipes.rlsp.measure import at_budget, vote_curve
from forethought.recipes.rlsp.signals import make_reward, separate_parts
from forethought.recipes.rlsp.world import (
    FilesConfig,
    MiniatureConfig,
    demonstration_records,
    from_files,
    miniature,
    overlap,
    record_trees,
)
from forethought.rundir import RunDir, read_metrics
from forethought.tree.tree import TokenTree

SMOKE = rlsp.PROFILES["smoke"]
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smoke")
    with RunDir.create(folder, SMOKE) as run:
        run.write_json("results.json", rlsp.run(SMOKE, run, profile="smoke"))
    return folder


def test_smoke_profile_has_every_piece(smoke):
    found = json.loads((smoke / "results.json").read_text())
    assert found["schema"] == 1 and found["recipe"] == "rlsp" and found["verdict"] == "not shown"
    assert list(found["arms"]) == ["base", "SFT", "outcome only", "outcome + length", "majority vote"]
    for arm in found["arms"].values():
        assert 0 <= arm["heldout accuracy"]["mean"] <= 1 and arm["heldout accuracy"]["n"] == 1
    wanted = ("tries", "distinct tries", "recovered", "repetition", "length", "truncated", "first right", "final right")
    for name in wanted:
        assert f"heldout {name}" in found["arms"]["SFT"] and f"heldout greedy {name}" in found["arms"]["SFT"]
    budget = found["budget"]
    assert budget["outcome only"]["verifier_calls"] == 3 * 8 and budget["base"]["tokens_trained"] == 0
    assert budget["SFT"]["tokens_trained"] > 0 and budget["majority vote"]["tokens_evaluated"] > 0
    rows = read_metrics(smoke)
    steps = [r["step"] for r in rows if r["arm"] == "outcome + length"]
    assert steps == [0, 1, 2, 3]
    made = sum(r.get("tokens/generated", 0) for r in rows if r["arm"] == "outcome + length")
    assert made == budget["outcome + length"]["tokens_generated"]
    notes = "\n".join(found["notes"])
    assert "not measured: outcome + length above outcome only in accuracy" in notes and "BY" not in notes


def test_every_part_is_logged_and_they_sum_to_the_reward(smoke):
    """Acceptance 4, in a run: the means of the weighted parts sum to the mean reward."""
    for arm, weight in (("outcome only", 0.0), ("outcome + length", 1.0)):
        rows = [r for r in read_metrics(smoke) if r["arm"] == arm and r["step"] > 0]
        for row in rows:
            weighted = sum(v for k, v in row.items() if k.startswith("reward/weighted/"))
            assert weighted == pytest.approx(row["reward/mean"], abs=1e-6)
            assert row["weight/length"] == weight and row["weight/correctness"] == 1
            assert {"part/length/mean", "part/length/std", "part/correctness/mean", "faults/share"} <= set(row)
            assert {"train/tries", "train/distinct tries", "train/repetition", "kl/reward"} <= set(row)
            assert (row["reward/weighted/length"] == 0) == (weight == 0)


def test_a_finished_piece_is_never_run_again(smoke, monkeypatch):
    def no(*args, **kwargs):
        raise AssertionError("trained again")

    monkeypatch.setattr(PPOTrainer, "train_step", no)
    monkeypatch.setattr(SFTTrainer, "train_step", no)
    with RunDir.create(smoke, SMOKE, resume=True) as run:
        again = rlsp.run(SMOKE, run, profile="smoke")
    assert again["arms"] == json.loads((smoke / "results.json").read_text())["arms"]


# -- a bench without a run --


def bench_of(words=None, *, seed=0, template=None):
    tokenizer = words or piece_tokenizer(pieces(MiniatureConfig().puzzle))
    model = tiny_model(len(tokenizer), width=16, layers=1, heads=2, context=256, seed=seed, init_std=0.2)
    policy = Policy(model, tokenizer)
    renderer = ChatRenderer(tokenizer)
    return SimpleNamespace(
        policy=policy,
        engine=TorchEngine(policy, max_rows=64),
        tokenizer=tokenizer,
        renderer=renderer,
        encode=lambda task: renderer.prompt_ids(task["prompt"]),
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
    )


def trainer_of(config, *, exploration="length", outcome=True, bench=None, decay=False):
    bench = bench or bench_of()
    reward = make_reward(
        config.signals, bench.decode, outcome=outcome, exploration=exploration, decay=decay, puzzles=True
    )
    job = Job("arm", 0, print, config)
    return _trainer(config, job, bench, puzzles(20), reward, _Watch(reward, bench, True)), reward


def weights(policy):
    return {n: p.detach().clone() for n, p in policy.model.named_parameters()}


def test_weight_zero_is_the_outcome_only_run_bit_for_bit():
    """Acceptance 4: the same weights after two rollouts, whatever a part of weight 0 says."""
    runs = []
    for signals, exploration in ((SMOKE.signals, "none"), (replace(SMOKE.signals, w_e=0.0), "length")):
        config = replace(SMOKE, signals=signals)
        trainer, _ = trainer_of(config, exploration=exploration)
        rewards = [trainer.train_step()[0]["reward/mean"] for _ in range(2)]
        runs.append((rewards, weights(trainer.policy)))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(runs[0][1][n], runs[1][1][n]) for n in runs[0][1])


def test_one_separate_part_is_the_scalar_run():
    runs = []
    for separate in (False, True):
        config = replace(SMOKE, signals=replace(SMOKE.signals, separate=separate))
        trainer, reward = trainer_of(config, exploration="none")
        if separate:
            assert separate_parts(reward) == ("correctness",)
        for _ in range(2):
            trainer.train_step()
        runs.append(weights(trainer.policy))
    assert all(torch.equal(runs[0][n], runs[1][n]) for n in runs[0])


def test_separate_parts_follow_the_schedule():
    config = replace(SMOKE, signals=replace(SMOKE.signals, separate=True, decay_steps=2))
    trainer, _ = trainer_of(config, decay=True)
    seen = [trainer.train_step()[0]["weight/length"] for _ in range(3)]
    assert trainer.critic.heads == ("correctness", "length")
    assert seen == pytest.approx([1, 0.5, 0])


def test_the_schedule_goes_on_where_it_was(tmp_path):
    """A run that is stopped in the middle has the weights, and the numbers, of an unbroken one."""
    from forethought.learn.session import fit

    config = replace(SMOKE, signals=replace(SMOKE.signals, decay_steps=4), ppo=replace(SMOKE.ppo, steps=4))

    def train(folder, steps, resume):
        trainer, reward = trainer_of(config, decay=True)
        with RunDir.create(folder, {"x": 1}, resume=resume) as run:
            fit(trainer, run, steps=steps, extra=reward.state_dict, restore_extra=reward.load_state_dict)
            return [{k: v for k, v in r.items() if not k.startswith("time/")} for r in run.metrics()]

    whole = train(tmp_path / "whole", 4, False)
    train(tmp_path / "broken", 2, False)
    assert train(tmp_path / "broken", 4, True) == whole
    assert [r["weight/length"] for r in whole] == pytest.approx([1, 0.75, 0.5, 0.25])


def test_length_only_pays_a_wrong_answer_as_much_as_a_right_one():
    reward = make_reward(SMOKE.signals, None, outcome=False, exploration="length", decay=False, puzzles=True)
    assert reward.combiner.weights() == {"correctness": 0.0, "length": 1.0, "creativity": 0.0}
    both = make_reward(SMOKE.signals, None, outcome=True, exploration="both", decay=False, puzzles=True)
    assert both.combiner.weights() == {"correctness": 0.8, "length": 0.8, "creativity": 0.2}


def test_arms_differ_in_what_the_table_says():
    assert ARMS["outcome only"] == replace(ARMS["outcome + length"], exploration="none")
    assert ARMS["length only"] == replace(ARMS["outcome + length"], outcome=False)
    assert ARMS["decaying length"] == replace(ARMS["outcome + length"], decay=True)
    assert ARMS["outcome + length, no SFT"] == replace(ARMS["outcome + length"], start="base")
    assert ARMS["base"].stage == ARMS["SFT"].stage == "none" and ARMS["majority vote"].stage == "vote"


def test_faults_stop_the_run(monkeypatch):
    """Acceptance 12: a scorer that keeps failing ends the run with a message, at the configured share."""
    config = replace(SMOKE, signals=replace(SMOKE.signals, fault_alert=0.0, fault_stop=0.05))
    trainer, reward = trainer_of(config, exploration="creativity")
    calls = iter(range(10_000))
    monkeypatch.setattr(
        reward.combiner.parts[2], "count", lambda p, r: 1 if next(calls) % 5 else (_ for _ in ()).throw(OSError("down"))
    )
    with pytest.raises(RewardError, match=r"creativity: exception \d+\), more than the limit of 5\.0%"):
        for _ in range(10):
            metrics, groups = trainer.train_step()
            failed = [r for g in groups for r in g.results if isinstance(r, RewardError)]
            n = sum(len(g.leaves) for g in groups)
            assert metrics["faults/dropped"] == pytest.approx(len(failed) / n)
            assert all("OSError: down" in str(f) for f in failed) and (failed or n < 5)


# -- estimators --


def test_estimators_without_a_critic():
    ppo = PPOConfig(steps=2, prompts_per_step=8, minibatches=2, max_new_tokens=16, kl_coef=0.05)
    rloo = online_config(ppo, "rloo", 4)
    assert (rloo.advantage, rloo.group_size, rloo.prompts_per_step, rloo.updates_per_rollout) == (
        "leave-one-out",
        4,
        2,
        2,
    )
    single = online_config(ppo, "reinforce", 1)
    assert isinstance(single, ReinforceConfig) and single.group_size == 1 and single.kl_coef == 0.05
    with pytest.raises(ConfigError, match="group_size=1"):
        online_config(ppo, "rloo", 1)
    for estimator in ("reinforce", "rloo"):
        config = replace(SMOKE, estimator=estimator, samples_per_prompt=2)
        trainer, _ = trainer_of(config)
        before = weights(trainer.policy)
        metrics, groups = trainer.train_step()
        assert sum(len(g.leaves) for g in groups) == 8 and math.isfinite(metrics["loss"])
        assert any(not torch.equal(before[n], w) for n, w in weights(trainer.policy).items())


def test_reinforce_whitens_over_the_rollout_and_leaves_failures_out():
    bench = bench_of()
    config = ReinforceConfig(steps=1, prompts_per_step=4, group_size=1, max_new_tokens=4)
    trainer = ReinforceTrainer(bench.policy, bench.engine, puzzles(4), bench.encode, lambda items: [], config)
    groups = []
    for reward in (1.0, 0.0, math.nan, 2.0):
        tree = TokenTree([5, 6])
        leaf = tree.add(0, [7, 8], sampled=True, logprobs=[-1.0, -1.0])
        groups.append(Group({"id": "x"}, tree, [leaf], rewards=np.array([reward])))
    trained = trainer.assign(groups)
    assert len(trained) == 3 and groups[2].tree.weight.sum() == 0
    got = [float(g.tree.advantage[2]) for g in (groups[0], groups[1], groups[3])]
    assert got == pytest.approx([0.0, -1.0, 1.0], abs=1e-6)


# -- stage 1 (acceptance 15) --


def test_sft_counts_the_response_only():
    tokenizer = piece_tokenizer(pieces(MiniatureConfig().puzzle))
    rows = demonstration_records(MiniatureConfig(train=5, demonstrations=3))
    trees = record_trees(ChatRenderer(tokenizer), rows)
    policy = Policy(tiny_model(len(tokenizer), width=16, layers=1, heads=2, init_std=0.2), tokenizer)
    total, count = 0.0, 0
    for row in rows:
        prompt = tokenizer(row["prompt"])["input_ids"]
        answer = [*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            logp = policy.model(input_ids=torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        total -= sum(float(logp[len(prompt) - 1 + i, token]) for i, token in enumerate(answer))
        count += len(answer)
    trainer = SFTTrainer(policy, trees, SFTConfig(steps=1, batch_size=3))
    metrics = trainer.learner.update(trees, sft_objective)
    assert metrics["loss"] == pytest.approx(total / count, rel=1e-5) and metrics["tokens/trained"] == count


@pytest.mark.parametrize(
    "record",
    [
        {"id": "r7", "prompt": "find", "completion": ""},
        {"id": "r7", "prompt": "find", "completion": "  \n"},
        {"id": "r7", "messages": [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": ""}]},
    ],
)
def test_an_empty_response_is_an_error_that_names_the_record(record):
    tokenizer = byte_tokenizer(chat_template=TEMPLATE)
    good = {"id": "ok", "prompt": "a", "completion": "b"}
    with pytest.raises(DataError, match="record 'r7': its response is empty"):
        record_trees(ChatRenderer(tokenizer), [good, record])
    with pytest.raises(DataError, match="no records"):
        record_trees(ChatRenderer(tokenizer), [])


# -- the worlds --


def test_pieces_are_tokens_and_come_back():
    tokenizer = piece_tokenizer(pieces(MiniatureConfig().puzzle))
    row = next(r for r in mixture(puzzles(20), n=40) if r["kind"] == "multi_try")
    for text in (row["prompt"], row["completion"]):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text and tokenizer.eos_token_id not in ids
    assert len(tokenizer("try 7: 26 mod 17=9 no. ")["input_ids"]) == 9


def test_evaluation_and_training_puzzles_are_different():
    world = miniature(MiniatureConfig(train=200, heldout=100), "x")
    assert not {t["id"] for t in world.train} & {t["id"] for t in world.suites[0].tasks}
    tuning = miniature(MiniatureConfig(train=200, heldout=100, split="validation"), "x")
    assert not {t["id"] for t in tuning.suites[0].tasks} & {t["id"] for t in world.suites[0].tasks}


def test_near_duplicates_are_left_out():
    tests = ["What is the sum of the first 20 odd numbers that are not divisible by three?", "Solve x+1=2"]
    train = [
        "what is the  SUM of the first 20 odd numbers that are not divisible by three?",  # case and blanks
        "Please: what is the sum of the first 20 odd numbers that are not divisible by three or so?",
        "What is the sum of the first 30 odd numbers?",
        "Solve x-1=2",  # another problem
        "Solve x+1=2",
    ]
    assert overlap(train, tests) == {0, 1, 4}


def test_files_without_what_stands_in_the_evaluation(tmp_path):
    rows = [
        {"problem": "Solve x+1=2", "answer": "1"},
        {"problem": "Solve x-1=2", "answer": "3"},
        {"problem": "No gold", "answer": ""},
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "test.jsonl").write_text(json.dumps(rows[0]) + "\n")
    suites = [{"name": "t", "path": str(tmp_path / "test.jsonl")}, {"name": "s", "path": str(tmp_path / "test.jsonl"), "template": "steps"}]  # fmt: skip  # noqa: E501
    config = from_dict(FilesConfig, {"train": str(tmp_path / "train.jsonl"), "suites": suites})
    world = from_files(config, "m")
    assert [t["answer"] for t in world.train] == ["3"]
    assert world.dropped == {"no answer": 1, "also in evaluation": 1}
    assert world.train[0]["prompt"] == [{"role": "user", "content": "Problem: Solve x-1=2"}]
    step = world.suites[1].tasks[0]["prompt"][0]["content"]
    assert step.endswith("Problem: Solve x+1=2") and r"$\boxed{answer}$" in step
    (tmp_path / "train.jsonl").write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(DataError, match="none of its 1 problems is left"):
        from_files(config, "m")


def test_hard_problems_are_those_that_the_start_model_gets_wrong():
    tasks = puzzles(6)
    rows = [SimpleNamespace(task=str(t["id"]), right=i < 2) for i, t in enumerate(tasks)]
    bench = SimpleNamespace(look=SimpleNamespace(sample=lambda suite, *_: SimpleNamespace(rows=rows)))
    assert hard_tasks(SMOKE, bench, tasks) == tasks[2:]
    for row in rows:
        row.right = True
    with pytest.raises(DataError, match="answers all 6 training problems right"):
        hard_tasks(SMOKE, bench, tasks)


# -- measuring --


def test_votes_at_a_token_budget():
    votes = {"1": [0.1, 10.0], "2": [0.2, 20.0], "4": [0.3, 40.0]}
    assert at_budget(votes, 5) == (1, 0.1, 10.0)
    assert at_budget(votes, 20) == (2, 0.2, 20.0)
    assert at_budget(votes, 21) == (4, 0.3, 40.0)  # never fewer tokens than the method has
    assert at_budget(votes, 900) == (4, 0.3, 40.0)


def test_vote_curve():
    row = lambda answer, right, length: SimpleNamespace(answer=answer, right=right, length=length)  # noqa: E731
    one = [row("3", False, 4), row("5", True, 6), row("5", True, 10), row("4", False, 4)]
    two = [row(None, False, 5), row(None, False, 5), row("2", False, 5), row("2", False, 5)]
    result = SimpleNamespace(samples=4, by_task=lambda: {"a": one, "b": two})
    assert vote_curve(result) == {"1": [0.0, 4.5], "2": [0.0, 10.0], "4": [0.5, 22.0]}


def test_the_verdict_follows_from_the_numbers():
    def table(both, only, alone, vote, tries=(6.0, 3.0), lengths=(60.0, 90.0)):
        jitter = (0.0, 0.01, -0.01)
        rows = lambda a, t, n: [  # noqa: E731
            {"heldout accuracy": a + j, "heldout distinct tries": t + j, "heldout length": n} for j in jitter
        ]
        return {
            "outcome + length": rows(both, tries[0], lengths[0]),
            "outcome only": [
                {**r, "heldout accuracy": r["heldout accuracy"] + d}
                for r, d in zip(rows(only, tries[1], 30.0), (0.005, 0, -0.005), strict=True)
            ],  # fmt: skip  # noqa: E501
            "length only": [
                {**r, "heldout accuracy": r["heldout accuracy"] + d}
                for r, d in zip(rows(alone, 9.0, lengths[1]), (0.005, 0, -0.005), strict=True)
            ],  # fmt: skip  # noqa: E501
            "majority vote": [{"heldout accuracy": vote + d} for d in (0.0, 0.01, -0.01)],
        }

    config = rlsp.RLSPConfig()
    verdict = lambda *a, **k: rlsp.judge(config, table(*a, **k), "heldout")  # noqa: E731
    assert verdict(0.8, 0.6, 0.2, 0.3)[0] == "shown"
    assert verdict(0.8, 0.6, 0.2, 0.9)[0] == "not shown"
    assert verdict(0.8, 0.6, 0.8, 0.3)[0] == "not shown"
    assert verdict(0.8, 0.6, 0.2, 0.3, tries=(3.0, 3.0))[0] == "not shown"
    assert verdict(0.8, 0.6, 0.2, 0.3, lengths=(60.0, 50.0))[0] == "not shown"
    assert verdict(0.5, 0.6, 0.2, 0.3)[0] == "reversed"
    _, conditions, differences = verdict(0.8, 0.6, 0.2, 0.9)
    assert [met for _, met in conditions] == [True, True, True, True, False]
    assert differences["outcome + length minus outcome only"]["mean"] == pytest.approx(0.2)


# -- the paper profile --


@pytest.fixture(scope="module")
def tiny_chat(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "model"
    tokenizer = byte_tokenizer(chat_template=TEMPLATE)
    save_pretrained(tiny_model(len(tokenizer), width=16, layers=1, heads=2, context=2048), tokenizer, folder)
    return folder


def test_paper_profile_resolves_and_runs_with_a_tiny_model(tiny_chat, tmp_path):
    paper = rlsp.PROFILES["paper"]
    assert from_dict(rlsp.RLSPConfig, to_dict(paper)) == paper
    ppo = paper.ppo
    assert (ppo.prompts_per_step, ppo.group_size, ppo.minibatches, ppo.ppo_epochs) == (512, 1, 4, 1)
    assert (ppo.kl_coef, ppo.kl_estimator, ppo.kl_placement, ppo.gamma, ppo.lam) == (0.05, "k1", "reward", 1.0, 0.95)
    assert (ppo.optim.lr, ppo.critic_optim.lr, ppo.optim.beta2, ppo.critic_warmup) == (2e-7, 2e-6, 0.95, 4)
    assert (ppo.clip_low, ppo.clip_high, ppo.value_clip, ppo.reward_clip, ppo.entropy_coef) == (0.2, 0.2, 0.2, 10, 0)
    assert (ppo.temperature, ppo.max_new_tokens, paper.eval_tokens, paper.signals.c) == (0.7, 4096, 8192, 1000)
    assert round(0.03 * ppo.steps * ppo.minibatches, -1) == ppo.optim.warmup_steps
    problems = [{"problem": f"What is {i}+{i}?", "answer": str(2 * i)} for i in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(p) + "\n" for p in problems[:6]))
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(p) + "\n" for p in problems[6:]))
    demos = [{"id": i, "messages": [{"role": "user", "content": "2+3"}, {"role": "assistant", "content": "wait, 5"}]} for i in range(3)]  # fmt: skip  # noqa: E501
    (tmp_path / "demos.jsonl").write_text("".join(json.dumps(d) + "\n" for d in demos))
    suites = [{**to_dict(s), "path": str(tmp_path / "test.jsonl")} for s in paper.files.suites if "aime" not in s.name]
    small = apply_overrides(
        paper,
        [
            f"model={tiny_chat}",
            f"files.train={tmp_path / 'train.jsonl'}",
            f"files.suites={json.dumps(suites)}",
            f"files.demonstrations={tmp_path / 'demos.jsonl'}",
            "device=cpu",
            "dtype=fp32",
            "keep_models=false",
            "arms=[base,SFT,'outcome + length, no SFT',outcome only,majority vote]",
            "curve_problems=1",
            "eval_tokens=4",
            "signals.cap=2",
            "ppo.steps=2",
            "ppo.prompts_per_step=4",
            "ppo.max_new_tokens=4",
            "ppo.minibatches=2",
            "ppo.critic_warmup=1",
            "sft.epochs=1",
            "ppo.optim.lr=1e-3",
        ],
    )
    with RunDir.create(tmp_path / "run", small) as run:
        found = rlsp.run(small, run, profile="paper")
    assert found["arms"]["base"]["math500 step format accuracy"]["n"] == 1  # the start model under both templates
    assert found["arms"]["SFT"]["math500 backtrack"]["mean"] >= 0
    assert found["budget"]["outcome + length, no SFT"]["verifier_calls"] == 6
    assert found["dropped"] == {"no answer": 0, "also in evaluation": 0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["arms=[outcome olny]"], "did you mean 'outcome only'"),
        (["arms=[]"], "give at least one, each once"),
        (["seeds=[0,0]"], "each once"),
        (["workers=-1"], "workers=-1"),
        (["signals.cap=112"], "cap the paid length below the limit"),
        (["signals.mix=1.2"], "signals.mix=1.2"),
        (["signals.floor=0"], "floor=0.0: give a positive length"),
        (["signals.form=linear", "signals.cap=null"], "form='linear' needs a cap"),
        (["signals.separate=true", "signals.standardise=true"], "choose one"),
        (["signals.separate=true", "estimator=rloo"], "needs estimator='ppo'"),
        (["estimator=rloo", "samples_per_prompt=1"], "estimator='rloo': online: group_size=1"),
        (["signals.fault_stop=0.001"], "alert <= stop"),
        (["signals.grader.model=x"], "give base_url and model, or neither"),
        (["model=some/model"], "files.train is empty"),
        (["model=some/model", "files.train=x.jsonl"], "files.demonstrations, or choose the arms"),
        (["model=some/model", "files.train=x.jsonl"], "pay creativity need signals.grader.base_url"),
        (["ppo.minibatches=200"], "minibatches=200 exceeds"),
        (["signals.wc=1"], "did you mean 'w_c'"),
        (["miniature.puzzle.min_p=5"], "top < min_p"),
        (["miniature.mix.direct=0.9"], "make them sum to 1"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        apply_overrides(rlsp.PROFILES["mini"], settings)


def test_a_missing_file_is_named_before_a_model_is_loaded(tmp_path):
    config = apply_overrides(rlsp.PROFILES["paper"], ["files.train=/nowhere/math.jsonl", "model=/nowhere/model"])
    with RunDir.create(tmp_path / "run", config) as run, pytest.raises(DataError, match="math500.jsonl"):
        rlsp.run(config, run, profile="paper")


def test_catalogue():
    assert recipes.find("rlsp").paper.endswith("2502.06773")
    assert set(recipes.load("rlsp").PROFILES) == {"smoke", "mini", "paper"}
