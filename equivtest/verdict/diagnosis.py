"""From the pattern of the evidence to the stage of the decoder to look at, in words.

A table of rules, the most specific first. A rule looks at the lines that are flagged and not explained yet, says one
sentence and explains the lines that its fault moves as well: an inflated acceptance also shifts surprisals and ranks.
What no rule explains is listed as such. So one fault gives one sentence, and several sentences mean several faults.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from equivtest.records import Evidence
from equivtest.verdict import draw_rules, row_rules
from equivtest.verdict.flagged import Lines, Rule, lines_of


class Diagnosis(NamedTuple):
    """What is wrong, and where to look."""

    stage: str
    """Stage of the decoder: propose, forward, process, verify, accept, report or commit; streams; the law itself
    (`reference`); or unknown."""
    sentence: str


def diagnose(
    on: Sequence[Evidence],
    off: Sequence[Evidence] = (),
    joint: Sequence[Evidence] = (),
    identity: Sequence[Evidence] = (),
    alternatives: Sequence[Evidence] = (),
    *,
    alpha: float = 0.01,
) -> tuple[Diagnosis, ...]:
    """What is wrong with one config, and where to look; empty where nothing is flagged. The first is the cause.

    on, off: lines of the law family, empty where the law is not known; joint: lines of the joint family of arm off
    against arm on; identity: lines of its identity checks; alternatives: lines of other laws on arm on. A line is
    flagged where its adjusted p-value (the p-value where there is none) is below alpha. Raises InvalidSetting where a
    name comes twice, as when lines of two configs are mixed.
    """
    same = lines_of(identity, alpha)
    drafts = _proposal(same)
    plain = lines_of(off, alpha)
    reference = _law_sentences(plain)
    if reference:
        return (*drafts, *_off_sentences(plain, reference))
    by_batch = bool(same.matching("replay"))
    law = _law_sentences(dataclasses.replace(lines_of(on, alpha), by_batch=by_batch, alternatives=tuple(alternatives)))
    if law:
        return (*drafts, *law)
    whole = _joint_sentence(lines_of(joint, alpha))
    if whole and on:
        whole = whole._replace(
            sentence=f"every token of arm on follows the law at its own prefix, yet {whole.sentence}"
        )
    return (*drafts, *_not_the_same(same), *([whole] if whole else ()))


def _proposal(same: Lines) -> tuple[Diagnosis, ...]:
    if not same.matching("drafts"):
        return ()
    sentence = (
        f"{same.estimate('drafts'):.1%} of the sampled drafts are not drawn from the law q that they are handed on "
        "with: look at what the drafter draws from, and what it stores"
    )
    return (Diagnosis("propose", sentence),)


def _law_sentences(lines: Lines) -> tuple[Diagnosis, ...]:
    sentences = []
    for rule in _RULES:
        said = rule(lines)
        if said:
            stage, sentence, explained = said
            sentences.append(Diagnosis(stage, sentence))
            if stage in ("forward", "process", "verify"):  # what is reported of a wrong row is of that row
                explained = (*explained, "logprobs")
            lines = dataclasses.replace(lines, open=lines.open - set(lines.matching(*explained)))
    if lines.open:
        failed = ", ".join(f"{name} ({lines.by_name[name].statistic:.4g})" for name in sorted(lines.open))
        sentences.append(Diagnosis("unknown", f"no known fault looks like this; what failed (statistic): {failed}"))
    return tuple(sentences)


def _off_sentences(lines: Lines, said: tuple[Diagnosis, ...]) -> tuple[Diagnosis, ...]:
    if draw_rules.shared_rows(lines) or draw_rules.equal_samples(lines):
        return tuple(one._replace(sentence=f"in arm off already, {one.sentence}") for one in said)
    if lines.open == {"logprobs"}:
        sentence = (
            "arm off reports log-probabilities that are not those of the law either (median difference "
            f"{lines.estimate('logprobs'):.3g} nat): look at where logprobs are gathered, and at the scorer's weights, "
            "precision, temperature and filters"
        )
        return (Diagnosis("reference", sentence),)
    failed = ", ".join(sorted(lines.open))
    sentence = (
        f"arm off does not follow the law either ({failed}): the reference law is not the decoder's law; look at the "
        "scorer's weights, precision, temperature and filters before anything else"
    )
    return (Diagnosis("reference", sentence),)


def _not_the_same(same: Lines) -> tuple[Diagnosis, ...]:
    """What repeats show where the law holds."""
    said = []
    if same.matching("replay"):
        changed = f"{same.z('replay'):.0f} texts changed"
        sentence = f"the same seed gives another text in another batch ({changed}): look at how streams are keyed"
        said.append(Diagnosis("streams", sentence))
    if same.matching("greedy"):
        changed = f"{same.z('greedy'):.0f} texts"
        sentence = f"greedy text changes with speculation ({changed}): look at rows of temperature 0 and at the cache"
        said.append(Diagnosis("verify", sentence))
    return tuple(said)


def _joint_sentence(lines: Lines) -> Diagnosis | None:
    """None where nothing is flagged."""
    parts, looks, stages = [], [], []
    if lines.matching("mode"):
        often = lines.z("mode") > 0
        parts.append(
            f"takes the likeliest next token too {'often' if often else 'seldom'} ({lines.estimate('mode'):+.4f})"
        )
        looks.append("the acceptance test")
        stages.append("accept")
    if lines.matching("collisions"):
        lost = lines.z("collisions") > 0
        parts.append(
            f"has {'lost' if lost else 'gained'} entropy (shared prefixes {lines.estimate('collisions'):+.3f} tokens)"
        )
        looks.append(
            "colliding seeds and too low a temperature" if lost else "too high a temperature and missing filters"
        )
        stages.append("streams" if lost else "verify")
    if not parts and lines.open:
        parts.append(f"differs from arm off in whole samples ({', '.join(sorted(lines.open))}) without a direction")
        looks.append("coins shared between steps, and at the rows that laws are read from")
        stages.append("streams")
    if not parts:
        return None
    return Diagnosis(stages[0], f"arm on {' and '.join(parts)}: look at {' and at '.join(looks)}")


_RULES: tuple[Rule, ...] = (
    draw_rules.shared_rows,
    draw_rules.equal_samples,
    row_rules.past_the_end,
    row_rules.early_ends,
    draw_rules.residual,
    draw_rules.lag,
    row_rules.another_law,
    row_rules.no_law,
    draw_rules.one_coin,
    row_rules.filters,
    row_rules.every_row,
    row_rules.draft_rows,
    draw_rules.acceptance,
    row_rules.own_draws,
    draw_rules.inverse,
    draw_rules.few_equal_samples,
    draw_rules.reported,
)
"""In the order in which they are tried."""
