"""Intervals, comparisons and pass rates against exact values."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forethought.errors import ConfigError, DataError
from forethought.evaluate.stats import (
    Estimate,
    avg_at_k,
    bootstrap_ci,
    majority_vote,
    mean_ci,
    paired_bootstrap,
    pass_at_k,
    pass_hat_k,
    pass_rates,
    t_quantile,
    wilson,
)

NAN, INF = math.nan, math.inf


# -- intervals --
@pytest.mark.parametrize(
    ("k", "n", "conf", "low", "high"),
    [
        (8, 10, 0.95, 0.490162, 0.943318),
        (0, 10, 0.95, 0.0, 0.277533),
        (10, 10, 0.95, 0.722467, 1.0),
        (500, 1000, 0.95, 0.469070, 0.530930),
        (1, 2, 0.90, 0.120866, 0.879134),
    ],
)
def test_wilson(k, n, conf, low, high):
    got = wilson(k, n, conf)
    assert (got.mean, got.n) == (k / n, n)
    assert (got.low, got.high) == pytest.approx((low, high), abs=2e-6)


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.floats(0.5, 0.999))
def test_wilson_solves_its_equation_and_mirrors(counts, conf):
    """The ends are where |p - share| = z * sqrt(p (1 - p) / n); failures mirror successes."""
    from statistics import NormalDist

    k, n = counts
    got, mirror = wilson(k, n, conf), wilson(n - k, n, conf)
    assert 0 <= got.low <= got.mean <= got.high <= 1
    assert (got.low, got.high) == pytest.approx((1 - mirror.high, 1 - mirror.low), abs=1e-9)
    z = NormalDist().inv_cdf((1 + conf) / 2)
    for end in (got.low, got.high):
        if 1e-9 < end < 1 - 1e-9:
            assert abs(end - k / n) == pytest.approx(z * math.sqrt(end * (1 - end) / n), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("p", "df", "t"),
    [
        (0.975, 1, 12.706205),
        (0.975, 2, 4.302653),
        (0.975, 3, 3.182446),
        (0.975, 4, 2.776445),
        (0.975, 9, 2.262157),
        (0.975, 30, 2.042272),
        (0.95, 5, 2.015048),
        (0.995, 7, 3.499483),
        (0.975, 1000, 1.962339),
        (0.5, 3, 0.0),
    ],
)
def test_t_quantile(p, df, t):
    assert t_quantile(p, df) == pytest.approx(t, abs=1e-6)


def test_mean_over_seeds():
    got = mean_ci([0.1, 0.2, 0.4])
    assert got.mean == pytest.approx(0.7 / 3)
    half = 4.302653 * np.std([0.1, 0.2, 0.4], ddof=1) / math.sqrt(3)
    assert (got.low, got.high) == pytest.approx((0.7 / 3 - half, 0.7 / 3 + half), abs=1e-6)
    assert got.to_json() == {"mean": got.mean, "ci95": [got.low, got.high], "n": 3, "per_seed": [0.1, 0.2, 0.4]}
    one = mean_ci([0.5])
    assert one.to_json() == {"mean": 0.5, "ci95": [None, None], "n": 1, "per_seed": [0.5]}
    assert str(one) == "0.5 (n=1, no interval)"
    assert mean_ci([2.0, 2.0]) == Estimate(2.0, 2.0, 2.0, 2, per_seed=(2.0, 2.0))
    assert "ci90" in mean_ci([1.0, 2.0], 0.9).to_json()
    assert str(Estimate(0.5, 0.25, 0.75, 4)) == "0.5 [0.25, 0.75] (n=4)"


def test_t_interval_covers():
    """Of 95% intervals over four normal seeds, 95% hold the truth."""
    rng = np.random.default_rng(1)
    hits = 0
    for row in rng.normal(3.0, 2.0, (2000, 4)):
        got = mean_ci(row)
        hits += got.low <= 3.0 <= got.high
    assert 0.935 < hits / 2000 < 0.965


def test_bootstrap():
    values = [0.0] * 50 + [1.0] * 50
    got = bootstrap_ci(values)
    assert got.mean == 0.5
    assert (got.low, got.high) == pytest.approx((0.402, 0.598), abs=0.011)  # normal: 0.5 -+ 1.96 * 0.05
    assert bootstrap_ci(values) == got
    uneven = [0.1, 0.7, 1.3, 2.9, 3.1]
    assert bootstrap_ci(uneven, resamples=99) != bootstrap_ci(uneven, resamples=99, seed=1)
    assert bootstrap_ci([3.0, 3.0, 3.0]) == Estimate(3.0, 3.0, 3.0, 3)
    assert bootstrap_ci([3.0]) == Estimate(3.0, None, None, 1)
    middle = bootstrap_ci([1, 2, 3, 4, 100], statistic=np.median, resamples=500)
    assert middle.mean == 3.0 and 1 <= middle.low < 3 < middle.high <= 100
    narrow, wide = bootstrap_ci(values, conf=0.5), bootstrap_ci(values, conf=0.99)
    assert wide.low < narrow.low < narrow.high < wide.high


def test_bootstrap_in_blocks_is_the_same_size():
    assert bootstrap_ci(np.arange(3_000.0), resamples=1500).n == 3000


def test_paired_bootstrap():
    a, b = np.array([1.0] * 60 + [0.0] * 40), np.array([1.0] * 40 + [0.0] * 60)
    got = paired_bootstrap(a, b)
    assert got.mean == pytest.approx(0.2)
    # 20 pairs of +1, 80 of 0: standard error 0.04
    assert (got.low, got.high) == pytest.approx((0.12, 0.28), abs=0.011)
    assert got.clear and got.share_reversed == 0
    back = paired_bootstrap(b, a)
    assert (back.mean, back.low, back.high) == pytest.approx((-got.mean, -got.high, -got.low), abs=0.011)
    assert back.clear and back.share_reversed == 0
    same = paired_bootstrap(a, a)
    assert (same.mean, same.low, same.high, same.share_reversed, same.clear) == (0, 0, 0, 0.5, False)
    assert paired_bootstrap([1.0], [0.0]).low is None
    weak = paired_bootstrap([1, 0, 1, 0, 1], [0, 1, 0, 1, 0])
    assert weak.mean == pytest.approx(0.2) and not weak.clear
    # Of 5 draws from (+,-,+,-,+), 2 or fewer plus signs: sum of C(5,i) .6^i .4^(5-i) = 0.31744
    assert weak.share_reversed == pytest.approx(0.31744, abs=0.02)


# -- pass rates --
@pytest.mark.parametrize(
    ("n", "c", "k", "at", "hat"),
    [
        (4, 2, 1, 0.5, 0.5),
        (4, 2, 2, 5 / 6, 1 / 6),
        (4, 2, 3, 1.0, 0.0),
        (5, 1, 2, 0.4, 0.0),
        (8, 8, 8, 1.0, 1.0),
        (8, 0, 3, 0.0, 0.0),
        (200, 3, 100, 1 - 100 * 99 * 98 / (200 * 199 * 198), 0.0),
    ],
)
def test_pass_at_k_and_pass_hat_k(n, c, k, at, hat):
    assert pass_at_k(n, c, k) == pytest.approx(at, abs=1e-15)
    assert pass_hat_k(n, c, k) == pytest.approx(hat, abs=1e-15)


@settings(max_examples=60)
@given(st.lists(st.booleans(), min_size=1, max_size=8).flatmap(lambda x: st.tuples(st.just(x), st.integers(1, len(x)))))
def test_pass_rates_equal_counting_all_subsets(case):
    results, k = case
    subsets = list(itertools.combinations(results, k))
    n, c = len(results), sum(results)
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)
    assert pass_hat_k(n, c, k) == pytest.approx(sum(map(all, subsets)) / len(subsets), abs=1e-12)


def test_errors_stay_in_the_denominator():
    """Case H23: A S S F E; B E E E E; C S S S S."""
    trials = {"A": [True, True, False, None], "B": [None] * 4, "C": [True] * 4}
    one, two = pass_rates(trials, 1), pass_rates(trials, 2)
    assert (one.errors_as_failures, two.errors_as_failures) == pytest.approx((0.5, 0.388889), abs=1e-6)
    assert (one.errors_left_out, two.errors_left_out) == pytest.approx((0.833333, 0.666667), abs=1e-6)
    for got in (one, two):
        assert (got.tasks_evaluated, got.tasks, got.trials_evaluated, got.trials) == (2, 3, 7, 12)
        assert got.not_evaluated == ("B",)
    assert str(two) == ("0.3889 with errors as failures; 0.6667 without them over 2 of 3 tasks and 7 of 12 trials")
    # A keeps three trials without error: at k = 4 it is not evaluated either.
    assert pass_rates(trials, 4).not_evaluated == ("A", "B")
    assert pass_rates(trials, 2, pass_at_k).errors_left_out == 1.0
    none = pass_rates({"B": [None, None]}, 1)
    assert none.errors_left_out is None and none.errors_as_failures == 0
    assert str(none) == "0; nothing evaluated (2 trials, all errors or too few)"


def test_avg_at_k():
    assert avg_at_k({"a": [1, 0], "b": [1, 1]}, 2) == 0.75
    with pytest.raises(DataError, match="problem 'b' has 1 samples: avg@2 needs exactly 2"):
        avg_at_k({"a": [1, 0], "b": [1]}, 2)
    with pytest.raises(DataError, match=r"scores of 'a'\[1\] is nan"):
        avg_at_k({"a": [1, NAN]}, 2)


def test_majority_vote():
    assert majority_vote(["7", "8", "8", None]) == "8"
    assert majority_vote(["9", "8", "8", "9"]) == "9"  # tie: seen first
    assert majority_vote([None, None, None, "3"]) == "3"  # no answer does not vote
    assert majority_vote([None]) is None and majority_vote([]) is None
    picks = {majority_vote(["9", "8", "8", "9", "1"], seed=s) for s in range(20)}
    assert picks == {"8", "9"}
    assert majority_vote(["9", "8"], seed=4) == majority_vote(["9", "8"], seed=4)


@given(st.lists(st.one_of(st.none(), st.integers(0, 3)), max_size=12), st.integers(0, 5))
def test_the_winner_has_the_most_votes(answers, seed):
    votes = [a for a in answers if a is not None]
    for got in (majority_vote(answers), majority_vote(answers, seed=seed)):
        assert (got is None) == (not votes)
        if votes:
            assert votes.count(got) == max(map(votes.count, votes))


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: wilson(0, 0), DataError, "k=0, n=0: give n of at least 1"),
        (lambda: wilson(3, 2), DataError, "k=3, n=2"),
        (lambda: wilson(0.5, 2), DataError, "k=0.5, n=2: .* whole number"),
        (lambda: wilson(1, 2, 95), ConfigError, "conf=95: give a number between 0 and 1"),
        (lambda: mean_ci([]), DataError, "per_seed has shape"),
        (lambda: mean_ci([1, NAN]), DataError, r"per_seed\[1\] is nan"),
        (lambda: bootstrap_ci([INF]), DataError, r"values\[0\] is inf"),
        (lambda: bootstrap_ci([1, 2], resamples=0), ConfigError, "resamples=0"),
        (lambda: paired_bootstrap([1, 2], [1]), DataError, "a has 2 values, b has 1: pairs need"),
        (lambda: paired_bootstrap([1], [NAN]), DataError, r"b\[0\] is nan"),
        (lambda: pass_at_k(4, 2, 5), DataError, r"k=5 with n=4 samples: k must lie in \[1, n\]; draw more"),
        (lambda: pass_at_k(4, 5, 1), DataError, "c=5 right of n=4"),
        (lambda: pass_hat_k(4, 2, 0), DataError, "k=0 with n=4"),
        (lambda: pass_rates({}, 1), DataError, "no tasks"),
        (lambda: pass_rates({"a": [True]}, 2), DataError, "task 'a' has 1 trials: pass rates at k=2"),
        (lambda: avg_at_k({}, 1), DataError, "no problems"),
        (lambda: t_quantile(0.3, 2), ConfigError, "p=0.3, df=2"),
    ],
)
def test_bad_input_is_named(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_stats_need_neither_torch_nor_sympy():
    code = (
        "import sys, forethought.evaluate.stats; sys.exit(bool({'torch', 'sympy', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
