"""`forethought train ppo`: it learns, leaves a critic beside the model, resumes exactly, and refuses what cannot be."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from forethought.cli import main
from forethought.learn.online import OnlineConfig
from forethought.learn.ppo import PPOConfig
from forethought.models.critic import Critic
from forethought.models.load import load_model, save_pretrained
from forethought.models.policy import Policy
from forethought.models.tiny import char_tokenizer, tiny_model
from forethought.recipes.own_grpo import batch_arithmetic
from tinyjob import make_job, metrics, results, write


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    make_job(folder)
    return folder


@pytest.fixture
def job(made, tmp_path, monkeypatch):
    shutil.copytree(made, tmp_path / "job")
    monkeypatch.chdir(tmp_path / "job")
    return tmp_path / "job"


def ppo(*args, reward="share"):
    command = ["train", "ppo", "--model", "model", "--data", "data.jsonl", "--reward", f"rewards.py:{reward}"]
    settings = ["prompts_per_step=16", "max_new_tokens=5", "optim.lr=0.01", "critic_optim.lr=0.01", "steps=4"]
    return main([*command, "--dtype", "fp32", *settings, "kl_coef=0.001", *args])


def policy_of(folder):
    return Policy(*load_model(folder, dtype="fp32", device="cpu"))


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_a_job_learns_and_leaves_its_critic(job, capsys, critic):
    settings = ["steps=20", "minibatches=2", "critic_warmup=2", f"critic={critic}", "--out", "run"]
    assert ppo(*settings, "--eval-data", "held_out.jsonl") == 0
    said = capsys.readouterr().err
    assert "16 prompts x 1 sample = 16 rollouts a step, 2 updates; 20 steps, each on all 10 records" in said
    found = results("run")
    assert found["recipe"] == "train ppo" and found["verdict"] == "shown"
    assert found["arms"]["before"]["reward"]["mean"] < 0.3 and found["arms"]["after"]["reward"]["mean"] > 0.7
    rows = metrics("run")
    assert "loss/policy" not in rows[1] and rows[1]["loss/value"] > 0 and rows[3]["loss/policy"] is not None
    assert rows[-1]["value/explained_variance"] is not None and rows[-1]["kl/coef"] == 0.001
    AutoModelForCausalLM.from_pretrained("run/model")
    assert Critic.load("run/model", policy_of("run/model")).kind == critic


def test_it_resumes_exactly(job):
    assert ppo("--out", "whole", "minibatches=2") == 0
    assert ppo("--out", "parts", "minibatches=2", "steps=2") == 0
    assert ppo("--out", "parts", "minibatches=2", "--resume") == 0
    assert metrics("parts") == metrics("whole")


def test_parts_from_a_file(job):
    Path("more.py").write_text(
        "from forethought import Reward\n"
        "def both(tree, leaf, task, text):\n"
        "    right = sum(c in 'abc' for c in text) / max(1, len(text))\n"
        "    return Reward(right, {'right': right, 'long': float(len(text))})\n"
    )
    Path("job.yaml").write_text("parts:\n  - {name: right, weight: 0.8}\n  - {name: long, weight: 0.2, lam: 1.0}\n")
    command = [
        "train",
        "ppo",
        "--model",
        "model",
        "--data",
        "data.jsonl",
        "--reward",
        "more.py:both",
        "--dtype",
        "fp32",
    ]
    assert main([*command, "--config", "job.yaml", "--out", "run", "steps=2", "prompts_per_step=8"]) == 0
    row = metrics("run")[-1]
    assert (row["weight/right"], row["weight/long"]) == (0.8, 0.2) and row["value/error/long"] > 0


def test_lora(job):
    assert ppo("--lora", "lora.rank=2", "--out", "run", "steps=2", "critic=separate") == 0
    assert Path("run/model/adapter_config.json").is_file() and Path("run/model/critic/adapter_config.json").is_file()
    Critic.load("run/model", policy_of("run/model"))


def test_a_critic_of_its_own(job, capsys):
    assert ppo("critic_model=model", "critic=separate", "--out", "run", "steps=1") == 0
    assert ppo("critic_model=model", "--out", "no") == 2
    assert (
        "critic_model='model': a shared critic reads the policy itself; give critic=separate" in capsys.readouterr().err
    )
    other = char_tokenizer("abcdef")
    save_pretrained(tiny_model(len(other), width=32, layers=1, heads=2), other, "other")
    assert ppo("critic_model=other", "critic=separate", "--out", "no") == 2
    assert "critic and policy have different tokenizers" in capsys.readouterr().err
    assert not Path("no").exists()


def test_bad_settings_are_told_before_compute(job, capsys):
    assert ppo("lam=2", "minibatches=99", "--out", "no") == 2
    told = capsys.readouterr().err
    assert "lam=2.0: give a number in [0, 1]" in told and "minibatches=99 exceeds prompts_per_step=16" in told
    assert ppo("reward_timeout=0", "--out", "no") == 2
    assert "reward_timeout=0.0: give a positive number of seconds" in capsys.readouterr().err
    assert main(["train", "ppo", "--model", "model", "--data", "data.jsonl", "--out", "no"]) == 2
    assert "reward" in capsys.readouterr().err and not Path("no").exists()
    assert main(["train", "ppo", "--dry-run"]) == 0
    assert "critic_optim:" in capsys.readouterr().out


def test_one_record_is_enough(job):
    """One-Shot: one prompt, many samples, one tree."""
    write(job / "data.jsonl", [{"prompt": "1+1=", "answer": "2"}])
    assert ppo("--out", "run", "steps=2", "ppo_epochs=2") == 0
    rows = metrics("run")
    assert rows[-1]["tokens/generated"] > 16 and json.loads(Path("run/results.json").read_text())["schema"] == 1
    model, _ = load_model("run/model", dtype="fp32", device="cpu")
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_batch_arithmetic():
    assert batch_arithmetic(PPOConfig(ppo_epochs=2, minibatches=4), 128) == (
        "64 prompts x 1 sample = 64 rollouts a step, 8 updates; 100 steps = 50 passes over 128 records"
    )
    assert batch_arithmetic(OnlineConfig(group_by="prompt"), 2).endswith("the samples of a record as one group")
