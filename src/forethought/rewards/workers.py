"""A pool of persistent worker processes in which one bad job costs its own time limit and nothing else.

Each worker is a fresh interpreter (no fork of a process that holds threads or a GPU) in a session of its own, with an
address-space limit above its base, a CPU limit per job and a parent-death signal. A job that runs over is killed with
its whole process group and the worker is replaced; the other jobs of the batch go on. Works from any thread (no
signals are used), and nothing is left after `close`, at interpreter exit, or when this process is killed.

Jobs and results are JSON values on private pipes: a worker can send nothing that this process would execute.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from forethought.errors import ConfigError, RewardError

STARTUP_S = 60.0
_CHUNK_ITEMS, _CHUNK_BYTES = 16, 1 << 20


@dataclass(frozen=True)
class JobResult:
    """status "ok": `value` is what the handler returned. Else `detail` says what happened; seconds are wall time."""

    status: Literal["ok", "timeout", "memory", "error", "died"]
    value: Any = None
    seconds: float = 0.0
    detail: str = ""


class _Job:
    """One `map` call: its items, its results, and how many are still missing."""

    def __init__(self, items: Sequence[Any], timeout: float):
        self.items = items
        self.timeout = timeout
        self.results: list[JobResult | None] = [None] * len(items)
        self.missing = len(items)
        self.error: RewardError | None = None
        self.cancelled = False
        self.lock = threading.Lock()
        self.done = threading.Event()

    def put(self, index: int, result: JobResult) -> None:
        with self.lock:
            self.results[index] = result
            self.missing -= 1
            if self.missing == 0:
                self.done.set()

    def fail(self, error: RewardError) -> None:
        self.error = error
        self.cancelled = True
        self.done.set()


class _Shared:
    """What the manager threads see; it holds no reference to the pool, so that the pool can be collected."""

    def __init__(self, handler: str, memory_mb: int):
        self.handler = handler
        self.memory_mb = memory_mb
        self.queue: deque[tuple[_Job, list[int]]] = deque()
        self.wake = threading.Condition()
        self.closing = False
        self.processes: set[_Worker] = set()
        self.started = 0


class _Dead(Exception):
    """The worker's pipe is closed."""


class _Late(Exception):
    """A deadline passed."""


