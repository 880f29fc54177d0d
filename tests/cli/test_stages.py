"""Progress of training: plain lines where there is no terminal; what an earlier sitting did does not count as speed."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from equivtest.cli import stages as module
from equivtest.cli.progress import listener_for
from equivtest.cli.stages import Stages


def lines_of(done_before: float, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ten units more, in twenty seconds, of a hundred."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    sink = io.StringIO()
    with Stages(Console(file=sink, force_terminal=False)) as stages:
        stages.stage("train", 100, done_before)
        for step in range(1, 11):
            now[0] = 2.0 * step
            stages.advance(done_before + step, f"step {step}")
        stages.message("bye")
    return sink.getvalue().splitlines()


def test_a_line_comes_every_ten_seconds_with_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ["train: step 5, about 190 s left", "train: step 10, about 180 s left", "bye"]
    assert lines_of(0, monkeypatch) == expected


def test_what_an_earlier_sitting_did_is_done_but_says_nothing_of_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ["train: step 5, about 90 s left", "train: step 10, about 80 s left", "bye"]
    assert lines_of(50, monkeypatch) == expected


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("sink", "bars"), [(Terminal(), True), (io.StringIO(), False)])
def test_only_a_terminal_gets_bars_whatever_rich_is_forced_to_take_for_one(sink: io.StringIO, bars: bool) -> None:
    """FORCE_COLOR, which CI systems set, forces it."""
    console = Console(file=sink, force_terminal=True, width=100)
    assert console.is_terminal
    listener = listener_for(console)
    listener.start("arm off", 10)
    for _ in range(5):
        listener.advance(2)
    listener.finish()
    with Stages(console) as stages:
        stages.stage("train", 10)
        stages.advance(5, "half of it")
    assert ("━" in sink.getvalue()) is bars
    assert ("arm off: 10 of 10 tokens" in sink.getvalue()) is not bars


def test_a_terminal_gets_a_bar_that_is_taken_down() -> None:
    sink = Terminal()
    with Stages(Console(file=sink, force_terminal=True, width=100)) as stages:
        stages.stage("text", 10)
        stages.advance(5, "half of it")
        stages.stage("train", 10, 2)
        stages.message("a line that stays")
    assert "half of it" in sink.getvalue()
    assert "a line that stays" in sink.getvalue()
