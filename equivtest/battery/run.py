"""The battery: play every law, judge every row, test, and say what is wrong."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import get_args

import numpy as np
import torch

from equivtest.battery.adapters import Adapter, Sampler, adapt
from equivtest.battery.evidence import evidence
from equivtest.battery.judge import Judged, judge
from equivtest.battery.laws import Case, Kind, draw_drafts, make_laws, random_orders
from equivtest.battery.plan import DEFAULT_VOCABS, cases
from equivtest.battery.play import play, row_seeds
from equivtest.battery.report import LEVEL, SamplerReport
from equivtest.battery.streams import check_edges, check_streams
from equivtest.battery.words import findings
from equivtest.errors import InvalidSetting, UnknownName
from equivtest.stats.multiplicity import holm
from equivtest.stats.sampler import smallest_bias


def check_sampler(
    sampler: Sampler,
    *,
    form: str = "equivtest",
    coins: str = "auto",
    device: str | torch.device = "cpu",
    budget: str = "gate",
    vocab: Sequence[int] = DEFAULT_VOCABS,
    only: Sequence[str] = (),
    one_hot: bool = True,
    seed: int = 0,
    name: str | None = None,
) -> SamplerReport:
    """Is `sampler` an exact rejection sampler (Leviathan et al. 2023, algorithm 1)?

    sampler: fn(draft_token_ids int64 [B, K], draft_probs float32 [B, K, V] or None for one-hot drafts, target_probs
    float32 [B, K+1, V], ...) -> integer ids [B, K+1]: accepted drafts, one recovered or bonus token, then -1; or
    (ids, emitted [B]). Its further parameters say where its randomness comes from (adapters.EquivtestForm); other call
    shapes are a `form`. vocab: vocabularies to play beside that of 16. only: kinds of laws; all by default. one_hot:
    whether it takes draft_probs=None. seed: of laws, drafts and coins; the same seed gives the same report.

    Raises UnknownName, InvalidSetting, and SamplerFailed where the function raises or returns something else.
    """
    started = time.perf_counter()
    adapter = adapt(sampler, form=form, coins=coins)
    where = _usable(device)
    if seed < 0:
        raise InvalidSetting("seed", seed, "must be at least 0")
    chosen = _cases(adapter, budget, vocab, only, one_hot)
    rng = np.random.default_rng([seed, 0])
    judged = [_play(adapter, case, where, seed, rng) for case in chosen]
    streams = check_streams(adapter, seed=seed, device=where)
    raw = [*evidence(judged), *streams.evidence]
    adjusted = holm(np.array([item.p_value for item in raw])) if raw else ()
    tested = [dataclasses.replace(item, adjusted_p=float(p)) for item, p in zip(raw, adjusted, strict=True)]
    breaches = [b for j in judged for b in j.breaches] + streams.breaches + check_edges(adapter, where, rng)
    return SamplerReport(
        sampler=name or str(getattr(sampler, "__name__", type(sampler).__name__)),
        form=form,
        coins=adapter.coins,
        device=str(where),
        budget=budget,
        seed=seed,
        findings=tuple(findings(breaches, tested, judged)),
        evidence=tuple(tested),
        num_laws=len(judged),
        num_rows=sum(j.case.num_rows for j in judged),
        num_drafts=sum(int(j.reached.sum()) for j in judged),
        smallest_bias=_smallest_bias(judged, len(tested)),
        wall_s=time.perf_counter() - started,
        notes=(*streams.notes, *_notes(adapter, one_hot)),
    )


def _usable(device: str | torch.device) -> torch.device:
    try:
        return torch.zeros(1, device=device).device
    except (AssertionError, RuntimeError) as error:  # of a torch without that device, and of one that knows no such
        raise InvalidSetting("device", str(device), f"torch cannot use it here ({error})") from error


def _cases(adapter: Adapter, budget: str, vocab: Sequence[int], only: Sequence[str], one_hot: bool) -> list[Case]:
    only = (only,) if isinstance(only, str) else only
    for kind in only:
        if kind not in get_args(Kind):
            raise UnknownName("kind of laws", kind, get_args(Kind))
    chosen = [
        case
        for case in cases(budget, vocab)
        if (not only or case.kind in only) and (one_hot or not case.one_hot) and (adapter.ragged or not case.ragged)
    ]
    if not chosen:
        raise InvalidSetting("only", tuple(only), "leaves no laws to play")
    return chosen


def _play(adapter: Adapter, case: Case, device: torch.device, seed: int, rng: np.random.Generator) -> Judged:
    laws = make_laws(case, rng)
    drafts = draw_drafts(laws, case.rounds, rng)
    seeds, orders = row_seeds(seed, case), random_orders(case, rng)
    return judge(play(adapter, case, laws, drafts, seeds=seeds, device=device, orders=orders), rng)


def _smallest_bias(judged: Sequence[Judged], num_tests: int) -> float | None:
    """The larger one of dense and of one-hot drafts; None where not even the largest bias there is would be found."""
    kinds = ([j for j in judged if j.case.one_hot == one_hot] for one_hot in (False, True))
    decisions = (np.concatenate([j.accept_prob[j.reached] for j in kind]) for kind in kinds if kind)
    found = max(smallest_bias(accept_prob, level=LEVEL / max(num_tests, 1)) for accept_prob in decisions)
    return found if found < 1 else None


def _notes(adapter: Adapter, one_hot: bool) -> list[str]:
    notes = []
    if not adapter.ragged:
        notes.append("rows of one batch with fewer drafts than K: the function takes none")
    if not adapter.draws_bonus:
        notes.append("the bonus: the function does not draw it")
    if not one_hot:
        notes.append("one-hot drafts: left out as asked")
    return notes