class _Worker:
    """One child process and its two pipes. Owned by one manager thread."""

    def __init__(self, shared: _Shared):
        self.shared = shared
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        boot = "import sys, json; a = json.loads(sys.argv[1]); sys.path[:] = a['path']; "
        boot += "from forethought.rewards.workers import _serve; _serve(a)"
        arguments = {
            "path": [str(Path(__file__).parents[2]), *(p for p in sys.path if p)],
            "handler": shared.handler,
            "memory_mb": shared.memory_mb,
            "parent": os.getpid(),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", boot, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        )
        assert self.process.stdin and self.process.stdout
        self.to, self.back = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self.to, False)
        with shared.wake:
            shared.processes.add(self)
            shared.started += 1
            if shared.closing:
                self.kill()

    def _wait(self, fd: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(fd, event)
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000 + 1):
            raise _Late

    def send(self, message: Any, deadline: float) -> None:
        body = json.dumps(message).encode()
        view = memoryview(len(body).to_bytes(4, "big") + body)
        while view:
            self._wait(self.to, select.POLLOUT, deadline)
            try:
                view = view[os.write(self.to, view) :]
            except (BrokenPipeError, ConnectionError) as error:
                raise _Dead from error

    def receive(self, deadline: float) -> Any:
        size = int.from_bytes(self._read(4, deadline), "big")
        return json.loads(self._read(size, deadline))

    def _read(self, size: int, deadline: float) -> bytes:
        out = b""
        while len(out) < size:
            self._wait(self.back, select.POLLIN, deadline)
            piece = os.read(self.back, size - len(out))
            if not piece:
                raise _Dead
            out += piece
        return out

    def kill(self) -> int:
        """Kill the whole group, reap, close the pipes; returns the exit code."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self.process.kill()
        code = self.process.wait()
        with self.shared.wake:
            self.shared.processes.discard(self)
        for stream in (self.process.stdin, self.process.stdout):
            if stream:
                try:
                    stream.close()
                except OSError:
                    pass
        return code

    def last_words(self) -> str:
        self.log.seek(0)
        return self.log.read()[-2000:].decode(errors="replace").strip()


def _manage(shared: _Shared) -> None:
    """A manager thread: owns one worker, feeds it chunks, kills and replaces it. Lives as long as the pool, because
    the parent-death signal of a process fires when the thread that started it ends."""
    worker: _Worker | None = None
    try:
        while True:
            with shared.wake:
                while not shared.queue and not shared.closing:
                    shared.wake.wait()
                if shared.closing:
                    return
                job, indices = shared.queue.popleft()
            todo = deque(indices)
            while todo and not job.cancelled and not shared.closing:
                try:
                    worker = worker or _start(shared)
                except RewardError as error:
                    job.fail(error)
                    break
                if not _run_chunk(worker, job, todo):
                    worker.kill()
                    worker = None
    finally:
        if worker is not None:
            worker.kill()


def _start(shared: _Shared) -> _Worker:
    worker = _Worker(shared)
    try:
        hello = worker.receive(time.monotonic() + STARTUP_S)
    except (_Dead, _Late, OSError, ValueError):
        hello = None
    if hello != "ready":
        code = worker.kill()
        if shared.closing:
            raise RewardError("the worker pool was closed while it was in use")
        raise RewardError(f"a worker process for {shared.handler} did not start (exit {code}): {worker.last_words()}")
    return worker


def _run_chunk(worker: _Worker, job: _Job, todo: deque[int]) -> bool:
    """Send `todo` and take results off it as they come. False where the worker is lost and must be replaced."""
    begin = time.monotonic()
    try:
        worker.send([job.timeout, [job.items[i] for i in todo]], begin + STARTUP_S)
    except (_Dead, _Late, OSError):
        return False
    while todo:
        begin = time.monotonic()
        deadline = begin + job.timeout
        try:
            while isinstance(reply := worker.receive(deadline), str):  # "pause" and "go on" around imports
                deadline = time.monotonic() + (STARTUP_S if reply == "pause" else job.timeout)
        except _Late:
            limit = f"limit: time ({job.timeout:g} s)"
            job.put(todo.popleft(), JobResult("timeout", None, time.monotonic() - begin, limit))
            return False
        except (_Dead, OSError, ValueError):
            code = worker.kill()
            detail = "limit: CPU time" if code == -signal.SIGXCPU else f"worker process ended (exit {code})"
            job.put(todo.popleft(), JobResult("died", None, time.monotonic() - begin, detail))
            return False
        status, value, detail = reply
        job.put(todo.popleft(), JobResult(status, value, time.monotonic() - begin, detail))
    return True


def _shut(shared: _Shared, threads: list[threading.Thread], pid: int) -> None:
    if os.getpid() != pid:  # a forked copy owns nothing
        return
    with shared.wake:
        shared.closing = True
        processes = list(shared.processes)
        shared.wake.notify_all()
        for job, _ in shared.queue:
            job.fail(RewardError("the worker pool was closed while it was in use"))
    for worker in processes:
        try:
            os.killpg(worker.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(5)


class WorkerPool:
    """`workers` processes that each run `handler(item) -> JSON value` on the items of `map`.

    Args:
        handler: "package.module:function"; imported in the worker only.
        workers: number of processes (started when first needed).
        memory_mb: address space each worker may use beyond what it has after start.

    Raises:
        ConfigError: a count that is not positive, or a handler that is not "module:function".
    """

    def __init__(self, handler: str, workers: int = 2, *, memory_mb: int = 512):
        if workers < 1:
            raise ConfigError(f"workers={workers}: give at least 1")
        if memory_mb < 16:
            raise ConfigError(f"memory_mb={memory_mb}: give at least 16")
        if handler.count(":") != 1:
            raise ConfigError(f"handler={handler!r}: give 'package.module:function'")
        self.workers = workers
        self._handler, self._memory_mb = handler, memory_mb
        self._open()

    def _open(self) -> None:
        self._pid = os.getpid()
        self._shared = _Shared(self._handler, self._memory_mb)
        self._threads = [
            threading.Thread(target=_manage, args=(self._shared,), daemon=True, name="forethought-worker-manager")
            for _ in range(self.workers)
        ]
        self._finalizer = weakref.finalize(self, _shut, self._shared, self._threads, self._pid)
        for thread in self._threads:
            thread.start()

    @property
    def processes_started(self) -> int:
        """Processes started so far, replacements included."""
        return self._shared.started

    def map(self, items: Sequence[Any], *, timeout: float) -> list[JobResult]:
        """Run every item (a JSON value); results in the order of the items. Blocks; callable from any thread.

        Raises:
            RewardError: the pool is closed, or its workers cannot start. ConfigError: timeout is not positive.
        """
        if not timeout > 0:
            raise ConfigError(f"timeout={timeout}: give seconds above 0")
        if os.getpid() != self._pid:  # used in a forked child: the parent's workers are not ours
            self._finalizer.detach()
            self._open()
        if self._shared.closing:
            raise RewardError("the worker pool is closed: make a new one")
        if not items:
            return []
        job = _Job(items, timeout)
        with self._shared.wake:
            self._shared.queue.extend((job, chunk) for chunk in _chunks(items, self.workers))
            self._shared.wake.notify_all()
        try:
            job.done.wait()
        finally:
            job.cancelled = True
        if job.error is not None:
            raise job.error
        return [result for result in job.results if result is not None]

    def close(self) -> None:
        """Kill all workers and wait for them. Idempotent."""
        self._finalizer()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _chunks(items: Sequence[Any], workers: int) -> Iterator[list[int]]:
    limit = max(1, min(_CHUNK_ITEMS, -(-len(items) // workers)))
    chunk: list[int] = []
    size = 0
    for i, item in enumerate(items):
        weight = len(str(item))
        if chunk and (len(chunk) >= limit or size + weight > _CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(i)
        size += weight
    if chunk:
        yield chunk


# -- the child's side --------------------------------------------------------------------------------------------

_reply: Any = None  # set in a worker: sends one message to the manager


@contextmanager
def paused() -> Iterator[None]:
    """Inside a handler: time spent here (imports) does not count against the job. Outside a worker it does nothing."""
    if _reply is not None:
        _reply("pause")
    try:
        yield
    finally:
        if _reply is not None:
            _limit_memory()
            _reply("go on")


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel (Linux) to kill this process when the thread that started it ends; exit if it has already."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if parent is not None and os.getppid() != parent:
        os._exit(1)


_memory_mb = 0


def _limit_memory() -> None:
    """Address space: what is in use now plus the allowance."""
    if sys.platform != "linux":
        return
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + _memory_mb * 2**20, hard))


def _limit_cpu(seconds: float) -> None:
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime + seconds) + 2, hard))


def _serve(arguments: dict[str, Any]) -> None:
    """Main loop of a worker: read chunks from stdin, answer each item on stdout."""
    global _reply, _memory_mb
    import importlib
    import resource

    die_with_parent(arguments["parent"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    jobs, replies = os.dup(0), os.dup(1)  # prints of the handler must not reach the replies
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _memory_mb = arguments["memory_mb"]
    module, name = arguments["handler"].split(":")
    handler = getattr(importlib.import_module(module), name)
    _limit_memory()
    source = os.fdopen(jobs, "rb")

    def reply(message: Any) -> None:
        write(json.dumps(message).encode())

    def write(body: bytes) -> None:
        data = len(body).to_bytes(4, "big") + body
        while data:
            data = data[os.write(replies, data) :]

    _reply = reply
    reply("ready")
    while head := source.read(4):
        timeout, items = json.loads(source.read(int.from_bytes(head, "big")))
        for item in items:
            _limit_cpu(timeout)
            try:
                body = json.dumps(["ok", handler(item), ""]).encode()
            except MemoryError:
                body = json.dumps(["memory", None, f"limit: memory ({_memory_mb} MiB)"]).encode()
            except Exception as error:  # also a result that is not JSON
                body = json.dumps(["error", None, f"{type(error).__name__}: {error}"]).encode()
            write(body)
