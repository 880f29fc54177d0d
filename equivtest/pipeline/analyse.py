"""From samples on disk to a verdict: reads parquet, calls the statistics, asks the verdict room; decides nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

from equivtest.errors import InsufficientSamples, MissingSamples, StatisticsError
from equivtest.pipeline.analysis_options import LEVEL, AnalysisOptions
from equivtest.pipeline.families import (
    Judged,
    LawEvidence,
    RunSamples,
    Want,
    judge_joint,
    judge_marginal,
)
from equivtest.pipeline.frames import cells_frame, quantiles_frame
from equivtest.pipeline.law_on_arms import LawOnArms
from equivtest.pipeline.live_evidence import ALTERNATIVES_FILE, IDENTITY_FILE, Lines, kept_lines
from equivtest.pipeline.manifest import Manifest
from equivtest.pipeline.side_by_side import side_by_side
from equivtest.pipeline.watch import progress_line, watch_evidence, watch_finding
from equivtest.protocol.budgets import BUDGETS
from equivtest.protocol.configs import CONFIGS
from equivtest.protocol.plan import Protocol
from equivtest.records import Arm, Comparison, Evidence, Origin, Word
from equivtest.samples.reader import acceptance_by_arm, acceptance_by_slot, read_samples
from equivtest.stats.marginal import MarginalResult, choose_permutations
from equivtest.verdict.decide import decide, standing
from equivtest.verdict.diagnosis import Diagnosis, diagnose
from equivtest.verdict.facts import LAW_ROLES, ConfigFacts, Finding, Flag, Place, Role, RunFacts
from equivtest.verdict.findings import Cell
from equivtest.verdict.identity_findings import adjusted_identity_evidence, identity_finding
from equivtest.verdict.verdict import Standing, Verdict


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Analysis:
    """Everything the statistics and the verdict said about one run."""

    verdict: Verdict
    configs: tuple[ConfigFacts, ...]
    cells: pd.DataFrame
    """One row per comparison and cell, columns of report.data.CELL_COLUMNS."""
    evidence: tuple[Evidence, ...]
    acceptance: pd.DataFrame
    """Per arm, config and slot: drafts offered, reached and accepted."""
    speed: pd.DataFrame
    """Per arm and config: acceptance_rate and mean_accepted, empty where nothing speculated."""
    pit: pd.DataFrame
    quantiles: pd.DataFrame
    power: pd.DataFrame
    expected: pd.DataFrame
    """Columns as report.data has them."""
    stages: tuple[str, ...]
    """Where each sentence of the verdict's diagnosis points."""
    different: bool
    """Whether a sequential run has shown a difference."""
    equivalent: bool
    """Whether it has shown equivalence, and nothing else objects."""
    wants: tuple[Want, ...]
    """Fresh seeds that flags still wait for, in the order in which to collect them."""


