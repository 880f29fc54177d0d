"""A sequential run's state: what the tokens of arm on have shown so far, at a level that holds whenever one looks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from equivtest.protocol.plan import Protocol
from equivtest.records import Arm, Evidence
from equivtest.stats.law_martingale import MAX_WEIGHT
from equivtest.stats.scored import Floats, ScoredTokens
from equivtest.stats.sequential import BiasSequence, EProcess, bias_sequence, e_process
from equivtest.verdict.facts import LAW_ROLES, Finding, Flag, Place
from equivtest.verdict.law_findings import LAW_LEVEL, law_subject

_PIT_SCALE = 12.0
"""1 over the variance of a uniform: the best bet on the scaled transform is its shift."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """The two instruments on one config."""

    wealth: EProcess
    bias: BiasSequence
    num_tokens: int

    @property
    def different(self) -> bool:
        return self.wealth.rejected or self.bias.decision == "different"

    @property
    def equivalent(self) -> bool:
        return not self.different and self.bias.decision == "equivalent"

    @property
    def decided_at(self) -> int | None:
        """Tokens of arm on after which the answer was known."""
        times = [self.wealth.crossed_at] if self.wealth.rejected else [self.bias.decided_at]
        if self.wealth.rejected and self.bias.decision == "different":
            times.append(self.bias.decided_at)
        return min((time for time in times if time is not None), default=None)


def watch(tokens: ScoredTokens, *, margin: float, num_configs: int) -> Watch:
    """All tokens of arm on of one config, in the order in which they were collected.

    The family-wise level of the law family is shared by the configs and the two instruments (Bonferroni).
    """
    alpha = LAW_LEVEL / (2 * num_configs)
    differences, bounds = _functionals(tokens)
    weight, deviation, variance = _bias_terms(tokens)
    return Watch(
        wealth=e_process(len(differences), alpha=alpha).update(differences, bounds),
        bias=bias_sequence(alpha=alpha, margin=margin).update(deviation, variance, weight),
        num_tokens=tokens.num_tokens,
    )


def watch_finding(arm: Arm, watches: Mapping[str, Watch]) -> Finding:
    """What the sequential instruments say of an arm; its flags count at once."""
    flags = [
        Flag(
            place=Place(config, test=line.name),
            p_value=line.p_value,
            effect=line.statistic if line.estimate is None else line.estimate,
            effect_by_chance=0.0,
            words=f"{line.name} after {state.decided_at:,} tokens",
        )
        for config, state in watches.items()
        if state.different
        for line in watch_evidence(config, state)
        if line.p_value <= state.wealth.alpha
    ]
    return Finding(
        family="sequential",
        role=LAW_ROLES[arm],
        subject=f"{law_subject(arm)}, token by token",
        unit="sequential tests",
        num_tests={config: len(watch_evidence(config, state)) for config, state in watches.items()},
        flagged=tuple(flags),
        smallest_p=min(line.p_value for config, state in watches.items() for line in watch_evidence(config, state)),
        level=LAW_LEVEL,
        method="betting e-process and normal-mixture confidence sequence, valid at any time, Bonferroni over configs",
        at_once=True,
    )


def watch_evidence(config: str, state: Watch) -> tuple[Evidence, ...]:
    """A line for each instrument."""
    wealth = Evidence(
        family="sequential",
        name="e_process",
        stratum=f"on / {config}",
        statistic=state.wealth.log_e,
        p_value=min(1.0, state.wealth.p_value),
        num_tokens=state.num_tokens,
        method=f"mean wealth of bets on bias, lag and both transforms, rejects at {1 / state.wealth.alpha:g}; "
        "statistic: its logarithm",
    )
    if not state.bias.weight > 0:  # nothing was open: greedy decoding, or no draft
        return (wealth,)
    low, high = state.bias.interval
    sequence = Evidence(
        family="sequential",
        name="bias_sequence",
        stratum=f"on / {config}",
        statistic=state.bias.total,
        p_value=state.bias.alpha if state.bias.decision == "different" else 1.0,
        estimate=state.bias.estimate,
        ci_low=low,
        ci_high=high,
        margin=state.bias.margin,
        num_tokens=state.num_tokens,
        method=f"confidence sequence of the bias at {1 - state.bias.alpha:.2%}, normal mixture; p: its level where it "
        "ever excluded 0, else 1",
    )
    return wealth, sequence


def progress_line(watches: Mapping[str, Watch], protocol: Protocol, budget_seeds: int) -> str:
    """How much of the budget was needed."""
    per_seed = len(protocol.prompts) * protocol.num_positions
    used, whole = (num * per_seed * len(protocol.configs) for num in (protocol.num_seeds, budget_seeds))
    times = ", ".join(
        f"{config} {'different' if state.different else 'equivalent'} after {state.decided_at:,}"
        if state.different or state.equivalent
        else f"{config} open"
        for config, state in watches.items()
    )
    return f"sequential: {used:,} of {whole:,} tokens an arm were collected ({times})"


def _functionals(tokens: ScoredTokens) -> tuple[Floats, Floats]:
    """[4, n] deviations and their bounds: bias, lag, rank and vocabulary transform."""
    weight, deviation, _ = _bias_terms(tokens)
    previous = np.concatenate([[0.5], tokens.pit_vocab[:-1]]) - 0.5
    follows = np.where(tokens.continues, previous, 0.0)
    ones = np.ones(tokens.num_tokens)
    differences = np.stack(
        [
            weight * deviation,
            weight * deviation * follows,
            _PIT_SCALE * (tokens.pit_rank - 0.5),
            _PIT_SCALE * (tokens.pit_vocab - 0.5),
        ]
    )
    return differences, np.stack([weight, weight * np.abs(follows), _PIT_SCALE / 2 * ones, _PIT_SCALE / 2 * ones])


def _bias_terms(tokens: ScoredTokens) -> tuple[Floats, Floats, Floats]:
    """Weight, deviation and variance of q(y), 0 where no draft was open."""
    chosen = tokens.has_draft & (tokens.q_variance > 0)
    variance = np.where(chosen, tokens.q_variance, 0.0)
    weight = np.where(chosen, 1.0 / np.maximum(variance, 1.0 / MAX_WEIGHT), 0.0)
    return weight, np.where(chosen, tokens.q_token - tokens.q_mean, 0.0), variance
