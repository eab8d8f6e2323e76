"""`forethought pairs`: from prompts to preference records on a tiny model, a teacher's server, or samples at hand."""

import json
import re
import shutil
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from fakeserver import completion, servers
from forethought.cli import main
from forethought.config import from_dict
from forethought.data import read_jsonl
from forethought.errors import ConfigError, RewardError
from forethought.models.chat import ChatRenderer, preference_tree
from forethought.models.load import load_model
from forethought.recipes import preference_data
from forethought.recipes.preference_data import verdict_of
from forethought.recipes.preference_job import JudgeSettings, PairsJob
from forethought.rewards.reward import Reward
from tinyjob import REWARDS, make_model, results, write

ORACLES = '''
import os, signal
from pathlib import Path

def early(task, a, b):
    """The answer that comes first in the alphabet is better."""
    return 0.9 if a < b else 0.1

def leans(task, a, b):
    return min(1.0, early(task, a, b) + 0.1)

def high(task, a, b):
    return 1.5

def half_down(task, a, b):
    """Fails on every other prompt until the file `mended` is there."""
    if int(task["id"]) % 2 and not Path("mended").exists():
        raise OSError("no route to the judge")
    return early(task, a, b)

def down(task, a, b):
    raise OSError("no route to the judge")

def interrupts(task, a, b):
    """Ctrl-C at the sixth prompt, once."""
    if task["id"] == "5" and not Path("interrupted").exists():
        Path("interrupted").touch()
        os.kill(os.getppid(), signal.SIGINT)
    return early(task, a, b)
'''
JUDGES = '''
def vowel(completions, **kw):
    """Right: begins with a letter of the first half."""
    return [float(text[:1] < "n") for text in completions]

def same(completions, **kw):
    return [1.0] * len(completions)

def picky(tree, leaf, task, text):
    if "z" in text:
        raise ValueError("z")
    return float(text[:1] < "n")
'''


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    make_model(folder / "model")
    write(folder / "data.jsonl", [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(10)])
    (folder / "oracles.py").write_text(ORACLES)
    (folder / "judges.py").write_text(REWARDS + JUDGES)
    return folder


@pytest.fixture
def job(made, tmp_path, monkeypatch):
    shutil.copytree(made, tmp_path / "job")
    monkeypatch.chdir(tmp_path / "job")
    return tmp_path / "job"


@pytest.fixture
def serve(monkeypatch):
    with servers(monkeypatch) as start:
        yield start


BASE = ["--model", "model", "--data", "data.jsonl", "--dtype", "fp32", "max_new_tokens=5", "keep_truncated=true"]


def pairs(*args, base=BASE, out="run"):
    return main(["pairs", *base, "--out", out, *args])


def read(name="pairs", out="run"):
    return read_jsonl(Path(out) / f"{name}.jsonl")


def without_times(out="run"):
    found = results(out)
    for budget in found["budget"].values():
        budget.pop("wall_s")
    return found


# -- a whole job -------------------------------------------------------------------------------------------------------


def test_verified_pairs_end_to_end(job, capsys):
    assert pairs("--reward", "judges.py:vowel", "--samples", "6", "pairs_per_prompt=2") == 0
    records, rollouts, judged = read(), read("rollouts"), read("judged")
    assert [r["id"] for r in rollouts] == [r["id"] for r in judged] == [str(i) for i in range(10)]
    assert all(len(r["samples"]) == 6 and r["samples"][0]["length"] == len(r["samples"][0]["ids"]) for r in rollouts)
    samples = {r["id"]: r["samples"] for r in rollouts}
    assert 8 <= len(records) <= 20
    for record in records:
        mine = samples[record["id"]]
        assert record["prompt"] == f"{record['id']}+1="
        assert record["chosen"] == mine[record["chosen_sample"]]["text"] and record["chosen"][:1] < "n"
        assert record["rejected"] == mine[record["rejected_sample"]]["text"] and record["rejected"][:1] >= "n"
        assert record["chosen_length"] == mine[record["chosen_sample"]]["length"]
        assert (record["p"], record["chosen_reward"], record["rejected_reward"]) == (1.0, 1.0, 0.0)
        assert (record["chosen_verdict"], record["rejected_verdict"]) == ("right", "wrong")
    found = results("run")
    counts = found["counts"]
    assert counts["pairs"] == len(records) and (counts["prompts"], counts["samples"]) == (10, 60)
    (budget,) = found["budget"].values()
    assert budget["tokens_generated"] == sum(s["length"] for r in rollouts for s in r["samples"])
    assert budget["verifier_calls"] == 60 and budget["wall_s"] > 0
    with_pair = len({r["id"] for r in records}) / 10
    assert found["arms"]["verified"]["share of prompts with a pair"]["mean"] == pytest.approx(with_pair)
    shown = capsys.readouterr()
    assert f"{len(records)} pairs from 10 prompts, 60 samples" in shown.err
    assert "P(chosen wins): mean 1, 1 to 1" in shown.out and "Record 1" in shown.out
    # The records are what a trainer reads.
    _, tokenizer = load_model("model", say=lambda _: None)
    tree = preference_tree(ChatRenderer(tokenizer), records[0])
    assert [m["label"] for m in tree.meta if "label" in m] == ["chosen", "rejected"]


