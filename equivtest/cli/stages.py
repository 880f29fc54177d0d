"""Progress of work in stages: a bar with time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from equivtest.cli.progress import shows_bars

_PLAIN_INTERVAL_S = 10.0


class Stages:
    """A `Watcher` of training for people. Use as a context: a bar is taken down at its end, however it ends."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._label, self._total, self._before = "", 0.0, 0.0
        self._begin = self._last = 0.0

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop()

    def stage(self, label: str, total: float, done: float = 0.0) -> None:
        self._stop()
        self._label, self._total, self._before = label, total, done
        self._begin = self._last = time.monotonic()
        if shows_bars(self._console):
            columns = (
                TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[line]}"), TimeElapsedColumn(),
                TextColumn("left"), TimeRemainingColumn(),
            )  # fmt: skip
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task(label, total=total, line="")
            self._bar.update(self._task, completed=done)

    def advance(self, done: float, line: str) -> None:
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=done, line=line)
        elif now - self._last >= _PLAIN_INTERVAL_S or done >= self._total:
            self._last = now
            left = (now - self._begin) * (self._total - done) / max(done - self._before, 1e-9)
            self.message(f"{self._label}: {line}" + (f", about {left:,.0f} s left" if left > 0 else ""))

    def message(self, text: str) -> None:
        console = self._console if self._bar is None else self._bar.console
        console.print(text, highlight=False, soft_wrap=True)

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
