"""From failed tests to findings: which stage is wrong, by how much, how sure that is, and what to run next."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from equivtest.battery.acceptance_rules import explain_acceptance
from equivtest.battery.contract import Breach
from equivtest.battery.evidence import ALL
from equivtest.battery.judge import Judged
from equivtest.battery.last_laws import coin_of_the_decision, explain_last
from equivtest.battery.report import LEVEL, Finding
from equivtest.records import Evidence

_DENSE, _ONE_HOT = "dense drafts", "one-hot drafts"

_NEXT: Mapping[str, str] = {
    "contract": "mend the shape of the output first: rows that break it are left out of every other test",
    "accept": "look at the comparison u < p/q, at which p, q and u it reads, and run --only random --only close "
    "--budget audit for a closer estimate",
    "recover": "look at the residual max(p - q, 0) of the first rejected slot and at its draw, and run --only random "
    "--only disjoint",
    "bonus": "look at which row of p the last draw reads, which is row num_draft, and run --only random",
    "plain": "look at rows without drafts, which draw from row 0 of p, and run --only random",
    "count": "commit on the number of accepted drafts before the first rejection",
    "coins": "look at how the random stream moves on between calls, slots and rows, and run --only random",
    "seeds": "look at how a row's seed reaches its draws",
    "output": "run --only random --budget audit: it is not clear which stage does it",
}


def findings(breaches: Sequence[Breach], evidence: Sequence[Evidence], judged: Sequence[Judged]) -> list[Finding]:
    """Everything that is wrong, causes before consequences. evidence has its adjusted p-values."""
    failed = [item for item in evidence if item.adjusted_p is not None and item.adjusted_p <= LEVEL]
    if any(breach.unreadable for breach in breaches):
        return [*_breaches([breach for breach in breaches if breach.unreadable])]
    certain, coins = [*_breaches(breaches)], [*_coins(failed)]
    if any(_repeats(item) for item in failed):
        return certain + coins  # every other test counts rows and rounds as independent
    found = [
        *certain,
        *_acceptance(failed, judged),
        *_last(failed, judged, "recovered", "recover"),
        *_last(failed, judged, "bonus", "bonus"),
        *_last(failed, judged, "plain", "plain"),
        *coins,
    ]
    return found or [*_outputs(failed)]


def _breaches(breaches: Sequence[Breach]) -> Iterator[Finding]:
    for name, what in dict.fromkeys((breach.name, breach.what) for breach in breaches):
        same = [breach for breach in breaches if (breach.name, breach.what) == (name, what)]
        count, of = sum(b.count for b in same), sum(b.of for b in same)
        stage = same[0].stage
        yield Finding(
            stage=stage,
            what=f"{count:,} of {of:,} rows {what} ({same[0].where})",
            sure="certain: no right sampler does it once",
            then=_NEXT[stage],
        )


def _acceptance(failed: Sequence[Evidence], judged: Sequence[Judged]) -> Iterator[Finding]:
    of_stage = [item for item in failed if item.name.startswith("acceptance")]
    if not of_stage:
        return
    by_stratum = {item.stratum: item for item in of_stage if item.name == "acceptance"}
    kinds = [
        (words, one_hot)
        for words, one_hot in ((_DENSE, False), (_ONE_HOT, True))
        if _touches(by_stratum, judged, one_hot, words)
    ]
    slots = sorted(int(item.name.rsplit("_", 1)[1]) for item in of_stage if item.name != "acceptance")
    for words, one_hot in kinds or [(ALL, False)]:
        cases = [
            item for s, item in by_stratum.items() if s in {j.case.name for j in judged if j.case.one_hot == one_hot}
        ]
        shown = by_stratum.get(words) or min(cases or of_stage, key=lambda item: item.p_value)
        rule = explain_acceptance(judged, one_hot=one_hot)
        where = words if shown.stratum == words else f"{words} ({shown.stratum})"
        at = f", seen at slots {', '.join(map(str, slots))}" if slots and len(kinds) == 1 else ""
        yield Finding(
            stage="accept",
            what=f"acceptance of {where} is {_by_how_much(shown)}{at}" + (f"; what fits: {rule}" if rule else ""),
            sure=_sure(shown),
            then=_NEXT["accept"],
        )


def _touches(by_stratum: Mapping[str, Evidence], judged: Sequence[Judged], one_hot: bool, words: str) -> bool:
    return words in by_stratum or any(j.case.name in by_stratum for j in judged if j.case.one_hot == one_hot)


def _by_how_much(item: Evidence) -> str:
    excess, interval = item.estimate or 0.0, f"{item.ci_low:+.4f} to {item.ci_high:+.4f}"
    return f"too {'high' if excess > 0 else 'low'} by {abs(excess):.4f} (95 % interval of the excess {interval})"


def _last(failed: Sequence[Evidence], judged: Sequence[Judged], kind: str, stage: str) -> Iterator[Finding]:
    of_stage = [item for item in failed if item.name in (f"{kind}_vocab", f"{kind}_rank")]
    coin = [item for item in failed if item.name == f"coin_accept_{kind}"]
    if not of_stage and not coin:
        return
    law = {"recovered": "the residual", "bonus": "row num_draft of p", "plain": "row 0 of p"}[kind]
    subject = {"recovered": "recovered tokens", "bonus": "bonus tokens", "plain": "tokens of rows without drafts"}[kind]
    for words, one_hot in ((_DENSE, False), (_ONE_HOT, True)):
        names = {j.case.name for j in judged if j.case.one_hot == one_hot}
        own = [item for item in of_stage if item.stratum == words or item.stratum in names]
        if not own and not (coin and not one_hot):
            continue
        pooled = [item for item in own if item.stratum == words] or own or coin
        shown = min(pooled, key=lambda item: item.p_value)
        rule = explain_last(judged, kind, one_hot=one_hot) if kind != "plain" else None
        if rule is None and coin and coin_of_the_decision(judged, kind, one_hot=one_hot):
            rule = "the coin of the last accept decision draws this token too"
        where = words if shown.stratum in (words, ALL) else f"{words} ({shown.stratum})"
        distance = f", by {shown.estimate:.3f} of the distribution function" if own else ""
        yield Finding(
            stage=stage,
            what=f"{subject} of {where} do not follow {law}{distance}" + (f"; what fits: {rule}" if rule else ""),
            sure=_sure(shown),
            then=_NEXT[stage],
        )


_PAIR = r"coin_(round|row)_([a-z0-9]+)_([a-z0-9]+)_row([+-]\d+)"
_ACROSS = "coins are shared across the batch"
_FEATURES: Mapping[str, str] = {
    "accept0": "the first acceptance",
    "accept1": "the second acceptance",
    "recovered": "the recovered token",
    "bonus": "the bonus token",
    "last": "the last token",
    "rank": "the rank of the last token",
}


def _coins(failed: Sequence[Evidence]) -> Iterator[Finding]:
    """Coins that two draws share: the most certain pair of each kind."""
    told: set[str] = set()
    for item in sorted(failed, key=lambda item: item.p_value):
        sentence, kind = _coin_words(item), "_".join(item.name.split("_")[:2])
        if sentence and kind not in told:
            told.add(kind)
            yield Finding(
                stage="coins",
                what=f"{sentence} (correlation {item.estimate:+.3f}, {item.stratum})",
                sure=_sure(item),
                then=_NEXT["coins"],
            )


def _repeats(item: Evidence) -> bool:
    """Whether a draw comes again as it was, in another row or round."""
    pair = re.fullmatch(_PAIR, item.name)
    return pair is not None and (pair[1] == "row" or pair[2] == pair[3])


def _coin_words(item: Evidence) -> str:
    pair = re.fullmatch(_PAIR, item.name)
    if pair is not None:
        first, second, shift = _FEATURES[pair[2]], _FEATURES[pair[3]], int(pair[4])
        row = "the same row" if shift == 0 else f"the row {abs(shift)} {'further' if shift > 0 else 'before'}"
        if pair[1] == "round":
            return f"coins are shared between rounds: {first} of a round tells {second} of the next, in {row}"
        return f"{_ACROSS}: {first} of a row tells {second} of {row}"
    if item.name.startswith("coin_streams_"):
        told = _FEATURES[item.name.removeprefix("coin_streams_")]
        return f"streams of different seeds share coins: {told} of one tells that of the other"
    return ""


def _outputs(failed: Sequence[Evidence]) -> Iterator[Finding]:
    of_stage = [item for item in failed if item.name.startswith("output_")]
    if of_stage:
        worst = min(of_stage, key=lambda item: item.p_value)
        yield Finding(
            stage="output",
            what=f"tokens put out at slot {worst.name.rsplit('_', 1)[1]} do not follow p, by {worst.estimate:.3f} of "
            "the distribution function",
            sure=_sure(worst),
            then=_NEXT["output"],
        )


def _sure(item: Evidence) -> str:
    p = item.adjusted_p or 0.0
    p_words = "below 1e-300" if p < 1e-300 else f"{p:.1e}"
    return f"a correct sampler shows this with probability {p_words} over all tests ({item.num_tokens:,} draws)"
