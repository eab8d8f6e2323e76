"""Suites on a fake engine: what is counted, what is kept, and what is refused."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest

from forethought.errors import ConfigError, DataError, EngineError, RewardError
from forethought.evaluate.metrics import Row
from forethought.evaluate.stats import pass_hat_k
from forethought.evaluate.suites import EvalResult, compare, evaluate
from forethought.models.engine import EngineStats, Sampling, row_seed
from forethought.rewards.reward import Reward
from forethought.tree.tree import Kind, Stop

# Ids are digits; a response is "=" and one digit. Prompt [a, b]: the right digit is (a + b) % 10.
EQUALS = 10


class DigitEngine:
    """Greedy: the right digit for tasks with an even first digit. Sampled: right or wrong by the row's own seed."""

    trainable = False

    def __init__(self):
        self.stats = EngineStats()
        self.calls = []

    def extend(self, leaves, n, sampling, *, progress=None):
        self.calls.append((len(leaves), n))
        out = []
        for tree, leaf in leaves:
            a, b = tree.path_ids(leaf)
            nodes = []
            for index in range(n):
                rng = random.Random(row_seed(sampling.seed, tree.task, leaf, index))
                digit = (a + b + (a % 2 if sampling.temperature == 0 else rng.randrange(2))) % 10
                stop = Stop.LENGTH if digit == 9 else Stop.EOS
                nodes.append(tree.add(leaf, [EQUALS, digit], sampled=True, logprobs=[-0.1, -0.2], stop=stop))
            out.append(nodes)
        if progress:
            progress(len(leaves) * n, len(leaves) * n)
        return out


def decode(ids):
    return "".join("=" if i == EQUALS else str(i) for i in ids)


def prompt_ids(task):
    return [task["a"], task["b"]]


