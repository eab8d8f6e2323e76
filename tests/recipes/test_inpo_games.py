"""The table of preference games: every number of the spec, and the properties behind them."""

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forethought.errors import ConfigError, DataError
from forethought.recipes.inpo.games import (
    CYCLE,
    Method,
    bradley_terry,
    check_preferences,
    check_strengths,
    critical_eta,
    dpo_fit,
    dual_gap,
    growing_eta,
    inpo_fit,
    inpo_objective,
    inpo_plan,
    ipo_fit,
    kl,
    log_policy,
    mixture,
    nash,
    nash_md_step,
    omega,
    pair_weights,
    payoff,
    play,
    sample_pairs,
    sppo_step,
    tournament_weights,
    uniform,
)
from forethought.rewards.pairs import tournament_pair

U = uniform(3)
TAU = 0.05
STAR = nash(CYCLE, U, TAU)


def p(*numbers):
    return log_policy(numbers)


def random_game(seed, n):
    rng = np.random.default_rng(seed)
    upper = np.triu(rng.uniform(0, 1, (n, n)), 1)
    P = upper + np.tril(1 - upper.T, -1) + 0.5 * np.eye(n)
    return P, log_policy(rng.dirichlet(np.ones(n)) + 1e-3), log_policy(rng.dirichlet(np.ones(n)) + 1e-3)


games = st.tuples(st.integers(0, 10_000), st.integers(2, 6)).map(lambda key: random_game(*key))


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tau, expected",
    [
        (0.05, (0.36959, 0.21584, 0.41456)),
        (0.1, (0.39234, 0.22500, 0.38266)),
        (0.01, (0.34105, 0.21940, 0.43954)),
        (0.0, (1 / 3, 2 / 9, 4 / 9)),  # (c, b, a) / (a + b + c) of a = A12 = .4, b = A31 = .2, c = A23 = .3
    ],
)
def test_equilibria_of_the_cycle(tau, expected):
    star = nash(CYCLE, U, tau)
    assert np.exp(star) == pytest.approx(expected, abs=6e-6)
    assert dual_gap(CYCLE, star, U, tau) < 1e-12
    if tau:
        residual = np.exp(star) - np.exp(U) * np.exp(CYCLE @ np.exp(star) / tau) / np.sum(
            np.exp(U) * np.exp(CYCLE @ np.exp(star) / tau)
        )
        assert np.abs(residual).max() < 1e-12


def test_rotation_and_critical_eta():
    assert omega(CYCLE, STAR) == pytest.approx(0.16415, abs=5e-6)
    q = np.exp(STAR)
    closed = sum((CYCLE[i, j] - 0.5) ** 2 * q[i] * q[j] for i in range(3) for j in range(i + 1, 3))
    assert omega(CYCLE, STAR) ** 2 == pytest.approx(closed, rel=1e-12)
    assert critical_eta(CYCLE, U, TAU) == pytest.approx(0.2945, abs=5e-5)


def test_the_gap_is_that_of_the_game():
    # Against a grid of opponents: the closed form is the supremum, reached by the soft best reply.
    policy = p(0.2, 0.5, 0.3)
    reply = log_policy(np.exp(U + CYCLE @ np.exp(policy) / TAU))
    gap = dual_gap(CYCLE, policy, U, TAU)
    assert payoff(CYCLE, reply, policy, U, TAU) - payoff(CYCLE, policy, reply, U, TAU) == pytest.approx(gap, abs=1e-12)
    grid = [(a, b, 1 - a - b) for a in np.linspace(0.01, 0.97, 40) for b in np.linspace(0.01, 0.97, 40) if a + b < 0.99]
    best = max(payoff(CYCLE, log_policy(g), policy, U, TAU) for g in grid)
    assert 0 <= (gap + 1) / 2 - best < 1e-3
    assert dual_gap(CYCLE, U, U, TAU) == pytest.approx(0.0474266, abs=1e-7)
    assert dual_gap(CYCLE, U, U, 0.0) == pytest.approx(2 * (1.7 / 3 - 0.5))
    many = np.array([U, STAR, policy])
    assert dual_gap(CYCLE, many, U, TAU) == pytest.approx([0.0474266, 0, gap], abs=1e-7)


