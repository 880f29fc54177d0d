"""Whole gate runs of a synthetic decoder: four arms, three families, two stages, one word."""

from __future__ import annotations

import numpy as np

from equivtest.bench.families import MAX_DRAFT, cells, model
from equivtest.bench.replications import Outcome
from equivtest.bench.synthetic import Decoded, decode
from equivtest.records import Arm, Comparison, Evidence, Origin, Word
from equivtest.stats.joint import JointResult, joint_family
from equivtest.stats.joint_statistics import STATISTICS, StatisticName
from equivtest.stats.law import LawMargins, LawResult, law_family
from equivtest.stats.marginal import marginal_family
from equivtest.stats.scored import ORIGIN_CODES
from equivtest.verdict.decide import decide
from equivtest.verdict.facts import LAW_ROLES, ROLES, ConfigFacts, Finding, Role, RunFacts
from equivtest.verdict.findings import confirmation, flagged_cells, marginal_finding
from equivtest.verdict.joint_findings import JOINT_LEVEL, joint_confirmation, joint_finding
from equivtest.verdict.law_findings import adjusted_law_evidence, law_confirmation, law_finding, margin_intervals
from equivtest.verdict.verdict import Standing, Verdict

NUM_PROMPTS, NUM_POSITIONS, NUM_SEEDS = 2, 16, 256
NUM_FRESH_SEEDS = 4 * NUM_SEEDS
NUM_PERMUTATIONS = 999
PLANTED = 0.1
"""Acceptance bias of arm biased, on top of what arm on has."""
MARGINS = LawMargins(bias=0.03, pit=0.04)
"""Wider than the gate's by what an eighth of its tokens cost."""
PROTOCOL = (
    f"{NUM_PROMPTS} prompts, {NUM_POSITIONS} positions, {NUM_SEEDS} seeds an arm, {NUM_FRESH_SEEDS:,} fresh ones where "
    f"anything is flagged, {NUM_PERMUTATIONS} permutations, margins {MARGINS.bias:g} (bias) and {MARGINS.pit:g} (PIT)"
)

_CONFIG = "topp95"
_CELLS = [(_CONFIG, f"prompt {prompt}", position) for prompt in range(NUM_PROMPTS) for position in range(NUM_POSITIONS)]


def gate_run(epsilon: float, rng: np.random.Generator) -> dict[str, Outcome]:
    """One run of a decoder whose acceptance is inflated by `epsilon` (0: a correct one), as [1] answers.

    stopped: a flag of the test, of the A/A control or of the reference law stood. literal: the gate of record rejected.
    marginal: a flag of the marginal family stood. flagged: stage 1 flagged anything that was not planted. The words
    count runs by verdict.
    """
    verdict = _Run(epsilon, rng).verdict()
    judged = [pair for pair in zip(verdict.findings, verdict.standings, strict=True) if pair[0].role is not Role.TEETH]
    standing = [finding for finding, state in judged if state is Standing.CONFIRMED]
    answers = {
        "flagged": any(finding.flagged for finding, _ in judged),
        "stopped": bool(standing),
        "literal": not verdict.gate_of_record.passed,
        "marginal": any(finding.family == "marginal" for finding in standing),
        **{str(word): verdict.word is word for word in Word},
    }
    return {name: np.array([answer]) for name, answer in answers.items()}


