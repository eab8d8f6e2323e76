"""Intervals, unions and inequalities in one variable as sorted lists of intervals with their end points."""

from __future__ import annotations

import math
from typing import NamedTuple

from forethought.rewards._verify_lex import INF, Node, negate, signed
from forethought.rewards._verify_numeric import Evaluator, holds, letters
from forethought.rewards._verify_text import Unreadable

_FLIP = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}


class Interval(NamedTuple):
    low: Node
    low_closed: bool
    high: Node
    high_closed: bool


class Region(NamedTuple):
    """`name` is the variable, or None where the notation names none."""

    name: str | None
    parts: list[Interval]


def is_infinite(node: Node) -> int:
    """+1, -1 for plus and minus infinity, else 0."""
    if node == INF:
        return 1
    return -1 if node == negate(INF) else 0


def place(node: Node) -> float:
    """Where an end point lies; end points with letters have no place.

    Raises:
        Unreadable: no number.
    """
    if is_infinite(node):
        return is_infinite(node) * math.inf
    if letters(node):
        raise Unreadable("end point with letters")
    try:
        return Evaluator({})(node).real
    except (ArithmeticError, ValueError) as error:
        raise Unreadable("end point without value") from error


def _interval(low: Node, low_closed: bool, high: Node, high_closed: bool) -> Interval:
    return Interval(low, low_closed and not is_infinite(low), high, high_closed and not is_infinite(high))


def is_region(node: Node) -> bool:
    """Whether the notation can only mean a set of numbers given by its ends, not a tuple or a finite set."""
    if node.kind == "tuple" and len(node.args) == 4:
        ends = node.args[2:]
        if any(end.kind in ("tuple", "list", "set", "matrix", "text", "dots") for end in ends):
            return False
        infinite = any(is_infinite(end) for end in ends)
        return node.args[:2] not in (("(", ")"), ("langle", "rangle")) or infinite
    if node.kind in ("union", "inter", "minus", "builder"):
        return True
    if node.kind == "world":
        return node.args[0] == "R"
    if node.kind == "list":
        return all(isinstance(a, str) or is_region(a) for a in node.args)
    if node.kind == "rel":
        ops = node.args[0]
        return ops[0] in ("<", ">", "<=", ">=", "!=") or (ops == ("in",) and is_region(node.args[2]))
    return False


def region(node: Node) -> Region:
    """The set of numbers that a tree describes.

    Raises:
        Unreadable: it describes none (several variables, no end points, ...).
    """
    kind, args = node
    if kind == "tuple" and len(args) == 4:
        if place_or_none(args[2], args[3]) is False:
            raise Unreadable("interval with its ends the wrong way round")
        return Region(None, [_interval(args[2], args[0] == "[", args[3], args[1] == "]")])
    if kind == "world" and args[0] == "R":
        return Region(None, [_interval(negate(INF), False, INF, False)])
    if kind == "set":
        return Region(None, _merge([Interval(x, True, x, True) for x in args]))
    if kind == "empty":
        return Region(None, [])
    if kind == "union":
        return _join(region(args[0]), region(args[1]))
    if kind == "inter":
        return _meet(region(args[0]), region(args[1]))
    if kind == "minus":
        return _meet(region(args[0]), _complement(region(args[1])))
    if kind == "builder":
        head = args[0].args[1] if args[0].kind == "rel" else args[0]
        if head.kind not in ("sym", "name"):
            raise Unreadable("set builder over a formula")
        return region(args[1])
    if kind == "list":
        conditions = [a for a in args[1:] if not _is_world(a)]
        parts = [region(a) for a in conditions]
        out = parts[0]
        for more in parts[1:]:
            out = _join(out, more) if args[0] == "or" else _meet(out, more)
        if args[0] == "," and not out.parts:  # "x < 1, x > 3" can only be meant as alternatives
            out = parts[0]
            for more in parts[1:]:
                out = _join(out, more)
        return out
    if kind == "rel":
        return _relation(node)
    raise Unreadable(f"{kind} is no set of numbers")


def _is_world(node: Node) -> bool:
    return node.kind == "rel" and node.args[0] == ("in",) and node.args[2].kind == "world"


def place_or_none(low: Node, high: Node) -> bool | None:
    """Whether low <= high, None where that cannot be told."""
    try:
        return place(low) <= place(high)
    except Unreadable:
        return None


