"""The tree store: what goes in comes out, questions by column, damage, full disks, kills in the middle of a write."""

from __future__ import annotations

import math
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forethought.errors import DataError, RunError
from forethought.tree.store import SCHEMA, TreeStore
from forethought.tree.tree import Kind, Stop, TokenTree


def group(n: int = 3, length: int = 4, reward: float = math.nan, stop: Stop = Stop.EOS) -> TokenTree:
    """A prompt and n samples; the rewards are reward, reward + 1, ..."""
    tree = TokenTree([1, 2, 3], task="t", seed=5, meta={"text": "é"})
    for i in range(n):
        ids = [10 + i] * length
        tree.add(0, ids, sampled=True, logprobs=[-0.5 * i] * length, stop=stop, reward=reward + i, meta={"i": i})
    return tree


def same(a: TokenTree, b: TokenTree) -> bool:
    x, y = a.to_arrays(), b.to_arrays()
    return list(x) == list(y) and all(
        x[k].dtype == y[k].dtype and np.array_equal(x[k], y[k], equal_nan=x[k].dtype.kind == "f") for k in x
    )


@st.composite
def trees(draw) -> TokenTree:
    ids = st.lists(st.integers(0, 2**31 - 1), max_size=5)
    tree = TokenTree(draw(ids), task=draw(st.text()), seed=draw(st.integers(0, 2**63 - 1)))
    for _ in range(draw(st.integers(0, 6))):
        tokens = draw(ids)
        tree.add(
            draw(st.integers(0, tree.n_nodes - 1)),
            tokens,
            kind=draw(st.sampled_from(list(Kind))),
            sampled=draw(st.booleans()),
            logprobs=draw(st.none() | st.just([-1.5] * len(tokens))),
            stop=draw(st.sampled_from(list(Stop))),
            reward=draw(st.floats()),
            meta=draw(st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=2)),
        )
    if draw(st.booleans()):
        tree.column("reference")[:] = 0.25
    return tree


@settings(deadline=None)
@given(tree=trees())
def test_a_tree_comes_out_as_it_went_in_and_can_grow(tree, tmp_path_factory):
    with TreeStore(tmp_path_factory.mktemp("s") / "trees.sqlite") as store:
        loaded = store.load(store.append(tree, task=tree.task, step=1))
        assert same(loaded, tree)
        for t in (tree, loaded):
            t.add(t.n_nodes - 1, [7, 8], reward=1.0)
        assert same(loaded, tree) and loaded.children(tree.n_nodes - 2) == [tree.n_nodes - 1]


def test_rows_tell_what_is_inside(tmp_path):
    tree = group(3, reward=1.0)
    tree.stop[3] = Stop.LENGTH
    tree.add(1, [9], kind=Kind.OBSERVATION, stop=Stop.ENV_DONE)  # not sampled; makes node 1 an inner node
    with TreeStore(tmp_path / "t.sqlite") as store:
        assert store.append(tree, task="a", step=7, arm="grpo", seed=2, kind="eval") == 1
        (row,) = store.query()
        assert (row.id, row.task, row.step, row.arm, row.seed, row.kind) == (1, "a", 7, "grpo", 2, "eval")
        assert row.reward == 2.5  # leaves 2 and 3; the new leaf has none, node 1 is no leaf any more
        assert (row.nodes, row.tokens, row.leaves) == (5, 16, 3)
        assert row.stops == {"eos": 2, "string": 0, "length": 1, "env_done": 0, "error": 0}
        store.append(group(2), task="b", step=8)
        assert store.query(task="b")[0].reward is None
        assert len(store) == 2