@settings(max_examples=60, deadline=None)
@given(games, st.sampled_from([0.01, 0.05, 0.3, 2.0]))
def test_equilibrium_of_any_game(game, tau):
    P, ref, policy = game
    star = nash(P, ref, tau)
    assert dual_gap(P, star, ref, tau) < 1e-11
    assert payoff(P, star, policy, ref, tau) >= 0.5 - 1e-9  # it loses to nobody
    assert payoff(P, star, policy, ref, tau) + payoff(P, policy, star, ref, tau) == pytest.approx(1, abs=1e-12)
    assert dual_gap(P, policy, ref, tau) > 0
    eta = critical_eta(P, ref, tau) * 1.1
    stays = inpo_plan(P, ref, star, eta, tau)
    assert np.exp(stays) == pytest.approx(np.exp(star), abs=1e-11)


# -- one step ----------------------------------------------------------------------------------------------------------


def test_planning_step():
    assert np.exp(inpo_plan(CYCLE, U, U, 1, TAU)) == pytest.approx((0.35591, 0.32204, 0.32204), abs=5e-6)


def test_least_squares_over_all_pairs_is_the_planning_step():
    policy = p(0.2, 0.5, 0.3)
    fitted = inpo_fit(pair_weights(CYCLE, policy), U, policy, 1, TAU)
    assert np.exp(fitted) == pytest.approx((0.23576, 0.49436, 0.26988), abs=5e-6)
    assert fitted == pytest.approx(inpo_plan(CYCLE, U, policy, 1, TAU), abs=1e-14)


@settings(max_examples=60, deadline=None)
@given(games, st.sampled_from([(0.1, 0.1), (1.0, 0.0), (1.0, 0.05), (0.005, 0.005 / 3)]))
def test_fit_equals_plan_for_any_game(game, strengths):
    P, ref, policy = game
    eta, tau = strengths
    fitted = inpo_fit(pair_weights(P, policy), ref, policy, eta, tau)
    assert fitted == pytest.approx(inpo_plan(P, ref, policy, eta, tau), abs=1e-9 / eta)


def test_fit_equals_plan_near_a_corner():
    policy = p(1.0, 1e-9, 1e-6)
    fitted = inpo_fit(pair_weights(CYCLE, policy), U, policy, 1, TAU)
    assert fitted == pytest.approx(inpo_plan(CYCLE, U, policy, 1, TAU), abs=1e-9)


def test_special_cases():
    policy = p(0.2, 0.5, 0.3)
    M = pair_weights(CYCLE, policy)
    assert inpo_fit(M, U, policy, 0.3, 0.3) == pytest.approx(ipo_fit(M, U, 0.3), abs=1e-14)  # tau = eta: IPO on ref
    assert inpo_fit(M, U, policy, 0.3, 0.0) == pytest.approx(ipo_fit(M, policy, 0.3), abs=1e-14)  # tau = 0: on pi_t
    first = pair_weights(CYCLE, U)
    for tau in (0.0, 0.05, 0.3):  # pi_1 = ref: IPO on ref whatever tau is
        assert inpo_fit(first, U, U, 0.3, tau) == pytest.approx(ipo_fit(first, U, 0.3), abs=1e-14)
    assert sppo_step(CYCLE, policy, 4.0) == pytest.approx(inpo_plan(CYCLE, U, policy, 0.25, 0.0), abs=1e-14)


def test_the_floor_of_the_loss():
    M = np.array([[0, 0.9], [0.1, 0]])
    half = uniform(2)
    fitted = inpo_fit(M, half, half, 1, TAU)
    assert fitted[0] - fitted[1] == pytest.approx(0.4)  # best h = (2p - 1) / (2 eta)
    assert inpo_objective(M, half, half, fitted, 1, TAU) == pytest.approx(0.09)  # p (1 - p) / eta^2
    assert inpo_objective(M, half, half, half, 1, TAU) == pytest.approx(0.25)
    paper = inpo_objective(np.array([[0, 0.5], [0.5, 0]]), half, half, half, 0.005, 0.005 / 3)
    assert paper == pytest.approx(10_000)  # 1 / (4 eta^2) at p = 1/2