def test_tournament_end_to_end(job):
    assert pairs("--oracle", "oracles.py:early") == 0
    records, rollouts = read(), {r["id"]: r["samples"] for r in read("rollouts")}
    assert len(records) == 10  # a transitive oracle confirms every final
    for record in records:
        texts = [s["text"] for s in rollouts[record["id"]] if s["text"].strip()]
        played = texts if len(texts) == 8 else texts[:4]
        assert record["chosen"] == min(played) and record["p"] == 0.9 and record["rejected"] > record["chosen"]
    (budget,) = results("run")["budget"].values()
    assert results("run")["counts"]["queries"] <= 110 and budget["queries"] == results("run")["counts"]["queries"] + 2


@pytest.mark.parametrize(("mode", "count"), [("iid", 40), ("soft", 40), ("max_min", 10)])
def test_other_modes(job, mode, count):
    assert pairs("--oracle", "oracles.py:early", "--mode", mode) == 0
    records = read()
    assert count - 2 <= len(records) <= count
    for r in records:
        better = r["chosen"] < r["rejected"]
        assert r["p"] == pytest.approx(0.9 if better else 0.1)
        assert better or mode != "max_min"
    assert set(results("run")["arms"]) == {mode}


def test_bradley_terry_on_a_reward(job):
    assert pairs("--oracle", "reward", "--reward", "judges.py:share", "--mode", "max_min", "scale=2") == 0
    records = read()
    assert records and all(r["p"] > 0.5 for r in records)
    share = lambda text: sum(c in "abc" for c in text) / max(1, len(text))  # noqa: E731
    import math

    for r in records:
        assert r["p"] == pytest.approx(1 / (1 + math.exp(-2 * (share(r["chosen"]) - share(r["rejected"])))))
    (budget,) = results("run")["budget"].values()
    assert budget["verifier_calls"] >= 70


def test_the_math_verifier_and_a_missing_answer(job):
    rows = [
        {"id": "a", "prompt": "1+1=", "answer": 2, "samples": [r"\boxed{2}", r"\boxed{3}", "three", r"so \boxed{2}"]}
    ]
    rows.append({"id": "b", "prompt": "1+2=", "answer": 3, "samples": [r"\boxed{3}", "none"]})
    write(job / "bank.jsonl", rows)
    base = ["--rollouts", "bank.jsonl", "--reward", "math", "pairs_per_prompt=9"]
    assert pairs(base=base) == 0
    assert [(r["chosen_sample"], r["rejected_sample"]) for r in read()] == [(0, 1), (3, 1)]
    assert read()[0]["rejected_why"] == "not equal"
    dropped = results("run")["counts"]["dropped"]
    assert dropped == {"sample/unknown": 2, "prompt/all right": 1}
    assert pairs("no_answer=wrong", base=base, out="strict") == 0
    assert len(read(out="strict")) == 5 and "dropped" in results("strict")["counts"]


def test_rollouts_of_an_earlier_run_are_judged_anew(job):
    assert pairs("--reward", "judges.py:vowel") == 0
    base = ["--rollouts", "run/rollouts.jsonl", "--oracle", "oracles.py:early", "keep_truncated=true"]
    assert pairs(base=base, out="again") == 0
    assert len(read(out="again")) == 10
    (budget,) = results("again")["budget"].values()
    assert budget["tokens_generated"] == 0


def test_filters_are_counted(job):
    bank = [
        {"text": "a", "length": 2},
        {"text": "b", "length": 9},
        {"text": "c", "length": 4, "stop": "length"},
        {"text": " ", "length": 1},
        {"text": "", "length": 0, "stop": "error", "error": "HTTP 500"},
        {"text": "d", "length": 3},
        {"text": "e"},
    ]
    write(job / "bank.jsonl", [{"prompt": "q", "samples": bank}])
    args = ["--oracle", "oracles.py:early", "--mode", "iid", "max_length=8"]
    assert pairs(*args, base=["--rollouts", "bank.jsonl"]) == 0
    (record,) = read()
    assert {record["chosen"], record["rejected"]} == {"a", "d"}
    reasons = ("failed", "empty", "truncated", "too long", "odd")
    assert results("run")["counts"]["dropped"] == {f"sample/{reason}": 1 for reason in reasons}


