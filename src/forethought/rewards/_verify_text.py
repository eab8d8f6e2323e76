"""Text side of the verifier: find the answer in a response, and bring notation to one spelling.

Everything here is a bounded number of linear passes over the text: no evaluation, no recursion, no sympy.
"""

from __future__ import annotations

import re
import unicodedata

MAX_ANSWER = 8_000  # characters of one answer that are read as mathematics; longer ones are compared as text only
MAX_DEPTH = 48  # nesting that is read as mathematics
MAX_DIGITS = 4_000  # digits of one number (the interpreter's own limit for int(str) is 4300)


class Limit(Exception):
    """A bound was reached before the question was decided; the text says which."""


class Unreadable(Exception):
    """The text is not in the grammar."""


# -- finding the answer ------------------------------------------------------------------------------------------

_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.S)
_BOX_START = re.compile(r"\\(?:boxed|fbox)\s*\{")


def last_box(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` (or `\fbox`) by brace counting, or None.

    The last box decides, so an unclosed last box means none, whatever stands before it. A box inside another box is
    part of the outer one. Escaped braces do not count, and `\boxed 5` without a brace is no box. One linear pass.
    """
    open_at: list[tuple[int, bool]] = []  # (index of the content, is it a box) of every open brace
    boxes: list[tuple[int, int]] = []  # closed boxes that are in no closed box, in order
    last_start, last_closed = -1, False
    for match in _BRACE.finditer(text):
        token = match.group()
        if token == "}":
            if open_at:
                start, is_box = open_at.pop()
                if is_box:
                    while boxes and boxes[-1][0] > start:
                        boxes.pop()
                    boxes.append((start, match.start()))
                    last_closed = last_closed or start == last_start
        elif token == "{":
            open_at.append((match.end(), False))
        elif len(token) > 2:  # a box; two characters are an escaped one
            open_at.append((match.end(), True))
            last_start, last_closed = match.end(), False
    if not last_closed or not boxes:
        return None
    start, end = boxes[-1]
    return text[start:end]


def unwrap_boxes(text: str) -> str:
    """Replace every box in `text` by its content: a box in a box, or a gold that carries one."""
    if not _BOX_START.search(text):
        return text
    out, stack, at = [], [], 0
    for match in _BRACE.finditer(text):
        token = match.group()
        if token == "}" and stack and stack.pop():
            out.append(text[at : match.start()])
            at = match.end()
        elif token.endswith("{") and len(token) != 2:
            stack.append(len(token) > 1)
            if len(token) > 1:
                out.append(text[at : match.start()])
                at = match.end()
    return "".join(out) + text[at:]


_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+(?![\d])(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+\b)?"
_NUMBER = re.compile(rf"(?:(?<![\w.)\]}}])[-+])?(?:\\[dt]?frac\{{-?\d+\}}\{{-?\d+\}}|{_UNSIGNED}(?:/\d+(?:\.\d+)?)?)")
_BARE = re.compile(rf"[-+]?{_UNSIGNED}(?:/\d+)?\.?")


def last_number(text: str) -> str | None:
    r"""The last number written in `text` (integer, decimal, a/b, \frac{a}{b}, thousands with commas), or None.

    A minus belongs to the number unless it follows a digit, letter or closing bracket: "11-6" ends in 6.
    """
    found = None
    for match in _NUMBER.finditer(_dashes(text.replace(",\\!", ",").replace("{,}", ","))):
        found = match.group()
    return found


def bare_number(text: str) -> str | None:
    """The response itself where it is nothing but one number, else None."""
    stripped = _dashes(text.strip())
    return stripped.rstrip(".") if _BARE.fullmatch(stripped) else None


_AFTER = re.compile(r"(?:####|\banswer\s*(?:is|:|=)+\s*:?)[ \t]*([^\n]*)", re.I)
_MATH = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$([^$]+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.S)
_BOLD = re.compile(r"\*\*([^*\n]+)\*\*")


def any_answer(text: str) -> str | None:
    """A lenient reader: box, else the line after "answer is" or ####, else last formula, bold text, number."""
    box = last_box(text)
    if box is not None:
        return box
    after = [m for m in _AFTER.findall(text) if m.strip()]
    if after:
        line = after[-1].strip()
        formula = _MATH.fullmatch(line.rstrip("."))
        return next(g for g in formula.groups() if g) if formula else line
    for pattern in (_MATH, _BOLD):
        hits = pattern.findall(text[-4_000:])
        if hits:
            return next(g for g in hits[-1] if g) if isinstance(hits[-1], tuple) else hits[-1]
    return last_number(text)


# -- one spelling ------------------------------------------------------------------------------------------------

_CHARS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "﹣": "-", "×": r"\times ", "✕": r"\times ", "·": r"\cdot ",
    "⋅": r"\cdot ", "∙": r"\cdot ", "÷": "/", "∕": "/", "⁄": "/", "∞": r"\infty ", "√": r"\sqrt ", "°": r"^{\circ}",
    "º": r"^{\circ}", "≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ",
    "∈": r"\in ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "±": r"\pm ", "∓": r"\mp ", "…": r"\ldots ",
    "⋯": r"\ldots ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "∖": r"\setminus ",
    "⟨": r"\langle ", "⟩": r"\rangle ", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ",
    "’": "'", "‘": "'", "′": "'", "“": '"', "”": '"', "€": r"\euro ", "£": r"\pounds ", "∨": r"\lor ", "∧": r"\land ",
    "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u2002": " ", "\u2003": " ", "\u200b": "", "\ufeff": "",
    "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    "⅕": r"\frac{1}{5}", "⅖": r"\frac{2}{5}", "⅗": r"\frac{3}{5}", "⅘": r"\frac{4}{5}", "⅙": r"\frac{1}{6}",
    "⅚": r"\frac{5}{6}", "⅛": r"\frac{1}{8}", "⅜": r"\frac{3}{8}", "⅝": r"\frac{5}{8}", "⅞": r"\frac{7}{8}",
}  # fmt: skip
_GREEK = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho . sigma tau upsilon phi chi psi omega"  # noqa: E501
_CHARS |= {chr(0x3B1 + i): f"\\{name} " for i, name in enumerate(_GREEK.split()) if name != "."}
_CHARS |= {chr(0x391 + i): f"\\{name.title()} " for i, name in enumerate(_GREEK.split()) if name != "."}
_TABLE = str.maketrans(_CHARS)
_SUPER = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱˣ", "0123456789+-nix", strict=True))
_SUB = dict(zip("₀₁₂₃₄₅₆₇₈₉ₙₖ", "0123456789nk", strict=True))
_SUPER_RUN = re.compile(f"[{''.join(_SUPER)}]+")
_BAR_RUN = re.compile("(?:[0-9][\u0304\u0305])+")
_SUB_RUN = re.compile(f"[{''.join(_SUB)}]+")


def _dashes(text: str) -> str:
    return re.sub("[−–—‐‑﹣]", "-", text)


_UNICODE_SETS = re.compile(r"[^\x00-\x7f]")
_REPLACE: list[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), by)
    for pattern, by in [
        # delimiters, markup and commands that carry no meaning
        (r"(?<![\w)\]}*])(\*\*\*?)(?=[^\s*])([^*]*)(?<=[^\s*])\1(?![\w(*])", r"\2"),
        (r"^(?:__|\*|`)(?=\S)([^*_`]*)(?<=\S)(?:__|\*|`)$", r"\1"),
        (r"(?<!\\)\\$", ""),
        (r"\\\\\s*\[[^\[\]]*(?:pt|em|ex|cm|mm)\]", r"\\\\"),
        (r"(?<!\\)\\[()\[\]]|(?<!\\)\$", " "),
        (r"\\(?:left|right|middle)\s*\.", " "),
        (r"\\(?:left|right|middle|[bB]igg?[lrm]?|displaystyle|textstyle|scriptstyle|limits|nolimits|strut|mathstrut"
         r"|mathopen|mathclose|mathord|mathbin|mathrel|allowbreak|nonumber|hfill|bf|rm|it|boldmath|centering)"
         r"(?![A-Za-z])\s*", " "),
        (r"\\(?:bigcup)(?![A-Za-z])", r"\\cup "),
        (r"\\(?:color|h?space|hspace\*|vspace|label|tag|phantom|hphantom|vphantom)\s*\{[^{}]*\}", " "),
        (r"\\textcolor\s*\{[^{}]*\}", " "),
        (r"\\(?:mathbf|boldsymbol|bm|mathcal|mathsf|underline|ensuremath|mathnormal|mathit|vec|hat)(?![A-Za-z])\s*"
         r"(?=\{)", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
        (r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}", r"\\binom{\1}{\2}"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\\frac\s*\{\s*\\(?:text|mathrm)\s*\{([A-Za-z ]*)\}\s*\}\s*\{\s*\\(?:text|mathrm)\s*\{([A-Za-z ]*)\}"
         r"(\^\{?\d\}?)?\s*\}", r"\\text{\1/\2\3}"),
        # thousands: braces, thin or negative space, or plain spaces between groups of three
        (r"^\+-|\+/-", r"\\pm "),
        (r"(?<=\d)\s*\^\s*\{?\s*(?:o|\\(?:text|mathrm|rm)\s*\{\s*o\s*\})(?![A-Za-z])\s*\}?", r"^{\\circ}"),
        (r"(?<=\d)(?:\{,\}|,\\!|\\!,)\s*(?=\d{3}(?!\d))", ""),
(r"(?<!\\)\\!", ""),
        (r"(?<!\\)\\[,;:> ]|~|\\q?quad(?![A-Za-z])|\\(?:thin|med|thick|neg)space(?![A-Za-z])|\\/", " "),
        # other spellings of one thing
        (r"\\(?:leqslant|leq|leqq)(?![A-Za-z])", r"\\le "),
        (r"\\(?:geqslant|geq|geqq)(?![A-Za-z])", r"\\ge "),
        (r"\\neq(?![A-Za-z])|\\not\s*=", r"\\ne "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\(?:dots|cdots|dotsc|dotsb|dotso)(?![A-Za-z])", r"\\ldots "),
        (r"\\(?:varnothing|O)(?![A-Za-z])", r"\\emptyset "),
        (r"\\(?:ast|star|bullet)(?![A-Za-z])", r"\\cdot "),
        (r"\\div(?![A-Za-z])", "/"),
        (r"\\degree(?:s)?(?![A-Za-z])|\\textdegree(?![A-Za-z])", r"^{\\circ}"),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))", r"^{\\circ}"),
        (r"\\(?:lbrace)(?![A-Za-z])", r"\\{"),
        (r"\\(?:rbrace)(?![A-Za-z])", r"\\}"),
        (r"\\(?:lbrack)(?![A-Za-z])", "["),
        (r"\\(?:rbrack)(?![A-Za-z])", "]"),
        (r"\\(?:lvert|rvert|vert)(?![A-Za-z])", "|"),
        (r"\\sp(?![A-Za-z])", "^"),
        (r"(?<=\d)\s*[xX]\s*(?=10\s*(?:\^|\*\*))", r"\\times "),
        (r"(?<=\d)\s*(?:\^\s*\{?\s*)?(?:\\(?:text|mathrm|textsuperscript)\s*\{\s*(?:st|nd|rd|th)\s*\}|(?:st|nd|rd|th)\b)"
         r"\s*\}?(?![A-Za-z])", " "),
        (r'^\s*"(.*)"\s*$', r"\1"),
        (r"^\s*'(.*)'\s*$", r"\1"),
    ]
]  # fmt: skip
_SPACED_DIGITS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:(?:\\[,;: ] ?|~| )\d{3})+(?!\d| ?/)")
_PREFIX = re.compile(
    r"^\s*(?:(?:so|thus|therefore|hence)\b,?\s*)?(?:the\s+|my\s+)?(?:final\s+)?answer\b\s*(?:is\b)?\s*[:=]?\s*", re.I
)
_DOUBLED = re.compile(r"\\\\(?=(?:frac|dfrac|tfrac|sqrt|pi|left|right|text|cdot|times|infty|circ|pm|boxed|cup)\b)")


