"""Reading a run folder for people: whatever is there, and in words whatever is missing or damaged.

A run may have been killed, may still be going on, or may come from an older version. So nothing here raises for what a
file holds: it is read as far as it can be, and `Run.problems` says what could not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forethought.config import load_yaml
from forethought.errors import ConfigError, ForethoughtError, RunError, nearest
from forethought.report.text import number
from forethought.report.tokens import Pieces, find_tokenizer, from_token, ids_only, load_pieces
from forethought.tree.store import TreeRow, TreeStore
from forethought.tree.tree import TokenTree

SCHEMA = 1
_FILES = ("results.json", "metrics.jsonl", "config.yaml", "trees.sqlite")
_KNOWN = (
    *("schema", "recipe", "profile", "model", "seeds", "claim", "arms", "budget", "verdict", "verdict_rule"),
    *("versions", "curves", "examples", "headline", "notes"),
)
_BUDGET = ("tokens_generated", "tokens_trained", "env_steps", "verifier_calls", "wall_s")


@dataclass(frozen=True)
class Cell:
    """One metric of one arm. Numbers that are missing or no numbers are None.

    per_seed: (name of the seed, value, key or index in results.json) in the order of results.json.
    """

    mean: float | None
    lo: float | None
    hi: float | None
    n: float | None
    per_seed: list[tuple[str, float | None, str]]

    @property
    def empty(self) -> bool:
        return all(v is None for v in (self.mean, self.lo, self.hi, self.n)) and not self.per_seed


@dataclass
class Run:
    """What a run folder holds.

    Attributes:
        results: results.json as it is ({} where missing).
        arms: its arms as {arm: {metric: Cell}}.
        budget: {arm: {counter: number or None}}.
        metrics: the readable lines of metrics.jsonl, each with a whole "step".
        config: config.yaml ({} where missing).
        trees: (row, tree) of the chosen trees, of `tree_count` in the store.
        pieces: token ids -> texts.
        problems: what is missing or damaged, one sentence each.
    """

    path: Path
    results: dict[str, Any] = field(default_factory=dict)
    arms: dict[str, dict[str, Cell]] = field(default_factory=dict)
    budget: dict[str, dict[str, float | None]] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    trees: list[tuple[TreeRow, TokenTree]] = field(default_factory=list)
    tree_count: int = 0
    pieces: Pieces = ids_only
    problems: list[str] = field(default_factory=list)

    def head(self, name: str) -> str:
        """A text of results.json, or of the config where the run has not come so far."""
        value = self.results.get(name, self.config.get(name))
        return value if isinstance(value, str) else "" if value is None else json.dumps(value)

    @property
    def seeds(self) -> list[str]:
        seeds = self.results.get("seeds")
        if isinstance(seeds, list):
            return [str(s) for s in seeds]
        seen = {str(line.get("seed", 0)) for line in self.metrics}
        return [str(seeds)] if seeds is not None else sorted(seen)

    @property
    def counters(self) -> list[str]:
        """Names of the budget's counters, the usual ones first."""
        seen = dict.fromkeys(name for row in self.budget.values() for name in row)
        return [c for c in _BUDGET if c in seen] + [c for c in seen if c not in _BUDGET]

    @property
    def notes(self) -> list[str]:
        """Remarks beside the verdict, such as the likely reason for a claim that is not shown."""
        notes = self.results.get("notes") or []
        notes = notes if isinstance(notes, list) else [notes]
        return [note if isinstance(note, str) else json.dumps(note) for note in notes]

    @property
    def extras(self) -> dict[str, Any]:
        """What else results.json holds."""
        return {k: v for k, v in self.results.items() if k not in _KNOWN}

    def metric_names(self) -> list[str]:
        return list(dict.fromkeys(name for arm in self.arms.values() for name in arm))

    def headline(self) -> tuple[str, str | None, str] | None:
        """(arm, metric before or None, metric) to put in front, or None where there is nothing to show.

        results.json may name it as {"headline": {"arm": ..., "metric": ...}}; otherwise it is the first accuracy that
        has a before and an after (else the first accuracy, else the first metric) of the first arm that has it.
        """
        pairs, singles = pair_metrics(self.metric_names())
        wish = self.results.get("headline")
        wish = wish if isinstance(wish, dict) else {}
        options: list[tuple[str | None, str]] = [*((b, a) for _, b, a in pairs), *((None, s) for s in singles)]
        options.sort(key=lambda o: (o[1] != wish.get("metric"), "acc" not in o[1].lower()))
        for before, after in options:
            for arm in sorted(self.arms, key=lambda a: a != wish.get("arm")):
                cells = self.arms[arm]
                if all(m is None or (m in cells and cells[m].mean is not None) for m in (before, after)):
                    return arm, before, after
        return None


