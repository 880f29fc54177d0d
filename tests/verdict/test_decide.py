import json

import pytest

from equivtest.errors import InvalidSetting, ResolutionTooCoarse
from equivtest.records import EXIT_CODES, Arm, Comparison, Word
from equivtest.verdict.decide import decide
from equivtest.verdict.facts import ROLES, Role
from equivtest.verdict.verdict import Standing
from tests.verdict.runs import config_facts, confirmation, finding, findings, flags, plain_facts, run_facts

THREE = flags(3)


def said(verdict) -> str:
    return "\n".join((verdict.headline, *verdict.reasons))


def test_a_healthy_run_is_equivalent_and_says_what_that_means():
    verdict = decide(run_facts(), findings())
    assert (verdict.word, verdict.exit_code) == (Word.EQUIVALENT, 0)
    assert verdict.headline == (
        "no difference found between plain and speculative decoding in 256 cells (topp95); "
        "a planted acceptance bias of 0.10 was detected (72 of 256 cells)"
    )
    assert verdict.gate_of_record.line == ("pass, zero rejections of off vs on wanted at 0.05, 0 of 256 cells rejected")
    assert [control.line for control in verdict.controls] == [
        "passed, 0 of 256 rejected, on vs on_null",
        "acceptance bias of 0.10 detected, 72 of 256 rejected, off vs biased",
    ]
    assert verdict.reasons == (
        "topp95: 54,000 of 90,000 judged drafts accepted (60%)",
        "largest total variation distance: 0.28 at topp95 / story / position 7 (0.22 is usual by chance)",
    )


def test_a_confirmed_flag_is_different_and_says_where_and_how_sure():
    verdict = decide(run_facts(), findings(THREE, stage_2=confirmation(THREE, flags(2, p_value=2e-9))))
    assert (verdict.word, verdict.exit_code) == (Word.DIFFERENT, 1)
    assert verdict.headline == (
        "speculative decoding changes what is sampled: 2 of 256 cells differed, off vs on, again on 1,024 fresh "
        "samples an arm (smallest adjusted p 2.0e-09); most at topp95 / code / position 0, total variation "
        "distance 0.31 where 0.17 is usual; in topp95 / code (2)"
    )
    assert "--acceptance" in verdict.next_steps[0]
    assert (verdict.gate_of_record.passed, verdict.gate_of_record.num_rejected) == (False, 3)


def test_a_flag_cleared_on_fresh_seeds_is_equivalent_and_reported():
    verdict = decide(run_facts(), findings(THREE, stage_2=confirmation(THREE)))
    assert verdict.word is Word.EQUIVALENT
    assert "no difference stood on fresh seeds" in verdict.headline
    assert "3 of 256 cells differed, off vs on, on first look and did not on 1,024 fresh samples" in said(verdict)
    assert verdict.standings[0] is Standing.CLEARED
    # The gate of record keeps its literal reading.
    assert verdict.gate_of_record.passed is False
    assert "wanted at 0.05, 3 of 256 cells rejected" in verdict.gate_of_record.line


def test_a_flag_without_fresh_seeds_is_inconclusive():
    verdict = decide(run_facts(), findings(THREE))
    assert (verdict.word, verdict.exit_code) == (Word.INCONCLUSIVE, 3)
    assert "not decided: 3 of 256 cells differed" in verdict.headline
    assert "--resume" in verdict.next_steps[0]


def test_a_flag_left_out_of_the_confirmation_is_still_open():
    verdict = decide(run_facts(), findings(THREE, stage_2=confirmation(THREE[:2])))
    assert verdict.word is Word.INCONCLUSIVE


def test_without_confirmation_a_flag_counts_at_once():
    verdict = decide(run_facts(confirm=False), findings(THREE))
    assert verdict.word is Word.DIFFERENT
    assert "3 of 256 cells differed, off vs on, on the first look, without confirmation" in verdict.headline
    assert decide(run_facts(confirm=False), findings()).word is Word.EQUIVALENT


def test_missing_rows_are_invalid():
    rows = {**config_facts().rows_expected, Arm.ON: 60_000}
    verdict = decide(run_facts(config_facts(rows_found=rows)), findings())
    assert (verdict.word, verdict.exit_code) == (Word.INVALID, 4)
    assert verdict.headline == ("this run cannot be judged: 5,536 of 65,536 rows are missing in config topp95, arm on")
    assert "equivtest run --resume" in verdict.next_steps[0]


