"""From the pattern of the evidence to the stage of the decoder to look at, in words.

A table of rules, the most specific first. A rule looks at the lines that are flagged and not explained yet, says one
sentence and explains the lines that its fault moves as well: an inflated acceptance also shifts surprisals and ranks.
What no rule explains is listed as such. So one fault gives one sentence, and several sentences mean several faults.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import NamedTuple

from equivtest.errors import InvalidSetting
from equivtest.records import Evidence, Origin
from equivtest.stats.law_counts import certain_off_support, duplicates_per_sample, support_by_origin
from equivtest.stats.law_martingale import NO_ACCEPTANCE

_ALL = ("*",)

_DRAWN = (Origin.RECOVERED, Origin.BONUS, Origin.PLAIN)
"""Origins of tokens that a law was drawn from: their support is that of the law, whatever the acceptance does."""

_SHAPE = ("rank", "vocab", "rows")
"""Moved by every fault that moves many tokens one way: `rows` as well, whose products then have a mean above 0."""

_MANY_PAIRS = 0.05
"""Excess pairs of equal samples, a sample, from which samples count as copies of each other."""

_SOME = 5
"""Tokens from which a count is no accident."""

_CLEAR = 4.0
"""z beyond which a line is clear by itself."""

_HOTTER = 1.2
"""z of a draft row's surprisal over that of the bias from which the row's law is wrong rather than the acceptance.