def analyse(run_dir: Path, protocol: Protocol, options: AnalysisOptions, *, finished: bool = True) -> Analysis:
    """Judge the samples of a run folder. Missing rows make the verdict invalid; damaged files raise InvalidShard.

    finished: whether the run ended by itself; one that did not is at best inconclusive.
    """
    rows = read_samples(run_dir, ("arm", "config", "seed", "position", "origin", "slot", "num_draft", "route"))
    rows = rows.filter(pa.compute.less(rows["seed"], protocol.num_seeds))
    by_slot = acceptance_by_slot(rows).to_pandas()
    configs = tuple(_config_facts(protocol, config, rows, by_slot) for config in protocol.configs)
    samples = RunSamples.of(run_dir, protocol, options)
    judged: list[Judged] = []
    refusals: list[str] = []
    cells, quantiles = [cells_frame(Comparison.OFF_ON, [], None)], [quantiles_frame(Comparison.OFF_ON, _NO_VALUES)]
    joint_off_on: tuple[Evidence, ...] = ()
    for comparison, compared in zip(Comparison, side_by_side(partial(_compared, samples), Comparison), strict=True):
        if isinstance(compared, MissingSamples):
            continue  # the verdict room counts the rows and says which are missing
        if isinstance(compared, StatisticsError):
            refusals.append(f"{comparison.words}: {compared}")
            continue
        judged += [compared.marginal, compared.joint]
        cells.append(cells_frame(comparison, compared.cells, compared.result))
        quantiles.append(quantiles_frame(comparison, compared.result.p_value))
        joint_off_on = compared.joint.evidence if comparison is Comparison.OFF_ON else joint_off_on
    law = LawOnArms.of(samples, refusals) if options.law else LawOnArms.none()
    judged += [line for arm, line in law.judged.items() if arm in LAW_ROLES]
    findings = [one.finding for one in judged]
    identity = adjusted_identity_evidence(kept_lines(run_dir / IDENTITY_FILE))
    if any(identity.values()):
        findings.append(identity_finding(identity))
    if law.watches:
        findings.append(watch_finding(Arm.ON, law.watches))
    if law.reference_watches:
        findings.append(watch_finding(Arm.OFF, law.reference_watches))
    diagnosis = _diagnosis(
        protocol, judged, law.evidence, joint_off_on, options, identity, kept_lines(run_dir / ALTERNATIVES_FILE)
    )
    facts = RunFacts(
        configs=configs,
        planted_fault=protocol.planted_words,
        confirm=options.confirm,
        caveats=tuple(_caveats(run_dir, protocol, law)),
        refusals=tuple(refusals),
        diagnosis=tuple(one.sentence for one in diagnosis),
        unsettled=(*_unsettled(configs, law.left_out), *(() if finished else (_NOT_FINISHED,))),
    )
    verdict = decide(facts, findings, law.intervals)
    different = any(state.different for state in law.watches.values())
    equivalent = all(state.equivalent for state in law.watches.values()) and verdict.word is Word.EQUIVALENT
    evidence = [line for one in judged for line in one.evidence]
    evidence += [line for own in law.evidence.get(Arm.ON_NULL, {}).values() for line in own]
    evidence += law.differences
    evidence += [line for own in identity.values() for line in own]
    evidence += [line for config, state in law.watches.items() for line in watch_evidence(config, state)]
    return Analysis(
        verdict=verdict,
        configs=configs,
        cells=pd.concat(cells[len(cells) > 1 :], ignore_index=True),
        evidence=tuple(evidence),
        acceptance=by_slot,
        speed=acceptance_by_arm(rows).to_pandas(),
        pit=law.pit,
        quantiles=pd.concat(quantiles[len(quantiles) > 1 :], ignore_index=True),
        power=law.power,
        expected=law.expected,
        stages=tuple(one.stage for one in diagnosis) if verdict.diagnosis else (),
        different=different,
        equivalent=bool(law.watches) and equivalent,
        wants=_ordered_wants(judged, findings, options),
    )


def check_resolution(options: AnalysisOptions, protocol: Protocol) -> None:
    """Raise ResolutionTooCoarse now for what the analysis would refuse after everything was collected."""
    if options.by_permutation:
        num_cells = len(protocol.configs) * len(protocol.prompts) * protocol.num_positions
        choose_permutations(options.num_permutations, num_cells, LEVEL, options.dependence)


class _Compared(NamedTuple):
    """Two arms, token by token and as whole samples."""

    marginal: Judged
    joint: Judged
    cells: list[Cell]
    result: MarginalResult


def _compared(samples: RunSamples, comparison: Comparison) -> _Compared | MissingSamples | StatisticsError:
    try:
        marginal, cells, result = judge_marginal(samples, comparison)
        return _Compared(marginal, judge_joint(samples, comparison), cells, result)
    except (MissingSamples, StatisticsError) as refused:
        return refused


_NOT_FINISHED = "the run did not end by itself; `equivtest run --resume` continues it"
_NO_VALUES = np.empty(0)


def _diagnosis(
    protocol: Protocol,
    judged: Sequence[Judged],
    law: Mapping[Arm, LawEvidence],
    joint: Sequence[Evidence],
    options: AnalysisOptions,
    identity: Lines,
    alternatives: Lines,
) -> tuple[Diagnosis, ...]:
    """On every config, with its name where there are several, from what stands on fresh seeds."""
    standing_places = {
        (one.finding.family, one.finding.role): {flag.place for flag in _standing_flags(one.finding, options)}
        for one in judged
    }

    def shown(family: str, role: Role, config: str, lines: Iterable[Evidence]) -> list[Evidence]:
        places = standing_places.get((family, role), set())
        return [
            line if Place(config, test=line.name) in places else dataclasses.replace(line, adjusted_p=1.0)
            for line in lines
        ]

    said: list[Diagnosis] = []
    for config in protocol.configs:
        own = [line for line in joint if line.stratum.endswith(f" / {config}")]
        found = diagnose(
            shown("law", Role.TEST, config, law.get(Arm.ON, {}).get(config, ())),
            off=shown("law", Role.REFERENCE, config, law.get(Arm.OFF, {}).get(config, ())),
            joint=shown("joint", Role.TEST, config, own),
            identity=identity.get(config, ()),
            alternatives=alternatives.get(config, ()),
        )
        name = f"{config}: " if len(protocol.configs) > 1 else ""
        said += [one._replace(sentence=f"{name}{one.sentence}") for one in found]
    return tuple(said)