# -- metric names ----------------------------------------------------------------------------------------------------

_PAIRS = (("before", "after"), ("initial", "final"), ("base", "final"))


def pair_metrics(names: Iterable[str]) -> tuple[list[tuple[str, str, str]], list[str]]:
    """(common name, name before, name after) of metrics that come in two, and the others, both in the given order.

    >>> pair_metrics(["accuracy/before", "accuracy/after", "length"])
    ([('accuracy', 'accuracy/before', 'accuracy/after')], ['length'])
    """
    names = list(names)
    pairs: list[tuple[str, str, str]] = []
    for name in names:
        for first, second in _PAIRS:
            words = _words(name)
            if first in words:
                at = words.index(first)
                other = next((n for n in names if _words(n) == [*words[:at], second, *words[at + 1 :]]), None)
                if other is not None:
                    left = "".join([*words[:at], *words[at + 1 :]])
                    pairs.append((left.strip("/_.- ").replace("//", "/") or name, name, other))
                    break
    taken = {n for _, before, after in pairs for n in (before, after)}
    return pairs, [n for n in names if n not in taken]


def _words(name: str) -> list[str]:
    """Words and the separators between them."""
    out = [""]
    for char in name:
        if char in "/_.- ":
            out += [char, ""]
        else:
            out[-1] += char
    return out


# -- files -----------------------------------------------------------------------------------------------------------


def read_run(
    path: str | Path,
    *,
    trees: int = 12,
    decode_token: Callable[[int], str] | None = None,
) -> Run:
    """Read a run folder.

    Args:
        trees: at most so many trees of the store, chosen by `choose`.
        decode_token: text of a token id; by default the folder's own tokenizer, or the ids where it has none.

    Raises:
        RunError: there is no such folder, or it holds no run.
    """
    path = Path(path).expanduser()
    if not path.exists():
        there = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise RunError(f"{path}: no such run folder{nearest(path.name, there)}")
    if not path.is_dir():
        raise RunError(f"{path}: is a file; give the folder of a run")
    if not any((path / name).exists() for name in _FILES):
        raise RunError(f"{path}: holds no run (none of {', '.join(_FILES)}); give the folder that --out named")
    run = Run(path)
    _read_config(run)
    _read_results(run)
    _read_metrics(run)
    _read_trees(run, trees, decode_token)
    return run


def _read_config(run: Run) -> None:
    file = run.path / "config.yaml"
    if not file.exists():
        run.problems.append("config.yaml is missing: the settings of this run are not known.")
        return
    try:
        run.config = load_yaml(file)
    except (ConfigError, OSError, ValueError) as err:
        run.problems.append(f"config.yaml cannot be read: {err}")


def _read_results(run: Run) -> None:
    file = run.path / "results.json"
    try:
        data, bad = _loads(file.read_bytes())
    except FileNotFoundError:
        run.problems.append("results.json is missing: the run has not ended, or was interrupted. No verdict yet.")
        return
    except (OSError, ValueError) as err:
        run.problems.append(f"results.json cannot be read: {err}")
        return
    if not isinstance(data, dict):
        run.problems.append("results.json holds no object {...}; it is left out.")
        return
    if bad:
        run.problems.append(f"results.json holds {bad}, which is not JSON; read as missing.")
    if data.get("schema") != SCHEMA:
        run.problems.append(
            f"results.json has schema {data.get('schema')!r}, this report reads {SCHEMA}; what it knows is shown."
        )
    run.results = data
    arms, budget = data.get("arms"), data.get("budget")
    seeds = [str(s) for s in data["seeds"]] if isinstance(data.get("seeds"), list) else []
    for arm, row in (arms if isinstance(arms, dict) else {}).items():
        if isinstance(row, dict):
            cells = {name: _cell(value, seeds) for name, value in row.items()}
            run.arms[arm] = {name: cell for name, cell in cells.items() if cell is not None}
    if not run.arms:
        run.problems.append("results.json names no arms: there are no results to show.")
    for arm, row in (budget if isinstance(budget, dict) else {}).items():
        if isinstance(row, dict):
            run.budget[arm] = {name: number(value) for name, value in row.items()}


def _cell(value: Any, seeds: list[str]) -> Cell | None:
    """A metric as in results.json; a bare number is a mean; None for anything else."""
    if value is None or number(value) is not None:
        return Cell(number(value), None, None, None, [])
    if not isinstance(value, dict):
        return None
    span = value.get("ci95")
    lo, hi = map(number, span) if isinstance(span, list) and len(span) == 2 else (None, None)
    each = value.get("per_seed")
    if isinstance(each, dict):
        per_seed = [(str(k), number(v), str(k)) for k, v in each.items()]
    else:
        each = each if isinstance(each, list) else []
        names = seeds if len(seeds) == len(each) else [str(i) for i in range(len(each))]
        per_seed = [(names[i], number(v), str(i)) for i, v in enumerate(each)]
    return Cell(number(value.get("mean")), lo, hi, number(value.get("n")), per_seed)


