"""A child process that serves a user's code and can be killed.

A thread cannot be stopped, and code that holds the interpreter (a regular expression that backtracks, a power tower)
stops every thread of its process. So the user's functions run in a child that is started afresh (no fork: a fork of a
process with running torch threads may hang), talk over a pipe, and are killed with their whole process group.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any


class WorkerHung(Exception):
    """The child sent nothing within the limit; it has been killed."""


class WorkerDied(Exception):
    """The child ended; the message says how."""


class Worker:
    """A running child.

    Args:
        target: `package.module:function`; the child calls `function(connection, *args)` and ends when it returns.
        args: sent pickled.
        env: environment variables, besides this process's own.
    """

    def __init__(self, target: str, *args: Any, env: Mapping[str, str] | None = None):
        self.connection, theirs = Pipe()
        # PR_SET_PDEATHSIG fires when the creating *thread* ends, so only the main thread may ask for it.
        main_thread = threading.current_thread() is threading.main_thread()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            f"from forethought.rewards.isolate import _child\n_child({theirs.fileno()}, {os.getpid()}, {main_thread})"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **(env or {})},
        )
        theirs.close()
        self._finalizer = weakref.finalize(self, _kill, self.process, self.connection)
        self.send((target, args))

    def send(self, message: Any) -> None:
        """Raises: WorkerDied."""
        try:
            self.connection.send(message)
        except OSError as err:
            raise WorkerDied(self._ending()) from err

    def receive(self, timeout: float | None) -> Any:
        """The next message (None waits for ever). Raises: WorkerHung, WorkerDied; in both cases the child is gone."""
        try:
            if self.connection.poll(timeout):
                return self.connection.recv()
        except (EOFError, OSError) as err:
            raise WorkerDied(self._ending()) from err
        self.close()
        raise WorkerHung(f"nothing within {timeout:g} s")

    def _ending(self) -> str:
        try:
            code = self.process.wait(5)
        except subprocess.TimeoutExpired:
            code = None
        self.close()
        if code is None:
            return "its process closed the connection"
        return (
            f"its process was ended by {signal.Signals(-code).name}" if code < 0 else f"its process exited with {code}"
        )

    def close(self) -> None:
        """Kill the child and its process group, and reap it."""
        self._finalizer()


def _kill(process: subprocess.Popen, connection: Connection) -> None:
    connection.close()
    # The group can outlive its leader; its id stays ours until the leader is reaped.
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    process.wait()


def _child(fd: int, parent: int, die_with_parent: bool) -> None:
    os.set_inheritable(fd, False)
    if die_with_parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: also when user code holds the interpreter
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    connection = Connection(fd)
    (target, args) = connection.recv()
    module, _, name = target.partition(":")
    try:
        getattr(importlib.import_module(module), name)(connection, *args)
    except (EOFError, BrokenPipeError):
        pass  # the parent closed the connection


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