A temperature moves every token of a row and a wrong acceptance the draft alone, so one z is about twice the other."""

_ROW_WORDS = {Origin.ACCEPTED: "draft", Origin.RECOVERED: "draft", Origin.BONUS: "bonus", Origin.PLAIN: "plain"}


@dataclass(frozen=True, slots=True)
class _Lines:
    """The evidence of one arm and config by name, and the flagged names that are not explained yet."""

    by_name: dict[str, Evidence]
    open: frozenset[str]
    by_batch: bool = False
    """Texts change with the batch that they are decoded in."""
    alternatives: tuple[Evidence, ...] = ()

    @property
    def laws_vary(self) -> bool:
        """Whether any law holds more than one token; not under greedy decoding."""
        return any(name.startswith("surprisal_") for name in self.by_name)

    @property
    def reports_its_law(self) -> bool:
        """The decoder reports the right log-probabilities: the laws it draws from are right, and what it does with
        them is wrong."""
        return "logprobs" in self.by_name and "logprobs" not in self.open

    def z(self, name: str) -> float:
        """0 where the line is not there."""
        return self.by_name[name].statistic if name in self.by_name else 0.0

    def estimate(self, name: str) -> float:
        return (self.by_name[name].estimate or 0.0) if name in self.by_name else 0.0

    def matching(self, *patterns: str) -> list[str]:
        """Open names."""
        return sorted(name for name in self.open if any(fnmatch(name, pattern) for pattern in patterns))

    def size(self, name: str, unit: str = "", sign: bool = False) -> str:
        """`0.021 (95 % CI 0.017 to 0.025)`."""
        line = self.by_name[name]
        turn = 1.0 if sign or self.estimate(name) >= 0 else -1.0
        low, high = sorted(turn * (end or 0.0) for end in (line.ci_low, line.ci_high))
        return f"{turn * self.estimate(name):{'+' if sign else ''}.3f}{unit} (95 % CI {low:.3f} to {high:.3f})"

    def excludes_zero(self, name: str) -> bool:
        line = self.by_name[name]
        return line.ci_low is not None and line.ci_high is not None and not line.ci_low <= 0 <= line.ci_high

    def off_support(self) -> dict[Origin, int]:
        return support_by_origin(self.by_name["support"]) if "support" in self.by_name else {}


class Diagnosis(NamedTuple):
    """What is wrong, and where to look."""

    stage: str
    """Stage of the decoder: propose, forward, process, verify, accept, report or commit; streams; the law itself
    (`reference`); or unknown."""
    sentence: str


Said = tuple[str, str, Sequence[str]]
"""The stage, a sentence, and patterns of the names that it explains."""
_Rule = Callable[[_Lines], Said | None]


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
    same = _lines(identity, alpha)
    drafts = _proposal(same)
    reference = _law_sentences(_lines(off, alpha))
    if reference:
        return (*drafts, *_off_sentences(_lines(off, alpha), reference))
    law = _law_sentences(
        dataclasses.replace(_lines(on, alpha), by_batch=bool(same.matching("replay")), alternatives=tuple(alternatives))
    )
    if law:
        return (*drafts, *law)
    whole = _joint_sentence(_lines(joint, alpha))
    if whole and on:
        whole = whole._replace(
            sentence=f"every token of arm on follows the law at its own prefix, yet {whole.sentence}"
        )
    return (*drafts, *_not_the_same(same), *([whole] if whole else ()))


def _proposal(same: _Lines) -> tuple[Diagnosis, ...]:
    if not same.matching("drafts"):
        return ()
    sentence = (
        f"{same.estimate('drafts'):.1%} of the sampled drafts are not drawn from the law q that they are handed on "
        "with: look at what the drafter draws from, and what it stores"
    )
    return (Diagnosis("propose", sentence),)


_INSTEAD = {
    "raw": ("verify", "the law of the raw logits", "temperature and filters"),
    "no_temperature": ("verify", "the law at temperature 1", "where the temperature is applied"),
    "no_top_k": ("verify", "the law without top_k", "where filters are applied"),
    "no_top_p": ("verify", "the law without top_p", "where filters are applied"),
    "no_min_p": ("verify", "the law without min_p", "where filters are applied"),
    "greedy": ("verify", "the argmax", "what turns logits into probabilities"),
    "no_processing": ("process", "the law without penalties, bias and min_tokens", "where logits are processed"),
    "no_penalties": ("process", "the law without penalties", "where penalties are applied"),
    "no_repetition_penalty": ("process", "the law without repetition penalty", "where penalties are applied"),
    "no_frequency_penalty": ("process", "the law without frequency penalty", "where penalties are applied"),
    "no_presence_penalty": ("process", "the law without presence penalty", "where penalties are applied"),
    "no_logit_bias": ("process", "the law without logit bias", "where the bias is added"),
    "no_min_tokens": ("process", "the law without min_tokens", "the mask of stop tokens"),
    "min_tokens_long": ("process", "the law with min_tokens one too large", "the mask of stop tokens"),
    "min_tokens_short": ("process", "the law with min_tokens one too small", "the mask of stop tokens"),
    "stale_history": ("process", "penalties that do not know the drafts before in the block", "their history"),
    "logits_as_probs": ("verify", "their logits, taken for probabilities", "what turns logits into probabilities"),
    "row_before": ("verify", "the law of the row before their own", "how rows are told apart"),
    "row_after": ("verify", "the law of the row after their own", "how rows are told apart"),
}
"""What each alternative law says of a decoder: the stage, what its tokens follow, and what to look at."""

_MUCH_BETTER = 8.0
"""Nats of log-likelihood from which an alternative counts: odds of three thousand to one."""


def _another_law(lines: _Lines) -> Said | None:
    """The alternative that explains the tokens of each kind of row best, if any does."""
    if lines.reports_its_law:
        return None
    alternatives = lines.alternatives
    best: dict[str, list[Evidence]] = {}
    for rows in dict.fromkeys(line.stratum for line in alternatives):
        fitting = [
            line
            for line in alternatives
            if line.stratum == rows and line.name in _INSTEAD and line.p_value > 1e-4 and line.statistic > _MUCH_BETTER
        ]
        if fitting:
            line = max(fitting, key=lambda one: one.statistic)
            best.setdefault(line.name, []).append(line)
    if _drafts_off(lines) and "draft" in {line.stratum for line in alternatives}:
        # What leaves the rows with a draft unexplained is not the cause.
        best = {name: its for name, its in best.items() if any(line.stratum == "draft" for line in its)}
    if not best:
        return None
    name, its = max(best.items(), key=lambda item: sum(line.statistic for line in item[1]))
    stage, law, look = _INSTEAD[name]
    rows = " and ".join(line.stratum for line in its)
    gain = sum(line.statistic for line in its) / sum(line.num_tokens for line in its)
    sentence = f"tokens of {rows} rows follow {law} ({gain:.3f} nat a token better than their own): look at {look}"
    return stage, sentence, _ALL


def _drafts_off(lines: _Lines) -> bool:
    return bool(lines.matching("bias*", "surprisal_draft") or Origin.RECOVERED in lines.off_support())


def _no_law(lines: _Lines) -> Said | None:
    """Rows that no law of their own prefix explains, although many were tried."""
    if lines.reports_its_law or not lines.alternatives or not lines.matching("support"):
        return None
    drawn = {origin: count for origin, count in lines.off_support().items() if origin in _DRAWN}
    if not drawn or not lines.laws_vary:
        return None
    split = ", ".join(f"{count} {origin}" for origin, count in drawn.items())
    if lines.by_batch and not lines.matching("surprisal_draft"):
        sentence = (
            f"tokens either follow the law or are far off it ({split}), and texts change with their batch-mates: "
            "look at rows of other requests"
        )
        return "verify", sentence, _ALL
    sentence = (
        f"tokens are drawn that no law of their own prefix explains ({split}): look at what the forward reads, the "
        "cache, its page table, and the mask"
    )
    return "forward", sentence, _ALL


def _not_the_same(same: _Lines) -> tuple[Diagnosis, ...]:
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


def _lines(evidence: Iterable[Evidence], alpha: float) -> _Lines:
    by_name: dict[str, Evidence] = {}
    for line in evidence:
        if line.name in by_name:
            raise InvalidSetting("evidence to diagnose", line.name, "must hold each test once")
        by_name[line.name] = line
    levels = {n: e.p_value if e.adjusted_p is None else e.adjusted_p for n, e in by_name.items()}
    return _Lines(by_name, frozenset(name for name, level in levels.items() if level < alpha))


def _law_sentences(lines: _Lines) -> tuple[Diagnosis, ...]:
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


def _off_sentences(lines: _Lines, said: tuple[Diagnosis, ...]) -> tuple[Diagnosis, ...]:
    if _shared_rows(lines) or _equal_samples(lines):
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


def _shared_rows(lines: _Lines) -> Said | None:
    # Coins that rows share move every other sum at random, and less than their own.
    others = max((abs(lines.z(n)) for n in lines.matching("bias*", "surprisal_*", "lag_*")), default=0.0)
    if abs(lines.z("rows")) <= max(others, _CLEAR * _copies(lines) ** 0.5 if lines.matching("duplicates") else 0.0):
        return None
    # A shift of all ranks by at most the supremum distance d gives their products a correlation of at most 12 d^2.
    if not lines.matching("rows") or abs(lines.estimate("rows")) <= 12 * lines.estimate("rank") ** 2:
        return None
    return (
        "streams",
        f"rows of a batch draw together (correlation {lines.size('rows', sign=True)}): look at how random streams are "
        "told apart by row and request",
        ("bias*", "surprisal_*", "lag_*", "duplicates", *_SHAPE),
    )


def _equal_samples(lines: _Lines) -> Said | None:
    # Greedy texts repeat, right or wrong; and seeds that collide leave the law that is reported right.
    if not lines.matching("duplicates") or not lines.laws_vary or lines.matching("logprobs"):
        return None
    a_sample = duplicates_per_sample(lines.by_name["duplicates"])
    # Where drafts are kept much too often samples repeat, too.
    if a_sample < _MANY_PAIRS or lines.z("bias") > _CLEAR * _copies(lines) ** 0.5:
        return None
    return _seeds(lines, ("bias*", "surprisal_*", "lag_*", "duplicates", *_SHAPE))


def _copies(lines: _Lines) -> float:
    """How often a text is there: with c copies of each, sums vary c times as much and z as sqrt(c)."""
    line = lines.by_name.get("duplicates")
    return 1 + 2 * max(0.0, duplicates_per_sample(line)) if line else 1.0


def _few_equal_samples(lines: _Lines) -> Said | None:
    return _seeds(lines, ("duplicates",)) if lines.matching("duplicates") else None


def _seeds(lines: _Lines, explained: Sequence[str]) -> Said:
    excess = lines.estimate("duplicates")
    return (
        "streams",
        f"samples repeat ({excess:.0f} equal pairs more than chance): look at seeds that collide or are ignored",
        explained,
    )


def _residual(lines: _Lines) -> Said | None:
    if not lines.matching("residual"):
        return None
    share, count = lines.estimate("residual"), lines.z("residual")
    stage, look = "accept", "the residual that a rejection draws from"
    if Origin.BONUS in lines.off_support() and lines.by_batch:
        stage, look = "commit", "counts of other requests: texts change with their batch-mates"
    elif Origin.BONUS in lines.off_support() and not lines.matching("bias"):
        stage, look = "streams", "a count and a token that are drawn apart: drafts are kept as often as they should be"
    return (
        stage,
        f"recovered tokens include their own rejected draft ({count:.0f} of them, {share:.1%}): look at {look}",
        _ALL,
    )


def _lag(lines: _Lines) -> Said | None:
    others = max((abs(lines.z(n)) for n in lines.matching("bias*", "surprisal_*")), default=0.0)
    name = max(lines.matching("lag_*"), key=lambda n: abs(lines.z(n)), default=None)
    if name is None or abs(lines.z(name)) <= others:
        return None
    previous = name.removeprefix("lag_")
    before = {"recovered": "a recovery", "bonus": "a bonus draw", "plain": "a plain draw"}.get(
        previous, "an acceptance"
    )
    return (
        "streams",
        f"coins are shared between {before} and the next acceptance (slope {lines.size(name, sign=True)}): look at how "
        "far the generator advances a round",
        ("lag_*", "bias*", "surprisal_draft", *_SHAPE),
    )


def _one_coin(lines: _Lines) -> Said | None:
    """A coin that was small enough for one draft is so for the next."""
    slots = sorted(name for name in lines.by_name if name.startswith("bias_slot_"))
    if not lines.reports_its_law or len(slots) < 2 or slots[0] in lines.open or lines.matching("support", "residual"):
        return None
    later = [name for name in slots[1:] if name in lines.open]
    if not later or any(lines.z(name) <= 0 for name in later) or abs(lines.z(slots[0])) > _CLEAR / 2:
        return None
    return (
        "streams",
        f"drafts that follow an accepted one are accepted too often ({lines.size(later[0])} in slot "
        f"{later[0].removeprefix('bias_slot_')}), the first is not: look at whether the slots of a round share a coin",
        _ALL,
    )


def _past_the_end(lines: _Lines) -> Said | None:
    """After its end a text has but one law: the stop token again."""
    counts = lines.off_support() if lines.matching("support") else {}
    certain = certain_off_support(lines.by_name["support"]) if counts else 0
    if not lines.laws_vary or certain < max(_SOME, sum(counts.values())):
        return None
    split = ", ".join(f"{count} {origin}" for origin, count in counts.items())
    return (
        "commit",
        f"tokens were put out where the law holds but one other ({split}), as after the end of a text: look at where "
        "texts are cut at a stop token",
        _ALL,
    )


def _early_ends(lines: _Lines) -> Said | None:
    counts = lines.off_support() if lines.matching("support") else {}
    if Origin.ENDED not in counts:
        return None
    return (
        "commit",
        f"texts end where their law goes on ({counts[Origin.ENDED]} of them): look at what is taken for the end of a "
        "text",
        ("support", *_SHAPE) if len(counts) == 1 else (),
    )


def _reported(lines: _Lines) -> Said | None:
    if not lines.matching("logprobs"):
        return None
    return (
        "report",
        f"reported log-probabilities are not those of the law (median difference {lines.estimate('logprobs'):.3g} "
        "nat): look at where logprobs are gathered",
        ("logprobs",),
    )


def _filters(lines: _Lines) -> Said | None:
    counts = lines.off_support() if lines.matching("support") else {}
    counts.pop(Origin.ENDED, None)
    elsewhere = {Origin.ACCEPTED} | ({Origin.BONUS} if lines.matching("surprisal_bonus") else set())
    if set(counts) <= elsewhere:  # then it is the acceptance, or the bonus row, that is wrong
        return None
    kinds = " and ".join(dict.fromkeys(_ROW_WORDS[origin] for origin in counts))
    split = ", ".join(f"{count} {origin}" for origin, count in counts.items())
    if not lines.laws_vary:
        sentence = f"greedy rows put out another token than the likeliest ({split}): look at rows of temperature 0"
        return "verify", sentence, _ALL
    if lines.reports_its_law and lines.by_batch:
        sentence = (
            f"tokens of probability 0 are put out ({split}), others follow the law, and texts change with their "
            f"batch-mates: look at {kinds} rows of other requests"
        )
        return "verify", sentence, _ALL
    if lines.reports_its_law:
        sentence = (
            f"tokens of probability 0 are put out ({split}), although the laws that are reported are right: look at "
            f"how {' and '.join(counts)} tokens are drawn"
        )
        return "accept", sentence, _ALL
    inflated = ("bias*",) if lines.estimate("bias") <= 0 else ()
    return (
        "verify",
        f"tokens that the filters remove were put out ({split}): look at where filters are applied on {kinds} rows",
        ("support", "surprisal_*", "lag_*", *inflated, *_SHAPE),
    )


def _every_row(lines: _Lines) -> Said | None:
    there = sorted(name for name in lines.by_name if name.startswith("surprisal_"))
    signs = {lines.z(name) > 0 for name in there}
    if len(there) < 2 or len(signs) > 1 or not lines.matching("surprisal_*"):
        return None
    if not all(lines.excludes_zero(name) for name in there):
        return None
    if abs(lines.z("surprisal_draft")) <= _HOTTER * abs(lines.z("bias")):
        return None
    sizes = ", ".join(f"{name.removeprefix('surprisal_')} {lines.size(name, ' nat', sign=True)}" for name in there)
    return (
        "verify",
        f"all kinds of rows are too {'hot' if signs.pop() else 'cold'} (surprisal: {sizes}): look at the temperature "
        "and filters that they share",
        ("surprisal_*", "bias*", "lag_*", "duplicates", *_SHAPE),
    )


def _draft_rows(lines: _Lines) -> Said | None:
    if not lines.matching("surprisal_draft") or abs(lines.z("surprisal_draft")) <= _HOTTER * abs(lines.z("bias")):
        return None
    return (
        "verify",
        f"rows with a draft are too {'hot' if lines.z('surprisal_draft') > 0 else 'cold'} (surprisal "
        f"{lines.size('surprisal_draft', ' nat', sign=True)}){_clean(lines)}: look at the temperature and filters of "
        "the rows that drafts are verified on",
        ("surprisal_draft", "bias*", "lag_*", *_SHAPE),
    )


def _acceptance(lines: _Lines) -> Said | None:
    off_support = lines.off_support().get(Origin.ACCEPTED, 0) if lines.matching("support") else 0
    if not lines.matching("bias*"):
        if not off_support:
            return None
        return (
            "accept",
            f"drafts that the filters remove were accepted ({off_support} of them){_clean(lines)}: look at the "
            "acceptance test",
            ("support", "surprisal_draft", *_SHAPE),
        )
    slots = {int(n.removeprefix("bias_slot_")): n for n in lines.by_name if n.startswith("bias_slot_")}
    sole = _sole_slot(lines, slots)
    name = slots[sole] if sole is not None else "bias" if "bias" in lines.by_name else lines.matching("bias*")[0]
    inflated = lines.estimate(name) > 0
    moved = [s for s, n in sorted(slots.items()) if lines.excludes_zero(n) and (lines.estimate(n) > 0) is inflated]
    stage, look = "accept", "the acceptance test"
    if sole is not None:
        stage = "verify"
        where, look = f"slot {sole} alone", "shifted rows or stale probabilities in that slot"
    elif moved:
        whole = moved == list(range(moved[0], moved[-1] + 1)) and len(moved) > 1
        where = (
            f"slots {moved[0]}-{moved[-1]}" if whole else f"slot{'s' * (len(moved) > 1)} {', '.join(map(str, moved))}"
        )
    else:
        where = "the draft slots together"
    if lines.by_name[name].method.endswith(NO_ACCEPTANCE):
        # Drafts of a sampled drafter: the estimate is q's mass, whose sign is not that of the acceptance.
        return (
            stage,
            f"drafts are not kept with the probability of the law, in {where} (z {lines.z(name):+.1f}){_clean(lines)}: "
            f"look at {look}",
            ("bias*", "surprisal_draft", "lag_*", *_SHAPE, *(("support",) if off_support else ()), "duplicates"),
        )
    extra = f", drafts that the filters remove included ({off_support})" if off_support else ""
    return (
        stage,
        f"acceptance is {'inflated' if inflated else 'deflated'} by {lines.size(name)} in {where}{extra}"
        f"{_clean(lines)}: look at {look}",
        (
            *("bias*", "surprisal_draft", "lag_*", *_SHAPE),
            *(("support",) if off_support else ()),
            *(("duplicates",) if inflated else ()),
        ),
    )


def _sole_slot(lines: _Lines, slots: dict[int, str]) -> int | None:
    """The slot that is flagged while every other one's interval lies nearer to 0, or None."""
    flagged = [slot for slot, name in slots.items() if name in lines.open]
    if len(flagged) != 1 or len(slots) < 2:
        return None
    this = lines.by_name[slots[flagged[0]]]
    sign = 1 if this.statistic > 0 else -1
    nearest = min(sign * (end or 0.0) for end in (this.ci_low, this.ci_high))
    others = (lines.by_name[name] for slot, name in slots.items() if slot != flagged[0])
    apart = all(max(sign * (end or 0.0) for end in (other.ci_low, other.ci_high)) < nearest for other in others)
    return flagged[0] if apart else None


