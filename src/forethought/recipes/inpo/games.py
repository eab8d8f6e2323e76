"""Preference games in a table: exact, in float64 and log-space, in milliseconds. NumPy only.

A game has n answers and an oracle P [n, n]: P[i, j] = probability that answer i beats answer j. A policy is an array of
log-probabilities [n] (`log_policy` makes one); a reference policy pulls with strength tau:

    J(p1, p2) = P(p1 > p2) - tau KL(p1 || ref) + tau KL(p2 || ref)

For tau > 0 the equilibrium pi* of J is unique and solves pi* ~ ref exp(P pi* / tau). Here are the game's values (`payoff`,
`dual_gap`, `nash`, `critical_eta`), one step of each method, in its exact form or fitted to weighted pairs, and `play`,
which iterates one.

Pairs are a matrix M [n, n]: M[i, j] = weight of "i beat j". `pair_weights` is the population of i.i.d. pairs,
`sample_pairs` counts of drawn ones, `tournament_weights` the exact population of a knock-out.

Sources: INPO (Zhang et al., arXiv 2407.00617); Nash-MD (Munos et al., arXiv 2312.00886); SPPO (Wu et al., arXiv
2405.00675); IPO (Azar et al., arXiv 2310.12036); DPO (Rafailov et al., arXiv 2305.18290). Departures: the stability bound
`critical_eta` and the closed form of the duality gap are derived, not in the INPO paper; `nash` follows the equilibrium
from large to small tau by Newton's method in place of iterating the step, which needs 1e5 iterations at tau 0.01.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from forethought.errors import ConfigError, DataError

Array = np.ndarray
Numbers = Sequence[float] | Array

CYCLE: Array = np.array([[0.5, 0.9, 0.3], [0.1, 0.5, 0.8], [0.7, 0.2, 0.5]])
"""Three answers in a cycle: 1 beats 2, 2 beats 3, 3 beats 1. No scalar reward explains it."""
TOLERANCE = 1e-6
"""P[i, j] + P[j, i] may be off 1 by this much."""
FLOOR = 1e-12
"""Least probability with which an answer enters the population of pairs."""
_NEWTON_STEPS = 200
_RIDGE = 1e-6  # of DPO on drawn pairs, where an answer may have won every time
_LARGEST_STEP = 2.0  # of a Newton step of `dpo_fit`, in nats


# -- games and policies ------------------------------------------------------------------------------------------------


def check_preferences(P: Numbers | Sequence[Numbers]) -> Array:
    """The oracle as float64 [n, n].

    Raises:
        DataError: no square table of at least 2 answers, a value outside of [0, 1], or P[i, j] + P[j, i] off 1 by more
            than 1e-6; the entry is named.
    """
    table = np.asarray(P, np.float64)
    if table.ndim != 2 or table.shape[0] != table.shape[1] or len(table) < 2:
        raise DataError(f"preferences have shape {table.shape}: give a square table [n, n] of at least 2 answers")
    bad = np.argwhere(~((table >= 0) & (table <= 1)))  # NaN, too
    if len(bad):
        i, j = bad[0]
        raise DataError(f"P[{i}, {j}] = {table[i, j]}: a probability lies in [0, 1]")
    off = np.abs(table + table.T - 1)
    if off.max() > TOLERANCE:
        i, j = np.unravel_index(int(off.argmax()), off.shape)
        raise DataError(
            f"P[{i}, {j}] + P[{j}, {i}] = {table[i, j] + table[j, i]:.6g}: one of two answers wins, so the sum is 1; "
            "average both orders, (P + 1 - P.T) / 2"
        )
    return table


def bradley_terry(rewards: Numbers) -> Array:
    """The transitive oracle sigmoid(r_i - r_j) [n, n] of rewards [n]."""
    r = np.asarray(rewards, np.float64)
    return _sigmoid(r[:, None] - r[None])


def log_policy(probabilities: Numbers) -> Array:
    """Log-probabilities [n] of positive numbers, normalised.

    Raises:
        DataError: a number is not positive and finite (an answer of probability 0 can never come back).
    """
    p = np.asarray(probabilities, np.float64)
    bad = np.flatnonzero(~(np.isfinite(p) & (p > 0)))
    if p.ndim != 1 or not len(p) or len(bad):
        what = f"[{bad[0]}] = {p[bad[0]]}" if p.ndim == 1 and len(bad) else f" has shape {p.shape}"
        raise DataError(f"policy{what}: give one positive probability for each answer")
    return log_normalise(np.log(p))


def uniform(n: int) -> Array:
    return np.full(n, -math.log(n))


def log_normalise(logits: Array) -> Array:
    """log softmax over the last axis.

    Raises:
        DataError: a NaN or +inf among the logits.
    """
    top = logits.max(-1, keepdims=True)
    if not np.isfinite(top).all():
        raise DataError(f"logits {logits}: not finite, so there is no policy")
    shifted = logits - top
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def mixture(policies: Array) -> Array:
    """The uniform mixture [n] of policies [T, n]: one of them is drawn, then an answer from it."""
    top = policies.max(0)
    return log_normalise(top + np.log(np.exp(policies - top).mean(0)))


def kl(p: Array, q: Array) -> Array | float:
    """KL(p || q) in nats, over the last axis."""
    out = np.maximum((np.exp(p) * (p - q)).sum(-1), 0.0)
    return float(out) if out.ndim == 0 else out


def check_strengths(eta: float, tau: float) -> None:
    """Raises:
    ConfigError: not 0 <= tau <= eta with eta > 0 (tau > eta would push away from the current policy).
    """
    if not (math.isfinite(eta) and eta > 0):
        raise ConfigError(f"eta={eta}: give a positive number; eta is an inverse step size, so larger is slower")
    if not (math.isfinite(tau) and tau >= 0):
        raise ConfigError(f"tau={tau}: give 0 or more")
    if tau > eta:
        raise ConfigError(
            f"tau={tau} exceeds eta={eta}: the weight 1 - tau/eta of the current policy would be negative; "
            "raise eta or lower tau"
        )


# -- values ------------------------------------------------------------------------------------------------------------


def payoff(P: Array, p1: Array, p2: Array, ref: Array, tau: float) -> float:
    """J(p1, p2); J(p, p) = 1/2, and J(p1, p2) + J(p2, p1) = 1."""
    return float(np.exp(p1) @ P @ np.exp(p2)) - tau * float(kl(p1, ref)) + tau * float(kl(p2, ref))


def dual_gap(P: Array, policy: Array, ref: Array, tau: float) -> Array | float:
    """max over p1 of J(p1, p) minus min over p2 of J(p, p2): 0 at the equilibrium, positive elsewhere.

    Args:
        policy: [..., n]; the result has the leading shape.

    With u = P p: 2 (tau log sum ref exp(u / tau) + tau KL(p || ref)) - 1, and 2 max u - 1 for tau = 0.
    """
    u = np.exp(policy) @ P.T
    if tau == 0:
        out = 2 * u.max(-1) - 1
    else:
        scaled = ref + u / tau
        top = scaled.max(-1, keepdims=True)
        best = tau * (top[..., 0] + np.log(np.exp(scaled - top).sum(-1)))
        out = 2 * (best + tau * (np.exp(policy) * (policy - ref)).sum(-1)) - 1
    out = np.maximum(out, 0.0)
    return float(out) if out.ndim == 0 else out


def omega(P: Array, policy: Array) -> float:
    """Largest |eigenvalue| of (P - 1/2) diag(policy): the speed of the game's rotation (its eigenvalues are +-i omega).

    With three answers omega^2 = sum over pairs of (P_ij - 1/2)^2 p_i p_j.
    """
    return float(np.abs(np.linalg.eigvals((P - 0.5) * np.exp(policy)[None])).max())


def critical_eta(P: Array, ref: Array, tau: float) -> float:
    """The constant eta above which the step contracts near the equilibrium: (tau^2 + omega^2) / (2 tau).

    Raises:
        ConfigError: tau is not positive (without a pull to ref no constant eta contracts).
    """
    if not tau > 0:
        raise ConfigError(f"tau={tau}: without a pull to ref no constant eta contracts; give a positive tau")
    return max(tau, (tau * tau + omega(P, nash(P, ref, tau)) ** 2) / (2 * tau))


def nash(P: Array, ref: Array, tau: float) -> Array:
    """The equilibrium: the fixed point of pi = ref exp(P pi / tau), to rounding.

    For tau = 0 it is the fully mixed equilibrium of the game without reference, where that is unique.

    Raises:
        ConfigError: tau < 0, or tau = 0 and there is no unique fully mixed equilibrium. DataError: no convergence.
    """
    P = check_preferences(P)
    if not (math.isfinite(tau) and tau >= 0):
        raise ConfigError(f"tau={tau}: give 0 or more")
    if tau == 0:
        return _fully_mixed(P)
    # The Jacobian's eigenvalues have real part 1 at an equilibrium, so the path over tau has no fold.
    at, policy = max(tau, 1.0), ref
    for _ in range(20):  # a contraction for tau of at least 1
        policy = log_normalise(ref + P @ np.exp(policy) / at)
    factor = 0.7
    while True:
        found = _newton(P, ref, at, policy)
        if found is not None:
            policy = found
            if at == tau:
                return policy
            last, at = at, max(tau, at * factor)
        elif factor < 0.999:
            factor = math.sqrt(factor)
            at = max(tau, last * factor)
        else:
            raise DataError(f"tau={tau}: no equilibrium found from ref={np.exp(ref)}; give a larger tau")


def _newton(P: Array, ref: Array, tau: float, policy: Array) -> Array | None:
    best, least = None, math.inf
    for _ in range(50):
        reply = log_normalise(ref + P @ np.exp(policy) / tau)
        residual = policy - reply
        size = float(np.abs(np.exp(policy) - np.exp(reply)).max())
        if size < least:
            best, least = policy, size
        elif least < 1e-12:
            return best
        slope = P * np.exp(policy)[None] / tau
        slope -= np.exp(reply) @ slope
        step = np.linalg.solve(np.eye(len(P)) - slope, residual)
        if not np.isfinite(step).all():
            return None
        policy = log_normalise(policy - step * min(1.0, 3 / max(1e-300, float(np.abs(step).max()))))
    return best if least < 1e-12 else None


def _fully_mixed(P: Array) -> Array:
    skew = P - 0.5
    rank = np.linalg.matrix_rank(skew, tol=1e-10)
    system = np.vstack([skew, np.ones(len(P))])
    p = np.linalg.lstsq(system, np.r_[np.zeros(len(P)), 1.0], rcond=None)[0]
    if rank < len(P) - 1 or p.min() <= 0 or np.abs(skew @ p).max() > 1e-9:
        raise ConfigError("tau=0: this game has no unique fully mixed equilibrium; give a small positive tau")
    return log_policy(p)


# -- one step of each method -------------------------------------------------------------------------------------------


def inpo_plan(P: Array, ref: Array, policy: Array, eta: float, tau: float) -> Array:
    """The exact step: pi_{t+1} ~ exp(P pi_t / eta) ref^(tau/eta) pi_t^(1 - tau/eta).

    tau = eta is IPO against ref, tau = 0 is SPPO with step 1/eta.
    """
    check_strengths(eta, tau)
    return log_normalise(P @ np.exp(policy) / eta + _anchor(ref, policy, eta, tau))


def inpo_fit(M: Array, ref: Array, policy: Array, eta: float, tau: float) -> Array:
    """The minimiser of INPO's loss over weighted pairs: sum M[i, j] (h(i, j) - 1/(2 eta))^2.

    With the population of i.i.d. pairs it equals `inpo_plan`. Answers that were never compared with one another leave
    the table under-determined: then each connected set keeps the total of its anchor (least change).

    Raises:
        DataError: a weight is negative or not finite, or every weight is 0.
    """
    check_strengths(eta, tau)
    M = _checked_pairs(M)
    change = _solve_laplacian(M + M.T, (M.sum(1) - M.sum(0)) / (2 * eta))
    return log_normalise(change + _anchor(ref, policy, eta, tau))


def inpo_objective(M: Array, ref: Array, policy: Array, candidate: Array, eta: float, tau: float) -> float:
    """INPO's loss of a candidate, the mean of (h - 1/(2 eta))^2 over weighted pairs of `policy`.

    Its minimum is not 0: a pair of two answers that wins with probability p leaves p (1 - p) / eta^2.
    """
    check_strengths(eta, tau)
    M = _checked_pairs(M)
    g = candidate - _anchor(ref, policy, eta, tau)
    return float((M * (g[:, None] - g[None] - 1 / (2 * eta)) ** 2).sum() / M.sum())


def ipo_fit(M: Array, base: Array, beta: float) -> Array:
    """The minimiser of IPO's loss against `base`: INPO with tau = eta = beta."""
    return inpo_fit(M, base, base, beta, beta)


