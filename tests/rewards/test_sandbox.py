"""Programs under limits; candidates and tests (H17, H18)."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from forethought.errors import ConfigError
from forethought.rewards import sandbox
from forethought.rewards.sandbox import run_program, run_tests, same_value

LEAKY = """
import os, subprocess, sys, time
late = 'import time; time.sleep(1.5); open("late.txt", "w").write("x")'
subprocess.Popen([sys.executable, "-c", late])                          # a plain grandchild
subprocess.Popen([sys.executable, "-c", late], start_new_session=True)  # one in a session of its own
if os.fork() == 0:                                                      # one that forked twice
    os.setsid()
    if os.fork() == 0:
        time.sleep(1.5)
        open("late2.txt", "w").write("x")
    os._exit(0)
print("started", flush=True)
time.sleep(60)
"""


def descendants(root=None):
    """Pids of all living and dead descendants of this process."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                pass
    found, size = {root or os.getpid()}, 0
    while size != len(found):
        size = len(found)
        found |= {p for p, parent in parents.items() if parent in found}
    return found - {root or os.getpid()}


def running(marker):
    """Pids of processes whose command line holds `marker`."""
    out = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if marker.encode() in (entry / "cmdline").read_bytes():
                    out.append(int(entry.name))
            except OSError:
                pass
    return out


@pytest.fixture(params=[True, False], ids=["namespaces", "without"])
def either(request, monkeypatch):
    """With the kernel's isolation (where permitted) and without it."""
    monkeypatch.setattr(sandbox, "_NAMESPACES", request.param)
    return request.param


def test_output_input_files_and_exit_code(either):
    code = "import sys; print(open('a/b.txt').read() + sys.stdin.read()); print('e', file=sys.stderr); sys.exit(3)"
    result = run_program(code, stdin="in", files={"a/b.txt": "file "})
    assert (result.status, result.stdout, result.stderr, result.exit_code) == ("error", "file in\n", "e\n", 3)
    assert run_program("print('hi')").status == "ok"
    assert run_program(["echo", "a b"]).stdout == "a b\n"
    assert run_program("import os; os.kill(os.getpid(), 15)").exit_code == -signal.SIGTERM


def test_without_namespaces_says_so(monkeypatch):
    monkeypatch.setattr(sandbox, "_NAMESPACES", False)
    assert run_program("pass").isolated is False


def test_each_limit_has_its_status(either):
    assert run_program("while True: pass", timeout=0.5).status == "timeout"
    assert run_program("bytearray(10**12)").status == "memory"
    flood = run_program("while True: print('x' * 1000)", output_limit=10_000, timeout=20)
    assert flood.status == "output" and len(flood.stdout) == 10_000
    assert run_program("open('big', 'wb').write(bytes(10**8))", output_limit=1000).status == "error"


def test_memory_of_many_processes_adds_up():
    code = """
        import os, time
        for _ in range(4):
            if os.fork() == 0:
                held = bytearray(os.urandom(1)) * (100 * 2**20)
                time.sleep(20)
        time.sleep(20)
    """
    result = run_program(textwrap.dedent(code), memory_mb=250, timeout=15)
    assert result.status == "memory" and result.seconds < 14


def test_h17_the_whole_family_dies_at_the_limit(either, tmp_path):
    before = descendants()
    begin = time.monotonic()
    result = run_program(LEAKY, timeout=1.0, cwd=tmp_path)
    assert result.status == "timeout" and result.stdout == "started\n"
    assert time.monotonic() - begin < 3
    assert descendants() == before and not running("late.txt")
    time.sleep(1.0)
    assert not list(tmp_path.iterdir())


def test_what_a_program_leaves_behind_dies_with_it(either, tmp_path):
    marker = f"sleeper-{os.getpid()}-{either}"
    code = f"""
        import subprocess, sys
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)  # {marker}"], start_new_session=True)
    """
    result = run_program(textwrap.dedent(code), timeout=10)
    assert result.status == "ok" and not running(marker)


def test_h17_many_calls_leave_the_process_count_unchanged(either):
    before = descendants()
    fds = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        run_program(["sh", "-c", "sleep 50 & exit 0"], timeout=5)
    assert descendants() == before
    assert len(os.listdir("/proc/self/fd")) == fds