def tasks(n):
    return [{"id": i, "a": i % 10, "b": (i // 3) % 10} for i in range(n)]


def judge(items):
    out = []
    for tree, leaf, task in items:
        right = tree.node_ids(leaf)[-1] == (task["a"] + task["b"]) % 10
        out.append(Reward(float(right), {"format": 1.0}))
    return out


def extract(text):
    found = re.search(r"=(\d)", text)
    return found.group(1) if found else None


def run(n=30, engine=None, **kwargs):
    return evaluate(
        engine or DigitEngine(),
        tasks(n),
        judge,
        prompt_ids=prompt_ids,
        decode=decode,
        **({"extract": extract} | kwargs),
    )


WARM = Sampling(temperature=0.6, seed=3)


def test_greedy_twice_is_bit_identical():
    """Spec acceptance 15, second half."""
    one, two = run(), run()
    assert json.dumps(one.to_json(), allow_nan=False) == json.dumps(two.to_json(), allow_nan=False)
    assert len(one.rows) == 30
    assert one.accuracy().mean == 0.5  # tasks with an even first digit
    assert str(one).startswith("eval: accuracy 0.500 [0.332, 0.668], 30 tasks x 1 = 30 rows")


def test_avg_at_8_uses_240_rows_and_is_the_mean_of_means():
    """Spec acceptance 15, first half."""
    engine = DigitEngine()
    got = run(engine=engine, samples=8, sampling=WARM)
    assert engine.calls == [(30, 8)] and len(got.rows) == 240
    means = [np.mean([r.right for r in rows]) for rows in got.by_task().values()]
    assert [len(rows) for rows in got.by_task().values()] == [8] * 30
    assert got.accuracy().mean == got.metrics()["avg@8"] == np.mean(means) == np.mean([r.right for r in got.rows])
    assert 0 < got.accuracy().low < got.accuracy().mean < got.accuracy().high < 1
    metrics = got.metrics()
    assert (metrics["n/tasks"], metrics["n/rows"], metrics["n/errors"]) == (30, 240, 0)
    right = [sum(r.right for r in rows) for rows in got.by_task().values()]
    assert metrics["pass@8"] == np.mean([c > 0 for c in right])
    assert metrics["pass^8"] == np.mean([c == 8 for c in right])
    voted = [c > 4 or (c == 4 and rows[0].right) for c, rows in zip(right, got.by_task().values(), strict=True)]
    assert metrics["maj@8"] == pytest.approx(np.mean(voted))  # a tie goes to the answer seen first
    assert got.n_tokens == 480
    assert str(got).startswith("eval: avg@8 0.") and "30 tasks x 8 = 240 rows" in str(got)


def test_rows_do_not_depend_on_order_or_company():
    whole = {(r.task, r.sample): r for r in run(samples=4, sampling=WARM).rows}
    some = tasks(30)[::-7]
    alone = evaluate(
        DigitEngine(), some, judge, prompt_ids=prompt_ids, decode=decode, samples=4, sampling=WARM, extract=extract
    )
    assert len(alone.rows) == 4 * len(some)
    assert all(whole[r.task, r.sample] == r for r in alone.rows)
    other = run(samples=4, sampling=Sampling(temperature=0.6, seed=4))
    assert [r.text for r in other.rows] != [r.text for r in run(samples=4, sampling=WARM).rows]


def test_row_contents():
    got = run(10)
    first = got.rows[0]
    assert first == Row(
        task="0", sample=0, right=True, score=1.0, text="=0", answer="0", length=2, stop=Stop.EOS, parts={"format": 1.0}
    )
    assert got.trees[0].reward[1] == 1.0 and got.trees[0].task == "0" and got.trees[0].kind[0] == Kind.PROMPT
    whole = run(30)
    assert whole.metrics()["truncated"] == np.mean([r.text.endswith("9") for r in whole.rows]) > 0
    assert got.metrics()["score/format"] == 1.0
    assert got.answers("0") == [("0", 1)]
    assert got.to_json()["rows"][0]["stop"] == "eos"
    assert "rows" not in got.to_json(rows=False)


def test_all_23_items_are_evaluated():
    """Case H28: no early end, the number is shown and checked."""
    got = run(23, expected=23)
    assert len(got.rows) == 23 and "23 tasks x 1 = 23 rows" in str(got)
    with pytest.raises(DataError, match="suite 'eval': 20 tasks, but 23 are expected"):
        run(20, expected=23)


def test_errors_stay_in_the_denominator():
    """Case H23: A S S F E; B E E E E; C S S S S."""
    plan = {"A": "SSFE", "B": "EEEE", "C": "SSSS"}
    results = iter("".join(plan.values()))
    made = {"S": Reward(1.0), "F": Reward(0.0), "E": RewardError("sandbox died")}

    got = evaluate(
        DigitEngine(),
        [{"id": name, "a": 1, "b": 2} for name in plan],
        lambda items: [made[next(results)] for _ in items],
        prompt_ids=prompt_ids,
        decode=decode,
        samples=4,
        sampling=WARM,
    )
    assert got.errors == 5 and got.accuracy().mean == 0.5
    assert got.metrics()["errors"] == pytest.approx(5 / 12)
    assert got.metrics()["accuracy/without_errors"] == pytest.approx(6 / 7)
    rates = got.rates(2, pass_hat_k)
    assert (rates.errors_as_failures, rates.errors_left_out) == pytest.approx((0.388889, 0.666667), abs=1e-6)
    assert rates.not_evaluated == ("B",)
    assert str(got).endswith(
        "12 rows; 5 could not be judged (counted as wrong); pass@1 0.5 with errors as failures; "
        "0.8333 without them over 2 of 3 tasks and 7 of 12 trials"
    )
    assert [r.error for r in got.rows[3:5]] == ["sandbox died"] * 2 and not got.rows[3].right


def test_rewards_that_say_nothing_are_errors_not_zeros():
    answers = iter(
        [Reward(float("nan"), why="no gold"), Reward(float("inf")), RewardError(), Reward(0.3, {"x": float("nan")})]
    )
    got = evaluate(
        DigitEngine(), tasks(4), lambda items: [next(answers) for _ in items], prompt_ids=prompt_ids, decode=decode
    )
    assert [r.error for r in got.rows] == [
        "not applicable: no gold",
        "the reward is inf",
        "the reward failed without a message",
        None,
    ]
    assert [r.score for r in got.rows] == [None, None, None, 0.3]
    assert got.metrics()["accuracy"] == 0 and got.metrics()["score"] == 0.3
    json.dumps(got.to_json(), allow_nan=False)


def test_failed_sampling_is_an_error_row_and_is_not_judged():
    class Breaking(DigitEngine):
        def extend(self, leaves, n, sampling, *, progress=None):
            out = super().extend(leaves, n, sampling)
            tree, node = leaves[1][0], out[1][0]
            tree.stop[node] = Stop.ERROR
            tree.meta[node]["error"] = "connection lost"
            return out

    seen = []
    got = evaluate(
        Breaking(), tasks(3), lambda items: seen.extend(items) or judge(items), prompt_ids=prompt_ids, decode=decode
    )
    assert len(seen) == 2 and got.rows[1].error == "sampling failed: connection lost"
    assert got.errors == 1 and len(got.rows) == 3


def test_success_is_what_the_caller_says():
    half = evaluate(
        DigitEngine(),
        tasks(6),
        lambda items: [Reward(0.6, {"correct": i % 2}) for i in range(len(items))],
        prompt_ids=prompt_ids,
        decode=decode,
        success=lambda r: r.parts["correct"] == 1,
    )
    assert half.accuracy().mean == 0.5
    with pytest.raises(DataError, match="no row has an answer; run it with extract"):
        half.majority()


def test_paired_comparison_is_by_task_id():
    greedy = run(20)
    other = EvalResult("shuffled", greedy.tasks[::-1], 1, greedy.rows[::-1])
    assert compare(greedy, other).mean == 0 and compare(greedy, other).low == 0
    perfect = EvalResult("best", greedy.tasks, 1, [Row(t, 0, True, 1.0) for t in greedy.tasks])
    gain = compare(perfect, greedy)
    assert gain.mean == 0.5 and gain.clear and gain.n == 20
    with pytest.raises(DataError, match="'eval' and 'eval' have different tasks: '20' stands in 'eval' only"):
        compare(greedy, run(21))


def test_result_checks_its_rows():
    rows = [Row("a", 0, True, 1.0), Row("a", 0, True, 1.0)]
    for tasks_, samples, message in (
        (["a"], 1, "2 rows for 1 tasks x 1 samples; the first that is missing or too many: task 'a', sample 0"),
        (["a"], 2, "task 'a', sample 1"),
        (["a", "b"], 1, "task 'b', sample 0"),
        (["a", "a"], 1, "task id 'a' stands twice"),
        ([], 1, "no tasks: the suite is empty"),
    ):
        with pytest.raises(DataError, match=message):
            EvalResult("s", tasks_, samples, rows)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"tasks": []}, DataError, "suite 'eval': no tasks"),
        ({"tasks": [{"a": 1}]}, DataError, "task 0 has no 'id'"),
        ({"tasks": [{"id": 1, "a": 1, "b": 1}, {"id": "1", "a": 1, "b": 1}]}, DataError, "task id '1' stands twice"),
        ({"samples": 0}, ConfigError, "samples=0: give at least 1"),
        ({"samples": 8}, ConfigError, "samples=8 at temperature 0 would all be the same"),
        ({"prompt_ids": lambda task: []}, DataError, "task '0' has an empty prompt"),
        ({"judge": lambda items: []}, RewardError, "the judge gave 0 results for 3 samples"),
    ],
)
def test_bad_input_is_refused(change, kind, message):
    engine = DigitEngine()
    arguments = {"tasks": tasks(3), "judge": judge, "prompt_ids": prompt_ids, "decode": decode} | change
    with pytest.raises(kind, match=message):
        evaluate(engine, arguments.pop("tasks"), arguments.pop("judge"), **arguments)
    assert not engine.calls or "judge" in change  # before any sampling


def test_an_engine_that_stops_early_is_caught():
    class Short(DigitEngine):
        def extend(self, leaves, n, sampling, *, progress=None):
            return super().extend(leaves[:20], n, sampling)

    with pytest.raises(EngineError, match="asked for 1 samples of each of 23 tasks"):
        run(23, engine=Short())


def test_progress_is_passed_on():
    seen = []
    run(5, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(5, 5)]
