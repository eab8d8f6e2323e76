r"""Answers as trees: a small, bounded grammar for the LaTeX and plain notation in which final answers are written.

`readings(text)` gives the trees of one answer (more than one where notation is ambiguous: `5 m` is five metres or
5 times m). The parser never evaluates; depth, length and digits are bounded; what is outside the grammar raises
`Unreadable`.

Kinds of `Node`: num(value, significant digits of a decimal or 0), sym(name), const(pi|e|i|inf), add, mul, div, pow,
fn(name, *args), pm(sign, x), pct(x), deg(x), qty(x, unit), text(s), tuple(open, close, *items), set(*items),
list(separator, *items), dots, matrix(n_columns, *cells), rel(ops, *sides), name(s), union, inter, minus,
world(R|Z|N|Q), empty, based(digits, base), clock(seconds, mark), ratio(*parts), builder(head, *conditions).
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from forethought.rewards._verify_lex import (
    ALIASES,
    DOTS,
    EMPTY,
    FUNCTIONS,
    INF,
    ONE,
    RELATIONS,
    SYMBOLS,
    TWO,
    Node,
    Token,
    negate,
    quantity,
    tokenize,
)
from forethought.rewards._verify_text import Unreadable
from forethought.rewards._verify_units import is_unit_letter, is_unit_word, parse_unit

_END = Token("end", "", False)
_NAMING = ("=", "==", "in", "approx", "simeq", "sim")
_FIGURES = ("angle", "triangle")
_VOWEL = re.compile("[aeiou]")
_MATRICES = frozenset({"matrix", "pmatrix", "bmatrix", "Bmatrix", "smallmatrix", "array"})
_OPENERS = {"(": (")", "]"), "[": ("]", ")"), "\\{": ("\\}",), "langle": ("rangle",)}


class Parser:
    """Recursive descent over the tokens of one answer; `units` lets a single letter after a number be a unit."""

    def __init__(self, text: str, *, units: bool = False):
        self.text = text
        self.tokens = tokenize(text)
        self.units = units
        self.at = 0
        self.bars = 0  # open absolute values
        self.in_set = False  # directly inside \\{ \\}, where ":" and "|" mean "such that"

    # -- token access --
    @property
    def now(self) -> Token:
        return self.tokens[self.at] if self.at < len(self.tokens) else _END

    def ahead(self, n: int) -> Token:
        return self.tokens[self.at + n] if self.at + n < len(self.tokens) else _END

    def take(self, text: str | None = None) -> Token:
        token = self.now
        if token is _END or (text is not None and token.text != text):
            raise Unreadable(f"expected {text or 'more'!r} before {self.text[token.at :][:12]!r}")
        self.at += 1
        return token

    def is_now(self, *texts: str) -> bool:
        return self.now.kind in ("op", "cmd") and self.now.text in texts

    # -- answer: items, relations, set operations --
    def answer(self) -> Node:
        node = self.items(())
        if self.now is not _END:
            raise Unreadable(f"trailing {self.text[self.now.at :][:20]!r}")
        return node

    def separator(self) -> str | None:
        token = self.now
        if token.kind == "op" and token.text in (",", ";"):
            return ","
        if token.kind == "cmd" and token.text in ("lor", "vee"):
            return "or"
        if token.kind == "cmd" and token.text in ("land", "wedge"):
            return "and"
        if token.kind == "text" and token.text.strip(" ,").lower() in ("or", "and", "and/or"):
            return "or" if "or" in token.text else "and"
        return None

    def items(self, closers: tuple[str, ...]) -> Node:
        """Items up to a closing bracket (not taken) or the end; one item comes back as itself."""
        out, how = [self.item()], ""
        while (separator := self.separator()) is not None:
            self.take()
            while (more := self.separator()) is not None:  # "1, 2, and 3"
                separator = more if more != "," else separator
                self.take()
            how = separator if how in ("", ",") else how
            if self.now is _END or self.now.text in closers:
                break
            out.append(self.item())
        return out[0] if len(out) == 1 else Node("list", (how, *out))

    def item(self) -> Node:
        if self.is_now("ldots", "..."):
            self.take()
            return DOTS
        return self.relation()

    def relation(self) -> Node:
        sides, ops = [self.left_name() or self.ratio()], []
        while self.now.kind in ("op", "cmd") and self.now.text in RELATIONS:
            ops.append(RELATIONS[self.take().text])
            sides.append(self.ratio())
        return Node("rel", (tuple(ops), *sides)) if ops else sides[0]

    def left_name(self) -> Node | None:
        """A name in front of `=` or a membership sign: x, x_1, f(x), (x,y), Area, \\text{Area}; not taken if none."""
        start, open_braces, parts = self.at, 0, []
        while self.now.kind in ("word", "text", "num", "cmd", "op") and len(parts) < 16:
            token = self.now
            if token.kind in ("op", "cmd") and token.text in _NAMING:
                break
            if token.kind == "op" and token.text not in ("(", ")", ",", "_", "'", "{", "}"):
                break
            open_braces += (token.text == "{") - (token.text == "}")
            if open_braces < 0:
                break
            if token.kind == "cmd" and token.text not in SYMBOLS and token.text not in _FIGURES:
                break
            parts.append(self.take())
        ok = self.is_now(*_NAMING) and bool(parts)
        text = "".join(("\\" if t.kind == "cmd" else "") + t.text for t in parts).replace("{", "").replace("}", "")
        words = all(t.kind in ("word", "text") or t.text in _FIGURES for t in parts)
        tail = r"(?:_\w+|')*(?:\([A-Za-z0-9,\\]+\))?"
        single = re.fullmatch(rf"(?:[A-Za-z]|\\[a-zA-Z]+){tail}", text)
        several = re.fullmatch(r"\((?:[A-Za-z](?:_\w+)?)(?:,[A-Za-z](?:_\w+)?)+\)", text)
        long = words and len(text) > 2
        if not ok or not (single or several or long):
            self.at = start
            return None
        return Node("name", (" ".join(t.text for t in parts) if long and not single else text,))

    def ratio(self) -> Node:
        first = self.set_level()
        if self.in_set or not self.is_now(":"):
            return self.with_unit(first)
        parts = [first]
        while self.is_now(":"):
            self.take()
            parts.append(self.set_level())
        return Node("ratio", tuple(parts))

    def set_level(self) -> Node:
        left = self.sum()
        while self.is_now("cup", "cap", "setminus", "backslash") or self.letter_union():
            kind = {"cup": "union", "U": "union", "cap": "inter"}.get(self.take().text, "minus")
            left = Node(kind, (left, self.sum()))
        return left

    def letter_union(self) -> bool:
        """(0,1) U (2,3): the letter between two brackets."""
        before = self.tokens[self.at - 1].text if self.at else ""
        return self.now.text == "U" and before in (")", "]", "\\}") and self.ahead(1).text in ("(", "[", "\\{")

    def with_unit(self, node: Node) -> Node:
        """A unit or label up to the end of the item: everything from the first unit-like token on."""
        token = self.now
        if not (token.kind == "text" or (token.kind == "word" and self.unit_starts())):
            return node
        begin, depth = self.at, 0
        while self.now is not _END and self.separator() is None and self.now.text not in (")", "]", "\\}", "="):
            depth += (self.now.text == "{") - (self.now.text == "}")
            if depth == 0 and self.now.kind == "num" and self.tokens[self.at - 1].text not in ("^", "-"):
                break  # 5 ft 3 in
            if depth < 0 or self.is_now("cup", "cap", ":", "<", ">", "le", "ge", "in", "(", "ne"):
                break
            self.at += 1
        stop = self.tokens[self.at].at if self.at < len(self.tokens) else len(self.text)
        unit = parse_unit(self.text[self.tokens[begin].at : stop])
        if unit is None or node.kind in ("list", "rel", "text"):
            raise Unreadable(f"text after a value: {token.text[:20]!r}")
        node = quantity(node, unit)
        if self.now.kind == "num" and node.kind == "qty":
            more = self.with_unit(self.sum())
            if more.kind != "qty" or more.args[1].dims != unit.dims:
                raise Unreadable("two quantities side by side")
            parts = (Node("mul", (q.args[0], Node("num", (q.args[1].factor, 0)))) for q in (node, more))
            return Node("qty", (Node("add", tuple(parts)), unit._replace(factor=Fraction(1))))
        return node

    def unit_starts(self) -> bool:
        token = self.now
        if token.kind != "word" or self.at == 0:
            return False
        if is_unit_letter(token.text):
            following = self.ahead(1)
            return self.units and token.blank and not (following.kind in ("op", "word") and following.text in "+-=(")
        label = len(token.text) > 4 or (
            len(token.text) > 2
            and token.blank
            and self.tokens[self.at - 1].kind == "num"
            and bool(_VOWEL.search(token.text))
        )
        return label or is_unit_word(token.text)

    # -- arithmetic --
    def sum(self) -> Node:
        terms = [self.signed()]
        while self.is_now("+", "-", "pm", "mp"):
            terms.append(self.signed())
        return terms[0] if len(terms) == 1 else Node("add", tuple(terms))

    def signed(self) -> Node:
        negative, pm = False, 0
        while self.is_now("+", "-", "pm", "mp"):
            token = self.take()
            negative ^= token.text == "-"
            if token.text in ("pm", "mp"):
                pm = 1 if token.text == "pm" else -1
        node = self.currency() or self.term()
        if negative:
            node = negate(node)
        return Node("pm", (pm, node)) if pm else node

    def currency(self) -> Node | None:
        if not self.is_now("dollar", "euro", "pounds"):
            return None
        word = {"euro": "euro", "pounds": "pounds_sterling"}.get(self.take().text, "dollar")
        value = self.term()
        unit = parse_unit(word)
        assert unit is not None
        if self.now.kind in ("word", "text"):  # $5 million
            more = self.with_unit(value)
            if more.kind == "qty" and set(more.args[1].dims) <= set(unit.dims):
                value, unit = more.args[0], unit._replace(scale=more.args[1].scale)
            elif more.kind != "qty":
                value = more
        return Node("qty", (value, unit))

    def term(self) -> Node:
        node = self.factor()
        while True:
            if self.is_now("*", "times", "cdot"):
                self.take()
                node = Node("mul", (node, self.signed_factor()))
            elif self.is_now("/"):
                self.take()
                node = Node("div", (node, self.signed_factor()))
            elif self.is_now("bmod", "pmod", "mod"):
                self.take()
                node = Node("fn", ("mod", node, self.factor()))
            elif self.starts_factor():
                node = Node("mul", (node, self.factor()))
            else:
                return node

    def signed_factor(self) -> Node:
        negative = False
        while self.is_now("+", "-"):
            negative ^= self.take().text == "-"
        node = self.factor()
        return negate(node) if negative else node

    def starts_factor(self) -> bool:
        """Whether the next token multiplies what stands before it without a sign."""
        token = self.now
        if token.kind == "word":
            return not self.unit_starts() and not self.letter_union()
        if token.kind == "num":
            return self.at > 0 and self.tokens[self.at - 1].kind != "num"
        if token.kind == "cmd":
            known = ("frac", "sqrt", "cbrt", "pi", "binom", "lfloor", "lceil", "abs", "exp", "overline", "mathbb")
            known += ("arcsin", "arccos", "arctan", "det", "infty")
            return token.text in known or token.text in SYMBOLS or token.text in FUNCTIONS or token.text in ALIASES
        if token.kind == "env":
            return "begin" in token.text
        if token.kind != "op":
            return False
        return token.text in ("(", "[", "{") or (token.text == "|" and not self.bars and not self.in_set)

    def factor(self) -> Node:
        node = self.postfix(self.atom())
        if self.is_now("^"):
            self.take()
            node = self.postfix(Node("pow", (node, self.exponent())))
        return node

    def postfix(self, node: Node) -> Node:
        while True:
            if self.is_now("!"):
                self.take()
                node = Node("fn", ("factorial", node))
            elif self.is_now("%", "\\%"):
                self.take()
                node = Node("pct", (node,))
            elif self.is_now("^") and self.degree_follows():
                self.at += 4
                if self.now.kind in ("word", "text") and self.now.text in ("C", "F"):
                    unit = parse_unit("degC" if self.take().text == "C" else "degF")
                    assert unit is not None
                    return Node("qty", (node, unit))
                node = Node("deg", (self.arc_minutes(node),))
            else:
                return node

    def arc_minutes(self, node: Node) -> Node:
        """30 degrees 15' 20'': what follows the degree mark, in degrees."""
        for marks, size in ((1, 60), (2, 3600)):
            if self.now.kind != "num" or any(self.ahead(i + 1).text != "'" for i in range(marks)):
                break
            node = Node("add", (node, Node("div", (self.take().value, Node("num", (Fraction(size), 0))))))
            self.at += marks
        return node

    def degree_follows(self) -> bool:
        return self.ahead(1).text == "{" and self.ahead(2).text == "circ" and self.ahead(3).text == "}"

    def exponent(self) -> Node:
        if self.is_now("{"):
            self.take()
            node = self.items(("}",))
            self.take("}")
        elif self.is_now("-", "+"):
            negative = self.take().text == "-"
            node = self.exponent()
            return negate(node) if negative else node
        else:
            node = self.atom(exponent=True)
        if self.is_now("!"):
            node = self.postfix(node)
        if self.is_now("^") and not self.degree_follows():
            self.take()
            node = Node("pow", (node, self.exponent()))
        return node

    def group(self, digits: bool = False) -> Node:
        """The argument of a command: {…} or one token, of a number its first digit only where `digits` (\\frac12)."""
        if self.is_now("{"):
            self.take()
            node = self.items(("}",))
            self.take("}")
            return node
        token = self.now
        if (
            digits and token.kind == "num" and token.text.isdigit() and len(token.text) > 1
        ):  # \frac12: one digit at a time
            self.tokens[self.at : self.at + 1] = [
                Token("num", d, False, Node("num", (Fraction(int(d)), 0)), token.at + i)
                for i, d in enumerate(token.text)
            ]
        return self.atom(exponent=True)

    def atom(self, exponent: bool = False) -> Node:
        token = self.now
        if token.kind == "num":
            self.take()
            return token.value if exponent else self.mixed(token)
        if token.kind in ("word", "text"):
            return self.word()
        if token.kind == "env":
            return self.matrix()
        if token.kind == "cmd":
            return self.command()
        if token.text in ("(", "[", "\\{"):
            return self.bracket()
        if token.text == "{":
            self.take()
            node = self.items(("}",))
            self.take("}")
            return Node("set", node.args[1:]) if node.kind == "list" else node
        if token.text in ("|", "\\|"):
            self.take()
            self.bars += 1
            node = self.sum()
            self.bars -= 1
            self.take(token.text)
            return Node("fn", ("abs", node))
        raise Unreadable(f"unexpected {token.text or 'end'!r}")

    def mixed(self, token: Token) -> Node:
        """1 3/8 and 1\\frac{3}{8} are mixed numbers when the fraction is proper; else the number stands alone."""
        whole = token.value
        if not token.text.isdigit():
            return whole
        start = self.at
        part: Node | None = None
        if self.is_now("frac"):
            part = self.command()
        elif self.now.kind == "num" and self.now.blank and self.ahead(1).text == "/" and self.ahead(2).kind == "num":
            part = Node("div", (self.take().value, self.ahead(1).value))
            self.at += 2
        if part is not None:
            top, bottom = part.args if part.kind == "div" else (part, part)
            if (
                top.kind == bottom.kind == "num"
                and 0 < top.args[0] < bottom.args[0]
                and not (top.args[1] or bottom.args[1])
            ):
                return Node("add", (whole, part))
            self.at = start
        return whole

    def word(self) -> Node:
        token = self.take()
        text = token.text
        if token.kind == "text":
            if re.fullmatch(r"[A-Za-z]", text):
                return self.symbol(text)
            if re.search(r"\d|\\", text) or not re.search(r"[A-Za-z]{2}", text):
                inner = Parser(text, units=self.units).answer()
                return inner
            if "," in text:  # \\text{red, blue}
                try:
                    return Parser(text).answer()
                except Unreadable:
                    pass
            return Node("text", (text.lower(),))
        if len(text) == 1:
            return self.symbol(text)
        if len(text) > 4:
            return Node("text", (text.lower(),))
        # a run of letters is a product of letters; a subscript, power or argument belongs to the last one
        self.tokens[self.at : self.at] = [Token("word", text[-1], False, None, token.at + len(text) - 1)]
        node = self.symbol(text[0])
        for letter in text[1:-1]:
            node = Node("mul", (node, self.symbol(letter)))
        return Node("mul", (node, self.factor()))

    def symbol(self, name: str) -> Node:
        if name == "e" and not self.is_now("_"):
            return Node("const", ("e",))
        if name == "i" and not self.is_now("_"):
            return Node("const", ("i",))
        if self.is_now("_"):
            self.take()
            start = self.at
            self.group()
            pieces = "".join(t.text for t in self.tokens[start : self.at] if t.text not in "{}")
            name = f"{name}_{pieces}"
        while self.is_now("'"):
            self.take()
            name += "'"
        if name in ("f", "g", "h") and self.is_now("("):
            arguments = self.bracket(call=True)
            return Node("fn", (name, *arguments.args[2:]))
        return Node("sym", (name,))

    def command(self) -> Node:
        token = self.take()
        name = ALIASES.get(token.text, token.text)
        if name == "frac":
            top = self.group(digits=True)
            return Node("div", (top, self.group(digits=True)))
        if name in ("sqrt", "cbrt"):
            degree = Node("num", (Fraction(3), 0)) if name == "cbrt" else TWO
            if self.is_now("["):
                self.take()
                degree = self.sum()
                self.take("]")
            inner = self.bracket(call=True).args[2] if self.is_now("(") else self.group()
            return Node("fn", ("root", inner, degree))
        if name == "binom":
            top = self.group()
            return Node("fn", ("binom", top, self.group()))
        if name == "pi":
            return Node("const", ("pi",))
        if name == "infty":
            return INF
        if name == "emptyset":
            return EMPTY
        if name == "mathbb":
            return Node("world", (token.value,))
        if name == "abs":
            return Node("fn", ("abs", self.bracket(call=True).args[2]))
        if name in ("lfloor", "lceil"):
            inner = self.sum()
            self.take("r" + name[1:])
            return Node("fn", ("floor" if name == "lfloor" else "ceil", inner))
        if name == "langle":
            self.at -= 1
            return self.bracket()
        if name == "overline":
            return Node("sym", ("overline " + "".join(t.text for t in self.span(self.group)),))
        if name in FUNCTIONS:
            return self.function(name)
        if name in SYMBOLS:
            return self.symbol("\\" + name)
        raise Unreadable(f"command \\{name}")

    def span(self, parse: Any) -> list[Token]:
        start = self.at
        parse()
        return self.tokens[start : self.at]

    def function(self, name: str) -> Node:
        base = power = None
        if self.is_now("_"):
            self.take()
            base = self.group()
        if self.is_now("^") and not self.degree_follows():
            self.take()
            power = self.exponent()
        if self.is_now("("):
            arguments = self.bracket(call=True).args[2:]
        elif self.is_now("{"):
            arguments = (self.group(),)
        else:  # \sin 2x: the product that follows, up to the next function
            node = self.factor()
            while self.starts_factor() and self.now.text not in FUNCTIONS and self.now.text not in ("(", "["):
                node = Node("mul", (node, self.factor()))
            while self.is_now("/") and self.ahead(1).kind == "num":
                self.take()
                node = Node("div", (node, self.factor()))
            arguments = (node,)
        if name == "log" and base is not None:
            node = Node("fn", ("logb", base, *arguments))
        else:
            node = Node("fn", (name, *arguments))
        if power is None:
            return node
        if power == negate(ONE) and name in ("sin", "cos", "tan"):
            return Node("fn", ("arc" + name, *arguments))
        return Node("pow", (node, power))

    def bracket(self, call: bool = False) -> Node:
        """(…), […], \\{…\\}, mixed brackets for intervals. One item in equal brackets is just a group."""
        opener = self.take().text
        closers = _OPENERS[opener]
        bars, self.bars = self.bars, 0
        in_set, self.in_set = self.in_set, opener == "\\{"
        if self.now.text in closers:
            self.take()
            self.bars, self.in_set = bars, in_set
            return EMPTY if opener == "\\{" else Node("tuple", (opener, opener))
        inner = self.items(closers)
        if opener == "\\{" and self.is_now(":", "mid", "|", "vert"):
            self.take()
            inner = Node("builder", (inner, self.items(closers)))
        self.bars, self.in_set = bars, in_set
        if self.now.text not in closers:
            raise Unreadable(f"bracket {opener!r} is not closed")
        closer = self.take().text
        items = inner.args[1:] if inner.kind == "list" else (inner,)
        if inner.kind == "builder":
            return inner
        if opener == "\\{":
            return Node("set", items)
        if not call and len(items) == 1 and (opener, closer) in (("(", ")"), ("[", "]")):
            return inner
        return Node("tuple", (opener, closer, *items))

    def matrix(self) -> Node:
        begin = self.take().text
        name = re.sub(r"\\begin\s*\{|\*?\}", "", begin)
        if name not in _MATRICES or not begin.startswith("\\begin"):
            raise Unreadable(f"environment {name}")
        if name == "array" and self.is_now("{"):
            while self.take().text != "}":
                pass
        rows: list[list[Node]] = [[]]
        while not (self.now.kind == "env" and self.now.text.startswith("\\end")):
            if self.now.text in ("\\\\", "\\cr"):
                self.take()
                rows.append([])
            elif self.is_now("&"):
                self.take()
            elif self.is_now("hline"):
                self.take()
            else:
                rows[-1].append(self.item())
        self.take()
        rows = [row for row in rows if row]
        if not rows or len({len(row) for row in rows}) != 1:
            raise Unreadable("matrix rows differ in length")
        return Node("matrix", (len(rows[0]), *(cell for row in rows for cell in row)))