def test_the_fit_is_the_minimum_of_the_objective():
    P, ref, policy = random_game(3, 5)
    M = sample_pairs(P, policy, 60, np.random.default_rng(0))
    fitted = inpo_fit(M, ref, policy, 0.5, 0.1)
    least = inpo_objective(M, ref, policy, fitted, 0.5, 0.1)
    rng = np.random.default_rng(1)
    for _ in range(20):
        other = fitted + rng.normal(size=5) * 0.05
        assert inpo_objective(M, ref, policy, other - np.log(np.exp(other).sum()), 0.5, 0.1) >= least - 1e-12


def test_answers_that_were_never_drawn_keep_their_anchor():
    policy = p(0.4, 0.3, 0.2, 0.1)
    M = np.zeros((4, 4))
    M[0, 1] = 3
    M[1, 0] = 1
    fitted = inpo_fit(M, policy, policy, 1, 0.1)
    assert fitted[0] - fitted[1] == pytest.approx(policy[0] - policy[1] + 0.25)  # (2 x 3/4 - 1) / (2 eta)
    assert fitted[2] - fitted[3] == pytest.approx(policy[2] - policy[3])
    assert fitted[0] + fitted[1] - 2 * fitted[2] == pytest.approx(policy[0] + policy[1] - 2 * policy[2])


def test_nash_md_steps_from_the_mixture():
    assert nash_md_step(CYCLE, U, U, 1, TAU) == pytest.approx(inpo_plan(CYCLE, U, U, 1, TAU), abs=1e-15)
    other = p(0.2, 0.5, 0.3)
    differ = np.exp(nash_md_step(CYCLE, U, other, 1, TAU)) - np.exp(inpo_plan(CYCLE, U, other, 1, TAU))
    assert np.abs(differ).max() > 1e-4


def test_dpo_fit_of_the_cycle_at_uniform():
    rewards, policy = dpo_fit(pair_weights(CYCLE, U), U, 1.0)
    assert rewards == pytest.approx((0.2703, -0.1352, -0.1352), abs=5e-5)
    assert policy == pytest.approx(log_policy(np.exp(rewards)), abs=1e-12)


def test_transitive_preferences_are_ranked_alike_and_recovered_by_dpo():
    rewards = np.array([0.3, -1.0, 1.2, 0.1])
    P, u = bradley_terry(rewards), uniform(4)
    fitted, by_dpo = dpo_fit(pair_weights(P, u), u, 1.0)
    assert fitted == pytest.approx(rewards - rewards.mean(), abs=1e-9)
    by_inpo = inpo_plan(P, u, u, 1, TAU)
    assert list(np.argsort(by_inpo)) == list(np.argsort(by_dpo)) == list(np.argsort(rewards))


def test_dpo_fit_of_drawn_pairs_needs_a_ridge_where_an_answer_always_won():
    M = np.array([[0, 5.0], [0, 0]])
    with pytest.raises(DataError, match=r"answer \d (won|lost) every time.*give ridge > 0"):
        dpo_fit(M, uniform(2), 1.0)
    rewards, _ = dpo_fit(M, uniform(2), 1.0, ridge=0.01)
    d = rewards[0] - rewards[1]
    assert 1 / (1 + math.exp(d)) == pytest.approx(0.01 * d / 2)  # the pull of the ridge balances the slope


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "eta, expected",
    [
        (1.0, {20: 0.0081, 50: 0.00089, 100: 0.000023}),
        (0.5, {100: 6e-6}),
        (0.35, {100: 2.4e-4}),
    ],
)
def test_inpo_converges_above_the_critical_eta(eta, expected):
    distances = play(Method(eta=eta, tau=TAU), CYCLE, U, 1000).distances(STAR)
    for t, value in expected.items():
        assert distances[t] == pytest.approx(value, rel=0.03)
    assert distances[1000] < 1e-11