class _Run:
    """The arms of one run; fresh seeds are decoded when the first flag asks for them."""

    def __init__(self, epsilon: float, rng: np.random.Generator) -> None:
        self.epsilons = {Arm.OFF: 0.0, Arm.ON: epsilon, Arm.ON_NULL: epsilon, Arm.BIASED: epsilon + PLANTED}
        self.rng = rng
        self.arms = {arm: self._decode(arm, NUM_SEEDS) for arm in Arm}
        self._fresh: dict[Arm, Decoded] = {}

    def verdict(self) -> Verdict:
        findings = [judge(comparison) for comparison in Comparison for judge in (self._marginal, self._joint)]
        law = {arm: self._law(arm, self.arms[arm]) for arm in LAW_ROLES}
        evidence = {arm: adjusted_law_evidence(result) for arm, result in law.items()}
        findings += [self._law_finding(arm, evidence[arm]) for arm in LAW_ROLES]
        return decide(self._facts(), findings, margin_intervals(evidence[Arm.ON], NUM_SEEDS))

    def _decode(self, arm: Arm, num_seeds: int) -> Decoded:
        return decode(
            model(NUM_PROMPTS, NUM_POSITIONS),
            num_seeds,
            max_draft=0 if arm is Arm.OFF else MAX_DRAFT,
            epsilon=self.epsilons[arm],
            rng=self.rng,
        )

    def _fresh_samples(self, arm: Arm) -> Decoded:
        if arm not in self._fresh:
            self._fresh[arm] = self._decode(arm, NUM_FRESH_SEEDS)
        return self._fresh[arm]

    def _marginal(self, comparison: Comparison) -> Finding:
        first, second = (cells(self.arms[arm]) for arm in comparison.arms)
        result = marginal_family(first, second, num_tv_permutations=1, rng=self.rng)
        flagged, stage_2 = flagged_cells(result, _CELLS), None
        if flagged and ROLES[comparison] is not Role.TEETH:
            first, second = (cells(self._fresh_samples(arm)) for arm in comparison.arms)
            chosen = [_CELLS.index(cell) for cell in flagged]
            stage_2 = confirmation([first[i] for i in chosen], [second[i] for i in chosen], flagged, rng=self.rng)
        return marginal_finding(comparison, result, _CELLS, stage_2)

    def _joint(self, comparison: Comparison) -> Finding:
        first, second = comparison.arms
        results = self._joint_results(self.arms[first], self.arms[second], tuple(STATISTICS))
        finding = joint_finding(comparison, results)
        if finding.flagged and finding.role is not Role.TEETH:
            tested = [flag.place for flag in finding.flagged]
            names = tuple(name for name in STATISTICS if name in {place.test for place in tested})
            fresh = self._joint_results(self._fresh_samples(first), self._fresh_samples(second), names)
            finding = joint_finding(comparison, results, joint_confirmation(fresh, tested))
        return finding

    def _joint_results(
        self, first: Decoded, second: Decoded, statistics: tuple[StatisticName, ...]
    ) -> dict[str, JointResult]:
        result = joint_family(
            list(first.tokens),
            list(second.tokens),
            statistics=statistics,
            num_permutations=NUM_PERMUTATIONS,
            level=JOINT_LEVEL,
            rng=self.rng,
        )
        return {_CONFIG: result}

    def _law(self, arm: Arm, samples: Decoded) -> dict[str, LawResult]:
        return {_CONFIG: law_family(samples.scored, f"{arm} / {_CONFIG}", margins=MARGINS)}

    def _law_finding(self, arm: Arm, evidence: dict[str, tuple[Evidence, ...]]) -> Finding:
        finding = law_finding(arm, evidence)
        if finding.flagged and finding.role is not Role.TEETH:
            fresh = self._law(arm, self._fresh_samples(arm))
            tested = [flag.place for flag in finding.flagged]
            finding = law_finding(arm, evidence, law_confirmation(fresh, tested, num_samples=NUM_FRESH_SEEDS))
        return finding

    def _facts(self) -> RunFacts:
        on = self.arms[Arm.ON].scored
        rows = NUM_PROMPTS * NUM_POSITIONS * NUM_SEEDS
        config = ConfigFacts(
            config=_CONFIG,
            rows_expected=dict.fromkeys(Arm, rows),
            rows_found={arm: samples.tokens.size for arm, samples in self.arms.items()},
            num_samples=NUM_PROMPTS * NUM_SEEDS,
            num_spec_samples=NUM_PROMPTS * NUM_SEEDS,
            num_drafted=int(on.has_draft.sum()),
            num_accepted=int((on.origin == ORIGIN_CODES[Origin.ACCEPTED]).sum()),
            plain_reasons={},
        )
        return RunFacts(configs=(config,), planted_fault=f"acceptance bias of {PLANTED:.2f}")
