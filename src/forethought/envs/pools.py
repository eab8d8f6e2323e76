"""Pools of generated problems that never share a problem, whatever their sizes and seeds.

A problem's split follows from a hash of the problem itself (its canonical key: numbers and operations, not names or
wording), so "train" and "heldout" are disjoint by construction, also between runs with other seeds. Ids come from the
same key and are stable for ever; a history keyed by id survives shuffling.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any, Literal

from forethought.errors import ConfigError, DataError, nearest

Split = Literal["train", "validation", "heldout"]
SPLITS: dict[str, int] = {"train": 60, "validation": 10, "heldout": 30}
"""Shares of all problems, in percent."""

MAX_MISSES = 3000
"""Draws in a row without a new problem after which a family counts as exhausted."""

Make = Callable[[random.Random], tuple[str, dict[str, Any]]]
"""Draws a problem: its canonical key, and its columns (at least prompt and answer)."""


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def split_of(family: str, key: str) -> str:
    """The split that owns a problem."""
    place = _hash(f"split\x1f{family}\x1f{key}") % 100
    for name, share in SPLITS.items():
        place -= share
        if place < 0:
            return name
    raise AssertionError("shares sum to 100")


def task_id(family: str, key: str) -> str:
    return f"{family}/{_hash(f'id{chr(31)}{family}{chr(31)}{key}'):016x}"


def draw(family: str, make: Make, n: int, seed: int, split: str) -> list[dict[str, Any]]:
    """`n` different problems of a split: rows with id, family, split and the columns of `make`.

    The first k of n rows are the rows that n = k gives.

    Raises:
        ConfigError: no such split, or n below 1. DataError: the split has fewer problems than n.
    """
    if split not in SPLITS:
        raise ConfigError(f"split={split!r}: one of {', '.join(SPLITS)}{nearest(split, SPLITS)}")
    if n < 1:
        raise ConfigError(f"n={n}: give at least 1")
    rng = random.Random(f"{family}/{split}/{seed}")
    seen: set[str] = set()
    rows: list[dict[str, Any]] = []
    misses = 0
    while len(rows) < n:
        key, columns = make(rng)
        if key in seen or split_of(family, key) != split:
            misses += 1
            if misses >= MAX_MISSES:
                raise DataError(f"family {family!r}, split {split!r}: n={n}, but only {len(rows)} problems were found")
            continue
        misses = 0
        seen.add(key)
        rows.append({"id": task_id(family, key), "family": family, "split": split, **columns})
    return rows
