"""`forethought train chain`: stages one after the other, what each adds, stops inside a stage, and what is refused."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from forethought.cli import main
from forethought.config import load_yaml
from forethought.recipes.own_chain import ChainJob
from tinyjob import make_job, metrics, results, write

STAGES = """
- {name: mid, method: sft, data: sft.jsonl, bin_length: 32, epochs: 3, optim: {lr: 0.003}}
- {method: dpo, data: pairs.jsonl, epochs: 2, optim: {lr: 0.001}}
- {method: grpo, data: data.jsonl, reward: "rewards.py:REWARD", steps: 4, prompts_per_step: 4, group_size: 4,
   max_new_tokens: 5, optim: {lr: 0.01}}
"""
FIRST = "".join(STAGES.splitlines(keepends=True)[:2])
HEAD = """
model: model
dtype: fp32
eval_data: held_out.jsonl
measure: {reward: ["rewards.py:share"], max_new_tokens: 5}
stages:"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chain")
    make_job(folder)
    write(folder / "sft.jsonl", [{"prompt": f"{i}+1=", "completion": "abxyz"} for i in range(10)])
    write(folder / "pairs.jsonl", [{"prompt": f"{i}+1=", "chosen": "aab", "rejected": "zyx"} for i in range(10)])
    return folder


@pytest.fixture
def job(made, tmp_path, monkeypatch):
    shutil.copytree(made, tmp_path / "job")
    monkeypatch.chdir(tmp_path / "job")
    chain()
    return tmp_path / "job"


def chain(stages: str = STAGES, head: str = HEAD, reward: str = "share") -> None:
    Path("chain.yaml").write_text(head + stages.replace("REWARD", reward))


def train(*args: str) -> int:
    return main(["train", "chain", "--config", "chain.yaml", "--out", "run", *args])


def weights(folder: str) -> dict[str, torch.Tensor]:
    return load_file(f"{folder}/model.safetensors")


def test_every_stage_goes_on_from_the_one_before_and_its_gain_is_told(job, capsys):
    assert train() == 0
    found = results("run")
    assert list(found["arms"]) == ["start", "mid", "dpo", "grpo"]
    metric = found["headline"]["metric"]
    score = {arm: cells[metric]["mean"] for arm, cells in found["arms"].items()}
    gains = {name: d["mean"] for name, d in found["differences"].items()}
    assert gains == pytest.approx(
        {
            "mid minus start": score["mid"] - score["start"],
            "dpo minus mid": score["dpo"] - score["mid"],
            "grpo minus dpo": score["grpo"] - score["dpo"],
        }
    )
    assert found["arms"]["mid"]["gain"]["mean"] == gains["mid minus start"] and "gain" not in found["arms"]["start"]
    assert found["difference"]["mean"] == pytest.approx(score["grpo"] - score["start"])
    assert found["verdict"] == "shown" and score["grpo"] > 0.6 > 0.3 > score["start"]

    # The questions are the same for every model, and each stage's own job compared what it compares.
    rows = [
        [json.loads(line) for line in Path(f"run/stages/{place}/eval/rows.jsonl").read_text().splitlines()]
        for place in ("start", "0-mid", "1-dpo", "2-grpo")
    ]
    assert len({tuple((r["task"], r["prompt"]) for r in part) for part in rows}) == 1
    assert score["mid"] == pytest.approx(sum(r["score"] for r in rows[1]) / 10)
    assert (
        found["arms"]["mid"]["own training_loss/before"]["mean"]
        > found["arms"]["mid"]["own training_loss/after"]["mean"]
    )

    # Counted, not assumed.
    lines = metrics("run")
    sampled = sum(line.get("tokens/generated", 0) for line in lines if line["arm"] == "grpo")
    assert found["budget"]["grpo"]["tokens_generated"] == sampled + sum(r["length"] for r in rows[3])
    assert found["budget"]["mid"]["tokens_trained"] == sum(
        line["tokens/trained"] for line in lines if line["arm"] == "mid"
    )
    assert found["budget"]["start"]["tokens_generated"] == sum(r["length"] for r in rows[0])

    # A checkpoint folder per stage; the last one is the chain's model.
    assert load_yaml("run/stages/1-dpo/config.yaml")["start"] == "mid"
    last, copied = weights("run/stages/2-grpo/model"), weights("run/model")
    assert all(torch.equal(last[k], copied[k]) for k in last)
    AutoModelForCausalLM.from_pretrained("run/model")
    said = capsys.readouterr()
    assert "stage 2 of 3: dpo" in said.err and "gain" in said.out
    assert Path("run/report.html").stat().st_size > 10_000


def test_a_stop_inside_a_stage_changes_nothing(job, capsys):
    chain(reward="interrupts")
    Path("interrupted").touch()  # this run is not interrupted
    assert main(["train", "chain", "--config", "chain.yaml", "--out", "whole"]) == 0
    Path("interrupted").unlink()
    assert train() == 130
    assert "stage 'grpo': stopped after step 3 of 4" in capsys.readouterr().err
    before = os.stat("run/stages/0-mid/model/model.safetensors").st_mtime_ns
    assert train("--resume") == 0
    assert os.stat("run/stages/0-mid/model/model.safetensors").st_mtime_ns == before  # finished, not run again
    assert metrics("run") == metrics("whole")
    a, b = weights("run/model"), weights("whole/model")
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert results("run")["differences"] == results("whole")["differences"]


