"""One sentence for one fault: the pattern of the evidence names the stage that is wrong."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from equivtest.errors import InvalidSetting
from equivtest.records import Evidence
from equivtest.stats.joint import joint_family
from equivtest.stats.law import law_family
from equivtest.stats.scored import ScoredTokens
from equivtest.verdict import diagnosis
from tests.stats.law_sampler import Fault, even_world, make_world, simulate
from tests.stats.sequences import plain, prefix_laws, speculative


def diagnose(*evidence: object, **options: object) -> tuple[str, ...]:
    return tuple(one.sentence for one in diagnosis.diagnose(*evidence, **options))  # type: ignore[arg-type]


def stages(*evidence: object) -> list[str]:
    return [one.stage for one in diagnosis.diagnose(*evidence)]  # type: ignore[arg-type]


NUM_RUNS = 20
"""Runs of 7,680 tokens for each fault."""

SIZES = {"samples_per_group": 160, "num_positions": 24, "max_draft": 2}


def lines(tokens: ScoredTokens) -> list[Evidence]:
    result = law_family(tokens, "on / test")
    return [
        dataclasses.replace(line, adjusted_p=float(adjusted))
        for line, adjusted in zip(result.evidence, result.adjusted, strict=True)
    ]


def runs(fault: Fault, *, even: bool = False, seed: int = 61, **options: object) -> list[list[Evidence]]:
    world = even_world(11) if even else make_world(11)
    simulation = simulate(world, NUM_RUNS, fault=fault, seed=seed, **(SIZES | options))  # type: ignore[arg-type]
    return [lines(simulation.replication(index)) for index in range(NUM_RUNS)]


BONUS = "rows after a full acceptance draw from a different law"
COINS = "coins are shared between a recovery and the next acceptance"
FILTERS = "look at where filters are applied on draft and bonus and plain rows"
CASES = {
    "inflated": (Fault(epsilon=0.08), {}, "acceptance is inflated by 0."),
    "inflated, even": (Fault(epsilon=0.08), {"even": True}, "acceptance is inflated by 0."),
    "much inflated": (
        Fault(epsilon=0.4),
        {},
        "in slots 0-1; bonus and plain tokens follow the law: look at the accept",
    ),
    "inflated, sampled drafts": (Fault(epsilon=0.2), {"sampled_draft": True}, "look at the acceptance test"),
    "deflated": (Fault(epsilon=-0.08), {}, "acceptance is deflated by 0."),
    "one slot": (Fault(epsilon=0.2, only_slot=1), {}, "in slot 1 alone"),
    "bonus from the wrong row": (Fault(bonus_from_wrong_row=True), {}, BONUS),
    "reused coin": (Fault(reused_coin=True), {}, COINS),
    "reused coin, even": (Fault(reused_coin=True), {"even": True}, COINS),
    "shared rows": (Fault(shared_rows=True), {}, "rows of a batch draw together"),
    "colliding seeds": (Fault(colliding_seeds=True), {}, "samples repeat ("),
    "unfiltered": (Fault(unfiltered=True), {}, FILTERS),
    "draft rows too hot": (Fault(draft_temperature=1.3), {}, "rows with a draft are too hot"),
    "draft rows too cold": (Fault(draft_temperature=0.75), {}, "rows with a draft are too cold"),
    "too hot everywhere": (Fault(temperature=1.4), {}, "all kinds of rows are too hot"),
    "too cold everywhere": (Fault(temperature=0.7), {}, "all kinds of rows are too cold"),
    "residual keeps the draft": (Fault(keeps_draft=True), {}, "recovered tokens include their own rejected draft"),
    "residual keeps a sampled draft": (
        *(Fault(keeps_draft=True), {"sampled_draft": True}),
        "recovered tokens include their own rejected draft",
    ),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_fault_gets_its_sentence_and_no_other(case: str) -> None:
    """Exactly the right sentence in at least 18 of 20 runs of each fault. Over five more seeds it was so in 1,791 of
    1,800 runs, in 96 of 100 for inflated sampled drafts and in at least 99 of 100 for each other fault."""
    fault, options, words = CASES[case]
    told = [diagnose(evidence) for evidence in runs(fault, **options)]
    right = sum(len(sentences) == 1 and words in sentences[0] for sentences in told)
    assert right >= 18, (right, told)


@pytest.mark.parametrize("sampled_draft", [False, True], ids=["greedy draft", "sampled draft"])
def test_a_correct_decoder_gets_no_sentence(sampled_draft: bool) -> None:
    """Each run is flagged with probability at most .01: two or more of 20 once in 57 draws; 4 of 200 over five more
    seeds. The seed is fixed."""
    told = [diagnose(evidence) for evidence in runs(Fault(), sampled_draft=sampled_draft)]
    assert sum(bool(sentences) for sentences in told) <= 1


def test_two_faults_get_two_sentences() -> None:
    """In at least 18 of 20 runs."""
    told = [diagnose(e) for e in runs(Fault(epsilon=0.1, bonus_from_wrong_row=True))]
    right = sum(len(t) == 2 and "acceptance is inflated" in t[0] and BONUS in t[1] for t in told)
    assert right >= 18, told


def test_an_off_arm_that_fails_makes_the_rest_unreadable() -> None:
    """The law of a plain arm is too hot for it: in at least 18 of 20 runs that is all that is said."""
    on, off = runs(Fault(temperature=1.4)), runs(Fault(temperature=1.4), speculative=False)
    told = [diagnose(*pair) for pair in zip(on, off, strict=True)]
    assert sum(len(t) == 1 and "the reference law is not the decoder's law" in t[0] for t in told) >= 18
    right = runs(Fault(), speculative=False)
    assert sum("the acceptance test" in diagnose(runs(Fault(epsilon=0.08))[i], right[i])[0] for i in range(3)) == 3
    copies = runs(Fault(colliding_seeds=True), speculative=False)
    assert all(diagnose(right[0], off)[0].startswith("in arm off already, samples repeat") for off in copies)


def test_without_a_law_the_joint_family_says_what_it_can() -> None:
    """Acceptance of argmax drafts off by .35 up and down, 64 samples a stratum: in at least 9 of 10 runs, each."""
    rng = np.random.default_rng(62)
    for epsilon, words in ((0.35, "takes the likeliest next token too often"), (-0.35, "too seldom"), (0.0, "")):
        right = 0
        for _ in range(10):
            laws = [prefix_laws(6, rng, vocab=6) for _ in range(2)]
            arms = [plain(law, 64, rng) for law in laws], [speculative(law, 64, rng, epsilon=epsilon) for law in laws]
            told = diagnose((), joint=joint_family(*arms, num_permutations=999, rng=rng).evidence("off vs on"))
            right += len(told) == 1 and words in told[0] if words else not told
        assert right >= 9, (epsilon, right)


def line(name: str, statistic: float, p_value: float, **fields: float) -> Evidence:
    return Evidence(
        family="law",
        name=name,
        stratum="on",
        statistic=statistic,
        p_value=p_value,
        num_tokens=1_000,
        method="",
        **fields,
    )


def test_the_numbers_are_those_of_the_evidence() -> None:
    told = diagnose(
        [
            line("bias", 10.0, 0.0, adjusted_p=0.0, estimate=-0.021, ci_low=-0.025, ci_high=-0.017),
            line("surprisal_bonus", 0.3, 0.8, adjusted_p=1.0, estimate=0.0, ci_low=-0.1, ci_high=0.1),
        ]
    )
    assert told == (
        "acceptance is deflated by 0.021 (95 % CI 0.017 to 0.025) in the draft slots together; bonus tokens follow the "
        "law: look at the acceptance test",
    )


def test_reported_log_probabilities_are_told_apart_from_a_wrong_law() -> None:
    reported = line("logprobs", 900.0, 0.0, estimate=0.31)
    hot = line("surprisal_draft", 12.0, 0.0, estimate=0.4, ci_low=0.3, ci_high=0.5)
    assert stages([reported, line("rank", 19.0, 0.4)]) == ["report"]
    assert diagnose([reported, line("rank", 19.0, 0.4)])[0] == (
        "reported log-probabilities are not those of the law (median difference 0.31 nat): look at where logprobs are "
        "gathered"
    )
    assert stages([reported, hot]) == ["verify"], "they are those of the wrong row"
    inflated = line("bias", 12.0, 0.0, estimate=0.1, ci_low=0.09, ci_high=0.11)
    assert stages([reported, inflated]) == ["accept", "report"]
    assert diagnose([], [reported])[0].startswith("arm off reports log-probabilities that are not those of the law")
    assert diagnose([dataclasses.replace(reported, p_value=1.0)]) == ()


def test_an_end_that_the_law_does_not_have_is_told_apart_from_missing_filters() -> None:
    def support(split: str) -> Evidence:
        return dataclasses.replace(line("support", 5.0, 0.0, estimate=0.005), method=f"tokens with p(y) = 0 ({split})")

    assert stages([support("5 ended")]) == ["commit"]
    assert "texts end where their law goes on (5 of them)" in diagnose([support("5 ended")])[0]
    assert stages([support("3 bonus, 2 ended")]) == ["commit", "verify"]
    assert stages([support("3 bonus")]) == ["verify"]


def test_what_no_fault_explains_is_listed_and_nothing_is_made_up() -> None:
    told = diagnose([line("rank", 80.0, 1e-9, estimate=0.03, ci_low=0.02, ci_high=0.04), line("vocab", 19.0, 0.4)])
    assert told == ("no known fault looks like this; what failed (statistic): rank (80)",)
    vocab = [line("rank", 19.0, 0.4), line("vocab", 80.0, 1e-9, estimate=0.03, ci_low=0.02, ci_high=0.04)]
    assert "inverts the distribution function" in diagnose(vocab)[0]
    assert diagnose([]) == ()
    with pytest.raises(InvalidSetting, match="each test once"):
        diagnose([line("rank", 1.0, 0.5)] * 2)


def test_collisions_and_whole_samples_are_said_by_their_sign() -> None:
    lost = diagnose((), joint=[line("collisions", 5.0, 1e-4, estimate=0.2)])
    gained = diagnose((), joint=[line("collisions", -5.0, 1e-4, estimate=-0.2)])
    assert "has lost entropy" in lost[0]
    assert "has gained entropy" in gained[0]
    assert "without a direction" in diagnose((), joint=[line("tree_g", 5.0, 1e-4)])[0]
    clean = [line("rank", 19.0, 0.4)]
    assert diagnose(clean, joint=[line("mode", 5.0, 1e-4, estimate=0.01)])[0].startswith(
        "every token of arm on follows"
    )


LOGPROBS_RIGHT = line("logprobs", 0.0, 1.0, estimate=0.0)
LOGPROBS_WRONG = line("logprobs", 900.0, 0.0, estimate=0.3)
HOT = line("surprisal_draft", 12.0, 0.0, estimate=0.4, ci_low=0.3, ci_high=0.5)
MILD = line("surprisal_draft", 0.5, 0.6, estimate=0.0, ci_low=-0.1, ci_high=0.1)
BIASED = line("bias", -9.0, 0.0, estimate=-0.1, ci_low=-0.12, ci_high=-0.08)
CHANGED = dataclasses.replace(line("replay", 20.0, 0.0, estimate=0.8), family="identity")
OFF_LAW = dataclasses.replace(line("drafts", 300.0, 0.0, estimate=0.3), family="identity")


def test_tokens_of_unknown_origin_outside_the_law_name_every_stage_that_may_have_put_them_out() -> None:
    """As engines that tell only their tokens leave them."""
    (said,) = diagnose([off_support("7 unknown")])
    assert "tokens of probability 0 are put out (7 of them): look at the acceptance test" in said


def off_support(split: str, p_value: float = 0.0) -> Evidence:
    return dataclasses.replace(line("support", 5.0, p_value, estimate=0.005), method=f"tokens with p(y) = 0 ({split})")


def another(name: str, rows: str = "draft", *, gain: float = 500.0, fit: float = 0.4) -> Evidence:
    made = line(name, gain, fit, estimate=gain / 1_000)
    return dataclasses.replace(made, family="alternative", stratum=rows)


def first(*evidence: Evidence, **more: object) -> str:
    return diagnosis.diagnose(evidence, **more)[0].stage  # type: ignore[arg-type]


def test_drafts_that_are_not_of_their_law_come_first() -> None:
    told = diagnosis.diagnose([BIASED, MILD], identity=[OFF_LAW])
    assert [one.stage for one in told] == ["propose", "accept"]
    assert told[0].sentence.startswith("30.0% of the sampled drafts")
    assert first(BIASED, MILD, identity=[dataclasses.replace(OFF_LAW, p_value=0.5)]) == "accept"


def test_another_law_that_fits_names_its_stage_and_explains_everything() -> None:
    for name, stage in (("no_top_p", "verify"), ("no_penalties", "process"), ("stale_history", "process")):
        told = diagnosis.diagnose(
            [HOT, BIASED, LOGPROBS_WRONG], alternatives=[another(name), another("raw", gain=100.0)]
        )
        assert [one.stage for one in told] == [stage]
    for useless in (another("no_penalties", fit=1e-9), another("no_penalties", gain=3.0)):
        assert first(HOT, LOGPROBS_WRONG, alternatives=[useless]) == "verify"
    bonus = [another("no_penalties", "bonus"), another("the law", "draft", gain=0.0)]
    assert first(HOT, LOGPROBS_WRONG, alternatives=bonus) == "verify", "rows with a draft are left unexplained"


def test_a_decoder_that_reports_its_law_right_draws_from_it_wrongly() -> None:
    alternatives = [another("the law", gain=0.0), another("no_penalties")]
    support = off_support("40 recovered")
    assert first(MILD, support, LOGPROBS_RIGHT, alternatives=alternatives) == "accept"
    assert first(MILD, support, LOGPROBS_WRONG, alternatives=alternatives) == "process"


def test_rows_that_no_law_explains_are_read_wrongly() -> None:
    none_fits = [another("the law", gain=0.0, fit=0.0), another("raw", gain=900.0, fit=0.0)]
    support = off_support("400 recovered, 30 bonus")
    assert first(HOT, BIASED, support, LOGPROBS_WRONG, alternatives=none_fits) == "forward"
    assert first(MILD, support, LOGPROBS_WRONG, alternatives=none_fits, identity=[CHANGED]) == "verify"
    assert first(HOT, BIASED, support, LOGPROBS_WRONG) == "verify", "nothing else was tried"


def test_a_rejected_draft_that_comes_out_is_told_apart_by_who_counts() -> None:
    rejected = line("residual", 30.0, 0.0, estimate=0.01)
    both = off_support("900 recovered, 300 bonus")
    assert first(rejected, MILD, BIASED, off_support("900 recovered"), LOGPROBS_RIGHT) == "accept"
    assert first(rejected, MILD, BIASED, both, LOGPROBS_RIGHT) == "accept"
    assert first(rejected, MILD, both, LOGPROBS_RIGHT) == "streams"
    assert first(rejected, MILD, BIASED, both, LOGPROBS_RIGHT, identity=[CHANGED]) == "commit"


def test_one_coin_for_all_slots_spares_the_first() -> None:
    def slots(*z: float) -> list[Evidence]:
        return [
            line(f"bias_slot_{j}", s, 1e-9 if abs(s) > 5 else 0.5, estimate=s / 100, ci_low=s / 200, ci_high=s / 50)
            for j, s in enumerate(z)
        ]

    assert first(*slots(0.3, 13.0, 15.0), MILD, LOGPROBS_RIGHT) == "streams"
    assert first(*slots(12.0, 13.0, 15.0), MILD, LOGPROBS_RIGHT) == "accept"
    assert first(*slots(0.3, -13.0, -15.0), MILD, LOGPROBS_RIGHT) != "streams"


def test_tokens_after_the_end_of_a_text_are_told_apart_from_missing_filters() -> None:
    assert first(MILD, off_support("20 accepted, 5 bonus; 25 where the law is certain")) == "commit"
    assert first(MILD, off_support("20 recovered, 5 bonus; 3 where the law is certain")) == "verify"
    assert first(off_support("25 recovered; 25 where the law is certain")) == "verify", "greedy laws are all certain"


def test_repeats_speak_where_the_law_holds() -> None:
    greedy = dataclasses.replace(line("greedy", 4.0, 0.0, estimate=1.0), family="identity")
    assert stages_of(diagnosis.diagnose([MILD], identity=[CHANGED])) == ["streams"]
    assert stages_of(diagnosis.diagnose([MILD], identity=[greedy])) == ["verify"]
    assert diagnosis.diagnose([MILD], identity=[dataclasses.replace(CHANGED, p_value=0.4)]) == ()


def stages_of(told: tuple[diagnosis.Diagnosis, ...]) -> list[str]:
    return [one.stage for one in told]


def test_texts_that_repeat_under_a_wrong_law_are_not_blamed_on_seeds() -> None:
    repeated = dataclasses.replace(
        line("duplicates", 400.0, 0.0, estimate=390.0),
        method="pairs of equal samples among the 500 of 512 whose text is rare",
    )
    assert first(repeated, MILD, LOGPROBS_RIGHT) == "streams"
    assert first(repeated, HOT, LOGPROBS_WRONG, alternatives=[another("greedy")]) == "verify"
