"""Runs and data files on a terminal: `forethought show`.

On a terminal with colours and frames, in a pipe as plain lines that no width cuts. What a model wrote is printed as
text: its control characters are made visible, so it cannot command the terminal, and its brackets are no markup.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from forethought.data import read_rows
from forethought.errors import DataError, RunError, nearest
from forethought.report.curves import curves
from forethought.report.reading import Run, pair_metrics, read_run
from forethought.report.text import (
    NOTHING,
    is_fraction,
    number,
    pretty,
    show_count,
    show_number,
    show_seconds,
    truncate,
    visible,
)
from forethought.report.treeview import node_text, pick_leaves, shared_path
from forethought.tree.store import TreeRow
from forethought.tree.tree import Kind, Stop, TokenTree

_STYLES = {"shown": "bold green", "not shown": "bold yellow", "reversed": "bold red"}
_WIDE = 100_000  # columns of a pipe
_SAMPLES = 4  # of one tree
_CHARS = 600  # of one text


def show(path: str | Path, *, trees: int = 3, console: Console | None = None) -> None:
    """Print a run folder, or a data file (.jsonl, .parquet): what is in it and what is missing.

    Args:
        trees: stored groups to print of a run; records to print of a data file.
        console: where to; by default standard output.

    Raises:
        RunError: no such path, or a folder without a run. DataError: a data file that cannot be read.
    """
    path = Path(path).expanduser()
    if not path.exists():
        there = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise RunError(f"{path}: no such run folder or data file{nearest(path.name, there)}")
    with _Printer(console) as out:
        if path.is_dir():
            _show_run(out, read_run(path, trees=trees))
        else:
            _show_data(out, path, trees)


def compare(
    runs: Iterable[str | Path], *, metrics: Sequence[str] | None = None, console: Console | None = None
) -> None:
    """Print the arms of several runs in one table.

    Args:
        metrics: names of metrics to compare; by default those that all runs have (else those that any has), accuracies
            first, at most six.

    Raises:
        RunError: a folder holds no run. DataError: no run given, or none has such a metric (the nearest is named).
    """
    read = [read_run(path, trees=0) for path in runs]
    if not read:
        raise DataError("compare: give at least one run folder")
    known = list(dict.fromkeys(name for run in read for name in run.metric_names()))
    if metrics is None:
        shared = [m for m in known if all(m in run.metric_names() for run in read if run.arms)]
        metrics = sorted(shared or known, key=lambda m: "acc" not in m.lower())[:6]
    for name in metrics:
        if name not in known:
            raise DataError(
                f"metric {name!r}: no run has it{nearest(name, known)} (known: {', '.join(known) or 'none'})"
            )
    with _Printer(console) as out:
        table = out.table(
            "Runs", ["run", "recipe", "model", "verdict", "arm", *map(pretty, metrics), "tokens generated", "wall time"]
        )
        for run in read:
            lead = [run.path.resolve().name, run.head("recipe"), run.head("model"), run.head("verdict") or "none yet"]
            for arm in run.arms or {"": {}}:
                cells = [_cell(run, arm, m) for m in metrics]
                used = run.budget.get(arm, {})
                table.row(
                    [*lead, arm, *cells, show_count(used.get("tokens_generated")), show_seconds(used.get("wall_s"))]
                )
                lead = ["", "", "", ""] if out.framed else lead
        table.print()
        for run in read:
            for problem in run.problems if not run.results else ():
                out.line(f"{run.path.resolve().name}: {problem}", "yellow")


# -- printing --------------------------------------------------------------------------------------------------------


class _Printer:
    """Collects what is printed, so that it can be written in the encoding that the other end has."""

    def __init__(self, console: Console | None):
        self.console = console or Console(highlight=False)
        self.framed = self.console.is_terminal
        if not self.framed:
            self.console = Console(file=self.console.file, width=_WIDE, highlight=False, color_system=None)

    def line(self, text: str = "", style: str = "", indent: int = 0) -> None:
        body = Text(visible(text), style)
        # In a pipe nothing is padded: rich would fill every line up to the width.
        if self.framed:
            self.console.print(Padding(body, (0, 0, 0, indent)) if indent else body)
        else:
            for part in body.plain.split("\n"):
                self.console.print(Text(f"{' ' * indent}{part}".rstrip()), soft_wrap=True)

    def title(self, text: str) -> None:
        self.line()
        self.line(text, "bold cyan")

    def table(self, title: str, heads: Sequence[str]) -> _Table:
        return _Table(self, title, heads)

    def __enter__(self) -> _Printer:
        self.console.begin_capture()
        return self

    def __exit__(self, kind, *_) -> None:
        text = self.console.end_capture()
        if kind is None:
            encoding = getattr(self.console.file, "encoding", None) or "utf-8"
            self.console.file.write(text.encode(encoding, "backslashreplace").decode(encoding))
            self.console.file.flush()


class _Table:
    """A ruled table on a terminal, aligned columns in a pipe."""

    def __init__(self, out: _Printer, title: str, heads: Sequence[str]):
        self.out, self.title, self.heads = out, title, list(heads)
        self.rows: list[list[str]] = []

    def row(self, cells: Iterable[str]) -> None:
        self.rows.append([visible(str(c)).replace("\n", " ") for c in cells])

    def fits(self) -> bool:
        """Would no cell be broken?"""
        widths = (max(cell_len(line[i]) for line in [self.heads, *self.rows]) + 3 for i in range(len(self.heads)))
        return sum(widths) <= self.out.console.width + 3

    def print(self) -> None:
        self.out.title(self.title)
        numbers = [all(_like_number(r[i]) for r in self.rows) and i > 0 for i in range(len(self.heads))]
        if self.out.framed:
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
            for head, right in zip(self.heads, numbers, strict=True):
                table.add_column(Text(head), justify="right" if right else "left", overflow="fold")
            for row in self.rows:
                table.add_row(*map(Text, row))
            self.out.console.print(table)
            return
        lines = [self.heads, *self.rows]
        widths = [max(cell_len(line[i]) for line in lines) for i in range(len(self.heads))]
        for line in lines:
            cells = []
            for cell, width, right in zip(line, widths, numbers, strict=True):
                gap = " " * (width - cell_len(cell))
                cells.append(gap + cell if right else cell + gap)
            self.out.line("  ".join(cells))


def _like_number(text: str) -> bool:
    return not text or text == NOTHING or text[0] in "+-0123456789"


# -- a run -----------------------------------------------------------------------------------------------------------


def _show_run(out: _Printer, run: Run) -> None:
    name = run.head("recipe") or run.path.resolve().name
    out.line(" · ".join(filter(None, (name, run.head("profile"), run.head("model")))), "bold")
    if run.head("claim"):
        out.line(run.head("claim"))
    verdict = run.head("verdict")
    out.line(f"verdict: {verdict or 'none yet'}", _STYLES.get(verdict, "bold"))
    if run.head("verdict_rule"):
        out.line(f"rule: {run.head('verdict_rule')}")
    for note in run.notes:
        out.line(f"note: {note}")
    for problem in run.problems:
        out.line(f"! {problem}", "yellow")
    _show_results(out, run)
    _show_budget(out, run)
    _show_metrics(out, run)
    for row, tree in run.trees:
        _show_tree(out, run, row, tree)
    out.line()
    out.line(f"folder: {run.path}")
    report = run.path / "report.html"
    out.line(
        f"report: {report}" if report.exists() else f"report: none yet; write it with: forethought report {run.path}"
    )


def _show_results(out: _Printer, run: Run) -> None:
    names = run.metric_names()
    if not names:
        return
    pairs, singles = pair_metrics(names)
    ordered = [m for _, before, after in pairs for m in (before, after)] + singles
    title = "Results (mean [95% interval])"
    table = out.table(title, ["arm", *map(pretty, ordered)])
    for arm in run.arms:
        table.row([arm, *(_cell(run, arm, m) for m in ordered)])
    if table.fits():
        table.print()
    else:  # one line per number
        table = out.table(title, ["metric", "arm", "mean"])
        for m in ordered:
            for k, arm in enumerate(run.arms):
                table.row([pretty(m) if k == 0 else "", arm, _cell(run, arm, m)])
        table.print()
    counts = {cell.n for cells in run.arms.values() for cell in cells.values() if cell.n is not None}
    if counts:
        span = " to ".join(show_number(n) for n in sorted({min(counts), max(counts)}))
        out.line(f"n per number: {span}; seeds: {', '.join(run.seeds) or 'not stated'}")
    for name, value in run.extras.items():
        out.line(f"{name}: {truncate(_plain(value), _CHARS)[0]}")


def _cell(run: Run, arm: str, metric: str) -> str:
    cell = run.arms.get(arm, {}).get(metric)
    if cell is None or cell.mean is None:
        return NOTHING
    percent = is_fraction(metric, [cells[metric].mean for cells in run.arms.values() if metric in cells])
    text = show_number(cell.mean, percent=percent)
    if cell.lo is None or cell.hi is None:
        return text
    return f"{text} [{show_number(cell.lo, percent=percent)}, {show_number(cell.hi, percent=percent)}]"


def _show_budget(out: _Printer, run: Run) -> None:
    if not run.budget:
        return
    names = run.counters
    table = out.table("Budget (counted)", ["arm", *("wall time" if n == "wall_s" else pretty(n) for n in names)])
    for arm, row in run.budget.items():
        table.row([arm, *(show_seconds(row.get(n)) if n.endswith("_s") else show_number(row.get(n)) for n in names)])
    table.print()


def _show_metrics(out: _Printer, run: Run, most: int = 16) -> None:
    """Last values of the metrics, one column per arm; where that is too wide, one row per arm with what fits."""
    found = curves(run.metrics)
    if not found:
        return
    arms = list(dict.fromkeys(arm for columns in found.values() for arm in columns))
    last = {arm: f"{arm or 'run'} @ step {max(c[arm].steps[-1] for c in found.values() if arm in c)}" for arm in arms}
    values = {
        name: {
            arm: show_number(c.mean[-1], percent=is_fraction(name, [k.mean[-1] for k in columns.values()]))
            for arm, c in columns.items()
        }
        for name, columns in found.items()
    }
    names = list(found)[:most]
    title = "Last metrics (mean over seeds)"
    table = out.table(title, ["metric", *last.values()])
    for name in names:
        table.row([name, *(values[name].get(arm, NOTHING) for arm in arms)])
    while not table.fits() and len(names) > 1:
        names = names[: max(1, min(len(names) - 1, 8))]
        table = out.table(title, ["arm", *names])
        for arm in arms:
            table.row([last[arm], *(values[name].get(arm, NOTHING) for name in names)])
    table.print()
    if len(found) > len(names):
        out.line(f"{len(found) - len(names)} more metrics in metrics.jsonl")


def _show_tree(out: _Printer, run: Run, row: TreeRow, tree: TokenTree) -> None:
    arm = f"{row.arm}, " if row.arm else ""
    out.title(f"Rollouts: {arm}step {row.step}, {row.kind}, task {truncate(row.task, 60)[0]}, {row.leaves} samples")
    leaves = pick_leaves(tree, _SAMPLES)
    shared = shared_path(tree, leaves)
    out.line(_text(run, tree, shared), "dim")
    for leaf in leaves:
        meta = tree.meta[leaf]
        parts = meta.get("parts")
        stop = Stop(int(tree.stop[leaf]))
        facts = [f"reward {show_number(tree.outcome(leaf))}"]
        facts += [f"{k} {show_number(v)}" for k, v in parts.items()] if isinstance(parts, dict) else []
        facts += [f"stop {stop.name.lower()}"] if stop is not Stop.NONE else []
        facts += [str(meta[k]) for k in ("why", "error") if meta.get(k)]
        out.line(f"- {' · '.join(facts)}", "bold")
        out.line(_text(run, tree, [n for n in tree.path(leaf) if n not in shared]), indent=2)


def _text(run: Run, tree: TokenTree, nodes: Sequence[int]) -> str:
    """Texts of nodes; where there are several, each behind its kind."""
    lines = []
    for node in nodes:
        text, hidden_tokens = node_text(tree, node, run.pieces)
        short, hidden = truncate(visible(text), _CHARS)
        notes = [f"{hidden:,} characters"] * bool(hidden) + [f"{hidden_tokens:,} tokens"] * bool(hidden_tokens)
        short += f" ({' and '.join(notes)} not shown)" if notes else ""
        lines.append(f"{Kind(int(tree.kind[node])).name.lower()}: {short}" if len(nodes) > 1 else short)
    return "\n".join(lines)


# -- a data file -----------------------------------------------------------------------------------------------------


def _show_data(out: _Printer, path: Path, records: int) -> None:
    if path.name == "metrics.jsonl":
        out.line("These are the metrics of a run; its folder shows more.", "yellow")
    rows = read_rows(path)
    size = os.path.getsize(path)
    out.line(f"{path.name}: {len(rows):,} records, {show_count(size)} bytes", "bold")
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = out.table("Columns", ["column", "kind", "filled", "of the values"])
    for name in names:
        values = [row[name] for row in rows if row.get(name) is not None]
        kinds = sorted({_kind(v) for v in values})
        table.row([name, ", ".join(kinds) or "null", f"{len(values):,}", _summary(values)])
    table.print()
    pairs = [row for row in rows if "chosen" in row and "rejected" in row]
    if pairs:
        _show_preferences(out, pairs)
    for place, row in enumerate(rows[: max(0, records)], 1):
        out.title(f"Record {place}")
        if "chosen" in row and "rejected" in row:
            _show_pair(out, row)
        else:
            for name, value in row.items():
                out.line(f"{name}: {_short(value)}")


def _short(value: Any) -> str:
    short, hidden = truncate(_plain(value), _CHARS)
    return short + (f" ({hidden:,} characters not shown)" if hidden else "")


# -- preference records ----------------------------------------------------------------------------------------------

_SIDES = ("chosen", "rejected")


def _show_preferences(out: _Printer, rows: Sequence[Mapping[str, Any]]) -> None:
    """What a reader wants to know of preference data before training on it."""
    out.title("Preferences")
    prompts = len({json.dumps(_prompt_and_answers(row)[0], sort_keys=True, default=str) for row in rows})
    out.line(f"{len(rows):,} pairs of {prompts:,} prompts")
    known = [p for row in rows if (p := number(row.get("p"))) is not None]
    if known:
        mean, low, high = sum(known) / len(known), min(known), max(known)
        doubtful = sum(p < 0.5 for p in known)
        text = f"P(chosen wins): mean {show_number(mean)}, {show_number(low)} to {show_number(high)}"
        out.line(text + (f"; {doubtful:,} pairs below 1/2 (drawn labels)" if doubtful else ""))
    sizes, unit = _lengths(rows)
    chosen, rejected = (sum(size[side] for size in sizes) / len(sizes) for side in (0, 1))
    longer = sum(good > bad for good, bad in sizes) / len(sizes)
    out.line(
        f"mean length: chosen {show_number(chosen)}, rejected {show_number(rejected)} {unit}; the chosen one is longer in "
        f"{show_number(longer, percent=True)}"
    )
    faults = {
        "have two equal answers": sum(row["chosen"] == row["rejected"] for row in rows),
        "have an empty answer": sum(not text for row in rows for text in _texts(row)),
        "have no prompt that both answers share": sum(not _prompt_and_answers(row)[0] for row in rows),
    }
    for what, count in faults.items():
        if count:
            out.line(f"! {count:,} of {len(rows):,} pairs {what}: they cannot be trained on", "yellow")


def _show_pair(out: _Printer, row: Mapping[str, Any]) -> None:
    prompt, *answers = _prompt_and_answers(row)
    used = {"prompt", "p", *_SIDES}
    if number(row.get("p")) is not None:
        out.line(f"P(chosen wins) {show_number(row['p'])}")
    out.line(f"prompt: {_short(_dialogue(prompt))}", "dim")
    for side, answer in zip(_SIDES, answers, strict=True):
        facts = []
        for name, word in (("length", "{} tokens"), ("reward", "reward {}"), ("verdict", "{}"), ("why", "{}")):
            key = f"{side}_{name}"
            used.add(key)
            if row.get(key) is not None:
                value = row[key]
                facts.append(word.format(show_number(value) if number(value) is not None else _short(value)))
        known = f" ({', '.join(facts)})" if facts else ""
        out.line(f"{side}{known}:", "green" if side == "chosen" else "red")
        out.line(_short(_dialogue(answer)) or "(empty)", indent=2)
    rest = [f"{name} {_short(value)}" for name, value in row.items() if name not in used]
    if rest:
        out.line(" · ".join(rest), "dim")


def _prompt_and_answers(row: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Prompt, chosen, rejected; without a prompt it is the messages that both begin with."""
    good, bad = row["chosen"], row["rejected"]
    if "prompt" in row or not (isinstance(good, list) and isinstance(bad, list)):
        return row.get("prompt"), good, bad
    shared = next((i for i, (a, b) in enumerate(zip(good, bad, strict=False)) if a != b), min(len(good), len(bad)))
    return good[:shared], good[shared:], bad[shared:]


