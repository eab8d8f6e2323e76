"""TreeStore: an append-only SQLite file of token trees (write-ahead log), one per run.

What one asks for (task, step, arm, seed, kind, reward, stops, sizes) are columns; the tree's arrays are one compressed
blob. Each tree is one transaction, so a killed writer loses at most the tree in flight, and readers may look on while
a run writes. Blob, version 1: zlib over a little-endian uint32 header length, a JSON header [[name, dtype, shape], ...]
and the arrays' bytes in that order.
"""

from __future__ import annotations

import contextlib
import json
import math
import operator
import os
import sqlite3
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forethought.errors import DataError, RunError, nearest
from forethought.tree.tree import Stop, TokenTree

SCHEMA = 1
_STOPS = [stop.name.lower() for stop in Stop if stop is not Stop.NONE]
_COLUMNS = ["id", "task", "step", "arm", "seed", "kind", "reward", "nodes", "tokens", "leaves"]
_CREATE = f"""
CREATE TABLE schema (version INTEGER NOT NULL);
INSERT INTO schema VALUES ({SCHEMA});
CREATE TABLE trees (
    id INTEGER PRIMARY KEY, task TEXT NOT NULL, step INTEGER NOT NULL, arm TEXT NOT NULL, seed INTEGER NOT NULL,
    kind TEXT NOT NULL, reward REAL, nodes INTEGER NOT NULL, tokens INTEGER NOT NULL, leaves INTEGER NOT NULL,
    {", ".join(f"stop_{name} INTEGER NOT NULL" for name in _STOPS)},
    arrays BLOB NOT NULL
);
CREATE INDEX by_step ON trees (step, arm, seed);
CREATE INDEX by_task ON trees (task);
"""


@dataclass(frozen=True, kw_only=True)
class TreeRow:
    """What the store knows of a tree without loading it.

    reward: mean `TokenTree.outcome` of the leaves that have one, None where none has. stops: sampled nodes by stop
    reason.
    """

    id: int
    task: str
    step: int
    arm: str
    seed: int
    kind: str
    reward: float | None
    nodes: int
    tokens: int
    leaves: int
    stops: dict[str, int]


def _pack(arrays: dict[str, np.ndarray]) -> bytes:
    ordered = [(name, np.ascontiguousarray(a, a.dtype.newbyteorder("<"))) for name, a in arrays.items()]
    head = json.dumps([[name, a.dtype.str, list(a.shape)] for name, a in ordered]).encode()
    return zlib.compress(b"".join([struct.pack("<I", len(head)), head, *(a.tobytes() for _, a in ordered)]), 3)


def _unpack(blob: bytes) -> dict[str, np.ndarray]:
    data = zlib.decompress(blob)
    at = 4 + struct.unpack_from("<I", data)[0]
    out = {}
    for name, dtype, shape in json.loads(data[4:at]):
        count = math.prod(shape)
        array = np.frombuffer(data, dtype, count, at).reshape(shape)
        out[name] = array.astype(array.dtype.newbyteorder("="))  # a copy that can be written to
        at += array.nbytes
    return out


