"""From the joint family's numbers to a finding, and the decision which of its flags stand on fresh seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from equivtest.records import Comparison, Evidence
from equivtest.stats.joint import JointResult, JointTest
from equivtest.stats.multiplicity import bonferroni, holm
from equivtest.verdict.facts import ROLES, Confirmation, Finding, Flag, Place
from equivtest.verdict.findings import CONFIRMATION_ALPHA

JOINT_LEVEL = 0.01
"""Family-wise level of the joint family over all configs of a run."""


def joint_finding(
    comparison: Comparison, results: Mapping[str, JointResult], confirmation: Confirmation | None = None
) -> Finding:
    """What the joint family found on one comparison; one result a config, Holm over the tests of all configs."""
    tests = [(config, test) for config, result in results.items() for test in result.tests]
    adjusted = holm(np.array([test.p_value for _, test in tests])).tolist()
    flags = [
        _flag(config, test, p_value)
        for (config, test), p_value in zip(tests, adjusted, strict=True)
        if p_value < JOINT_LEVEL
    ]
    return Finding(
        family="joint",
        role=ROLES[comparison],
        subject=comparison.words,
        unit="joint tests",
        num_tests={config: len(result.tests) for config, result in results.items()},
        flagged=tuple(sorted(flags, key=lambda flag: (flag.p_value, -abs(flag.effect)))),
        smallest_p=min(adjusted),
        level=JOINT_LEVEL,
        method="permutations of whole samples within config and prompt, Holm over the tests of all configs",
        confirmation=confirmation,
    )


def joint_confirmation(
    fresh: Mapping[str, JointResult], tested: Sequence[Place], *, alpha: float = CONFIRMATION_ALPHA
) -> Confirmation:
    """The flagged tests again, on fresh seeds only, Bonferroni at alpha."""
    found = [next(test for test in fresh[place.config].tests if test.name == place.test) for place in tested]
    adjusted = bonferroni(np.array([test.p_value for test in found])).tolist()
    return Confirmation(
        alpha=alpha,
        num_samples=int(min(min(result.num_off.min(), result.num_on.min()) for result in fresh.values())),
        tested=tuple(tested),
        confirmed=tuple(
            _flag(place.config, test, p_value)
            for place, test, p_value in zip(tested, found, adjusted, strict=True)
            if p_value <= alpha
        ),
        smallest_p=min(adjusted),
    )


def adjusted_joint_evidence(comparison: Comparison, results: Mapping[str, JointResult]) -> tuple[Evidence, ...]:
    """Every line of one comparison, its raw p-value beside the one adjusted over all configs (Holm)."""
    lines = [
        dataclasses.replace(line, p_value=test.p_value)
        for config, result in results.items()
        for line, test in zip(result.evidence(f"{comparison.words} / {config}"), result.tests, strict=True)
    ]
    adjusted = holm(np.array([line.p_value for line in lines])).tolist()
    return tuple(dataclasses.replace(line, adjusted_p=p) for line, p in zip(lines, adjusted, strict=True))


def _flag(config: str, test: JointTest, p_value: float) -> Flag:
    estimate = "" if test.estimate is None else f", estimate {test.estimate:+.3g}"
    return Flag(
        place=Place(config, test=test.name),
        p_value=p_value,
        effect=test.z,
        effect_by_chance=0.0,
        words=f"{test.name} z {test.z:+.1f}{estimate}",
    )
