"""The user's own job: what it learns, what it measures, and that nothing is lost on the way."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from forethought.cli import _parser, main, parse
from forethought.learn.online import OnlineConfig
from forethought.models.chat import ChatRenderer, sft_trees
from forethought.recipes.own_grpo import batch_arithmetic
from forethought.recipes.own_job import job_of
from forethought.recipes.own_sft import SFTJob, load_records
from forethought.tree.store import TreeStore
from tinyjob import grpo, make_job, make_model, metrics, results, write


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    make_job(folder)
    return folder


@pytest.fixture
def job(made, tmp_path, monkeypatch):
    """A folder of its own with the job's files, as the current folder."""
    shutil.copytree(made, tmp_path / "job")
    monkeypatch.chdir(tmp_path / "job")
    return tmp_path / "job"


@pytest.mark.parametrize(
    ("settings", "records", "expected"),
    [
        ({}, 200, "8 prompts x 8 samples = 64 rollouts a step, 1 update; 100 steps = 4 passes over 200 records"),
        (
            {"prompts_per_step": 4, "group_size": 2, "steps": 6, "updates_per_rollout": 2},
            10,
            "4 prompts x 2 samples = 8 rollouts a step, 2 updates; 6 steps = 2 passes over 10 records (the last step "
            "of a pass has 2 prompts)",
        ),
        (
            {"steps": 5},
            1,
            "8 prompts x 8 samples = 64 rollouts a step, 1 update; 5 steps, each on all 1 record, repeated to 8 groups",
        ),
        (
            {"steps": 5, "group_by": "prompt"},
            2,
            "8 prompts x 8 samples = 64 rollouts a step, 1 update; 5 steps, each on all 2 records, the samples of a "
            "record as one group",
        ),
    ],
)
def test_batch_arithmetic(settings, records, expected):
    assert batch_arithmetic(OnlineConfig(**settings), records) == expected


# -- grpo --------------------------------------------------------------------------------------------------------------


def test_a_job_learns_measures_and_saves(job, capsys):
    assert grpo("--out", "run", "steps=12", held_out=True) == 0
    said = capsys.readouterr()
    assert "4 prompts x 4 samples = 16 rollouts a step, 1 update; 12 steps = 4 passes over 10 records" in said.err
    found = results("run")
    before, after = found["arms"]["before"]["reward"], found["arms"]["after"]["reward"]
    assert before["mean"] < 0.3 and after["mean"] > 0.9 and after["n"] == 10
    assert found["verdict"] == "shown" and found["difference"]["ci95"][0] > 0.5
    assert found["difference"]["mean"] == pytest.approx(after["mean"] - before["mean"])
    assert found["arms"]["after"]["truncated"]["ci95"][1] <= 1 and found["recipe"] == "train grpo"

    # Counted, not assumed.
    rows = {name: json.loads(Path(f"run/eval_{name}.json").read_text())["rows"] for name in ("before", "after")}
    assert [r["score"] for r in rows["after"]] == pytest.approx(
        [sum(c in "abc" for c in r["text"]) / max(1, len(r["text"])) for r in rows["after"]]
    )
    lines = metrics("run")
    assert [line["step"] for line in lines] == list(range(13)) and lines[0]["eval/reward"] == before["mean"]
    evaluated = {name: sum(r["length"] for r in found) for name, found in rows.items()}
    sampled = sum(line.get("tokens/generated", 0) for line in lines)
    budget = found["budget"]
    assert budget["before"]["tokens_generated"] == evaluated["before"] and budget["before"]["verifier_calls"] == 10
    assert budget["after"]["tokens_generated"] == sampled + evaluated["after"]
    assert budget["after"]["tokens_trained"] == sum(line.get("tokens/trained", 0) for line in lines)
    assert budget["after"]["verifier_calls"] == sum([4, 4, 2] * 4) * 4 + 10

    # What people look at: the report, the examples, the tokens.
    assert Path("run/report.html").stat().st_size > 10_000 and Path("run/tokenizer.json").is_file()
    example = found["examples"][0]
    assert example["prompt"] == "0+2=" and example["answer"] == "2" and example["after"] == rows["after"][0]["text"]
    assert "verdict: shown" in said.out


