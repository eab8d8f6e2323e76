"""Progress for people: a live bar with the time left on a terminal, plain lines when the output is piped.

    with Progress(steps, "train") as progress:
        for step in range(steps):
            ...
            progress.update(step + 1, **{"reward/mean": reward})

It writes to stderr, so that a command's stdout stays its result. Output that fails (a closed pipe) never stops a run.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

_INTERVAL = 5.0  # seconds between plain lines
_SHOWN = 6  # metrics on the line
_live: list[Any] = []  # the rich display in use: a second bar joins it, for a terminal has room for one


def _fancy(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _duration(seconds: float) -> str:
    """12s, 3m05s, 2h07m."""
    whole = int(seconds + 0.5)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def _values(metrics: dict[str, Any]) -> str:
    """`reward/mean 0.512  loss 1.2e-05`: the first few numbers."""
    shown = []
    for name, value in list(metrics.items())[:_SHOWN]:
        number = isinstance(value, float) or hasattr(value, "item")
        shown.append(f"{name} {float(value):.4g}" if number else f"{name} {value}")
    return "  ".join(shown)


class Progress:
    """Progress over `total` steps; a context manager.

    On a terminal: a live bar, steps, time left and the latest metrics. Otherwise plain lines: the first update, then
    at most one per 5 seconds, and the last. Inside another Progress it adds a second bar and takes it away at its end.

    Args:
        total: number of steps, or None where there is no end (then no time left is shown).
        title: what is going on.
        start: steps that were done before (a resumed run); they do not count for the speed.
        enabled: False prints nothing (other ranks of a distributed run).
        stream, clock: where to write (default stderr), and seconds (for tests).
    """

    def __init__(
        self,
        total: int | None,
        title: str,
        *,
        start: int = 0,
        enabled: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.total, self.title, self.step = total, title, start
        self._first = start
        self._enabled = enabled
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._metrics: dict[str, Any] = {}
        self._bar: Any = None
        self._owner = False
        self._printed_at: float | None = None
        self._printed_step: int | None = None

    def __enter__(self) -> Progress:
        self._began = self._clock()
        if self._enabled and _fancy(self._stream):
            self._bar, self._owner = _display(self._stream)
            self._task = self._bar.add_task(
                self.title, total=self.total, completed=self.step, first=self.step, metrics=""
            )
        return self

    def update(self, step: int, /, **metrics: Any) -> None:
        """`step` steps are done. Metrics given here are shown until others of the same name come."""
        self.step = step
        self._metrics |= metrics
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=step, metrics=_values(self._metrics))
        elif self._printed_at is None or self._clock() - self._printed_at >= _INTERVAL:
            self._print()

    def line(self) -> str:
        """The state as one plain line."""
        done, spent = self.step - self._first, self._clock() - self._began
        parts = [f"{self.title} {self.step}" + (f"/{self.total}" if self.total is not None else "")]
        if done > 0 and spent > 0:
            parts.append(f"{_duration(spent)} spent")
            if self.total is not None and self.step < self.total:
                parts.append(f"{_duration(spent / done * (self.total - self.step))} left")
        if self._metrics:
            parts.append(_values(self._metrics))
        return " | ".join(parts)

    def _print(self) -> None:
        self._printed_at, self._printed_step = self._clock(), self.step
        _write(self._stream, self.line())

    def __exit__(self, kind, error, trace) -> None:
        if self._bar is not None:
            if self._owner:
                _live.clear()
                self._bar.stop()
            else:
                self._bar.remove_task(self._task)
        elif self._enabled and (self._printed_step != self.step or kind is not None):
            self._print()


class status:
    """A set-up phase without steps: `with status("loading the model"): ...`; a context manager.

    On a terminal a moving bar that goes when the phase ends, otherwise one line at its start and one at its end.
    """

    def __init__(
        self,
        title: str,
        *,
        enabled: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.title = title
        self._enabled = enabled
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._bar: Any = None
        self._owner = False

    def __enter__(self) -> status:
        self._began = self._clock()
        if self._enabled and _fancy(self._stream):
            self._bar, self._owner = _display(self._stream)
            self._task = self._bar.add_task(self.title, total=None, first=0, metrics="")
        elif self._enabled:
            _write(self._stream, f"{self.title} ...")
        return self

    def __exit__(self, kind, error, trace) -> None:
        end = f"{self.title}: {'failed after' if kind else 'done in'} {_duration(self._clock() - self._began)}"
        if self._bar is not None:
            self._bar.remove_task(self._task)
            if self._owner:
                _live.clear()
                self._bar.stop()
            self._bar.console.print(end, highlight=False, markup=False)
        elif self._enabled:
            _write(self._stream, end)


def _write(stream: TextIO, line: str) -> None:
    try:
        print(line, file=stream, flush=True)
    except (OSError, ValueError):  # the reader has gone, or the stream is closed: the run matters more
        pass


def _display(stream: TextIO) -> tuple[Any, bool]:
    """The live display (started if there is none yet), and whether this call started it."""
    if _live:
        return _live[0], False
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        ProgressColumn,
        SpinnerColumn,
        Task,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.progress import Progress as Bars
    from rich.table import Column
    from rich.text import Text

    class Left(ProgressColumn):
        """Time left at the mean speed since the start."""

        def render(self, task: Task) -> Text:
            done = task.completed - task.fields["first"]
            if task.total is None or not done or not task.elapsed or task.finished:
                return Text("")
            return Text(f"{_duration(task.elapsed / done * (task.total - task.completed))} left")

    bars = Bars(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        Left(),
        TextColumn("{task.fields[metrics]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
        console=Console(file=stream),
    )
    bars.start()
    _live.append(bars)
    return bars, True
