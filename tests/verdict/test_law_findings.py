"""The law and the joint family as findings: adjusted over configs, confirmed on fresh seeds, bounded by margins."""

from dataclasses import replace

import numpy as np
import pytest

from equivtest.errors import InvalidSetting
from equivtest.records import Arm, Comparison, Evidence, Word
from equivtest.stats.joint import joint_family
from equivtest.stats.law import LawResult
from equivtest.stats.multiplicity import holm
from equivtest.verdict.decide import decide
from equivtest.verdict.facts import Interval, Place, Role
from equivtest.verdict.joint_findings import adjusted_joint_evidence, joint_confirmation, joint_finding
from equivtest.verdict.law_findings import adjusted_law_evidence, law_confirmation, law_finding, margin_intervals
from equivtest.verdict.verdict import Standing
from tests.verdict.runs import config_facts, findings, run_facts


def line(name: str, p_value: float, *, estimate: float = 0.001, margin: float | None = None) -> Evidence:
    return Evidence(
        family="law", name=name, stratum="on / topp95", statistic=1.0, p_value=p_value, estimate=estimate,
        ci_low=estimate - 0.003, ci_high=estimate + 0.003, margin=margin, num_tokens=1_000, method="test",
    )  # fmt: skip


def result(**p_values: float) -> LawResult:
    evidence = tuple(line(name, p, margin=0.01 if name == "bias" else None) for name, p in p_values.items())
    return LawResult(evidence=evidence, adjusted=holm(np.array(list(p_values.values()))), left_out=())


def test_p_values_are_adjusted_over_the_tests_of_all_configs() -> None:
    evidence = adjusted_law_evidence({"topp95": result(bias=0.002, rank=0.5), "topk50": result(bias=0.4, rank=0.6)})
    assert evidence["topp95"][0].adjusted_p == pytest.approx(0.008)
    assert law_finding(Arm.ON, evidence).flagged[0].place == Place("topp95", test="bias")
    more = {"topp95": result(bias=0.002, rank=0.5), "topk50": result(bias=0.4, rank=0.6, vocab=0.7, lag=0.8)}
    assert law_finding(Arm.ON, adjusted_law_evidence(more)).flagged == ()  # six tests: .012


def test_a_finding_takes_the_role_of_its_arm_and_asks_for_adjusted_p_values() -> None:
    evidence = adjusted_law_evidence({"topp95": result(bias=1e-9)})
    roles = {arm: law_finding(arm, evidence).role for arm in (Arm.OFF, Arm.ON, Arm.BIASED)}
    assert roles == {Arm.OFF: Role.REFERENCE, Arm.ON: Role.TEST, Arm.BIASED: Role.TEETH}
    with pytest.raises(InvalidSetting, match="adjusted"):
        law_finding(Arm.ON, {"topp95": [line("bias", 0.5)]})


def test_only_flagged_tests_are_confirmed_bonferroni_and_a_test_that_is_gone_confirms_nothing() -> None:
    tested = [Place("topp95", test="bias"), Place("topp95", test="lag_recovered")]
    stage_2 = law_confirmation({"topp95": result(bias=0.004, rank=1e-30)}, tested, num_samples=100)
    assert [flag.place.test for flag in stage_2.confirmed] == ["bias"]
    assert not law_confirmation({"topp95": result(bias=0.006)}, tested, num_samples=100).confirmed


def test_a_law_flag_decides_like_any_other_and_the_first_to_stand_is_enough() -> None:
    evidence = adjusted_law_evidence({"topp95": result(bias=1e-9)})
    waiting = law_finding(Arm.ON, evidence)
    assert decide(run_facts(), [*findings(), waiting]).word is Word.INCONCLUSIVE
    stands = law_confirmation({"topp95": result(bias=1e-12)}, [Place("topp95", test="bias")], num_samples=100)
    verdict = decide(run_facts(diagnosis=("look there",)), [*findings(), law_finding(Arm.ON, evidence, stands)])
    assert (verdict.word, verdict.headline) == (
        Word.DIFFERENT,
        "speculative decoding changes what is sampled: look there",
    )
    assert verdict.diagnosis == ("look there",)
    assert "look there" not in verdict.reasons  # said once
    cleared = law_confirmation({"topp95": result(bias=0.5)}, [Place("topp95", test="bias")], num_samples=100)
    assert decide(run_facts(), [*findings(), law_finding(Arm.ON, evidence, cleared)]).word is Word.EQUIVALENT


def test_a_diagnosis_is_told_only_where_a_difference_stands() -> None:
    assert decide(run_facts(diagnosis=("look there",)), findings()).diagnosis == ()