class TreeStore:
    """The trees of a run. A context manager.

    Args:
        path: the SQLite file, made if it is not there.
        readonly: for looking at a run, also while it writes; the file must exist.

    Raises:
        RunError: the file is not a tree store, is of a newer version, is damaged, in use or not writable, or the disk
            is full. Every method may raise it.
    """

    def __init__(self, path: str | Path, *, readonly: bool = False):
        self.path = Path(path)
        if readonly and not os.path.isfile(self.path):
            raise RunError(f"{self.path}: no such tree store (or no permission to look into its folder)")
        with self._errors():
            self._db = self._connect(readonly)
        try:
            with self._errors():
                self._prepare(readonly)
        except BaseException:
            self._db.close()
            raise

    def _connect(self, readonly: bool) -> sqlite3.Connection:
        # Autocommit, with explicit transactions. SQLite's own mutex serialises threads of one process.
        uri = f"{self.path.absolute().as_uri()}?mode={'ro' if readonly else 'rwc'}"
        wal = Path(f"{self.path}-wal")
        if readonly and not os.access(self.path.parent, os.W_OK) and not (wal.exists() and wal.stat().st_size):
            uri += "&immutable=1"  # a finished run in a folder where the log's index cannot be made
        return sqlite3.connect(uri, uri=True, timeout=30, isolation_level=None, check_same_thread=False)

    def _prepare(self, readonly: bool) -> None:
        if not readonly:
            # With a write-ahead log, NORMAL survives a kill whole; a power cut may cost the last trees, not the file.
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
        tables = {name for (name,) in self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not tables and not readonly:
            with self._transaction():
                for statement in filter(str.strip, _CREATE.split(";")):
                    self._db.execute(statement)
        elif not {"schema", "trees"} <= tables:
            raise RunError(f"{self.path}: is a database, but not a tree store")
        version = self._db.execute("SELECT version FROM schema").fetchone()[0]
        if version != SCHEMA:
            raise RunError(
                f"{self.path}: has schema version {version}, this package reads {SCHEMA}; update the package"
            )

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as err:
            text = str(err)
            fix = {
                "full": "; free some space (no stored tree is lost)",
                "I/O": "; the disk may be full or failing (no stored tree is lost)",
                "locked": "; another process is writing to it",
                "unable to open": "; check that its folder exists and is writable",
                "readonly": "; check that the file is writable",
                "not a database": "; it is not a tree store",
                "malformed": "; the file is damaged",
            }
            raise RunError(f"{self.path}: {text}{next((f for k, f in fix.items() if k in text), '')}") from err

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def close(self) -> None:
        """Close the file; the write-ahead log is folded into it."""
        self._db.close()

    def __enter__(self) -> TreeStore:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def append(
        self, tree: TokenTree, *, task: str, step: int, arm: str = "", seed: int = 0, kind: str = "train"
    ) -> int:
        """Store a tree; returns its id. It is on its way to disk when this returns: a kill does not lose it.

        Args:
            task: id of the task. step: learner step. arm, seed: which of a run's learners. kind: what the tree was made
                for, e.g. "train" or "eval".

        Raises:
            DataError: a meta dict of the tree is not strict JSON.
        """
        try:
            blob = _pack(tree.to_arrays())
        except (TypeError, ValueError) as err:
            raise DataError(f"tree of task {task!r}, step {step}: its meta cannot be stored: {err}") from None
        leaves = tree.leaves()
        rewards = np.array([tree.outcome(leaf) for leaf in leaves])
        rewards = rewards[~np.isnan(rewards)]
        stops = tree.stop[tree.sampled]
        values = [
            *(str(task), operator.index(step), arm, operator.index(seed), kind),
            float(rewards.mean()) if len(rewards) else None,
            *(tree.n_nodes, tree.n_tokens, len(leaves)),
            *(int((stops == Stop[name.upper()]).sum()) for name in _STOPS),
            blob,
        ]
        names = [*_COLUMNS[1:], *(f"stop_{name}" for name in _STOPS), "arrays"]
        insert = f"INSERT INTO trees ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
        with self._errors():
            return int(self._db.execute(insert, values).lastrowid or 0)

    def query(
        self,
        *,
        task: str | None = None,
        step: int | None = None,
        arm: str | None = None,
        seed: int | None = None,
        kind: str | None = None,
        stop: str | None = None,
        min_reward: float | None = None,
        max_reward: float | None = None,
        newest_first: bool = False,
        limit: int | None = None,
    ) -> list[TreeRow]:
        """The rows that fit all given conditions, oldest first; the trees themselves stay on disk (see `load`).

        Args:
            stop: at least one sampled node stopped for this reason: "eos", "string", "length", "env_done", "error".
            min_reward, max_reward: bounds of the mean reward, both included; trees without a reward do not fit.

        Raises:
            DataError: no such stop reason.
        """
        if stop is not None and stop not in _STOPS:
            raise DataError(f"stop={stop!r}: not a stop reason{nearest(stop, _STOPS)} (known: {', '.join(_STOPS)})")
        conditions = {
            "task = ?": task,
            "step = ?": step,
            "arm = ?": arm,
            "seed = ?": seed,
            "kind = ?": kind,
            "reward >= ?": min_reward,
            "reward <= ?": max_reward,
            f"stop_{stop} > ?": None if stop is None else 0,
        }
        used = {text: value for text, value in conditions.items() if value is not None}
        where = f"WHERE {' AND '.join(used)}" if used else ""
        names = ", ".join([*_COLUMNS, *(f"stop_{name}" for name in _STOPS)])
        order = "DESC" if newest_first else "ASC"
        select = f"SELECT {names} FROM trees {where} ORDER BY id {order} LIMIT ?"
        with self._errors():
            found = self._db.execute(select, [*used.values(), -1 if limit is None else limit]).fetchall()
        cut = len(_COLUMNS)
        return [
            TreeRow(**dict(zip(_COLUMNS, r[:cut], strict=True)), stops=dict(zip(_STOPS, r[cut:], strict=True)))
            for r in found
        ]

    def load(self, id: int) -> TokenTree:
        """The tree of a row.

        Raises:
            DataError: no such id. RunError: its blob is damaged.
        """
        with self._errors():
            found = self._db.execute("SELECT arrays FROM trees WHERE id = ?", [operator.index(id)]).fetchone()
        if found is None:
            raise DataError(f"{self.path}: no tree {id} (it holds {len(self)})")
        try:
            return TokenTree.from_arrays(_unpack(found[0]))
        except (zlib.error, struct.error, ValueError, KeyError, TypeError) as err:
            raise RunError(f"{self.path}: tree {id} is damaged: {err}") from err

    def truncate_after(self, step: int, *, arm: str | None = None, seed: int | None = None) -> int:
        """Before going on from a checkpoint of `step`: remove the trees of later steps; returns how many.

        Args:
            arm, seed: only those of this learner.
        """
        used = {"step > ?": step} | {f"{k} = ?": v for k, v in (("arm", arm), ("seed", seed)) if v is not None}
        with self._errors():
            return self._db.execute(f"DELETE FROM trees WHERE {' AND '.join(used)}", list(used.values())).rowcount

    def __len__(self) -> int:
        with self._errors():
            return self._db.execute("SELECT COUNT(*) FROM trees").fetchone()[0]
