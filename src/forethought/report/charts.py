"""Charts as inline SVG that fits any width without a script.

Texts keep their size and only positions stretch: x is given in percent and y in pixels, and where that is impossible
(paths) a nested view stretches them with a stroke that does not scale. Colours come from classes (`c0` ... `c7` by arm,
dashes `d1`, `d2` beyond eight arms), so that the page's light and dark themes both work and no inline style is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from forethought.report.curves import Curve
from forethought.report.reading import Cell
from forethought.report.text import esc, show_count, show_number

COLOURS = 8
_ROW = 46  # pixels of one arm in a dot chart
_PLOT = 230  # pixels of a curve's height
_TOP = 12
_FEW = 15  # measured points up to which each is marked


def arm_class(index: int) -> str:
    """CSS classes of an arm's colour and dash."""
    return f"c{index % COLOURS} d{index // COLOURS % 3}"


# -- scales ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """A linear axis with round ticks; `at` maps a value to 0 ... 1, values outside are moved to the border."""

    lo: float
    hi: float
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        return min(1.0, max(0.0, (value - self.lo) / (self.hi - self.lo)))

    def x(self, value: float) -> str:
        """In percent of the width, with room for a dot at both ends."""
        return f"{2 + 96 * self.at(value):.2f}%"


def scale(values: Iterable[float], *, fraction: bool = False, count: int = 4, whole: bool = False) -> Scale:
    """A scale over the values.

    Args:
        fraction: values are shares: never beyond 0 and 1, and the full range where the values use half of it.
        count: about so many steps between ticks.
        whole: ticks only at whole numbers (training steps).
    """
    values = [v for v in values if math.isfinite(v)]
    lo, hi = (min(values), max(values)) if values else (0.0, 1.0)
    if fraction and hi - lo > 0.4:
        lo, hi = 0.0, 1.0
    if hi - lo <= max(abs(hi) * 1e-9, 1e-300):  # a constant
        room = 0.5 if whole or abs(hi) < 1e-290 else abs(hi) * 0.1
        lo, hi = lo - room, hi + room
    if not math.isfinite(hi - lo):  # beyond the range of floats
        lo, hi = lo / 4, hi / 4
    raw = (hi - lo) / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= raw * 0.999)
    if whole:
        step = max(1.0, math.ceil(step))
        ticks = [step * k for k in range(math.ceil(lo / step), math.floor(hi / step) + 1)]
        return Scale(lo, hi, tuple(ticks))
    first, last = math.floor(lo / step + 1e-9), math.ceil(hi / step - 1e-9)
    if fraction:
        first, last = max(first, 0), min(last, round(1 / step))
    return Scale(first * step, last * step, tuple(k * step for k in range(first, last + 1)))


def _tick(value: float, axis: Scale, percent: bool) -> str:
    step = axis.ticks[1] - axis.ticks[0] if len(axis.ticks) > 1 else 0
    if percent:
        return f"{100 * value:.{1 if 0 < step < 0.01 else 0}f}%"
    if abs(value) < step * 1e-6:
        return "0"
    if abs(value) >= 1e4:
        return show_count(value)
    return f"{value:.4g}"


# -- dots: one row an arm --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dot:
    """One arm's row: its value, where it came from (`before`, if known), and JSON pointers to both."""

    arm: str
    index: int
    after: Cell | None
    before: Cell | None = None
    after_path: str = ""
    before_path: str = ""


