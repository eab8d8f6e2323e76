"""Reading run folders, whole and broken: what is there is read, what is missing is said."""

import json
import sqlite3

import pytest
from fakeruns import cell, full_run, group, metrics, results, search_tree, tokenizer, write_run

from forethought.errors import RunError
from forethought.report.reading import choose, pair_metrics, read_run
from forethought.tree.store import TreeRow


def row(id, step, arm="a", kind="train"):
    return TreeRow(
        id=id, task="t", step=step, arm=arm, seed=0, kind=kind, reward=None, nodes=1, tokens=1, leaves=1, stops={}
    )


def test_a_whole_run(tmp_path):
    run = read_run(full_run(tmp_path))
    assert run.problems == []
    assert list(run.arms) == ["pool", "one problem", "format only"]
    after = run.arms["pool"]["heldout_accuracy/after"]
    assert (after.mean, after.lo, after.hi, after.n) == (0.8333, 0.8333 - 0.04, 0.8333 + 0.04, 192)
    assert after.per_seed == [("0", 0.8333 + 0.02, "0"), ("1", 0.8333, "1"), ("2", 0.8333 - 0.02, "2")]
    assert run.headline() == ("pool", "heldout_accuracy/before", "heldout_accuracy/after")
    assert run.counters == ["tokens_generated", "tokens_trained", "env_steps", "verifier_calls", "wall_s"]
    assert run.config["online"]["optim"]["lr"] == 1e-5
    assert len(run.metrics) == 270 and run.tree_count == 10 and len(run.trees) == 10
    assert "".join(run.pieces(run.trees[0][1].node_ids(0))) == "What is 12 plus 7 minus 4?"


def test_no_folder_no_run(tmp_path):
    (tmp_path / "runs").mkdir()
    with pytest.raises(RunError, match=r"rums: no such run folder; did you mean 'runs'\?"):
        read_run(tmp_path / "rums")
    with pytest.raises(RunError, match=r"holds no run \(none of results.json, .*\); give the folder that --out named"):
        read_run(tmp_path / "runs")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="is a file; give the folder of a run"):
        read_run(tmp_path / "file")


def test_an_interrupted_run_says_what_is_missing(tmp_path):
    write_run(tmp_path, lines=metrics(steps=3), config={"recipe": "demo", "profile": "smoke", "model": "tiny"})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "arm": "pool", "rew')
    run = read_run(tmp_path)
    assert run.problems == [
        "results.json is missing: the run has not ended, or was interrupted. No verdict yet.",
        "metrics.jsonl: line 28 was cut in the middle (the run was killed, or is writing it).",
        "The last step in metrics.jsonl is 2.",
    ]
    assert len(run.metrics) == 27 and run.seeds == ["0", "1", "2"]
    assert (run.head("recipe"), run.head("profile"), run.head("model"), run.head("verdict")) == (
        "demo",
        "smoke",
        "tiny",
        "",
    )
    assert run.headline() is None


