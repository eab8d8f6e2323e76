"""The demo end to end with a tiny model in place of SmolLM2: arms, budgets, verdict rule, page."""

import json
from dataclasses import replace

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from forethought.envs.families import families
from forethought.errors import ConfigError
from forethought.learn.online import OnlineConfig
from forethought.models.load import save_pretrained
from forethought.models.tiny import byte_tokenizer, tiny_model
from forethought.recipes import demo
from forethought.report import write_report
from forethought.rundir import RunDir, read_metrics

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp("demo")
    tokenizer = byte_tokenizer(chat_template=TEMPLATE)
    save_pretrained(tiny_model(len(tokenizer), width=16, layers=1, heads=2, context=256), tokenizer, root / "model")
    config = demo.DemoConfig(
        model=str(root / "model"),
        pool=8,
        heldout=6,
        device="cpu",
        dtype="fp32",
        online=OnlineConfig(steps=2, prompts_per_step=2, group_size=4, max_new_tokens=6, eval_every=2),
    )
    with RunDir.create(root / "run", config) as run:
        run.write_json("results.json", demo.run(config, run, say=lambda text: None))
        write_report(run.path)
    return root / "run", config


def test_every_arm_is_there_at_counted_budget(finished):
    folder, _ = finished
    found = json.loads((folder / "results.json").read_text())
    assert set(found["arms"]) == {"grpo", "base", "majority vote", "format only", "one problem"}
    budget = found["budget"]
    for arm in ("grpo", "format only", "one problem"):
        rows = [r for r in read_metrics(folder) if r["arm"] == arm]
        assert [r["step"] for r in rows] == [0, 1, 2]
        assert budget[arm]["tokens_generated"] == sum(r.get("tokens/generated", 0) for r in rows) > 0
        assert budget[arm]["verifier_calls"] == (0 if arm == "format only" else 16)
    # the vote may use about as many tokens as training did, never far less
    assert budget["majority vote"]["tokens_generated"] >= 0.7 * budget["grpo"]["tokens_generated"]
    assert found["verdict"] == "not shown" and len(found["examples"]) == 6
    assert all(arm["accuracy, last number"]["n"] == 6 for arm in found["arms"].values())


def test_the_model_is_saved_and_the_page_is_written(finished):
    folder, _ = finished
    assert AutoModelForCausalLM.from_pretrained(folder / "model").num_parameters() > 0
    assert "majority vote" in (folder / "report.html").read_text()


def test_pool_and_heldout_share_no_problem():
    make = families()[demo.DemoConfig().family]
    pool, heldout = make(128, 0, "train"), make(64, 0, "heldout")
    assert len({t["id"] for t in pool} | {t["id"] for t in heldout}) == 192
    assert not {t["problem"] for t in pool} & {t["problem"] for t in heldout}


@pytest.mark.parametrize(
    ("right", "verdict"),
    [
        ({"grpo": 0.9, "base": 0.2, "majority vote": 0.3, "format only": 0.1}, "shown"),
        ({"grpo": 0.9, "base": 0.2, "majority vote": 0.9, "format only": 0.1}, "not shown"),
        ({"grpo": 0.1, "base": 0.8, "majority vote": 0.3, "format only": 0.1}, "reversed"),
        ({"grpo": 0.9, "base": 0.2, "majority vote": 0.3}, "not shown"),  # a control is missing
    ],
)
def test_the_verdict_follows_from_the_numbers(right, verdict):
    n = 100
    correct = {name: (np.arange(n) < share * n).astype(float).tolist() for name, share in right.items()}
    assert demo.judge(correct, seed=0)[0] == verdict


def test_bad_settings():
    with pytest.raises(ConfigError, match="family='no-such'"):
        demo.DemoConfig(family="no-such")
    with pytest.raises(ConfigError, match="'grpo', and of"):
        replace(demo.DemoConfig(), arms=("format only",))