def _own_draws(lines: _Lines) -> Said | None:
    names = lines.matching("surprisal_bonus", "surprisal_plain")
    if not names:
        return None
    explained = (*names, *_SHAPE, *(("support",) if Origin.BONUS in lines.off_support() else ()))
    if names == ["surprisal_bonus"]:
        size = lines.size("surprisal_bonus", " nat", sign=True)
        return (
            "verify",
            f"rows after a full acceptance draw from a different law (surprisal {size}): look at which logits row "
            "feeds the bonus",
            explained,
        )
    sizes = ", ".join(f"{n.removeprefix('surprisal_')} {lines.size(n, ' nat', sign=True)}" for n in names)
    sentence = f"tokens drawn without a draft follow another law (surprisal: {sizes}): look at the plain draw"
    return "accept", sentence, explained


def _inverse(lines: _Lines) -> Said | None:
    if lines.matching("rank", "vocab") != ["vocab"]:
        return None
    return (
        "accept",
        f"tokens are off in vocabulary order (distance {lines.size('vocab')}) and not in order of probability: look at "
        "how the draw inverts the distribution function",
        ("vocab",),
    )


_RULES: tuple[_Rule, ...] = (
    *(_shared_rows, _equal_samples, _past_the_end, _early_ends, _residual, _lag, _another_law, _no_law, _one_coin),
    *(_filters, _every_row, _draft_rows, _acceptance, _own_draws, _inverse, _few_equal_samples, _reported),
)


def _clean(lines: _Lines) -> str:
    """`; bonus and plain tokens follow the law`, as far as it was tested and holds."""
    kinds = [k for k in ("bonus", "plain") if f"surprisal_{k}" in lines.by_name and f"surprisal_{k}" not in lines.open]
    return f"; {' and '.join(kinds)} tokens follow the law" if kinds else ""


def _joint_sentence(lines: _Lines) -> Diagnosis | None:
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
