"""Runs and data on a terminal and in a pipe."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fakeruns import cell, full_run, metrics, results, write_run
from rich.console import Console

from forethought.errors import DataError, RunError
from forethought.report import compare, show
from forethought.tree.tree import TokenTree


def piped(call, *args, **kwargs) -> str:
    """What a pipe gets."""
    out = io.StringIO()
    call(*args, console=Console(file=out), **kwargs)
    return out.getvalue()


def on_terminal(call, *args, width=100, **kwargs) -> str:
    """What a terminal of this width shows, without its colours."""
    out = io.StringIO()
    call(*args, console=Console(file=out, force_terminal=True, width=width, legacy_windows=False), **kwargs)
    return re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())


def rows(text: str, title: str) -> list[list[str]]:
    """Cells of a piped table."""
    body = text.split(title + "\n")[1].split("\n\n")[0]
    return [re.split(r"\s{2,}", line.strip()) for line in body.split("\n")]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return full_run(tmp_path_factory.mktemp("run") / "mine")


def test_a_run_in_a_pipe(run):
    text = piped(show, run)
    assert "\x1b" not in text and not re.search(r"[━─│┃]", text)
    assert all(line == line.rstrip() for line in text.split("\n"))
    for words in ("one-shot-rlvr · mini · SmolLM2-135M-Instruct", "verdict: shown", "rule: pool minus format only"):
        assert words in text
    table = rows(text, "Results (mean [95% interval])")
    assert table[0] == ["arm", "heldout accuracy/before", "heldout accuracy/after", "boxed share", "mean length"]
    assert table[1] == [
        "pool",
        "56.2% [52.2%, 60.2%]",
        "83.3% [79.3%, 87.3%]",
        "40.0% [36.0%, 44.0%]",
        "17.25 [15.75, 18.75]",
    ]
    assert "n per number: 192; seeds: 0, 1, 2" in text
    budget = rows(text, "Budget (counted)")
    assert budget[1] == ["pool", "46,080", "46,000", "0", "1,920", "3 min 7 s"]
    last = rows(text, "Last metrics (mean over seeds)")
    want = [x["kl"] for x in metrics() if x["step"] == 29 and x["arm"] == "pool"]
    assert next(r for r in last if r[0] == "kl")[1] == f"{sum(want) / 3:.3f}"
    assert last[0] == ["metric", "pool @ step 29", "one problem @ step 29", "format only @ step 29"]


def test_rollouts_in_a_pipe(run):
    text = piped(show, run, trees=1)
    assert text.count("Rollouts: ") == 1 and "Rollouts: pool, step 29, train, task 17, 4 samples" in text
    part = text.split("Rollouts: ")[1]
    assert "What is 12 plus 7 minus 4?" in part
    assert (
        "- reward 1 · correct 1 · format 1 · stop eos · last number 15, right is 15\n  12 + 7 = 19, and 19 - 4 = 15.\n"
        in part
    )
    assert "Rollouts" not in piped(show, run, trees=0)


def test_on_a_terminal_nothing_is_cut(run):
    for width in (60, 80, 200):
        text = on_terminal(show, run, width=width)
        assert max(len(line.rstrip()) for line in text.split("\n")) <= width
        for words in ("83.3% [79.3%, 87.3%]", "46,080", "3 min 7 s"):
            assert words in text, (width, words)


def test_a_wide_table_becomes_a_long_one(tmp_path):
    arms = {f"arm {k}": {f"metric number {i}": cell(float(i), [], half=1) for i in range(12)} for k in range(2)}
    text = on_terminal(show, write_run(tmp_path, results_=results(arms=arms)), width=80)
    assert re.search(r"metric number 11 +arm 0 +11 \[10, 12\] *\n +arm 1 +11 \[10, 12\]", text)


def test_many_arms(tmp_path):
    arms = [f"arm number {k}" for k in range(20)]
    path = write_run(tmp_path, lines=metrics(steps=2, arms=arms, seeds=(0,)))
    text = on_terminal(show, path, width=80)
    assert "arm number 19 @ step 1" in text and "more metrics in metrics.jsonl" in text
    assert "arm number 19 @ step 1" in piped(show, path)


def test_an_unfinished_run(tmp_path):
    write_run(tmp_path, lines=metrics(steps=2), config={"recipe": "demo"})
    text = piped(show, tmp_path)
    assert "demo\nverdict: none yet\n! results.json is missing: the run has not ended, or was interrupted." in text
    assert "report: none yet; write it with: forethought report " in text and "Last metrics" in text


def test_missing_numbers(tmp_path):
    arms = {"a": {"x": cell(None, [None]), "y": cell(-1.5, [-1.5])}, "b": {"x": None}}
    text = piped(show, write_run(tmp_path, results_=results(arms=arms, budget={"a": {"wall_s": None}})))
    assert rows(text, "Results (mean [95% interval])")[1:3] == [["a", "–", "-1.500 [-1.540, -1.460]"], ["b", "–", "–"]]
    assert rows(text, "Budget (counted)")[1] == ["a", "–"]
    assert "None" not in text and "nan" not in text.lower()


def test_counts_that_qualify_a_result_are_shown(tmp_path):
    """H23, H20: an accuracy over what survived is not shown without what did not, nor a fault of the simulator."""
    arms = {"agent": {"pass^1": {"mean": 0.833333, "ci95": None, "n": 7, "per_seed": []}, "simulator_faults": 1}}
    coverage = {"tasks": "2 of 3", "trials": "7 of 12", "not_evaluated": ["B"]}
    path = write_run(tmp_path, results_=results(arms=arms, coverage=coverage, notes=["errors are left out"]))
    text = piped(show, path)
    assert rows(text, "Results (mean [95% interval])")[:2] == [
        ["arm", "pass^1", "simulator faults"],
        ["agent", "0.833", "1"],
    ]
    assert "n per number: 7" in text and "note: errors are left out" in text
    assert 'coverage: {"tasks": "2 of 3", "trials": "7 of 12", "not_evaluated": ["B"]}' in text


def test_hostile_text_cannot_command_the_terminal(tmp_path):
    evil = "\x1b]0;title\x07 \x1b[2J [bold]x[/bold] [/nonsense] \u202e \ud800 \x9b31m"
    tree = TokenTree([1], task="t")
    tree.add(0, [2], sampled=True, reward=1.0, meta={"why": evil.replace("\ud800", ""), "parts": {"[red]p": 1.0}})
    arms = {evil: {"[b]m": cell(1.0, [])}}
    write_run(tmp_path, results_=results(arms=arms, claim=evil, budget={evil: {"wall_s": 1}}), trees=[(tree, {})])
    for text in (piped(show, tmp_path), on_terminal(show, tmp_path)):
        assert not set(text) & set("\x1b\x07\x9b\u202e\ud800")
        assert "␛]0;title␇" in text and "[bold]x[/bold] [/nonsense]" in text and "[U+202E]" in text


def test_a_pipe_of_another_encoding(tmp_path):
    write_run(tmp_path, results_=results(claim="日本 é 😀"))
    code = f"from forethought.report import show; show({str(tmp_path)!r})"
    source = str(Path(__file__).parents[2] / "src")
    env = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": source, "COLUMNS": "40"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    assert b"\\u65e5\\u672c \\xe9 \\U0001f600" in done.stdout
    assert b"83.3% [79.3%, 87.3%]" in done.stdout  # not cut at 40 columns


def test_wide_characters_are_aligned(tmp_path):
    arms = {"日本": {"m": 1.0}, "ab": {"m": 2.0}}
    text = piped(show, write_run(tmp_path, results_=results(arms=arms)))
    assert "日本  1\nab    2\n" in text


def test_compare(run, tmp_path):
    other = write_run(
        tmp_path / "other",
        results_=results(
            recipe="two",
            model="tiny",
            verdict="not shown",
            arms={"x": {"heldout_accuracy/after": 0.25, "z": 1}},
            budget={},
        ),
    )
    started = write_run(tmp_path / "started", lines=[], config={"recipe": "three"})
    text = piped(compare, [run, other, started])
    table = rows(text, "Runs")
    assert table[0] == [
        "run",
        "recipe",
        "model",
        "verdict",
        "arm",
        "heldout accuracy/after",
        "tokens generated",
        "wall time",
    ]
    assert table[1][4:] == ["pool", "83.3% [79.3%, 87.3%]", "46.1k", "3 min 7 s"]
    assert table[4] == ["other", "two", "tiny", "not shown", "x", "25.0%", "–", "–"]
    assert table[5][:2] == ["started", "three"] and "none yet" in table[5]
    assert "started: results.json is missing" in text
    assert rows(piped(compare, [other], metrics=["z"]), "Runs")[1][5] == "1"
    assert "pool" in on_terminal(compare, [run, other], width=150)


def test_compare_refuses(run, tmp_path):
    with pytest.raises(DataError, match="give at least one run folder"):
        compare([])
    with pytest.raises(DataError, match="metric 'boxed_shar': no run has it; did you mean 'boxed_share'"):
        compare([run], metrics=["boxed_shar"])
    with pytest.raises(RunError, match="no such run folder"):
        compare([tmp_path / "none"])


def test_a_data_file(tmp_path):
    path = tmp_path / "data.jsonl"
    records = [
        {"prompt": "What is 1 + 1?", "answer": 2, "messages": [{"role": "user", "content": "hi"}], "ok": True},
        {"prompt": "x" * 2000, "answer": -3.5, "messages": [], "ok": None},
        {"prompt": "What is 1 + 1?", "answer": 4, "tags": ["a"], "more": {"k": 1}},
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    text = piped(show, path, trees=2)
    assert "data.jsonl: 3 records" in text
    table = {r[0]: r[1:] for r in rows(text, "Columns")}
    assert table["prompt"] == ["text", "3", "14 to 2,000 characters, 2 different"]
    assert table["answer"] == ["number", "3", "-3.500 to 4, mean 0.833"]
    assert table["messages"][:2] == ["list, messages", "2"] and table["ok"] == ["bool", "1", "1 different"]
    assert table["more"] == ["object", "1", "1 different"]
    assert "Record 2" in text and "Record 3" not in text and "(1,400 characters not shown)" in text
    assert "data.jsonl: 3 records" in on_terminal(show, path, width=50)


def test_a_data_file_that_cannot_be_read(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"a": 1}\n{"a": NaN}\n')
    with pytest.raises(DataError, match="line 2"):
        show(path)
    with pytest.raises(RunError, match=r"dat.jsonl: no such run folder or data file; did you mean 'data.jsonl'\?"):
        show(tmp_path / "dat.jsonl")
    with pytest.raises(RunError, match="holds no run"):
        show(tmp_path)


# -- preference records ------------------------------------------------------------------------------------------------


def write_rows(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_preference_records(tmp_path):
    first = {"prompt": "2+3=", "chosen": "5", "rejected": "6 or [red]", "p": 0.9, "id": "q1", "chosen_sample": 0}
    first |= {"chosen_length": 2, "rejected_length": 9, "chosen_reward": 1.0, "chosen_verdict": "right"}
    first |= {"chosen_why": "literal", "rejected_reward": 0.0, "rejected_verdict": "wrong"}
    second = {**first, "p": 0.4, "chosen_length": 4, "rejected_length": 3}
    text = piped(show, write_rows(tmp_path / "pairs.jsonl", [first, second]), trees=1)
    block = text.split("Preferences\n")[1]
    assert block == (
        "2 pairs of 1 prompts\n"
        "P(chosen wins): mean 0.650, 0.400 to 0.900; 1 pairs below 1/2 (drawn labels)\n"
        "mean length: chosen 3, rejected 6 tokens; the chosen one is longer in 50.0%\n"
        "\n"
        "Record 1\n"
        "P(chosen wins) 0.900\n"
        "prompt: 2+3=\n"
        "chosen (2 tokens, reward 1, right, literal):\n"
        "  5\n"
        "rejected (9 tokens, reward 0, wrong):\n"
        "  6 or [red]\n"
        "id q1 · chosen_sample 0\n"
    )
    assert "6 or [red]" in on_terminal(show, tmp_path / "pairs.jsonl", width=60)


def test_preference_records_of_conversations_and_faults(tmp_path):
    ask = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    said = [[{"role": "assistant", "content": t}] for t in ("hello", "go away", "")]
    rows_ = [
        {"chosen": [*ask, *said[0]], "rejected": [*ask, *said[1]]},  # TRL's implicit prompt
        {"prompt": ask, "chosen": said[0], "rejected": said[0]},
        {"prompt": ask, "chosen": said[0], "rejected": said[2]},
        {"chosen": [*ask[1:], *said[0]], "rejected": [{"role": "user", "content": "bye"}, *said[1]]},
    ]
    text = piped(show, write_rows(tmp_path / "p.jsonl", rows_), trees=1)
    assert "4 pairs of 2 prompts" in text and "P(chosen" not in text
    assert "! 1 of 4 pairs have two equal answers: they cannot be trained on" in text
    assert "! 1 of 4 pairs have an empty answer" in text
    assert "! 1 of 4 pairs have no prompt that both answers share" in text
    assert "prompt: system: Be brief.\nuser: hi\nchosen:\n  hello\nrejected:\n  go away\n" in text
    assert (
        "mean length: chosen 5.50, rejected 5.50 characters" in text or "characters; the chosen one is longer" in text
    )
