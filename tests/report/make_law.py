"""Synthetic evidence against the exact law, of the shape and size of a gate run."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pandas as pd

from equivtest.records import Word
from equivtest.report.data import EVIDENCE_COLUMNS, PIT_COLUMNS, POWER_COLUMNS, QUANTILE_COLUMNS

NUM_TOKENS = 65_536
NUM_BINS = 20
MARGINS = {"bias": 0.01, "rank": 0.02, "vocab": 0.02}
PLANTED = 0.1

_DRAFT_TESTS = {
    "bias": 0.0014,
    **{f"bias_slot_{slot}": 0.0024 + 0.0006 * slot for slot in range(4)},
    "surprisal_draft": 0.006,
    "surprisal_bonus": 0.014,
    "lag_accepted": 0.009,
    "lag_recovered": 0.011,
    "lag_bonus": 0.018,
}
"""Tests that need drafts, and the standard error of their estimates."""
_OTHER_TESTS = {"surprisal_plain": 0.005, "rank": 0.0, "vocab": 0.0, "rows": 0.004, "duplicates": 0.0, "support": 0.0}
_ORDER = (*list(_DRAFT_TESTS)[:7], "surprisal_plain", "rank", "vocab", *list(_DRAFT_TESTS)[7:], "rows", "duplicates")
ALL_TESTS = (*_ORDER, "support")


def law_evidence(configs: tuple[str, ...] = ("topp95",), *, bias: float = 0.0, seed: int = 1) -> pd.DataFrame:
    """Arm off without drafts, on with that acceptance bias, on_null without, biased with the planted one."""
    rng = np.random.default_rng(seed)
    rows = []
    for config in configs:
        for arm, shift in (("off", None), ("on", bias), ("on_null", 0.0), ("biased", PLANTED)):
            for name in ALL_TESTS:
                if name in _OTHER_TESTS if shift is None else name != "surprisal_plain":
                    rows.append(_law_row(rng, name, f"{arm} / {config}", shift or 0.0, MARGINS.get(name)))
        for name in ("surprisal_draft", "surprisal_bonus", "rank", "vocab"):
            rows.append(_law_row(rng, name, f"on minus off / {config}", bias, None))
    return pd.DataFrame(rows, columns=list(EVIDENCE_COLUMNS))


def _law_row(
    rng: np.random.Generator, name: str, stratum: str, shift: float, margin: float | None
) -> dict[str, object]:
    error = {**_DRAFT_TESTS, **_OTHER_TESTS}[name]
    ends: tuple[float | None, float | None]
    if name in {"rank", "vocab"}:
        estimate = 0.003 + float(rng.exponential(0.001)) + 0.4 * shift * (name == "rank")
        z, ends = estimate / 0.004, (max(0.0, estimate - 0.0053), estimate + 0.0053)
    elif error:
        moved = shift * {"bias": 1.0, "surp": -0.8}.get(name[:4], 0.0) * (name != "surprisal_bonus")
        estimate = moved + float(rng.normal(0, error))
        z, ends = estimate / error, (estimate - 1.96 * error, estimate + 1.96 * error)
    else:
        estimate, z, ends = 0.0, 0.0, (None, None)
    p_value = 2 * NormalDist().cdf(-abs(z))
    return {
        "family": "law",
        "name": name,
        "stratum": stratum,
        "statistic": z,
        "df": 19.0 if margin and name != "bias" else None,
        "p_value": p_value,
        "adjusted_p": min(1.0, 16 * p_value),
        "estimate": estimate,
        "ci_low": ends[0],
        "ci_high": ends[1],
        "margin": margin,
        "num_tokens": NUM_TOKENS,
        "method": "martingale z on the chosen tokens; estimate: mean excess over what the law gives",
    }


def joint_evidence(configs: tuple[str, ...] = ("topp95",), *, bias: float = 0.0) -> pd.DataFrame:
    rows = [
        {
            "family": "joint",
            "name": name,
            "stratum": f"{comparison} / {config}",
            "statistic": 14.2 if shift else 0.4,
            "df": None,
            "p_value": 1e-4 if shift else 0.35,
            "adjusted_p": 4e-4 if shift else 0.9,
            "estimate": shift,
            "ci_low": None,
            "ci_high": None,
            "margin": None,
            "num_tokens": 2 * NUM_TOKENS,
            "method": "permutation of whole samples, 9,999 draws",
        }
        for config in configs
        for comparison, shift in (("off vs on", bias), ("on vs on_null", 0.0), ("off vs biased", PLANTED))
        for name in ("mode", "tree_g", "collisions", "mmd")
    ]
    return pd.DataFrame(rows, columns=list(EVIDENCE_COLUMNS))


def pit_histograms(configs: tuple[str, ...] = ("topp95",), *, seed: int = 2) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    expected = NUM_TOKENS / NUM_BINS
    half = 1.96 * (expected * (1 - 1 / NUM_BINS)) ** 0.5
    rows = []
    for config in configs:
        for arm, tilt in (("off", 0.0), ("on", 0.0), ("on_null", 0.0), ("biased", 0.12)):
            for order in ("rank", "vocab"):
                shares = 1 + tilt * np.linspace(1, -1, NUM_BINS) * (order == "rank")
                counts = rng.multinomial(NUM_TOKENS, shares / shares.sum())
                rows += [
                    (config, arm, order, index, int(count), expected, expected - half, expected + half)
                    for index, count in enumerate(counts)
                ]
    return pd.DataFrame(rows, columns=list(PIT_COLUMNS))


def quantiles(cells: pd.DataFrame) -> pd.DataFrame:
    """Of the p-values of a table of cells; the band is that of a uniform order statistic, roughly."""
    frames = []
    for comparison, group in cells.groupby("comparison", sort=False):
        observed = np.sort(group["p_value"].to_numpy(dtype=float))
        expected = (np.arange(len(observed)) + 0.5) / len(observed)
        spread = np.exp(1.96 / np.sqrt(np.arange(len(observed)) + 1.0) * (1 - expected))
        frames.append(
            pd.DataFrame(
                {
                    "comparison": comparison,
                    "expected": expected,
                    "observed": observed,
                    "low": expected / spread,
                    "high": np.minimum(1.0, expected * spread),
                },
                columns=list(QUANTILE_COLUMNS),
            )
        )
    return pd.concat(frames)


def power_curves(configs: tuple[str, ...] = ("topp95",)) -> pd.DataFrame:
    normal = NormalDist()
    rows = [
        (config, test, bias, normal.cdf(bias / error - 2.6) + normal.cdf(-bias / error - 2.6))
        for config in configs
        for test, error in (("law", 0.0014), ("neyman_pearson", 0.0012))
        for bias in (np.arange(41) * 0.0005).tolist()
    ]
    return pd.DataFrame(rows, columns=list(POWER_COLUMNS))


def diagnosis(word: Word) -> tuple[str, ...]:
    if word is not Word.DIFFERENT:
        return ()
    return (
        "Acceptance is inflated by 0.021 (95 % CI 0.018 to 0.024) in slots 0-3; bonus and plain tokens follow the law: "
        "look at the acceptance test.",
        "Coins are shared between a recovery and the next acceptance: look at how the random stream is advanced.",
    )
