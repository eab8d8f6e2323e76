"""Tokens and numbers of an answer: the lexer under `_verify_parse`, and the node type of its trees."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any, NamedTuple

from forethought.rewards._verify_text import MAX_DIGITS, Limit, Unreadable
from forethought.rewards._verify_units import Unit, is_unit_word


class Node(NamedTuple):
    kind: str
    args: tuple[Any, ...] = ()


ZERO, ONE, TWO = (Node("num", (Fraction(n), 0)) for n in (0, 1, 2))
DOTS, EMPTY, INF = Node("dots"), Node("empty"), Node("const", ("inf",))


class Token(NamedTuple):
    kind: str  # num | word | cmd | op | text | end
    text: str
    blank: bool  # whether a blank stands before it
    value: Any = None
    at: int = 0  # where it starts in the text


FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log lg exp gcd lcm min max det deg dim arg".split()
)
ALIASES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "lg": "log", "cosec": "csc"}
WORDS = {  # plain words that are commands
    "pi": "pi", "sqrt": "sqrt", "cbrt": "cbrt", "inf": "infty", "infinity": "infty", "infty": "infty", "oo": "infty",
    "theta": "theta", "alpha": "alpha", "beta": "beta", "gamma": "gamma", "lambda": "lambda", "phi": "phi",
    "omega": "omega", "sigma": "sigma", "or": "lor", "and": "land", "abs": "abs", "binom": "binom", "union": "cup",
    "frac": "frac", "times": "times", "pm": "pm", "in": "in",
}  # fmt: skip
RELATIONS = {"=": "=", "==": "=", "<": "<", ">": ">", "<=": "<=", ">=": ">=", "!=": "!=", "le": "<=", "ge": ">=",
              "ne": "!=", "approx": "~", "simeq": "~", "sim": "~", "in": "in", "notin": "notin", "equiv": "=",
              "implies": "=>", "Rightarrow": "=>", "to": "->", "rightarrow": "->"}  # fmt: skip
TEXT_COMMANDS = r"text|mbox|textbf|textrm|textit|textsf|texttt|textnormal|emph|mathrm|hbox|operatorname"
SYMBOLS = frozenset(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau upsilon"
    " phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell hbar".split()
)
_LEX = re.compile(
    rf"""(?P<blank>\s+)
    |(?P<rep>(?:\d+)?\.\d*(?:\\(?:overline|bar)\s*(?:\{{\s*\d+\s*\}}|\d)|\(\d+\)(?!\s*[\w(^])))
    |(?P<dotted>(?:\d+)?\.\d*\\dot\s*(?:\{{\d\}}|\d)(?:\d*\\dot\s*(?:\{{\d\}}|\d))?)
    |(?P<trail>(?:\d+)?\.\d+(?:\\ldots(?![A-Za-z])|\.\.\.))
    |(?P<sci>(?:\d+(?:\.\d+)?|\.\d+)[eE][+-]?\d+(?![\w.]))
    |(?P<num>\d+(?:\.\d+)?|\.\d+)
    |(?P<text>\\(?:{TEXT_COMMANDS})\*?\s*\{{)
    |(?P<world>\\mathbb\s*\{{?\s*[A-Z]\s*\}}?)
    |(?P<env>\\(?:begin|end)\s*\{{[a-zA-Z]+\*?\}})
    |(?P<row>\\\\|\\cr(?![A-Za-z]))
    |(?P<cmd>\\[A-Za-z]+)
    |(?P<esc>\\[{{}}%&_\#|])
    |(?P<word>[A-Za-z]+)
    |(?P<op>\*\*|<=|>=|!=|==|\.\.\.|[-+*/^_=<>(){{}}\[\],;:!|%&'])""",
    re.X,
)
_GROUPS = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+(?!\d)(?!,\d)(?:\.\d+)?")


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise Limit(f"number of {len(digits)} digits (limit {MAX_DIGITS})")
    return int(digits or "0")


def _decimal(text: str) -> tuple[Fraction, int]:
    """Exact value and, for a decimal, the number of significant digits shown."""
    whole, _, part = text.partition(".")
    value = Fraction(_integer(whole + part), 10 ** len(part))
    return value, len((whole + part).lstrip("0")) if part else 0


def _repeating(text: str) -> Fraction:
    whole, _, rest = text.partition(".")
    if "dot" in text:
        pieces = re.findall(r"\\dot\s*\{?(\d)\}?|(\d)", rest)
        first = next(i for i, (dotted, _) in enumerate(pieces) if dotted)
        digits = "".join(dotted or plain for dotted, plain in pieces)
        fixed, block = digits[:first], digits[first:]
    else:
        match = re.fullmatch(r"(\d*)\D+(\d+)\D*", rest)
        assert match is not None
        fixed, block = match.groups()
    start = Fraction(_integer(whole + fixed), 10 ** len(fixed))
    return start + Fraction(_integer(block), (10 ** len(block) - 1) * 10 ** len(fixed))


def _trailing(text: str) -> Node:
    """0.333... : repeats where the shown digits end in a block seen at least twice (three times for one digit)."""
    digits = re.sub(r"\\ldots|\.\.\.$", "", text)
    whole, _, part = digits.partition(".")
    for size in range(1, min(len(part) // 2, 12) + 1):
        block, times = part[-size:], 3 if size == 1 else 2
        if part.endswith(block * times):
            while part.endswith(block * 2):
                part = part[: -len(block)]
            return Node("num", (_repeating(f"{whole}.{part[: -len(block)]}({block})"), 0))
    return Node("num", _decimal(digits))


def tokenize(text: str) -> list[Token]:
    """Tokens of a cleaned answer. Raises `Unreadable` on a character outside the notation."""
    out: list[Token] = []
    at, blank, brackets = 0, False, [False]
    while at < len(text):
        match = _LEX.match(text, at)
        if match is None:
            raise Unreadable(f"character {text[at]!r}")
        kind, piece, start = match.lastgroup or "", match.group(), at
        at = match.end()
        if kind == "blank":
            blank = True
            continue
        value: Any = None
        if kind == "num":
            grouped = None if brackets[-1] else _GROUPS.match(text, start)
            if grouped:
                piece, at = grouped.group(), grouped.end()
            value, kind = Node("num", _decimal(piece.replace(",", ""))), "num"
        elif kind in ("rep", "dotted"):
            value, kind = Node("num", (_repeating(piece), 0)), "num"
        elif kind == "trail":
            value, kind = _trailing(piece), "num"
        elif kind == "sci":
            mantissa, exponent = re.split("[eE]", piece)
            number, shown = _decimal(mantissa)
            power = Node("pow", (Node("num", (Fraction(10), 0)), Node("num", (Fraction(_integer_signed(exponent)), 0))))
            value, kind = Node("mul", (Node("num", (number, shown)), power)), "num"
        elif kind == "text":
            end = _closing(text, at)
            piece, at = text[at:end].strip(), end + 1
        elif kind == "world":
            value, kind = piece.strip("} ")[-1], "cmd"
            piece = "mathbb"
        elif kind == "cmd":
            piece = piece[1:]
        elif kind == "word":
            after_number = bool(out) and out[-1].kind == "num" and is_unit_word(piece)  # 5 in, 5 min
            if (piece in WORDS or piece in FUNCTIONS or piece in ALIASES) and not after_number:
                kind, piece = "cmd", WORDS.get(piece, piece)
        else:
            kind = "op" if kind != "env" else "env"
            if piece == "**":
                piece = "^"
            elif piece == "!=" and out and out[-1].kind == "num" and not blank:
                out.append(Token("op", "!", False, None, start))  # 5!=120
                piece = "="
        if piece in ("(", "[", "\\{"):
            brackets.append(True)
        elif piece == "{":
            brackets.append(False)
        elif piece in (")", "]", "\\}", "}") and len(brackets) > 1:
            brackets.pop()
        out.append(Token(kind, piece, blank, value, start))
        blank = False
    return out


def _integer_signed(text: str) -> int:
    return -_integer(text[1:]) if text[0] == "-" else _integer(text.lstrip("+"))


def _closing(text: str, at: int) -> int:
    depth = 1
    for i in range(at, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return i
    raise Unreadable("a brace is not closed")


def negate(node: Node) -> Node:
    if node.kind == "num":
        return Node("num", (-node.args[0], node.args[1]))
    if node.kind in ("qty", "pct", "deg"):
        return Node(node.kind, (negate(node.args[0]), *node.args[1:]))
    return Node("mul", (Node("num", (Fraction(-1), 0)), node))


def quantity(node: Node, unit: Unit) -> Node:
    """value with unit; percent words become `pct`, degree words `deg`, number words multiply."""
    if unit.scale != 1:
        node = Node("mul", (node, Node("num", (Fraction(unit.scale), 0))))
        unit = unit._replace(scale=1)
    if unit.dims == (("percent", 1),):
        return Node("pct", (node,))
    if unit.dims == (("deg", 1),):
        return Node("deg", (node,)) if node.kind != "deg" else node
    if node.kind == "qty":
        return node if unit.dims in ((), node.args[1].dims) else Node("qty", (node.args[0], unit))
    return Node("qty", (node, unit)) if unit.dims else node


def signed(node: Node, sign: int) -> Node:
    """The tree with every plus-minus read as this sign (and every minus-plus as the other)."""
    if node.kind == "pm":
        inner = signed(node.args[1], sign)
        return inner if node.args[0] * sign > 0 else negate(inner)
    return Node(node.kind, tuple(signed(c, sign) if isinstance(c, Node) else c for c in node.args))
