"""The worker pool and the Verifier: limits per job, replacement, threads, nothing left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from forethought.errors import ConfigError, RewardError
from forethought.rewards.verify import Verifier, check
from forethought.rewards.workers import WorkerPool

HERE = Path(__file__).parent
TOWER = r"\boxed{\frac{7^{7^{7^{7}}} - 1}{6}}"
HANG = r"\boxed{\sum_{k=1}^{10^{10}} \frac{1}{k^2+\sin k}}"


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    with WorkerPool("pool_handlers:work", 2) as pool:
        yield pool


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def workers_of(pid):
    """Children of `pid` (any thread) that run our workers, zombies included."""
    out = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    out.append(int(entry.name))
            except OSError:
                pass
    return out


def gone(pids, seconds=5.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(alive(p) for p in pids):
        time.sleep(0.02)
    return not any(alive(p) for p in pids)


def test_results_come_in_order(pool):
    results = pool.map([["double", i] for i in range(100)], timeout=10)
    assert [r.value for r in results] == [2 * i for i in range(100)]
    assert {r.status for r in results} == {"ok"}
    assert pool.map([], timeout=1) == []


def test_a_hanging_job_costs_its_own_limit_only(pool):
    pool.map([["double", 0]] * 2, timeout=10)
    begin = time.monotonic()
    results = pool.map([["double", 1], ["spin", 0], ["double", 2], ["double", 3]], timeout=0.5)
    assert time.monotonic() - begin < 5
    assert [r.status for r in results] == ["ok", "timeout", "ok", "ok"]
    assert [r.value for r in results] == [2, None, 4, 6]
    assert results[1].detail == "limit: time (0.5 s)" and results[1].seconds >= 0.5
    assert pool.processes_started <= 4


def test_a_job_that_ends_or_fails_does_not_take_others_along(pool):
    jobs = [["exit", 3], ["double", 1], ["raise", 7], ["memory", 10**12], ["double", 2], ["print", 0]]
    results = pool.map(jobs, timeout=10)
    assert [r.status for r in results] == ["died", "ok", "error", "memory", "ok", "ok"]
    assert "exit 3" in results[0].detail
    assert results[2].detail == "ValueError: bad 7"
    assert results[3].detail == "limit: memory (512 MiB)"
    assert results[5].value == "printed"


def test_memory_limit_is_beyond_the_base(pool):
    results = pool.map([["memory", 300 * 2**20], ["memory", 700 * 2**20]], timeout=10)
    assert [r.status for r in results] == ["ok", "memory"]


def test_imports_can_be_kept_out_of_the_limit(pool):
    assert pool.map([["pause", 0.6]], timeout=0.3)[0].value == "paused"


def test_a_worker_is_killed_with_its_children(pool, tmp_path):
    note = tmp_path / "pid"
    assert pool.map([["child_then_hang", str(note)]], timeout=3)[0].status == "timeout"
    assert gone([int(note.read_text())])


def test_workers_persist_between_calls(pool):
    first = {r.value for r in pool.map([["pid", 0]] * 20, timeout=10)}
    second = {r.value for r in pool.map([["pid", 0]] * 20, timeout=10)}
    assert first | second and len(first | second) <= 2 and pool.processes_started <= 2


def test_close_leaves_nothing_and_refuses_more(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    pool = WorkerPool("pool_handlers:work", 2)
    pids = [r.value for r in pool.map([["pid", 0], ["sleep", 0.2], ["pid", 0]], timeout=10) if r.value != "slept"]
    pool.close()
    pool.close()
    assert gone(pids) and not set(pids) & set(workers_of(os.getpid()))
    with pytest.raises(RewardError, match="closed"):
        pool.map([["double", 1]], timeout=1)


def test_close_from_another_thread_ends_a_running_call(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    pool = WorkerPool("pool_handlers:work", 1)
    pool.map([["double", 1]], timeout=10)
    threading.Timer(0.3, pool.close).start()
    begin = time.monotonic()
    try:
        results = pool.map([["spin", 0]], timeout=30)
        assert results[0].status == "died"
    except RewardError as error:
        assert "closed" in str(error)
    assert time.monotonic() - begin < 10


def test_works_from_threads_that_end_before_the_pool(pool):
    out = []

    def use():
        out.append(pool.map([["double", 5]], timeout=10)[0].value)

    for _ in range(4):  # the parent-death signal follows the thread that starts a process, not the process
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
    time.sleep(0.1)
    pids = {r.value for r in pool.map([["pid", 0]] * 8, timeout=10)}
    assert out == [10] * 4 and all(alive(p) for p in pids) and pool.processes_started <= 2


def test_many_threads_share_a_pool(pool):
    out = [None] * 6

    def use(i):
        out[i] = [r.value for r in pool.map([["double", 10 * i + j] for j in range(10)], timeout=20)]

    threads = [threading.Thread(target=use, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert out == [[2 * (10 * i + j) for j in range(10)] for i in range(6)]


def test_bad_settings_and_handlers(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    with pytest.raises(ConfigError, match="workers=0"):
        WorkerPool("pool_handlers:work", 0)
    with pytest.raises(ConfigError, match="handler='work'"):
        WorkerPool("work")
    with WorkerPool("no_such_module:work", 1) as pool:
        with pytest.raises(RewardError, match=r"(?s)did not start.*No module named 'no_such_module'"):
            pool.map([1], timeout=1)
    with WorkerPool("pool_handlers:work", 1) as pool, pytest.raises(ConfigError, match="timeout=0"):
        pool.map([1], timeout=0)


def test_a_result_that_is_not_json_is_an_error(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    with WorkerPool("pool_handlers:broken", 1) as pool:
        result = pool.map([1], timeout=5)[0]
    assert result.status == "error" and "JSON" in result.detail


@pytest.mark.parametrize("ending", ["exit", "kill", "raise"])
def test_no_worker_outlives_its_parent(ending):
    action = {"exit": "sys.exit(0)", "kill": "os.kill(os.getpid(), signal.SIGKILL)", "raise": "1 / 0"}[ending]
    script = f"""
        import os, signal, sys, time
        sys.path.insert(0, {str(HERE)!r})
        from forethought.rewards.workers import WorkerPool
        pool = WorkerPool("pool_handlers:work", 2)
        jobs = [["pid", 0], ["sleep", 0.2], ["pid", 0], ["sleep", 0.2], ["pid", 0]]
        pids = {{r.value for r in pool.map(jobs, timeout=10)}}
        print(*[p for p in pids if p != "slept"], flush=True)
        import threading
        threading.Thread(target=pool.map, args=([["spin", 0]],), kwargs=dict(timeout=60), daemon=True).start()
        time.sleep(0.2)
        {action}
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=30)
    pids = [int(p) for p in done.stdout.split()]
    assert pids and gone(pids)
    assert done.returncode == {"exit": 0, "kill": -signal.SIGKILL, "raise": 1}[ending]


