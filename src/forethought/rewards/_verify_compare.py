"""Structural comparison of two answers: sets, tuples, intervals, matrices, equations, inequalities, units, numbers.

Answers are three-valued: True and False are decided; None means that only a symbolic test (in the killable child) can
tell. The policy for debatable pairs is written in `docs/decisions.md` and, in short:

- a decimal with a point equals a number that it need not round only exactly; else within 1e-6 relative, if it shows at
  least six digits (0.333333 is 1/3, 0.3333 is not);
- a missing unit, degree, percent or base mark is forgiven, a different one is not; quantities are converted; p% is
  p/100, and p only where both numbers are above 1;
- "name = value" equals the bare value; two different one-letter names are different; an equation equals its multiples,
  but a gold that is solved for its letter asks for a solved answer (2x = 10 is no answer to x = 5);
- a bare list has no order and equals the set or the tuple (in this order) of its items; a set is no tuple; two round
  brackets mean a pair or an open interval; with three entries and more the kind of bracket means nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from fractions import Fraction

from forethought.rewards._verify_algebra import Algebra, Poly, Quotient, Undecided, Undefined
from forethought.rewards._verify_answer import NUMBER_WORDS
from forethought.rewards._verify_lex import DOTS, EMPTY, Node, signed
from forethought.rewards._verify_numeric import holds, letters
from forethought.rewards._verify_regions import Region, is_infinite, is_region, region
from forethought.rewards._verify_scalar import ScalarMixin
from forethought.rewards._verify_text import Limit, Unreadable

MAX_ITEMS = 24  # items of a set that are matched one by one
MAX_VALUES = 2_000  # numbers in two sets that are compared as multisets
_ORDERED = ("<", "<=", ">", ">=")


def every(results: Iterable[bool | None]) -> bool | None:
    """Three-valued "and", stopping at the first False."""
    out: bool | None = True
    for result in results:
        if result is False:
            return False
        if result is None:
            out = None
    return out


class Comparison(ScalarMixin):
    """Compares trees under one mode. `equal(gold, answer)` is the entry; `tier` and `notes` say how it was decided."""

    def equal(self, g: Node, a: Node) -> bool | None:
        """Whether two answers are equal: three-valued, see the module."""
        if g == a and not holds(g, "rel"):
            return True
        g, a = _unwrap(g), _unwrap(a)
        if g.kind == "text" or a.kind == "text":
            return self.text(g, a)
        if g == EMPTY or a == EMPTY:
            other = a if g == EMPTY else g
            return other == EMPTY or (is_region(other) and self.regions(g, a))
        handled, result = self.named(g, a)
        if handled:
            return result
        if is_region(g) or is_region(a):
            return self.regions(g, a)
        if g.kind == "rel" or a.kind == "rel":
            return self.relations(g, a)
        if _has_dots(g) or _has_dots(a):
            return self.sequences(g, a)
        if self.mode != "eval-qwen" and (_is_many(g) or _is_many(a)):
            return self.many(g, a)
        if "matrix" in (g.kind, a.kind):
            return self.matrices(g, a)
        if g.kind in ("tuple", "list", "set") or a.kind in ("tuple", "list", "set"):
            return self.tuples(g, a)
        return self.marked(g, a)

    # -- words --
    def text(self, g: Node, a: Node) -> bool:
        if g.kind == a.kind == "text":
            return _word(g) == _word(a)
        word, other = (g, a) if g.kind == "text" else (a, g)
        if other.kind == "rel" and other.args[0] == ("=",) and other.args[1].kind == "name":
            return self.equal(word, other.args[2]) is True
        number = NUMBER_WORDS.get(_word(word))
        return number is not None and other.kind == "num" and other.args[0] == number

    # -- names and equations --
    def named(self, g: Node, a: Node) -> tuple[bool, bool | None]:
        """(True, result) for pairs in which a side is "name = value" or a list of such, (False, None) for others."""
        gd, ad = _assignments(g), _assignments(a)
        if gd is not None and ad is not None:
            return True, set(gd) == set(ad) and every(self.equal(gd[k], ad[k]) for k in gd)
        if gd is not None or ad is not None:
            return True, self.assigned(gd, a) if gd is not None else self.assigned(ad or {}, g, turned=True)
        gn, gv = self.split(g)
        an, av = self.split(a)
        if gn is None and an is None:
            return False, None
        if gn is not None and an is not None:
            return True, self.both_named(g, a, (gn, gv), (an, av))
        if gn is None:
            return True, self.equations(g, a) if _is_equation(g) else self.equal(g, av)
        if not _is_equation(a):
            return True, self.equal(gv, a)
        return True, self.equations(g, a) if _is_scalar(gv) and letters(gv) else self.chain(gv, a)

    def assigned(self, values: dict[str, Node], other: Node, turned: bool = False) -> bool | None:
        """x = 2, y = 3 against (2, 3): the values in the order of their names."""
        if other.kind not in ("tuple", "list"):
            return False
        ordered = Node("tuple", ("(", ")", *(values[name] for name in sorted(values))))
        return self.equal(other, ordered) if turned else self.equal(ordered, other)

    def both_named(self, g: Node, a: Node, gold: tuple[str, Node], answer: tuple[str, Node]) -> bool | None:
        (gn, gv), (an, av) = gold, answer
        if gn == an or _is_word(gn) or _is_word(an):
            return self.equal(gv, av)
        if not (_is_scalar(gv) and _is_scalar(av)):
            return False
        if gn.endswith(")") != an.endswith(")") and letters(gv) == letters(av):  # y = ... against f(x) = ...
            return self.equal(gv, av)
        return self.equations(g, a) if letters(gv) and letters(av) else False

    def split(self, node: Node) -> tuple[str | None, Node]:
        """(name, value) of "name = value", "name in set", "value = x", or a list of values for one name."""
        if node.kind == "list" and node.args[1:]:
            pairs = [self.split(item) for item in node.args[1:]]
            names = {name for name, _ in pairs if name is not None}
            if len(names) == 1 and pairs[0][0] is not None and not any(is_region(v) for _, v in pairs):
                return pairs[0][0], Node("list", (node.args[0], *(value for _, value in pairs)))
            return None, node
        if node.kind != "rel" or node.args[0][0] not in ("=", "in", "~"):
            return None, node
        ops, sides = node.args[0], node.args[1:]
        if sides[0].kind == "name":
            return sides[0].args[0], sides[1] if len(ops) == 1 else self.collapse(Node("rel", (ops[1:], *sides[1:])))
        if ops == ("=",) and sides[1].kind == "sym" and not letters(sides[0]):
            return sides[1].args[0], sides[0]
        return None, node

    def collapse(self, chain: Node) -> Node:
        """The value of `a = b = c`: its last part where all parts are equal (an approximation: the exact part)."""
        ops, sides = chain.args[0], chain.args[1:]
        if not set(ops) <= {"=", "~"} or not all(_is_scalar(s) for s in sides):
            return chain
        for op, left, right in zip(ops, sides, sides[1:], strict=False):
            if (self.near(left, right) if op == "~" else self.scalar(left, right)) is False:
                return chain
        return sides[ops.index("~")] if "~" in ops else sides[-1]

    def chain(self, g: Node, a: Node) -> bool | None:
        """A bare gold against an unnamed chain: equal to its value if the chain holds."""
        value = self.collapse(a)
        if value is a:
            return False
        if "~" in a.args[0] and self.equal(g, a.args[-1]):
            return True
        return self.equal(g, value)

    def relations(self, g: Node, a: Node) -> bool | None:
        if g.kind != "rel":
            return self.chain(g, a)
        if a.kind != "rel":
            return self.chain(a, g)
        if _is_equation(g) and _is_equation(a):
            return self.equations(g, a)
        return self.inequalities(g, a)

    def equations(self, g: Node, a: Node) -> bool | None:
        """Two equations are equal where one side minus the other is the same up to a constant factor."""
        g, a = _named_as_letter(g), _named_as_letter(a)
        if not (_is_equation(g) and _is_equation(a)) or len(g.args) != 3 or len(a.args) != 3:
            return None if g == a else False
        if not all(_is_scalar(s) for s in (*g.args[1:], *a.args[1:])):
            return every(self.equal(x, y) for x, y in zip(g.args[1:], a.args[1:], strict=True))
        return self.proportional(g, a) is not None

    def inequalities(self, g: Node, a: Node) -> bool | None:
        gops, aops = g.args[0], a.args[0]
        if len(gops) == len(aops) == 1 and gops[0] in _ORDERED and aops[0] in _ORDERED:
            (gop, g1, g2), (aop, a1, a2) = (gops[0], *g.args[1:]), (aops[0], *a.args[1:])
            if gop[0] == "<":
                gop, g1, g2 = ">" + gop[1:], g2, g1
            if aop[0] == "<":
                aop, a1, a2 = ">" + aop[1:], a2, a1
            if gop != aop:
                return False
            factor = self.proportional(Node("rel", (("=",), g1, g2)), Node("rel", (("=",), a1, a2)))
            return factor is not None and factor > 0
        gops, gsides = _rising(gops, g.args[1:])
        aops, asides = _rising(aops, a.args[1:])
        return gops == aops and every(self.equal(x, y) for x, y in zip(gsides, asides, strict=True))

    def proportional(self, g: Node, a: Node) -> Fraction | None:
        """The rational k with g1 - g2 = k (a1 - a2), or 1 for an irrational constant; None where there is none."""
        algebra = Algebra()
        try:
            gp, ap = (algebra.difference(algebra.form(side.args[1]), algebra.form(side.args[2])) for side in (g, a))
            if not gp or not ap:
                return None
            gparts, aparts = _by_letters(gp), _by_letters(ap)
            if not gparts or set(gparts) != set(aparts):
                return None
            lead = min(gparts, key=repr)
            for part in gparts:
                left = algebra.mul_poly(gparts[part], aparts[lead])
                if algebra.add_poly(left, algebra.mul_poly(aparts[part], gparts[lead]), -1):
                    return None
            one = {(): Fraction(1)}
            k = algebra.rational(algebra.mul(Quotient(gparts[lead], one), algebra.inverse(Quotient(aparts[lead], one))))
            return Fraction(1) if k is None else k
        except (Undecided, Undefined, Limit, Unreadable):
            return None

    # -- sets of numbers --
    def regions(self, g: Node, a: Node) -> bool | None:
        try:
            gr, ar = region(g), region(a)
        except Unreadable:
            if g.kind == a.kind == "rel":
                solved = _try_region(g) is not None
                return False if solved and _try_region(a) is None else self.inequalities(g, a)
            if g.kind == a.kind and len(g.args) == len(a.args):
                pairs = zip(g.args, a.args, strict=True)
                return every(self.equal(x, y) if isinstance(x, Node) else x == y for x, y in pairs)
            return False
        if gr.name and ar.name and gr.name != ar.name:  # a <= b against b >= a
            return self.inequalities(g, a) if g.kind == a.kind == "rel" else False
        if len(gr.parts) != len(ar.parts):
            return False
        return every(self.ends(p, q) for p, q in zip(gr.parts, ar.parts, strict=True))

    def ends(self, p, q) -> bool | None:
        if (p.low_closed, p.high_closed) != (q.low_closed, q.high_closed):
            return False
        return every(self.end(x, y) for x, y in ((p.low, q.low), (p.high, q.high)))

    def end(self, x: Node, y: Node) -> bool | None:
        if is_infinite(x) or is_infinite(y):
            return is_infinite(x) == is_infinite(y)
        return self.marked(x, y)

    # -- several values --
    def many(self, g: Node, a: Node) -> bool | None:
        """Sets, bare lists and plus-minus: the same values in any order; a tuple against a list keeps the order."""
        if g.kind == "tuple" or a.kind == "tuple":
            bare = a if g.kind == "tuple" else g
            return self.tuples(g, a) if bare.kind == "list" else False
        gs, as_ = _variants(g), _variants(a)
        both_sets = "set" in (g.kind, a.kind) or holds(g, "pm") or holds(a, "pm")
        if len(gs) + len(as_) <= MAX_VALUES and self.same_numbers(gs, as_, both_sets):
            return True
        if max(len(gs), len(as_)) > MAX_ITEMS:
            self.note(f"limit: {max(len(gs), len(as_))} items in a set (limit {MAX_ITEMS})")
            return False
        if both_sets:
            gs, as_ = self.distinct(gs), self.distinct(as_)
        return self.match(gs, as_)

    def same_numbers(self, gs: list[Node], as_: list[Node], as_sets: bool) -> bool:
        """Whether all items are rational numbers and the same ones: fast, also for many items."""
        sides = [[self.rational(x) if _is_scalar(x) else None for x in items] for items in (gs, as_)]
        if any(value is None for values in sides for value in values):
            return False
        left, right = (Counter(values) for values in sides)
        return set(left) == set(right) if as_sets else left == right

    def distinct(self, items: list[Node]) -> list[Node]:
        out: list[Node] = []
        for item in items:
            if not any(self.equal(item, seen) for seen in out):
                out.append(item)
        return out

    def match(self, gs: list[Node], as_: list[Node]) -> bool | None:
        """Whether the items can be paired off; None where that hangs on undecided pairs."""
        if len(gs) != len(as_):
            return False
        table = [[self.equal(x, y) for y in as_] for x in gs]
        if _pair_off([[cell is True for cell in row] for row in table]):
            return True
        return None if _pair_off([[cell is not False for cell in row] for row in table]) else False

    def tuples(self, g: Node, a: Node) -> bool | None:
        gi, ai = _items(g), _items(a)
        if gi is None or ai is None or len(gi) != len(ai):
            return False
        if self.mode != "eval-qwen" and g.kind == a.kind == "tuple" and len(gi) == 2 and g.args[:2] != a.args[:2]:
            vectors = {("langle", "rangle"), ("(", ")")}
            if not {g.args[:2], a.args[:2]} <= vectors:
                return False
        return every(self.equal(x, y) for x, y in zip(gi, ai, strict=True))

    def matrices(self, g: Node, a: Node) -> bool | None:
        g, a = _as_matrix(g, a), _as_matrix(a, g)
        if g.kind != "matrix" or a.kind != "matrix" or g.args[0] != a.args[0] or len(g.args) != len(a.args):
            return False
        return every(self.equal(x, y) for x, y in zip(g.args[1:], a.args[1:], strict=True))

    def sequences(self, g: Node, a: Node) -> bool | None:
        """1, 4, 9, ..., n^2: the shown terms must agree in place; more terms may be shown if they go on evenly."""
        gi, ai = _items(g), _items(a)
        if gi is None or ai is None or gi.count(DOTS) != 1 or ai.count(DOTS) != 1:
            return False
        if g.kind != a.kind and "list" not in (g.kind, a.kind):
            return False
        gh, gt = gi[: gi.index(DOTS)], gi[gi.index(DOTS) + 1 :]
        ah, at = ai[: ai.index(DOTS)], ai[ai.index(DOTS) + 1 :]
        short, long = sorted((gh, ah), key=len)
        if len(gt) != len(at) or len(short) < 2 or not self.continues(short, long[len(short) :]):
            return False
        return every(self.equal(x, y) for x, y in [*zip(gh, ah, strict=False), *zip(gt, at, strict=True)])

    def continues(self, shown: list[Node], more: list[Node]) -> bool:
        """Whether further terms keep the common difference or the common ratio of those shown."""
        if not more:
            return True
        terms = [self.rational(t) for t in (*shown, *more)]
        if any(t is None for t in terms):
            return False
        values = [t for t in terms if t is not None]
        steps = {y - x for x, y in zip(values, values[1:], strict=False)}
        ratios = {y / x for x, y in zip(values, values[1:], strict=False) if x}
        return len(steps) == 1 or (len(ratios) == 1 and 0 not in values)


# -- shapes ------------------------------------------------------------------------------------------------------


def _unwrap(node: Node) -> Node:
    """P(2,5) is the tuple, a scalar times a matrix is a matrix, a side condition "k in Z" is dropped."""
    if node.kind == "mul" and len(node.args) == 2:
        left, right = node.args
        if right.kind == "tuple" and left.kind == "sym":
            return right
        for scale, matrix in ((left, right), (right, left)):
            if matrix.kind == "matrix" and _is_scalar(scale):
                cells = (Node("mul", (scale, cell)) for cell in matrix.args[1:])
                return Node("matrix", (matrix.args[0], *cells))
    if node.kind == "div" and node.args[0].kind == "matrix":
        cells = (Node("div", (cell, node.args[1])) for cell in node.args[0].args[1:])
        return Node("matrix", (node.args[0].args[0], *cells))
    if node.kind == "list":
        kept = [
            i for i in node.args[1:] if not (i.kind == "rel" and i.args[0] == ("in",) and i.args[2].kind == "world")
        ]
        if len(kept) == 1:
            return kept[0]
        first = kept[0] if kept else node
        if first.kind == "rel" and first.args[0] == ("!=",) and all(_is_scalar(i) for i in kept[1:]):  # x != 1, 2
            kept[1:] = [Node("rel", (("!=",), first.args[1], i)) for i in kept[1:]]
            return Node("list", (",", *kept))
        if kept and len(kept) < len(node.args) - 1:
            return Node("list", (node.args[0], *kept))
    if node.kind == "tuple" and len(node.args) == 3 and node.args[0] == "(":
        return node.args[2]
    return node


def _word(node: Node) -> str:
    text = " ".join(node.args[0].replace("-", " ").split()) if node.kind == "text" else ""
    return text.removeprefix("the ").removeprefix("a ").strip(" '")


def _is_word(name: str) -> bool:
    """Area, "the length": a name that describes, where x, x_1 and f(x) are letters."""
    return len(name) > 1 and name[1] not in "_'(," and name[0] not in "(\\"


def _is_scalar(node: Node) -> bool:
    return node.kind in ("num", "sym", "const", "add", "mul", "div", "pow", "fn", "pm", "pct", "deg") and not any(
        holds(node, kind) for kind in ("tuple", "matrix", "rel", "set", "list", "text")
    )


def _is_equation(node: Node) -> bool:
    return node.kind == "rel" and set(node.args[0]) <= {"=", "~"}


def _is_many(node: Node) -> bool:
    return node.kind in ("set", "list") or (_is_scalar(node) or node.kind == "qty") and holds(node, "pm")


def _items(node: Node) -> list[Node] | None:
    if node.kind == "tuple":
        return list(node.args[2:])
    if node.kind == "list":
        return list(node.args[1:])
    return list(node.args) if node.kind == "set" else None


def _has_dots(node: Node) -> bool:
    items = _items(node)
    return items is not None and DOTS in items


def _assignments(node: Node) -> dict[str, Node] | None:
    """{x: 2, y: 3} of "x = 2, y = 3" or "(x, y) = (2, 3)"; None for anything else."""
    if node.kind == "rel" and node.args[0] == ("=",) and node.args[1].kind == "name" and node.args[2].kind == "tuple":
        names = node.args[1].args[0]
        values = node.args[2].args[2:]
        if names.startswith("(") and names.count(",") + 1 == len(values):
            return dict(zip(names.strip("()").split(","), values, strict=True))
    if node.kind != "list" or len(node.args) < 3:
        return None
    out: dict[str, Node] = {}
    for item in node.args[1:]:
        if item.kind != "rel" or item.args[0] != ("=",) or item.args[1].kind != "name" or item.args[1].args[0] in out:
            return None
        out[item.args[1].args[0]] = item.args[2]
    return out


def _named_as_letter(node: Node) -> Node:
    left = node.args[1]
    return Node("rel", (node.args[0], Node("sym", left.args) if left.kind == "name" else left, *node.args[2:]))


def _variants(node: Node) -> list[Node]:
    """All values of a set, list or plus-minus expression; the signs of one expression go together."""
    if node.kind in ("set", "list"):
        return [v for item in _items(node) or [] for v in _variants(item)]
    if not holds(node, "pm"):
        return [node]
    return [signed(node, 1), signed(node, -1)]


def _pair_off(table: list[list[bool]]) -> bool:
    """Whether a perfect matching exists (augmenting paths)."""
    taken: dict[int, int] = {}

    def place(row: int, seen: set[int]) -> bool:
        for column, ok in enumerate(table[row]):
            if ok and column not in seen:
                seen.add(column)
                if column not in taken or place(taken[column], seen):
                    taken[column] = row
                    return True
        return False

    return all(place(row, set()) for row in range(len(table)))


def _as_matrix(node: Node, other: Node) -> Node:
    """Nested square brackets, or a tuple beside a single row or column."""
    items = _items(node)
    if items is None or node.kind == "set":
        return node
    rows = [_items(item) for item in items]
    if all(row is not None and item.args[0] == "[" for row, item in zip(rows, items, strict=True)):
        sizes = {len(row) for row in rows if row is not None}
        if len(sizes) == 1:
            return Node("matrix", (sizes.pop(), *(cell for row in rows if row is not None for cell in row)))
    if other.kind == "matrix" and other.args[0] in (1, len(other.args) - 1):
        return Node("matrix", (other.args[0], *items))
    return node


def _rising(ops: tuple[str, ...], sides: tuple[Node, ...]) -> tuple[tuple[str, ...], tuple[Node, ...]]:
    """A chain of > and >= read from its other end."""
    if set(ops) <= {">", ">="}:
        return tuple(op.replace(">", "<") for op in reversed(ops)), tuple(reversed(sides))
    return ops, sides


def _by_letters(poly: Poly) -> dict[tuple, Poly]:
    """Split monomials into letter part and constant part: letter part -> polynomial in constants."""
    out: dict[tuple, Poly] = {}
    for m, c in poly.items():
        free = tuple((a, e) for a, e in m if a[0] not in ("p", "pi", "e", "i"))
        rest = tuple((a, e) for a, e in m if a[0] in ("p", "pi", "e", "i"))
        out.setdefault(free, {})[rest] = c
    return out


def _try_region(node: Node) -> Region | None:
    try:
        return region(node)
    except Unreadable:
        return None
