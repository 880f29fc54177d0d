"""From the identity checks to a finding."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from equivtest.records import KILL_LEVEL, Evidence
from equivtest.stats.multiplicity import holm
from equivtest.verdict.facts import Finding, Flag, Place, Role

_WORDS = {
    "replay": "the same seed gave another text in {count:.0f} of the requests that were repeated ({share:.0%})",
    "greedy": "greedy text differed with speculation in {count:.0f} prompts ({share:.0%})",
    "drafts": "{count:.0f} sampled drafts were not drawn from the law they name ({share:.1%})",
}


def adjusted_identity_evidence(lines: Mapping[str, Sequence[Evidence]]) -> dict[str, tuple[Evidence, ...]]:
    """Every line by config, with p-values adjusted over all configs (Holm)."""
    flat = [(config, line) for config, own in lines.items() for line in own]
    adjusted = holm(np.array([line.p_value for _, line in flat])).tolist() if flat else []
    evidence: dict[str, list[Evidence]] = {config: [] for config in lines}
    for (config, line), p_value in zip(flat, adjusted, strict=True):
        evidence[config].append(dataclasses.replace(line, adjusted_p=p_value))
    return {config: tuple(own) for config, own in evidence.items()}


def identity_finding(evidence: Mapping[str, Sequence[Evidence]]) -> Finding:
    """What the checks of arm on found; `evidence` as `adjusted_identity_evidence` gives it.

    They compare the decoder with itself: only rounding changes anything by chance, and so their flags count at once."""
    flags = [
        Flag(
            place=Place(config, test=line.name),
            p_value=line.adjusted_p or 0.0,
            effect=line.estimate or 0.0,
            effect_by_chance=0.0,
            words=_WORDS[line.name].format(count=line.statistic, share=line.estimate),
        )
        for config, own in evidence.items()
        for line in own
        if line.adjusted_p is not None and line.adjusted_p <= KILL_LEVEL
    ]
    return Finding(
        family="identity",
        role=Role.TEST,
        subject="on, repeated",
        unit="identity checks",
        num_tests={config: len(own) for config, own in evidence.items()},
        flagged=tuple(sorted(flags, key=lambda flag: flag.p_value)),
        smallest_p=min(line.adjusted_p or 0.0 for own in evidence.values() for line in own),
        level=KILL_LEVEL,
        method="repeated under the same seeds and greedily; exact binomial tail at what rounding may turn, Holm",
        at_once=True,
    )
