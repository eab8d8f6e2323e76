"""`forethought eval`: numbers from rows, rows from the model, and real files by named columns."""

import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from forethought.cli import main
from forethought.data import read_jsonl
from forethought.evaluate.metrics import Row
from forethought.evaluate.stats import wilson
from forethought.evaluate.suites import EvalResult
from forethought.models.torch_engine import TorchEngine
from forethought.recipes import evaluation
from forethought.recipes.evaluation import estimates
from forethought.tree.tree import Stop
from tinyjob import make_job, make_model, metrics, results, write


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    make_job(folder)
    write(folder / "copy.jsonl", [{"prompt": f"{i % 3}=", "answer": i % 3} for i in range(9)])
    return folder


@pytest.fixture
def job(made, tmp_path, monkeypatch):
    shutil.copytree(made, tmp_path / "job")
    monkeypatch.chdir(tmp_path / "job")
    return tmp_path / "job"


def ev(*args, out="run"):
    command = ["eval", "--model", "model", "--data", "copy.jsonl", "--max-new-tokens", "8", "--extract", "last_number"]
    return main([*command, "--dtype", "fp32", "--out", out, *args])


def rows(folder="run"):
    return read_jsonl(Path(folder) / "rows.jsonl")


# -- numbers -----------------------------------------------------------------------------------------------------------


def result(*tasks):
    """A suite from lists of (right, answer, text, stop)."""
    made = [
        Row(str(i), j, right, float(right), text=text, answer=answer, length=len(text), stop=stop)
        for i, samples in enumerate(tasks)
        for j, (right, answer, text, stop) in enumerate(samples)
    ]
    return EvalResult("t", [str(i) for i in range(len(tasks))], len(tasks[0]), made)


YES, NO = (True, "4", r"\boxed{4}", Stop.EOS), (False, "5", "is 5", Stop.LENGTH)
NONE = (False, None, "dunno", Stop.EOS)


def test_several_samples_by_hand():
    found = estimates(result([YES, YES, NO, NO], [NO, NO, YES, NONE], [NONE] * 4))
    assert found["accuracy"].mean == found["avg@4"].mean == pytest.approx(3 / 12)
    assert found["pass@2"].mean == pytest.approx((1 - 1 / 6 + 1 / 2 + 0) / 3)
    assert found["pass@4"].mean == pytest.approx(2 / 3) and found["pass@4"].low == wilson(2, 3).low
    # Ties go to the answer that was seen first; no answer at all is wrong.
    assert found["maj@4"].mean == pytest.approx(1 / 3)
    assert found["boxed"].mean == pytest.approx(3 / 12) and found["truncated"].mean == pytest.approx(4 / 12)
    assert found["accuracy"].low < 0.25 < found["accuracy"].high
    assert found["repeated"].mean == 0 and found["repeated"].high == wilson(0, 3).high
    assert found["length"].mean == pytest.approx((2 * 9 + 2 * 4 + 2 * 4 + 9 + 5 + 20) / 12)


def test_one_sample_has_wilson_intervals_and_no_votes():
    found = estimates(result([YES], [NO], [NO], [YES], [YES]))
    assert (found["accuracy"].low, found["accuracy"].high) == (wilson(3, 5).low, wilson(3, 5).high)
    assert set(found) == {"accuracy", "boxed", "truncated", "repeated", "length"}


# -- the command -------------------------------------------------------------------------------------------------------


def test_greedy_rows_are_the_model_s_own(job):
    assert ev() == 0
    model, tokenizer = AutoModelForCausalLM.from_pretrained("model"), AutoTokenizer.from_pretrained("model")
    found = rows()
    assert [r["task"] for r in found] == [str(i) for i in range(9)]
    for row in found:
        ids = tokenizer(row["prompt"], return_tensors="pt")["input_ids"]
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
        assert row["text"] == tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert results("run")["arms"]["model"]["accuracy"]["n"] == 9