def test_questions(tmp_path):
    with TreeStore(tmp_path / "t.sqlite") as store:
        for step in range(4):
            for arm in ("a", "b"):
                stop = Stop.LENGTH if step == 2 else Stop.EOS
                store.append(
                    group(1, reward=step, stop=stop), task=f"task{step % 2}", step=step, arm=arm, seed=step % 3
                )
        store.append(group(1), task="x", step=9, kind="eval")

        def ids(**kwargs):
            return [row.id for row in store.query(**kwargs)]

        assert ids() == list(range(1, 10))
        assert ids(task="task1", arm="b") == [4, 8]
        assert ids(step=2) == ids(stop="length") == [5, 6]
        assert ids(step=0, seed=0) == [1, 2] and ids(seed=0) == [1, 2, 7, 8, 9]
        assert ids(kind="eval") == [9] and ids(kind="train", newest_first=True, limit=2) == [8, 7]
        assert ids(min_reward=2) == [5, 6, 7, 8] and ids(min_reward=1, max_reward=1, arm="a") == [3]
        assert ids(task="'; DROP TABLE trees; --") == []
        with pytest.raises(DataError, match="stop='lenght': not a stop reason; did you mean 'length'?"):
            store.query(stop="lenght")
        with pytest.raises(DataError, match=r"no tree 99 \(it holds 9\)"):
            store.load(99)


def test_truncating_for_a_resume(tmp_path):
    with TreeStore(tmp_path / "t.sqlite") as store:
        for step in (1, 2, 3):
            for arm, seed in (("a", 0), ("a", 1), ("b", 0)):
                store.append(group(1), task="t", step=step, arm=arm, seed=seed)
        assert store.truncate_after(2, arm="a", seed=1) == 1
        assert store.truncate_after(1, arm="a") == 3
        assert [(r.step, r.arm, r.seed) for r in store.query(arm="a")] == [(1, "a", 0), (1, "a", 1)]
        assert store.truncate_after(0) == 5 and len(store) == 0
        assert store.append(group(1), task="t", step=1) == 1  # ids as in an unbroken run


def test_a_store_goes_on_where_it_was_closed_and_can_be_read_while_it_is_written(tmp_path):
    path = tmp_path / "t.sqlite"
    with TreeStore(path) as store:
        store.append(group(1), task="t", step=1)
        with TreeStore(path, readonly=True) as reader:
            assert len(reader) == 1
            store.append(group(2), task="t", step=2)
            assert [row.step for row in reader.query()] == [1, 2] and same(reader.load(2), group(2))
            with pytest.raises(RunError, match="readonly database; check that the file is writable"):
                reader.append(group(1), task="t", step=3)
    assert [p.name for p in tmp_path.iterdir()] == ["t.sqlite"]  # one file when closed
    with TreeStore(path) as store:
        assert store.append(group(1), task="t", step=3) == 3


def test_reading_a_finished_run_in_a_folder_of_someone_else():
    program = (
        "import os, sys\nfrom forethought.tree.store import TreeStore\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "s = TreeStore(sys.argv[1], readonly=True); print(len(s), s.load(1).n_nodes)"
    )
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to other users
        path = Path(folder) / "t.sqlite"
        with TreeStore(path) as store:
            store.append(group(1), task="t", step=1)
        os.chmod(folder, 0o555)
        done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True)
        os.chmod(folder, 0o755)
    assert done.stdout == "1 2\n", done.stderr


def test_threads_of_one_process_may_append(tmp_path):
    with TreeStore(tmp_path / "t.sqlite") as store:
        work = [threading.Thread(target=lambda i=i: store.append(group(i), task=str(i), step=i)) for i in range(1, 9)]
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
        assert sorted(row.nodes - 1 for row in store.query()) == list(range(1, 9))


# -- bad input -------------------------------------------------------------------------------------------------------


def test_meta_that_is_not_json_is_refused_and_nothing_is_stored(tmp_path):
    with TreeStore(tmp_path / "t.sqlite") as store:
        for meta in ({"x": math.nan}, {"x": {1}}):
            tree = TokenTree([1], meta=meta)
            with pytest.raises(DataError, match="tree of task 'q', step 3: its meta cannot be stored"):
                store.append(tree, task="q", step=3)
        assert len(store) == 0


