"""The user's own preference jobs: records as people have them, what is learnt and measured, refusals before compute, and
nothing lost on the way."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from forethought.cli import main
from forethought.learn.preference_game import GameConfig
from forethought.recipes.inputs import Columns
from forethought.recipes.own_game import batch_arithmetic
from forethought.recipes.own_pairs import load_preferences
from tinyjob import make_job, make_model, metrics, results, write

ORACLES = '''
import os, signal
from pathlib import Path

calls = 0

def share(text):
    return sum(c in "abc" for c in text) / max(1, len(text))

def prefer(task, a, b):
    return 0.5 + 0.5 * (share(a) - share(b))

def outside(task, a, b):
    return 2.0

def raises(task, a, b):
    raise RuntimeError("no such judge")

def not_antisymmetric(task, a, b):
    return 0.9

def wrong(a):
    return 0.5

class Interrupts:
    """Ctrl-C while the second iteration is compared, once."""
    queries = 0

    def compare(self, items):
        self.queries += len(items)
        if self.queries > 60 and not Path("interrupted").exists():
            Path("interrupted").touch()
            os.kill(os.getpid(), signal.SIGINT)
        return [prefer(*item) for item in items]

interrupts = Interrupts()
'''


def preferences(first, last):
    return [
        {"prompt": f"{i}+1=", "chosen": "abc"[i % 3] * (1 + i % 2), "rejected": "xyz"[i % 3] * (1 + i % 3)}
        for i in range(first, last)
    ]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    make_job(folder)
    make_model(folder / "chat", chat=True)
    write(folder / "pairs.jsonl", preferences(0, 12))
    write(folder / "held.jsonl", preferences(12, 20))
    (folder / "oracles.py").write_text(ORACLES)
    return folder


@pytest.fixture
def job(made, tmp_path, monkeypatch):
    shutil.copytree(made, tmp_path / "job")
    monkeypatch.chdir(tmp_path / "job")
    return tmp_path / "job"


def pairs(method="dpo", *args, model="model", data="pairs.jsonl"):
    settings = ["epochs=4", "batch_size=4", "optim.lr=0.01"]
    return main(["train", method, "--model", model, "--data", data, "--dtype", "fp32", *settings, *args])


def game(method="inpo", *args, oracle="oracles.py:prefer"):
    settings = ["prompts_per_iteration=10", "samples=8", "max_new_tokens=4", "optim.lr=0.01", "keep_truncated=true"]
    settings += ["batch_size=20", "epochs=2", "iterations=2", "monitor_prompts=4"]
    extra = ["--oracle", oracle] if oracle else []
    return main(
        ["train", method, "--model", "model", "--data", "data.jsonl", "--dtype", "fp32", *extra, *settings, *args]
    )


INPO = ("eta=0.5", "tau=0.1")


def quiet(text):
    pass


# -- records -----------------------------------------------------------------------------------------------------------


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("row", "columns", "expected"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, {}, ("q", "a", "b")),
        (
            {"prompt": "q", "chosen": "a", "rejected": "b"},
            {"chat": True, "suffix": "!"},
            ([user("q!")], [assistant("a")], [assistant("b")]),
        ),
        ({"q": "x", "chosen": "a", "rejected": "b"}, {"prompt_column": "Say {q}"}, ("Say x", "a", "b")),
        (
            {"prompt": [user("q")], "chosen": [assistant("a")], "rejected": [assistant("b")]},
            {},
            ([user("q")], [assistant("a")], [assistant("b")]),
        ),
        (
            {"chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]},
            {},
            (None, [user("q"), assistant("a")], [user("q"), assistant("b")]),
        ),
        # A copy of the prompt as text beside conversations (UltraFeedback), as TRL reads it.
        (
            {"prompt": "q", "chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]},
            {"chat": True},
            (None, [user("q"), assistant("a")], [user("q"), assistant("b")]),
        ),
        (
            {"prompt": "q", "chosen": [assistant("a")], "rejected": [assistant("b")]},
            {"chat": True},
            ([user("q")], [assistant("a")], [assistant("b")]),
        ),
    ],
)
def test_records(tmp_path, row, columns, expected):
    path = write(tmp_path / "d.jsonl", [row | {"p": 0.75, "id": "same"}] * 2)  # ids repeat: several pairs of a prompt
    first, second = load_preferences(str(path), Columns(**columns), quiet)
    assert (first.get("prompt"), first["chosen"], first["rejected"]) == expected
    assert first == second and first["p"] == 0.75 and first["id"] == "same"


def test_records_that_teach_nothing_are_counted(tmp_path):
    good = {"prompt": "q", "chosen": "a", "rejected": "b"}
    rows = [good, good | {"rejected": "a"}, good | {"chosen": " "}, good | {"rejected": ""}]
    said = []
    assert len(load_preferences(str(write(tmp_path / "d.jsonl", rows)), Columns(), said.append)) == 1
    (line,) = said
    assert "left out 1 pair (both answers are equal), 2 pairs (an answer is empty); 1 of 4 records stay" in line
    talks = [
        {"chosen": [user("q"), assistant("a")], "rejected": [user("r"), assistant("b")]},
        {"chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("")]},
        {"chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]},
    ]
    said.clear()
    assert len(load_preferences(str(write(tmp_path / "t.jsonl", talks)), Columns(), said.append)) == 1
    assert "1 pair (the answers follow different prompts), 1 pair (an answer is empty)" in said[0]


def test_prompts_that_differ_within_the_conversation_are_found_on_the_tree(job, capsys):
    rows = [
        {"chosen": [user("a"), assistant("b"), user("x"), assistant("c")],
         "rejected": [user("a"), assistant("b"), user("y"), assistant("d")]},
        {"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]},
    ]  # fmt: skip
    write(job / "talk.jsonl", rows)
    assert pairs("dpo", "--out", "run", "epochs=1", model="chat", data="talk.jsonl") == 0
    said = capsys.readouterr().err
    assert "left out 1 pair (the answers follow different prompts); 1 of 2 records stay" in said
    assert "1 pairs (4 tokens of answers)" in said


# -- offline -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["dpo", "ipo"])
def test_a_job_learns_measures_and_saves(job, capsys, method):
    assert pairs(method, "--out", "run", "--eval-data", "held.jsonl") == 0
    assert "12 pairs" in capsys.readouterr().err
    found = results("run")
    before, after = found["arms"]["before"], found["arms"]["after"]
    assert before["margin_accuracy"]["mean"] == 0.5 and before["margin_accuracy"]["ci95"] == [0.5, 0.5]
    assert after["margin_accuracy"]["mean"] > 0.9 and after["margin_accuracy"]["n"] == 8
    assert before["margin"]["mean"] == 0 < 1 < after["margin"]["mean"]
    assert before["loss"]["mean"] == pytest.approx(0.693147 if method == "dpo" else 25.0, rel=1e-4)
    assert after["loss"]["mean"] < before["loss"]["mean"]
    assert found["verdict"] == "shown" and found["difference"]["mean"] > 0.4 and found["recipe"] == f"train {method}"
    lines = metrics("run")
    assert [line["step"] for line in lines] == list(range(13))
    assert lines[0]["eval/margin_accuracy"] == 0.5 and lines[-1]["eval/margin"] == pytest.approx(
        after["margin"]["mean"]
    )
    assert {"rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen"} <= set(
        lines[1]
    )
    model = AutoModelForCausalLM.from_pretrained("run/model")
    assert model.dtype == torch.float32 and Path("run/report.html").stat().st_size > 5000


@pytest.mark.parametrize(
    "settings",
    [
        ("form=robust", "label_smoothing=0.1"),
        ("form=hinge",),
        ("label_smoothing=0.2",),
        ("base=none",),
        ("--lora", "lora.rank=4"),
        ("reference_model=model",),
        ("steps=3",),
    ],
    ids=lambda s: "-".join(s),
)
def test_variants_run(job, settings):
    if "--lora" in settings:
        pytest.importorskip("peft")
    assert pairs("dpo", "--out", "run", "--eval-data", "held.jsonl", *settings) == 0
    lines = metrics("run")
    assert lines[-1]["loss"] < lines[1]["loss"] and Path("run/model-merged").exists() == ("--lora" in settings)
    plain = {"settings": results("run")["arms"]["before"]["margin_accuracy"]["mean"]}
    assert plain["settings"] == 0.5 or settings == ("base=none",)


def test_soft_labels_come_from_the_records(job, capsys):
    rows = [row | {"p": 0.1} for row in preferences(0, 12)]
    write(job / "soft.jsonl", rows)
    assert pairs("ipo", "--out", "run", "labels=soft", "--eval-data", "soft.jsonl", data="soft.jsonl") == 0
    after = results("run")["arms"]["after"]
    assert after["margin"]["mean"] < -1 and after["margin_accuracy"]["mean"] > 0.9  # "chosen" is the likelier loser
    assert pairs("ipo", "--out", "again", "labels=soft") == 2
    assert "labels=soft weighs both orders by the column 'p', which no record has" in capsys.readouterr().err


def test_without_held_out_pairs_nothing_is_claimed(job):
    assert pairs("dpo", "--out", "run") == 0
    found = results("run")
    assert found["verdict"] == "not shown" and "training_accuracy" in found["arms"]["after"]


def test_killed_and_resumed_equals_unbroken(job):
    assert pairs("dpo", "--out", "whole", "--eval-data", "held.jsonl") == 0
    assert pairs("dpo", "--out", "run", "--eval-data", "held.jsonl", "epochs=2") == 0
    assert pairs("dpo", "--out", "run", "--eval-data", "held.jsonl", "--resume") == 0
    whole, run = metrics("whole"), metrics("run")
    drop = lambda line: {k: v for k, v in line.items() if not k.startswith("eval/")}  # noqa: E731
    assert [drop(line) for line in whole] == [drop(line) for line in run]
    assert results("whole")["arms"] == results("run")["arms"]


# -- games -------------------------------------------------------------------------------------------------------------


def test_a_game_learns_measures_and_saves(job, capsys):
    assert game("inpo", "--out", "run", "--eval-data", "held_out.jsonl", *INPO, "iterations=3") == 0
    said = capsys.readouterr().err
    assert "10 prompts x 8 samples = 80 answers an iteration, up to 40 pairs (iid), 2 passes: up to 4 updates" in said
    found = results("run")
    assert found["arms"]["after"]["win_rate"]["mean"] > 0.6 and found["verdict"] == "shown"
    assert found["arms"]["after"]["win_rate"]["n"] == 10 and found["difference"]["ci95"][0] > 0
    rows = {name: json.loads(Path(f"run/eval_{name}.json").read_text())["rows"] for name in ("before", "after")}
    share = lambda text: sum(c in "abc" for c in text) / max(1, len(text))  # noqa: E731
    for before, after in zip(rows["before"], rows["after"], strict=True):
        assert after["win"] == pytest.approx(0.5 + 0.5 * (share(after["text"]) - share(before["text"])))
    lines = metrics("run")
    firsts = [line for line in lines if "pairs/made" in line]
    assert len(firsts) == 3 and all(line["moved/max"] < 1e-4 for line in firsts)
    lasts = [line for line in lines if "kl/previous" in line]
    assert len(lasts) == 3 and lasts[-1]["win_rate/first"] >= 0.5 and lines[-1]["step"] == 12
    budget = found["budget"]["after"]
    sampled = sum(line.get("tokens/generated", 0) for line in lines)
    assert budget["tokens_generated"] > sampled and budget["verifier_calls"] > sum(l["pairs/queries"] for l in firsts)  # noqa: E741
    assert found["examples"][0]["prompt"] == "0+2=" and Path("run/trees.sqlite").is_file()


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("sppo", ("beta=0.5",)),
        ("sppo", ("beta=0.5", "pair_mode=max_min")),
        ("online-dpo", ("beta=0.5",)),
        ("online-dpo", ("beta=0.5", "base=previous", "pair_mode=tournament")),
        ("online-dpo", ("loss=ipo", "beta=0.5", "pair_mode=soft")),
        ("online-dpo", ("loss=nash_md", "beta=0.05", "epochs=1", "mixture=0.3")),
        ("inpo", ("tau=0.2", "eta_schedule=growing", "valid_share=0.3", "patience=2")),
        ("inpo", ("eta=0.5", "--lora", "lora.rank=4", "optim.lr=0.02")),
    ],
    ids=lambda s: s if isinstance(s, str) else "-".join(s),
)
def test_methods_run(job, method, settings):
    if "--lora" in settings:
        pytest.importorskip("peft")
    assert game(method, "--out", "run", *settings) == 0
    lines = metrics("run")
    assert lines[-1]["iteration"] == 2 and "kl/reference" in lines[-1] and lines[-1]["arm"] == method
    assert Path("run/model-merged").exists() == ("--lora" in settings)


def test_a_reward_is_bradley_terry(job):
    args = ("--reward", "rewards.py:native", "scale=4", "--eval-data", "held_out.jsonl")
    assert game("inpo", "--out", "run", *args, *INPO, "iterations=4", "epochs=4", oracle=None) == 0
    arms = results("run")["arms"]
    assert arms["after"]["reward"]["mean"] > arms["before"]["reward"]["mean"]
    assert arms["after"]["win_rate"]["mean"] > 0.5
    # Best against worst reads the rewards: one comparison a pair.
    assert game("online-dpo", "--out", "best", *args[:3], "pair_mode=max_min", oracle="reward") == 0
    first = metrics("best")[0]
    assert first["pairs/queries"] == first["pairs/made"] <= 10


def test_both_orders_are_asked(job, capsys):
    common = ("iterations=1", "monitor_prompts=0", *INPO)
    assert game("inpo", "--out", "one", *common, oracle="oracles.py:not_antisymmetric") == 0
    assert game("inpo", "--out", "two", "both_orders=true", *common, oracle="oracles.py:not_antisymmetric") == 0
    one, two = (results(name)["budget"]["after"]["verifier_calls"] for name in ("one", "two"))
    assert two == 2 * one
    assert metrics("two")[0]["pairs/p"] == pytest.approx(0.5) and metrics("one")[0]["pairs/p"] > 0.7


def test_interrupted_and_resumed_equals_unbroken(job, capsys):
    (job / "interrupted").touch()
    assert game("inpo", "--out", "whole", *INPO, "--eval-data", "held_out.jsonl", oracle="oracles.py:interrupts") == 0
    (job / "interrupted").unlink()
    args = ("inpo", "--out", "run", *INPO, "--eval-data", "held_out.jsonl")
    assert game(*args, oracle="oracles.py:interrupts") == 130
    assert "add --resume to go on" in capsys.readouterr().err
    assert 0 < metrics("run")[-1]["step"] < 8
    assert game(*args, "--resume", oracle="oracles.py:interrupts") == 0
    assert metrics("run") == metrics("whole") and results("run")["arms"] == results("whole")["arms"]
    # And further iterations on top.
    assert game(*args, "--resume", "iterations=3", oracle="oracles.py:interrupts") == 0
    assert metrics("run")[-1]["iteration"] == 3
    assert game(*args, "--resume", "epochs=3", oracle="oracles.py:interrupts") == 2
    assert "epochs" in capsys.readouterr().err


def test_game_arithmetic():
    config = GameConfig(iterations=3, prompts_per_iteration=64, samples=8, batch_size=32)
    assert batch_arithmetic(config, 1000) == (
        "64 prompts x 8 samples = 512 answers an iteration, up to 256 pairs (iid), 1 pass: up to 8 updates; "
        "3 iterations = 0.188 passes over 1000 prompts"
    )


# -- refusals before compute -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "args", "message"),
    [
        ("dpo", ["--reward", "rewards.py:share"], "--reward: dpo has no reward; leave it out"),
        ("dpo", ["--oracle", "oracles.py:prefer"], "--oracle: dpo has no oracle; leave it out"),
        ("ipo", ["--judge-url", "http://localhost:1"], "--judge-url, --judge-model: ipo has no oracle"),
        ("ipo", ["form=hinge"], "form"),
        ("dpo", ["eta=1"], "eta"),
        ("dpo", ["label_smoothing=0.6"], "label_smoothing=0.6: the share of flipped labels lies in"),
        ("dpo", ["beta=0"], "beta=0.0: give a positive number"),
        ("dpo", ["max_length=0"], "max_length=0: give at least 1"),
        ("dpo", ["base=none", "reference_model=model"], "base=none reads no reference"),
        ("dpo", ["--answer-column", "chosen"], "answer_column: a preference record has its answers in"),
        ("dpo", ["--data", "data.jsonl"], "chosen"),
        ("dpo", ["--data", "bare.jsonl"], "a preference record has `prompt`, `chosen` and `rejected`"),
        ("dpo", ["--data", "p.jsonl"], "record 0: column 'p' is 1.5; give the probability"),
        ("dpo", ["--data", "same.jsonl"], "no pair is left of 2 records; left out: 2 pairs (both answers are equal)"),
        ("dpo", ["--data", "talk.jsonl", "--suffix", "!"], "suffix: the prompts stand in the conversations"),
        ("inpo", [], "no oracle: give --oracle FILE.py:NAME"),
        ("inpo", ["--oracle", "judge"], "oracle=judge: give judge.url=...; oracle=judge: give judge.model=..."),
        ("inpo", ["--oracle", "reward"], "oracle=reward compares by a reward"),
        ("inpo", ["--oracle", "oracles.py:prefer", "--reward", "rewards.py:share"], "it judges alone"),
        ("inpo", ["--oracle", "oracles.py:outside", "prompts_per_iteration=9"], "gave 2.0 for task '0'"),
        ("inpo", ["--oracle", "oracles.py:wrong"], "takes (a); write f(task, a, b) -> P(a wins)"),
        ("inpo", ["--oracle", "oracles.py:nothing"], "nothing"),
        ("inpo", ["--oracle", "oracles.py:prefer", "eta=0.1", "tau=0.2"], "tau=0.2 exceeds eta=0.1"),
        ("inpo", ["--oracle", "oracles.py:prefer", "beta=0.1"], "beta"),
        ("sppo", ["--oracle", "oracles.py:prefer", "pair_mode=soft"], "pair_mode='soft': with loss=sppo give one of"),
        ("inpo", ["--oracle", "oracles.py:prefer"], "prompts_per_iteration=64 exceeds the 10 prompts of data.jsonl"),
        ("inpo", ["--reward", "rewards.py:nan", "prompts_per_iteration=9"], "nan"),
        ("inpo", ["--reward", "rewards.py:share", "scale=0"], "scale=0.0: give a positive number"),
    ],
)
def test_refused_before_the_model_is_loaded(job, monkeypatch, capsys, method, args, message):
    write(job / "bare.jsonl", [{"chosen": "a", "rejected": "b"}])
    write(job / "p.jsonl", [{"prompt": "q", "chosen": "a", "rejected": "b", "p": 1.5}])
    write(job / "same.jsonl", [{"prompt": "q", "chosen": "a", "rejected": "a"}] * 2)
    write(job / "talk.jsonl", [{"chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]}])
    monkeypatch.setattr("forethought.recipes.own_job.open_model", lambda *a, **k: pytest.fail("the model was loaded"))
    before = sorted(job.rglob("*"))
    data = "data.jsonl" if method in ("inpo", "sppo") else "pairs.jsonl"
    assert main(["train", method, "--model", "model", "--data", data, "--out", "run", *args]) == 2
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said
    assert [p for p in sorted(job.rglob("*")) if "__pycache__" not in p.parts] == before


def test_refused_before_the_run_folder_is_made(job, capsys):
    assert pairs("dpo", "--out", "run", "reference_model=chat") == 2
    assert "reference_model='chat' has another tokenizer than the model" in capsys.readouterr().err
    assert pairs("dpo", "--out", "run", "max_length=3") == 2
    assert "no pair is left of 12 records; left out: 12 pairs (a path is too long)" in capsys.readouterr().err
    assert not (job / "run").exists()


def test_an_oracle_that_raises_is_told_and_then_ends_the_run(job, capsys):
    assert game("inpo", "--out", "run", *INPO, oracle="oracles.py:raises") == 2
    said = capsys.readouterr().err
    assert "pairs on which it fails are left out" in said and "comparisons failed; the first" in said
    assert "no such judge" in said
