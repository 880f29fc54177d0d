"""Each family of tests on a run's samples: reads what it needs, calls the statistics, and says what it still wants."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from equivtest.errors import MissingSamples
from equivtest.pipeline.analysis_options import LEVEL, AnalysisOptions
from equivtest.pipeline.law_input import logprob_tolerance, read_scored_tokens
from equivtest.pipeline.side_by_side import side_by_side
from equivtest.protocol.plan import Batch, Protocol
from equivtest.records import Arm, Comparison, Evidence
from equivtest.rng import stream_key
from equivtest.samples.keys import shard_path
from equivtest.samples.reader import read_arm_tokens
from equivtest.samples.validate import read_keyed_table
from equivtest.stats.joint import JointResult, joint_family
from equivtest.stats.law import LawResult, law_family
from equivtest.stats.logprobs import LogprobTolerance
from equivtest.stats.marginal import MarginalResult, marginal_family
from equivtest.stats.scored import ScoredTokens
from equivtest.verdict.facts import LAW_ROLES, ROLES, Confirmation, Finding, Place, Role
from equivtest.verdict.findings import Cell, confirmation, flagged_cells, flagged_strata, marginal_finding
from equivtest.verdict.joint_findings import adjusted_joint_evidence, joint_confirmation, joint_finding
from equivtest.verdict.law_findings import law_confirmation, law_finding

Tokens = npt.NDArray[np.int32]
LawEvidence = Mapping[str, tuple[Evidence, ...]]
"""Lines of one arm by config, p-values adjusted over the configs."""
Stratum = TypeVar("Stratum", bound=tuple[str, str])
Strata = Mapping[tuple[str, str], Tokens]
"""(config, prompt_id) to token ids [num_seeds, num_positions]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """Fresh seeds that a flag waits for."""

    role: Role
    arms: tuple[Arm, ...]
    strata: frozenset[tuple[str, str]]
    """(config, prompt_id) pairs."""
    scored: bool
    """Whether their law columns are wanted too."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunSamples:
    """The samples of one run, read once each."""

    run_dir: Path
    protocol: Protocol
    options: AnalysisOptions
    logprob_tolerance: LogprobTolerance
    """Of the precision that the model ran in."""
    _tokens: dict[Arm, Strata]
    _reading: Lock
    """Held while an arm is read: families are judged in several threads."""

    @classmethod
    def of(cls, run_dir: Path, protocol: Protocol, options: AnalysisOptions) -> RunSamples:
        tolerance = logprob_tolerance(run_dir)
        return cls(
            run_dir=run_dir,
            protocol=protocol,
            options=options,
            logprob_tolerance=tolerance,
            _tokens={},
            _reading=Lock(),
        )

    def law(self, tokens: ScoredTokens, stratum: str) -> LawResult:
        """The law family with the margins of the options. Raises InsufficientSamples."""
        margins = self.options.margins(self.protocol.budget)
        return law_family(tokens, stratum, margins=margins, tolerance=self.logprob_tolerance)

    @property
    def strata(self) -> tuple[tuple[str, str], ...]:
        return tuple((config, prompt.id) for config in self.protocol.configs for prompt in self.protocol.prompts)

    def tokens(self, arm: Arm) -> Strata:
        """Stage 1 of an arm. Raises MissingSamples."""
        with self._reading:
            if arm not in self._tokens:
                self._tokens[arm] = self._read(arm, self.strata, range(self.protocol.num_seeds))
            return self._tokens[arm]

    def fresh_tokens(self, arm: Arm, strata: Iterable[tuple[str, str]]) -> Strata:
        """Stage 2 of an arm, from the files of stage 2 alone: seeds that later rounds of a sequential run will want are
        not fresh. Raises MissingSamples."""
        shape = (-1, self.protocol.num_positions)
        fresh: dict[tuple[str, str], Tokens] = {}
        for stratum in strata:
            batches = list(self.protocol.confirmation_batches((arm,), frozenset([stratum])))
            self._require(batches, "samples")
            parts = [
                read_keyed_table(shard_path(self.run_dir, key), key, ["token_id"]).column(0).to_numpy().reshape(shape)
                for batch in batches
                for key in batch
            ]
            fresh[stratum] = np.concatenate(parts)
        return fresh

    def scored(self, arm: Arm, config: str) -> ScoredTokens:
        """Stage 1 of an arm with its law columns. Raises MissingSamples."""
        batches = [batch for batch in self.protocol.batches() if (batch[0].arm, batch[0].config) == (arm, config)]
        return self._read_scored(batches)

    def fresh_scored(self, arm: Arm, config: str) -> ScoredTokens:
        """Stage 2 of an arm with its law columns, every prompt. Raises MissingSamples."""
        return self._read_scored(list(self.protocol.confirmation_batches((arm,), self.whole(config))))

    def whole(self, config: str) -> frozenset[tuple[str, str]]:
        """Every stratum of a config."""
        return frozenset(stratum for stratum in self.strata if stratum[0] == config)

    def generator(self, *name: object) -> np.random.Generator:
        return generator(self.protocol.run_seed, *name)

    def _read(self, arm: Arm, strata: Iterable[tuple[str, str]], seeds: range) -> Strata:
        return {
            (config, prompt_id): read_arm_tokens(
                self.run_dir,
                arm=arm,
                config=config,
                prompt_id=prompt_id,
                seeds=seeds,
                num_positions=self.protocol.num_positions,
            )
            for config, prompt_id in strata
        }

    def _read_scored(self, batches: Sequence[Batch]) -> ScoredTokens:
        self._require(batches, "samples", "law")
        return read_scored_tokens(self.run_dir, batches, self.protocol.num_positions)

    def _require(self, batches: Sequence[Batch], *kinds: str) -> None:
        for kind in kinds:
            lacking = [k for b in batches for k in b if not shard_path(self.run_dir, k, kind=kind).exists()]
            if lacking:
                raise MissingSamples(
                    f"{kind} of {len(lacking)} shards of arm {lacking[0].arm}, config {lacking[0].config}",
                    "continue the run with --resume",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What one family said on one subject."""

    finding: Finding
    evidence: tuple[Evidence, ...]
    want: Want | None
    """Fresh seeds that its flags wait for."""