def clean(text: str) -> str:
    r"""One spelling for one notation: ASCII LaTeX without delimiters, spacing commands, bold marks and end stops.

    Groups of digits are joined where the grouping is beyond doubt (`1{,}234`, `10,\!080`, `1\,234`); a bare comma is
    left for the parser, which knows whether it stands in a bracket.
    """
    if _UNICODE_SETS.search(text):
        text = _BAR_RUN.sub(lambda m: "\\overline{" + m.group().replace("\u0305", "").replace("\u0304", "") + "}", text)
        text = _SUPER_RUN.sub(lambda m: "^{" + "".join(_SUPER[c] for c in m.group()) + "}", text)
        text = _SUB_RUN.sub(lambda m: "_{" + "".join(_SUB[c] for c in m.group()) + "}", text)
        text = unicodedata.normalize("NFKC", text.translate(_TABLE)).translate(_TABLE)
    text = re.sub(r"\s+", " ", unwrap_boxes(text)).strip()
    if "\\begin" not in text:
        text = _DOUBLED.sub(r"\\", text)
    text = text.replace("\\$", " \\dollar ")
    if text.count("$") % 2:
        text = text.replace("$", " \\dollar ", 1)
    text = _SPACED_DIGITS.sub(lambda m: re.sub(r"\D", "", m.group()), text)
    for pattern, by in _REPLACE:
        text = pattern.sub(by, text)
    shorter = _PREFIX.sub("", text, count=1)
    text = (shorter if shorter.strip() else text).strip()
    while text and text[-1] in ".,;: " and not text.endswith("..."):
        text = text[:-1]
    text = text.lstrip("=: ").strip()
    while text.startswith("{") and text.endswith("}") and _closes_at(text) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def _closes_at(text: str) -> int:
    """Where the brace that opens `text` is closed; -1 where it is not."""
    depth = 0
    for i, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return i
    return -1


