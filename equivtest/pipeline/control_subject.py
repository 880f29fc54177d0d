"""One subject of the kill matrix: sampled, judged and diagnosed, in whatever process is free."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from equivtest.engines.base import Engine, EngineOptions
from equivtest.errors import InvalidSetting, KernelError, SampleError, UnknownName
from equivtest.faults import catalogue, load_faults
from equivtest.faults.base import Fault, Setting
from equivtest.pipeline.alternatives import alternative_evidence
from equivtest.pipeline.identity import identity_evidence
from equivtest.pipeline.kills import Judgement, identity_kills, judge
from equivtest.pipeline.live_evidence import ALTERNATIVES_FILE, IDENTITY_FILE, keep_lines, kept_lines
from equivtest.pipeline.one_arm import gather, large_batches, shards_of
from equivtest.pipeline.progress import Silent
from equivtest.protocol.budgets import Budget
from equivtest.protocol.configs import resolve_configs
from equivtest.protocol.plan import Protocol
from equivtest.records import KILL_LEVEL, Arm, Evidence, Kill, Nature
from equivtest.report.kill_matrix import Outcome
from equivtest.rng import stream_key
from equivtest.verdict.diagnosis import Diagnosis, diagnose

_AGAIN = ".again"

SMOKE = Budget(name="smoke", num_prompts=4, num_positions=20, num_seeds=128, epsilon=0.1)
"""Larger than a run's: the catalogue is made for a small model, which is fast, and has subtle faults in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlsOptions:
    """Everything `equivtest controls` can be told."""

    engine: EngineOptions
    """Model, device and kernels; drafter, acceptance rule and draft length are each fault's own."""
    budget: str = "smoke"
    prompts: str = "default"
    only: tuple[str, ...] = ()
    """Names of faults; empty for the whole catalogue."""
    faults_from: tuple[str, ...] = ()
    """Modules with more faults."""
    run_seed: int = 0
    batch: int = 1024
    """Samples decoded at once."""
    workers: int | None = None
    """Processes that sample and judge; None: one a core, and one alone on a GPU."""
    results_dir: Path = Path("results")
    run_dir: Path | None = None
    """None names a new folder under results_dir. What a folder holds already is not made twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Plain decoding of one config, which every subject of that config is compared with."""

    outcome: Outcome
    law: tuple[Evidence, ...]
    """Lines of the law family."""
    described: dict[str, object]
    """The engine, without what differs between subjects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KillStudy:
    """Where subjects are sampled and judged; its methods take what another process can be sent."""

    run_dir: Path
    protocol: Protocol
    options: ControlsOptions

    def plain(self, config: str) -> Plain:
        """Sample and judge plain decoding."""
        setting = Setting(config=config)
        fault = dataclasses.replace(
            correct(dataclasses.replace(setting, drafter="none", acceptance="none")),
            name=f"plain-{config}",
            description=f"decoding without speculation: {config}",
        )
        law = self._plain_law(config)
        again = self._plain_law(config, _AGAIN) if any(kill.found for kill in law.kills) else law
        varying = ("drafter", "drafter_parameters", "draft_len", "acceptance", "threads")
        described = self._engine(setting).describe()
        return Plain(
            outcome=_outcome(
                fault,
                kills=stood(law.kills, again.kills),
                diagnosis=diagnose(again.law, alpha=KILL_LEVEL),
            ),
            law=again.law,
            described={name: value for name, value in described.items() if name not in varying},
        )

    def altered(self, name: str, plain_law: tuple[Evidence, ...]) -> Outcome:
        """Sample and judge the subject of that name; plain_law: lines of plain decoding of its config.

        What is found and must pass is looked at again, on fresh samples of both arms: chance does not strike twice.
        What goes wrong is part of the outcome, so that one subject does not end the others.
        """
        (fault,) = (one for one in chosen(self.options.only, self.options.faults_from) if one.name == name)
        try:
            outcome = self._look(fault, plain_law)
            if outcome.killed and not fault.nature.must_be_found:
                second = self._look(fault, self._plain_law(fault.setting.config, _AGAIN).law, _AGAIN)
                kills = stood(tuple(outcome.kills.values()), tuple(second.kills.values()))
                outcome = dataclasses.replace(second, kills={kill.family: kill for kill in kills})
        except (KernelError, SampleError) as refusal:
            return _outcome(fault, refused=f"{type(refusal).__name__}: {refusal}")
        except Exception as error:  # whatever foreign code raises
            return _outcome(fault, failed=f"{type(error).__name__}: {error}")
        return dataclasses.replace(outcome, may_be_missed=fault.subtle and self.options.budget == SMOKE.name)

    def _look(self, fault: Fault, plain_law: tuple[Evidence, ...], again: str = "") -> Outcome:
        config, folder = fault.setting.config, self.run_dir / "subjects" / f"{fault.name}{again}"
        protocol, engine = self._own(config, folder.name), self._engine(fault.setting)
        batches = list(large_batches(shards_of(protocol, Arm.BIASED, config), self.options.batch))
        gather(folder, protocol, engine, batches, Silent(), fault.name, fault=fault)
        identity = _kept(folder / IDENTITY_FILE, lambda: identity_evidence(engine, protocol, config, fault))
        found = judge(folder, self._plain_folder(config, again), protocol, config, Arm.BIASED)
        off_law = any(line.adjusted_p is not None and line.adjusted_p <= KILL_LEVEL for line in found.law)
        alternatives: tuple[Evidence, ...] = ()
        if off_law:
            alternatives = _kept(
                folder / ALTERNATIVES_FILE,
                lambda: alternative_evidence(folder, protocol, config, Arm.BIASED, engine),
            )
        said = diagnose(
            found.law,
            off=plain_law,
            joint=found.joint,
            identity=identity,
            alternatives=alternatives,
            alpha=KILL_LEVEL,
        )
        return _outcome(fault, kills=(*found.kills, *identity_kills(identity)), diagnosis=said)

    def _plain_law(self, config: str, again: str = "") -> Judgement:
        folder, protocol = self._plain_folder(config, again), self._own(config, f"plain{again}")
        batches = list(large_batches(shards_of(protocol, Arm.OFF, config), self.options.batch))
        engine = self._engine(Setting(config=config))
        gather(folder, protocol, engine, batches, Silent(), f"plain decoding, {config}")
        return judge(folder, None, protocol, config, Arm.OFF)

    def _engine(self, setting: Setting) -> Engine:
        return _engine(self.options.engine, self.options.batch, dataclasses.replace(setting, config=""))

    def _plain_folder(self, config: str, again: str = "") -> Path:
        return self.run_dir / f"plain{again}" / config

    def _own(self, config: str, name: str) -> Protocol:
        """The protocol of one subject. Each has streams of its own: chance must not strike all of them together."""
        seed = stream_key(self.protocol.run_seed, name, config) % 2**31
        return dataclasses.replace(self.protocol, configs=(config,), run_seed=seed)


def stood(first: Sequence[Kill], second: Sequence[Kill]) -> tuple[Kill, ...]:
    """What a family says after two looks: it finds a subject only if both do."""
    again = {kill.family: kill for kill in second}
    return tuple(again.get(kill.family, kill) if kill.found else kill for kill in first)


def chosen(only: Sequence[str], faults_from: Sequence[str]) -> tuple[Fault, ...]:
    """The faults asked for, in the order of the catalogue, after a correct decoder for each setting that they need."""
    known = catalogue(extra=[fault for module in faults_from for fault in load_faults(module)])
    names = [fault.name for fault in known]
    for name in only:
        if name not in names:
            raise UnknownName("fault", name, names)
    faults = [fault for fault in known if not only or fault.name in only]
    for config in dict.fromkeys(fault.setting.config for fault in faults):
        resolve_configs((config,))
    settings = dict.fromkeys(fault.setting for fault in faults)
    subjects = (*map(correct, settings), *faults)
    twice = [name for name, count in Counter(one.name for one in subjects).items() if count > 1]
    if twice:
        raise InvalidSetting("fault", twice[0], "is the name of two subjects; each needs its own")
    return subjects


def correct(setting: Setting) -> Fault:
    """The decoder of a setting with nothing altered."""
    rule = "" if setting.acceptance == "chain" else f"-{setting.acceptance}"
    return Fault(
        name=f"correct-{setting.config}-{setting.drafter}-{setting.draft_len}{rule}",
        stage="none",
        description=f"nothing is altered: {setting.config}, {setting.drafter} drafter, {setting.acceptance} rule",
        wrap=lambda stages: stages,
        nature=Nature.CONTROL,
        kind="correct decoders",
        setting=setting,
        changes_law=False,
    )


@lru_cache(maxsize=2)  # subjects of one decoder come one after the other
def _engine(options: EngineOptions, batch: int, setting: Setting) -> Engine:
    from equivtest.engines.decoder import DecoderEngine

    drafter, draft_model = setting.drafter, None
    if drafter in ("model", "sampled_exit"):
        # Without a small model of its own, the target's first layers are one.
        draft_model = options.draft_model
        drafter = "model" if draft_model else "sampled_exit"
    return DecoderEngine.open(
        dataclasses.replace(
            options,
            # Replay and greedy identity are exact only in float32: elsewhere near ties fall differently by batch.
            dtype="float32" if options.dtype == "auto" else options.dtype,
            drafter=drafter,
            draft_model=draft_model,
            early_exit_layers=options.early_exit_layers if drafter in ("early_exit", "sampled_exit") else None,
            draft_len=setting.draft_len,
            acceptance=setting.acceptance,
            max_batch=batch,
        )
    )


def _kept(path: Path, make: Callable[[], tuple[Evidence, ...]]) -> tuple[Evidence, ...]:
    """The evidence of a file, made where it is not there."""
    if not path.exists():
        keep_lines(path, {"": make()})
    return kept_lines(path)[""]


def _outcome(
    fault: Fault,
    *,
    kills: tuple[Kill, ...] = (),
    diagnosis: tuple[Diagnosis, ...] = (),
    refused: str | None = None,
    failed: str | None = None,
) -> Outcome:
    return Outcome(
        name=fault.name,
        nature=fault.nature,
        kind=fault.kind,
        ids=fault.ids,
        reports=fault.reports,
        stage=fault.stage,
        description=fault.description,
        config=fault.setting.config,
        drafter=fault.setting.drafter,
        acceptance=fault.setting.acceptance,
        expected=fault.expected,
        kills={kill.family: kill for kill in kills},
        diagnosis=tuple(one.sentence for one in diagnosis),
        named_stage=diagnosis[0].stage if diagnosis else None,
        refused=refused,
        failed=failed,
    )
