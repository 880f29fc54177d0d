"""The law family on every arm of a run: the question, its reference, its teeth, and what is plotted of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import pandas as pd

from equivtest.errors import InsufficientSamples, MissingSamples, StatisticsError
from equivtest.pipeline.families import Judged, LawEvidence, RunSamples, judge_law, judge_reference
from equivtest.pipeline.frames import expected_frame, pit_frame, power_frame
from equivtest.pipeline.side_by_side import side_by_side
from equivtest.pipeline.watch import Watch, watch
from equivtest.records import Arm, Evidence
from equivtest.report.data import EXPECTED_COLUMNS, PIT_COLUMNS
from equivtest.stats.law import LawResult
from equivtest.stats.law_difference import on_minus_off
from equivtest.stats.scored import ScoredTokens
from equivtest.verdict.facts import LAW_ROLES, Interval
from equivtest.verdict.law_findings import adjusted_law_evidence, margin_intervals

_NO_PIT = pd.DataFrame(columns=list(PIT_COLUMNS))
_NO_EXPECTED = pd.DataFrame(columns=list(EXPECTED_COLUMNS))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LawOnArms:
    """What the law family said on every arm."""

    judged: Mapping[Arm, Judged]
    evidence: Mapping[Arm, LawEvidence]
    differences: tuple[Evidence, ...]
    """On minus off."""
    left_out: Mapping[str, tuple[InsufficientSamples, ...]]
    """Tests that arm on had too little for, by config."""
    intervals: tuple[Interval, ...]
    pit: pd.DataFrame
    expected: pd.DataFrame
    """Accepted share of the drafts at each slot."""
    power: pd.DataFrame
    watches: Mapping[str, Watch]
    """Of a sequential run's arm on, by config."""
    reference_watches: Mapping[str, Watch]
    """Of its arm off: where that strays as well, the law is the wrong one."""

    @classmethod
    def none(cls) -> LawOnArms:
        return cls(
            judged={},
            evidence={},
            differences=(),
            left_out={},
            intervals=(),
            pit=_NO_PIT,
            expected=_NO_EXPECTED,
            power=power_frame({}, 0, 0),
            watches={},
            reference_watches={},
        )

    @classmethod
    def of(cls, samples: RunSamples, refusals: list[str]) -> LawOnArms:
        """Every arm whose rows are there; what the statistics refuse is added to `refusals`."""
        protocol, margins = samples.protocol, samples.options.margins(samples.protocol.budget)
        judged: dict[Arm, Judged] = {}
        evidence: dict[Arm, LawEvidence] = {}
        scored: dict[tuple[Arm, str], ScoredTokens] = {}
        results: dict[Arm, dict[str, LawResult]] = {}

        def of_law(arm: Arm, config: str) -> LawResult:
            return samples.law(scored[arm, config], f"{arm} / {config}")

        for arm in protocol.law_arms:
            try:
                read = side_by_side(partial(samples.scored, arm), protocol.configs)
                scored |= {(arm, config): tokens for config, tokens in zip(protocol.configs, read, strict=True)}
                results[arm] = dict(
                    zip(protocol.configs, side_by_side(partial(of_law, arm), protocol.configs), strict=True)
                )
                evidence[arm] = adjusted_law_evidence(results[arm])
                if arm in LAW_ROLES:
                    suspected = Arm.OFF in judged and arm is Arm.ON
                    judged[arm] = judge_law(samples, arm, evidence[arm])
                    if suspected and judged[arm].finding.flagged:
                        judged[Arm.OFF] = judge_reference(samples, evidence[Arm.OFF], judged[arm].finding)
            except (MissingSamples, StatisticsError) as refused:
                refusals.append(f"arm {arm} against the target's law: {refused}")

        def watched(arm: Arm) -> dict[str, Watch]:
            return {
                config: watch(scored[arm, config], margin=margins.bias, num_configs=len(protocol.configs))
                for config in results.get(arm, {})
                if protocol.sequential
            }

        both = Arm.OFF in results and Arm.ON in results
        on_off = protocol.configs if both else ()
        judged_pairs = [(arm, config) for arm in results for config in results[arm]]
        num_tests = sum(len(own) for own in evidence.get(Arm.ON, {}).values())
        return cls(
            judged=judged,
            evidence=evidence,
            differences=tuple(
                line
                for config in on_off
                for line in on_minus_off(scored[Arm.ON, config], scored[Arm.OFF, config], f"on minus off / {config}")
            ),
            left_out={config: result.left_out for config, result in results.get(Arm.ON, {}).items()},
            intervals=margin_intervals(evidence.get(Arm.ON, {}), protocol.num_seeds),
            pit=_joined(_NO_PIT, [pit_frame(config, arm, scored[arm, config]) for arm, config in judged_pairs]),
            expected=_joined(
                _NO_EXPECTED, [expected_frame(config, arm, scored[arm, config]) for arm, config in judged_pairs]
            ),
            power=power_frame(
                {config: scored[Arm.ON, config] for config in results.get(Arm.ON, {})}, protocol.num_seeds, num_tests
            ),
            watches=watched(Arm.ON),
            reference_watches=watched(Arm.OFF),
        )


def _joined(nothing: pd.DataFrame, frames: list[pd.DataFrame]) -> pd.DataFrame:
    filled = [frame for frame in frames if len(frame)]
    return pd.concat(filled, ignore_index=True) if filled else nothing
