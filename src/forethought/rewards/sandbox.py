"""Run a program, or a candidate solution with its tests, under limits and without leftovers.

`run_program` gives time, memory, output and file-size limits, no network where the kernel permits that, and ends the
whole tree of descendants: nothing lives on after it returns, no zombie either, also when this process is killed.
`run_tests` counts tests that the test side itself reported as passed, never an exit code.

What it is not: a wall against a determined attacker. The program runs as the current user and can read and write this
user's files; for hostile code run Forethought in a container or a virtual machine. Where user namespaces are not
permitted (`SandboxResult.isolated` is False) the network stays reachable and the tree is killed by walking it.
Linux and macOS; on macOS only the process group is killed.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from forethought.errors import ConfigError, RewardError

_HERE = Path(__file__).parent
_GRACE_S = 10.0  # for the supervisor to clean up, before it is killed itself
_NAMESPACES = True  # False leaves out the kernel's isolation, as where it is not permitted (for tests)
_OUT_OF_MEMORY = (b"MemoryError", b"std::bad_alloc", b"Cannot allocate memory")

Status = Literal["ok", "error", "timeout", "memory", "output"]


@dataclass(frozen=True)
class SandboxResult:
    """How a program ended.

    status "ok": exit code 0; "error": another code or a signal (negative); "timeout", "memory", "output": that limit
    was passed. seconds: wall time of the program. isolated: it ran in namespaces of its own (pid, user, and net with
    the network off).
    """

    status: Status
    stdout: str
    stderr: str
    seconds: float
    exit_code: int | None = None
    isolated: bool = False


def run_program(
    program: str | Sequence[str],
    *,
    timeout: float = 10.0,
    memory_mb: int = 512,
    output_limit: int = 1 << 20,
    network: bool = False,
    stdin: str = "",
    files: Mapping[str, str | bytes] | None = None,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
) -> SandboxResult:
    """Run Python source (a str) or a command (a sequence) to its end or its limit.

    Args:
        timeout: wall-clock seconds. memory_mb: address space per process, and memory of all processes together.
        output_limit: bytes of stdout and stderr together, and of any file it writes (16 times that).
        network: leave the network reachable. stdin: text it can read. files: relative path -> content, put into its
        folder. cwd: its folder; None makes one that is removed afterwards. env: its whole environment; None gives PATH,
        HOME (its folder), LANG and nothing else.

    Raises:
        ConfigError: a limit that is not positive, an empty command, a file path that leaves the folder.
        RewardError: the supervisor could not start.
    """
    if isinstance(program, str):
        return _run(None, program, timeout, memory_mb, output_limit, network, stdin, files, cwd, env, None)
    if not program:
        raise ConfigError("program=[]: give Python source or a command")
    return _run(list(program), "", timeout, memory_mb, output_limit, network, stdin, files, cwd, env, None)


def _run(argv, code, timeout, memory_mb, output_limit, network, stdin, files, cwd, env, channel) -> SandboxResult:
    for name, value in (("timeout", timeout), ("memory_mb", memory_mb), ("output_limit", output_limit)):
        if not value > 0:
            raise ConfigError(f"{name}={value}: give a positive number")
    with tempfile.TemporaryDirectory(prefix="forethought-sandbox-", ignore_cleanup_errors=True) as scratch:
        folder = Path(cwd) if cwd is not None else Path(scratch) / "work"
        if cwd is None:
            folder.mkdir()
        if not folder.is_dir():
            raise ConfigError(f"cwd={str(cwd)!r}: not a folder")
        for name, content in (files or {}).items():
            _write_file(folder, name, content)
        if argv is None:
            script = Path(scratch) / "program.py"
            script.write_text(code, encoding="utf-8", errors="surrogatepass")
            argv = [sys.executable, "-u", str(script)]
        path = os.environ.get("PATH", "/usr/bin:/bin")
        base = {"PATH": path, "HOME": str(folder), "LANG": "C.UTF-8", "TMPDIR": str(folder)}
        config = {
            "argv": argv,
            "cwd": str(folder.resolve()),
            "env": dict(env) if env is not None else {**base, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
            "timeout": timeout,
            "memory": memory_mb * 2**20,
            "file_size": 16 * output_limit,
            "network": network,
            "namespaces": _NAMESPACES,
        }
        return _Execution(config, stdin.encode(errors="replace"), output_limit, channel).run()


def _write_file(folder: Path, name: str, content: str | bytes) -> None:
    target = (folder / name).resolve()
    if not target.is_relative_to(folder.resolve()) or target == folder.resolve():
        raise ConfigError(f"files[{name!r}]: give a relative path inside the program's folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content.encode() if isinstance(content, str) else content)


class _Execution:
    """One supervised run: moves bytes between pipes until the supervisor reports."""

    def __init__(self, config: dict[str, Any], stdin: bytes, output_limit: int, channel: _Channel | None):
        self.config, self.output_limit, self.channel = config, output_limit, channel
        self.out: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray(), "report": bytearray()}
        self.pending: dict[int, bytearray] = {}
        self.orders = -1  # the channel's descriptor, which stays open when there is nothing to send
        self.stdin = stdin
        self.too_much = False
        self.selector = selectors.DefaultSelector()
        self.fds: set[int] = set()

    def pipe(self) -> tuple[int, int]:
        read, write = os.pipe()
        self.fds |= {read, write}
        return read, write

    def close(self, *fds: int) -> None:
        for fd in fds:
            if fd in self.fds:
                self.fds.discard(fd)
                os.close(fd)

    def run(self) -> SandboxResult:
        process = None
        try:
            in_r, in_w = self.pipe()
            out_r, out_w = self.pipe()
            err_r, err_w = self.pipe()
            keep: list[int] = []
            if self.channel is not None:
                orders_r, self.orders = self.pipe()
                results_r, results_w = self.pipe()
                keep = sorted((orders_r, results_w))
                self.config["argv"] = [*self.config["argv"], str(orders_r), str(results_w)]
                self.watch_input(results_r, "channel")
                self.feed(self.orders, self.channel.start())
            self.config |= {"stdio": [in_r, out_w, err_w], "keep": keep}
            given = (in_r, out_w, err_w, *keep)
            try:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_HERE / "_sandbox_supervisor.py"), json.dumps(self.config)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    pass_fds=given,
                    start_new_session=True,
                )
            except OSError as error:
                raise RewardError(f"the sandbox could not start: {error}") from error
            self.close(*given)
            assert process.stdout is not None
            self.watch_input(out_r, "stdout")
            self.watch_input(err_r, "stderr")
            self.watch_input(process.stdout.fileno(), "report")
            self.feed(in_w, self.stdin)
            if not self.stdin:
                self.close(in_w)
            self.loop(process)
        finally:
            if process is not None:
                _end(process)
            self.selector.close()
            self.close(*list(self.fds))
        return self.result()

    def watch_input(self, fd: int, name: str) -> None:
        os.set_blocking(fd, False)
        self.selector.register(fd, selectors.EVENT_READ, name)

    def feed(self, fd: int, data: bytes) -> None:
        """Write `data` to a pipe as it takes it."""
        if fd not in self.pending:
            os.set_blocking(fd, False)
            self.pending[fd] = bytearray()
        if data and not self.pending[fd]:
            self.selector.register(fd, selectors.EVENT_WRITE, "feed")
        self.pending[fd] += data

    def loop(self, process: subprocess.Popen) -> None:
        end = time.monotonic() + self.config["timeout"] + _GRACE_S
        open_names = {"stdout", "stderr", "report"} | ({"channel"} if self.channel else set())
        while open_names and (left := end - time.monotonic()) > 0:
            for key, _ in self.selector.select(left):
                if key.data == "feed":
                    self.push(key.fd)
                    continue
                try:
                    data = os.read(key.fd, 65536)
                except (BlockingIOError, InterruptedError):
                    continue
                if not data:
                    self.selector.unregister(key.fd)
                    open_names.discard(key.data)
                elif key.data == "channel":
                    assert self.channel is not None
                    self.feed(self.orders, self.channel.receive(data))
                else:
                    self.collect(key.data, data, process)

    def push(self, fd: int) -> None:
        data = self.pending[fd]
        try:
            del data[: os.write(fd, data)]
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # the program does not read
            data.clear()
        if not data:
            self.selector.unregister(fd)
            if fd != self.orders:
                self.close(fd)

    def collect(self, name: str, data: bytes, process: subprocess.Popen) -> None:
        kept = self.out[name]
        if name != "report":
            room = self.output_limit - len(self.out["stdout"]) - len(self.out["stderr"])
            if len(data) > room:
                data = data[: max(0, room)]
                if not self.too_much and process.stdin is not None:
                    process.stdin.close()  # the order to stop
                self.too_much = True
        kept += data

    def result(self) -> SandboxResult:
        if not self.out["report"]:
            raise RewardError("the sandbox supervisor ended without a report; see whether /proc is mounted")
        report = json.loads(self.out["report"])
        status: Status = "error"
        code = None
        if report["status"] is not None:
            code = os.waitstatus_to_exitcode(report["status"])
            status = "ok" if code == 0 else "error"
        if report["reason"] in ("timeout", "memory"):
            status = report["reason"]
        elif code == -signal.SIGXCPU:
            status = "timeout"
        elif status == "error" and any(mark in self.out["stderr"][-4000:] for mark in _OUT_OF_MEMORY):
            status = "memory"
        if self.too_much:
            status = "output"
        texts = [bytes(self.out[name]).decode("utf-8", errors="replace") for name in ("stdout", "stderr")]
        return SandboxResult(status, texts[0], texts[1], report["seconds"], code, report["isolated"])


def _end(process: subprocess.Popen) -> None:
    """Close the control pipe (which stops the tree), wait, and as a last resort kill; always reap."""
    for stream in (process.stdin, process.stdout):
        if stream is not None and not stream.closed:
            try:
                stream.close()
            except OSError:
                pass
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# -- candidate and tests -----------------------------------------------------------------------------------------


class _Channel:
    """The test side of a private conversation with the driver: one JSON object per line, both ways."""

    def __init__(self, start: dict[str, Any], answer: Callable[[dict[str, Any]], dict[str, Any] | None]):
        self._start, self._answer = start, answer
        self._buffer = b""

    def start(self) -> bytes:
        return json.dumps(self._start).encode() + b"\n"

    def receive(self, data: bytes) -> bytes:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        out = b""
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:  # something that the candidate wrote
                continue
            reply = self._answer(message) if isinstance(message, dict) else None
            if reply is not None:
                out += json.dumps(reply).encode() + b"\n"
        return out


@dataclass(frozen=True)
class TestReport:
    """passed of total tests; score is their share, and 0 unless every test was counted (`finished`)."""

    __test__ = False  # not a test class for pytest

    passed: int
    total: int
    finished: bool
    reason: str
    failures: tuple[str, ...] = ()
    result: SandboxResult | None = field(default=None, repr=False)

    @property
    def score(self) -> float:
        return self.passed / self.total if self.finished else 0.0


Test = str | Mapping[str, Any]


def run_tests(
    code: str,
    tests: Sequence[Test],
    *,
    timeout: float = 10.0,
    memory_mb: int = 512,
    output_limit: int = 1 << 20,
    files: Mapping[str, str | bytes] | None = None,
) -> TestReport:
    """Run a candidate's Python source against tests.

    A test is one of
    - {"call": "name", "args": [...], "kwargs": {...}, "expected": value}: the call happens in the candidate's process,
      which never sees the expected value; what comes back is plain JSON and is compared here (floats within 1e-9
      relative, tuples as lists). The kind to prefer: an object that claims to equal everything does not help.
    - a str of Python (asserts), run after the candidate in its namespace;
    - {"stdin": text, "stdout": text}: the candidate as a program of its own; lines compared without trailing blanks.

    A test counts as passed only by a message that carries a secret handed to the driver after the candidate was
    loaded; the run counts as finished only after all tests and the candidate's exit hooks. A candidate that ends the
    process early, with whatever exit code, has not passed.

    Raises:
        ConfigError: no tests, or a test of none of these kinds. RewardError: the sandbox could not start.
    """
    if not tests:
        raise ConfigError("tests=[]: give at least one test")
    for i, test in enumerate(tests):
        ok = isinstance(test, str) or (
            isinstance(test, Mapping) and ({"call", "expected"} <= set(test) or {"stdin", "stdout"} <= set(test))
        )
        if not ok:
            raise ConfigError(f"tests[{i}]={test!r:.60}: give Python text, call + expected, or stdin + stdout")
    inner = [(i, t) for i, t in enumerate(tests) if isinstance(t, str) or "call" in t]
    outer = [(i, t) for i, t in enumerate(tests) if not (isinstance(t, str) or "call" in t)]
    failures: dict[int, str] = {}
    passed, finished, why, result = 0, True, "", None
    if inner:
        session = _Session(inner)
        argv = [sys.executable, "-u", str(_HERE / "_sandbox_driver.py")]
        channel = _Channel({"code": code}, session.answer)
        result = _run(argv, "", timeout, memory_mb, output_limit, False, "", files, None, None, channel)
        failures |= session.failures
        passed = len(session.passed)
        finished, why = session.done and result.status == "ok", session.problem or _ending(result)
    for i, test in outer:
        assert isinstance(test, Mapping)
        result = run_program(
            code, timeout=timeout, memory_mb=memory_mb, output_limit=output_limit, files=files, stdin=test["stdin"]
        )
        if result.status != "ok":
            failures[i] = _ending(result)
        elif _lines(result.stdout) != _lines(test["stdout"]):
            failures[i] = "other output"
        else:
            passed += 1
    listed = tuple(f"test {i + 1}: {text}" for i, text in sorted(failures.items()))
    if not finished:
        return TestReport(passed, len(tests), False, f"tests did not finish: {why}", listed, result)
    return TestReport(passed, len(tests), True, f"{passed} of {len(tests)} tests passed", listed, result)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _ending(result: SandboxResult) -> str:
    if result.status in ("timeout", "memory", "output"):
        return f"limit: {result.status}"
    return f"the program ended early (exit code {result.exit_code})"


class _Session:
    """Judges the driver's messages. Only messages with the secret count, and each test only once."""

    def __init__(self, tests: list[tuple[int, Test]]):
        self.tests = tests
        self.secret = secrets.token_hex(16)
        self.passed: set[int] = set()
        self.failures: dict[int, str] = {}
        self.loaded = self.done = False
        self.problem = ""

    def answer(self, message: dict[str, Any]) -> dict[str, Any] | None:
        if not self.loaded:
            if message.get("loaded") is True:
                self.loaded = True
                return {"secret": self.secret, "tests": [_question(test) for _, test in self.tests]}
            self.problem = self.problem or f"the program could not be loaded: {str(message.get('error'))[:200]}"
            return None
        if message.get("secret") != self.secret:
            return None
        if message.get("done") is True:
            self.done = len(self.passed) + len(self.failures) == len(self.tests)
            return None
        index = message.get("index")
        if not isinstance(index, int) or not 0 <= index < len(self.tests):
            return None
        i, test = self.tests[index]
        if i in self.passed or i in self.failures:
            return None
        if "error" in message:
            self.failures[i] = str(message["error"])[:200]
        elif isinstance(test, str) or same_value(message.get("value"), test["expected"]):
            self.passed.add(i)
        else:
            self.failures[i] = f"returned {message.get('value')!r:.80}, expected {test['expected']!r:.80}"
        return None


def _question(test: Test) -> dict[str, Any]:
    """What the candidate's process may know of a test: never the expected value."""
    if isinstance(test, str):
        return {"run": test}
    return {"call": test["call"], "args": list(test.get("args", ())), "kwargs": dict(test.get("kwargs", {}))}


def same_value(got: Any, expected: Any) -> bool:
    """Equality of JSON values: tuples as lists, True is not 1, floats within 1e-9 relative (1e-12 absolute)."""
    if isinstance(expected, list | tuple):
        return isinstance(got, list) and len(got) == len(expected) and all(map(same_value, got, expected))
    if isinstance(expected, Mapping):
        return (
            isinstance(got, dict)
            and set(got) == {str(k) for k in expected}
            and all(same_value(got[str(k)], v) for k, v in expected.items())
        )
    if isinstance(expected, bool) or isinstance(got, bool):
        return got is expected
    if isinstance(expected, float) or (isinstance(expected, int) and isinstance(got, float)):
        return isinstance(got, int | float) and math.isclose(got, expected, rel_tol=1e-9, abs_tol=1e-12)
    return type(got) is type(expected) and got == expected
