"""How often the whole gate, with its two stages and its controls, stops a correct decoder and a wrong one."""

from collections import Counter

import numpy as np
from scipy import stats

from equivtest.records import Arm, Comparison, Word
from equivtest.stats.marginal import marginal_family
from equivtest.verdict.decide import decide
from equivtest.verdict.findings import confirmation, flagged_cells, marginal_finding
from tests.stats.laws import draw, realistic_laws, towards_the_mode
from tests.verdict.runs import run_facts

CELLS = [("topp95", "code", position) for position in range(32)]
NUM_SEEDS = 256
NUM_FRESH_SEEDS = 1_024


def judge(laws, rng):
    """One run: every arm has a law a cell; flags are confirmed on four times the seeds, as the protocol has it."""
    samples = {arm: draw(laws[arm], NUM_SEEDS, rng) for arm in Arm}
    findings = []
    for comparison in Comparison:
        first, second = comparison.arms
        result = marginal_family(samples[first], samples[second], num_tv_permutations=9, rng=rng)
        flagged = flagged_cells(result, CELLS)
        stage_2 = None
        if flagged and comparison is not Comparison.OFF_BIASED:
            rows = [CELLS.index(cell) for cell in flagged]
            fresh = [draw(laws[arm][rows], NUM_FRESH_SEEDS, rng) for arm in (first, second)]
            stage_2 = confirmation(*fresh, flagged, rng=rng)
        findings.append(marginal_finding(comparison, result, CELLS, stage_2))
    return decide(run_facts(), findings)


def arms(on_bias):
    target = realistic_laws(len(CELLS), np.random.default_rng(21))
    on = towards_the_mode(target, on_bias) if on_bias else target
    return {Arm.OFF: target, Arm.ON: on, Arm.ON_NULL: on, Arm.BIASED: towards_the_mode(on, 0.1)}


def test_a_correct_decoder_is_stopped_in_well_under_one_percent_of_runs():
    """800 runs must refute that 1 % or more are stopped (exact, one-sided, at 5 %: at most 3 are). Each of two
    comparisons is flagged in some 3.5 % of runs and a flag stands on fresh seeds in under 1 % of those, so .06 % are
    expected; more than 3 then come once in 500 times. The literal gate of record alone stops up to q: exact 99.9 %
    interval."""
    rng = np.random.default_rng(22)
    laws = arms(on_bias=0.0)
    verdicts = [judge(laws, rng) for _ in range(800)]
    words = Counter(verdict.word for verdict in verdicts)
    stopped = len(verdicts) - words[Word.EQUIVALENT]
    assert stats.binomtest(stopped, 800, 0.01, alternative="less").pvalue < 0.05, words
    literal = sum(not verdict.gate_of_record.passed for verdict in verdicts)
    assert stats.binomtest(literal, 800).proportion_ci(0.999).low <= 0.05
    assert literal > stopped  # the second stage is what makes the difference


def test_a_biased_decoder_is_stopped_in_every_run():
    """The twin: acceptance of the mode inflated by .1, 30 runs; one is missed with probability below .01."""
    rng = np.random.default_rng(23)
    laws = arms(on_bias=0.1)
    verdicts = [judge(laws, rng) for _ in range(30)]
    assert Counter(verdict.word for verdict in verdicts) == {Word.DIFFERENT: 30}
    assert not any(verdict.gate_of_record.passed for verdict in verdicts)