def test_an_arm_without_any_row_is_invalid():
    rows = {arm: count for arm, count in config_facts().rows_expected.items() if arm is not Arm.BIASED}
    verdict = decide(run_facts(config_facts(rows_found=rows)), findings())
    assert "65,536 of 65,536 rows are missing in config topp95, arm biased" in verdict.headline


def test_rows_that_nobody_asked_for_are_invalid():
    rows = {**config_facts().rows_expected, Arm.OFF: 70_000}
    verdict = decide(run_facts(config_facts(rows_found=rows)), findings())
    assert verdict.word is Word.INVALID
    assert "70,000 rows in config topp95, arm off, where the protocol asks for 65,536" in verdict.headline


def test_a_failed_a_a_control_is_invalid_once_confirmed():
    verdict = decide(run_facts(), findings(on_on_null=THREE, null_stage_2=confirmation(THREE, flags(1))))
    assert verdict.word is Word.INVALID
    assert "the A/A control failed: 1 of 256 cells differed, on vs on_null, again on" in verdict.headline
    assert verdict.controls[0].passed is False
    assert decide(run_facts(confirm=False), findings(on_on_null=THREE)).word is Word.INVALID


def test_the_hint_of_a_failed_a_a_control_goes_by_what_else_stood():
    """A speculative arm may be so broken that it does not agree with itself; its seeds are not the first suspects."""

    def hint(off_on, **changes):
        verdict = decide(run_facts(confirm=False, **changes), findings(off_on, on_on_null=THREE))
        assert verdict.word is Word.INVALID
        return verdict.next_steps[0]

    assert "look for seeds that collide" in hint(())
    assert "the on arm agrees neither with plain decoding nor with itself" in hint(THREE)
    assert "record them in one go" in hint(THREE, from_files=True)


def test_a_difference_between_files_names_no_option_of_a_run():
    run = run_facts(confirm=False, from_files=True)
    assert decide(run, findings(THREE)).next_steps == (
        "record both arms again with fresh seeds: what is no chance is found again",
    )


def test_a_flagged_a_a_control_is_open_until_confirmed_and_harmless_once_cleared():
    pending = decide(run_facts(), findings(on_on_null=THREE))
    assert pending.word is Word.INCONCLUSIVE
    assert pending.controls[0].passed is None
    assert "undecided until tested on fresh seeds" in pending.controls[0].line
    cleared = decide(run_facts(), findings(on_on_null=THREE, null_stage_2=confirmation(THREE)))
    assert cleared.word is Word.EQUIVALENT
    assert cleared.controls[0].line == ("passed, 3 of 256 rejected, on vs on_null, none standing on fresh seeds")


def test_a_missed_planted_fault_is_invalid():
    verdict = decide(run_facts(), findings(off_biased=()))
    assert verdict.word is Word.INVALID
    assert verdict.headline == (
        "this run cannot be judged: the planted acceptance bias of 0.10 was missed in config topp95 (0 of 256 cells)"
    )
    assert verdict.controls[1].passed is False


def test_the_planted_fault_must_show_in_every_config_that_speculated():
    both = run_facts(config_facts("topp95"), config_facts("topk50"))
    missed = decide(both, findings(configs=("topp95", "topk50"), off_biased=flags(40, "topp95")))
    assert missed.word is Word.INVALID
    assert "missed in config topk50 (0 of 256 cells)" in missed.headline
    seen = decide(both, findings(configs=("topp95", "topk50")))
    assert seen.word is Word.EQUIVALENT
    assert "in 512 cells (topp95, topk50)" in seen.headline


def test_a_config_routed_plain_needs_no_teeth_and_is_reported():
    verdict = decide(
        run_facts(config_facts(), plain_facts()), findings(configs=("topp95", "minp05"), off_biased=flags(40))
    )
    assert verdict.word is Word.EQUIVALENT
    assert "(topp95)" in verdict.headline
    assert "minp05: routed plain (min_p is not supported: 2,048); speculation was not tested there" in verdict.reasons


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (plain_facts(), "minp05: routed plain (min_p is not supported: 2,048)"),
        (config_facts(num_drafted=0, num_accepted=0), "topp95: the drafter offered nothing"),
    ],
)
def test_a_run_that_never_speculated_is_inconclusive_never_a_pass(facts, why):
    verdict = decide(run_facts(facts), findings(configs=(facts.config,), off_biased=()))
    assert (verdict.word, verdict.exit_code) == (Word.INCONCLUSIVE, 3)
    assert f"nothing was tested, because no draft token was ever offered ({why})" in verdict.headline


