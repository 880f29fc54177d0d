"""What bias a protocol can see, counted: a decoder of known bias is run many times and every family judges each run."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from equivtest.engines.base import Engine
from equivtest.engines.base import EngineOptions as EngineOptions
from equivtest.errors import InvalidSetting
from equivtest.faults import Fault, get_fault
from equivtest.pipeline.families import generator
from equivtest.pipeline.law_input import logprob_tolerance, read_scored_tokens
from equivtest.pipeline.manifest import command_line, describe_code, describe_machine
from equivtest.pipeline.one_arm import gather, large_batches, shards_of, token_grids
from equivtest.pipeline.power import TARGET_POWER
from equivtest.pipeline.progress import Listener
from equivtest.protocol.budgets import get_budget
from equivtest.protocol.configs import resolve_configs
from equivtest.protocol.plan import Batch, Protocol
from equivtest.protocol.prompts import load_prompt_set
from equivtest.records import Arm
from equivtest.stats.law import LawResult, law_family
from equivtest.stats.monte_carlo import FamilyName, PowerPoint, detector, power_point
from equivtest.verdict.facts import Place
from equivtest.verdict.law_findings import LAW_LEVEL, adjusted_law_evidence, law_confirmation

_TOKEN_FAMILIES: Mapping[str, FamilyName] = {
    "protocol of record": "marginal",
    "max_z": "max_z",
    "MMD-Hamming": "mmd",
    "joint": "joint",
}
FAMILIES = (*_TOKEN_FAMILIES, "law", "law, lag after a recovery", "law, confirmed")
"""What judges a run of a study. The last is the law family as the verdict takes it, with its second stage."""

_LAG = "lag_recovered"

_STAGE_2 = 4
"""Runs of a study whose seeds confirm another run's flags: four times its own, as in the protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A decoder whose runs are judged."""

    name: str
    """"bias 0.02", or the name of a fault."""
    bias: float | None
    fault: Fault | None
    """None for a correct decoder."""

    @classmethod
    def biased(cls, bias: float) -> Subject:
        fault = get_fault("inflated_acceptance", epsilon=bias) if bias else None
        return cls(name=f"bias {bias:g}", bias=bias, fault=fault)

    @classmethod
    def faulty(cls, name: str) -> Subject:
        return cls(name=name, bias=None, fault=get_fault(name))


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRow:
    """How often one family found one subject."""

    config: str
    subject: str
    bias: float | None
    family: str
    num_found: int
    num_runs: int
    power: float
    ci_low: float
    ci_high: float
    """Exact 95 % interval."""
    mean_estimate: float | None
    """Mean over runs of the law family's estimate of the bias."""


def simulate(
    study_dir: Path,
    protocol: Protocol,
    engine: Engine,
    subjects: Sequence[Subject],
    *,
    num_runs: int,
    batch_samples: int,
    listener: Listener,
    workers: int | None = None,
) -> tuple[StudyRow, ...]:
    """Decode `num_runs` runs of every subject, each against its own run of plain decoding, and judge each alone.

    Everything is kept under `study_dir`, a folder a subject, and is not made twice. The second stage of a run takes the
    seeds of four other runs: fresh to it, though runs share them. `protocol.num_seeds` are the seeds of one run.
    Raises InvalidSetting for fewer runs than that needs.
    """
    if num_runs <= _STAGE_2:
        raise InvalidSetting("runs", num_runs, f"must be more than {_STAGE_2}, which confirm each other")

    def batches(arm: Arm) -> list[Batch]:
        runs = itertools.product(protocol.configs, range(num_runs))
        return list(large_batches((s for own in runs for s in shards_of(protocol, arm, *own)), batch_samples))

    gather(study_dir / "off", protocol, engine, batches(Arm.OFF), listener, "plain decoding", scored=False)
    for subject in subjects:
        folder, own = _folder(study_dir, subject.name), batches(_arm(subject))
        gather(folder, protocol, engine, own, listener, subject.name, fault=subject.fault)
    rows: list[StudyRow] = []
    # Spawned, for torch has threads by now that a fork would leave behind.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for subject in subjects:
            for config in protocol.configs:
                judge = partial(_judge_run, study_dir, protocol, config, subject.name, _arm(subject), num_runs)
                listener.message(f"judging {num_runs} runs of {subject.name} / {config}")
                rows += _rows(config, subject, list(pool.map(judge, range(num_runs))))
    return tuple(rows)


def smallest_found(rows: Sequence[StudyRow], config: str, family: str) -> tuple[float | None, float | None]:
    """The smallest bias of the grid from which on at least 90 % of runs were found, and where a straight line between
    it and the bias before crosses 90 %; None where there is none."""
    curve = sorted((r.bias, r.power) for r in rows if r.config == config and r.family == family and r.bias)
    found = None
    for index in range(len(curve) - 1, -1, -1):
        if curve[index][1] < TARGET_POWER:
            break
        found = index
    if found is None:
        return None, None
    bias, power = curve[found]
    if found == 0:
        return bias, None
    before, less = curve[found - 1]
    return bias, before + (bias - before) * (TARGET_POWER - less) / (power - less)


