"""The rules: from what was run and what was found to one of four words.

Precedence: invalid > different > inconclusive > equivalent. Every rule that fires leaves a reason; the word is that of
the strongest one, and only a run that no rule objects to is equivalent.
"""

from __future__ import annotations

from collections.abc import Sequence

from equivtest.errors import InvalidSetting
from equivtest.records import Comparison, Word
from equivtest.verdict import words
from equivtest.verdict.facts import ROLES, ConfigFacts, Finding, Interval, Role, RunFacts
from equivtest.verdict.verdict import Control, Gate, Standing, Verdict
from equivtest.verdict.words import Reason

TEETH_LEVEL = 0.01
"""Adjusted p-value at which the planted fault counts as detected: one flag of stage 1 could be chance."""


def decide(run: RunFacts, findings: Sequence[Finding], intervals: Sequence[Interval] = ()) -> Verdict:
    """The verdict on a run.

    findings: at most one a family and subject; a planned comparison without one, like every refusal, makes the run
    invalid. intervals: what must lie inside a margin; none where no law could be reached.
    """
    names = [(finding.family, finding.subject) for finding in findings]
    if len(set(names)) < len(names):
        raise InvalidSetting("findings", [f"{family}/{subject}" for family, subject in names], "must be unique")
    standings = tuple(standing(finding, run.confirm) for finding in findings)
    judged = list(zip(findings, standings, strict=True))
    pending = {role: _standing(judged, role, Standing.PENDING) for role in Role}

    invalid = [*_missing_rows(run), *map(words.refused, run.refusals), *_missing_findings(run, findings)]
    invalid += [words.reference_failed(f, run.confirm) for f in _standing(judged, Role.REFERENCE, Standing.CONFIRMED)]
    confirmed = _standing(judged, Role.TEST, Standing.CONFIRMED)
    confirmed.sort(key=lambda f: min(flag.p_value for flag in f.standing_flags(run.confirm)))
    different = [words.different(f, run) for f in confirmed]
    failed_a_a = _standing(judged, Role.A_A, Standing.CONFIRMED)
    invalid += [words.a_a_failed(f, run, differs=bool(different)) for f in failed_a_a]
    invalid += [words.teeth_missed(config, run, findings) for config in _without_teeth(run, findings)]
    # What has been shown once need not be shown again by the other families.
    open_tests = () if different else pending[Role.TEST]
    inconclusive = [
        *map(words.pending, (*open_tests, *pending[Role.REFERENCE], *pending[Role.A_A])),
        *_nothing_shown(run, findings),
        *map(words.unsettled, run.unsettled),
        *(words.margin_crossed(interval) for interval in intervals if not interval.inside),
    ]
    notes = [
        *run.caveats,
        *(words.also_flagged(f) for f in pending[Role.TEST] if different),
        *(words.cleared(f) for f, state in judged if state is Standing.CLEARED),
        *(line for config in run.configs for line in words.config_notes(config)),
        *(words.inside_margin(interval) for interval in intervals if interval.inside),
        *(line for f in _of(findings, Role.TEST) for line in words.extreme_notes(f)),
    ]
    diagnosis = run.diagnosis if different else ()

    by_word: dict[Word, list[Reason]] = {
        Word.INVALID: invalid,
        Word.DIFFERENT: different,
        Word.INCONCLUSIVE: inconclusive,
    }
    fired = [reason for reasons in by_word.values() for reason in reasons]
    word = next((word for word, reasons in by_word.items() if reasons), Word.EQUIVALENT)
    headline = (
        words.headline(word, by_word[word], diagnosis)
        if word in by_word
        else words.equivalent(run, findings, intervals)
    )
    return Verdict(
        word=word,
        headline=headline,
        reasons=(*(reason.problem for reason in fired), *notes),
        next_steps=tuple(dict.fromkeys(reason.remedy for reason in by_word.get(word, ()) if reason.remedy)),
        gate_of_record=_gate_of_record(findings),
        controls=(_a_a_control(judged), _teeth_control(run, findings), *_reference_controls(judged)),
        findings=tuple(findings),
        standings=standings,
        intervals=tuple(intervals),
        diagnosis=diagnosis,
        thresholds=_thresholds(run, findings),
    )


def standing(finding: Finding, confirm: bool) -> Standing:
    """What became of a finding's flags."""
    if finding.confirmation and finding.confirmation.confirmed:
        return Standing.CONFIRMED  # also where stage 2 looked at what stage 1 had not flagged
    if not finding.flagged:
        return Standing.CLEAR
    # A planted fault is there by construction: a flag on it needs no confirmation.
    if not confirm or finding.at_once or finding.role is Role.TEETH:
        return Standing.CONFIRMED
    if finding.confirmation is None:
        return Standing.PENDING
    untested = {flag.place for flag in finding.flagged} - set(finding.confirmation.tested)
    return Standing.PENDING if untested else Standing.CLEARED


