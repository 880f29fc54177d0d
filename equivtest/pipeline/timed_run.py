"""How long a whole run takes, and which part of it takes how long."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equivtest.engines.base import Engine
from equivtest.pipeline.manifest import Manifest
from equivtest.pipeline.progress import Silent
from equivtest.pipeline.publish import publish
from equivtest.pipeline.run import RunOptions, RunResult, run
from equivtest.protocol.budgets import get_budget
from equivtest.protocol.configs import resolve_configs


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRun:
    """A finished run and its parts, seconds."""

    result: RunResult
    manifest: Manifest
    start_s: float
    """Opening the engine: the model from disk, kernels built or loaded."""
    warm_up_s: float
    """The same run on its first config alone, thrown away: graphs are captured, libraries loaded."""
    total_s: float
    """The run itself, warm: from the call to the last file of the report."""
    repeat_s: float
    """Of the total: what comes before collecting, requests repeated for the identity checks."""
    report_s: float
    """Of the total: writing tables and pages. Measured by writing them once more."""
    subject: dict[str, Any]

    def rows(self) -> list[dict[str, Any]]:
        """One row a part, in order. `analyse` is what is left of the total."""
        collect, score = self.manifest.arm_seconds, self.manifest.score_seconds
        parts = {
            "repeat": self.repeat_s,
            **{f"collect {arm}": seconds for arm, seconds in collect.items()},
            **{f"score {arm}": seconds for arm, seconds in score.items()},
        }
        parts["analyse"] = self.total_s - sum(parts.values()) - self.report_s
        parts["report"] = self.report_s
        table = {"start": self.start_s, "warm-up": self.warm_up_s, **parts, "total": self.total_s}
        return [
            {"part": part, "seconds": seconds, "share": seconds / self.total_s if part in parts else None}
            for part, seconds in table.items()
        ]

    def settings(self) -> dict[str, Any]:
        """What was run and how it ended."""
        verdict = self.result.analysis.verdict
        return {
            "subject": self.subject,
            "configs": list(self.manifest.judged_protocol.configs),
            "tokens": sum(self.manifest.arm_tokens.values()),
            "verdict": str(verdict.word),
            "headline": verdict.headline,
            "controls": [
                {"name": control.name, "passed": control.passed, "line": control.line} for control in verdict.controls
            ],
        }


def timed_run(
    options: RunOptions, open_engine: Callable[[], Engine], *, on_progress: Callable[[str], None] | None = None
) -> TimedRun:
    """Run the protocol twice with one engine: its first config to warm up, then all of it on the clock.

    open_engine: called once, and timed. Raises what `run` does, for a name that is unknown before the engine is opened.
    """
    tell = on_progress or (lambda line: None)
    configs = resolve_configs(options.configs)
    get_budget(options.budget)
    started = time.perf_counter()
    engine = open_engine()
    start_s = time.perf_counter() - started
    tell(f"opened the engine in {start_s:.1f} s; warming up")
    with tempfile.TemporaryDirectory() as scratch:
        started = time.perf_counter()
        warm_up = dataclasses.replace(options, configs=configs[:1], run_dir=Path(scratch) / "warm-up", resume=False)
        run(warm_up, engine=engine)
        warm_up_s = time.perf_counter() - started
        tell(f"warmed up in {warm_up_s:.1f} s; running")
        first = _FirstStart()
        run_dir = options.run_dir or Path(scratch) / "run"
        started = time.perf_counter()
        result = run(dataclasses.replace(options, run_dir=run_dir), first, engine)
        total_s = time.perf_counter() - started
        repeat_s = (first.at or started) - started
        manifest = Manifest.read(run_dir)
        published = time.perf_counter()
        publish(run_dir, manifest.judged_protocol, result.analysis)
        report_s = time.perf_counter() - published
    return TimedRun(
        result=result,
        manifest=manifest,
        start_s=start_s,
        warm_up_s=warm_up_s,
        total_s=total_s,
        repeat_s=repeat_s,
        report_s=report_s,
        subject=dict(engine.describe()),
    )


class _FirstStart(Silent):
    """Hears when collecting begins."""

    def __init__(self) -> None:
        self.at: float | None = None

    def start(self, label: str, total: int) -> None:
        if self.at is None:
            self.at = time.perf_counter()
