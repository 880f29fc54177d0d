"""From the law family's evidence to findings, confirmations and the intervals that equivalence rests on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from equivtest.errors import InvalidSetting
from equivtest.records import Arm, Evidence
from equivtest.stats.law import LawResult
from equivtest.stats.multiplicity import bonferroni, holm
from equivtest.verdict.facts import LAW_ROLES, Confirmation, Finding, Flag, Interval, Place
from equivtest.verdict.findings import CONFIRMATION_ALPHA

LAW_LEVEL = 0.01
"""Family-wise level of the law family over all configs of a run."""


def adjusted_law_evidence(results: Mapping[str, LawResult]) -> dict[str, tuple[Evidence, ...]]:
    """Every line of one arm, by config, with p-values adjusted over all configs (Holm)."""
    lines = [(config, line) for config, result in results.items() for line in result.evidence]
    adjusted = holm(np.array([line.p_value for _, line in lines]))
    evidence: dict[str, list[Evidence]] = {config: [] for config in results}
    for (config, line), p_value in zip(lines, adjusted.tolist(), strict=True):
        evidence[config].append(dataclasses.replace(line, adjusted_p=p_value))
    return {config: tuple(own) for config, own in evidence.items()}


def law_finding(
    arm: Arm, evidence: Mapping[str, Sequence[Evidence]], confirmation: Confirmation | None = None
) -> Finding:
    """What the law family found on one arm; `evidence` as `adjusted_law_evidence` gives it."""
    flags = [
        _flag(config, line, _adjusted(line))
        for config, lines in evidence.items()
        for line in lines
        if _adjusted(line) < LAW_LEVEL
    ]
    return Finding(
        family="law",
        role=LAW_ROLES[arm],
        subject=law_subject(arm),
        unit="law tests",
        num_tests={config: len(lines) for config, lines in evidence.items()},
        flagged=tuple(sorted(flags, key=lambda flag: flag.p_value)),
        smallest_p=min(_adjusted(line) for lines in evidence.values() for line in lines),
        level=LAW_LEVEL,
        method="every token against the target's law at its own prefix, Holm over the tests of all configs",
        confirmation=confirmation,
    )


def law_confirmation(
    fresh: Mapping[str, LawResult], tested: Sequence[Place], *, num_samples: int, alpha: float = CONFIRMATION_ALPHA
) -> Confirmation:
    """The flagged tests again, on fresh seeds only, Bonferroni at alpha. A test that the fresh tokens do not allow
    cannot confirm anything: its p-value is 1."""
    found = [(place, _named(fresh[place.config], place.test)) for place in tested]
    adjusted = bonferroni(np.array([1.0 if line is None else line.p_value for _, line in found]))
    return Confirmation(
        alpha=alpha,
        num_samples=num_samples,
        tested=tuple(tested),
        confirmed=tuple(
            _flag(place.config, line, p_value)
            for (place, line), p_value in zip(found, adjusted.tolist(), strict=True)
            if line is not None and p_value <= alpha
        ),
        smallest_p=float(adjusted.min()),
    )


def margin_intervals(evidence: Mapping[str, Sequence[Evidence]], num_seeds: int) -> tuple[Interval, ...]:
    """The intervals of arm on that bear a margin."""
    return tuple(
        Interval(
            place=Place(config, test=line.name),
            estimate=line.estimate,
            low=line.ci_low,
            high=line.ci_high,
            margin=line.margin,
            num_seeds=num_seeds,
        )
        for config, lines in evidence.items()
        for line in lines
        if not (line.margin is None or line.estimate is None or line.ci_low is None or line.ci_high is None)
    )


def law_subject(arm: Arm) -> str:
    """For people: `on against the target's law`."""
    return f"{arm} against the target's law"


def _named(result: LawResult, name: str | None) -> Evidence | None:
    return next((line for line in result.evidence if line.name == name), None)


def _adjusted(line: Evidence) -> float:
    if line.adjusted_p is None:
        raise InvalidSetting("law evidence", line.name, "must carry its adjusted p-value")
    return line.adjusted_p


def _flag(config: str, line: Evidence, p_value: float) -> Flag:
    effect = line.statistic if line.estimate is None else line.estimate
    interval = "" if line.ci_low is None else f" (95 % CI {line.ci_low:.4f} to {line.ci_high:.4f})"
    return Flag(
        place=Place(config, test=line.name),
        p_value=p_value,
        effect=effect,
        effect_by_chance=0.0,
        words=f"{line.name} {effect:+.4g}{interval}",
    )
