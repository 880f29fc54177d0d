"""What the report plots, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from equivtest.errors import StatisticsError
from equivtest.pipeline.side_by_side import side_by_side
from equivtest.records import Arm
from equivtest.report.data import EXPECTED_COLUMNS, PIT_COLUMNS, POWER_COLUMNS, QUANTILE_COLUMNS
from equivtest.stats.bands import binomial_band, sum_band, uniform_quantile_band
from equivtest.stats.law_martingale import has_certain_drafts
from equivtest.stats.law_uniform import NUM_BINS, pit_histogram
from equivtest.stats.marginal import MarginalResult
from equivtest.stats.power import bias_test_power, neyman_pearson_power, pilot
from equivtest.stats.scored import ScoredTokens
from equivtest.verdict.findings import Cell
from equivtest.verdict.law_findings import LAW_LEVEL

_BIASES = np.geomspace(5e-4, 0.1, 24)


def cells_frame(comparison: str, cells: Sequence[Cell], result: MarginalResult | None) -> pd.DataFrame:
    """One row per cell, in their order."""
    columns: dict[str, object] = {
        "comparison": [str(comparison)] * len(cells),
        "config": [config for config, _, _ in cells],
        "prompt_id": [prompt_id for _, prompt_id, _ in cells],
        "position": [position for _, _, position in cells],
    }
    for column, field in (
        ("num_a", "num_off"), ("num_b", "num_on"), ("num_bins", "num_bins"), ("statistic", "statistic"), ("df", "df"),
        ("p_value", "p_value"), ("q_value", "q_value"), ("rejected", "rejected"), ("tv", "tv"),
        ("tv_null_mean", "tv_null_mean"), ("tv_null_q975", "tv_null_q975"), ("tv_excess", "tv_excess"),
    ):  # fmt: skip
        columns[column] = getattr(result, field) if result is not None else []
    return pd.DataFrame(columns)


def quantiles_frame(comparison: str, p_values: np.ndarray) -> pd.DataFrame:
    """The sorted p-values of the cells that were tested against uniform quantiles. Cells of one bin have p = 1 by rule
    and no place among quantiles."""
    observed = np.sort(p_values[p_values < 1])
    expected, low, high = uniform_quantile_band(len(observed))
    values = {"expected": expected, "observed": observed, "low": low, "high": high}
    return pd.DataFrame({"comparison": [str(comparison)] * len(observed), **values}, columns=list(QUANTILE_COLUMNS))


def pit_frame(config: str, arm: Arm, tokens: ScoredTokens) -> pd.DataFrame:
    """Histograms of both transforms of one arm."""
    low, high = binomial_band(tokens.num_tokens, 1 / NUM_BINS)
    frames = [
        pd.DataFrame(
            {
                "config": config,
                "arm": str(arm),
                "order": order,
                "bin": np.arange(NUM_BINS),
                "count": pit_histogram(values),
                "expected": tokens.num_tokens / NUM_BINS,
                "low": low,
                "high": high,
            },
            columns=list(PIT_COLUMNS),
        )
        for order, values in (("rank", tokens.pit_rank), ("vocab", tokens.pit_vocab))
    ]
    return pd.concat(frames, ignore_index=True)


def expected_frame(config: str, arm: Arm, tokens: ScoredTokens) -> pd.DataFrame:
    """What share of the drafts reached at each slot the law accepts: the mean of p(draft). Empty where drafts were
    sampled: what they are accepted with then depends on all of q."""
    rows: list[tuple[object, ...]] = []
    if tokens.has_draft.any() and has_certain_drafts(tokens):
        for slot in np.unique(tokens.slot[tokens.has_draft]).tolist():
            p_draft = tokens.q_mean[tokens.has_draft & (tokens.slot == slot)]
            rows.append((str(arm), config, slot, float(p_draft.mean()), *sum_band(p_draft)))
    return pd.DataFrame(rows, columns=list(EXPECTED_COLUMNS))


def power_frame(scored: Mapping[str, ScoredTokens], num_seeds: int, num_tests: int) -> pd.DataFrame:
    """What acceptance bias this run could have seen, by config: the bias test at the level that Holm leaves it at
    worst, and the best test there is at the same level. Empty for drafts of a sampled drafter, whose power has no
    closed form here."""
    alpha = LAW_LEVEL / max(num_tests, 1)

    def rows(config: str) -> list[tuple[str, str, float, float]]:
        tokens = scored[config]
        p_draft = tokens.q_mean[tokens.has_draft]
        if not (len(p_draft) and has_certain_drafts(tokens)):
            return []
        try:
            own = pilot(p_draft, num_seeds)
        except StatisticsError:
            return []  # greedy decoding leaves nothing open

        return [
            (config, test, bias, power(own, bias, alpha=alpha))
            for bias in _BIASES.tolist()
            for test, power in (("law", bias_test_power), ("neyman_pearson", neyman_pearson_power))
        ]

    every = [row for own in side_by_side(rows, scored) for row in own]
    return pd.DataFrame(every, columns=list(POWER_COLUMNS))
