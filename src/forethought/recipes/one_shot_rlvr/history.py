"""Which problem to train on: accuracy histories, rankings made from them, and how the groups are dealt out.

Source: Wang et al., arXiv 2504.20571, section 2 and the released selection script. While a model is trained on the
whole pool, each problem's share of correct responses is noted once an epoch. The historical variance score is the
population variance of these shares; the problem with the largest one is pi_1. Rules to compare it with: "std" (its
square root, the same order), "random", "index" (no ranking), and "lim" (Li et al., LIMR, arXiv 2502.11886): with m_e
the mean share of all problems in epoch e, 1 - sum_e (s_ie - m_e)^2 / sum_e (1 - m_e)^2, histories cut to the shortest.

Departures: problems with equal scores are ordered by the seed and counted (the script leaves them in the order of a
dictionary; in the published history 104 of 1209 have a variance of exactly 0). Histories are keyed by the problem's
stable index and carry the step, so the order in which a batch arrives changes nothing. A problem is repeated by giving
it more groups, where the released data files hold 128 copies of a row.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from forethought.config import derive_seed
from forethought.errors import ConfigError, DataError, nearest
from forethought.files import from_json

Rule = Literal["variance", "std", "random", "lim", "index"]
Histories = Mapping[str, Sequence[float]]
"""Index -> shares of correct responses in the order of the steps."""

_DIGITS = 12
"""Decimals to which scores are compared: below what floats add up to, above any true difference of such shares."""


# -- recording ---------------------------------------------------------------------------------------------------------


class AccuracyHistory:
    """Share of correct responses per problem and step. Ragged: problems may have been seen at different steps.

    Args:
        indices: the pool, if known, so that a problem that was never sampled is named instead of overlooked.
    """

    def __init__(self, indices: Iterable[str | int] = ()):
        # index -> step -> (correct responses, responses), or (share, None) where the number of responses is not known
        self._cells: dict[str, dict[int, tuple[float, int | None]]] = {_name(i): {} for i in indices}

    def record(
        self,
        step: int,
        index: str | int,
        share: float | None = None,
        *,
        n_correct: float | None = None,
        n: int | None = None,
    ) -> None:
        """Note one problem at one step: its `share` of correct responses, or `n_correct` of `n`.

        Counts of the same problem and step add up (several groups of one problem, several processes).

        Raises:
            DataError: no share in [0, 1] can be made of it, or a share is given twice; names index and step.
        """
        key = _name(index)
        where = f"history of index {key!r} at step {step}"
        if isinstance(step, bool) or not isinstance(step, Integral) or step < 0:
            raise DataError(f"history of index {key!r}: step={step!r}: give a whole number from 0")
        if (share is None) == (n_correct is None) or (n_correct is None) != (n is None):
            raise DataError(f"{where}: give either a share, or n_correct with n")
        before = self._cells.get(key, {}).get(int(step))
        if share is not None:
            if before is not None:
                raise DataError(f"{where} is there already ({before[0]:g}); shares cannot be added up, give counts")
            self._cells.setdefault(key, {})[int(step)] = _share(share, where), None
            return
        if isinstance(n, bool) or not isinstance(n, Integral) or n < 1:
            raise DataError(f"{where}: n={n!r}: give the number of responses, at least 1")
        if n_correct is None or not _is_number(n_correct) or not 0 <= n_correct <= n:
            raise DataError(f"{where}: n_correct={n_correct!r} of n={n}: give a number from 0 to n")
        correct, total = before or (0.0, 0)
        if total is None:
            raise DataError(f"{where} is there already as a share ({correct:g}); counts cannot be added to it")
        self._cells.setdefault(key, {})[int(step)] = correct + float(n_correct), total + int(n)

    def record_rewards(self, step: int, index: str | int, rewards: Sequence[float] | np.ndarray) -> None:
        """Note a group by its 0/1 rewards; failed ones (NaN) do not count, and a group of only such leaves no entry.

        Raises:
            DataError: a reward outside [0, 1]; names index and step.
        """
        valid = [float(r) for r in rewards if not math.isnan(r)]
        wrong = [r for r in valid if not 0 <= r <= 1]
        if wrong:
            raise DataError(f"history of index {_name(index)!r} at step {step}: reward {wrong[0]:g}: give 0 or 1")
        if valid:
            self.record(step, index, n_correct=math.fsum(valid), n=len(valid))

    # -- reading --
    @property
    def indices(self) -> list[str]:
        """All problems, numbers in numeric order."""
        return sorted(self._cells, key=_natural)

    def __len__(self) -> int:
        return len(self._cells)

    def shares(self) -> dict[str, list[float]]:
        """Index -> shares in the order of the steps: the published format."""
        return {i: [_mean(cell) for _, cell in sorted(self._cells[i].items())] for i in self.indices}

    def table(self) -> list[dict[str, Any]]:
        """Rows {step, index, n, mean} by step, then index; n is None where only shares were recorded."""
        rows = [
            {"step": step, "index": index, "n": cell[1], "mean": _mean(cell)}
            for index in self.indices
            for step, cell in self._cells[index].items()
        ]
        return sorted(rows, key=lambda row: row["step"])  # stable: the indices stay in order

    # -- saving --
    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON values: {schema, history: {index: [[step, correct, n], ...]}}."""
        history = {i: [[step, *cell] for step, cell in sorted(self._cells[i].items())] for i in self.indices}
        return {"schema": 1, "history": history}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> AccuracyHistory:
        """What `to_json` gave, or the published format (index -> list of shares; the steps are then 0, 1, ...).

        Raises:
            DataError: neither of the two; names the index.
        """
        if not isinstance(data, Mapping):
            raise DataError(f"accuracy history: expected an object of index -> shares, got {type(data).__name__}")
        own = isinstance(data.get("schema"), int)
        if own and data["schema"] != 1:
            raise DataError(f"accuracy history: schema {data['schema']} is not known; this version reads schema 1")
        entries = data.get("history") if own else data
        if not isinstance(entries, Mapping):
            raise DataError("accuracy history: the field 'history' is missing or no object")
        out = cls(entries)
        for index, rows in entries.items():
            if not isinstance(rows, Sequence) or isinstance(rows, str):
                raise DataError(f"history of index {index!r}: expected a list, got {type(rows).__name__}")
            for place, row in enumerate(rows):
                if not own:
                    out.record(place, index, row)
                    continue
                if not isinstance(row, Sequence) or len(row) != 3:
                    raise DataError(f"history of index {index!r}: entry {place} is {row!r}, not [step, correct, n]")
                step, correct, n = row
                out.record(step, index, correct) if n is None else out.record(step, index, n_correct=correct, n=n)
        return out

    @classmethod
    def read(cls, path: str | Path) -> AccuracyHistory:
        """From a JSON file in either format.

        Raises:
            DataError: not readable, not strict JSON (NaN, an index given twice), or not a history; names the file.
        """
        try:
            return cls.from_json(from_json(Path(path).read_text(encoding="utf-8-sig")))
        except OSError as err:
            raise DataError(f"{path}: cannot be read: {err.strerror}") from None
        except ValueError as err:  # DataError included
            raise DataError(f"{path}: {err}") from None

    def state_dict(self) -> dict[str, Any]:
        """For exact resume."""
        return self.to_json()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._cells = self.from_json(state)._cells