def _texts(row: Mapping[str, Any]) -> tuple[str, str]:
    _, good, bad = _prompt_and_answers(row)
    return _words(good), _words(bad)


def _words(answer: Any) -> str:
    if isinstance(answer, list):
        return "".join(str(m.get("content") or "") if isinstance(m, Mapping) else str(m) for m in answer)
    return answer if isinstance(answer, str) else _plain(answer)


def _lengths(rows: Sequence[Mapping[str, Any]]) -> tuple[list[tuple[float, float]], str]:
    """Lengths of both answers and their unit: tokens where every record tells them, else characters."""
    told = [tuple(number(row.get(f"{side}_length")) for side in _SIDES) for row in rows]
    known = [(float(good), float(bad)) for good, bad in told if good is not None and bad is not None]
    if len(known) == len(rows):
        return known, "tokens"
    return [(float(len(good)), float(len(bad))) for good, bad in map(_texts, rows)], "characters"


def _dialogue(value: Any) -> str:
    """Messages as lines "role: content", a single assistant turn as its content; text as it is."""
    if not isinstance(value, list) or not all(isinstance(m, Mapping) and "role" in m for m in value):
        return "" if value is None else _plain(value)
    if len(value) == 1 and value[0]["role"] == "assistant":
        return _plain(value[0].get("content") or "")
    return "\n".join(f"{m['role']}: {_plain(m.get('content') or '')}" for m in value)


# -- columns of a data file ------------------------------------------------------------------------------------------


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "text"
    if isinstance(value, list):
        chat = bool(value) and all(isinstance(m, Mapping) and "role" in m for m in value)
        return "messages" if chat else "list"
    return "object" if isinstance(value, Mapping) else type(value).__name__


def _summary(values: Sequence[Any]) -> str:
    """Range of numbers, lengths of texts and lists, how many differ."""
    if not values:
        return ""
    if all(_kind(v) == "number" for v in values):
        return (
            f"{show_number(min(values))} to {show_number(max(values))}, mean {show_number(sum(values) / len(values))}"
        )
    different = len({json.dumps(v, sort_keys=True, default=str) for v in values})
    if all(isinstance(v, str | list) for v in values):
        unit = "characters" if all(isinstance(v, str) for v in values) else "long"
        lengths = sorted({min(map(len, values)), max(map(len, values))})
        return f"{' to '.join(f'{n:,}' for n in lengths)} {unit}, {different:,} different"
    return f"{different:,} different"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
