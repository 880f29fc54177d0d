"""The law family on texts that stopped early: a stop is decided by what was put out, so every test keeps its level."""

from __future__ import annotations

import numpy as np

from equivtest.stats.law import LawResult, law_family
from equivtest.stats.scored import Ints, ScoredTokens
from tests.stats.law_sampler import CORRECT, Fault, make_world, simulate


def cut_after(tokens: ScoredTokens, stops: np.ndarray) -> ScoredTokens:
    """The samples up to their first entry of `stops` (bool [num_tokens]), that one included."""
    start = np.maximum.accumulate(np.where(tokens.continues, 0, np.arange(tokens.num_tokens)))
    before: Ints = np.cumsum(stops) - stops
    return tokens.take(before == before[start])


def results(num_runs: int, *, fault: Fault = CORRECT, foresight: bool = False) -> list[LawResult]:
    """Runs of texts that stop at two of twelve tokens; with foresight, before any token of probability below .1."""
    simulation = simulate(make_world(1), num_runs, fault=fault, samples_per_group=120, max_draft=2, seed=81)
    family = []
    for index in range(num_runs):
        tokens = simulation.replication(index)
        stops = np.isin(tokens.token_id, (3, 7))
        if foresight:
            stops = np.append((tokens.p_token[1:] < 0.1) & tokens.continues[1:], False)
        ragged = cut_after(tokens, stops)
        lengths = np.bincount(np.cumsum(~ragged.continues) - 1)
        assert lengths.min() < lengths.max()
        family.append(law_family(ragged, "on"))
    return family


def test_a_correct_decoder_that_stops_is_stopped_no_more_often() -> None:
    """100 correct runs at 1 %: six or more are flagged once in 1,900 draws. The seed is fixed."""
    flagged = sum(bool(result.flagged()) for result in results(100))
    assert flagged <= 5


def test_a_fault_in_texts_that_stop_is_found_and_so_is_a_stop_that_knows_what_would_come() -> None:
    """Drafts kept too often by .3, and texts that stop before a rare token: in at least 19 of 20 runs each."""
    assert sum(bool(result.flagged()) for result in results(20, fault=Fault(epsilon=0.3))) >= 19
    assert sum(bool(result.flagged()) for result in results(20, foresight=True)) >= 19