def _name(index: str | int) -> str:
    if isinstance(index, bool) or not isinstance(index, str | Integral) or index == "":
        raise DataError(f"index {index!r}: a problem's stable index is text or a whole number")
    return str(index)


def _natural(index: str) -> tuple[bool, int, str]:
    """Sorts "2" before "10", and numbers before words."""
    number = index.isascii() and index.isdigit()
    return not number, int(index) if number else 0, index


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _share(value: Any, where: str) -> float:
    if not _is_number(value) or not 0 <= value <= 1:
        raise DataError(f"{where}: share {value!r}: give a number from 0 to 1")
    return float(value)


def _mean(cell: tuple[float, int | None]) -> float:
    return cell[0] if cell[1] is None else cell[0] / cell[1]


# -- scores ------------------------------------------------------------------------------------------------------------


def _seen(history: AccuracyHistory | Histories) -> dict[str, list[float]]:
    """Checked shares of problems that were all seen at least once."""
    if not isinstance(history, AccuracyHistory):
        history = AccuracyHistory.from_json(history)
    shares = history.shares()
    if not shares:
        raise DataError("accuracy history: it holds no problem")
    empty = [index for index, values in shares.items() if not values]
    if empty:
        more = f" (and {len(empty) - 1} more)" if len(empty) > 1 else ""
        raise DataError(
            f"history of index {empty[0]!r}{more} is empty: the problem was never sampled; train on the pool"
        )
    return shares