def test_an_off_arm_that_fails_its_law_makes_the_run_invalid_once_confirmed() -> None:
    evidence = adjusted_law_evidence({"topp95": result(rank=1e-9)})
    stands = law_confirmation({"topp95": result(rank=1e-12)}, [Place("topp95", test="rank")], num_samples=100)
    failed = decide(run_facts(), [*findings(), law_finding(Arm.OFF, evidence, stands)])
    assert failed.word is Word.INVALID
    assert "plain decoding does not follow the law" in failed.headline
    assert [control.name for control in failed.controls] == ["A/A", "planted fault", "reference law"]
    waiting = decide(run_facts(), [*findings(), law_finding(Arm.OFF, evidence)])
    assert (waiting.word, waiting.controls[2].passed) == (Word.INCONCLUSIVE, None)


def test_flags_that_hold_whenever_one_looks_need_no_fresh_seeds() -> None:
    at_once = replace(law_finding(Arm.ON, adjusted_law_evidence({"topp95": result(bias=1e-9)})), at_once=True)
    verdict = decide(run_facts(), [*findings(), at_once])
    assert verdict.word is Word.DIFFERENT
    assert verdict.standings[-1] is Standing.CONFIRMED


def interval(low: float, estimate: float, high: float, *, test: str = "bias", margin: float = 0.01) -> Interval:
    return Interval(
        place=Place("topp95", test=test), estimate=estimate, low=low, high=high, margin=margin, num_seeds=100
    )


def test_an_interval_must_lie_inside_its_margin() -> None:
    inside, crossing = interval(-0.002, 0.001, 0.004), interval(-0.006, 0.004, 0.014)
    equivalent = decide(run_facts(), findings(), [inside])
    assert equivalent.word is Word.EQUIVALENT
    assert "topp95 / bias +0.0010 (95 % CI -0.0020 to 0.0040), inside its margin of 0.01" in equivalent.reasons
    verdict = decide(run_facts(), findings(), [inside, crossing])
    assert (verdict.word, verdict.exit_code) == (Word.INCONCLUSIVE, 3)
    # Half of the width .010 must fit into .006: (10 / 6)^2 times the seeds.
    assert crossing.seeds_needed == 278
    assert "about 278 seeds would settle it, 100 were drawn" in verdict.headline
    assert interval(-0.006, 0.012, 0.03).seeds_needed == 900  # 0 is still possible: .03 must shrink to .01
    outside = interval(0.011, 0.013, 0.015)
    assert outside.seeds_needed is None
    assert "which lies outside its margin" in decide(run_facts(), findings(), [outside]).headline
    assert "no number of seeds settles this" in decide(run_facts(), findings(), [outside]).next_steps[0]


def test_a_distance_is_judged_from_its_lower_end() -> None:
    assert interval(0.0, 0.015, 0.04, test="rank", margin=0.02).seeds_needed == 400
    assert interval(0.025, 0.03, 0.04, test="rank", margin=0.02).seeds_needed is None


def test_margins_come_from_the_evidence_that_bears_them() -> None:
    evidence = adjusted_law_evidence({"topp95": result(bias=0.5, rank=0.5)})
    [only] = margin_intervals(evidence, 256)
    assert (only.place, only.margin, only.num_seeds) == (Place("topp95", test="bias"), 0.01, 256)


def test_what_could_not_be_measured_is_inconclusive() -> None:
    verdict = decide(run_facts(unsettled=("topp95: bias needs 100 tokens",)), findings())
    assert verdict.word is Word.INCONCLUSIVE
    assert "bias needs 100 tokens" in verdict.headline


def joint(shift: float, seed: int):
    """Two arms of 200 samples of 3 tokens; the on arm takes token 0 more often by `shift`."""
    rng = np.random.default_rng(seed)
    off, on = ((rng.random((200, 3)) > 0.4 + extra).astype(np.int64) for extra in (0.0, shift))
    return joint_family([off], [on], num_permutations=1_999, rng=rng)


def test_joint_flags_are_adjusted_confirmed_and_judged() -> None:
    found = joint_finding(Comparison.OFF_ON, {"topp95": joint(0.3, 1)})
    assert {flag.place.test for flag in found.flagged} >= {"mode", "tree_g"}
    assert found.role is Role.TEST
    places = [flag.place for flag in found.flagged]
    stands = joint_confirmation({"topp95": joint(0.3, 2)}, places)
    assert stands.num_samples == 200
    confirmed = joint_finding(Comparison.OFF_ON, {"topp95": joint(0.3, 1)}, stands)
    assert decide(run_facts(config_facts()), [*findings(), confirmed]).word is Word.DIFFERENT
    assert not joint_confirmation({"topp95": joint(0.0, 3)}, places).confirmed


def test_equal_arms_flag_nothing_in_the_joint_family() -> None:
    results = {"topp95": joint(0.0, 4), "topk50": joint(0.0, 5)}
    assert joint_finding(Comparison.ON_ON_NULL, results).flagged == ()
    lines = adjusted_joint_evidence(Comparison.ON_ON_NULL, results)
    assert len(lines) == 8
    assert all(one.adjusted_p is not None and one.adjusted_p >= one.p_value for one in lines)
