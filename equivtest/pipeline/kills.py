"""What each family of evidence says of one decoder's samples, and how few of them it needs to say so."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from equivtest.errors import InsufficientSamples
from equivtest.pipeline.families import Tokens, generator
from equivtest.pipeline.law_input import logprob_tolerance, read_scored_tokens
from equivtest.pipeline.one_arm import shards_of, token_grids
from equivtest.protocol.plan import Protocol
from equivtest.records import KILL_LEVEL, Arm, Evidence, Family, Kill
from equivtest.stats.joint import joint_family
from equivtest.stats.law import law_family
from equivtest.stats.logprobs import LogprobTolerance
from equivtest.stats.marginal import marginal_family
from equivtest.stats.multiplicity import holm
from equivtest.stats.scored import ScoredTokens

Result = TypeVar("Result")

_SMALLEST = 8
"""Seeds a prompt below which nothing is tried."""

_FAMILY_OF = {
    "support": Family.SUPPORT,
    "residual": Family.SUPPORT,
    "duplicates": Family.DUPLICATES,
    "logprobs": Family.LOGPROBS,
    "replay": Family.REPLAY,
    "drafts": Family.DRAFTS,
    "greedy": Family.IDENTITY,
}
"""Family of the tests that have one of their own; the others of the law are Family.LAW."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What the samples of one decoder say."""

    kills: tuple[Kill, ...]
    law: tuple[Evidence, ...]
    """Lines of the law family with adjusted p-values."""
    joint: tuple[Evidence, ...]


def judge(folder: Path, plain: Path | None, protocol: Protocol, config: str, arm: Arm) -> Judgement:
    """Every family on the samples of `arm` under `folder`, against plain decoding under `plain` where there is one.

    protocol: names the samples and seeds the permutations. Raises InvalidShard, MissingSamples.
    """
    scored = read_scored_tokens(folder, [shards_of(protocol, arm, config)], protocol.num_positions)
    on = token_grids(folder, protocol, arm, config)
    off = None if plain is None else token_grids(plain, protocol, Arm.OFF, config)
    look = partial(_judge_at, protocol, config, scored, logprob_tolerance(folder), off, on)
    whole = look(protocol.num_seeds)
    sizes = {family: protocol.num_seeds for family, found in whole.found.items() if found}
    num_seeds = protocol.num_seeds // 2
    still = set(sizes)
    while still and num_seeds >= _SMALLEST:
        smaller = look(num_seeds, only=frozenset(still))
        still = {family for family in still if smaller.found.get(family, False)}
        sizes |= dict.fromkeys(still, num_seeds)
        num_seeds //= 2
    a_seed = len(protocol.prompts) * protocol.num_positions
    kills = tuple(
        Kill(
            family=family,
            test=test,
            p_value=p_value,
            num_tokens=sizes[family] * a_seed if family in sizes else None,
        )
        for family, (test, p_value) in whole.smallest.items()
    )
    return Judgement(kills=kills, law=whole.law, joint=whole.joint)


def identity_kills(lines: Sequence[Evidence]) -> tuple[Kill, ...]:
    """The same of the checks that generate for themselves, lines of one family adjusted for their number."""
    families = [family_of(line.name) for line in lines]
    adjusted = {
        line.name: min(1.0, line.p_value * families.count(family)) for line, family in zip(lines, families, strict=True)
    }
    num_tokens = {line.name: line.num_tokens for line in lines}
    return tuple(
        Kill(
            family=family,
            test=test,
            p_value=p_value,
            num_tokens=num_tokens[test] if p_value <= KILL_LEVEL else None,
        )
        for family, (test, p_value) in _smallest(adjusted).items()
    )


def family_of(test: str) -> Family:
    """The family under which a test of the law or identity family counts."""
    return _FAMILY_OF.get(test, Family.LAW)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """All families on the first so many seeds."""

    smallest: Mapping[Family, tuple[str, float]]
    law: tuple[Evidence, ...]
    joint: tuple[Evidence, ...]

    @property
    def found(self) -> dict[Family, bool]:
        return {family: p_value <= KILL_LEVEL for family, (_, p_value) in self.smallest.items()}


_LAW_FAMILIES = frozenset({Family.LAW, Family.SUPPORT, Family.DUPLICATES, Family.LOGPROBS})


def _judge_at(
    protocol: Protocol,
    config: str,
    scored: ScoredTokens,
    tolerance: LogprobTolerance,
    off: Sequence[Tokens] | None,
    on: Sequence[Tokens],
    num_seeds: int,
    only: frozenset[Family] = frozenset(Family),
) -> _Look:
    smallest: dict[Family, tuple[str, float]] = {}
    law: tuple[Evidence, ...] = ()
    joint: tuple[Evidence, ...] = ()

    def rng(name: str) -> np.random.Generator:
        return generator(protocol.run_seed, "controls", name, config, num_seeds)

    if off is not None:
        ours, theirs = ([grid[:num_seeds] for grid in grids] for grids in (on, off))
        if Family.MARGINAL in only:
            cells = [[column for grid in grids for column in grid.T] for grids in (theirs, ours)]
            marginal = _tried(lambda: marginal_family(*cells, rng=rng("marginal")))
            if marginal is not None:
                smallest[Family.MARGINAL] = "cell", float(marginal.q_value.min())
        if Family.JOINT in only:
            whole = _tried(lambda: joint_family(theirs, ours, rng=rng("joint")))
            if whole is not None:
                joint = tuple(whole.evidence(config))
                smallest |= {Family.JOINT: min(((line.name, line.p_value) for line in joint), key=lambda one: one[1])}
    if only & _LAW_FAMILIES:
        seeds = scored.sample & 0xFFFF_FFFF  # see read_scored_tokens
        tokens = scored if num_seeds == protocol.num_seeds else scored.take(seeds < num_seeds)
        result = _tried(lambda: law_family(tokens, config, tolerance=tolerance))
        if result is not None:
            adjusted = holm(np.array([line.p_value for line in result.evidence])).tolist()
            lines = list(zip(result.evidence, adjusted, strict=True))
            law = tuple(dataclasses.replace(line, adjusted_p=p_value) for line, p_value in lines)
            smallest |= _smallest({line.name: p_value for line, p_value in lines})
    return _Look(smallest=smallest, law=law, joint=joint)


def _smallest(p_values: Mapping[str, float]) -> dict[Family, tuple[str, float]]:
    """The most significant test of every family."""
    smallest: dict[Family, tuple[str, float]] = {}
    for test, p_value in p_values.items():
        family = family_of(test)
        if family not in smallest or p_value < smallest[family][1]:
            smallest[family] = test, p_value
    return smallest


def _tried(family: Callable[[], Result]) -> Result | None:
    """None where there is too little data to say anything."""
    try:
        return family()
    except InsufficientSamples:
        return None