def test_inpo_just_above_the_critical_eta_converges_slowly():
    run = play(Method(eta=0.3, tau=TAU), CYCLE, U, 2000)
    distances = run.distances(STAR)
    assert distances[100] > 0.005 and 1e-6 < distances[1000] < 1e-5 and distances[2000] < 1e-8


@pytest.mark.parametrize("eta, spread", [(0.2, 0.66), (0.1, 0.95)])
def test_inpo_below_the_critical_eta_goes_round(eta, spread):
    run = play(Method(eta=eta, tau=TAU), CYCLE, U, 2000)
    assert run.spread(500) == pytest.approx(spread, abs=0.006)
    assert run.distances(STAR)[-500:].min() > 0.1


def test_inpo_with_the_growing_schedule():
    distances = play(Method(schedule="growing", tau=TAU), CYCLE, U, 1000).distances(STAR)
    assert distances[10] == pytest.approx(0.30, abs=0.005) and distances[10] > distances[0]  # worse before better
    assert distances[100] == pytest.approx(9.3e-4, rel=0.01)
    assert distances[1000] == pytest.approx(1.44e-7, rel=0.01)
    assert [growing_eta(t, TAU) for t in (1, 2, 10)] == pytest.approx([0.075, 0.1, 0.3])


def test_without_a_pull_to_ref_only_the_average_comes_near():
    run = play(Method(eta=1, tau=0.0), CYCLE, U, 5000)
    assert np.exp(run.policies[-2000:]).max() > 0.999 and run.gaps(0.0)[-1000:].mean() > 0.4
    same = play(Method(name="sppo", eta=1), CYCLE, U, 200)
    assert same.policies == pytest.approx(run.policies[:201], abs=1e-10)
    average = [dual_gap(CYCLE, mixture(run.policies[:t]), U, 0.0) for t in (500, 1000, 3000, 5001)]
    assert average == pytest.approx([0.0133, 0.0086, 0.0059, 0.0046], abs=6e-5)
    assert dual_gap(CYCLE, run.average(), U, 0.0) == average[-1]


@pytest.mark.parametrize("eta, distance", [(1.0, 7.9e-5), (0.3, 1.1e-3), (0.1, 2.1e-2)])
def test_nash_md_settles_beside_the_equilibrium(eta, distance):
    run = play(Method(name="nash-md", eta=eta, tau=TAU), CYCLE, U, 2000)
    assert run.spread(100) < 1e-9
    assert run.distances(STAR)[-1] == pytest.approx(distance, rel=0.02)


@pytest.mark.parametrize("beta", [0.05, 0.1])
def test_iterative_dpo_on_ref_runs_through_the_corners_at_small_beta(beta):
    run = play(Method(name="dpo", beta=beta), CYCLE, U, 60)
    last = np.exp(run.policies[-10:])
    assert last.max(1).min() > 0.99
    order = last.argmax(1)
    assert set(order) == {0, 1, 2}
    assert all((a, b) in {(1, 0), (0, 2), (2, 1)} for a, b in zip(order, order[1:], strict=False))  # 2 -> 1 -> 3 -> 2
    # The unregularised gap of the corners is .4, .8, .6: about .8 at one of them, .6 on average.
    assert sorted(run.gaps(0.0)[-3:]) == pytest.approx([0.4, 0.6, 0.8], abs=1e-3)


def test_iterative_dpo_on_ref_at_larger_beta():
    assert play(Method(name="dpo", beta=0.5), CYCLE, U, 400).spread(200) == pytest.approx(0.87, abs=0.006)
    for beta, own in ((1.0, 0.014), (2.0, 0.0095)):
        run = play(Method(name="dpo", beta=beta), CYCLE, U, 400)
        assert run.spread(200) < 1e-9  # so "DPO does not converge" is false here
        assert run.gaps(0.0)[-1] > 0.07 and run.gaps(beta)[-1] == pytest.approx(own, abs=2.5e-4)
        assert run.gaps(TAU)[-1] > 0.016


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0, 3.0])
def test_iterative_dpo_on_the_previous_iterate_swings_between_corners(beta):
    run = play(Method(name="dpo", beta=beta, base="previous"), CYCLE, U, 1500)
    last = np.exp(run.policies[-1000:])
    assert (last.max(0) > 0.99).all() and run.gaps(0.0)[-1000:].mean() > 0.4