def judge_marginal(samples: RunSamples, comparison: Comparison) -> tuple[Judged, list[Cell], MarginalResult]:
    """The protocol of record on one comparison. Raises MissingSamples, StatisticsError."""
    options = samples.options
    first, second = (samples.tokens(arm) for arm in comparison.arms)
    cells = [(*stratum, position) for stratum, grid in first.items() for position in range(grid.shape[1])]
    result = judge_cells(comparison, _columns(first), _columns(second), options, samples.protocol.run_seed)
    flagged, stage_2, want = flagged_cells(result, cells), None, None
    if flagged and _confirms(samples, ROLES[comparison]):
        wanted = Want(role=ROLES[comparison], arms=comparison.arms, strata=flagged_strata(result, cells), scored=False)

        def again() -> Confirmation:
            one, two = (samples.fresh_tokens(arm, sorted(wanted.strata)) for arm in comparison.arms)
            return confirmation(
                [one[config, prompt_id][:, position] for config, prompt_id, position in flagged],
                [two[config, prompt_id][:, position] for config, prompt_id, position in flagged],
                flagged,
                statistic=options.statistic,
                exact=options.exact,
                rng=samples.generator("confirmation", comparison),
            )

        stage_2, want = _confirm(again, wanted)
    finding = marginal_finding(comparison, result, cells, stage_2)
    return Judged(finding=finding, evidence=(result.evidence(comparison.words),), want=want), cells, result


def judge_joint(samples: RunSamples, comparison: Comparison) -> Judged:
    """Whole samples of two arms, config by config. Raises MissingSamples, StatisticsError."""
    first, second = (samples.tokens(arm) for arm in comparison.arms)
    results = joint_results(first, second, partial(samples.generator, "joint", comparison))
    finding, want = joint_finding(comparison, results), None
    if finding.flagged and _confirms(samples, finding.role):
        tested = [flag.place for flag in finding.flagged]
        wanted = Want(role=finding.role, arms=comparison.arms, strata=_whole(samples, tested), scored=False)

        def again() -> Confirmation:
            one, two = (samples.fresh_tokens(arm, sorted(wanted.strata)) for arm in comparison.arms)
            again_of = partial(samples.generator, "joint confirmation", comparison)
            return joint_confirmation(joint_results(one, two, again_of), tested)

        stage_2, want = _confirm(again, wanted)
        finding = joint_finding(comparison, results, stage_2)
    return Judged(finding=finding, evidence=adjusted_joint_evidence(comparison, results), want=want)


