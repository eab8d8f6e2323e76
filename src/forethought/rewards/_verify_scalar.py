"""Single values: numbers under the three modes, formulas, and numbers with a mark (unit, %, degree, base, time)."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from forethought.rewards._verify_algebra import Algebra, Undecided, Undefined
from forethought.rewards._verify_lex import Node
from forethought.rewards._verify_numeric import Evaluator, agree, holds, letters
from forethought.rewards._verify_numeric import Undefined as NoValue
from forethought.rewards._verify_text import Limit, Unreadable

TIERS = ("literal", "normalised", "rational", "decimal", "structural", "algebra", "symbolic")
ROUNDED = Fraction(1, 10**6)  # relative, for a decimal that shows at least six digits
QWEN_TOLERANCE = Fraction(1, 10**4)


class ScalarMixin:
    """Leaf comparisons. `mp`: an mpmath context when running in the killable child, else None."""

    def __init__(self, mode: str, mp: Any = None):
        self.mode = mode
        self.mp = mp
        self.tier = "rational"
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def used(self, tier: str) -> None:
        """Remember the latest (most expensive) tier that a value needed."""
        if TIERS.index(tier) > TIERS.index(self.tier):
            self.tier = tier

    # -- marks --
    def marked(self, g: Node, a: Node) -> bool | None:
        kinds = {g.kind, a.kind}
        if not kinds & {"qty", "pct", "deg", "based", "clock", "ratio", "world"}:
            return self.scalar(g, a)
        self.used("structural")
        if g.kind == a.kind:
            return self.same_mark(g, a)
        if kinds == {"qty", "deg"}:
            g, a = (x.args[0] if x.kind == "qty" and x.args[1].dims == (("rad", 1),) else x for x in (g, a))
            return self.scalar(g, a) if "qty" not in (g.kind, a.kind) else False
        mark, bare = (g, a) if g.kind in ("qty", "pct", "deg", "based", "clock", "ratio", "world") else (a, g)
        turned = mark is a
        if bare.kind in ("qty", "pct", "deg", "based", "clock", "ratio", "world"):
            return False

        def compare(x: Node, y: Node) -> bool | None:
            return self.scalar(y, x) if turned else self.scalar(x, y)

        if mark.kind == "pct":
            result = compare(Node("pct", mark.args), bare)
            large = all((v := self.rational(n)) is not None and abs(v) > 1 for n in (mark.args[0], bare))
            return compare(mark.args[0], bare) if result is False and large else result
        if mark.kind == "deg":
            return compare(mark, bare) if holds(bare, "const", "pi") else compare(mark.args[0], bare)
        if mark.kind == "qty":
            return compare(mark.args[0], bare)
        if mark.kind == "based":
            if turned:  # an explicit base in the answer: its value counts
                return self.scalar(bare, Node("num", (_based_value(mark), 0)))
            return bare.kind == "num" and str(bare.args[0]) == mark.args[0]
        if mark.kind == "ratio" and len(mark.args) == 2:
            return compare(Node("div", mark.args), bare)
        return False

    def same_mark(self, g: Node, a: Node) -> bool | None:
        if g.kind == "qty":
            (gv, gu), (av, au) = g.args, a.args
            if gu.dims != au.dims:
                return False
            if gu.factor == au.factor:
                return self.scalar(gv, av)
            return self.scalar(*(Node("mul", (v, Node("num", (u.factor, 0)))) for v, u in ((gv, gu), (av, au))))
        if g.kind in ("pct", "deg"):
            return self.scalar(g.args[0], a.args[0])
        if g.kind == "based":
            return g.args == a.args or (g.args[1] != a.args[1] and _based_value(g) == _based_value(a))
        if g.kind == "clock":
            (gs, gm), (as_, am) = g.args, a.args
            half_day = 12 * 3600
            return gs == as_ or (gm != am and gs % half_day == as_ % half_day and (as_ if gm else gs) <= half_day)
        if g.kind == "ratio":
            if len(g.args) != len(a.args):
                return False
            cross = [
                self.scalar(Node("mul", (g.args[0], y)), Node("mul", (a.args[0], x)))
                for x, y in zip(g.args[1:], a.args[1:], strict=True)
            ]
            return False if False in cross else (None if None in cross else True)
        return g.args == a.args

    # -- values --
    def rational(self, node: Node) -> Fraction | None:
        algebra = Algebra()
        try:
            return algebra.rational(algebra.form(node))
        except (Undecided, Undefined, Limit, Unreadable):
            return None

    def scalar(self, g: Node, a: Node) -> bool | None:
        """Whether two values are equal: exactly, as rounded decimals, by algebra, or (in the child) to 250 digits."""
        if self.mode == "train-strict":
            refused = _strict(g, a)
            if refused is not None:
                return refused
        algebra = Algebra()
        forms: list[Any] = []
        for node in (g, a):
            try:
                forms.append(algebra.form(node))
            except Undefined:
                return False
            except Undecided:
                forms.append(None)
            except Limit as limit:
                self.note(f"limit: {limit}")
                forms.append(None)
            except Unreadable:
                return g == a  # a word or a relation inside a formula
        gq, aq = (None if f is None else algebra.rational(f) for f in forms)
        if gq is not None and aq is not None:
            if gq == aq:
                return True
            return self.decimals(g, a, gq, aq)
        self.used("algebra")
        verdict = None if None in forms else algebra.same(*forms)
        if verdict is True:
            return True
        if algebra.huge:
            self.note("limit: a number too large to write out was compared as written")
            return False
        if verdict is False:
            return self.rounded(g, a, gq, aq)
        return self.numeric(g, a, gq, aq)

    def numeric(self, g: Node, a: Node, gq: Fraction | None, aq: Fraction | None) -> bool | None:
        try:
            result = agree(g, a, self.mp)
        except Limit as limit:
            self.note(f"limit: {limit}")
            return False
        except Unreadable:
            return None
        if result is False:
            return self.rounded(g, a, gq, aq)
        self.used("symbolic")
        return result

    def near(self, g: Node, a: Node) -> bool:
        """Whether two constants lie within one percent (for "a = b, about c")."""
        x, y = _float(g), _float(a)
        return x is not None and y is not None and abs(x - y) <= 0.01 * max(abs(x), abs(y))

    def decimals(self, g: Node, a: Node, gq: Fraction, aq: Fraction) -> bool:
        """Two unequal rationals: equal only as a rounding."""
        self.used("decimal")
        gap, scale = abs(gq - aq), max(abs(gq), abs(aq))
        if self.mode == "eval-qwen":
            plain = _digits(g) >= 0 and _digits(a) >= 0
            golds = (gq, gq / 100, gq * 100) if plain else (gq,)
            return any(abs(v - aq) <= QWEN_TOLERANCE * max(abs(v), abs(aq)) for v in golds)
        shown = (_digits(g), _digits(a))
        if min(shown) >= 0:  # two written numbers: only the noise of a printed float is forgiven
            return max(shown) >= 15 and gap <= scale / 10**12
        if self.mode == "train-strict":
            return False
        for digits, other, other_node in ((shown[0], aq, a), (shown[1], gq, g)):
            if digits >= 6 and _digits(other_node) < 0 and not _fits(other, digits):
                return gap <= ROUNDED * scale
        return False

    def rounded(self, g: Node, a: Node, gq: Fraction | None, aq: Fraction | None) -> bool:
        """An irrational number against a decimal that shows at least six digits (eval-qwen: any, train-strict: never)."""
        if self.mode == "train-strict":
            return False
        qwen = self.mode == "eval-qwen"
        if not qwen and (gq is None) == (aq is None):
            return False
        if not qwen and _digits(g if aq is None else a) < 6:
            return False
        x, y = _float(g), _float(a)
        if x is None or y is None:
            return False
        self.used("decimal")
        return abs(x - y) <= float(QWEN_TOLERANCE if qwen else ROUNDED) * max(abs(x), abs(y))


def _float(node: Node) -> complex | None:
    if letters(node):
        return None
    try:
        return Evaluator({})(node)
    except (ArithmeticError, ValueError, NoValue, Limit, Unreadable):
        return None


def _plain(node: Node) -> Node:
    """Without a sign in front and without a power of ten behind."""
    if node.kind == "mul" and node.args[0].kind == "num" and node.args[1].kind == "pow":
        base, exponent = node.args[1].args
        if base.kind == "num" and base.args[0] == 10 and exponent.kind == "num":
            return node.args[0]
    if node.kind == "mul" and node.args[0] == Node("num", (Fraction(-1), 0)):
        return _plain(node.args[1])
    return node.args[0] if node.kind == "pct" else node


def _digits(node: Node) -> int:
    """Significant digits of a written decimal; 0 for a whole number; -1 for anything else (1/3, 0.333..., 2+2)."""
    node = _plain(node)
    if node.kind != "num":
        return -1
    value, shown = node.args
    return shown if shown or value.denominator == 1 else -1


def _fits(value: Fraction, digits: int) -> bool:
    """Whether a rational can be written exactly with this many significant digits."""
    twos = fives = 0
    bottom = value.denominator
    if bottom.bit_length() > 400:
        return False
    while bottom % 2 == 0:
        bottom, twos = bottom // 2, twos + 1
    while bottom % 5 == 0:
        bottom, fives = bottom // 5, fives + 1
    if bottom != 1:
        return False
    top = abs(value.numerator) * 10 ** max(twos, fives) // value.denominator
    while top and top % 10 == 0:
        top //= 10
    return top < 10**digits


def _strict(g: Node, a: Node) -> bool | None:
    """Strict mode's own rules: two fractions must be written alike; a whole number is equal only to a written one."""
    gf, af = _fraction(g), _fraction(a)
    if gf is not None and af is not None:
        return gf == af
    if _is_whole(g) != _is_whole(a):
        return False
    return None


def _fraction(node: Node) -> tuple[Fraction, Fraction] | None:
    """(top, bottom) of a plain fraction of whole numbers, the sign on top."""
    sign = 1
    if node.kind == "mul" and node.args[0] == Node("num", (Fraction(-1), 0)):
        sign, node = -1, node.args[1]
    if node.kind == "div" and all(_is_whole(n) and not n.args[1] for n in node.args):
        top, bottom = (n.args[0] for n in node.args)
        return sign * top, bottom
    return None


def _is_whole(node: Node) -> bool:
    return node.kind == "num" and node.args[0].denominator == 1


def _based_value(node: Node) -> Fraction:
    digits, base = node.args
    whole, _, part = digits.lstrip("-").partition(".")
    value = Fraction(int(whole + part, base), base ** len(part))
    return -value if digits.startswith("-") else value