def test_ipo_on_ref_settles_at_the_equilibrium_of_its_own_tau_or_goes_round():
    # Fixed point: ref exp(P pi / beta). It contracts where omega < beta (about .164 here).
    run = play(Method(name="ipo", beta=0.2), CYCLE, U, 300)
    assert run.policies[-1] == pytest.approx(nash(CYCLE, U, 0.2), abs=1e-10)
    assert run.gaps(TAU)[-1] == pytest.approx(0.01223, abs=5e-5)
    assert play(Method(name="ipo", beta=0.05), CYCLE, U, 300).spread(100) > 0.99


def test_inpo_on_drawn_pairs():
    """2000 pairs: KL .0009 and gap .0010, as in the spec. 200 pairs: the spec's .0027 and .0031 are those of one lucky window
    of 100 iterates (2% of them are as low); in the long run it is .0087 and .0097, ten times as much, as is the
    variance of the labels."""
    for pairs, distance, gap in ((200, 0.0087, 0.0097), (2000, 0.00091, 0.00106)):
        run = play(Method(eta=1, tau=TAU, pairs=pairs), CYCLE, U, 8000, seed=5)
        assert run.distances(STAR)[200:].mean() == pytest.approx(distance, rel=0.12)
        assert run.gaps(TAU)[200:].mean() == pytest.approx(gap, rel=0.12)


def test_soft_labels_have_less_noise():
    def far(mode):
        runs = [play(Method(pairs=200, pair_mode=mode), CYCLE, U, 200, seed=s) for s in range(6)]
        return np.mean([r.distances(STAR)[-100:].mean() for r in runs])

    assert far("soft") < 0.6 * far("iid")


def test_drawn_pairs_work_for_every_fitted_method_and_repeat():
    for name in ("inpo", "ipo", "dpo"):
        method = Method(name=name, beta=0.5, pairs=3)  # so few that answers are missing or always win
        a, b = (play(method, CYCLE, U, 30, seed=1) for _ in range(2))
        assert np.isfinite(a.policies).all() and (a.policies == b.policies).all()
        assert (a.policies != play(method, CYCLE, U, 30, seed=2).policies).any()


# -- the tournament ----------------------------------------------------------------------------------------------------


def test_a_tournament_on_signs_stays_at_uniform():
    M = tournament_weights(CYCLE, U)
    assert M.sum() == pytest.approx(0.34, abs=0.005)  # of the 8-tuples keep a pair
    assert M[0, 1] == pytest.approx(M[1, 2]) and M[1, 2] == pytest.approx(M[2, 0])
    run = play(Method(pair_mode="tournament", eta=1, tau=TAU), CYCLE, U, 50)
    assert run.policies[-1] == pytest.approx(U, abs=1e-12)
    assert run.gaps(TAU)[-1] == pytest.approx(0.047, abs=5e-4)


@pytest.mark.parametrize("samples", [2, 4, 8])
def test_tournament_weights_are_those_of_the_pair_builder(samples):
    if samples == 8:  # 6561 brackets: a part of them suffices
        tuples = np.random.default_rng(0).integers(3, size=(600, 8)).tolist()
        kept, M = np.zeros((3, 3)), tournament_weights(CYCLE, U, 8)
    else:
        tuples = list(product(range(3), repeat=samples))
        kept, M = np.zeros((3, 3)), tournament_weights(CYCLE, p(0.2, 0.5, 0.3), samples)
    weight = (1 / 3, 1 / 3, 1 / 3) if samples == 8 else (0.2, 0.5, 0.3)
    total = 0.0
    for row in tuples:

        def ask(matches, row=row):
            return [CYCLE[row[i], row[j]] for i, j in matches]

        pair = tournament_pair([str(a) for a in row], ask)
        here = math.prod(weight[a] for a in row)
        total += here
        if pair is not None:
            kept[row[pair.chosen], row[pair.rejected]] += here
    assert kept / total == pytest.approx(M, abs=0.04 if samples == 8 else 1e-12)


