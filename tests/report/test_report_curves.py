"""Metric lines to curves: seeds, intervals, thinning."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forethought.report.curves import Curve, curves, from_results, interval, t975, thin, thin_all


@pytest.mark.parametrize(("df", "t"), [(1, 12.706), (2, 4.303), (10, 2.228), (11, 2.201), (20, 2.086), (60, 2.000)])
def test_student_quantile(df, t):
    assert t975(df) == pytest.approx(t, abs=1e-3)


def test_interval():
    lo, hi = interval([1.0, 2.0, 3.0])
    half = 4.3027 * 1 / math.sqrt(3)
    assert lo == pytest.approx(2 - half, abs=1e-4) and hi == pytest.approx(2 + half, abs=1e-4)
    assert interval([1.0]) == (None, None)
    assert interval([]) == (None, None)
    assert interval([2.0, 2.0]) == (2.0, 2.0)
    assert interval([1e308, -1e308]) == (None, None)  # no infinity gets onto the page


def test_mean_over_seeds_per_arm():
    lines = [
        {"step": 0, "arm": "a", "seed": 0, "reward/mean": 0.0, "note": "x", "flag": True},
        {"step": 0, "arm": "a", "seed": 1, "reward/mean": 1.0},
        {"step": 1, "arm": "a", "seed": 0, "reward/mean": None, "nonfinite": ["reward/mean"]},
        {"step": 1, "arm": "a", "seed": 1, "reward/mean": -2.0},
        {"step": 1, "arm": "b", "seed": 0, "loss": 3},
    ]
    found = curves(lines)
    assert list(found) == ["reward/mean", "loss"]
    curve = found["reward/mean"]["a"]
    assert (curve.steps, curve.mean, curve.seeds) == ([0, 1], [0.5, -2.0], 2)
    assert curve.lo[0] == pytest.approx(0.5 - 12.7062 * 0.5) and curve.lo[1] is None and curve.hi[1] is None
    assert found["loss"]["b"].mean == [3]


def test_a_step_written_again_by_a_resumed_run_counts_once():
    lines = [{"step": 4, "loss": 1.0}, {"step": 5, "loss": 9.0}, {"step": 4, "loss": 2.0}]
    curve = curves(lines)["loss"][""]
    assert (curve.steps, curve.mean) == ([4, 5], [2.0, 9.0])


def test_what_people_look_at_first_stands_first():
    names = ["time/step", "zeta", "kl", "reward/mean", "eval/accuracy", "reward/format"]
    assert list(curves([{"step": 0} | dict.fromkeys(names, 1.0)])) == [
        *("eval/accuracy", "reward/mean", "kl", "reward/format", "zeta", "time/step")
    ]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400), st.integers(4, 60))
def test_thinning_keeps_ends_and_extremes(values, limit):
    places = thin(values, limit)
    assert places == sorted(set(places)) and len(places) <= max(limit, 4)
    kept = [values[i] for i in places]
    assert (kept[0], kept[-1]) == (values[0], values[-1])
    assert (min(kept), max(kept)) == (min(values), max(values))
    if len(values) <= limit:
        assert places == list(range(len(values)))


def test_a_spike_in_a_long_curve_survives():
    values = np.zeros(10_000)
    values[7321] = -5
    curve = Curve(list(range(10_000)), values.tolist(), [None] * 10_000, [None] * 10_000, 1)
    thinned = thin_all({"loss": {"a": curve}})["loss"]["a"]
    assert len(thinned.steps) <= 160
    assert thinned.mean[thinned.steps.index(7321)] == -5


def test_many_curves_share_the_budget():
    curve = Curve(list(range(1000)), [0.0, 1.0] * 500, [None] * 1000, [None] * 1000, 1)
    found = {f"m{i}": {f"a{k}": curve for k in range(20)} for i in range(30)}
    count = sum(len(c.steps) for arms in thin_all(found, budget=24_000).values() for c in arms.values())
    assert count <= 24_000


def test_curves_that_a_recipe_wrote_into_results():
    value = {
        "accuracy": {
            "a": {"step": [2, 1, 3], "mean": [0.2, 0.1, None], "lo": [0.1, 0.0, None], "hi": [0.3, 0.2, None]},
            "b": {"step": [1], "mean": [0.5]},
            "wrong length": {"step": [1, 2], "mean": [0.5]},
            "no steps": {"mean": [0.5]},
            "no object": 3,
        },
        "no object": [1],
    }
    found = from_results(value)
    assert list(found) == ["accuracy"] and list(found["accuracy"]) == ["a", "b"]
    assert found["accuracy"]["a"] == Curve([1, 2], [0.1, 0.2], [0.0, 0.1], [0.2, 0.3], 1)
    assert found["accuracy"]["b"] == Curve([1], [0.5], [None], [None], 1)
    assert from_results(None) == {} and from_results([1]) == {}