def dpo_fit(M: Array, base: Array, beta: float, *, ridge: float = 0.0) -> tuple[Array, Array]:
    """The minimiser of DPO's loss over weighted pairs, by Newton's method.

    Args:
        base: the reference of the loss: ref, or the previous iterate.
        ridge: weight of |r|^2 / 2, as a share of all pairs; needed for drawn pairs, where an answer may have won always.

    Returns: implied rewards [n] with mean 0, and the policy base * exp(r / beta).

    Raises:
        ConfigError: beta or ridge. DataError: bad weights, or the minimum does not exist (names the answer).
    """
    if not (math.isfinite(beta) and beta > 0):
        raise ConfigError(f"beta={beta}: give a positive number")
    if not (math.isfinite(ridge) and ridge >= 0):
        raise ConfigError(f"ridge={ridge}: give 0 or more")
    M = _checked_pairs(M)
    M = M / M.sum()
    both = M + M.T
    r = np.zeros(len(M))
    for _ in range(_NEWTON_STEPS):
        win = _sigmoid(r[:, None] - r[None])
        gradient = (M - both * win).sum(1) - ridge * r
        step = _solve_laplacian(both * win * win.T, gradient, ridge)
        largest = float(np.abs(step).max())
        r = r + step * min(1.0, _LARGEST_STEP / max(largest, 1e-300))
        if largest < 1e-9 * (1 + float(np.abs(r).max())):
            return r - r.mean(), log_normalise(base + r / beta)
    always = int(np.abs(r).argmax())
    raise DataError(
        f"the DPO minimum does not exist for these pairs: answer {always} {'won' if r[always] > 0 else 'lost'} every "
        "time against others, so its reward runs away; give ridge > 0 or more pairs"
    )