def test_a_tournament_finds_a_best_answer():
    P = bradley_terry([1.0, 0.0, -1.0])
    M = tournament_weights(P, U)
    assert M[0, 2] > 0.8 and M.sum() == pytest.approx(M[0, 1] + M[0, 2] + M[1, 2])
    with pytest.raises(ConfigError, match=r"samples=6: a knock-out needs a power of two"):
        tournament_weights(P, U, 6)


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_bad_oracles_are_named():
    with pytest.raises(DataError, match=r"P\[0, 1\] \+ P\[1, 0\] = 1.2: one of two answers wins"):
        check_preferences([[0.5, 0.7], [0.5, 0.5]])
    with pytest.raises(DataError, match=r"P\[0, 1\] = 1.4: a probability"):
        check_preferences([[0.5, 1.4], [-0.4, 0.5]])
    with pytest.raises(DataError, match=r"P\[1, 0\] = nan"):
        check_preferences([[0.5, 0.7], [math.nan, 0.5]])
    with pytest.raises(DataError, match=r"shape \(2, 3\): give a square table"):
        check_preferences(np.zeros((2, 3)))
    assert check_preferences(CYCLE + 4e-7 * (1 - np.eye(3))) is not None  # rounding


def test_bad_strengths_are_named():
    for eta, tau, message in (
        (0.0, 0.0, "eta=0.0: give a positive number"),
        (math.nan, 0.0, "eta=nan"),
        (1.0, -0.1, "tau=-0.1: give 0 or more"),
        (0.1, 0.2, "tau=0.2 exceeds eta=0.1: the weight 1 - tau/eta"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_strengths(eta, tau)
        with pytest.raises(ConfigError, match=message):
            Method(eta=eta, tau=tau)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"name": "dqo"}, "name='dqo': one of inpo"),
        ({"base": "last"}, "base='last'"),
        ({"name": "dpo", "beta": 0.0}, "beta=0.0: give a positive number"),
        ({"pairs": -1}, "pairs=-1"),
        ({"name": "sppo", "pairs": 5}, "name='sppo': exact only"),
        ({"schedule": "growing", "tau": 0.0}, "growing schedule.*needs a positive tau"),
        ({"pairs": 5, "pair_mode": "tournament"}, "leave pairs at 0"),
    ]
    for bad, message in cases:
        with pytest.raises(ConfigError, match=message):
            Method(**bad)


def test_bad_policies_and_pairs_are_named():
    with pytest.raises(DataError, match=r"policy\[1\] = 0.0: give one positive probability"):
        log_policy([1.0, 0.0])
    with pytest.raises(DataError, match=r"ref has shape \(2,\): give finite log-probabilities \[3\]"):
        play(Method(), CYCLE, uniform(2), 3)
    with pytest.raises(ConfigError, match="iterations=0"):
        play(Method(), CYCLE, U, 0)
    with pytest.raises(DataError, match=r"M\[0, 1\] = -1.0: a pair's weight"):
        inpo_fit(np.array([[0, -1.0], [0, 0]]), uniform(2), uniform(2), 1, 0)
    with pytest.raises(DataError, match="no pair of two different answers"):
        inpo_fit(np.eye(2), uniform(2), uniform(2), 1, 0)
    with pytest.raises(ConfigError, match="tau=0: this game has no unique fully mixed equilibrium"):
        nash(bradley_terry([1.0, 0.0, -1.0]), U, 0)
    with pytest.raises(ConfigError, match="tau=0.0: without a pull to ref"):
        critical_eta(CYCLE, U, 0.0)


def test_distance_and_mixture():
    assert kl(U, U) == 0 and kl(p(0.5, 0.25, 0.25), U) == pytest.approx(0.5 * math.log(1.5) + 0.5 * math.log(0.75))
    assert np.exp(mixture(np.array([p(0.2, 0.8), p(0.6, 0.4)]))) == pytest.approx((0.4, 0.6))