def _relation(node: Node) -> Region:
    ops: tuple[str, ...] = node.args[0]
    sides: tuple[Node, ...] = node.args[1:]
    if ops == ("in",):
        inside = region(sides[1])
        return Region(_name(sides[0]), inside.parts)
    if len(ops) == 1:
        variable, bound, op = sides[0], sides[1], ops[0]
        name = _name(variable)
        if name is None and _modulus(variable) is None:
            variable, bound, op = bound, variable, _FLIP.get(op, op)
            name = _name(variable)
        inside = _modulus(variable)
        if inside is not None and inside not in letters(bound) and place(bound) > 0:
            return Region(inside, _merge(_absolute(op, bound)))
        if name is None or name in letters(bound):
            raise Unreadable("inequality that is not solved for a letter")
        if op == "!=" and holds(bound, "pm"):
            upper, lower = (Region(name, _half(op, signed(bound, sign))) for sign in (1, -1))
            return _meet(upper, lower)
        return Region(name, _half(op, bound))
    if len(ops) == 2 and (name := _name(sides[1])) is not None and set(ops) <= {"<", "<="} | {">", ">="}:
        first = Region(name, _half(_FLIP[ops[0]], sides[0]))
        return _meet(first, Region(name, _half(ops[1], sides[2])))
    raise Unreadable("chain of relations")


def _name(node: Node) -> str | None:
    return node.args[0] if node.kind in ("sym", "name") else None


def _modulus(node: Node) -> str | None:
    """x of |x|."""
    return _name(node.args[1]) if node.kind == "fn" and node.args[0] == "abs" else None


def _absolute(op: str, bound: Node) -> list[Interval]:
    """|x| op bound, for a positive bound."""
    if op in ("<", "<="):
        return [_interval(negate(bound), op == "<=", bound, op == "<=")]
    return _half(_FLIP.get(op, op), negate(bound)) + _half(op, bound)


def _half(op: str, bound: Node) -> list[Interval]:
    low, high = negate(INF), INF
    if op in ("<", "<="):
        return [_interval(low, False, bound, op == "<=")]
    if op in (">", ">="):
        return [_interval(bound, op == ">=", high, False)]
    if op == "!=":
        return [_interval(low, False, bound, False), _interval(bound, False, high, False)]
    if op == "=":
        return [Interval(bound, True, bound, True)]
    raise Unreadable(f"relation {op}")


def _common_name(a: Region, b: Region) -> str | None:
    if a.name and b.name and a.name != b.name:
        raise Unreadable("two variables")
    return a.name or b.name


def _join(a: Region, b: Region) -> Region:
    return Region(_common_name(a, b), _merge(a.parts + b.parts))


def _merge(parts: list[Interval]) -> list[Interval]:
    """Sorted, with overlapping and touching parts joined; with letters in an end point, as written."""
    try:
        parts = sorted(parts, key=lambda p: (place(p.low), not p.low_closed, place(p.high)))
    except Unreadable:
        return parts
    out: list[Interval] = []
    for part in parts:
        if out:
            last = out[-1]
            gap = place(part.low) - place(last.high)
            if gap < 0 or (gap == 0 and (last.high_closed or part.low_closed)):
                if (place(part.high), part.high_closed) > (place(last.high), last.high_closed):
                    last = last._replace(high=part.high, high_closed=part.high_closed)
                out[-1] = last
                continue
        out.append(part)
    return out


def _meet(a: Region, b: Region) -> Region:
    out = []
    for p in a.parts:
        for q in b.parts:
            low = max((p, q), key=lambda x: (place(x.low), not x.low_closed))
            high = min((p, q), key=lambda x: (place(x.high), x.high_closed))
            gap = place(high.high) - place(low.low)
            if gap > 0 or (gap == 0 and low.low_closed and high.high_closed):
                out.append(Interval(low.low, low.low_closed, high.high, high.high_closed))
    return Region(_common_name(a, b), _merge(out))


def _complement(a: Region) -> Region:
    out, low, closed = [], negate(INF), False
    for part in a.parts:
        if is_infinite(part.low) >= 0:
            out.append(_interval(low, closed, part.low, not part.low_closed))
        low, closed = part.high, not part.high_closed
    if is_infinite(low) <= 0:
        out.append(_interval(low, closed, INF, False))
    return Region(a.name, out)