def test_a_failed_stage_is_mended_and_gone_on_with(job, capsys):
    broken = STAGES.replace("pairs.jsonl, epochs: 2", "same.jsonl, epochs: 2")
    write(job / "same.jsonl", [{"prompt": "1+1=", "chosen": "a", "rejected": "a"}])
    chain(broken)
    assert train() == 2
    assert "stage 'dpo': same.jsonl" in capsys.readouterr().err
    assert (job / "run/stages/0-mid/done.json").is_file()
    chain()
    assert train("--resume") == 0
    assert list(results("run")["arms"]) == ["start", "mid", "dpo", "grpo"]


def test_a_finished_stage_keeps_its_settings(job, capsys):
    chain(FIRST)
    assert train() == 0
    chain(FIRST.replace("lr: 0.003", "lr: 0.004"))
    assert train("--resume") == 2
    said = capsys.readouterr().err
    assert "stage 'mid'" in said and "settings.optim.lr: 0.003 -> 0.004" in said
    chain()  # further stages may be added
    assert train("--resume") == 0
    assert list(results("run")["arms"]) == ["start", "mid", "dpo", "grpo"]


def test_overwriting_begins_from_the_start(job):
    chain(FIRST)
    assert train() == 0
    first = (job / "run/stages/0-mid/log.txt").read_text()
    assert train("--overwrite") == 0
    assert (job / "run/stages/0-mid/log.txt").read_text().count("created") == first.count("created") == 1
    assert "resumed" not in (job / "run/stages/0-mid/log.txt").read_text()


def test_a_branch_and_an_adapter(job):
    pytest.importorskip("peft")
    stages = """
- {name: one, method: sft, data: sft.jsonl, lora: {rank: 2}, optim: {lr: 0.01}}
- {name: side, method: sft, data: sft.jsonl, optim: {lr: 1.0e-30}}
- {name: two, method: sft, data: sft.jsonl, start: one, optim: {lr: 1.0e-30}}
"""
    chain(stages)
    assert train() == 0
    merged, two, side = (weights(f"run/stages/{n}") for n in ("0-one/model-merged", "2-two/model", "1-side/model"))
    for name, value in merged.items():  # at this learning rate only zeros move
        torch.testing.assert_close(two[name], value, rtol=0, atol=1e-20)
        torch.testing.assert_close(side[name], value, rtol=0, atol=1e-20)
    assert not all(torch.equal(value, weights("model")[name]) for name, value in merged.items())
    assert list(results("run")["differences"]) == ["one minus start", "side minus one", "two minus one"]


def test_without_common_questions_nothing_is_claimed(job):
    chain(FIRST, head="model: model\ndtype: fp32\nstages:\n")
    assert train() == 0
    found = results("run")
    assert found["verdict"] == "not shown" and "own training_loss/after" in found["arms"]["mid"]


@pytest.mark.parametrize(
    "stages, message",
    [
        (
            "\n- {method: stf, data: a}",
            "stages[0]: method='stf': give the way that this stage trains; did you mean 'sft'?",
        ),
        ("\n- {method: chain, data: a}", "method='chain'"),
        ("\n- {method: sft, data: sft.jsonl, epoch: 2}", "stage 'sft': epoch: unknown setting; did you mean 'epochs'?"),
        (
            "\n- {method: sft, data: sft.jsonl}\n- {method: sft, data: sft.jsonl}",
            "'sft' stands twice; give each stage a",
        ),
        ("\n- {method: sft, data: sft.jsonl, start: rl}", "stage 'sft': start='rl' is none of the stages before it"),
        ("\n- {method: sft}", "stage 'sft': data: give its file"),
        ("\n- {method: sft, data: sft.jsonl, model: other}", "stage 'sft': model='other': it begins with the model of"),
        ("\n- {name: rl, method: grpo, data: data.jsonl, reward: math, group_size: 1}", "stage 'rl'"),
        (
            "\n- {method: sft, data: sft.jsonl}\n- {name: rl, method: grpo, data: dato.jsonl}",
            "did you mean 'data.jsonl'",
        ),
        ("\n- {method: sft, data: sft.jsonl, bin_length: 4}", "stage 'sft': bin_length=4 dropped all 10 records"),
        (" []", "stages: give them in a file"),
    ],
)
def test_bad_chains(job, capsys, stages, message):
    chain(stages)
    assert train() == 2
    assert message in capsys.readouterr().err


def test_a_later_stage_s_reward_is_opened_before_the_first_stage(job, capsys):
    chain(reward="shore")
    assert train() == 2
    assert "stage 'grpo'" in capsys.readouterr().err and not Path("run").exists()


def test_measuring_needs_questions():
    with pytest.raises(ValueError, match="measure: there are no questions to measure on: give eval_data"):
        ChainJob(measure=ChainJob().measure.__class__(samples=2, temperature=1.0))
    with pytest.raises(ValueError, match="samples=2 at temperature 0"):
        ChainJob().measure.__class__(samples=2)


def test_settings_beside_the_stages_hold_for_all(job):
    made = ChainJob(
        seed=7, chat=True, stages=({"method": "sft", "data": "a"}, {"method": "dpo", "data": "b", "seed": 1})
    )
    jobs = made.jobs()
    assert [(jobs[n].seed, jobs[n].chat) for n in ("sft", "dpo")] == [(7, True), (1, True)]
    assert ChainJob(**{k: getattr(made, k) for k in ("seed", "chat", "stages")}) == made  # resolved once