def dot_chart(rows: Sequence[Dot], title: str, *, ident: str, percent: bool = False) -> str:
    """Value and 95% interval of every arm; where there is a before, a line leads from it to the value."""
    shown = [c for row in rows for c in (row.before, row.after) if c is not None]
    values = [v for c in shown for v in (c.mean, c.lo, c.hi) if v is not None]
    if not percent and values and min(values) >= 0 and min(values) < 0.5 * max(values):
        values.append(0.0)
    axis = scale(values, fraction=percent)
    bottom = _ROW * len(rows) + 6
    parts = [
        f'<svg class="dots" width="100%" height="{bottom + 22}" role="img" aria-labelledby="{ident}-t {ident}-d">',
        f'<title id="{ident}-t">{esc(title)}</title>',
        f'<desc id="{ident}-d">One row per arm with the mean and its 95% interval; '
        f"the table below holds the same numbers.</desc>",
    ]
    for k, tick in enumerate(axis.ticks):
        anchor = "start" if k == 0 else "end" if k == len(axis.ticks) - 1 else "middle"
        x = axis.x(tick)
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="0" y2="{bottom}"/>')
        parts.append(
            f'<text class="tick" x="{x}" y="{bottom + 16}" text-anchor="{anchor}">{_tick(tick, axis, percent)}</text>'
        )
    for place, row in enumerate(rows):
        parts += _dot_row(row, place * _ROW, axis, percent)
    return "".join(parts) + "</svg>"


def _dot_row(row: Dot, top: int, axis: Scale, percent: bool) -> list[str]:
    y = top + 32
    after, before = row.after, row.before
    end = after.mean if after else None
    start = before.mean if before else None
    text = show_number(end, percent=percent)
    if before is not None:
        text = f"{show_number(start, percent=percent)} → {text}"
    out = [
        f'<g class="{arm_class(row.index)}"><text class="name" x="0" y="{top + 17}">{esc(_short(row.arm))}</text>',
        f'<text class="reading" x="100%" y="{top + 17}" text-anchor="end">{text}</text>',
    ]
    if start is not None and end is not None:
        out.append(f'<line class="move" x1="{axis.x(start)}" x2="{axis.x(end)}" y1="{y}" y2="{y}"/>')
    bars, circles = [], []  # no bar may cover a circle
    for cell, kind, path in ((before, "before", row.before_path), (after, "after", row.after_path)):
        if cell is None or cell.mean is None:
            continue
        words = f"{row.arm}, {kind}: {show_number(cell.mean, percent=percent)}" if before else f"{row.arm}: {text}"
        if cell.lo is not None and cell.hi is not None:
            low, high = show_number(cell.lo, percent=percent), show_number(cell.hi, percent=percent)
            words += f" (95% interval {low} to {high})"
            bars.append(f'<line class="ci {kind}" x1="{axis.x(cell.lo)}" x2="{axis.x(cell.hi)}" y1="{y}" y2="{y}"/>')
        circles.append(
            f'<circle class="{kind}" cx="{axis.x(cell.mean)}" cy="{y}" r="5.5" data-value="{cell.mean!r}" '
            f'data-path="{esc(path)}"><title>{esc(words)}</title></circle>'
        )
    return [*out, *bars, *circles, "</g>"]


def _short(name: str, limit: int = 30) -> str:
    return name if len(name) <= limit else name[: limit - 1] + "…"


# -- curves ----------------------------------------------------------------------------------------------------------


