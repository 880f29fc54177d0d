"""Rules for rows whose law is wrong: what their tokens follow instead, and where such a law comes from."""

from __future__ import annotations

from equivtest.records import Evidence, Origin
from equivtest.stats.law_counts import certain_off_support
from equivtest.verdict.flagged import ALL, SHAPE, Lines, Said

_DRAWN = (Origin.RECOVERED, Origin.BONUS, Origin.PLAIN)
"""Origins of tokens that a law was drawn from: their support is that of the law, whatever the acceptance does."""

_SOME = 5
"""Tokens from which a count is no accident."""

_HOTTER = 1.2
"""z of a draft row's surprisal over that of the bias from which the row's law is wrong rather than the acceptance.

A temperature moves every token of a row and a wrong acceptance the draft alone, so one z is about twice the other."""

_ROW_WORDS = {Origin.ACCEPTED: "draft", Origin.RECOVERED: "draft", Origin.BONUS: "bonus", Origin.PLAIN: "plain"}

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


def another_law(lines: Lines) -> Said | None:
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
    return stage, sentence, ALL


def _drafts_off(lines: Lines) -> bool:
    return bool(lines.matching("bias*", "surprisal_draft") or Origin.RECOVERED in lines.off_support())


def no_law(lines: Lines) -> Said | None:
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
        return "verify", sentence, ALL
    sentence = (
        f"tokens are drawn that no law of their own prefix explains ({split}): look at what the forward reads, the "
        "cache, its page table, and the mask"
    )
    return "forward", sentence, ALL


def past_the_end(lines: Lines) -> Said | None:
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
        ALL,
    )


def early_ends(lines: Lines) -> Said | None:
    counts = lines.off_support() if lines.matching("support") else {}
    if Origin.ENDED not in counts:
        return None
    return (
        "commit",
        f"texts end where their law goes on ({counts[Origin.ENDED]} of them): look at what is taken for the end of a "
        "text",
        ("support", *SHAPE) if len(counts) == 1 else (),
    )


def filters(lines: Lines) -> Said | None:
    counts = lines.off_support() if lines.matching("support") else {}
    counts.pop(Origin.ENDED, None)
    elsewhere = {Origin.ACCEPTED} | ({Origin.BONUS} if lines.matching("surprisal_bonus") else set())
    if set(counts) <= elsewhere:  # then it is the acceptance, or the bonus row, that is wrong
        return None
    if Origin.UNKNOWN in counts:  # recorded elsewhere: any stage may have put them out
        sentence = (
            f"tokens of probability 0 are put out ({counts[Origin.UNKNOWN]} of them): look at the acceptance test, "
        )
        return "accept", f"{sentence}at what follows a rejected draft, and at where filters are applied", ALL
    kinds = " and ".join(dict.fromkeys(_ROW_WORDS[origin] for origin in counts))
    split = ", ".join(f"{count} {origin}" for origin, count in counts.items())
    if not lines.laws_vary:
        sentence = f"greedy rows put out another token than the likeliest ({split}): look at rows of temperature 0"
        return "verify", sentence, ALL
    if lines.reports_its_law and lines.by_batch:
        sentence = (
            f"tokens of probability 0 are put out ({split}), others follow the law, and texts change with their "
            f"batch-mates: look at {kinds} rows of other requests"
        )
        return "verify", sentence, ALL
    if lines.reports_its_law:
        sentence = (
            f"tokens of probability 0 are put out ({split}), although the laws that are reported are right: look at "
            f"how {' and '.join(counts)} tokens are drawn"
        )
        return "accept", sentence, ALL
    inflated = ("bias*",) if lines.estimate("bias") <= 0 else ()
    return (
        "verify",
        f"tokens that the filters remove were put out ({split}): look at where filters are applied on {kinds} rows",
        ("support", "surprisal_*", "lag_*", *inflated, *SHAPE),
    )


def every_row(lines: Lines) -> Said | None:
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
        ("surprisal_*", "bias*", "lag_*", "duplicates", *SHAPE),
    )


def draft_rows(lines: Lines) -> Said | None:
    if not lines.matching("surprisal_draft") or abs(lines.z("surprisal_draft")) <= _HOTTER * abs(lines.z("bias")):
        return None
    return (
        "verify",
        f"rows with a draft are too {'hot' if lines.z('surprisal_draft') > 0 else 'cold'} (surprisal "
        f"{lines.size('surprisal_draft', ' nat', sign=True)}){lines.clean}: look at the temperature and filters of "
        "the rows that drafts are verified on",
        ("surprisal_draft", "bias*", "lag_*", *SHAPE),
    )


def own_draws(lines: Lines) -> Said | None:
    names = lines.matching("surprisal_bonus", "surprisal_plain")
    if not names:
        return None
    explained = (*names, *SHAPE, *(("support",) if Origin.BONUS in lines.off_support() else ()))
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
