"""Numeric identity test on answer trees: in float64 (no sympy), or with mpmath at 60 digits and more (in the child).

Letters are tried at positive, mixed and whole points; a difference counts where both sides are real. A float result
only ever rejects (and not where cancellation ate the digits); accepting needs exact algebra or the 60-digit test.
"""

from __future__ import annotations

import cmath
import math
from fractions import Fraction
from typing import Any

from forethought.rewards._verify_algebra import Algebra
from forethought.rewards._verify_lex import Node
from forethought.rewards._verify_text import Limit, Unreadable

_VALUES = [Fraction(a, b) for a, b in [(13, 11), (29, 17), (41, 31), (7, 5), (53, 23), (37, 47), (61, 43), (19, 29)]]
_WHOLE = [3, 2, 5, 4, 7, 6, 9, 8]
_NAMES = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "sinh": "sinh", "cosh": "cosh", "tanh": "tanh",
          "sin": "sin", "cos": "cos", "tan": "tan", "exp": "exp", "ln": "log"}  # fmt: skip


class Undefined(Exception):
    """No value at this point."""


def letters(node: Node, into: set[str] | None = None) -> set[str]:
    """Names of the letters in a tree."""
    into = set() if into is None else into
    if node.kind == "sym":
        into.add(node.args[0])
    for child in node.args:
        if isinstance(child, Node):
            letters(child, into)
    return into


def holds(node: Node, kind: str, value: str | None = None) -> bool:
    """Whether a node of this kind (and first argument) occurs in the tree."""
    if node.kind == kind and (value is None or node.args[0] == value):
        return True
    return any(holds(child, kind, value) for child in node.args if isinstance(child, Node))


class Evaluator:
    """Evaluates trees at one point. `lost`: decimal digits that cancellation has eaten so far.

    Args:
        env: letter -> exact value. mp: the mpmath context to use; None means complex float64.
    """

    def __init__(self, env: dict[str, Fraction], mp: Any = None):
        self.env = env
        self.mp = mp
        self.lost = 0.0

    def number(self, value: Fraction) -> Any:
        if self.mp is None:
            return complex(value.numerator / value.denominator)
        return self.mp.mpc(self.mp.mpf(value.numerator) / self.mp.mpf(value.denominator))

    def __call__(self, node: Node) -> Any:
        """The complex value. Raises Undefined, OverflowError, Limit (too large to write), Unreadable (no scalar)."""
        kind, args = node
        if kind == "num":
            return self.number(args[0])
        if kind == "sym":
            return self.number(self.env[args[0]])
        if kind == "const":
            if args[0] == "inf":
                raise Undefined
            lib = self.mp or cmath
            return {"pi": lib.pi, "e": lib.e, "i": 1j}[args[0]] * self.number(Fraction(1))
        if kind == "add":
            values = [self(a) for a in args]
            total, largest = sum(values[1:], values[0]), max(abs(v) for v in values)
            if largest:
                ratio = float(abs(total) / largest)
                self.lost += 99 if ratio == 0 else max(0.0, -math.log10(ratio) - 1)
            return total
        if kind == "mul":
            return self(args[0]) * self(args[1])
        if kind == "div":
            return self.divide(self(args[0]), self(args[1]))
        if kind == "pct":
            return self(args[0]) / 100
        if kind == "deg":
            return self(args[0]) * (self.mp or cmath).pi / 180
        if kind == "pow":
            return self.power(self(args[0]), args[1])
        if kind == "fn":
            return self.function(args)
        raise Unreadable(f"{kind} inside a formula")

    def divide(self, a: Any, b: Any) -> Any:
        if b == 0:
            raise Undefined
        return a / b

    def power(self, base: Any, exponent: Node) -> Any:
        q = exact(exponent)
        if base == 0:
            if q is None or q <= 0:
                raise Undefined
            return base
        value = self(exponent)
        if float(abs(value)) * abs(math.log2(float(abs(base)) or 1e-300)) > (1000 if self.mp is None else 1e6):
            raise Limit("power too large to evaluate")
        if q is not None and base.imag == 0 and base.real < 0 and q.denominator % 2:
            size = self.power(-base, exponent)
            return -size if q.numerator % 2 else size
        if q is not None and q.denominator == 1:
            return base ** int(q)
        return base**value

    def function(self, args: tuple[Any, ...]) -> Any:
        name, lib = args[0], self.mp or cmath
        if name == "root":
            return self.power(self(args[1]), Node("div", (Node("num", (Fraction(1), 0)), args[2])))
        values = [self(a) for a in args[1:]]
        x = values[0]
        if name in ("sin", "cos", "tan") and abs(x) > 1e4:
            self.lost += float(abs(x)) if self.mp is None else math.log10(float(abs(x)))
        if name == "exp" and float(abs(x)) > (700 if self.mp is None else 1e6):
            raise Limit("power too large to evaluate")
        if name in ("log", "logb", "ln") and x == 0 or name in ("log", "ln") and values[-1] == 0:
            raise Undefined
        if name in _NAMES:
            return getattr(lib, _NAMES[name])(x)
        if name == "log":
            return lib.log(x) / lib.log(10)
        if name == "logb":
            return self.divide(lib.log(values[1]), lib.log(x))
        if name in ("cot", "sec", "csc"):
            top = lib.cos(x) if name == "cot" else 1
            return self.divide(top, lib.cos(x) if name == "sec" else lib.sin(x))
        if any(v.imag != 0 for v in values) and name != "abs":
            raise Undefined
        one = self.number(Fraction(1))
        if name == "abs":
            return abs(x) * one
        if name in ("floor", "ceil"):
            return (math.floor(x.real) if name == "floor" else math.ceil(x.real)) * one
        if name == "factorial":
            return self.gamma(x.real + 1) * one
        if name == "binom":
            n, k = (v.real for v in values)
            return self.divide(self.gamma(n + 1), self.gamma(k + 1) * self.gamma(n - k + 1)) * one
        raise Unreadable(f"no numeric value for {name}")

    def gamma(self, x: Any) -> Any:
        if x <= 0 and x == math.floor(x):
            raise Undefined
        if float(abs(x)) > (150 if self.mp is None else 1e5):
            raise Limit("factorial too large to evaluate")
        return math.gamma(x) if self.mp is None else self.mp.gamma(x)