def curve_chart(arms: Mapping[str, Curve], index: Mapping[str, int], title: str, *, ident: str, percent: bool) -> str:
    """Mean over seeds of every arm with its interval band, over steps."""
    means = [v for c in arms.values() for v in c.mean]
    room = (max(means) - min(means)) / 2  # bands of few seeds may be huge: they do not flatten the curves
    floor, ceiling = min(means) - room, max(means) + room
    bands = [min(max(v, floor), ceiling) for c in arms.values() for v in (*c.lo, *c.hi) if v is not None]
    y = scale([*means, *bands], fraction=percent)
    x = scale([s for c in arms.values() for s in c.steps], whole=True, count=5)
    height = _TOP + _PLOT + 24
    axis = "".join(
        f'<text class="tick" x="42" y="{_down(y, t) + 4:.1f}" text-anchor="end">{_tick(t, y, percent)}</text>'
        for t in y.ticks
    )
    grid = "".join(
        f'<line class="grid" x1="0" x2="100%" y1="{_down(y, t):.1f}" y2="{_down(y, t):.1f}"/>' for t in y.ticks
    )
    labels = "".join(
        f'<text class="tick" x="{_across(x, t) / 10:.2f}%" y="{_TOP + _PLOT + 17}" text-anchor="{_anchor(x.at(t))}">'
        f"{show_number(int(t))}</text>"
        for t in x.ticks
    )
    paths = []
    for arm, curve in arms.items():
        places = [
            (round(_across(x, s)), round(1000 * (1 - y.at(m)))) for s, m in zip(curve.steps, curve.mean, strict=True)
        ]
        line = "L".join(f"{a},{b}" for a, b in places)
        few = "".join(f"M{a},{b}h0" for a, b in places) if len(places) <= _FEW else ""  # dots, by round line ends
        paths.append(
            f'<g class="{arm_class(index[arm])}" data-arm="{index[arm]}">{_band(curve, x, y)}'
            f'<path class="line" d="M{line}"/>{f"""<path class="points" d="{few}"/>""" if few else ""}</g>'
        )
    return (
        f'<div class="curve"><svg class="axis" width="46" height="{height}" aria-hidden="true">{axis}</svg>'
        f'<svg class="plot" height="{height}" role="img" tabindex="0" aria-labelledby="{ident}-t {ident}-d" '
        f'data-lo="{x.lo!r}" data-hi="{x.hi!r}"><title id="{ident}-t">{esc(title)}</title>'
        f'<desc id="{ident}-d">Curves over training steps. Left and right arrow keys read the values of a step.</desc>'
        f'{grid}<svg x="0" y="{_TOP}" width="100%" height="{_PLOT}" viewBox="0 0 1000 1000" preserveAspectRatio="none">'
        f'{"".join(paths)}</svg>{labels}<line class="cursor" y1="{_TOP}" y2="{_TOP + _PLOT}"/></svg></div>'
    )


def _across(x: Scale, step: float) -> float:
    """In thousandths of the width; a hundredth is left at both ends for dots. The page's script counts on it."""
    return 10 + 980 * x.at(step)


def _down(y: Scale, value: float) -> float:
    return _TOP + _PLOT * (1 - y.at(value))


def _anchor(at: float) -> str:
    return "start" if at < 0.03 else "end" if at > 0.97 else "middle"


def _band(curve: Curve, x: Scale, y: Scale) -> str:
    """The interval as one filled shape per unbroken stretch of steps that have one."""
    shapes, stretch = [], []
    for step, lo, hi in [*zip(curve.steps, curve.lo, curve.hi, strict=True), (0, None, None)]:
        if lo is not None and hi is not None:
            at = round(_across(x, step))
            stretch.append((f"{at},{round(1000 * (1 - y.at(hi)))}", f"{at},{round(1000 * (1 - y.at(lo)))}"))
        elif len(stretch) > 1:
            shapes.append(f"M{'L'.join(up for up, _ in stretch)}L{'L'.join(low for _, low in reversed(stretch))}Z")
            stretch = []
        else:
            stretch = []
    return f'<path class="band" d="{"".join(shapes)}"/>' if shapes else ""


# -- small -----------------------------------------------------------------------------------------------------------


def share_bar(share: float) -> str:
    """A thin bar of this share (0 ... 1) of the width, beside a number that says the same."""
    width = f"{100 * min(1.0, max(0.0, share)):.1f}%"
    return (
        '<svg class="share" width="100%" height="4" aria-hidden="true">'
        '<rect class="whole" width="100%" height="4" rx="2"/>'
        f'<rect class="part" width="{width}" height="4" rx="2"/></svg>'
    )


LOGO = (
    '<svg class="logo" width="34" height="34" viewBox="0 0 34 34" aria-hidden="true"><path d="M5 17h7c5 0 4-10 9-10h3'
    'M12 17h12M12 17c5 0 4 10 9 10h3"/><circle cx="5" cy="17" r="3"/><circle cx="27" cy="7" r="2.6"/>'
    '<circle class="hit" cx="27" cy="17" r="3.6"/><circle cx="27" cy="27" r="2.6"/></svg>'
)
