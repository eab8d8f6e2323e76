"""Text and numbers as a reader should see them: escaped, without surprises, in few characters.

Model output is hostile by default: it may hold markup, terminal commands, lone surrogates, characters that turn the
direction of writing, or a million letters. `visible` makes every such character something to look at; `esc` also makes
it safe inside HTML text and attributes.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable
from typing import Any

_FRACTION = re.compile(
    r"(acc|accuracy|(pass|avg|maj)(@\d*)?|rate|ratio|share|frac|fraction|success|solved|boxed|truncated|repeated|extracted"
    r"|win|hit|recall|precision|f1|coverage)"
)
_NOT_FRACTION = ("learning_rate", "ratio/")
_BIDI = {c: f"[U+{c:04X}]" for c in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C)}
_CONTROLS = {c: chr(0x2400 + c) for c in range(0x20) if c not in (0x09, 0x0A)} | {0x7F: "\u2421"}
_C1 = {c: f"[U+{c:04X}]" for c in (*range(0x80, 0xA0), 0x2028, 0x2029, 0xFEFF)}
_SURROGATES = {c: "\ufffd" for c in range(0xD800, 0xE000)}
_VISIBLE = _BIDI | _CONTROLS | _C1 | _SURROGATES

NOTHING = "–"
"""Shown where there is no number."""


def visible(text: str) -> str:
    """Text in which control, direction and surrogate characters are replaced by visible signs; \\n and \\t stay."""
    return text.replace("\r\n", "\n").translate(_VISIBLE)


def esc(value: Any) -> str:
    """Safe inside HTML text and inside a quoted attribute."""
    return html.escape(visible(str(value)), quote=True)


def truncate(text: str, limit: int) -> tuple[str, int]:
    """(head of the text and the end of it, characters left out between them). Three quarters go to the head.

    >>> truncate("abcdefghij", 4)
    ('abc … j', 6)
    """
    if len(text) <= limit:
        return text, 0
    head = limit - limit // 4
    tail = limit - head
    return f"{text[:head]} … {text[len(text) - tail :]}", len(text) - limit


def script_json(value: Any) -> str:
    """JSON for a data block in a page: no '<', '>' or '&' can end the block or start markup.

    Raises:
        ValueError: NaN or infinity.
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def number(value: Any) -> float | int | None:
    """A finite number, or None for anything else (null, text, NaN, true)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) else None


def is_fraction(name: str, values: Iterable[Any] = ()) -> bool:
    """Is this metric a share of something, to be shown in percent? By a word of its name, if no value contradicts."""
    words = re.split(r"[/_. \-]+", name.lower())
    named = any(_FRACTION.fullmatch(word) for word in words) and not name.lower().startswith(_NOT_FRACTION)
    return named and all(0 <= v <= 1 for v in map(number, values) if v is not None)


def show_number(value: Any, *, percent: bool = False) -> str:
    """A number in few characters; `NOTHING` where there is none.

    >>> show_number(0.5625, percent=True), show_number(1234567), show_number(-0.00012345), show_number(None)
    ('56.2%', '1,234,567', '-0.000123', '–')
    """
    value = number(value)
    if value is None:
        return NOTHING
    if percent:
        return f"{100 * value:.1f}%"
    if isinstance(value, int) or (value == int(value) and abs(value) < 1e6):
        return f"{int(value):,}" if abs(value) < 1e15 else f"{value:.3e}"
    size = abs(value)
    if size >= 1e7 or size < 1e-4:
        return f"{value:.3g}"
    if size >= 1000:
        return f"{value:,.0f}"
    if size < 0.1:
        return f"{value:.3g}"
    return f"{value:.{1 if size >= 100 else 2 if size >= 10 else 3}f}"


def show_count(value: Any) -> str:
    """A count, short: 950, 12.3k, 4.56M.

    >>> show_count(950), show_count(12345), show_count(4560000)
    ('950', '12.3k', '4.56M')
    """
    value = number(value)
    if value is None:
        return NOTHING
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{name}"
    return show_number(value)


def show_seconds(value: Any) -> str:
    """A duration.

    >>> show_seconds(8.25), show_seconds(252), show_seconds(7380)
    ('8.2 s', '4 min 12 s', '2 h 3 min')
    """
    value = number(value)
    if value is None:
        return NOTHING
    if abs(value) < 60:
        return f"{value:.1f} s"
    seconds = round(value)
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60} min"


def pretty(name: str) -> str:
    """A metric's or field's name for people: "tokens_generated" -> "tokens generated"; slashes stay."""
    return name.replace("_", " ")
