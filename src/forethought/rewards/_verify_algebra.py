r"""Exact algebra on answer trees without sympy: quotients of polynomials over Q in formal atoms.

Atoms are letters, pi, e, i, roots of primes, powers with a symbolic or huge exponent, and opaque function values. A
difference that vanishes is a proof of equality; one that does not vanish and holds only independent atoms is a proof
of inequality; else `same` says None. Numbers too large to write out (power towers) stay formal: 7^{7^{7^7}} is an
atom and is never evaluated. Work is bounded by fuel.

Conventions: letters are formal, so identities hold wherever both sides are real (sqrt(1/n) = 1/sqrt(n)); odd roots of
negative numbers are real; letters in an exponent of -1 are integers; log is base ten, ln natural.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from forethought.rewards._verify_lex import Node
from forethought.rewards._verify_text import Limit, Unreadable

MAX_BITS = 65_536  # numbers beyond this are kept as powers
MAX_FUEL = 50_000

Atom = tuple[Any, ...]
Mono = tuple[tuple[Atom, Fraction], ...]
Poly = dict[Mono, Fraction]

PI, E, IMAGINARY = ("pi",), ("e",), ("i",)
HALF, ONE = Fraction(1, 2), Fraction(1)


class Undecided(Exception):
    """The normal form cannot express this; a numeric or symbolic test must decide."""


class Undefined(Exception):
    """Division by zero and the like: equal to nothing."""


class Quotient(NamedTuple):
    num: Poly
    den: Poly


@lru_cache(maxsize=4096)
def _factor(n: int) -> tuple[tuple[tuple[int, int], ...], bool]:
    """Prime factors of n >= 1 by trial division, and whether the factorisation is complete."""
    out, p = [], 2
    while p * p <= n and p < 10_000:
        k = 0
        while n % p == 0:
            n //= p
            k += 1
        if k:
            out.append((p, k))
        p += 1 if p == 2 else 2
    if n == 1:
        return tuple(out), True
    power = 1
    for k in (2, 3, 5, 7):
        while n.bit_length() < 4096 and (root := _integer_root(n, k)) ** k == n:
            n, power = root, power * k
    out.append((n, power))
    return tuple(out), n < 10**8


def _integer_root(n: int, k: int) -> int:
    """floor of the k-th root, by bisection on bits (n >= 1)."""
    root = 0
    for bit in range(n.bit_length() // k, -1, -1):
        if (root | 1 << bit) ** k <= n:
            root |= 1 << bit
    return root


def _order(item: tuple[Any, Any]) -> str:
    return repr(item[0])


def _key(poly: Poly) -> tuple[Any, ...]:
    return tuple(sorted(poly.items(), key=_order))


class Algebra:
    """Normal forms of one comparison. `huge`: a number was too large to write out and stayed formal."""

    def __init__(self, fuel: int = MAX_FUEL):
        self.fuel = fuel
        self.huge = False
        self.loose = False  # an incompletely factored number: inequality is no proof

    def spend(self, amount: int) -> None:
        self.fuel -= amount
        if self.fuel < 0:
            raise Undecided("too many terms")

    # -- monomials and polynomials --
    def mono(self, coef: Fraction, exps: dict[Atom, Fraction]) -> tuple[Fraction, Mono]:
        """Canonical (coefficient, monomial): i^2 = -1, whole powers of primes go into the coefficient unless huge."""
        out: dict[Atom, Fraction] = {}
        huge: list[int] = []
        for atom, e in exps.items():
            if atom == IMAGINARY:
                if e.denominator != 1:
                    raise Undecided("root of i")
                turn = int(e) % 4
                coef = -coef if turn >= 2 else coef
                e = Fraction(turn % 2)
            elif atom[0] == "m1":
                e %= 2
            elif atom[0] == "p":
                whole = math.floor(e)
                if abs(whole) * atom[1].bit_length() > MAX_BITS:
                    self.huge = True
                    huge.append(atom[1])
                elif whole:
                    coef *= Fraction(atom[1]) ** whole
                    e -= whole
            if e:
                out[atom] = e
        for p in huge:  # the same value must not have two spellings
            while coef and coef.numerator % p == 0:
                coef, out[("p", p)] = coef / p, out[("p", p)] + 1
            while coef.denominator % p == 0:
                coef, out[("p", p)] = coef * p, out[("p", p)] - 1
        if max(coef.numerator.bit_length(), coef.denominator.bit_length()) > 4 * MAX_BITS:
            self.huge = True
            raise Undecided("number too long")
        self.spend(1 + coef.numerator.bit_length() // 2000)
        return coef, tuple(sorted(out.items(), key=_order))

    def add_poly(self, a: Poly, b: Poly, sign: int = 1) -> Poly:
        out = dict(a)
        for m, c in b.items():
            total = out.get(m, 0) + sign * c
            if not total:
                out.pop(m, None)
            elif self.huge and any(atom[0] == "p" and e >= 1 for atom, e in m):
                out.pop(m, None)
                total, again = self.mono(Fraction(total), dict(m))
                if again != m:
                    out = self.add_poly(out, {again: total})
                else:
                    out[m] = total
            else:
                out[m] = Fraction(total)
        self.spend(len(b))
        return out

    def mul_poly(self, a: Poly, b: Poly) -> Poly:
        self.spend(2 * len(a) * len(b))
        out: Poly = {}
        for m1, c1 in a.items():
            for m2, c2 in b.items():
                if not m1 or not m2:
                    coef, m = c1 * c2, m1 or m2
                    if self.huge:
                        coef, m = self.mono(coef, dict(m))
                else:
                    exps = dict(m1)
                    for atom, e in m2:
                        exps[atom] = exps.get(atom, Fraction(0)) + e
                    coef, m = self.mono(c1 * c2, exps)
                total = out.get(m, 0) + coef
                if total:
                    out[m] = Fraction(total)
                else:
                    out.pop(m, None)
        return out

    # -- quotients --
    def const(self, value: Fraction | int) -> Quotient:
        return Quotient({(): Fraction(value)} if value else {}, {(): ONE})

    def atom(self, atom: Atom, exponent: Fraction = ONE) -> Quotient:
        coef, m = self.mono(ONE, {atom: exponent})
        return Quotient({m: coef}, {(): ONE})

    def add(self, a: Quotient, b: Quotient, sign: int = 1) -> Quotient:
        if a.den == b.den:
            return Quotient(self.add_poly(a.num, b.num, sign), a.den)
        num = self.add_poly(self.mul_poly(a.num, b.den), self.mul_poly(b.num, a.den), sign)
        return Quotient(num, self.mul_poly(a.den, b.den))

    def mul(self, a: Quotient, b: Quotient) -> Quotient:
        return Quotient(self.mul_poly(a.num, b.num), self.mul_poly(a.den, b.den))

    def inverse(self, a: Quotient) -> Quotient:
        if not a.num:
            raise Undefined("division by zero")
        if len(a.num) == 1:
            ((m, c),) = a.num.items()
            coef, turned = self.mono(1 / c, {atom: -e for atom, e in m})
            return Quotient(self.mul_poly(a.den, {turned: coef}), {(): ONE})
        return Quotient(a.den, a.num)

    def rational(self, a: Quotient) -> Fraction | None:
        """The value where it is a rational number, else None."""
        if not a.num:
            return Fraction(0)
        if len(a.num) == len(a.den) == 1 and () in a.num and () in a.den:
            return a.num[()] / a.den[()]
        return None

    def power(self, base: Quotient, exponent: Quotient) -> Quotient:
        q = self.rational(exponent)
        if q is not None:
            return self.power_q(base, q)
        if len(exponent.den) != 1 or () not in exponent.den:
            raise Undecided("quotient in an exponent")
        if len(base.den) != 1 or not base.num:
            raise Undecided("power of a quotient")
        scale = exponent.den[()]
        terms = {m: c / scale for m, c in exponent.num.items()}
        if len(base.num) != 1:
            return self.power_terms(("o", _key(base.num)), ONE, terms)
        ((m, c),) = base.num.items()
        out = self.const(1)
        if c < 0:
            out = self.power_terms(("m1",), ONE, terms)
            c = -c
        for p, k in self.primes(c):
            out = self.mul(out, self.power_terms(("p", p), Fraction(k), terms))
        for atom, e in m:
            out = self.mul(out, self.power_terms(atom, e, terms))
        return out

    def power_terms(self, atom: Atom, e: Fraction, terms: Poly) -> Quotient:
        """atom^(e * sum of terms), each term an atom ("x", base, monomial) raised to its coefficient."""
        if atom == IMAGINARY:
            raise Undecided("power of i")
        if atom[0] == "x":  # (a^m)^t = a^(m t)
            inner = self.mul_poly({atom[2]: e}, terms)
            return self.power_terms(atom[1], ONE, inner)
        out = self.const(1)
        for m, c in terms.items():
            if not m and atom == ("m1",):
                if c.denominator != 1:
                    raise Undecided("root of -1")
                out = self.mul(out, self.const(-1 if c % 2 else 1))
            else:
                powered = atom if not m else (("m1", m) if atom == ("m1",) else ("x", atom, m))
                out = self.mul(out, self.atom(powered, e * c))
        return out

    def primes(self, value: Fraction) -> list[tuple[int, int]]:
        """Factors of a positive rational as (prime, exponent)."""
        top, sure = _factor(value.numerator)
        bottom, also = _factor(value.denominator)
        self.spend(20)
        self.loose |= not (sure and also)
        return list(top) + [(p, -k) for p, k in bottom]

    def power_q(self, base: Quotient, q: Fraction) -> Quotient:
        if not base.num:
            if q <= 0:
                raise Undefined("zero to a power that is not positive")
            return base
        if q < 0:
            return self.power_q(self.inverse(base), -q)
        if len(base.den) != 1 or () not in base.den:
            over = self.power_q(Quotient(base.den, {(): ONE}), q)
            return self.mul(self.power_q(Quotient(base.num, {(): ONE}), q), self.inverse(over))
        if base.den[()] != 1:
            base = Quotient({m: c / base.den[()] for m, c in base.num.items()}, {(): ONE})
        if len(base.num) > 1:
            return self.power_sum(base, q)
        ((m, c),) = base.num.items()
        if q.denominator == 1 and q * max(c.numerator.bit_length(), c.denominator.bit_length()) <= MAX_BITS:
            coef, exps = c ** int(q), {}
        else:
            coef, exps = ONE, {}
            if c < 0 and q.denominator % 2 == 0:
                if m or q.denominator != 2:
                    return self.atom(("o", _key(base.num)), q)
                exps[IMAGINARY] = Fraction(q.numerator)
            elif c < 0 and q.numerator % 2:
                coef = -ONE
            for p, k in self.primes(abs(c)):
                exps[("p", p)] = k * q
        for atom, e in m:
            if q.denominator % 2 == 0 and e.numerator % 2 == 0 and atom[0] in ("s", "f", "o", "x"):
                raise Undecided("even root of an even power")
            exps[atom] = exps.get(atom, Fraction(0)) + e * q
        coef, m = self.mono(coef, exps)
        return Quotient({m: coef}, {(): ONE})

    def power_sum(self, base: Quotient, q: Fraction) -> Quotient:
        if q.denominator == 1 and q <= 64:
            out = self.const(1)
            for bit in bin(int(q))[2:]:
                out = self.mul(out, out)
                out = self.mul(out, base) if bit == "1" else out
            return out
        content, primitive = self.content(base.num)
        whole = self.atom(("o", _key(primitive)), q)
        return self.mul(self.power_q(self.const(content), q), whole)

    def content(self, poly: Poly) -> tuple[Fraction, Poly]:
        """Positive rational content and the primitive rest."""
        top = math.gcd(*(c.numerator for c in poly.values()))
        bottom = math.lcm(*(c.denominator for c in poly.values()))
        content = Fraction(top, bottom)
        return content, {m: c / content for m, c in poly.items()}

    # -- trees to normal form --
    def form(self, node: Node) -> Quotient:
        """Normal form of a scalar tree.

        Raises:
            Undecided, Undefined, Limit; Unreadable where the tree is no scalar.
        """
        kind, args = node
        if kind == "num":
            return self.const(args[0])
        if kind == "sym":
            return self.atom(("s", args[0]))
        if kind == "const":
            if args[0] == "inf":
                raise Undecided("infinity")
            return self.atom((args[0],))
        if kind == "add":
            out = self.form(args[0])
            for term in args[1:]:
                out = self.add(out, self.form(term))
            return out
        if kind == "mul":
            return self.mul(self.form(args[0]), self.form(args[1]))
        if kind == "div":
            return self.mul(self.form(args[0]), self.inverse(self.form(args[1])))
        if kind == "pow":
            return self.power(self.form(args[0]), self.form(args[1]))
        if kind == "pct":
            return self.mul(self.form(args[0]), self.const(Fraction(1, 100)))
        if kind == "deg":
            return self.mul(self.form(args[0]), self.mul(self.atom(PI), self.const(Fraction(1, 180))))
        if kind == "fn":
            return self.function(args[0], [self.form(a) for a in args[1:]])
        raise Unreadable(f"{kind} inside a formula")

    def function(self, name: str, args: list[Quotient]) -> Quotient:
        values = [self.rational(a) for a in args]
        exact = [v for v in values if v is not None]
        if len(exact) == len(args) and name in _EXACT:
            value = _EXACT[name](*exact)
            if value is not None:
                return self.const(value)
            self.huge |= name in ("factorial", "binom")
        if name == "root":
            return self.power(args[0], self.inverse(args[1]))
        if name == "exp":
            return self.power(self.atom(E), args[0])
        if name == "ln":
            return self.ln(args[0])
        if name in ("log", "logb"):
            base = self.const(10) if name == "log" else args[0]
            return self.mul(self.ln(args[-1]), self.inverse(self.ln(base)))
        if name in _RATIOS:
            top, bottom = (self.const(1) if f == "1" else self.function(f, args) for f in _RATIOS[name])
            return self.mul(top, self.inverse(bottom))
        if name in ("sin", "cos", "abs") and len(args) == 1:
            odd = name == "sin"
            if not args[0].num:
                return self.const(int(name == "cos"))
            if _key(args[0].num)[0][1] < 0:
                turned = self.atom(("f", name, self.opaque(self.mul(args[0], self.const(-1)))))
                return self.mul(turned, self.const(-1)) if odd else turned
        return self.atom(("f", name, *(self.opaque(a) for a in args)))

    def opaque(self, a: Quotient) -> tuple[Any, ...]:
        if len(a.den) == 1 and () in a.den and a.den[()] != 1:
            a = Quotient({m: c / a.den[()] for m, c in a.num.items()}, {(): ONE})
        return _key(a.num), _key(a.den)

    def ln(self, a: Quotient) -> Quotient:
        if not a.num:
            raise Undefined("logarithm of zero")
        if len(a.den) != 1 or () not in a.den:
            over = self.ln(Quotient(a.den, {(): ONE}))
            return self.add(self.ln(Quotient(a.num, {(): ONE})), over, -1)
        scale = a.den[()]
        content, primitive = self.content({m: c / scale for m, c in a.num.items()})
        out = self.const(0)
        for p, k in self.primes(content):
            out = self.add(out, self.mul(self.const(k), self.atom(("f", "ln", ("p", p)))))
        if len(primitive) > 1 or min(primitive.values()) < 0:
            return self.add(out, self.atom(("f", "ln", _key(primitive))))
        for atom, e in next(iter(primitive)):
            out = self.add(out, self.mul(self.const(e), self.ln_atom(atom)))
        return out

    def ln_atom(self, atom: Atom) -> Quotient:
        if atom == E:
            return self.const(1)
        if atom[0] == "x":
            return self.mul(Quotient({atom[2]: ONE}, {(): ONE}), self.ln_atom(atom[1]))
        return self.atom(("f", "ln", atom))

    # -- decisions --
    def difference(self, a: Quotient, b: Quotient) -> Poly:
        return self.add_poly(self.mul_poly(a.num, b.den), self.mul_poly(b.num, a.den), -1)

    def same(self, a: Quotient, b: Quotient) -> bool | None:
        """Whether two normal forms are equal: True and False are proofs, None is "not decided here"."""
        try:
            gap = self.difference(a, b)
        except (Undecided, Limit):
            return None
        if not gap:
            return True
        return None if self.loose or not all(_free(atom) for m in gap for atom, _ in m) else False


def _free(atom: Atom) -> bool:
    """Whether an atom is algebraically independent of the others, so that a non-zero polynomial is not zero."""
    if atom[0] in ("s", "p", "i", "pi", "e"):
        return True
    return (
        atom[0] == "x"
        and _free(atom[1])
        and any(a[0] in ("s", "p") for a, _ in atom[2])
        and all(_free(a) for a, _ in atom[2])
    )


def _small(limit: int, f: Callable[..., int]) -> Callable[..., Fraction | None]:
    def call(*args: Fraction) -> Fraction | None:
        if any(a.denominator != 1 or not 0 <= a <= limit for a in args):
            return None
        return Fraction(f(*(int(a) for a in args)))

    return call


def _whole(f: Callable[..., int]) -> Callable[..., Fraction | None]:
    def call(*args: Fraction) -> Fraction | None:
        return Fraction(f(*(int(a) for a in args))) if args and all(a.denominator == 1 for a in args) else None

    return call


def _mod(a: Fraction, b: Fraction) -> Fraction | None:
    return a % b if b else None


_EXACT: dict[str, Callable[..., Fraction | None]] = {
    "factorial": _small(2000, math.factorial),
    "binom": _small(5000, math.comb),
    "abs": lambda a: abs(a),
    "floor": lambda a: Fraction(math.floor(a)),
    "ceil": lambda a: Fraction(math.ceil(a)),
    "gcd": _whole(math.gcd),
    "lcm": _whole(math.lcm),
    "max": lambda *args: max(args),
    "min": lambda *args: min(args),
    "mod": _mod,
}
_RATIOS = {"tan": ("sin", "cos"), "cot": ("cos", "sin"), "sec": ("1", "cos"), "csc": ("1", "sin")}