def test_files_that_are_no_tree_store(tmp_path):
    (tmp_path / "text").write_text("this is no database, and longer than the header of one " * 4)
    with pytest.raises(RunError, match="text: file is not a database; it is not a tree store"):
        TreeStore(tmp_path / "text")
    other = sqlite3.connect(tmp_path / "other")
    other.execute("CREATE TABLE cats (name)")
    other.commit()
    other.close()
    with pytest.raises(RunError, match="other: is a database, but not a tree store"):
        TreeStore(tmp_path / "other")
    with pytest.raises(RunError, match="none: no such tree store"):
        TreeStore(tmp_path / "none", readonly=True)
    with pytest.raises(RunError, match="check that its folder exists and is writable"):
        TreeStore(tmp_path / "no" / "t.sqlite")


def test_a_newer_schema_is_refused(tmp_path):
    TreeStore(tmp_path / "t.sqlite").close()
    db = sqlite3.connect(tmp_path / "t.sqlite")
    assert db.execute("SELECT version FROM schema").fetchall() == [(SCHEMA,)] == [(1,)]
    db.execute("UPDATE schema SET version = 2")
    db.commit()
    db.close()
    with pytest.raises(RunError, match="has schema version 2, this package reads 1; update the package"):
        TreeStore(tmp_path / "t.sqlite")


@pytest.mark.parametrize("damage", ["cut", "bits", "header", "empty"])
def test_a_damaged_blob_is_named_and_the_others_load(tmp_path, damage):
    path = tmp_path / "t.sqlite"
    with TreeStore(path) as store:
        for step in (1, 2):
            store.append(group(3, 50), task="t", step=step)
    db = sqlite3.connect(path)
    (blob,) = db.execute("SELECT arrays FROM trees WHERE id = 1").fetchone()
    bad = {
        "cut": blob[: len(blob) // 2],
        "bits": blob[:40] + bytes([blob[40] ^ 0xFF]) + blob[41:],
        "header": zlib.compress(b"\xff\xff\xff\x7f{}"),
        "empty": b"",
    }[damage]
    db.execute("UPDATE trees SET arrays = ? WHERE id = 1", [bad])
    db.commit()
    db.close()
    with TreeStore(path) as store:
        with pytest.raises(RunError, match="tree 1 is damaged"):
            store.load(1)
        assert same(store.load(2), group(3, 50))


def test_a_full_disk_loses_no_stored_tree(tmp_path):
    path = tmp_path / "t.sqlite"
    with TreeStore(path) as store:
        store.append(group(1), task="t", step=1)
        (pages,) = store._db.execute("PRAGMA page_count").fetchone()
        store._db.execute(f"PRAGMA max_page_count = {pages + 2}")
        noise = TokenTree(np.random.default_rng(0).integers(0, 2**31, 50_000))
        with pytest.raises(RunError, match="database or disk is full; free some space"):
            store.append(noise, task="t", step=2)
        store._db.execute("PRAGMA max_page_count = 100000")
        assert store.append(noise, task="t", step=2) == 2
    with TreeStore(path) as store:
        assert len(store) == 2 and same(store.load(2), noise)


LIMITED = """
import resource, sys
import numpy as np
from forethought.errors import RunError
from forethought.tree.store import TreeStore
from forethought.tree.tree import TokenTree
store = TreeStore(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
for step in range(1000):
    try:
        store.append(TokenTree(np.random.default_rng(step).integers(0, 2**31, 2000)), task="t", step=step)
    except RunError as err:
        print(step, err, flush=True)
        break
import os; os._exit(0)
"""


def test_a_real_limit_on_file_size(tmp_path):
    path = tmp_path / "t.sqlite"
    done = subprocess.run([sys.executable, "-c", LIMITED, path], capture_output=True, text=True, timeout=60)
    step, _, message = done.stdout.partition(" ")
    assert "disk" in message and "no stored tree is lost" in message, done.stderr
    with TreeStore(path) as store:
        assert [row.step for row in store.query()] == list(range(int(step))) and int(step) > 10
        for row in store.query():
            expected = TokenTree(np.random.default_rng(row.step).integers(0, 2**31, 2000))
            assert same(store.load(row.id), expected)


# -- kill -9 in the middle of a write --------------------------------------------------------------------------------

WRITER = """
import sys
import numpy as np
from forethought.tree.store import TreeStore
from forethought.tree.tree import TokenTree
store = TreeStore(sys.argv[1])
step = len(store)
while True:
    rng = np.random.default_rng(step)
    store.append(TokenTree(rng.integers(0, 2**31, int(rng.integers(1, 60_000)))), task=str(step), step=step)
    print(step, flush=True)
    step += 1
"""


def test_kill_9_at_random_moments_loses_at_most_the_tree_in_flight(tmp_path):
    path = tmp_path / "t.sqlite"
    chance = random.Random(3)
    stored = 0
    for _ in range(12):
        child = subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True)
        guard = threading.Timer(60, child.kill)
        guard.start()
        assert child.stdout
        first = child.stdout.readline()
        time.sleep(chance.uniform(0, 0.04))  # an append takes some milliseconds
        child.send_signal(signal.SIGKILL)
        reported = [int(line) for line in [first, *child.stdout.readlines()] if line.endswith("\n")]
        child.wait()
        guard.cancel()
        assert child.returncode == -signal.SIGKILL and reported[0] == stored
        with TreeStore(path) as store:
            assert store._db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            rows = store.query()
            assert [row.step for row in rows] == list(range(len(rows)))
            assert reported[-1] + 1 <= len(rows) <= reported[-1] + 2  # stored, but killed before it was reported
            for row in rows[stored:]:
                rng = np.random.default_rng(row.step)
                assert same(store.load(row.id), TokenTree(rng.integers(0, 2**31, int(rng.integers(1, 60_000)))))
            stored = len(rows)
    assert stored >= 12