def _arm(subject: Subject) -> Arm:
    return Arm.BIASED if subject.fault else Arm.ON


def _folder(study_dir: Path, subject: str) -> Path:
    return study_dir / subject.replace(" ", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunVerdict:
    found: Mapping[str, bool]
    bias: float | None


def _judge_run(
    study_dir: Path, protocol: Protocol, config: str, subject: str, arm: Arm, num_runs: int, run: int
) -> _RunVerdict:
    """Every family on one run."""
    folder = _folder(study_dir, subject)
    rng = generator(protocol.run_seed, "power", subject, config, run)
    off = token_grids(study_dir / "off", protocol, Arm.OFF, config, run)
    on = token_grids(folder, protocol, arm, config, run)
    found = {name: detector(family)(off, on, rng) for name, family in _TOKEN_FAMILIES.items()}
    first = _law(folder, protocol, arm, config, [run])
    evidence = adjusted_law_evidence({config: first})[config]
    flagged = [line for line in evidence if line.adjusted_p is not None and line.adjusted_p < LAW_LEVEL]
    found["law"] = bool(flagged)
    found["law, lag after a recovery"] = any(line.name == _LAG for line in flagged)
    found["law, confirmed"] = False
    if flagged:
        others = [(run + step) % num_runs for step in range(1, _STAGE_2 + 1)]
        fresh = {config: _law(folder, protocol, arm, config, others)}
        places = [Place(config, test=line.name) for line in flagged]
        found["law, confirmed"] = bool(law_confirmation(fresh, places, num_samples=0).confirmed)
    bias = next((line.estimate for line in evidence if line.name == "bias"), None)
    return _RunVerdict(found=found, bias=bias)


def _law(folder: Path, protocol: Protocol, arm: Arm, config: str, runs: Sequence[int]) -> LawResult:
    batches = [shards_of(protocol, arm, config, run) for run in runs]
    tokens = read_scored_tokens(folder, batches, protocol.num_positions)
    return law_family(tokens, f"{arm} / {config}", tolerance=logprob_tolerance(folder))


def _rows(config: str, subject: Subject, verdicts: Sequence[_RunVerdict]) -> Iterator[StudyRow]:
    estimates = [verdict.bias for verdict in verdicts if verdict.bias is not None]
    for family in FAMILIES:
        point: PowerPoint = power_point(
            subject.bias or 0.0, sum(verdict.found[family] for verdict in verdicts), len(verdicts)
        )
        yield StudyRow(
            config=config,
            subject=subject.name,
            bias=subject.bias,
            family=family,
            num_found=point.num_found,
            num_runs=point.num_replications,
            power=point.power,
            ci_low=point.ci_low,
            ci_high=point.ci_high,
            mean_estimate=float(np.mean(estimates)) if estimates else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOptions:
    """Everything `equivtest power --simulate` can be told."""

    engine: EngineOptions
    configs: tuple[str, ...] = ("topp95",)
    budget: str = "gate"
    biases: tuple[float, ...]
    faults: tuple[str, ...] = ()
    runs: int = 20
    batch: int = 256
    """Samples decoded at once."""
    workers: int | None = None
    study_dir: Path


def study(options: StudyOptions, listener: Listener) -> dict[str, Any]:
    """A whole study as JSON-safe content, with a summary for people."""
    from equivtest.engines.decoder import DecoderEngine

    protocol = Protocol.build(load_prompt_set("default"), resolve_configs(options.configs), get_budget(options.budget))
    subjects = [*map(Subject.biased, options.biases), *map(Subject.faulty, options.faults)]
    engine = DecoderEngine.open(options.engine, on_message=listener.message)
    rows = simulate(
        options.study_dir,
        protocol,
        engine,
        subjects,
        num_runs=options.runs,
        batch_samples=options.batch,
        listener=listener,
        workers=options.workers,
    )
    smallest = {}
    for config in protocol.configs:
        for family in FAMILIES:
            grid, between = smallest_found(rows, config, family)
            smallest[f"{config} / {family}"] = {"found_from": grid, "interpolated": between}
    return {
        "command": command_line(),
        "summary": _summary(rows),
        "settings": {
            "configs": list(protocol.configs),
            "budget": protocol.budget,
            "num_seeds": protocol.num_seeds,
            "num_positions": protocol.num_positions,
            "num_prompts": len(protocol.prompts),
            "run_seed": protocol.run_seed,
            "runs": options.runs,
            "batch": options.batch,
        },
        "subject": dict(engine.describe()),
        "code": describe_code(),
        "machine": describe_machine(),
        "smallest_bias_at_90_percent_power": smallest,
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def _summary(rows: Sequence[StudyRow]) -> list[str]:
    """One line a subject: how many runs each family found."""
    lines = []
    for config, subject in dict.fromkeys((row.config, row.subject) for row in rows):
        own = [row for row in rows if (row.config, row.subject) == (config, subject)]
        found = ", ".join(f"{row.family} {row.num_found}/{row.num_runs}" for row in own)
        estimate = "" if own[0].mean_estimate is None else f"; mean estimate {own[0].mean_estimate:+.4f}"
        lines.append(f"{config}, {subject}: found by {found}{estimate}")
    return lines