def sppo_step(P: Array, policy: Array, eta_s: float) -> Array:
    """pi_{t+1} ~ pi_t exp(eta_s P pi_t); no reference."""
    if not (math.isfinite(eta_s) and eta_s > 0):
        raise ConfigError(f"eta_s={eta_s}: give a positive step size")
    return log_normalise(policy + eta_s * (P @ np.exp(policy)))


def nash_md_step(P: Array, ref: Array, policy: Array, eta: float, tau: float) -> Array:
    """Mirror step from, and win rate against, the geometric mixture pi_t^(1 - tau/eta) ref^(tau/eta)."""
    check_strengths(eta, tau)
    mix = log_normalise(_anchor(ref, policy, eta, tau))
    return log_normalise(mix + P @ np.exp(mix) / eta)


def growing_eta(t: int, tau: float) -> float:
    """eta_t = tau (t + 2) / 2 for t = 1, 2, ...: the paper's schedule with a last-iterate rate of O(1/t)."""
    return tau * (t + 2) / 2


def _anchor(ref: Array, policy: Array, eta: float, tau: float) -> Array:
    return tau / eta * ref + (1 - tau / eta) * policy


def _sigmoid(x: Array) -> Array:
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small))


def _checked_pairs(M: Array) -> Array:
    M = np.array(M, np.float64)
    if M.ndim != 2 or M.shape[0] != M.shape[1]:
        raise DataError(f"pairs have shape {M.shape}: give weights [n, n], M[i, j] of 'i beat j'")
    bad = np.argwhere(~(np.isfinite(M) & (M >= 0)))
    if len(bad):
        i, j = bad[0]
        raise DataError(f"M[{i}, {j}] = {M[i, j]}: a pair's weight is 0 or more")
    np.fill_diagonal(M, 0)  # an answer against itself carries only a constant
    if not M.any():
        raise DataError("no pair of two different answers: nothing to learn from")
    return M


