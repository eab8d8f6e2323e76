"""`forethought eval --search`: one table at one budget, through the command."""

import json
from pathlib import Path

import pytest

from forethought.cli import main
from tinyjob import make_job, results, write

CRITIC = """
def likes_c(leaves):
    assert all(set(leaf.task) <= {"id", "prompt"} for leaf in leaves)  # never the gold
    return [leaf.text.count("c") / (1 + len(leaf.text)) for leaf in leaves]

def wrong(leaves):
    raise ValueError("no")
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    make_job(tmp_path)
    write(tmp_path / "small.jsonl", [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(5)])
    (tmp_path / "critics.py").write_text(CRITIC)
    monkeypatch.chdir(tmp_path)


def run(*args, search="all", budget="40"):
    command = ["eval", "--model", "model", "--data", "small.jsonl", "--dtype", "fp32", "--max-new-tokens", "12"]
    return main([*command, "--option-tokens", "6", "--search", search, "--budget", budget, *args])


def test_all_methods_in_one_table(job, capsys):
    assert run("--out", "out", "--critic", "critics.py:likes_c", "--reward", "rewards.py:share") == 0
    found = results("out")
    assert list(found["arms"]) == ["mcts", "greedy", "best-of-n", "majority", "weighted", "beam"]
    assert found["claim"].startswith("mcts has a higher accuracy than every other method at 40 generated tokens")
    assert found["verdict"] in ("shown", "not shown", "reversed") and set(found["differences"]) == set(
        found["arms"]
    ) - {"mcts"}
    for name, arm in found["arms"].items():
        assert arm["accuracy"]["n"] == 5 and 0 < arm["tokens"]["mean"] <= 40
        rows = json.loads((Path("out") / f"rows_{name}.json").read_text())["rows"]
        assert [r["task"] for r in rows] == ["0", "1", "2", "3", "4"] and max(r["tokens"] for r in rows) <= 40
        assert found["budget"][name]["tokens_generated"] == sum(r["tokens"] for r in rows)
    assert found["arms"]["best-of-n"]["candidates"]["mean"] >= 3
    said = capsys.readouterr().err
    assert "best-of-n  accuracy 0.000 [0.000, " in said and "of 40" in said
    assert main(["show", "out", "--trees", "1"]) == 0


def test_a_finished_method_is_not_made_again(job):
    assert run("--out", "a", "--reward", "rewards.py:share", search="greedy,best-of-n") == 0
    assert run("--out", "b", "--reward", "rewards.py:share", search="greedy,best-of-n") == 0
    first = {n: json.loads((Path("a") / f"rows_{n}.json").read_text())["rows"] for n in ("greedy", "best-of-n")}
    assert first == {n: json.loads((Path("b") / f"rows_{n}.json").read_text())["rows"] for n in first}
    before = (Path("b") / "rows_greedy.json").read_bytes()
    (Path("b") / "rows_best-of-n.json").unlink()
    assert run("--out", "b", "--resume", "--reward", "rewards.py:share", search="greedy,best-of-n") == 0
    assert (Path("b") / "rows_greedy.json").read_bytes() == before
    again = json.loads((Path("b") / "rows_best-of-n.json").read_text())["rows"]
    assert again == first["best-of-n"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--search", "mtcs"],
            "search='mtcs': give some of greedy, best-of-n, majority, weighted, beam, mcts; did you mean 'mcts'?",
        ),
        (["--search", "greedy,greedy"], "give each method once"),
        (["--budget", "0"], "budget=0"),
        (["--budget", "6"], "budget=6: a step of tree search may take option_tokens=6; give a larger --budget"),
        (["--temperature", "0"], "greedy is a method of its own"),
        (["--samples", "4"], "--samples does not go with --search: the budget says how many"),
        (["--critic", "critics.py:none"], "none"),
        (["--width", "0"], "width=0"),
    ],
)
def test_refused_before_the_model_is_loaded(job, capsys, args, message):
    Path("model/model.safetensors").unlink()
    assert run("--out", "out", *args) == 2
    assert message in capsys.readouterr().err and not Path("out").exists()


def test_settings_of_search_need_search(job, capsys):
    assert main(["eval", "--model", "model", "--data", "small.jsonl", "--budget", "5"]) == 2
    assert "--budget is a setting of --search; add --search METHODS" in capsys.readouterr().err
    assert main(["eval", "--model", "model", "--data", "small.jsonl", "--search", "mcts"]) == 2
    assert "--search needs --budget TOKENS" in capsys.readouterr().err