def test_only_metrics_or_only_results(tmp_path):
    only = read_run(write_run(tmp_path / "a", lines=[]))
    assert "metrics.jsonl has no line yet: there are no curves." in only.problems
    assert "config.yaml is missing: the settings of this run are not known." in only.problems
    only = read_run(write_run(tmp_path / "b", results_=results()))
    assert "metrics.jsonl is missing: there are no curves." in only.problems and only.trees == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"schema": 1, "arms": {"a": {"x": {"me', "results.json cannot be read: "),
        ("[1, 2]", "results.json holds no object {...}; it is left out."),
        (
            '{"schema": 2, "arms": {"a": {"x": 1}}}',
            "results.json has schema 2, this report reads 1; what it knows is shown.",
        ),
        ('{"schema": 1, "arms": {"a": {"x": NaN}}}', "results.json holds NaN, which is not JSON; read as missing."),
        ('{"schema": 1}', "results.json names no arms: there are no results to show."),
        ('{"schema": 1, "arms": [1]}', "results.json names no arms: there are no results to show."),
        ("\xff\xfe", "results.json cannot be read: "),
    ],
)
def test_a_damaged_results_file(tmp_path, text, problem):
    write_run(tmp_path, lines=metrics(steps=1), config={})
    (tmp_path / "results.json").write_bytes(text.encode("latin-1"))
    problems = read_run(tmp_path).problems
    assert any(p.startswith(problem) for p in problems), problems


def test_metric_lines_as_other_tools_leave_them(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(
        b'\xef\xbb\xbf{"step": 0, "loss": 1.5}\r\n{"step": 1, "loss": NaN}\r\n'
        b'nonsense\n[1]\n{"loss": 2}\n{"step": true}\n'
        b'{"step": 2, "loss": null}\n\n'
    )
    run = read_run(tmp_path)
    assert [line["step"] for line in run.metrics] == [0, 1, 2]
    assert [line["loss"] for line in run.metrics] == [1.5, None, None]
    assert "metrics.jsonl: 4 damaged lines left out (3, 4, 5, 6)." in run.problems
    assert "metrics.jsonl holds NaN, which is not JSON; read as missing." in run.problems


def test_cells_of_any_shape(tmp_path):
    arms = {
        "a": {
            "null": None,
            "bare": 0.5,
            "text": "high",
            "half": {"mean": 1.0},
            "nulls": {"mean": None, "ci95": None, "n": None, "per_seed": None},
            "by seed": {"mean": 2.0, "ci95": [1.0, None], "n": 3, "per_seed": {"7": 1.0, "9": None}},
            "odd": {"mean": "x", "ci95": [1, 2, 3], "n": True, "per_seed": ["y"]},
        },
        "b": 7,
    }
    run = read_run(
        write_run(tmp_path, results_=results(arms=arms, seeds=[7, 9], budget={"a": {"wall_s": None}, "b": 3}))
    )
    cells = run.arms["a"]
    assert list(run.arms) == ["a"] and "text" not in cells
    assert cells["null"].empty and cells["nulls"].empty
    assert cells["bare"].mean == 0.5 and cells["half"].mean == 1.0 and cells["half"].lo is None
    assert cells["by seed"].per_seed == [("7", 1.0, "7"), ("9", None, "9")] and cells["by seed"].hi is None
    assert (cells["odd"].mean, cells["odd"].lo, cells["odd"].n, cells["odd"].per_seed) == (
        None,
        None,
        None,
        [("0", None, "0")],
    )
    assert run.budget == {"a": {"wall_s": None}}


def test_a_damaged_or_foreign_tree_store(tmp_path):
    write_run(tmp_path, results_=results())
    (tmp_path / "trees.sqlite").write_bytes(b"not a database" * 100)
    assert any(p.startswith("trees.sqlite cannot be read:") for p in read_run(tmp_path).problems)


def test_one_damaged_tree_does_not_hide_the_others(tmp_path):
    tok = tokenizer()
    write_run(tmp_path, trees=[(group(tok), {"step": s}) for s in range(3)], tok=tok)
    with sqlite3.connect(tmp_path / "trees.sqlite") as db:
        db.execute("UPDATE trees SET arrays = x'00' WHERE id = 2")
    run = read_run(tmp_path)
    assert [r.id for r, _ in run.trees] == [1, 3]
    assert any(p.startswith("trees.sqlite: tree 2 is left out:") for p in run.problems)


def test_without_a_tokenizer_ids_are_shown_and_said(tmp_path):
    run = read_run(write_run(tmp_path, results_=results(), trees=[(search_tree(), {})]))
    assert "The run folder has no tokenizer.json: rollouts are shown as token ids." in run.problems
    assert run.pieces([5]) == ["5 "]
    run = read_run(tmp_path, decode_token=lambda i: f"t{i}")
    assert run.pieces([5]) == ["t5"] and not any("tokenizer" in p for p in run.problems)
    (tmp_path / "tokenizer.json").write_text("{")
    assert any("rollouts are shown as token ids" in p for p in read_run(tmp_path).problems)


def test_trees_are_chosen_from_every_arm_and_kind():
    rows = [row(i, step=i, arm="a") for i in range(100)]
    rows += [row(100 + i, step=i, arm="b") for i in range(100)]
    rows.append(row(200, step=50, arm="a", kind="eval"))
    assert [(r.arm, r.step, r.kind) for r in choose(rows, 3)] == [
        ("a", 50, "eval"),
        ("a", 99, "train"),
        ("b", 99, "train"),
    ]
    picked = choose(rows, 7)
    assert [(r.arm, r.step) for r in picked] == [
        ("a", 0),
        ("a", 50),
        ("a", 50),
        ("a", 99),
        ("b", 0),
        ("b", 50),
        ("b", 99),
    ]
    assert choose(rows, 1000) == sorted(rows, key=lambda r: (r.arm, r.step, r.id))
    assert choose([], 5) == [] and choose(rows, 0) == []


def test_metrics_that_come_in_pairs():
    pairs, singles = pair_metrics(["before/acc", "x", "after/acc", "loss_initial", "loss_final", "before"])
    assert pairs == [("acc", "before/acc", "after/acc"), ("loss", "loss_initial", "loss_final")]
    assert singles == ["x", "before"]
    assert pair_metrics(["before", "after"])[0] == [("before", "before", "after")]
    assert pair_metrics(["thereafter", "beforehand"]) == ([], ["thereafter", "beforehand"])


def test_headline_can_be_named(tmp_path):
    arms = {
        "base": {"accuracy": cell(0.4, [0.4])},
        "ours": {"accuracy": cell(0.6, [0.6]), "score/before": cell(1.0, []), "score/after": cell(2.0, [])},
    }
    run = read_run(write_run(tmp_path / "a", results_=results(arms=arms)))
    assert run.headline() == ("base", None, "accuracy")
    run = read_run(
        write_run(tmp_path / "b", results_=results(arms=arms, headline={"arm": "ours", "metric": "accuracy"}))
    )
    assert run.headline() == ("ours", None, "accuracy")
    run = read_run(write_run(tmp_path / "c", results_=results(arms=arms, headline={"metric": "score/after"})))
    assert run.headline() == ("ours", "score/before", "score/after")
    arms["base"]["accuracy"]["mean"] = None
    run = read_run(write_run(tmp_path / "d", results_=results(arms=arms)))
    assert run.headline() == ("ours", None, "accuracy")


def test_what_the_report_does_not_know_is_kept(tmp_path):
    run = read_run(
        write_run(tmp_path, results_=results(not_evaluated=["task B"], coverage={"trials": 12, "errors": 5}))
    )
    assert run.extras == {"not_evaluated": ["task B"], "coverage": {"trials": 12, "errors": 5}}
    assert json.loads((tmp_path / "results.json").read_text())["coverage"]["errors"] == 5