def test_the_same_pair_of_two_records_stands_once(job):
    same = {"prompt": "q", "samples": ["a", "b"]}
    write(job / "bank.jsonl", [{"id": "x", **same}, {"id": "y", **same}, {"id": "z", **same, "prompt": "r"}])
    assert pairs("--oracle", "oracles.py:early", base=["--rollouts", "bank.jsonl"]) == 0
    assert [(r["id"], r["chosen"], r["rejected"]) for r in read()] == [("x", "a", "b"), ("z", "a", "b")]
    counts = results("run")["counts"]
    assert counts["pairs"] == 2 and counts["dropped"] == {"pair/duplicate": 1}


def test_conversations(job):
    make_model(job / "chat", chat=True)
    base = ["--model", "chat", "--data", "data.jsonl", "--chat", "max_new_tokens=5", "keep_truncated=true"]
    assert pairs("--reward", "judges.py:seen_messages", "right_at=5", base=base) == 0
    record = read()[0]
    assert record["prompt"][0]["role"] == "user" and record["chosen"][0]["role"] == "assistant"
    assert len(record["chosen"][0]["content"]) >= 5 > len(record["rejected"][0]["content"])


# -- resume ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(preference_data, "CHUNK", 16)  # 2 prompts of 8 samples


def test_resume_after_ctrl_c_equals_an_unbroken_job(job, small_chunks, capsys):
    assert pairs("--oracle", "oracles.py:early", out="whole") == 0
    assert pairs("--oracle", "oracles.py:interrupts") == 130
    assert "prompts are judged and kept in" in capsys.readouterr().err
    done = len(read("judged"))
    assert 0 < done < 10 and len(read("rollouts")) in (done, done + 2)
    sampled = {r["id"]: r for r in read("rollouts")}
    with open("run/rollouts.jsonl", "a") as file:
        file.write('{"id": "9", "prom')  # a kill inside a write
    seen = []
    spy = preference_data._Work._judged
    try:
        preference_data._Work._judged = lambda self, chunk, files: (
            seen.extend(t["id"] for t in chunk) or spy(self, chunk, files)
        )
        assert pairs("--oracle", "oracles.py:interrupts", "--resume") == 0
    finally:
        preference_data._Work._judged = spy
    assert seen == [str(i) for i in range(done, 10)]  # judged prompts are not judged again
    assert read() == read(out="whole")
    assert {r["id"]: r for r in read("rollouts")} | sampled == {r["id"]: r for r in read("rollouts", "whole")}
    whole, resumed = without_times("whole"), without_times("run")
    assert resumed["counts"] == whole["counts"]
    (one,), (two,) = whole["budget"].values(), resumed["budget"].values()
    assert two["tokens_generated"] >= one["tokens_generated"]


def test_failed_comparisons_are_told_and_tried_again_on_resume(job, small_chunks, capsys):
    assert pairs("--oracle", "oracles.py:half_down") == 0
    said = capsys.readouterr().err
    assert "5 prompts with a comparison that failed" in said and "no route to the judge" in said
    assert len(read()) == 5 and results("run")["counts"]["dropped"]["prompt/not judged"] == 5
    Path("mended").touch()
    assert pairs("--oracle", "oracles.py:half_down", "--resume") == 0
    assert len(read()) == 10 and "prompt/not judged" not in results("run")["counts"]["dropped"]
    assert [r["id"] for r in read()] == [str(i) for i in range(10)]
    (budget,) = results("run")["budget"].values()
    assert budget["tokens_generated"] == sum(s["length"] for r in read("rollouts") for s in r["samples"])


def test_failed_rewards_are_unknown(job, capsys):
    assert pairs("--reward", "judges.py:picky") == 0
    counts = results("run")["counts"]
    texts = [s["text"] for r in read("rollouts") for s in r["samples"]]
    assert counts["dropped"]["sample/unknown"] == sum("z" in t for t in texts if t) > 0
    assert counts["failure"] == "reward function 'picky' raised ValueError: z"
    assert not any("z" in r["chosen"] + r["rejected"] for r in read())


def test_a_judge_that_is_down_stops_the_job_and_keeps_the_samples(job, small_chunks, capsys):
    assert pairs("--oracle", "oracles.py:down") == 2
    said = capsys.readouterr().err
    assert "raised OSError: no route to the judge" in said and "go on with --resume" in said
    assert len(read("rollouts")) == 2 and read("judged") == []