def test_a_difference_in_a_run_that_never_speculated_is_still_a_difference():
    verdict = decide(run_facts(plain_facts()), findings(THREE, stage_2=confirmation(THREE, THREE), off_biased=()))
    assert verdict.word is Word.DIFFERENT


def test_drafts_that_are_always_accepted_give_a_bias_nothing_to_act_on():
    all_kept = config_facts(num_accepted=90_000)
    alone = decide(run_facts(all_kept), findings(off_biased=()))
    assert alone.word is Word.INCONCLUSIVE
    assert "the planted acceptance bias of 0.10 had nothing to act on" in alone.headline
    assert alone.controls[1].passed is None
    beside = decide(
        run_facts(config_facts(), config_facts("topk50", num_accepted=90_000)),
        findings(configs=("topp95", "topk50"), off_biased=flags(40)),
    )
    assert beside.word is Word.EQUIVALENT
    assert "topk50: a planted acceptance bias has nothing to act on" in said(beside)


def test_greedy_needs_no_teeth_and_is_reported():
    greedy = config_facts("greedy", greedy=True)
    verdict = decide(run_facts(config_facts(), greedy), findings(configs=("topp95", "greedy"), off_biased=flags(40)))
    assert verdict.word is Word.EQUIVALENT
    assert "greedy: greedy decoding, which tests that the text is identical rather than a law" in verdict.reasons
    alone = decide(run_facts(greedy), findings(configs=("greedy",), off_biased=()))
    assert alone.word is Word.INCONCLUSIVE


def test_samples_that_went_plain_within_a_config_are_counted():
    mixed = config_facts(num_spec_samples=2_036, plain_reasons={"seeded": 12})
    assert "topp95: 12 of 2,048 samples went plain (seeded: 12)" in decide(run_facts(mixed), findings()).reasons


def test_a_refusal_of_the_statistics_is_invalid():
    refusal = str(ResolutionTooCoarse(99, 256, 0.05))
    verdict = decide(run_facts(refusals=(refusal,)), [])
    assert verdict.word is Word.INVALID
    assert verdict.headline == f"this run cannot be judged: the statistics refused: {refusal}"
    assert verdict.gate_of_record.passed is None


@pytest.mark.parametrize("comparison", Comparison)
def test_a_planned_comparison_that_was_not_made_is_invalid(comparison):
    made = [f for f in findings() if f.role is not ROLES[comparison]]
    verdict = decide(run_facts(), made)
    assert verdict.word is Word.INVALID
    assert f"{comparison.words} was not analysed" in verdict.headline


def test_two_files_without_controls_can_differ_but_never_pass():
    compared = run_facts(comparisons=(Comparison.OFF_ON,), confirm=False, configs=())
    silent = decide(compared, findings()[:1])
    assert silent.word is Word.INCONCLUSIVE
    assert "no A/A control was run" in silent.headline
    assert "(and 1 more reason)" in silent.headline
    assert decide(compared, findings(THREE)[:1]).word is Word.DIFFERENT


CONFIRMED = confirmation(THREE, THREE)
INVALID_CAUSES = {"rows": {}, "a_a": {"on_on_null": THREE, "null_stage_2": CONFIRMED}, "teeth": {"off_biased": ()}}


@pytest.mark.parametrize("cause", INVALID_CAUSES)
def test_invalid_beats_different_beats_inconclusive(cause):
    facts = config_facts(rows_found={}) if cause == "rows" else config_facts()
    verdict = decide(run_facts(facts), findings(THREE, stage_2=CONFIRMED, **INVALID_CAUSES[cause]))
    assert verdict.word is Word.INVALID
    assert "off vs on, again on" in said(verdict)  # the difference is told all the same


def test_different_beats_inconclusive():
    verdict = decide(run_facts(), findings(THREE, stage_2=CONFIRMED, on_on_null=flags(1)))
    assert verdict.word is Word.DIFFERENT
    assert "not yet tested on fresh seeds" in said(verdict)