def judge_law(samples: RunSamples, arm: Arm, evidence: LawEvidence) -> Judged:
    """One arm against the target's law. Raises StatisticsError."""
    finding, want = law_finding(arm, evidence), None
    if finding.flagged and _confirms(samples, LAW_ROLES[arm]):
        tested = [flag.place for flag in finding.flagged]
        wanted = Want(role=finding.role, arms=(arm,), strata=_whole(samples, tested), scored=True)

        def again() -> Confirmation:
            fresh = {
                config: samples.law(samples.fresh_scored(arm, config), f"{arm} / {config}, fresh")
                for config in dict.fromkeys(place.config for place in tested)
            }
            start, stop = samples.protocol.confirmation_seeds
            return law_confirmation(fresh, tested, num_samples=(stop - start) * len(samples.protocol.prompts))

        stage_2, want = _confirm(again, wanted)
        finding = law_finding(arm, evidence, stage_2)
    return Judged(finding=finding, evidence=tuple(line for own in evidence.values() for line in own), want=want)


def judge_reference(samples: RunSamples, evidence: LawEvidence, suspect: Finding) -> Judged:
    """Arm off against its law where arm on has been flagged: on as many fresh seeds, whether or not it was flagged
    itself, so that a law that is slightly wrong for both is not taken for a fault of one."""
    finding, want = law_finding(Arm.OFF, evidence), None
    if samples.options.confirm:
        configs = dict.fromkeys(flag.place.config for flag in suspect.flagged)
        strata = frozenset().union(*(samples.whole(config) for config in configs))
        wanted = Want(role=finding.role, arms=(Arm.OFF,), strata=strata, scored=True)

        def again() -> Confirmation:
            fresh = {config: samples.law(samples.fresh_scored(Arm.OFF, config), "off, fresh") for config in configs}
            tested = [Place(config, test=line.name) for config in configs for line in fresh[config].evidence]
            start, stop = samples.protocol.confirmation_seeds
            return law_confirmation(fresh, tested, num_samples=(stop - start) * len(samples.protocol.prompts))

        stage_2, want = _confirm(again, wanted)
        finding = law_finding(Arm.OFF, evidence, stage_2)
    return Judged(finding=finding, evidence=tuple(line for own in evidence.values() for line in own), want=want)


def judge_cells(
    comparison: Comparison,
    first: Sequence[npt.NDArray[np.integer]],
    second: Sequence[npt.NDArray[np.integer]],
    options: AnalysisOptions,
    run_seed: int,
) -> MarginalResult:
    """The marginal family on one comparison, its permutations seeded by the run and the comparison."""
    return marginal_family(
        first,
        second,
        statistic=options.statistic,
        exact=options.exact,
        q=LEVEL,
        dependence=options.dependence,
        num_permutations=options.num_permutations,
        rng=generator(run_seed, "marginal", comparison),
    )


def joint_results(
    first: Mapping[Stratum, Tokens],
    second: Mapping[Stratum, Tokens],
    generator_of: Callable[[str], np.random.Generator],
) -> dict[str, JointResult]:
    """The joint family of two arms, one result a config over all its prompts; permutations are drawn by config."""

    def result(config: str) -> JointResult:
        own = [stratum for stratum in first if stratum[0] == config]
        return joint_family([first[s] for s in own], [second[s] for s in own], rng=generator_of(config))

    configs = list(dict.fromkeys(config for config, _ in first))
    return dict(zip(configs, side_by_side(result, configs), strict=True))


def generator(*name: object) -> np.random.Generator:
    """Random numbers of the analysis that depend on the run and on what they are for, and on nothing else."""
    return np.random.default_rng(stream_key(*name) % 2**63)


def _columns(strata: Strata) -> list[Tokens]:
    """One array [num_seeds] a cell."""
    return [column for grid in strata.values() for column in np.ascontiguousarray(grid.T)]


def _confirms(samples: RunSamples, role: Role) -> bool:
    return samples.options.confirm and role is not Role.TEETH


def _whole(samples: RunSamples, tested: Sequence[Place]) -> frozenset[tuple[str, str]]:
    return frozenset().union(*(samples.whole(place.config) for place in tested))


def _confirm(again: Callable[[], Confirmation], wanted: Want) -> tuple[Confirmation | None, Want | None]:
    """Stage 2, or what it lacks."""
    try:
        return again(), None
    except MissingSamples:
        return None, wanted