def test_the_saved_model_gives_the_sampler_s_log_probs(job):
    grpo("--out", "run", held_out=True)
    model, tokenizer = AutoModelForCausalLM.from_pretrained("run/model"), AutoTokenizer.from_pretrained("run/model")
    assert model.dtype == torch.float32
    with TreeStore("run/trees.sqlite", readonly=True) as store:
        rows = store.query(kind="eval", step=4)
        assert len(rows) == 8
        for row in rows:
            tree = store.load(row.id)
            (leaf,) = tree.leaves()
            ids = torch.tensor([tree.path_ids(leaf)])
            assert tokenizer.decode(tree.node_ids(0)) == f"{row.task}+2="
            with torch.no_grad():
                logits = model(ids).logits[0]
            got = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0][tree.length[0] - 1 :]
            torch.testing.assert_close(got, torch.tensor(tree.logprob[tree.span(leaf)]), atol=1e-4, rtol=0)
            assert logits.argmax(-1)[tree.length[0] - 1 : -1].tolist() == tree.node_ids(leaf)


def test_one_number_in_three_styles_trains_alike(job):
    curves = {}
    for style in ("share", "compute_score", "native"):
        grpo("--out", style, "steps=2", reward=style)
        curves[style] = [(m["reward/mean"], m["loss"], m["grad_norm"]) for m in metrics(style)]
    assert curves["share"] == curves["compute_score"] == curves["native"]
    assert "reward/length" in metrics("compute_score")[0]


def test_several_rewards_add_up_by_weight(job):
    grpo("--out", "run", "--reward", "rewards.py:short", "steps=2", "reward_weights=0.8,0.2")
    line = metrics("run")[0]
    assert line["reward/mean"] == pytest.approx(0.8 * line["reward/share"] + 0.2 * line["reward/short"])
    with TreeStore("run/trees.sqlite", readonly=True) as store:
        tree = store.load(store.query()[0].id)
    for leaf in tree.leaves():
        parts = tree.meta[leaf]["parts"]
        assert tree.reward[leaf] == pytest.approx(0.8 * parts["share"] + 0.2 * parts["short"])


def test_what_a_trl_function_logs_is_kept(job):
    grpo("--out", "run", "steps=3", reward="logs")
    lines = metrics("run")
    assert [m["reward_log/samples"] for m in lines] == [16, 16, 8]
    assert [m["reward/mean"] for m in lines] == [0, 1, 2]  # trainer_state.global_step
    with TreeStore("run/trees.sqlite", readonly=True) as store:
        tree = store.load(store.query()[0].id)
    assert all(isinstance(tree.meta[leaf]["logged"]["shown"], str) for leaf in tree.leaves())


def test_a_failed_reward_marks_its_sample_and_is_told(job, capsys):
    grpo("--out", "run", "steps=2", reward="sometimes")
    said = capsys.readouterr().err
    assert "trial call of the reward: reward function 'sometimes' raised KeyError" in said
    assert "rewards failed (left out); the first: reward function 'sometimes' raised KeyError" in said
    failed = [int(m["reward/failed"]) for m in metrics("run")]
    assert all(0 < n < 16 for n in failed)


def test_chat_renders_turns_and_shows_messages_to_trl_functions(job):
    make_model(job / "chatty", chat=True)
    assert grpo("--out", "run", "--model", "chatty", "--chat", "steps=1", reward="seen_messages") == 0
    with TreeStore("run/trees.sqlite", readonly=True) as store:
        row = store.query()[0]
        ids = store.load(row.id).node_ids(0)
    tokenizer = AutoTokenizer.from_pretrained("chatty")
    assert tokenizer.decode(ids) == f"<|user|>{row.task}+1=<eos><|assistant|>"


def test_raw_prompts_to_a_chat_model_are_remarked_on(job, capsys):
    make_model(job / "chatty", chat=True)
    grpo("--out", "run", "--model", "chatty", "steps=1")
    assert "text prompts stay raw text; this model has a chat template: --chat" in capsys.readouterr().err


def test_without_held_out_records_nothing_is_claimed(job):
    grpo("--out", "run")
    found = results("run")
    assert found["verdict"] == "not shown" and found["claim"] == "None: no records were held out."
    lines = metrics("run")
    assert found["arms"]["before"]["training_reward"]["mean"] == lines[0]["reward/mean"]
    assert found["arms"]["after"]["training_reward"] == {
        "mean": lines[-1]["reward/mean"],
        "ci95": [None, None],
        "n": 1,
        "per_seed": [lines[-1]["reward/mean"]],
    }


