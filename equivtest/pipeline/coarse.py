"""The coarse gate: a benchmark of EleutherAI's harness, a few seeds with speculation off and on."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from equivtest.engines.base import Engine
from equivtest.engines.base import EngineOptions as EngineOptions
from equivtest.errors import EngineUnavailable, InvalidSetting, RunMismatch
from equivtest.pipeline.manifest import command_line, describe_code, describe_machine
from equivtest.pipeline.progress import Listener, Silent
from equivtest.protocol.plan import INFLATED_ACCEPTANCE
from equivtest.records import Arm
from equivtest.report.coarse import ArmScores, CoarseResult, write_coarse
from equivtest.verdict.coarse import CoarseVerdict, decide_coarse


@dataclass(frozen=True, slots=True, kw_only=True)
class CoarseOptions:
    """Everything `equivtest lm-eval` can be told."""

    engine: EngineOptions
    task: str = "addition"
    """A task of the harness, a YAML file of its format, or the one that ships here."""
    metric: str | None = None
    items: int | None = None
    """Items of the task, the first so many; None takes all."""
    seeds: int = 3
    """Answers to every item in each arm."""
    temperature: float = 0.8
    margin: float = 0.05
    """Difference of scores that still counts as equivalent."""
    planted: str | None = None
    """A fault to put into arm on: would this gate have seen it?"""
    epsilon: float = 0.1
    """Its size, if it is inflated_acceptance."""
    run_seed: int = 0
    output: Path | None = None
    """Folder for lm-eval.json and lm-eval.md."""

    def __post_init__(self) -> None:
        if self.seeds < 2:
            raise InvalidSetting("seeds", self.seeds, "must be at least 2")
        if not self.temperature > 0:
            raise InvalidSetting("temperature", self.temperature, "must be above 0: greedy answers have no seeds")
        if not 0 < self.margin < 1:
            raise InvalidSetting("margin", self.margin, "must be between 0 and 1")


def coarse(options: CoarseOptions, listener: Listener | None = None, engine: Engine | None = None) -> CoarseResult:
    """Score both arms and judge their difference; write it down where `options.output` says.

    engine: default what `options.engine` describes. Raises EngineUnavailable without the harness, and as `SampledTask`
    and `decide_coarse` do.
    """
    listener = listener or Silent()
    from equivtest.engines.registry import check_engine, installed_version, open_engine

    if installed_version("lm-eval") is None:
        raise EngineUnavailable("lm-eval", "the harness is not installed; run: pip install 'equivtest[lm-eval]'")
    from equivtest.faults import get_fault
    from equivtest.harness.tasks import SampledTask

    sized = {"epsilon": options.epsilon} if options.planted == INFLATED_ACCEPTANCE else {}
    fault = None if options.planted is None else get_fault(options.planted, **sized)
    check_engine(options.engine)
    task = SampledTask(options.task, num_items=options.items, metric=options.metric)
    with contextlib.ExitStack() as opened:
        if engine is None:
            engine = open_engine(options.engine, on_message=listener.message)
            opened.callback(engine.close)
        if fault is not None and not engine.capabilities.takes_faults:
            raise InvalidSetting("plant", options.planted, "no fault can be put into this engine")
        benchmark = _Benchmark(options=options, task=task, engine=engine, listener=listener)
        scores = {arm: benchmark.score(arm, fault if arm is Arm.ON else None) for arm in (Arm.OFF, Arm.ON)}
        subject = engine.describe()
    verdict = decide_coarse(scores[Arm.OFF], scores[Arm.ON], options.margin)
    arms = tuple(
        ArmScores(arm=arm, mean=own.mean, ci_low=own.ci_low, ci_high=own.ci_high, scores=_rows(scores[arm]))
        for arm, own in ((Arm.OFF, verdict.off), (Arm.ON, verdict.on))
    )
    planted = f"{options.planted} ({', '.join(f'{k} {v:g}' for k, v in sized.items())})" if sized else options.planted
    provenance = {
        "command": command_line(),
        "run_seed": options.run_seed,
        "harness": f"lm-eval {installed_version('lm-eval')}",
        "subject": subject,
        "code": describe_code(),
        "machine": describe_machine(),
    }
    result = _result(options, task, benchmark.metric, verdict, (arms[0], arms[1]), planted or "", provenance)
    if options.output is not None:
        write_coarse(result, options.output)
    return result


@dataclass(slots=True, kw_only=True)
class _Benchmark:
    """One task on one engine."""

    options: CoarseOptions
    task: Any
    """A SampledTask; the harness is imported where it is asked for."""
    engine: Engine
    listener: Listener
    metric: str = ""
    prompts: tuple[str, ...] = ()

    def score(self, arm: Arm, fault: Any) -> npt.NDArray[np.float64]:
        """Scores [num_items, num_seeds] of an arm. Raises RunMismatch if it was asked anything else than before."""
        from equivtest.harness.model import EngineModel

        started = time.perf_counter()
        model = EngineModel(
            self.engine,
            speculative=arm is Arm.ON,
            temperature=self.options.temperature,
            num_seeds=self.options.seeds,
            stream=(self.options.run_seed, arm, self.task.name),
            fault=fault,
            on_tokens=self.listener.advance,
        )
        most = self.task.num_items * self.options.seeds * self.task.max_tokens
        self.listener.start(f"arm {arm}", most)
        columns = []
        try:
            for _ in range(self.options.seeds):
                own = self.task.score(model)
                if self.prompts not in ((), own.prompts):
                    raise RunMismatch(Path(self.task.name), "questions", "those of the first seed", "others")
                self.metric, self.prompts = own.metric, own.prompts
                columns.append(own.scores)
            self.listener.skip(most - model.num_tokens)  # answers that ended early
        finally:
            self.listener.finish()
        means, seconds = ", ".join(f"{own.mean():.3f}" for own in columns), time.perf_counter() - started
        self.listener.message(f"arm {arm}: {self.metric} {means}, {seconds:.0f} s")
        return np.stack(columns, axis=1)


def _rows(scores: npt.NDArray[np.float64]) -> tuple[tuple[float, ...], ...]:
    """[num_seeds][num_items], whole numbers as such."""
    return tuple(tuple(int(v) if v == int(v) else v for v in own) for own in scores.T.tolist())


def _result(
    options: CoarseOptions,
    task: Any,
    metric: str,
    verdict: CoarseVerdict,
    arms: tuple[ArmScores, ArmScores],
    planted: str,
    provenance: dict[str, Any],
) -> CoarseResult:
    difference = verdict.difference
    path = Path(task.name)
    return CoarseResult(
        word=verdict.word,
        headline=verdict.headline,
        # Where a file lies on this machine says nothing about it.
        task=path.name if path.is_file() else task.name,
        metric=metric,
        num_items=task.num_items,
        temperature=options.temperature,
        planted=planted,
        arms=arms,
        overlap=verdict.overlap,
        estimate=difference.estimate,
        ci_low=difference.ci_low,
        ci_high=difference.ci_high,
        p_value=difference.p_value,
        margin=verdict.margin,
        visible=difference.visible,
        provenance=provenance,
    )
