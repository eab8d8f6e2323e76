"""The spec's checks with their values, the bank's filters, the chain of stages, and a small run end to end."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from forethought.config import apply_overrides, from_dict, to_dict
from forethought.errors import ConfigError, DataError, RewardError
from forethought.learn.losses import policy_loss
from forethought.learn.pair_losses import dpo_loss
from forethought.recipes import phi_4_mini_reasoning as recipe
from forethought.recipes.phi_4_mini_reasoning import bank as banks
from forethought.recipes.phi_4_mini_reasoning.bank import grade, is_repetitive, preference_records, subset
from forethought.recipes.phi_4_mini_reasoning.ladder import LADDER, RL_ARMS, Workplace, _Saturation, data_of
from forethought.recipes.stages import Stage, gains, run_stages
from forethought.rundir import RunDir

SMOKE = recipe.PROFILES["smoke"]


def rollouts(*verdicts, **more):
    return [
        {
            "text": f"answer {i}",
            "tokens": 3 + i,
            "answer": None,
            "verdict": v,
            "repeated": False,
            "truncated": False,
            **more,
        }
        for i, v in enumerate(verdicts)
    ]


def record(qid, *verdicts, level=4, **more):
    return {
        "qid": qid,
        "source": "test",
        "question": f"question {qid}",
        "gold": "1",
        "domain": "algebra",
        "level": level,
        "rollouts": rollouts(*verdicts, **more),
    }


# -- check 4, 11: losses by hand --
def test_dpo_by_hand():
    one = lambda x: torch.tensor([x], dtype=torch.float64)  # noqa: E731
    assert float(dpo_loss(one(2.0), one(-1.0), one(0.0), one(0.0), beta=0.1).loss) == pytest.approx(0.55436, abs=1e-5)
    assert float(dpo_loss(one(-3.0), one(-4.0), one(-3.0), one(-4.0), beta=0.1).loss) == pytest.approx(
        0.69315, abs=1e-5
    )


@pytest.mark.parametrize(
    "ratio, advantage, value", [(1.5, 1.0, 1.2), (1.5, -1.0, -1.5), (0.5, 1.0, 0.5), (0.5, -1.0, -0.8)]
)
def test_clip_by_hand(ratio, advantage, value):
    one = torch.ones(1)
    out = policy_loss(one * math.log(ratio), one * 0, one * advantage, one, clip_low=0.2, clip_high=0.2)
    assert -float(out.loss) == pytest.approx(value, abs=1e-6)


# -- check 5: pairs --
def test_pairs_of_a_question():
    pairs, counts = preference_records([record("a", "right", "right", "right", "wrong", "wrong")], cap=1)
    assert len(pairs) == 1 and pairs[0]["prompt"] == "question a"
    assert pairs[0]["chosen"] in {"answer 0", "answer 1", "answer 2"} and pairs[0]["rejected"] in {
        "answer 3",
        "answer 4",
    }
    every, _ = preference_records([record("a", "right", "right", "right", "wrong", "wrong")], cap=99)
    assert len({(p["chosen"], p["rejected"]) for p in every}) == 6
    with pytest.raises(DataError, match="no preference pairs left: prompt/all right: 1, prompt/all wrong: 1"):
        preference_records([record("a", "right", "right"), record("b", "wrong", "wrong")])
    with pytest.raises(DataError, match="sample/unknown: 1"):
        preference_records([record("a", "right", "unknown")])


def test_truncated_rollouts_are_no_negatives_unless_asked():
    bank = [
        {**record("a"), "rollouts": [*rollouts("right"), {**rollouts("wrong")[0], "text": "cut", "truncated": True}]}
    ]
    with pytest.raises(DataError, match="sample/truncated: 1"):
        preference_records(bank)
    pairs, _ = preference_records(bank, keep_truncated=True)
    assert pairs[0]["rejected"] == "cut"


# -- check 12: the verifier --
def test_grades():
    assert grade("so \\boxed{0.5}", "1/2").verdict == "right"
    assert grade("\\boxed{1} or \\boxed{2}", "2") == banks.Grade("wrong", "several answers", "2")
    assert grade("\\boxed{1} or \\boxed{2}", "2", one_box=False).verdict == "right"
    assert grade("\\boxed{2}, again \\boxed{2}", "2").verdict == "right"
    assert grade("it is 2", "2") == banks.Grade("wrong", "no_answer")
    assert grade("\\boxed{3}", "2").verdict == "wrong"
    assert grade("\\boxed{2}", "").verdict == "unknown"  # a gold that cannot be read makes nothing wrong
    hard = grade("\\boxed{\\frac{7^{7^{7^{7}}} - 1}{6}}", "12")
    assert hard.verdict == "unknown" and "limit" in hard.reason


def test_an_unknown_verdict_is_a_missing_reward(monkeypatch):
    place = Workplace(SMOKE, 0, None)
    monkeypatch.setattr(banks, "grade", lambda *a, **k: banks.Grade("unknown", "limit: time"))
    (found,) = place.judge([(type("T", (), {"node_ids": lambda self, n: []})(), 0, {"answer": "1"})])
    assert isinstance(found, RewardError)


# -- check 13: questions --
def test_no_question_stands_in_two_splits():
    data = data_of(SMOKE)
    ids = [{t["id"] for t in rows} for rows in (data.train, data.validation, data.test)]
    assert not (ids[0] & ids[1] or ids[0] & ids[2] or ids[1] & ids[2])
    assert {r["qid"] for r in data.bank} == ids[0]
    for broken in ([record("a"), record("a")], [{**record("a"), "rollouts": [{"text": "x"}]}], [{"qid": 1}], []):
        with pytest.raises(DataError):
            banks.check_bank(broken)


# -- filters --
def test_the_subset_is_right_clean_hard_and_balanced():
    bank = [record(f"{level}/{i}", "right", "right", "wrong", level=level) for level in (3, 4, 5) for i in range(level)]
    chosen = subset(bank, least_level=4, quota=4)
    levels = [row["id"].split("/")[0] for row in chosen]
    assert levels == ["4"] * 4 + ["5"] * 4
    assert len({r["prompt"] for r in chosen}) == 8  # one of a question
    assert chosen == subset(bank, least_level=4, quota=4)
    short = subset(bank, least_level=5, quota=9, per_question=2, pick="shortest")
    assert [r["completion"] for r in short[:2]] == ["answer 0", "answer 1"]
    with pytest.raises(DataError, match="no records of the subset left: level too low: 12"):
        subset(bank, least_level=9, quota=4)
    with pytest.raises(DataError, match="repeated: 2"):
        banks.demonstrations([record("a", "right", "right", repeated=True)])
    with pytest.raises(DataError, match="wrong: 1, unknown: 1, truncated: 1"):
        banks.demonstrations([record("a", "wrong", "unknown"), record("b", "right", truncated=True)])


def test_repetition():
    assert is_repetitive(list(range(20)) * 4) and not is_repetitive(list(range(20)) * 3)
    assert not is_repetitive(list(range(500)))
    assert is_repetitive(["a"] * 400, n=1000)  # by compression
    found = [row for r in data_of(SMOKE).bank for row in r["rollouts"] if row["truncated"]]
    assert found and all(row["repeated"] and row["verdict"] == "wrong" for row in found)


def test_slips_become_wrong_rollouts():
    rows = [row for r in data_of(recipe.PROFILES["mini"]).bank[:400] for row in r["rollouts"] if not row["truncated"]]
    assert 0.18 < np.mean([row["verdict"] == "wrong" for row in rows]) < 0.27  # slips of 1 in 4; some cancel


# -- records as training data --
def test_stage_two_records_end_in_the_end_token_and_stand_alone():
    from forethought.tree.pack import pack

    place = Workplace(SMOKE, 0, None)
    trees = place.trees(banks.demonstrations(place.data.bank, limit=5))
    for tree in trees:
        (batch,) = pack([tree])
        assert int(batch.targets[-1]) == place.tokenizer.eos_token_id
        assert batch.n_targets == tree.n_tokens - len(place.encode({"prompt": place.decode(tree.node_ids(0))}))
    whole = Workplace(replace(SMOKE, mask_question=False), 0, None)
    assert all(t.weight.sum() == t.n_tokens - 1 for t in whole.trees(banks.demonstrations(place.data.bank, limit=5)))


def test_the_saturation_rule():
    watch = _Saturation(2)
    for value, over in ((0.1, False), (0.3, False), (0.3, False), (0.2, True), (0.4, False)):
        watch.see(value)
        assert watch.over() is over
    never = _Saturation(0)
    never.restore([0.5] * 9)
    assert not never.over()


# -- check 15, and other settings --
@pytest.mark.parametrize(
    "settings, message",
    [
        (["online.group_size=1"], "group_size=1"),
        (["online.steps=0"], "steps=0"),
        (["rebalance.accuracy_max=0"], "accuracy_max"),
        (["arms=[base,mid-traning]"], "mid-training"),
        (["arms=[base,RL]"], "stage 4 begins with the model of 'DPO'"),
        (["arms=[base,SFT]"], "'SFT' begins with the model of 'mid-training'"),
        (["sft.bin_length=64"], "unpacked"),
        (["temperature_end=1.5"], "temperature_end=1.5"),
        (["sft_level=9"], "least_level=9"),
        (["model=some/model"], "files.bank is empty"),
        (["dpo.loss=ipo"], "dpo.loss='ipo'"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        apply_overrides(recipe.PROFILES["mini"], settings)


def test_an_empty_pool_names_the_filter():
    from forethought.recipes.jobs import Job
    from forethought.recipes.phi_4_mini_reasoning.ladder import rl_job

    config = apply_overrides(SMOKE, ["uniform_c=0", "max_new_tokens=4"])
    job = Job("RL", 0, rl_job, config, {"config": config, "models": {"0": None}})
    run = type("Run", (), {"path": __import__("pathlib").Path("/nonexistent")})()
    with pytest.raises((DataError, OSError)) as caught:
        rl_job(job, run)  # type: ignore[arg-type]
    assert isinstance(caught.value, OSError) or "length filter left none" in str(caught.value)


def test_profiles_resolve():
    for name, config in recipe.PROFILES.items():
        assert from_dict(recipe.Phi4Config, to_dict(config)) == config, name
    paper = recipe.PROFILES["paper"]
    assert (paper.mid.bin_length, paper.mid.batch_size, paper.mid.epochs, paper.mid.optim.lr) == (16_384, 128, 5, 1e-5)
    assert paper.mid.optim.warmup_ratio == 0.1 and paper.sft.bin_length == 0
    assert (paper.dpo.optim.lr, paper.dpo.epochs, paper.online.optim.lr, paper.max_new_tokens) == (
        5e-7,
        1,
        5e-7,
        25_000,
    )
    assert paper.rebalance.most == 128 and paper.temperature_end == 0.6 and paper.online.temperature == 1.0
    assert set(RL_ARMS) >= {"RL", "GRPO", "RL without A", "RL without B", "RL without C", "PPO"}


# -- the chain --
def chain(tmp_path, calls, fail=None):
    def function(context):
        calls.append(context.name)
        if context.name == fail:
            raise DataError("nothing left")
        with context.run.save_folder("model") as place:
            (place / "from").write_text(str(context.model_in and context.model_in.parent.name))
        return {"score": float(len(calls))}

    stages = [
        Stage("one", function),
        Stage("two", function),
        Stage("side", function, "one"),
        Stage("three", function, "two"),
    ]
    return stages, run_stages(stages, tmp_path)


def test_a_chain_goes_on_where_it_stopped(tmp_path):
    calls = []
    with pytest.raises(DataError, match="stage 'side': nothing left"):
        chain(tmp_path, calls, fail="side")
    assert calls == ["one", "two", "side"]
    stages, done = chain(tmp_path, calls)
    assert calls == ["one", "two", "side", "side", "three"]
    began = {name: (tmp_path / "stages" / f"{i}-{name}" / "model" / "from").read_text() for i, name in enumerate(done)}
    assert began == {"one": "None", "two": "0-one", "side": "0-one", "three": "1-two"}
    assert gains(done, stages, "score") == {"one": None, "two": 1.0, "side": 3.0, "three": 3.0}


def test_chains_that_cannot_be(tmp_path):
    stage = Stage("one", lambda c: {})
    for stages, message in (
        ([], "empty"),
        ([stage, stage], "stands twice"),
        ([Stage("one", stage.function, "two")], "none of the stages before"),
    ):
        with pytest.raises(ConfigError, match=message):
            run_stages(stages, tmp_path)


# -- end to end --
@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("phi4") / "run"
    with RunDir.create(folder, SMOKE) as run:
        found = recipe.run(SMOKE, run, profile="smoke")
        run.write_json("results.json", found)
    return folder, found


def test_smoke(finished):
    folder, found = finished
    assert list(found["arms"]) == list(SMOKE.arms)
    budget = found["budget"]
    assert budget["GRPO"]["tokens_generated"] >= budget["RL"]["tokens_generated"] > 0
    step = 4 * 4 * SMOKE.max_new_tokens  # the control stops with the step that reaches the method's tokens
    assert budget["GRPO"]["tokens_generated"] < budget["RL"]["tokens_generated"] + step
    assert found["arms"]["mid-training"]["packing efficiency"]["mean"] > 0.7
    assert found["differences"]["RL minus GRPO"]["n"] == 1 and found["verdict"] == "not shown"
    for number, name in enumerate(s for s in LADDER if s in SMOKE.arms):
        assert (
            folder / "arms" / "ladder" / "seed0" / "stages" / f"{number}-{name.replace(' ', '-')}" / "model"
        ).is_dir()


def test_a_finished_run_is_not_run_again(finished, monkeypatch):
    folder, found = finished
    monkeypatch.setattr(Workplace, "__init__", lambda *a: pytest.fail("a finished stage was run again"))
    with RunDir.create(folder, SMOKE, resume=True) as run:
        assert recipe.run(SMOKE, run, profile="smoke")["arms"] == found["arms"]


def test_a_seed_gives_the_same_pairs_and_negatives(finished, tmp_path):
    folder, found = finished
    with RunDir.create(tmp_path / "again", SMOKE) as run:
        again = recipe.run(SMOKE, run, profile="smoke")
    assert again["arms"] == found["arms"]
    assert json.dumps(again["differences"]) == json.dumps(found["differences"])


def test_the_paper_profile_with_a_tiny_model(tmp_path):
    """The published settings on files, with a small model and short answers in place of the large ones."""
    from forethought.data import write_jsonl
    from forethought.models.load import save_pretrained
    from forethought.models.tiny import byte_tokenizer, tiny_model

    tokenizer = byte_tokenizer()
    save_pretrained(tiny_model(len(tokenizer), context=512), tokenizer, tmp_path / "model")
    sums = [(a, b) for a in range(2, 6) for b in range(2, 5)]
    bank = []
    for i, (a, b) in enumerate(sums):
        rows = [
            {"text": f"{a}+{b} is \\boxed{{{v}}}", "tokens": 9, "verdict": w}
            for v, w in ((a + b, "right"), (a, "wrong"))
        ]
        bank.append(
            {"qid": f"q{i}", "question": f"What is {a}+{b}?", "gold": str(a + b), "level": 4 + i % 2, "rollouts": rows}
        )
    write_jsonl(tmp_path / "bank.jsonl", bank)
    write_jsonl(tmp_path / "val.jsonl", [{"problem": "What is 7+1?", "answer": "8"}])
    write_jsonl(
        tmp_path / "test.jsonl", [{"problem": "What is 8+1?", "answer": "9"}, {"problem": "9+1?", "answer": "10"}]
    )
    config = apply_overrides(
        recipe.PROFILES["paper"],
        [
            f"model={tmp_path / 'model'}",
            f"files.bank={tmp_path / 'bank.jsonl'}",
            f"files.validation={tmp_path / 'val.jsonl'}",
            f"files.test={tmp_path / 'test.jsonl'}",
            "arms=[base,few-shot SFT,mid-training,SFT,DPO,RL without A]",
            *("device=cpu", "dtype=fp32", "max_new_tokens=6", "eval_tokens=6", "uniform_c=99", "probe_samples=2"),
            *("mid.epochs=1", "few.epochs=1", "sft.epochs=1", "online.steps=1", "online.prompts_per_step=2"),
            *("online.group_size=2", "rebalance.most=4", "control_factor=2", "hard_level=0", "eval_samples=2"),
        ],
    )
    with RunDir.create(tmp_path / "run", config) as run:
        found = recipe.run(config, run, profile="paper")
    assert found["arms"]["DPO"]["pairs"]["mean"] == 12
    assert found["arms"]["RL without A"]["steps"]["mean"] == 1