def test_held_out_records_that_are_trained_on_are_named(job, capsys):
    grpo("--out", "run", "--eval-data", "data.jsonl", "steps=1")
    assert "10 of 10 held-out records are also in the training data" in capsys.readouterr().err
    assert results("run")["notes"] == ["10 held-out records are also in the training data."]


def test_the_math_verifier_by_name(job):
    grpo("--out", "run", "--reward", "math:last_number", "reward_weights=0,1", "steps=1")
    line = metrics("run")[0]
    assert line["reward/mean"] == line["reward/math"] == line["reward/math/outcome"]


def test_lora_saves_an_adapter_and_the_merged_model(job):
    from peft import PeftModel

    assert grpo("--out", "run", "--lora", "lora.rank=4", "kl_coef=0.001", held_out=True) == 0
    found = results("run")
    assert found["arms"]["before"]["reward"]["n"] == 10
    assert metrics("run")[-1]["kl"] > 0 and metrics("run")[1]["kl"] == 0
    merged = AutoModelForCausalLM.from_pretrained("run/model-merged")
    base = AutoModelForCausalLM.from_pretrained("model")
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        plain = base(ids).logits
        adapted = PeftModel.from_pretrained(base, "run/model")(ids).logits
        torch.testing.assert_close(merged(ids).logits, adapted, atol=1e-5, rtol=0)
    assert (adapted - plain).abs().max() > 1e-3
    assert json.loads(Path("run/model/adapter_config.json").read_text())["r"] == 4
    assert not Path("run/model/model.safetensors").exists()
    # An overwritten run leaves nothing of it behind.
    grpo("--out", "run", "--overwrite", "steps=1")
    assert not Path("run/model-merged").exists() and Path("run/model/model.safetensors").exists()


# -- going on ----------------------------------------------------------------------------------------------------------


def test_ctrl_c_saves_and_resume_continues_exactly(job, capsys):
    grpo("--out", "whole", "steps=5", "save_every=0", held_out=True)
    assert grpo("--out", "run", "steps=5", "save_every=0", reward="interrupts", held_out=True) == 130
    said = capsys.readouterr().err
    assert "stopped after step 3 of 5; saved in" in said and "add --resume to go on" in said
    assert not Path("run/results.json").exists()
    args = ("--out", "run", "steps=5", "save_every=0", "--resume")
    assert grpo(*args, reward="interrupts", held_out=True) == 0
    assert metrics("run") == metrics("whole")
    whole, run = results("whole"), results("run")
    assert run["arms"] == whole["arms"] and run["difference"] == whole["difference"]
    drop = {"wall_s"}
    for arm in ("before", "after"):
        assert {k: v for k, v in run["budget"][arm].items() if k not in drop} == {
            k: v for k, v in whole["budget"][arm].items() if k not in drop
        }
    a, b = (AutoModelForCausalLM.from_pretrained(f"{name}/model").state_dict() for name in ("run", "whole"))
    assert all(torch.equal(a[k], b[k]) for k in b)


def test_a_judge_that_breaks_down_costs_nothing(job, capsys):
    grpo("--out", "whole", "steps=5")
    assert grpo("--out", "run", "steps=5", reward="breaks") == 2
    said = capsys.readouterr().err
    assert (
        "every sample's reward failed; the first: reward function 'breaks' raised ValueError: the judge is down" in said
    )
    assert "saved after step 2, go on with --resume" in said
    Path("mended").touch()
    assert grpo("--out", "run", "steps=5", "--resume", reward="breaks") == 0
    assert metrics("run") == metrics("whole")


def test_a_finished_run_can_be_made_longer(job, capsys):
    grpo("--out", "whole", "steps=6", held_out=True)
    grpo("--out", "run", "steps=3", held_out=True)
    assert grpo("--out", "run", "steps=6", "--resume", held_out=True) == 0
    # The shorter run was evaluated at its own end, too.
    drop = [{k: v for k, v in m.items() if not k.startswith("eval/")} for m in metrics("run")]
    assert drop == [{k: v for k, v in m.items() if not k.startswith("eval/")} for m in metrics("whole")]
    assert results("run")["arms"] == results("whole")["arms"]
    capsys.readouterr()
    assert grpo("--out", "run", "steps=4", "--resume", held_out=True) == 2
    assert "the run is at step 6 already, steps=4 lies before it" in capsys.readouterr().err