def _loads(raw: bytes) -> tuple[Any, str]:
    """(JSON value, name of the last constant that is not JSON and was read as null, or "")."""
    bad = ""

    def constant(name: str) -> None:
        nonlocal bad
        bad = name

    return json.loads(raw.decode("utf-8-sig"), parse_constant=constant), bad


def _read_metrics(run: Run) -> None:
    file = run.path / "metrics.jsonl"
    if not file.exists():
        run.problems.append("metrics.jsonl is missing: there are no curves.")
        return
    try:
        raw_lines = file.read_bytes().split(b"\n")
    except OSError as err:
        run.problems.append(f"metrics.jsonl cannot be read: {err.strerror}")
        return
    broken: list[int] = []
    odd: set[str] = set()
    for place, raw in enumerate(raw_lines, 1):
        if not raw.strip():
            continue
        try:
            line, bad = _loads(raw)
        except ValueError:
            broken.append(place)
            continue
        if not isinstance(line, dict) or not isinstance(line.get("step"), int) or isinstance(line["step"], bool):
            broken.append(place)
            continue
        odd |= {bad} - {""}
        run.metrics.append(line)
    last = len(raw_lines)
    if last in broken:
        broken.remove(last)
        run.problems.append(f"metrics.jsonl: line {last} was cut in the middle (the run was killed, or is writing it).")
    if broken:
        shown = ", ".join(map(str, broken[:5])) + (", ..." if len(broken) > 5 else "")
        count = f"{len(broken)} damaged line{'s' if len(broken) > 1 else ''}"
        run.problems.append(f"metrics.jsonl: {count} left out ({shown}).")
    if odd:
        run.problems.append(f"metrics.jsonl holds {', '.join(sorted(odd))}, which is not JSON; read as missing.")
    if not run.metrics:
        run.problems.append("metrics.jsonl has no line yet: there are no curves.")
    elif not run.results:
        step = max(line["step"] for line in run.metrics)
        run.problems.append(f"The last step in metrics.jsonl is {step}.")


def _read_trees(run: Run, limit: int, decode_token: Callable[[int], str] | None) -> None:
    file = run.path / "trees.sqlite"
    if not file.exists():
        return
    try:
        with TreeStore(file, readonly=True) as store:
            rows = store.query()
            run.tree_count = len(rows)
            for row in choose(rows, limit):
                try:
                    run.trees.append((row, store.load(row.id)))
                except ForethoughtError as err:
                    run.problems.append(f"trees.sqlite: tree {row.id} is left out: {err}")
    except ForethoughtError as err:
        run.problems.append(f"trees.sqlite cannot be read: {err}")
        return
    if decode_token is not None:
        run.pieces = from_token(decode_token)
        return
    tokenizer = find_tokenizer(run.path)
    try:
        run.pieces = load_pieces(tokenizer) if tokenizer else ids_only
    except (ValueError, OSError) as err:
        run.problems.append(f"{tokenizer} cannot be read ({err}): rollouts are shown as token ids.")
    else:
        if run.trees and tokenizer is None:
            run.problems.append("The run folder has no tokenizer.json: rollouts are shown as token ids.")


def choose(rows: list[TreeRow], limit: int) -> list[TreeRow]:
    """Trees that show a run: of every arm and kind the last, the first, then those between, in turn.

    Where there are more than `limit`, every arm gets its share; the order of the store is kept.
    """
    queues: list[list[TreeRow]] = []
    groups: dict[tuple[str, str], list[TreeRow]] = {}
    for row in rows:
        groups.setdefault((row.arm, row.kind), []).append(row)
    for group in groups.values():
        queues.append(_spread(sorted(group, key=lambda r: (r.step, r.id))))
    chosen: list[TreeRow] = []
    while len(chosen) < limit and any(queues):
        for queue in queues:
            if queue and len(chosen) < limit:
                chosen.append(queue.pop(0))
    place = {arm: i for i, arm in enumerate(dict.fromkeys(row.arm for row in rows))}
    return sorted(chosen, key=lambda r: (place[r.arm], r.step, r.id))


def _spread(rows: list[TreeRow]) -> list[TreeRow]:
    """The last, the first, then the middles of ever smaller halves."""
    if len(rows) <= 2:
        return rows[::-1]
    out, parts = [rows[-1], rows[0]], [rows[1:-1]]
    while parts:
        part = parts.pop(0)
        if part:
            middle = len(part) // 2
            out.append(part[middle])
            parts += [part[:middle], part[middle + 1 :]]
    return out