def test_another_family_takes_part_without_new_rules():
    joint = finding("off_on", flags(1), family="joint", confirmation=confirmation(flags(1), flags(1)))
    verdict = decide(run_facts(), [*findings(), joint])
    assert verdict.word is Word.DIFFERENT
    assert verdict.gate_of_record.passed is True  # the gate of record is the marginal family's alone
    teeth = finding("off_biased", flags(1), family="joint")
    assert decide(run_facts(), [*findings(off_biased=()), teeth]).word is Word.EQUIVALENT


@pytest.mark.parametrize("confirm", [True, False])
@pytest.mark.parametrize(("marginal_p", "first"), [(1e-9, "1 of"), (1e-3, "2 of")])
def test_the_surest_of_several_differences_leads(confirm: bool, marginal_p: float, first: str) -> None:
    """By the p-values that count: on fresh seeds where flags are confirmed, else on the first look."""

    def found(number: int, p_value: float, family: str):
        counts, other = flags(number, p_value=p_value), flags(number, p_value=1e-6)
        stage_2 = confirmation(other, counts) if confirm else None
        return finding("off_on", other if confirm else counts, family=family, confirmation=stage_2)

    difference = [found(1, marginal_p, "marginal"), found(2, 1e-5, "joint")]
    verdict = decide(run_facts(confirm=confirm), [*findings()[1:], *difference])
    assert verdict.reasons[0].startswith(first)
    assert f"sampled: {first}" in verdict.headline


def test_two_findings_of_one_family_and_comparison_are_refused():
    with pytest.raises(InvalidSetting, match="unique"):
        decide(run_facts(), [*findings(), finding("off_on")])


def test_verdict_json_is_complete_stable_and_plain():
    verdict = decide(run_facts(), findings(THREE, stage_2=confirmation(THREE, flags(2))))
    data = verdict.to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert list(data) == [
        "verdict", "exit_code", "headline", "reasons", "next_steps", "gate_of_record", "controls", "findings",
        "intervals", "diagnosis", "thresholds",
    ]  # fmt: skip
    assert (data["verdict"], data["exit_code"]) == ("different", 1)
    assert data["thresholds"] == {
        "marginal_level": 0.05,
        "confirmation_alpha": 0.01,
        "teeth_level": 0.01,
        "confirm": True,
        "planted_fault": "acceptance bias of 0.10",
    }
    first = data["findings"][0]
    assert (first["role"], first["subject"], first["standing"]) == ("test", "off vs on", "confirmed")
    assert first["num_flagged"] == {"topp95": 3}
    assert first["flagged"][0] == {
        "config": "topp95", "prompt_id": "code", "position": 0,
        "p_value": 1e-4, "effect": 0.31, "effect_by_chance": 0.17,
        "words": "total variation distance 0.31 where 0.17 is usual",
    }  # fmt: skip
    assert len(first["confirmation"]["confirmed"]) == 2
    assert json.dumps(data) == json.dumps(decide(run_facts(), verdict.findings).to_dict())


def test_only_equivalent_exits_zero():
    assert [EXIT_CODES[word] for word in Word] == [0, 1, 3, 4]


def test_many_flagged_strata_are_named_and_counted():
    spread = sum((flags(n, prompt_id=name) for n, name in ((1, "chat"), (4, "code"), (2, "list"), (3, "story"))), ())
    verdict = decide(run_facts(confirm=False), findings(spread))
    assert verdict.headline.endswith("in topp95 / code (4), topp95 / story (3), topp95 / list (2) and 1 more")


def test_one_flag_near_the_level_is_no_teeth():
    """Under a missed fault one flag at q = 0.05 comes by chance in up to 5 % of runs."""
    chance = decide(run_facts(), findings(off_biased=flags(1, p_value=0.03)))
    assert chance.word is Word.INVALID
    assert "missed" in chance.headline
    seen = decide(run_facts(), findings(off_biased=flags(1, p_value=0.009)))
    assert seen.word is Word.EQUIVALENT


def test_the_planted_fault_needs_no_confirmation():
    judged = decide(run_facts(), findings())
    by_role = {f.role: s for f, s in zip(judged.findings, judged.standings, strict=True)}
    assert by_role[Role.TEETH] is Standing.CONFIRMED
    assert by_role[Role.TEST] is Standing.CLEAR


def test_what_a_budget_cannot_show_is_said_with_every_verdict():
    caveat = "a smoke run sees gross faults only"
    for off_on in ((), THREE):
        assert caveat in decide(run_facts(caveats=(caveat,)), findings(off_on)).reasons
