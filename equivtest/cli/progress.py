"""Progress for people: a bar with rate and time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from equivtest.pipeline.progress import Listener

_PLAIN_INTERVAL_S = 10.0


def listener_for(console: Console) -> Listener:
    """A bar when `console` is a terminal, otherwise a line every ten seconds."""
    return _Bar(console) if shows_bars(console) else _Lines(console)


def shows_bars(console: Console) -> bool:
    """Whether the console is a terminal in truth; rich takes a log for one where FORCE_COLOR asks for colours."""
    return console.is_terminal and console.file.isatty()


class _Counter:
    """Rate and time left from the tokens generated in this sitting."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.generated = total, 0, 0
        self.started = time.monotonic()

    @property
    def rate(self) -> float:
        return self.generated / max(time.monotonic() - self.started, 1e-9)

    @property
    def seconds_left(self) -> float | None:
        return (self.total - self.done) / self.rate if self.generated else None


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._label = ""
        self._counter = _Counter(0)
        self._last = 0.0

    def start(self, label: str, total: int) -> None:
        self._label, self._counter, self._last = label, _Counter(total), time.monotonic()
        self.message(f"{label}: {total:,} tokens to collect")

    def advance(self, num_tokens: int) -> None:
        self._counter.done += num_tokens
        self._counter.generated += num_tokens
        if time.monotonic() - self._last >= _PLAIN_INTERVAL_S:
            self._last = time.monotonic()
            self._line()

    def skip(self, num_tokens: int) -> None:
        self._counter.done += num_tokens

    def finish(self) -> None:
        self._line()

    def message(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def _line(self) -> None:
        counter = self._counter
        left = counter.seconds_left
        self.message(
            f"{self._label}: {counter.done:,} of {counter.total:,} tokens, {counter.rate:,.0f} tokens/s"
            + (f", about {left:,.0f} s left" if left else "")
        )


class _Bar:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._counter = _Counter(0)

    def start(self, label: str, total: int) -> None:
        self._counter = _Counter(total)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f} tokens"),
            TextColumn("{task.fields[rate]:,.0f} tokens/s"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._progress.start()
        self._task = self._progress.add_task(label, total=total, rate=0.0)

    def advance(self, num_tokens: int) -> None:
        self._counter.done += num_tokens
        self._counter.generated += num_tokens
        self._update()

    def skip(self, num_tokens: int) -> None:
        self._counter.done += num_tokens
        self._update()

    def finish(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def message(self, text: str) -> None:
        console = self._progress.console if self._progress is not None else self._console
        console.print(text, highlight=False, soft_wrap=True)

    def _update(self) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=self._counter.done, rate=self._counter.rate)
