"""Jobs for the worker-pool tests; imported by the workers only."""

import os
import subprocess
import sys
import time

from forethought.rewards.workers import paused


def work(item):
    kind, value = item
    if kind == "double":
        return 2 * value
    if kind == "sleep":
        time.sleep(value)
        return "slept"
    if kind == "spin":
        while True:
            pass
    if kind == "pid":
        return os.getpid()
    if kind == "raise":
        raise ValueError(f"bad {value}")
    if kind == "exit":
        os._exit(value)
    if kind == "memory":
        return len(bytearray(value))
    if kind == "print":
        print("noise on stdout")
        return "printed"
    if kind == "child":
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid
    if kind == "child_then_hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid
        with open(value, "w") as f:
            f.write(str(child))
        time.sleep(60)
    if kind == "pause":
        with paused():
            time.sleep(value)
        return "paused"
    raise AssertionError(kind)


def broken(item):
    return object()