def test_numbers_follow_from_the_rows(job):
    assert ev("--samples", "16", "--temperature", "1.5") == 0
    found = rows()
    assert [(r["task"], r["sample"]) for r in found] == [(str(i), j) for i in range(9) for j in range(16)]
    for row in found:
        last = re.findall(r"\d+(?:\.\d+)?", row["text"])[-1:]
        assert row["right"] == (bool(last) and float(last[0]) == row["gold"]), row
    means = [np.mean([r["right"] for r in found if r["task"] == str(i)]) for i in range(9)]
    assert 0 < sum(means) < 9
    got = results("run")
    cells = got["arms"]["model"]
    assert cells["accuracy"]["mean"] == cells["avg@16"]["mean"] == pytest.approx(np.mean(means))
    assert cells["pass@16"]["mean"] == np.mean([m > 0 for m in means])
    assert [name for name in cells if name.startswith("pass@")] == ["pass@2", "pass@4", "pass@8", "pass@16"]
    assert got["budget"]["model"]["tokens_generated"] == sum(r["length"] for r in found)
    assert got["budget"]["model"]["verifier_calls"] == 144
    assert metrics("run")[0]["eval/accuracy"] == pytest.approx(cells["accuracy"]["mean"])
    assert got["verdict"] == "not shown" and got["judged_by"] == {"mode": "math-verify", "extract": "last_number"}
    assert Path("run/report.html").is_file()


def test_a_row_depends_on_seed_task_and_sample_only(job, monkeypatch):
    args = ("--samples", "2", "--temperature", "1")
    ev(*args, out="a")
    monkeypatch.setattr(evaluation, "CHUNK", 2)
    ev(*args, out="b")
    ev(*args, "--limit", "4", out="c")
    ev(*args, "--seed", "1", out="d")
    texts = {name: [r["text"] for r in rows(name)] for name in "abcd"}
    assert texts["a"] == texts["b"] and texts["c"] == texts["a"][:8] and texts["d"] != texts["a"]
    assert results("a")["arms"] == results("b")["arms"]


def test_ctrl_c_keeps_the_rows_and_resume_makes_the_others(job, monkeypatch, capsys):
    args = ("--samples", "2", "--temperature", "1")
    ev(*args, out="whole")
    monkeypatch.setattr(evaluation, "CHUNK", 4)
    calls, extend = [], TorchEngine.extend

    def counted(self, leaves, *rest, **kwargs):
        calls.append(len(leaves))
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return extend(self, leaves, *rest, **kwargs)

    monkeypatch.setattr(TorchEngine, "extend", counted)
    assert ev(*args) == 130
    assert "stopped after 8 of 18 rows; they are kept in" in capsys.readouterr().err
    with open("run/rows.jsonl", "a") as file:
        file.write('{"task": "4", "sam')  # and then the machine went down
    assert ev(*args, "--resume") == 0
    assert sum(calls) == 2 + 2 + 2 + 5  # the chunk in flight is made again, no other
    assert rows("run") == rows("whole") and results("run")["arms"] == results("whole")["arms"]
    capsys.readouterr()
    assert ev(*args, "--resume", "--limit", "5") == 2
    assert "cannot resume, the config has changed" in capsys.readouterr().err