def _solve_laplacian(weights: Array, b: Array, ridge: float = 0.0) -> Array:
    """v with sum_j weights[i, j] (v_i - v_j) + ridge v_i = b_i, of mean 0 within each connected set of answers.

    Each set is solved with its best connected answer pinned and its rows scaled, which is exact to rounding for
    weights of any spread (a pseudo-inverse would lose those of rare answers).
    """
    n = len(b)
    weights = weights - np.diag(np.diag(weights))
    degree = weights.sum(1)
    if ridge:
        return np.linalg.solve(np.diag(degree + ridge) - weights, b)
    v, left = np.zeros(n), set(range(n))
    while left:
        members, todo = set(), [left.pop()]
        while todo:
            i = todo.pop()
            members.add(i)
            near = [j for j in np.flatnonzero(weights[i]).tolist() if j in left]
            left -= set(near)
            todo += near
        if len(members) > 1:
            order = sorted(members, key=lambda i: -degree[i])
            free = np.array(order[1:])
            scale = degree[free]
            system = np.eye(len(free)) - weights[np.ix_(free, free)] / scale[:, None]
            v[free] = np.linalg.solve(system, b[free] / scale)
            v[order] -= v[order].mean()
    return v


# -- pairs -------------------------------------------------------------------------------------------------------------