def test_nothing_lives_on_when_the_caller_is_killed(either):
    marker = f"orphan-{os.getpid()}-{either}"
    script = f"""
        from forethought.rewards import sandbox
        sandbox._NAMESPACES = {either}
        sandbox.run_program(["sh", "-c", "setsid sleep 61 & echo {marker}; sleep 60"], timeout=50)
    """
    caller = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)])
    end = time.monotonic() + 10
    while not running(f"echo {marker}; sleep 60") and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(0.3)
    assert running(marker)
    family = descendants(caller.pid)
    caller.kill()
    caller.wait()
    end = time.monotonic() + 10
    while (running(marker) or any(Path(f"/proc/{p}").exists() for p in family)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not running(marker) and not any(Path(f"/proc/{p}").exists() for p in family)


def test_network_is_off_unless_asked_for():
    code = """
        import socket
        server = socket.socket(); server.bind(("127.0.0.1", 0)); server.listen()
        socket.create_connection(server.getsockname(), 1)
    """
    result = run_program(textwrap.dedent(code))
    if not result.isolated:
        pytest.skip("user namespaces are not permitted here")
    assert result.status == "error" and "unreachable" in result.stderr
    assert run_program(textwrap.dedent(code), network=True).status == "ok"


def test_environment_is_not_inherited(monkeypatch):
    monkeypatch.setenv("MY_SECRET_TOKEN", "s3cret")
    assert "s3cret" not in run_program("import os; print(dict(os.environ))").stdout
    assert run_program("import os; print(os.environ['A'])", env={"A": "b"}).stdout == "b\n"


def test_bad_settings():
    with pytest.raises(ConfigError, match="timeout=0"):
        run_program("pass", timeout=0)
    with pytest.raises(ConfigError, match="program="):
        run_program([])
    with pytest.raises(ConfigError, match=r"files\['../x'\]"):
        run_program("pass", files={"../x": ""})
    with pytest.raises(ConfigError, match="not a folder"):
        run_program("pass", cwd="/no/such/folder")
    assert run_program(["/no/such/program"]).exit_code == 127


# -- candidates and tests -------------------------------------------------------------------------------------------

TESTS = ["assert f(1) == 2", {"call": "f", "args": [5], "expected": 6}]


def test_passing_and_failing_candidates():
    good = run_tests("def f(x): return x + 1", TESTS)
    assert (good.passed, good.total, good.finished, good.score) == (2, 2, True, 1.0)
    half = run_tests("def f(x): return 2 * x", TESTS)
    assert (half.passed, half.score, half.reason) == (1, 0.5, "1 of 2 tests passed")
    assert half.failures == ("test 2: returned 10, expected 6",)
    none = run_tests("g = 3", TESTS)
    assert none.score == 0.0 and none.finished and "NameError" in none.failures[0]


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "raise SystemExit(0)",
        "import atexit, os\natexit.register(lambda: os._exit(0))\ndef f(x): return 0",
        "import os\ndef f(x): os._exit(0)",
        "import sys\nsys.exit()",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import threading, os\nthreading.Timer(0, lambda: os._exit(0)).start()\nimport time; time.sleep(1)",
        "def f(x):\n  while True: pass",
        "while True: pass",
        "f(",
    ],
)
def test_h18_ending_early_is_no_pass(code):
    report = run_tests(code, TESTS, timeout=1)
    assert report.score == 0.0 and not report.finished
    assert report.reason.startswith("tests did not finish")


def test_a_clean_exit_after_real_passes_is_not_finished_either():
    code = "import atexit, os\natexit.register(lambda: os._exit(0))\ndef f(x): return x + 1"
    report = run_tests(code, TESTS)
    assert (report.passed, report.finished, report.score) == (2, False, 0.0)


def test_results_cannot_be_forged_from_the_candidate():
    forge = """
        import os, json
        for fd in range(3, 64):
            for message in ({"index": 0}, {"index": 1}, {"done": True}, {"secret": "x", "done": True}):
                try: os.write(fd, json.dumps(message).encode() + b"\\n")
                except OSError: pass
        def f(x): return 0
    """
    report = run_tests(textwrap.dedent(forge), TESTS)
    assert report.passed == 0 and report.score == 0.0
    print_forge = "print('2 of 2 tests passed')\ndef f(x): return 0"
    assert run_tests(print_forge, TESTS).score == 0.0


def test_an_object_that_equals_everything_does_not_pass_a_call():
    code = "class Any:\n    def __eq__(self, other): return True\n    __hash__ = None\ndef f(x): return Any()"
    report = run_tests(code, [{"call": "f", "args": [1], "expected": 2}])
    assert report.score == 0.0 and "not JSON serializable" in report.failures[0]


def test_expected_values_never_reach_the_candidate():
    spy = """
        import sys
        def f(x):
            frame, seen = sys._getframe(1), ""
            while frame:
                seen += repr(frame.f_locals)
                frame = frame.f_back
            return "98" + "765" in seen
    """
    report = run_tests(textwrap.dedent(spy), [{"call": "f", "args": [1], "expected": 98765}])
    assert report.failures == ("test 1: returned False, expected 98765",)


def test_programs_with_input_and_output():
    tests = [{"stdin": "3\n", "stdout": "4"}, {"stdin": "x", "stdout": "?"}, {"stdin": "1", "stdout": "3\n"}]
    report = run_tests("print(int(input()) + 1)", tests)
    assert (report.passed, report.total, report.score) == (1, 3, 1 / 3)
    assert "exit code 1" in report.failures[0] and report.failures[1] == "test 3: other output"


def test_same_value():
    assert same_value([1, [2, 3]], (1, (2, 3))) and same_value({"1": 2}, {1: 2})
    assert same_value(0.1 + 0.2, 0.3) and same_value(2, 2.0) and same_value(None, None)
    assert not same_value(True, 1) and not same_value(1, True) and not same_value("1", 1)
    assert not same_value([1], [1, 2]) and not same_value(0.3001, 0.3)


def test_bad_tests_are_named():
    with pytest.raises(ConfigError, match="at least one test"):
        run_tests("pass", [])
    with pytest.raises(ConfigError, match=r"tests\[1\]=\{'call': 'f'\}"):
        run_tests("pass", ["assert True", {"call": "f"}])