def _standing(judged: Sequence[tuple[Finding, Standing]], role: Role, state: Standing) -> list[Finding]:
    return [finding for finding, its in judged if finding.role is role and its is state]


def _of(findings: Sequence[Finding], role: Role) -> list[Finding]:
    return [finding for finding in findings if finding.role is role]


def _missing_rows(run: RunFacts) -> list[Reason]:
    reasons = []
    for config in run.configs:
        for arm, expected in config.rows_expected.items():
            found = config.rows_found.get(arm, 0)
            if found != expected:
                reasons.append(words.wrong_rows(config.config, arm, found, expected))
    return reasons


def _missing_findings(run: RunFacts, findings: Sequence[Finding]) -> list[Reason]:
    if run.refusals:
        return []  # the refusal says why, once
    return [words.not_analysed(comparison) for comparison in run.comparisons if not _of(findings, ROLES[comparison])]


def _teeth(config: ConfigFacts, findings: Sequence[Finding]) -> int:
    """Flags of any family on the planted fault in one config, at the level of a confirmation."""
    return sum(
        flag.place.config == config.config and flag.p_value <= TEETH_LEVEL
        for finding in _of(findings, Role.TEETH)
        for flag in finding.flagged
    )


def _without_teeth(run: RunFacts, findings: Sequence[Finding]) -> list[ConfigFacts]:
    if not _of(findings, Role.TEETH):
        return []
    return [config for config in run.configs if config.must_show_teeth and not _teeth(config, findings)]


def _nothing_shown(run: RunFacts, findings: Sequence[Finding]) -> list[Reason]:
    """Why silence would prove nothing."""
    if run.configs and not any(config.speculated for config in run.configs):
        return [words.nothing_speculated(run.configs)]
    reasons = [
        words.no_control(comparison)
        for comparison in (Comparison.ON_ON_NULL, Comparison.OFF_BIASED)
        if comparison not in run.comparisons
    ]
    if _of(findings, Role.TEETH) and not _bitten(run, findings) and not _without_teeth(run, findings):
        reasons.append(words.nothing_to_bite(run))
    return reasons


def _bitten(run: RunFacts, findings: Sequence[Finding]) -> list[ConfigFacts]:
    return [config for config in run.configs if config.speculated and _teeth(config, findings)]


def _gate_of_record(findings: Sequence[Finding]) -> Gate:
    gate = next((f for f in _of(findings, Role.TEST) if f.family == "marginal"), None)
    if gate is None:
        return Gate(passed=None, num_rejected=0, num_cells=0, line=words.gate_line(None))
    return Gate(
        passed=not gate.flagged,
        num_rejected=len(gate.flagged),
        num_cells=gate.num_all,
        line=words.gate_line(gate),
    )


def _a_a_control(judged: Sequence[tuple[Finding, Standing]]) -> Control:
    return _control("A/A", Comparison.ON_ON_NULL.words, [j for j in judged if j[0].role is Role.A_A])


def _reference_controls(judged: Sequence[tuple[Finding, Standing]]) -> tuple[Control, ...]:
    """Only where the arm off could be held against a law."""
    reference = [j for j in judged if j[0].role is Role.REFERENCE]
    return (_control("reference law", reference[0][0].subject, reference),) if reference else ()


def _control(name: str, subject: str, judged: Sequence[tuple[Finding, Standing]]) -> Control:
    """A control in which nothing may stand."""
    states = [state for _, state in judged]
    failed, undecided = Standing.CONFIRMED in states, Standing.PENDING in states
    passed = None if not states or (undecided and not failed) else not failed
    num_rejected = sum(len(f.flagged) for f, _ in judged)
    num_tests = sum(f.num_all for f, _ in judged)
    return Control(
        name=name,
        subject=subject,
        passed=passed,
        num_rejected=num_rejected,
        num_tests=num_tests,
        line=words.control_line(passed, num_rejected, num_tests, subject),
    )


def _teeth_control(run: RunFacts, findings: Sequence[Finding]) -> Control:
    planted = _of(findings, Role.TEETH)
    passed = False if _without_teeth(run, findings) else True if _bitten(run, findings) else None
    num_rejected, num_tests = sum(len(f.flagged) for f in planted), sum(f.num_all for f in planted)
    return Control(
        name="planted fault",
        subject=Comparison.OFF_BIASED.words,
        passed=passed,
        num_rejected=num_rejected,
        num_tests=num_tests,
        line=words.teeth_line(passed, num_rejected, num_tests, run.planted_fault),
    )


def _thresholds(run: RunFacts, findings: Sequence[Finding]) -> dict[str, float | bool | str]:
    levels = {f"{finding.family}_level": finding.level for finding in findings}
    alphas = [finding.confirmation.alpha for finding in findings if finding.confirmation]
    stage_2 = {"confirmation_alpha": alphas[0]} if alphas else {}
    return {**levels, **stage_2, "teeth_level": TEETH_LEVEL, "confirm": run.confirm, "planted_fault": run.planted_fault}