def pair_weights(P: Array, policy: Array) -> Array:
    """The population of i.i.d. pairs: M[i, j] = p_i p_j P[i, j]; probabilities are floored at 1e-12."""
    p = np.maximum(np.exp(policy), FLOOR)
    return np.outer(p, p) * P


def sample_pairs(P: Array, policy: Array, count: int, rng: np.random.Generator, *, soft: bool = False) -> Array:
    """Weights of `count` drawn i.i.d. pairs; a pair of the same answer twice is drawn, too, and says nothing.

    soft: the label is the probability in place of a draw from it.
    """
    if count < 1:
        raise ConfigError(f"count={count}: draw at least 1 pair")
    p = np.exp(policy)
    first, second = rng.choice(len(p), size=(2, count), p=p / p.sum())
    M = np.zeros_like(P)
    if soft:
        np.add.at(M, (first, second), P[first, second])
        np.add.at(M, (second, first), P[second, first])
    else:
        won = rng.random(count) < P[first, second]
        np.add.at(M, (np.where(won, first, second), np.where(won, second, first)), 1.0)
    return M


def tournament_weights(P: Array, policy: Array, samples: int = 8) -> Array:
    """Exact weights of what a knock-out over `samples` answers keeps: M[i, j] = probability that the pair (i, j) is kept.

    The oracle's signs decide (P >= 1/2: the first wins), winners play winners and losers losers; the final winner must
    beat the final loser (P > 1/2), otherwise the prompt gives no pair. So 1 - M.sum() is the share that is dropped.

    Raises:
        ConfigError: `samples` is not a power of two, at least 2.
    """
    if samples < 2 or samples & (samples - 1):
        raise ConfigError(f"samples={samples}: a knock-out needs a power of two, at least 2")
    n = len(P)
    p = np.exp(policy)
    i, j = np.indices((n, n))
    first = P >= 0.5
    better, worse = np.where(first, i, j), np.where(first, j, i)
    bracket = np.zeros((n, n))  # joint probability of (winner, loser) of one block
    np.add.at(bracket, (better, worse), np.outer(p, p))
    for _ in range(samples.bit_length() - 2):
        joint = np.einsum("ab,cd->acbd", bracket, bracket)  # (winner, winner, loser, loser) of two blocks
        bracket = np.zeros((n, n))
        np.add.at(bracket, (better[:, :, None, None], worse[None, None]), joint)
    return bracket * (P > 0.5)


# -- playing -----------------------------------------------------------------------------------------------------------

