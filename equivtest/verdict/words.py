"""What a verdict says. Every number that a rule looked at is in its sentence; every problem says what to run next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from equivtest.records import Arm, Comparison, Word
from equivtest.verdict.facts import ConfigFacts, Finding, Flag, Interval, Role, RunFacts

_MOST_PLACES = 3
"""Places named in a sentence; the rest are counted."""


class Reason(NamedTuple):
    """A rule that fired."""

    problem: str
    """What is wrong, where, by how much, how sure; fits a headline."""
    remedy: str = ""
    """What to run or look at next; empty where the problem says it."""


def headline(word: Word, reasons: Sequence[Reason], diagnosis: Sequence[str] = ()) -> str:
    """One sentence for a verdict that has reasons; the diagnosis leads where there is one, else the first reason."""
    if word is Word.DIFFERENT and diagnosis:
        more = f" (and {_count(len(diagnosis) - 1, 'more findings')})" if len(diagnosis) > 1 else ""
        return f"speculative decoding changes what is sampled: {diagnosis[0]}{more}"
    opening = {
        Word.INVALID: "this run cannot be judged",
        Word.DIFFERENT: "speculative decoding changes what is sampled",
        Word.INCONCLUSIVE: "not decided",
    }[word]
    more = f" (and {_count(len(reasons) - 1, 'more reasons')})" if len(reasons) > 1 else ""
    return f"{opening}: {reasons[0].problem}{more}"


def equivalent(run: RunFacts, findings: Sequence[Finding], intervals: Sequence[Interval]) -> str:
    """What an equivalent run has shown: no more than its margins, and the planted fault, allow to say."""
    looked = _of(findings, Role.TEST)
    planted = _of(findings, Role.TEETH)
    found = "no difference stood on fresh seeds" if any(f.flagged for f in looked) else "no difference found"
    where = _and(_count(finding.num_all, finding.unit) for finding in looked)
    configs = ", ".join(config.config for config in run.configs if config.speculated)
    seen = _and(f"{len(f.flagged):,} of {_count(f.num_all, f.unit)}" for f in planted)
    biases = [interval for interval in intervals if interval.place.test == "bias"]
    widest = max(biases, key=lambda interval: max(-interval.low, interval.high), default=None)
    bound = "" if widest is None else f"; {_bias(widest)}, inside the margin of {widest.margin:g}"
    return (
        f"{found} between plain and speculative decoding in {where} ({configs}){bound}; "
        f"a planted {run.planted_fault} was detected ({seen})"
    )


def wrong_rows(config: str, arm: Arm, found: int, expected: int) -> Reason:
    if found < expected:
        return Reason(
            f"{expected - found:,} of {expected:,} rows are missing in config {config}, arm {arm}",
            "finish collecting with `equivtest run --resume`",
        )
    return Reason(
        f"{found:,} rows in config {config}, arm {arm}, where the protocol asks for {expected:,}",
        "samples of another run are mixed in; collect into an empty folder",
    )


def refused(message: str) -> Reason:
    return Reason(f"the statistics refused: {message}")


def not_analysed(comparison: Comparison) -> Reason:
    return Reason(f"{comparison.words} was not analysed", "recompute with `equivtest report`")


def a_a_failed(finding: Finding, run: RunFacts, *, differs: bool) -> Reason:
    """differs: arm on differs from arm off as well."""
    if run.from_files:
        remedy = "one half of the on arm's seeds is not of the other's law: record them in one go, under one setting"
    elif differs:
        remedy = (
            "the on arm agrees neither with plain decoding nor with itself, as where draws depend on memory that "
            "nothing has set or on what else was in the batch: look there first, and for seeds that collide after that"
        )
    else:
        remedy = (
            "both arms are one decoder under two sets of seeds: look for seeds that collide or state that requests "
            "share"
        )
    return Reason(f"the A/A control failed: {_stood(finding, run.confirm)}", remedy)


def reference_failed(finding: Finding, confirm: bool) -> Reason:
    return Reason(
        f"plain decoding does not follow the law that the others are held against: {_stood(finding, confirm)}",
        "the scorer's model, precision or sampling parameters are not the decoder's: compare them before anything else",
    )


def margin_crossed(interval: Interval) -> Reason:
    needed = interval.seeds_needed
    lies = "crosses" if interval.low < interval.margin and interval.high > -interval.margin else "lies outside"
    problem = (
        f"{interval.place} is {interval.estimate:+.4f} (95 % CI {interval.low:.4f} to {interval.high:.4f}), "
        f"which {lies} its margin of {interval.margin:g}"
    )
    if needed is None:
        return Reason(problem, "no number of seeds settles this: the whole interval lies outside the margin")
    return Reason(
        f"{problem}; about {needed:,} seeds would settle it, {interval.num_seeds:,} were drawn",
        "run a larger --budget, or widen the margin if that much may be wrong",
    )


def unsettled(line: str) -> Reason:
    return Reason(f"too little data for what must be measured ({line})", "run a larger --budget")


def inside_margin(interval: Interval) -> str:
    return (
        f"{interval.place} {interval.estimate:+.4f} (95 % CI {interval.low:.4f} to {interval.high:.4f}), "
        f"inside its margin of {interval.margin:g}"
    )


def also_flagged(finding: Finding) -> str:
    return f"{_flagged(finding)} on first look as well; not tested on fresh seeds, because a difference already stands"


def teeth_missed(config: ConfigFacts, run: RunFacts, findings: Sequence[Finding]) -> Reason:
    tests = _and(_count(f.num_tests.get(config.config, 0), f.unit) for f in _of(findings, Role.TEETH))
    return Reason(
        f"the planted {run.planted_fault} was missed in config {config.config} (0 of {tests})",
        "a real fault of that size would be missed too: collect more seeds or plant a larger fault",
    )


def different(finding: Finding, run: RunFacts) -> Reason:
    if run.from_files:
        remedy = "record both arms again with fresh seeds: what is no chance is found again"
    else:
        remedy = "run again with another --drafter, --acceptance or --kernels and see which one clears it"
    return Reason(_stood(finding, run.confirm), remedy)


def pending(finding: Finding) -> Reason:
    return Reason(
        f"{_flagged(finding)} on first look and not yet tested on fresh seeds",
        "collect them with `equivtest run --resume`",
    )


def nothing_speculated(configs: Sequence[ConfigFacts]) -> Reason:
    why = "; ".join(f"{config.config}: {_why_plain(config)}" for config in configs)
    return Reason(
        f"nothing was tested, because no draft token was ever offered ({why})",
        "choose a config, drafter or kernel backend that speculates",
    )


def no_control(comparison: Comparison) -> Reason:
    missing = {
        Comparison.ON_ON_NULL: "no A/A control was run, so nothing shows that the samples can be trusted",
        Comparison.OFF_BIASED: "no fault was planted, so nothing shows that one would have been seen",
    }[comparison]
    return Reason(missing, "`equivtest run` collects the controls")


def nothing_to_bite(run: RunFacts) -> Reason:
    return Reason(
        f"the planted {run.planted_fault} had nothing to act on, so nothing shows that a fault would have been seen",
        "choose a sampled config or a drafter whose drafts are sometimes rejected",
    )


def cleared(finding: Finding) -> str:
    stage_2 = finding.confirmation
    if stage_2 is None:
        return ""
    return (
        f"{_flagged(finding)} on first look and did not on {stage_2.num_samples:,} fresh samples an arm "
        f"(smallest adjusted p {p_text(stage_2.smallest_p)}, level {stage_2.alpha:g}): chance"
    )


def config_notes(config: ConfigFacts) -> Iterator[str]:
    """What a reader must know about how a config was decoded."""
    if config.recorded:
        yield f"{config.config}: no sample says how its tokens came about; that the on arm speculated is taken on trust"
        return
    if not config.speculated:
        yield f"{config.config}: {_why_plain(config)}; speculation was not tested there"
        return
    if config.greedy:
        yield f"{config.config}: greedy decoding, which tests that the text is identical rather than a law"
    if config.plain_reasons:
        plain = config.num_samples - config.num_spec_samples
        yield f"{config.config}: {plain:,} of {config.num_samples:,} samples went plain ({_reasons(config)})"
    share = config.num_accepted / config.num_drafted
    yield f"{config.config}: {config.num_accepted:,} of {config.num_drafted:,} judged drafts accepted ({share:.0%})"
    if config.num_accepted == config.num_drafted:
        yield f"{config.config}: a planted acceptance bias has nothing to act on, since every draft was accepted"


def extreme_notes(finding: Finding) -> Iterator[str]:
    for extreme in finding.extremes:
        yield f"{extreme.name}: {extreme.value:.2f} at {extreme.place} ({extreme.by_chance:.2f} is usual by chance)"


def gate_line(finding: Finding | None) -> str:
    if finding is None:
        return "not available, off vs on was not analysed"
    return (
        f"{'fail' if finding.flagged else 'pass'}, zero rejections of off vs on wanted at {finding.level:g}, "
        f"{len(finding.flagged):,} of {_count(finding.num_all, finding.unit)} rejected"
    )


def control_line(passed: bool | None, num_rejected: int, num_tests: int, subject: str) -> str:
    if not num_tests:
        return "not run"
    found = f"{num_rejected:,} of {num_tests:,} rejected, {subject}"
    if passed is None:
        return f"undecided until tested on fresh seeds, {found}"
    chance = ", none standing on fresh seeds" if passed and num_rejected else ""
    return f"{'passed' if passed else 'failed'}, {found}{chance}"


def teeth_line(passed: bool | None, num_rejected: int, num_tests: int, fault: str) -> str:
    if not num_tests:
        return "not run"
    state = {True: "detected", False: "missed", None: "had nothing to act on"}[passed]
    return f"{fault} {state}, {num_rejected:,} of {num_tests:,} rejected, off vs biased"


def _stood(finding: Finding, confirm: bool) -> str:
    """A finding whose flags count: how many, how sure and where."""
    stage_2 = finding.confirmation if confirm else None
    flags = finding.standing_flags(confirm)
    sure = "at a level that holds whenever one looks" if finding.at_once else "on the first look, without confirmation"
    if stage_2 is not None:
        sure = f"again on {stage_2.num_samples:,} fresh samples an arm"
    worst = max(flags, key=lambda flag: abs(flag.effect) - flag.effect_by_chance)
    return (
        f"{_flagged(finding, len(flags))} {sure} (smallest adjusted p {p_text(min(flag.p_value for flag in flags))}); "
        f"{_where(flags, worst)}"
    )


def _where(flags: Sequence[Flag], worst: Flag) -> str:
    """The worst place of many alike; or, where every test is another one, the most significant of them."""
    if worst.place.test is None:
        return f"most at {worst.place}, {worst.words}; in {_places(flags)}"
    named = "; ".join(f"{flag.place.config}: {flag.words}" for flag in flags[:_MOST_PLACES])
    rest = len(flags) - _MOST_PLACES
    return f"{named}{f'; and {rest} more' if rest > 0 else ''}"


def _bias(interval: Interval) -> str:
    return f"acceptance bias {interval.estimate:+.4f} (95 % CI {interval.low:.4f} to {interval.high:.4f})"


def _flagged(finding: Finding, number: int | None = None) -> str:
    number = len(finding.flagged) if number is None else number
    return f"{number:,} of {_count(finding.num_all, finding.unit)} differed, {finding.subject},"


def _places(flags: Sequence[Flag]) -> str:
    """Strata with the most flags first."""
    counts: dict[str, int] = {}
    for flag in flags:
        stratum = str(flag.place._replace(position=None))
        counts[stratum] = counts.get(stratum, 0) + 1
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    named = ", ".join(f"{stratum} ({number})" for stratum, number in ranked[:_MOST_PLACES])
    rest = len(ranked) - _MOST_PLACES
    return f"{named} and {rest} more" if rest > 0 else named


def _why_plain(config: ConfigFacts) -> str:
    if config.plain_reasons:
        return f"routed plain ({_reasons(config)})"
    return "the drafter offered nothing"


def _reasons(config: ConfigFacts) -> str:
    return ", ".join(f"{reason}: {number:,}" for reason, number in sorted(config.plain_reasons.items()))


def _of(findings: Sequence[Finding], role: Role) -> list[Finding]:
    return [finding for finding in findings if finding.role is role]


def _count(number: int, plural: str) -> str:
    return f"{number:,} {plural[:-1] if number == 1 else plural}"


def _and(parts: Iterable[str]) -> str:
    return " and ".join(parts)


def p_text(value: float) -> str:
    """A p-value in a sentence."""
    if value >= 0.001:
        return f"{value:.3f}"
    return f"{value:.1e}" if value >= 1e-300 else "below 1e-300"  # too small for a float
