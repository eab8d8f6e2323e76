"""The last tier, run only inside a killable worker: 60 to 250 digits with mpmath, then sympy for sums and integrals.

sympy sees only what the own grammar cannot read (sums, products, integrals, limits); the text goes through
latex2sympy's LaTeX grammar, never through eval or parse_expr, and both sides must become plain expressions.
"""

from __future__ import annotations

from forethought.rewards._verify_judge import CALCULUS, Outcome, judge
from forethought.rewards._verify_text import clean, literal_form


def resolve(gold: str, answer: str, mode: str) -> Outcome:
    """Decide a pair that `judge` left open. May take long or much memory: the caller kills it.

    Undecided means not equal.
    """
    import mpmath

    with mpmath.workdps(60):
        outcome = judge(gold, answer, mode, mpmath.mp)
    texts = literal_form(clean(gold)), literal_form(clean(answer))
    if not outcome.equal and any(word in t for t in texts for word in CALCULUS):
        return _sympy_equal(*texts)
    return outcome if outcome.equal is not None else Outcome(False, None, "not shown to be equal")


def _sympy_equal(gold: str, answer: str) -> Outcome:
    import sympy
    from latex2sympy2_extended import latex2sympy

    sides = []
    for text in (gold, answer):
        try:
            value = latex2sympy(text)
        except Exception as error:  # the grammar's own error types are many
            return Outcome(False, None, f"cannot be read: {type(error).__name__} in {text[:40]!r}")
        if not isinstance(value, sympy.Expr):
            return Outcome(False, None, f"cannot be read: {text[:40]!r} is no expression")
        sides.append(value.doit())
    gap = sides[0] - sides[1]
    if any(side.has(sympy.nan, sympy.zoo) for side in sides) or gap is sympy.nan:
        return Outcome(False, None, "no value")
    if gap == 0 or sympy.simplify(gap) == 0:
        return Outcome(True, "symbolic", "equal by sympy")
    return Outcome(False, None, "not equal")


def warm(texts: list[str]) -> None:
    """Load what these texts will need, so that no check pays for imports."""
    import mpmath  # noqa: F401

    if any(word in text for text in texts for word in CALCULUS):
        import latex2sympy2_extended  # noqa: F401
        import sympy  # noqa: F401