MethodName = Literal["inpo", "ipo", "sppo", "nash-md", "dpo"]
_SAMPLED: tuple[MethodName, ...] = ("inpo", "ipo", "dpo")


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method with its settings, for `play`.

    inpo: eta, tau, schedule. ipo (against ref, on pairs of the current policy): beta. sppo: eta_s = 1 / eta. nash-md:
    eta, tau. dpo: beta, base.
    """

    name: MethodName = "inpo"
    eta: float = 1.0
    tau: float = 0.05
    schedule: Literal["constant", "growing"] = "constant"
    """growing: eta_t = tau (t + 2) / 2, and `eta` is not used."""
    beta: float = 0.05
    base: Literal["ref", "previous"] = "ref"
    pairs: int = 0
    """i.i.d. pairs drawn an iteration; 0: the whole population."""
    pair_mode: Literal["iid", "soft", "tournament"] = "iid"
    samples: int = 8
    """Answers of a knock-out."""

    def __post_init__(self):
        for field, known in (("name", ("inpo", *_SAMPLED, "sppo", "nash-md")), ("base", ("ref", "previous"))):
            if getattr(self, field) not in known:
                raise ConfigError(f"{field}={getattr(self, field)!r}: one of {', '.join(dict.fromkeys(known))}")
        if self.name in ("inpo", "nash-md"):
            if self.schedule == "growing" and not self.tau > 0:
                raise ConfigError(f"tau={self.tau}: the growing schedule eta_t = tau (t + 2) / 2 needs a positive tau")
            check_strengths(self.eta_at(1), self.tau)
        elif self.name == "sppo":
            check_strengths(self.eta, 0.0)
        elif not (math.isfinite(self.beta) and self.beta > 0):
            raise ConfigError(f"beta={self.beta}: give a positive number")
        if self.pairs < 0:
            raise ConfigError(f"pairs={self.pairs}: give 0 (the whole population) or a number of pairs")
        if (self.pairs or self.pair_mode != "iid") and self.name not in _SAMPLED:
            raise ConfigError(f"name={self.name!r}: exact only; drawn pairs are for {', '.join(_SAMPLED)}")
        if self.pairs and self.pair_mode == "tournament":
            raise ConfigError("pair_mode='tournament': its population is exact here; leave pairs at 0")

    def eta_at(self, t: int) -> float:
        """eta of iteration t = 1, 2, ..."""
        return growing_eta(t, self.tau) if self.schedule == "growing" else self.eta

    def step(self, P: Array, ref: Array, policy: Array, t: int, rng: np.random.Generator) -> Array:
        """pi_{t+1} from pi_t."""
        eta = self.eta_at(t)
        if self.name == "sppo":
            return sppo_step(P, policy, 1 / eta)
        if self.name == "nash-md":
            return nash_md_step(P, ref, policy, eta, self.tau)
        if self.name == "inpo" and not self.pairs and self.pair_mode != "tournament":
            return inpo_plan(P, ref, policy, eta, self.tau)
        if self.pair_mode == "tournament":
            M = tournament_weights(P, policy, self.samples)
        elif self.pairs:
            M = sample_pairs(P, policy, self.pairs, rng, soft=self.pair_mode == "soft")
        else:
            M = pair_weights(P, policy)
        if not (M - np.diag(np.diag(M))).any():
            return policy  # all pairs were of one answer
        if self.name == "inpo":
            return inpo_fit(M, ref, policy, eta, self.tau)
        base = ref if self.base == "ref" else policy
        if self.name == "ipo":
            return ipo_fit(M, base, self.beta)
        return dpo_fit(M, base, self.beta, ridge=_RIDGE if self.pairs else 0.0)[1]


@dataclass(frozen=True)
class Trajectory:
    """What `play` gives: policies [T + 1, n], from the start to the last iterate."""

    P: Array
    ref: Array
    policies: Array

    @property
    def last(self) -> Array:
        return self.policies[-1]

    def average(self, count: int | None = None) -> Array:
        """Uniform mixture [n] of the last `count` iterates (all by default): what the regret bound is about."""
        return mixture(self.policies if count is None else self.policies[-count:])

    def gaps(self, tau: float) -> Array:
        """Duality gap [T + 1] of every iterate."""
        return np.asarray(dual_gap(self.P, self.policies, self.ref, tau))

    def distances(self, equilibrium: Array) -> Array:
        """KL(pi* || pi_t) [T + 1]."""
        return np.asarray(kl(equilibrium, self.policies))

    def spread(self, count: int) -> float:
        """Largest range of an answer's probability over the last `count` iterates: 0 where it has settled."""
        return float(np.ptp(np.exp(self.policies[-count:]), axis=0).max())


def play(
    method: Method, P: Array, ref: Array, iterations: int, *, start: Array | None = None, seed: int = 0
) -> Trajectory:
    """Iterate a method from `start` (ref by default). The same arguments give the same iterates.

    Raises:
        ConfigError: no iterations. DataError: P is no oracle, or sizes differ.
    """
    if iterations < 1:
        raise ConfigError(f"iterations={iterations}: give at least 1")
    P = check_preferences(P)
    start = ref if start is None else start
    for name, policy in (("ref", ref), ("start", start)):
        if policy.shape != (len(P),) or not np.isfinite(policy).all():
            raise DataError(
                f"{name} has shape {policy.shape}: give finite log-probabilities [{len(P)}], see log_policy"
            )
    rng = np.random.default_rng(seed)
    policies = [start]
    for t in range(1, iterations + 1):
        policies.append(method.step(P, ref, policies[-1], t, rng))
    return Trajectory(P, ref, np.array(policies))