@pytest.mark.parametrize("kept", [1, 2, 3, 4, 5])
def test_a_kill_between_the_samples_of_a_task_does_not_stop_the_resume(job, monkeypatch, kept):
    args = ("--samples", "4", "--temperature", "1", "--limit", "3")
    monkeypatch.setattr(evaluation, "CHUNK", 4)
    ev(*args, out="whole")
    ev(*args)
    path = Path("run/rows.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:kept]) + lines[kept][:9])
    assert ev(*args, "--resume") == 0
    assert rows("run") == rows("whole") and results("run")["arms"] == results("whole")["arms"]


def test_a_reward_of_the_user_judges(job):
    args = ("--samples", "4", "--temperature", "1")
    assert ev("--reward", "rewards.py:short", *args) == 0
    right = [r["right"] for r in rows()]
    assert right == [len(r["text"]) < 3 for r in rows()] and 0 < sum(right) < 36
    ev("--reward", "rewards.py:share", *args, out="shares")
    cells = results("shares")["arms"]["model"]
    assert cells["score"]["mean"] == pytest.approx(np.mean([r["score"] for r in rows("shares")]))


def test_a_failed_reward_stays_in_the_denominator(job):
    ev("--reward", "rewards.py:sometimes", "--samples", "2", "--temperature", "1")
    found = rows()
    failed = [r for r in found if r["error"]]
    cells = results("run")["arms"]["model"]
    assert 0 < len(failed) < 18 and all("KeyError" in r["error"] for r in failed)
    assert cells["accuracy"]["mean"] == sum(r["right"] for r in found) / 18
    assert cells["errors"]["mean"] == pytest.approx(len(failed) / 18) and cells["errors"]["n"] == 9


def test_against_another_evaluation(job, capsys):
    make_model(job / "other", seed=5)
    args = ("--samples", "8", "--temperature", "1")
    ev(*args, out="base")
    assert ev(*args, "--model", "other", "--against", "base") == 0
    got = results("run")
    changes = [a["right"] - b["right"] for a, b in zip(rows("run"), rows("base"), strict=True)]
    assert any(changes) and got["difference"]["mean"] == pytest.approx(np.mean(changes))
    assert got["arms"]["against: model"]["accuracy"] == results("base")["arms"]["model"]["accuracy"]
    assert got["claim"] == "other has a higher accuracy than model on these 9 problems."
    low, high = got["difference"]["ci95"]
    assert got["verdict"] == ("shown" if low > 0 else "reversed" if high < 0 else "not shown")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--extract", "any"],
            "it had extract='last_number', this evaluation has 'any'; such accuracies are",
        ),
        (["--data", "data.jsonl"], "it had data='copy.jsonl', this evaluation has 'data.jsonl'"),
        (["--against", "nowhere"], "--against nowhere: holds no evaluation (no rows.jsonl)"),
    ],
)
def test_against_something_else_is_refused(job, capsys, args, message):
    ev(out="base")
    assert ev("--against", "base", *args) == 2
    assert message in capsys.readouterr().err and not Path("run").exists()


# -- real files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "columns", "prompt", "gold"),
    [
        ("svamp_test", ["{Body} {Question}", "--answer-column", "Answer"], "There are 87 oranges", 145.0),
        ("gsm8k_test", ["question"], "Janet", "#### 18"),
        ("mawps_singleop", ["input", "--answer-column", "target"], "If there are 7 bottle caps", 14.0),
        ("math500", ["problem"], "Convert the point", r"\left( 3, \frac{\pi}{2} \right)"),
    ],
)
def test_files_by_named_columns(shared, made, tmp_path, file, columns, prompt, gold):
    model = made / "bytes"
    if not model.exists():
        from forethought.models.load import save_pretrained
        from forethought.models.tiny import byte_tokenizer, tiny_model

        tokenizer = byte_tokenizer(context=2048)
        save_pretrained(tiny_model(len(tokenizer), width=32, layers=1, heads=2, context=2048), tokenizer, model)
    data = shared / "data" / "math" / f"{file}.jsonl"
    command = ["eval", "--model", str(model), "--data", str(data), "--limit", "3", "--max-new-tokens", "2"]
    assert main([*command, "--prompt-column", *columns, "--out", str(tmp_path / "run")]) == 0
    found = rows(tmp_path / "run")
    assert len(found) == 3 and found[0]["prompt"].startswith(prompt)
    assert found[0]["gold"] == gold or str(found[0]["gold"]).endswith(str(gold))
    assert results(tmp_path / "run")["arms"]["bytes"]["accuracy"]["n"] == 3


def test_verl_s_parquet_columns(shared, made, tmp_path, capsys):
    pytest.importorskip("pyarrow")
    data = shared / "data" / "math" / "dsr_sub.parquet"
    make_model(tmp_path / "chatty", chat=True)
    command = ["eval", "--model", str(tmp_path / "chatty"), "--data", str(data), "--out", str(tmp_path / "run")]
    assert main([*command, "--limit", "2"]) == 2
    assert "needs the right answer as column 'answer', which 2 of 2 records lack" in capsys.readouterr().err
    # Its prompts are conversations; this alphabet cannot express them, and the record is named.
    assert main([*command, "--limit", "2", "--answer-column", "reward_model.ground_truth"]) == 2
    assert "task '0': the tokenizer cannot encode" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_stops_and_truncated_distributions(job):
    ev("--samples", "3", "--temperature", "1.5", "--top-p", "0.9", "--stop", "7", "--stop", "y")
    found = rows()
    assert {r["stop"] for r in found} == {"eos", "string", "length"}
    assert all((r["stop"] == "string") == (r["text"][-1:] in ("7", "y")) for r in found)
    assert results("run")["arms"]["model"]["truncated"]["mean"] == sum(r["stop"] == "length" for r in found) / 27