def test_the_budget_of_comparisons(job, small_chunks, capsys):
    assert pairs("--oracle", "oracles.py:early", "max_queries=60") == 0
    assert "max_queries=60 is used up: 5 of 10 prompts stay unjudged" in capsys.readouterr().err
    (budget,) = results("run")["budget"].values()
    assert budget["queries"] <= 60 and len(read("judged")) == 5
    assert "5 prompts were not judged" in results("run")["notes"]
    assert pairs("--oracle", "oracles.py:early", "max_queries=200", "--resume") == 0
    assert len(read()) == 10


def test_a_changed_job_is_not_resumed(job, capsys):
    assert pairs("--oracle", "oracles.py:early") == 0
    assert pairs("--oracle", "oracles.py:early", "--resume", "seed=1") == 2
    assert "seed" in capsys.readouterr().err
    assert pairs("--oracle", "oracles.py:early", "--overwrite", "seed=1") == 0
    assert len(read("rollouts")) == 10


# -- servers -----------------------------------------------------------------------------------------------------------


def test_a_teacher_and_a_judge_over_http(job, serve, capsys):
    """Samples from one server, comparisons from another that prefers what stands first."""
    teacher = serve(lambda body, i: completion(*[f"word{(j * 3 + 1) % body['n']}" for j in range(body["n"])]))

    def judge(body, i):
        text = body["messages"][-1]["content"]
        a, b = (int(n) for n in re.findall(r">\nword(\d+)\n", text)) if "word" in text else (1, 0)
        top = {"A": -0.2 if a > b else -1.2, "B": -1.2 if a > b else -0.5}
        return completion("A", logprobs=[("A", top)])

    judges = serve(judge)
    base = ["--model", "teacher", "--endpoint", teacher.url, "--data", "data.jsonl", "--limit", "3"]
    args = ["--oracle", "judge", "--judge-url", judges.url, "--judge-model", "j"]
    assert pairs(*args, base=base) == 0
    assert [(r["chosen"], r["rejected"]) for r in read()] == [("word7", "word0")] * 3
    asked = sorted(body["messages"][0]["content"] for body in teacher.seen)
    assert asked == ["0+1=", "1+1=", "2+1="] and teacher.seen[0]["messages"][0]["role"] == "user"
    assert read("rollouts")[0]["samples"][0] == {"text": "word1", "stop": "eos", "length": 6}
    (budget,) = results("run")["budget"].values()
    assert budget["judge_calls"] == len(judges.seen) and budget["judge_tokens"] > 0
    assert "not antisymmetric" in capsys.readouterr().err  # what the two orders took away
    calls = len(judges.seen)
    Path("run/judged.jsonl").write_text("")
    assert pairs(*args, "--resume", base=base) == 0
    assert len(judges.seen) == calls and len(teacher.seen) == 3  # all from the files


def test_garbage_from_the_judge_is_counted_missing(job, serve):
    replies = serve(lambda body, i: completion("well" if "word0" in json.dumps(body) else "A"))
    bank = [{"prompt": f"q{i}", "samples": [f"word{i + j}" for j in range(2)]} for i in range(3)]
    write(job / "bank.jsonl", [{"prompt": "first", "samples": ["x", "y"]}, *bank])
    args = ["--oracle", "judge", "--judge-url", replies.url, "--judge-model", "j", "--mode", "soft"]
    assert pairs(*args, base=["--rollouts", "bank.jsonl"]) == 0
    counts = results("run")["counts"]
    assert counts["dropped"] == {"pair/not judged": 1} and "no choice between A and B" in counts["failure"]
    assert [r["p"] for r in read()] == [0.5] * 3  # always A is a tie


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "no judge: give --reward FILE.py:NAME"),
        (["--oracle", "reward"], "oracle=reward compares by a reward: give --reward"),
        (["--oracle", "oracles.py:early", "--reward", "judges.py:vowel"], "it judges alone"),
        (["--oracle", "judge", "--judge-url", "http://localhost:1/v1"], "oracle=judge: give judge.model=..."),
        (["--reward", "judges.py:vowel", "--mode", "iid"], "mode=iid compares: give --oracle"),
        (["--oracle", "oracles.py:early", "--mode", "verified"], "mode=verified reads a reward"),
        (["--oracle", "oracles.py:early", "--samples", "6"], "samples=6: a tournament needs a power of two"),
        (["--reward", "judges.py:vowel", "--samples", "1"], "samples=1: a pair needs at least 2"),
        (["--reward", "judges.py:vowel", "temperature=0"], "temperature=0.0: equal samples make no pairs"),
        (
            ["--reward", "judges.py:vowel", "pairs_per_prompt=0", "max_length=0"],
            "pairs_per_prompt=0: give at least 1; max_",
        ),
        (["--reward", "judges.py:vowell"], "did you mean 'vowel'"),
        (["--oracle", "oracles.py:earl"], "did you mean 'early'"),
        (["--oracle", "oracles.py:high"], "trial comparison before the run: oracle 'oracles.py:high' gave 1.5"),
        (["--reward", "judges.py:vowel", "pairs_per_promt=2"], "did you mean 'pairs_per_prompt'"),
        (["--reward", "judges.py:vowel", "--rollouts", "data.jsonl"], "leave --model, --data and --endpoint out"),
        (["--reward", "math", "--answer-column", "gold"], "'gold'"),
    ],
)
def test_bad_input(job, capsys, args, said):
    assert pairs(*args) == 2
    assert said in capsys.readouterr().err
    assert not Path("run/pairs.jsonl").exists() or not read("rollouts")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "q"}, "no column 'samples'"),
        ({"prompt": "q", "samples": ["a"]}, "samples is ['a']; give a list of at least 2"),
        ({"prompt": "q", "samples": ["a", 3]}, "samples[1] is 3; give text"),
        ({"prompt": "q", "samples": ["a", "b", "c"]}, "samples=3: a tournament needs a power of two"),
    ],
)
def test_bad_rollouts(job, capsys, row, said):
    write(job / "bank.jsonl", [row])
    assert pairs("--oracle", "oracles.py:early", base=["--rollouts", "bank.jsonl"]) == 2
    assert said in capsys.readouterr().err