def exact(node: Node) -> Fraction | None:
    """The rational value of a tree without letters, where it is cheap to get."""
    if node.kind == "num":
        return node.args[0]
    try:
        algebra = Algebra(fuel=2000)
        return algebra.rational(algebra.form(node))
    except Exception:  # any failure only means: not a cheap rational
        return None


def points(names: set[str]) -> list[tuple[str, dict[str, Fraction]]]:
    """Deterministic test points: positive, of mixed sign, whole."""
    order = sorted(names)
    out: list[tuple[str, dict[str, Fraction]]] = []
    for shift in range(4):
        out.append(("positive", {n: _VALUES[(i + 2 * shift) % 8] + i // 8 for i, n in enumerate(order)}))
    for shift in range(4):
        signs = {n: (-1) ** (i + shift) for i, n in enumerate(order)}
        out.append(("mixed", {n: signs[n] * _VALUES[(3 * i + shift) % 8] - i // 8 for i, n in enumerate(order)}))
    for shift in range(3):
        out.append(("whole", {n: Fraction(_WHOLE[(i + 3 * shift) % 8] + i // 8) for i, n in enumerate(order)}))
    return out if order else out[:1]


def _values(a: Node, b: Node, env: dict[str, Fraction], mp: Any) -> tuple[Any, Any, float] | None:
    left, right = Evaluator(env, mp), Evaluator(env, mp)
    try:
        return left(a), right(b), max(left.lost, right.lost)
    except (Undefined, OverflowError, ZeroDivisionError, ValueError):
        return None


def agree(a: Node, b: Node, mp: Any = None) -> bool | None:
    """Whether two scalar trees agree at the test points.

    Float64: False is sure, None means "agree, or cannot tell". With mpmath: True and False are final, None means that
    nothing could be evaluated.

    Raises:
        Limit: a number is too large to evaluate. Unreadable: not a scalar, or a function without numeric value.
    """
    names = letters(a) | letters(b)
    imaginary = holds(a, "const", "i") or holds(b, "const", "i")
    digits = 9 if mp is None else 45
    compared, aside = 0, []
    for kind, env in points(names):
        pair = _values(a, b, env, mp)
        if pair is None:
            continue
        real = all(abs(v.imag) <= abs(v) * 10.0**-digits for v in pair[:2])
        if names and not real and not (imaginary and kind == "positive"):
            aside.append((pair, env))
            continue
        same = _same(pair, digits, mp)
        if mp is not None and (same is None or (same and not compared)):
            same = _same_at_250_digits(a, b, pair, env, mp)
        if same is False:
            return False
        compared += same is True
    if not compared:  # nowhere real: compare as complex numbers
        compared = 3 * len(aside)
        if any(_same(pair, digits, mp) is False for pair, _ in aside):
            return False
    return True if mp is not None and compared >= (3 if names else 1) else None


def _same(pair: tuple[Any, Any, float], digits: int, mp: Any) -> bool | None:
    """Relative comparison; None where cancellation or a value near zero leaves it open."""
    x, y, lost = pair
    scale = max(abs(x), abs(y))
    close = bool(abs(x - y) <= 10.0**-digits * scale)
    if mp is None:
        near_zero = min(abs(x), abs(y)) < 1e-9 * scale and scale < 1e-6
        return None if lost > 5 or scale == 0 or near_zero else close
    if close:
        return True
    return None if lost > 10 or scale < 10.0**-digits else False


def _same_at_250_digits(
    a: Node, b: Node, pair: tuple[Any, Any, float], env: dict[str, Fraction], mp: Any
) -> bool | None:
    """A true zero shrinks with the precision and a true difference does not: look again."""
    with mp.workdps(250):
        again = _values(a, b, env, mp)
        if again is None:
            return None
        zero = [
            bool(abs(fine) <= abs(rough) * mp.mpf(10) ** -30) for fine, rough in zip(again[:2], pair[:2], strict=True)
        ]
        if any(zero):
            return all(zero)
        return bool(abs(again[0] - again[1]) <= mp.mpf(10) ** -200 * max(abs(again[0]), abs(again[1])))