_SHORT_FRAC = re.compile(r"\\frac\s*(?:\{([^{}]*)\}|([0-9a-zA-Z]))\s*(?:\{([^{}]*)\}|([0-9a-zA-Z]))")
_TIGHT = re.compile(r"\s+")


def literal_form(cleaned: str) -> str:
    """A spelling in which equal means written alike: blanks that separate nothing are gone, fractions are braced.

    A blank between two letters or digits stays (1 3/8 is not 13/8), and so does one after a comma (1, 234 is not
    1,234).
    """
    text = _SHORT_FRAC.sub(lambda m: f"\\frac{{{m[1] or m[2] or ''}}}{{{m[3] or m[4] or ''}}}", cleaned)

    def blank(match: re.Match[str]) -> str:
        before, after = text[match.start() - 1 : match.start()], text[match.end() : match.end() + 1]
        return " " if (before.isalnum() or before == ",") and after.isalnum() else ""

    return _TIGHT.sub(blank, text)


def too_deep(text: str) -> bool:
    """Whether brackets of any kind nest beyond `MAX_DEPTH`, or powers pile up beyond it."""
    depth = 0
    for char in text:
        if char in "([{":
            depth += 1
            if depth > MAX_DEPTH:
                return True
        elif char in ")]}":
            depth = max(0, depth - 1)
    return text.count("^") + text.count("\\frac") > 40 * MAX_DEPTH