def test_an_empty_result_says_which_filter_removed_everything(job, capsys):
    assert pairs("--reward", "judges.py:same") == 2
    said = capsys.readouterr().err
    assert "nothing is left: 0 pairs from 10 prompts, 80 samples" in said
    assert "10 prompts without a wrong sample. Most were removed as: prompts without a wrong sample" in said
    assert read() == [] and results("run")["counts"]["dropped"]["prompt/all right"] == 10


# -- parts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [
        (Reward(1.0), "right"),
        (Reward(0.0), "wrong"),
        (Reward(-1.0), "wrong"),
        (Reward(float("nan")), "unknown"),
        (RewardError("late"), "unknown"),
        (Reward(0.0, {"outcome": 0.0, "extracted": 1.0, "timed_out": 1.0}), "unknown"),
        (Reward(0.0, {"math/extracted": 0.0, "math/timed_out": 0.0}), "unknown"),
        (Reward(0.0, {"extracted": 1.0, "timed_out": 0.0}), "wrong"),
    ],
)
def test_verdicts(outcome, verdict):
    assert verdict_of(outcome)["verdict"] == verdict


def test_verdict_settings():
    assert verdict_of(Reward(0.4), right_at=0.4)["verdict"] == "right"
    assert verdict_of(Reward(0.0, {"extracted": 0.0}), no_answer="wrong")["verdict"] == "wrong"
    assert verdict_of(RewardError("late")) == {"verdict": "unknown", "why": "late", "failed": True}


def test_costs():
    for mode, cost in (("tournament", 11), ("iid", 4), ("soft", 4), ("max_min", 28)):
        assert from_dict(PairsJob, {"oracle": "x.py:f", "mode": mode}, source="t").cost(8) == cost
    assert PairsJob(oracle="reward", mode="max_min").cost(8) == 1
    with pytest.raises(ConfigError, match="reward_timeout=0"):
        PairsJob(reward_timeout=0)


def test_every_setting_is_in_the_guide():
    text = (Path(__file__).resolve().parents[2] / "docs" / "data-and-rewards.md").read_text()
    part = text.split("### Settings of `forethought pairs`")[1].split("\n## ")[0]
    told = dict(re.findall(r"^\| `([\w.]+)` \| ?(.*?) ?\|", part, re.M))

    def shown(value):
        if value is None:
            return "null"
        return str(value).lower() if isinstance(value, bool) else "[]" if value == () else str(value)

    flags = ("model", "data", "endpoint", "rollouts", "reward", "oracle", "mode", "samples", "prompt_column", "suffix")
    flags += ("answer_column", "chat", "limit", "device", "dtype")
    real = {f.name: shown(getattr(PairsJob(), f.name)) for f in fields(PairsJob)}
    real = {k: v for k, v in real.items() if k not in (*flags, "judge")}
    real |= {f"judge.{f.name}": shown(getattr(JudgeSettings(), f.name)) for f in fields(JudgeSettings)}
    assert told == real and is_dataclass(JudgeSettings)