# -- the Verifier ---------------------------------------------------------------------------------------------------


def test_h16_a_tower_in_a_batch_changes_nothing_else():
    pairs = [(rf"\boxed{{{i}}}", i if i % 2 else i + 1) for i in range(8)]
    pairs[2] = (TOWER, "12")
    with Verifier(workers=2, timeout=2.0) as verifier:
        verifier.check_many(pairs[:2])
        begin = time.monotonic()
        verdicts = verifier.check_many(pairs)
        assert time.monotonic() - begin < 2
    assert [v.correct for v in verdicts] == [False, True, False, True, False, True, False, True]
    assert "limit" in verdicts[2].reason
    assert verifier.limits == 1 and verifier.calls == 10


def test_a_hanging_check_is_wrong_logged_and_replaced(caplog):
    with Verifier(workers=1, timeout=0.5) as verifier:
        verdicts = verifier.check_many([(r"\boxed{1}", 1), (HANG, "1/3"), (r"\boxed{2}", 2)])
        again = verifier.check(r"\boxed{\sum_{k=1}^{10} k}", "55")
    assert [v.correct for v in verdicts] == [True, False, True]
    assert verdicts[1].timed_out and verdicts[1].extracted and verdicts[1].tier is None
    assert verdicts[1].seconds >= 0.5 and verifier.timeouts == 1
    assert "limit: time" in caplog.text
    assert again.correct and again.tier == "symbolic"


def test_single_checks_have_the_same_limit():
    verdict = check(HANG, "1/3", timeout=0.5)
    assert verdict.timed_out and not verdict.correct and verdict.reason == "limit: time (0.5 s)"
    assert check(r"\boxed{\int_0^1 x^2 dx}", r"\frac13").correct


def test_format_of_a_pool_verdict_equals_that_of_a_check():
    responses = [(r"\boxed{2/4}", "1/2"), ("no box", 3), (r"\boxed{7", 7), (r"\boxed{x=3}", 3)]
    with Verifier(workers=1) as verifier:
        pooled = verifier.check_many(responses)
    single = [check(*r) for r in responses]
    strip = [(v.extracted, v.correct, v.tier, v.timed_out, v.reason, v.answer) for v in pooled]
    assert strip == [(v.extracted, v.correct, v.tier, v.timed_out, v.reason, v.answer) for v in single]
    assert verifier.tiers == {"rational": 1, "none": 2, "structural": 1}


def test_settings_of_a_verifier_count():
    with Verifier(1, mode="train-strict", extract="last_number", thinking_end="</think>") as verifier:
        verdicts = verifier.check_many([("3</think> 2/4", "1/2"), ("3</think> is 1/2", "1/2"), ("1/2", "1/2")])
    assert [(v.extracted, v.correct) for v in verdicts] == [(True, False), (True, True), (False, False)]
    with pytest.raises(ConfigError, match="mode='strict'"):
        Verifier(mode="strict")
    with Verifier(1) as verifier, pytest.raises(RewardError, match="empty"):
        verifier.check_many([(r"\boxed{1}", "")])


def test_three_hundred_easy_checks_take_well_under_the_promised_second():
    """The target is 300 a second; the bound here is loose, for loaded machines."""
    pairs = [(rf"thus \boxed{{\frac{{{i}}}{{{i + 1}}}}}", f"{i}/{i + 1}") for i in range(1, 601)]
    with Verifier(workers=2) as verifier:
        verifier.check_many(pairs[:4])
        begin = time.monotonic()
        verdicts = verifier.check_many(pairs)
        seconds = time.monotonic() - begin
    assert all(v.correct for v in verdicts)
    assert seconds < 10