def variance_scores(history: AccuracyHistory | Histories) -> dict[str, float]:
    """Index -> population variance of its shares; exactly 0 for a constant history.

    Raises:
        DataError: a history is empty; names the index.
    """
    return {i: 0.0 if min(v) == max(v) else float(np.var(v)) for i, v in _seen(history).items()}


def lim_scores(history: AccuracyHistory | Histories) -> dict[str, float]:
    """Index -> LIM score: 1 where a problem is learnt exactly as the pool is on average, less the more it departs.

    If the whole pool is right all the time, no problem departs from it and every score is 1.

    Raises:
        DataError: a history is empty; names the index.
    """
    shares = _seen(history)
    shortest = min(map(len, shares.values()))
    s = np.array([values[:shortest] for values in shares.values()])  # [problems, epochs]
    mean = s.mean(0)
    room = float(((1 - mean) ** 2).sum())
    gap = ((s - mean) ** 2).sum(1)
    return dict(zip(shares, (1 - gap / room if room > 0 else np.ones(len(s))).tolist(), strict=True))


# -- ranking -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranking:
    """order: all indices, best first. scores: by index. ties: problems that share their score with another one.

    Among tied problems the order is drawn from `seed`.
    """

    rule: Rule
    order: tuple[str, ...]
    scores: dict[str, float]
    ties: int
    seed: int


def rank(history: AccuracyHistory | Histories, rule: Rule = "variance", seed: int = 0) -> Ranking:
    """All problems of a history, best first. The same for the same shares, in whatever order they were recorded.

    "variance", "std" and "lim" fall by score; "random" draws the order from the seed; "index" is the numeric order. The
    last two need no history, so a problem that was never seen is no error there.

    Raises:
        ConfigError: unknown rule. DataError: a history is empty; names the index.
    """
    if rule not in get_args(Rule):
        raise ConfigError(f"rule={rule!r}: give one of {', '.join(get_args(Rule))}{nearest(str(rule), get_args(Rule))}")
    if rule in ("random", "index"):
        known = history if isinstance(history, AccuracyHistory) else AccuracyHistory.from_json(history)
        if not len(known):
            raise DataError("accuracy history: it holds no problem")
        place = {index: -float(i) for i, index in enumerate(known.indices)}
        scores = place if rule == "index" else {i: derive_seed(seed, "rank", i) / 2**63 for i in place}
        compared = scores
    elif rule == "lim":
        scores = lim_scores(history)
        compared = {i: round(s, _DIGITS) for i, s in scores.items()}
    else:
        variance = variance_scores(history)
        scores = variance if rule == "variance" else {i: math.sqrt(v) for i, v in variance.items()}
        # By variance in both cases: rounding would tie other pairs of square roots.
        compared = {i: round(v, _DIGITS) for i, v in variance.items()}
    order = sorted(scores, key=lambda i: (-compared[i], derive_seed(seed, "tie", i), i))
    counts = Counter(compared.values())
    return Ranking(rule, tuple(order), scores, sum(c for c in counts.values() if c > 1), seed)


def select(ranking: Ranking, k: int = 1) -> list[str]:
    """The first k problems.

    Raises:
        ConfigError: k is not in 1 .. number of problems.
    """
    if not 1 <= k <= len(ranking.order):
        raise ConfigError(f"k={k}: the ranking holds {len(ranking.order)} problems; give a number from 1 to that")
    return list(ranking.order[:k])


def repeat_plan(selected: Sequence[str | int], groups: int = 128) -> dict[str, int]:
    """Index -> groups of a step that it gets: groups / k each, and what is left over one by one in the given order.

    Raises:
        ConfigError: nothing selected, a problem selected twice (named), or fewer groups than problems.
    """
    names = [_name(i) for i in selected]
    if not names:
        raise ConfigError("repeat_plan: no problem is selected; give at least one")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ConfigError(f"repeat_plan: index {twice[0]!r} is selected twice; its groups are given by the plan")
    if groups < len(names):
        raise ConfigError(f"groups={groups}: {len(names)} problems are selected and each needs at least one group")
    each, left = divmod(groups, len(names))
    return {name: each + (place < left) for place, name in enumerate(names)}