def _standing_flags(finding: Finding, options: AnalysisOptions) -> Sequence[Flag]:
    """The flags that count: those of stage 2, or all of them where nothing is confirmed. In a sequential run the watch
    decides, and the flags of stage 1 say what it saw."""
    if finding.confirmation is not None:
        return finding.confirmation.confirmed
    return finding.flagged if not options.confirm or (finding.family == "law" and finding.role is Role.TEST) else ()


def _unsettled(
    configs: Sequence[ConfigFacts], left_out: Mapping[str, Sequence[InsufficientSamples]]
) -> tuple[str, ...]:
    """Configs whose acceptance could be wrong and was not measured."""
    return tuple(
        f"{facts.config}: {error}"
        for facts in configs
        for error in left_out.get(facts.config, ())
        if facts.must_show_teeth and not facts.recorded and error.test.startswith("law/bias (")
    )


def _caveats(run_dir: Path, protocol: Protocol, law: LawOnArms) -> Iterator[str]:
    """What a reader must know whatever was found."""
    budget = BUDGETS.get(protocol.budget)
    if budget and budget.caveat:
        yield budget.caveat
    yield from Manifest.read(run_dir).notes.values()
    if law.watches:
        yield progress_line(law.watches, protocol, budget.num_seeds if budget else protocol.num_seeds)


def _ordered_wants(judged: Sequence[Judged], findings: Sequence[Finding], options: AnalysisOptions) -> tuple[Want, ...]:
    """Controls first; then the law, which needs fewer arms. Nothing more for the question once a flag on it stands, or
    once a control has failed and the run is invalid whatever else is found."""
    settled = any(
        finding.role is not Role.TEETH and standing(finding, options.confirm) is Standing.CONFIRMED
        for finding in findings
    )
    wants = [one.want for one in judged if one.want and not (settled and one.want.role is Role.TEST)]
    return tuple(sorted(wants, key=lambda want: (want.role is Role.TEST, len(want.arms))))


def _config_facts(protocol: Protocol, config: str, samples: pa.Table, by_slot: pd.DataFrame) -> ConfigFacts:
    own = samples.filter(pa.compute.equal(samples["config"], config))
    found = own.group_by("arm").aggregate([("seed", "count")]).to_pandas().set_index("arm")["seed_count"]
    first_tokens = own.filter(
        pa.compute.and_(pa.compute.equal(own["position"], 0), pa.compute.equal(own["arm"], str(Arm.ON)))
    )
    routes = first_tokens["route"].cast(pa.string()).to_pandas().value_counts()
    plain = {str(route): int(count) for route, count in routes.items() if str(route).startswith("plain")}
    drafts = by_slot[(by_slot["arm"] == Arm.ON) & (by_slot["config"] == config)]
    silent = pa.compute.and_(pa.compute.equal(own["origin"], str(Origin.UNKNOWN)), pa.compute.equal(own["arm"], Arm.ON))
    rows = len(protocol.prompts) * protocol.num_seeds * protocol.num_positions
    return ConfigFacts(
        config=config,
        rows_expected={arm: rows for arm in Arm},
        rows_found={arm: int(found.get(str(arm), 0)) for arm in Arm},
        greedy=CONFIGS[config].greedy,
        recorded=bool(pa.compute.any(silent).as_py()),
        num_samples=len(first_tokens),
        num_spec_samples=len(first_tokens) - sum(plain.values()),
        num_drafted=int(drafts["reached"].sum()),
        num_accepted=int(drafts["accepted"].sum()),
        plain_reasons={route.removeprefix("plain: "): count for route, count in plain.items()},
    )