def test_a_run_s_config_makes_the_run_again(job):
    grpo("--out", "run", "seed=3", "steps=2", held_out=True)
    assert main(["train", "grpo", "--config", "run/config.yaml", "--out", "again"]) == 0
    assert metrics("again") == metrics("run")


# -- sft ---------------------------------------------------------------------------------------------------------------


def sft(*args):
    return main(["train", "sft", "--model", "model", "--dtype", "fp32", "optim.lr=0.01", *args])


def nll(folder: str, prompt: str, completion: str) -> tuple[float, int]:
    """Sum of the losses of the completion and its end token, by transformers alone."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    head, tail = tokenizer(prompt)["input_ids"], [*tokenizer(completion)["input_ids"], tokenizer.eos_token_id]
    ids = torch.tensor([head + tail])
    with torch.no_grad():
        logp = model(ids).logits[0].log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    return -float(logp[len(head) - 1 :].sum()), len(tail)


def test_sft_measures_the_held_out_loss(job, capsys):
    write(job / "train.jsonl", [{"prompt": f"{i}+1=", "completion": "abc"[: 1 + i % 3]} for i in range(8)])
    held_out = [{"prompt": f"{i}+3=", "completion": "abc"[: 1 + i % 3]} for i in range(6)]
    write(job / "test.jsonl", held_out)
    args = ("--data", "train.jsonl", "--eval-data", "test.jsonl", "--out", "run", "epochs=10", "batch_size=3")
    assert sft(*args) == 0
    assert "8 records (55 tokens, 23 of them targets), 3 records a step: 30 updates" in capsys.readouterr().err
    found = results("run")
    for side, folder in (("before", "model"), ("after", "run/model")):
        sums = [nll(folder, r["prompt"], r["completion"]) for r in held_out]
        want = sum(s for s, _ in sums) / sum(n for _, n in sums)
        assert found["arms"][side]["loss"]["mean"] == pytest.approx(want, abs=1e-5)
    assert found["verdict"] == "shown" and found["difference"]["ci95"][1] < -1
    assert metrics("run")[-1]["eval/loss"] == pytest.approx(found["arms"]["after"]["loss"]["mean"])
    assert found["budget"]["after"]["tokens_trained"] == 230


@pytest.mark.parametrize(
    ("record", "flags", "targets"),
    [
        ({"prompt": "1+1=", "completion": "2"}, [], "2<eos>"),
        ({"question": "1+1=", "answer": "2"}, ["--prompt-column", "question", "--answer-column", "answer"], "2<eos>"),
        ({"q": {"text": "1+1="}, "a": 2}, ["--prompt-column", "q.text", "--answer-column", "a"], "2<eos>"),
        ({"prompt": "1+1=", "completion": "2"}, ["--chat"], "2<eos>"),
        ({"prompt": "1+1", "completion": "2"}, ["--suffix", "="], "2<eos>"),
        ({"text": "1+1=2"}, [], "+1=2<eos>"),
        (
            {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]},
            [],
            "2<eos>",
        ),
    ],
)
def test_sft_columns(tmp_path, record, flags, targets):
    tokenizer = AutoTokenizer.from_pretrained(make_model(tmp_path / "model", chat=True))
    data = write(tmp_path / "train.jsonl", [record])
    args = parse(_parser(), ["train", "sft", "--model", "model", "--data", str(data), *flags])
    (tree,) = sft_trees(ChatRenderer(tokenizer), load_records(str(data), job_of(SFTJob, args)))
    assert tokenizer.decode(tree.ids[np.flatnonzero(tree.weight)]) == targets


def test_sft_resumes_exactly(job):
    write(job / "train.jsonl", [{"prompt": f"{i}+1=", "completion": "abc"} for i in range(7)])
    sft("--data", "train.jsonl", "--out", "whole", "epochs=4", "batch_size=2")
    sft("--data", "train.jsonl", "--out", "run", "epochs=2", "batch_size=2")
    sft("--data", "train.jsonl", "--out", "run", "epochs=4", "batch_size=2", "--resume")
    assert metrics("run") == metrics("whole") and len(metrics("run")) == 16
