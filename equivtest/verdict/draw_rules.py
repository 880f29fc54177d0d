"""Rules for decoders that do the wrong thing with laws that are right: coins, acceptance, recovery, reports."""

from __future__ import annotations

from collections.abc import Sequence

from equivtest.records import Origin
from equivtest.stats.law_counts import duplicates_per_sample
from equivtest.stats.law_martingale import NO_ACCEPTANCE
from equivtest.verdict.flagged import ALL, CLEAR, SHAPE, Lines, Said

_MANY_PAIRS = 0.05
"""Excess pairs of equal samples, a sample, from which samples count as copies of each other."""


def shared_rows(lines: Lines) -> Said | None:
    # Coins that rows share move every other sum at random, and less than their own.
    others = max((abs(lines.z(n)) for n in lines.matching("bias*", "surprisal_*", "lag_*")), default=0.0)
    if abs(lines.z("rows")) <= max(others, CLEAR * _copies(lines) ** 0.5 if lines.matching("duplicates") else 0.0):
        return None
    # A shift of all ranks by at most the supremum distance d gives their products a correlation of at most 12 d^2.
    if not lines.matching("rows") or abs(lines.estimate("rows")) <= 12 * lines.estimate("rank") ** 2:
        return None
    return (
        "streams",
        f"rows of a batch draw together (correlation {lines.size('rows', sign=True)}): look at how random streams are "
        "told apart by row and request",
        ("bias*", "surprisal_*", "lag_*", "duplicates", *SHAPE),
    )


def equal_samples(lines: Lines) -> Said | None:
    # Greedy texts repeat, right or wrong; and seeds that collide leave the law that is reported right.
    if not lines.matching("duplicates") or not lines.laws_vary or lines.matching("logprobs"):
        return None
    a_sample = duplicates_per_sample(lines.by_name["duplicates"])
    # Where drafts are kept much too often samples repeat, too.
    if a_sample < _MANY_PAIRS or lines.z("bias") > CLEAR * _copies(lines) ** 0.5:
        return None
    return _seeds(lines, ("bias*", "surprisal_*", "lag_*", "duplicates", *SHAPE))


def _copies(lines: Lines) -> float:
    """How often a text is there: with c copies of each, sums vary c times as much and z as sqrt(c)."""
    line = lines.by_name.get("duplicates")
    return 1 + 2 * max(0.0, duplicates_per_sample(line)) if line else 1.0


def few_equal_samples(lines: Lines) -> Said | None:
    return _seeds(lines, ("duplicates",)) if lines.matching("duplicates") else None


def _seeds(lines: Lines, explained: Sequence[str]) -> Said:
    excess = lines.estimate("duplicates")
    return (
        "streams",
        f"samples repeat ({excess:.0f} equal pairs more than chance): look at seeds that collide or are ignored",
        explained,
    )


def residual(lines: Lines) -> Said | None:
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
        ALL,
    )


def lag(lines: Lines) -> Said | None:
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
        ("lag_*", "bias*", "surprisal_draft", *SHAPE),
    )


def one_coin(lines: Lines) -> Said | None:
    """A coin that was small enough for one draft is so for the next."""
    slots = sorted(name for name in lines.by_name if name.startswith("bias_slot_"))
    if not lines.reports_its_law or len(slots) < 2 or slots[0] in lines.open or lines.matching("support", "residual"):
        return None
    later = [name for name in slots[1:] if name in lines.open]
    if not later or any(lines.z(name) <= 0 for name in later) or abs(lines.z(slots[0])) > CLEAR / 2:
        return None
    return (
        "streams",
        f"drafts that follow an accepted one are accepted too often ({lines.size(later[0])} in slot "
        f"{later[0].removeprefix('bias_slot_')}), the first is not: look at whether the slots of a round share a coin",
        ALL,
    )


def acceptance(lines: Lines) -> Said | None:
    off_support = lines.off_support().get(Origin.ACCEPTED, 0) if lines.matching("support") else 0
    if not lines.matching("bias*"):
        if not off_support:
            return None
        return (
            "accept",
            f"drafts that the filters remove were accepted ({off_support} of them){lines.clean}: look at the "
            "acceptance test",
            ("support", "surprisal_draft", *SHAPE),
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
            f"drafts are not kept with the probability of the law, in {where} (z {lines.z(name):+.1f}){lines.clean}: "
            f"look at {look}",
            ("bias*", "surprisal_draft", "lag_*", *SHAPE, *(("support",) if off_support else ()), "duplicates"),
        )
    extra = f", drafts that the filters remove included ({off_support})" if off_support else ""
    return (
        stage,
        f"acceptance is {'inflated' if inflated else 'deflated'} by {lines.size(name)} in {where}{extra}"
        f"{lines.clean}: look at {look}",
        (
            *("bias*", "surprisal_draft", "lag_*", *SHAPE),
            *(("support",) if off_support else ()),
            *(("duplicates",) if inflated else ()),
        ),
    )


def _sole_slot(lines: Lines, slots: dict[int, str]) -> int | None:
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


def inverse(lines: Lines) -> Said | None:
    if lines.matching("rank", "vocab") != ["vocab"]:
        return None
    return (
        "accept",
        f"tokens are off in vocabulary order (distance {lines.size('vocab')}) and not in order of probability: look at "
        "how the draw inverts the distribution function",
        ("vocab",),
    )


def reported(lines: Lines) -> Said | None:
    if not lines.matching("logprobs"):
        return None
    return (
        "report",
        f"reported log-probabilities are not those of the law (median difference {lines.estimate('logprobs'):.3g} "
        "nat): look at where logprobs are gathered",
        ("logprobs",),
    )
