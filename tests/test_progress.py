"""Progress: plain lines when piped, a live bar on a terminal, and nothing that can stop a run."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys

import numpy as np
import pytest

from forethought import progress
from forethought.progress import Progress, status


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_piped_output_is_the_first_update_one_line_per_five_seconds_and_the_last():
    stream, clock = io.StringIO(), Clock()
    with Progress(20, "train", stream=stream, clock=clock) as bar:
        for step in range(1, 21):
            clock.now += 2
            bar.update(step, **{"reward/mean": step / 3, "loss": np.float32(0.5), "n": step})
    assert stream.getvalue().splitlines() == [
        "train 1/20 | 2s spent | 38s left | reward/mean 0.3333  loss 0.5  n 1",
        "train 4/20 | 8s spent | 32s left | reward/mean 1.333  loss 0.5  n 4",
        "train 7/20 | 14s spent | 26s left | reward/mean 2.333  loss 0.5  n 7",
        "train 10/20 | 20s spent | 20s left | reward/mean 3.333  loss 0.5  n 10",
        "train 13/20 | 26s spent | 14s left | reward/mean 4.333  loss 0.5  n 13",
        "train 16/20 | 32s spent | 8s left | reward/mean 5.333  loss 0.5  n 16",
        "train 19/20 | 38s spent | 2s left | reward/mean 6.333  loss 0.5  n 19",
        "train 20/20 | 40s spent | reward/mean 6.667  loss 0.5  n 20",
    ]


def test_the_last_line_is_not_repeated_and_a_failure_shows_where_it_happened():
    stream, clock = io.StringIO(), Clock()
    with Progress(1, "a", stream=stream, clock=clock) as bar:
        bar.update(1)
    assert stream.getvalue() == "a 1/1\n"
    with pytest.raises(KeyError), Progress(9, "b", stream=stream, clock=clock) as bar:
        bar.update(1)
        clock.now += 4
        bar.update(2, loss=1.0)
        raise KeyError
    assert stream.getvalue().splitlines()[1:] == ["b 1/9", "b 2/9 | 4s spent | 14s left | loss 1"]


def test_a_resumed_run_does_not_count_its_earlier_steps_for_the_speed():
    clock = Clock()
    with Progress(200, "train", start=100, stream=io.StringIO(), clock=clock) as bar:
        clock.now += 60
        bar.update(110)
        assert bar.line() == "train 110/200 | 1m00s spent | 9m00s left"
        clock.now += 3600
        assert bar.line() == "train 110/200 | 1h01m spent | 9h09m left"


def test_without_an_end_there_is_no_time_left():
    clock = Clock()
    with Progress(None, "search", stream=io.StringIO(), clock=clock) as bar:
        clock.now += 5
        bar.update(7)
        assert bar.line() == "search 7 | 5s spent"


def test_a_phase_says_that_it_begins_and_how_it_ended():
    stream, clock = io.StringIO(), Clock()
    with status("loading the model", stream=stream, clock=clock):
        clock.now += 4
    with pytest.raises(OSError), status("downloading", stream=stream, clock=clock):
        clock.now += 1
        raise OSError
    assert stream.getvalue().splitlines() == [
        "loading the model ...",
        "loading the model: done in 4s",
        "downloading ...",
        "downloading: failed after 1s",
    ]


def test_other_ranks_print_nothing():
    stream = io.StringIO()
    with Progress(3, "a", enabled=False, stream=stream) as bar, status("b", enabled=False, stream=stream):
        bar.update(3, loss=1)
    assert stream.getvalue() == "" and bar.step == 3


def test_a_reader_that_has_gone_does_not_stop_the_run():
    class Broken(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    closed = io.StringIO()
    closed.close()
    for stream in (Broken(), closed):
        if stream is closed:
            stream = type(
                "Closed", (), {"isatty": lambda self: False, "write": closed.write, "flush": lambda self: None}
            )()
        with Progress(2, "a", stream=stream) as bar, status("b", stream=stream):
            bar.update(1)
            bar.update(2)
        assert bar.step == 2


PROGRAM = """
import sys, time
from forethought.progress import Progress, status
with status("loading"):
    pass
with Progress(4, "train [x]", start=1) as bar:
    for step in range(2, 5):
        bar.update(step, **{"reward/mean": 0.125 * step})
        if step == 3:
            with status("evaluating"), Progress(2, "inner") as inner:
                inner.update(1)
                time.sleep(0.3)
            print("a line in between", file=sys.stderr)
        time.sleep(0.15)
with Progress(1, "after") as bar:
    bar.update(1)
print("result")
"""


def on_a_terminal(program: str, **env: str) -> str:
    """What a program writes to a terminal, both streams."""
    master, slave = pty.openpty()
    full = {**os.environ, "TERM": "xterm", "COLUMNS": "110", **env}
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        full.pop(name, None)
    child = subprocess.Popen([sys.executable, "-c", program], stdout=slave, stderr=slave, env=full)
    os.close(slave)
    out = b""
    try:
        while data := os.read(master, 65536):
            out += data
    except OSError:  # the other end is closed: how a pty says that it is over
        pass
    os.close(master)
    assert child.wait(timeout=30) == 0, out.decode()
    return out.decode()


def test_on_a_terminal_there_is_a_live_bar_and_a_second_one_joins_it():
    out = on_a_terminal(PROGRAM)
    assert "\x1b[" in out and "━" in out
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out)
    for part in (
        "loading: done in 0s",
        "train [x]",
        "4/4",
        "reward/mean 0.5",
        "inner",
        "evaluating: done in",
        "s left",
    ):
        assert part in text, part
    assert "a line in between" in text and "1/1" in text and text.rstrip().endswith("result")


def test_a_dumb_terminal_and_a_pipe_get_plain_lines():
    for out in (
        on_a_terminal(PROGRAM, TERM="dumb").replace("\r\n", "\n"),
        subprocess.run(
            [sys.executable, "-c", PROGRAM], stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True
        ).stdout,
    ):
        assert "\x1b" not in out and "━" not in out
        lines = [line.split(" |")[0] for line in out.splitlines() if line != "result"]
        assert lines[:3] == ["loading ...", "loading: done in 0s", "train [x] 2/4"]
        assert lines[3:5] == ["evaluating ...", "inner 1/2"] and lines[-2:] == ["train [x] 4/4", "after 1/1"]


def test_the_result_stays_alone_on_stdout():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout == "result\n" and "train [x] 4/4" in done.stderr


def test_rich_is_loaded_only_for_a_terminal():
    program = (
        "import sys; import forethought.progress; print([m for m in ('rich', 'torch', 'numpy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


def test_durations():
    shown = {0.4: "0s", 59.4: "59s", 59.6: "1m00s", 3599.4: "59m59s", 3599.6: "1h00m", 90061: "25h01m"}
    assert {seconds: progress._duration(seconds) for seconds in shown} == shown
