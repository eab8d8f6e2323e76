"""One self-contained HTML page per run.

No file or address outside the page is used: styles, script, charts and data stand in it, and its content security
policy forbids everything else (also to text that a model wrote). Whatever is in results.json is on the page; each of
those numbers carries `data-value` (exactly the number) and `data-path` (its JSON pointer, RFC 6901), so that page and
file can be compared by a program. Without a script everything but the tree view can be read.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from forethought.files import write_atomic
from forethought.report import treeview
from forethought.report.charts import LOGO, Dot, arm_class, curve_chart, dot_chart, share_bar
from forethought.report.curves import Curve, curves, from_results, thin_all
from forethought.report.reading import Cell, Run, pair_metrics, read_run
from forethought.report.text import (
    NOTHING,
    esc,
    is_fraction,
    number,
    pretty,
    script_json,
    show_count,
    show_number,
    show_seconds,
    truncate,
)

_VERDICTS = {"shown": ("yes", "✓"), "not shown": ("no", "○"), "reversed": ("reversed", "✗")}


def write_report(run_dir: str | Path, *, decode_token: Callable[[int], str] | None = None, trees: int = 12) -> Path:
    """Write `report.html` into a run folder; returns its path. Also for runs that are unfinished or damaged.

    Args:
        run_dir: holds any of results.json, metrics.jsonl, config.yaml, trees.sqlite.
        decode_token: text of a token id; by default the folder's tokenizer.json, else ids are shown.
        trees: at most so many stored trees are shown.

    Raises:
        RunError: there is no such folder, it holds no run, or the page cannot be written.
    """
    run = read_run(run_dir, trees=trees, decode_token=decode_token)
    path = run.path / "report.html"
    write_atomic(path, render(run))
    return path


def render(run: Run) -> str:
    """The page of a run."""
    index = {arm: i for i, arm in enumerate(_arms(run))}
    sections = [
        ("results", "Results", _results(run, index)),
        ("curves", "Curves", _curves(run, index)),
        ("budget", "Budget", _budget(run, index)),
        ("examples", "Examples", _examples(run)),
        ("rollouts", "Rollouts", _rollouts(run)),
        ("settings", "Settings", _settings(run)),
    ]
    sections = [s for s in sections if s[2]]
    nav = "".join(f'<a href="#{ident}">{title}</a>' for ident, title, _ in sections)
    body = "".join(
        f'<section id="{ident}" aria-labelledby="{ident}-h"><h2 id="{ident}-h">{title}</h2>{content}</section>'
        for ident, title, content in sections
    )
    style, script = _asset("report.css"), _asset("report.js")
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    title = " · ".join(filter(None, (run.head("recipe") or run.path.resolve().name, run.head("profile"))))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<link rel="icon" href="data:,"><title>{esc(title)} – Forethought</title><style>{style}</style></head>'
        f'<body><a class="skip" href="#main">Skip to the results</a>{_hero(run, title)}'
        f'<nav aria-label="Sections">{nav}</nav>'
        f'<main id="main">{_problems(run)}{body}</main>{_footer(run)}<script>{script}</script></body></html>\n'
    )


def _asset(name: str) -> str:
    return resources.files("forethought.report").joinpath("assets", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _arms(run: Run) -> list[str]:
    """All arms: those of results.json first, then what only the metrics name."""
    return list(dict.fromkeys([*run.arms, *run.budget, *(str(line.get("arm") or "") for line in run.metrics)]))


def _pointer(*parts: str) -> str:
    """JSON pointer, escaped for an attribute."""
    return esc("".join(f"/{p.replace('~', '~0').replace('/', '~1')}" for p in parts))


def _num(value: Any, text: str | None = None, path: str = "", percent: bool = False) -> str:
    """A number that a program can read exactly: its text, its value and where it stands in results.json."""
    place = f' data-path="{path}"' if path else ""
    shown = show_number(value, percent=percent) if text is None else text
    return f'<span class="num" data-value="{json.dumps(value)}"{place}>{shown}</span>'


def _arm(name: str, index: Mapping[str, int]) -> str:
    return f'<span class="dot {arm_class(index[name])}"></span>{esc(name or "run")}'


# -- head ------------------------------------------------------------------------------------------------------------


def _hero(run: Run, title: str) -> str:
    claim = run.head("claim")
    lede = f'<p class="claim">{esc(claim)}</p>' if claim else ""
    facts = [("model", run.head("model")), ("profile", run.head("profile")), ("seeds", ", ".join(run.seeds))]
    chips = "".join(f'<span class="chip">{k} <b>{esc(truncate(v, 80)[0])}</b></span>' for k, v in facts if v)
    return (
        f'<header class="hero"><div class="brand">{LOGO}<span>Forethought</span></div>'
        f'<div class="lead"><div><h1>{esc(run.head("recipe") or title)}</h1>'
        f'{lede}<p class="facts">{chips}</p></div>{_verdict(run)}</div>'
        f"{_headline(run)}</header>"
    )


def _verdict(run: Run) -> str:
    verdict, rule = run.head("verdict"), run.head("verdict_rule")
    kind, sign = _VERDICTS.get(verdict, ("none", "…"))
    return (
        f'<aside class="verdict {kind}" aria-label="Verdict"><p class="big"><span aria-hidden="true">{sign}</span> '
        f"{esc(verdict or 'no verdict yet')}</p>"
        f"{f'<p><b>Rule:</b> {esc(rule)}</p>' if rule else ''}"
        f"{''.join(f'<p>{esc(note)}</p>' for note in run.notes)}</aside>"
    )


def _headline(run: Run) -> str:
    """The numbers that a reader should see first."""
    tiles = []
    head = run.headline()
    if head:
        arm, before, after = head
        cells = run.arms[arm]
        percent = is_fraction(after, [c[m].mean for c in run.arms.values() for m in (before, after) if m and m in c])
        name = next((common for common, _, a in pair_metrics(run.metric_names())[0] if a == after), after)
        end = _num(cells[after].mean, path=_pointer("arms", arm, after, "mean"), percent=percent)
        text = f"<b>{end}</b>"
        if before:
            start = _num(cells[before].mean, path=_pointer("arms", arm, before, "mean"), percent=percent)
            text = f'{start} <span class="to">→</span> {text}'
        cell, facts = cells[after], []
        if cell.lo is not None and cell.hi is not None:
            span = [
                _num(v, path=_pointer("arms", arm, after, "ci95", str(i)), percent=percent)
                for i, v in enumerate((cell.lo, cell.hi))
            ]
            facts.append(f"95% interval {span[0]} to {span[1]}")
        if cell.n is not None:
            facts.append(f"n {_num(cell.n, path=_pointer('arms', arm, after, 'n'))}")
        text += f"<small>{', '.join(facts)}</small>" if facts else ""
        tiles.append((f"{pretty(name)}, {arm}", text, "wide"))
    totals: dict[str, float] = {}
    for row in run.budget.values():
        for name, value in row.items():
            totals[name] = totals.get(name, 0) + (value or 0)
    for name, words, show in (
        ("tokens_generated", "total tokens generated", show_count),
        ("tokens_trained", "total tokens trained", show_count),
        ("wall_s", "total wall time", show_seconds),
    ):
        if totals.get(name):
            tiles.append((words, f"<b>{_num(totals[name], show(totals[name]))}</b>", ""))
    if not tiles:
        return ""
    items = "".join(f'<div class="{kind}"><dt>{esc(words)}</dt><dd>{text}</dd></div>' for words, text, kind in tiles)
    return f'<dl class="tiles">{items}</dl>'


def _problems(run: Run) -> str:
    if not run.problems:
        return ""
    items = "".join(f"<li>{esc(p)}</li>" for p in run.problems)
    return f'<aside class="problems" aria-label="What is missing"><h2>What is missing</h2><ul>{items}</ul></aside>'


# -- results ---------------------------------------------------------------------------------------------------------


def _results(run: Run, index: Mapping[str, int]) -> str:
    pairs, singles = pair_metrics(run.metric_names())
    views = [(name, before, after) for name, before, after in pairs] + [(name, None, name) for name in singles]
    if not views:
        return ""
    head = run.headline()
    views.sort(key=lambda v: (head is None or v[2] != head[2], "acc" not in v[0].lower(), v[1] is None))
    options = "".join(f'<option value="view-{k}">{esc(pretty(name))}</option>' for k, (name, _, _) in enumerate(views))
    pages = "".join(_view(run, index, k, *view) for k, view in enumerate(views))
    chooser = f'<p class="pick"><label for="pick-view">Metric</label> <select id="pick-view">{options}</select></p>'
    return f"{chooser if len(views) > 1 else ''}{pages}{_matrix(run, index) if len(views) > 1 else ''}"


def _view(run: Run, index: Mapping[str, int], number: int, name: str, before: str | None, after: str) -> str:
    """Chart and table of one metric (or of one before and after)."""
    metrics = [m for m in (before, after) if m]
    rows = {arm: [cells.get(m) for m in metrics] for arm, cells in run.arms.items() if any(m in cells for m in metrics)}
    percent = is_fraction(name, [c.mean for row in rows.values() for c in row if c])
    dots = [
        Dot(
            arm,
            index[arm],
            row[-1],
            row[0] if before else None,
            *(_raw_pointer(arm, m) for m in reversed(metrics)),
        )
        for arm, row in rows.items()
    ]
    chart = dot_chart(dots, f"{pretty(name)} by arm", ident=f"dots-{number}", percent=percent)
    key = '<p class="note"><span class="ring"></span> before <span class="full"></span> after, bars: 95% interval</p>'
    body = []
    for arm, row in rows.items():
        for k, (metric, cell) in enumerate(zip(metrics, row, strict=True)):
            lead = f'<th scope="row" rowspan="{len(metrics)}">{_arm(arm, index)}</th>' if k == 0 else ""
            when = f"<td>{('before', 'after')[k]}</td>" if before else ""
            body.append(
                f"<tr>{lead}{when}{_cells(arm, metric, cell, percent)}{_change(row, k, percent) if before else ''}</tr>"
            )
    heads = [
        "Arm",
        *(["When"] if before else []),
        "Mean",
        "95% interval",
        "n",
        "Each seed",
        *(["Change"] if before else []),
    ]
    table = _table(f"{pretty(name)}: every arm with its interval and seeds", heads, "".join(body))
    return (
        f'<div class="view" id="view-{number}"><h3>{esc(pretty(name))}</h3>'
        f"<figure>{chart}{key if before else ''}</figure>{table}</div>"
    )


def _raw_pointer(arm: str, metric: str) -> str:
    return "".join(f"/{p.replace('~', '~0').replace('/', '~1')}" for p in ("arms", arm, metric, "mean"))


def _cells(arm: str, metric: str, cell: Cell | None, percent: bool) -> str:
    """Table cells of one metric of one arm: mean, interval, n, each seed."""
    if cell is None or cell.empty:
        return f"<td>{NOTHING}</td><td>{NOTHING}</td><td>{NOTHING}</td><td>{NOTHING}</td>"
    at = ("arms", arm, metric)
    mean = _num(cell.mean, path=_pointer(*at, "mean"), percent=percent)
    span = NOTHING
    if cell.lo is not None or cell.hi is not None:
        lo = _num(cell.lo, path=_pointer(*at, "ci95", "0"), percent=percent)
        span = f"{lo} to {_num(cell.hi, path=_pointer(*at, 'ci95', '1'), percent=percent)}"
    count = _num(cell.n, path=_pointer(*at, "n")) if cell.n is not None else NOTHING
    each = " ".join(
        f'<span class="seed"><small>{esc(seed)}</small> '
        f"{_num(v, path=_pointer(*at, 'per_seed', key), percent=percent)}</span>"
        for seed, v, key in cell.per_seed
    )
    return f'<td class="mean">{mean}</td><td>{span}</td><td>{count}</td><td class="seeds">{each or NOTHING}</td>'


def _change(row: list[Cell | None], k: int, percent: bool) -> str:
    """After minus before, once per arm."""
    if k:
        return ""
    ends = [cell.mean if cell else None for cell in row]
    if ends[0] is None or ends[1] is None:
        return f'<td rowspan="2">{NOTHING}</td>'
    change = ends[1] - ends[0]
    text = f"{100 * change:+.1f} points" if percent else f"{change:+.3g}"
    way = "up" if change > 0 else "down" if change < 0 else ""
    return f'<td rowspan="2" class="change {way}">{_num(change, text)}</td>'


def _matrix(run: Run, index: Mapping[str, int]) -> str:
    """Means of all metrics side by side."""
    names = run.metric_names()
    percent = {m: is_fraction(m, [c[m].mean for c in run.arms.values() if m in c]) for m in names}
    body = []
    for arm, cells in run.arms.items():
        row = [f'<th scope="row">{_arm(arm, index)}</th>']
        for m in names:
            cell = cells.get(m)
            known = cell is not None and cell.mean is not None
            path = _pointer("arms", arm, m, "mean")
            row.append(f"<td>{_num(cell.mean, path=path, percent=percent[m]) if cell and known else NOTHING}</td>")
        body.append(f"<tr>{''.join(row)}</tr>")
    table = _table("Mean of every metric for every arm", ["Arm", *map(pretty, names)], "".join(body))
    return f"<details><summary>All metrics side by side <small>{len(names)}</small></summary>{table}</details>"


def _table(caption: str, heads: list[str], body: str) -> str:
    """A table that scrolls by itself where it is wider than the page."""
    head = "".join(f'<th scope="col">{esc(h)}</th>' for h in heads)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{esc(caption)}"><table>'
        f"<caption>{esc(caption)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


# -- curves ----------------------------------------------------------------------------------------------------------


def _curves(run: Run, index: dict[str, int]) -> str:
    full = from_results(run.results.get("curves")) | curves(run.metrics)
    for arms in full.values():
        for arm in arms:
            index.setdefault(arm, len(index))
    if not full:
        return ""
    shown = thin_all(full)
    options: dict[str, list[str]] = {}
    pages, data = [], []
    for k, (name, arms) in enumerate(shown.items()):
        percent = is_fraction(name, [v for c in arms.values() for v in c.mean])
        group = name.split("/")[0] if "/" in name else "general"
        options.setdefault(group, []).append(f'<option value="curve-{k}">{esc(name)}</option>')
        chart = curve_chart(arms, index, name, ident=f"curve-{k}", percent=percent)
        legend = "".join(_legend(arm, full[name][arm], index, percent) for arm in arms)
        seeds = max(c.seeds for c in full[name].values())
        band = f"; band: 95% interval of the mean over {seeds} seeds" if seeds > 1 else "; one seed, so no band"
        pages.append(
            f'<figure class="view" id="curve-{k}" data-percent="{int(percent)}"><h3>{esc(name)}</h3>{chart}'
            f'<p class="at note">last step</p><ul class="legend">{legend}</ul>'
            f'<figcaption class="note">{esc(name)} over training steps{band}.</figcaption></figure>'
        )
        data.append({index[a]: [c.steps, [float(f"{m:.6g}") for m in c.mean]] for a, c in arms.items()})
    groups = "".join(f'<optgroup label="{esc(g)}">{"".join(o)}</optgroup>' for g, o in options.items())
    return (
        f'<p class="pick"><label for="pick-curve">Metric</label> <select id="pick-curve">{groups}</select></p>'
        f'{"".join(pages)}<script type="application/json" id="curve-data">{script_json(data)}</script>'
    )


def _legend(arm: str, curve: Curve, index: Mapping[str, int], percent: bool) -> str:
    value = _num(curve.mean[-1], percent=percent)
    return (
        f'<li><button type="button" aria-pressed="true" data-arm="{index[arm]}" title="show or hide this arm">'
        f'<svg class="swatch {arm_class(index[arm])}" width="22" height="10" aria-hidden="true">'
        f'<path class="line" d="M1,5H21"/></svg><span>{esc(arm or "run")}</span> {value}</button></li>'
    )


# -- budget, examples, rollouts, settings ----------------------------------------------------------------------------


def _budget(run: Run, index: Mapping[str, int]) -> str:
    if not run.budget:
        return ""
    names = run.counters
    most = {n: max((row.get(n) or 0 for row in run.budget.values()), default=0) for n in names}
    body = []
    for arm, row in run.budget.items():
        cells = [f'<th scope="row">{_arm(arm, index)}</th>']
        for name in names:
            value = row.get(name)
            if value is None:
                cells.append(f"<td>{NOTHING}</td>")
                continue
            text = show_seconds(value) if name.endswith("_s") else show_number(value)
            bar = share_bar(value / most[name]) if most[name] > 0 else ""
            cells.append(f"<td>{_num(value, text, _pointer('budget', arm, name))}{bar}</td>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    heads = ["Arm", *("wall time" if n == "wall_s" else pretty(n) for n in names)]
    return '<p class="note">Counted while the arms ran, not assumed. Bars compare the arms.</p>' + _table(
        "What each arm used", heads, "".join(body)
    )


_EXAMPLE = ("prompt", "question", "before", "after", "answer", "arm", "correct_before", "correct_after")

_MARKS = ('<b class="wrong">✗ wrong</b>', '<b class="ok">✓ right</b>')


def _examples(run: Run) -> str:
    """Held-out answers before and after; keys of an example: see `_EXAMPLE`, others are listed below it."""
    found = run.results.get("examples")
    found = [e for e in found if isinstance(e, dict)] if isinstance(found, list) else []
    cards = []
    for example in found[:24]:
        sides = ""
        for side in ("before", "after"):
            if side in example:
                right = example.get(f"correct_{side}")
                mark = _MARKS[right] if isinstance(right, bool) else ""
                sides += f'<div class="side"><h4>{side} {mark}</h4><div class="said">{_long(example[side])}</div></div>'
        question = example.get("prompt", example.get("question"))
        rest = "".join(
            f'<span class="chip">{esc(k)} <b>{esc(truncate(_words(v), 200)[0])}</b></span>'
            for k, v in example.items()
            if k not in _EXAMPLE
        )
        gold = (
            ""
            if example.get("answer") is None
            else f'<span class="chip">right answer <b>{esc(truncate(_words(example["answer"]), 200)[0])}</b></span>'
        )
        arm = f'<span class="chip">arm <b>{esc(example["arm"])}</b></span>' if example.get("arm") else ""
        cards.append(
            f'<article class="example"><div class="turn">{_long(question) if question is not None else ""}</div>'
            f'<p class="facts">{arm}{gold}{rest}</p><div class="sides">{sides}</div></article>'
        )
    more = f'<p class="note">{len(found) - 24} more in results.json.</p>' if len(found) > 24 else ""
    return f'<div class="examples">{"".join(cards)}</div>{more}' if cards else ""


def _words(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(m, dict) and "content" in m for m in value):
        return "\n".join(f"{m.get('role', '')}: {m['content']}" for m in value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _long(value: Any, limit: int = 1200) -> str:
    text, hidden = truncate(_words(value), limit)
    return esc(text) + (f' <span class="cut">({hidden:,} characters not shown)</span>' if hidden else "")


def _rollouts(run: Run) -> str:
    if not run.trees:
        return ""
    limits = treeview.budget(run.trees)
    panels = "".join(treeview.panel(row, tree, k, run.pieces, limits) for k, (row, tree) in enumerate(run.trees))
    first = _first_tree(run)
    options = "".join(
        f'<option value="tree-{k}"{" selected" if k == first else ""}>{esc(treeview.label(row))}</option>'
        for k, (row, _) in enumerate(run.trees)
    )
    note = f"{len(run.trees)} of {run.tree_count:,} stored groups" if run.tree_count > len(run.trees) else ""
    scale = "".join(f'<i class="key {c}"></i>' for c in ("n4", "n3", "n2", "n1", "p0", "p1", "p2", "p3", "p4"))
    sure = "".join(f'<i class="key l{k}"></i>' for k in range(5))
    return (
        f'<p class="pick"><label for="pick-tree">Group</label> <select id="pick-tree">{options}</select> '
        f"<small>{note}</small></p>"
        '<fieldset class="colour"><legend>Colour of a token</legend>'
        '<label><input type="radio" name="colour" value="signal" checked> '
        '<span class="signal-name">advantage</span></label>'
        f'<span class="keys signal-key">below 0 {scale} above 0</span>'
        '<label><input type="radio" name="colour" value="logprob"> behaviour log-prob</label>'
        f'<span class="keys logprob-key">likely {sure} unlikely</span></fieldset>'
        '<p class="note">Point at a token, tap it, or focus a sample and use the arrow keys to read its numbers.</p>'
        f'<div id="panels" data-colour="signal">{panels}</div>'
        '<div id="readout" role="status" aria-live="polite" hidden></div>'
    )


def _first_tree(run: Run) -> int:
    """Place of the tree to open with: the last training group of the arm in the headline, else of any."""
    head = run.headline()

    def rank(place: int) -> tuple[bool, bool, int]:
        row = run.trees[place][0]
        return head is not None and row.arm == head[0], row.kind == "train", row.step

    return max(range(len(run.trees)), key=rank)


def _settings(run: Run) -> str:
    parts = []
    flat = _flat(run.config)
    if flat:
        rows = "".join(
            f'<tr><th scope="row">{esc(name)}</th>'
            f"<td{_value_attr(value)}>{esc(truncate(_words(value), 300)[0])}</td></tr>"
            for name, value in flat.items()
        )
        table = _table("config.yaml, as resolved for this run", ["Setting", "Value"], rows)
        parts.append(f"<details><summary>Config <small>{len(flat)} settings</small></summary>{table}</details>")
    versions = run.results.get("versions")
    if isinstance(versions, dict) and versions:
        rows = "".join(
            f'<tr><th scope="row">{esc(k)}</th><td>{esc(NOTHING if v is None else v)}</td></tr>'
            for k, v in versions.items()
        )
        table = _table("Versions that the results depend on", ["Package", "Version"], rows)
        parts.append(f"<details><summary>Versions <small>{len(versions)}</small></summary>{table}</details>")
    if run.extras:
        text, hidden = truncate(json.dumps(run.extras, indent=2, ensure_ascii=False), 20_000)
        cut = f'<p class="note">{hidden:,} characters not shown.</p>' if hidden else ""
        parts.append(
            f"<details><summary>Also in results.json <small>{len(run.extras)}</small></summary>"
            f"<pre>{esc(text)}</pre>{cut}</details>"
        )
    return "".join(parts)


def _value_attr(value: Any) -> str:
    return "" if number(value) is None else f' data-value="{json.dumps(value)}"'


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names."""
    out: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict) and value:
            out |= _flat(value, f"{prefix}{name}.")
        else:
            out[f"{prefix}{name}"] = value
    return out


def _footer(run: Run) -> str:
    files = [f for f in ("results.json", "metrics.jsonl", "config.yaml", "trees.sqlite") if (run.path / f).exists()]
    listed = ", ".join(f"<code>{f}</code>" for f in files)
    return (
        f"<footer><p>Made by <code>forethought report</code> from {listed}. "
        "Nothing on this page was loaded from elsewhere.</p></footer>"
    )
