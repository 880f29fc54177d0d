"""One A/A replication of every family: what each of its tests says about a correct synthetic decoder, at every level.

A protocol is what a user runs, with fewer cells: the prompts, positions and seeds of the smoke budget, or the seeds of
the gate where a test leans on their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from equivtest.bench.replications import Outcome, Replicate
from equivtest.bench.synthetic import Decoded, Floats, Ints, SyntheticModel, decode, synthetic_model
from equivtest.records import Evidence
from equivtest.stats.joint import joint_family
from equivtest.stats.law import law_family
from equivtest.stats.law_difference import on_minus_off
from equivtest.stats.law_martingale import MAX_WEIGHT
from equivtest.stats.marginal import Statistic, marginal_family
from equivtest.stats.scored import ScoredTokens
from equivtest.stats.sequential import bias_sequence, e_process

LEVELS = (0.05, 0.01, 0.001)

MAX_DRAFT = 3
_MODEL_SEED = 2026


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of tests and what is known of their levels."""

    replicate: Replicate
    """A fresh A/A run to whether each test that it allows rejected, at each of LEVELS."""
    upper: frozenset[str]
    """Tests whose level is a bound: those on small counts, whose p-values are coarse, those corrected for their number
    and those that may be looked at any time. The others must have their level."""
    protocol: str
    """What one replication is, in words."""


def _outcome(p_value: float) -> Outcome:
    # p = (b + 1) / (B + 1) may equal a level, which must not be lost to rounding.
    return np.array([p_value <= level * (1 + 1e-12) for level in LEVELS])


def _outcomes(evidence: Iterable[Evidence]) -> dict[str, Outcome]:
    return {item.name: _outcome(item.p_value) for item in evidence}


@cache
def model(num_prompts: int, num_positions: int, sampled_draft: bool = False) -> SyntheticModel:
    """The model of a protocol: the same one in every replication and process."""
    return synthetic_model(num_prompts, num_positions, sampled_draft=sampled_draft, seed=_MODEL_SEED)


def cells(arm: Decoded) -> list[Ints]:
    """One array of tokens a (prompt, position)."""
    return [cell for samples in arm.tokens for cell in np.ascontiguousarray(samples.T)]


def _both_arms(
    num_prompts: int, num_positions: int, num_seeds: int, rng: np.random.Generator
) -> tuple[Decoded, Decoded]:
    used = model(num_prompts, num_positions)
    return decode(used, num_seeds, rng=rng), decode(used, num_seeds, max_draft=MAX_DRAFT, rng=rng)


def _marginal(
    statistic: Statistic, exact: bool, num_seeds: int, num_permutations: int | None, rng: np.random.Generator
) -> dict[str, Outcome]:
    off, on = _both_arms(1 if num_permutations else 2, 16, num_seeds, rng)
    result = marginal_family(
        cells(off),
        cells(on),
        statistic=statistic,
        exact=exact,
        num_permutations=num_permutations,
        num_tv_permutations=1,
        rng=rng,
    )
    # One cell a replication, so that replications are independent: chance says which, of those with two bins or more.
    cell = rng.choice(np.flatnonzero(result.num_bins > 1))
    return {"cell": _outcome(result.p_value[cell]), "any cell (BH)": _outcome(result.q_value.min())}


def _joint(rng: np.random.Generator) -> dict[str, Outcome]:
    off, on = _both_arms(2, 16, 64, rng)
    # The smallest p-value that Holm over four can adjust to .001.
    result = joint_family(list(off.tokens), list(on.tokens), num_permutations=3_999, level=LEVELS[-1], rng=rng)
    return {test.name: _outcome(test.p_value) for test in result.tests} | {"any (Holm)": _outcome(result.p_value)}


def _law(sampled_draft: bool, rng: np.random.Generator) -> dict[str, Outcome]:
    on = decode(model(2, 24, sampled_draft), 128, max_draft=MAX_DRAFT, rng=rng)
    result = law_family(on.scored, "on")
    return _outcomes(result.evidence) | {"any (Holm)": _outcome(float(result.adjusted.min()))}


def _law_difference(rng: np.random.Generator) -> dict[str, Outcome]:
    off, on = _both_arms(2, 16, 256, rng)
    return _outcomes(on_minus_off(on.scored, off.scored, "on minus off"))


def _sequential(rng: np.random.Generator) -> dict[str, Outcome]:
    tokens = _both_arms(2, 24, 64, rng)[1].scored
    weight = _bias_weights(tokens)
    deviation = weight * (tokens.q_token - tokens.q_mean)
    differences = np.stack([deviation, tokens.pit_rank - 0.5, tokens.pit_vocab - 0.5])
    bounds = np.full_like(differences, 0.5)
    bounds[0] = weight * np.maximum(tokens.q_mean, 1 - tokens.q_mean)
    wealth = e_process(len(differences)).update(differences, bounds)
    used = weight > 0
    states = (
        bias_sequence(alpha=level).update((tokens.q_token - tokens.q_mean)[used], tokens.q_variance[used], weight[used])
        for level in LEVELS
    )
    return {
        "e_process": _outcome(wealth.p_value),
        "bias_sequence": np.array([state.decision == "different" for state in states]),
    }


def _bias_weights(tokens: ScoredTokens) -> Floats:
    """Those of the bias test: 1 / Var f with its cap, on draft slots with an open outcome; 0 elsewhere."""
    chosen = tokens.has_draft & (tokens.q_variance > 0)
    return chosen / np.maximum(tokens.q_variance, 1 / MAX_WEIGHT)


_MARGINAL_BOUNDS = frozenset({"cell", "any cell (BH)"})
_LAW_BOUNDS = frozenset({"duplicates", "support", "residual", "any (Holm)"})

FAMILIES: Mapping[str, Family] = {
    "marginal chi2": Family(
        replicate=partial(_marginal, "chi2", False, 256, None),
        upper=_MARGINAL_BOUNDS,
        protocol="2 prompts, 16 positions, 256 seeds an arm",
    ),
    "marginal chi2_exact": Family(
        replicate=partial(_marginal, "chi2", True, 64, 15_999),
        upper=_MARGINAL_BOUNDS,
        protocol="1 prompt, 16 positions, 64 seeds an arm, 15,999 permutations",
    ),
    "marginal max_z": Family(
        replicate=partial(_marginal, "max_z", False, 64, 15_999),
        upper=_MARGINAL_BOUNDS,
        protocol="1 prompt, 16 positions, 64 seeds an arm, 15,999 permutations",
    ),
    "joint": Family(
        replicate=_joint,
        upper=frozenset({"any (Holm)"}),
        protocol="2 prompts, 16 positions, 64 seeds an arm, 3,999 permutations",
    ),
    "law": Family(replicate=partial(_law, False), upper=_LAW_BOUNDS, protocol="2 prompts, 24 positions, 128 seeds"),
    "law, sampled drafts": Family(
        replicate=partial(_law, True), upper=_LAW_BOUNDS, protocol="2 prompts, 24 positions, 128 seeds"
    ),
    "law, on minus off": Family(
        replicate=_law_difference, upper=frozenset(), protocol="2 prompts, 16 positions, 256 seeds an arm"
    ),
    "sequential": Family(
        replicate=_sequential,
        upper=frozenset({"e_process", "bias_sequence"}),
        protocol="2 prompts, 24 positions, 64 seeds, looked at after every token",
    ),
}
"""Every family by name."""