SUICIDE = """
import os, signal, sys
from forethought.tree.store import TreeStore
from forethought.tree.tree import TokenTree
store = TreeStore(sys.argv[1])
store._db.create_function("die", 0, lambda: os.kill(os.getpid(), signal.SIGKILL))
store._db.execute("PRAGMA cache_size = 1")  # so that pages of the open transaction are already in the log
store._db.execute(f"CREATE TEMP TRIGGER t {sys.argv[2]} INSERT ON main.trees BEGIN SELECT die(); END")
store.append(TokenTree(i * 7919 % 10007 for i in range(50000)), task="lost", step=9)
"""


@pytest.mark.parametrize("moment", ["BEFORE", "AFTER"])
def test_a_kill_inside_the_insert_itself(tmp_path, moment):
    path = tmp_path / "t.sqlite"
    with TreeStore(path) as store:
        store.append(group(3), task="kept", step=1)
    done = subprocess.run([sys.executable, "-c", SUICIDE, path, moment], timeout=60)
    assert done.returncode == -signal.SIGKILL
    if moment == "AFTER":
        assert Path(f"{path}-wal").stat().st_size > 20_000  # a half-written transaction was left behind
    with TreeStore(path) as store:
        assert [row.task for row in store.query()] == ["kept"] and same(store.load(1), group(3))
        assert store.append(group(1), task="next", step=2) == 2


def test_a_log_cut_at_any_length_loses_only_the_last_trees(tmp_path):
    path = tmp_path / "t.sqlite"
    with TreeStore(path) as store:
        for step in range(4):
            store.append(group(2, 2000), task="t", step=step)
        data, log = path.read_bytes(), Path(f"{path}-wal").read_bytes()
    counts = []
    for cut in np.linspace(0, len(log), 23).astype(int):
        copy = tmp_path / f"cut{cut}.sqlite"
        copy.write_bytes(data)
        Path(f"{copy}-wal").write_bytes(log[:cut])
        with TreeStore(copy) as store:
            assert [row.step for row in store.query()] == list(range(len(store)))
            assert all(same(store.load(row.id), group(2, 2000)) for row in store.query())
            counts.append(len(store))
    assert counts == sorted(counts) and set(counts) == {0, 1, 2, 3, 4}
