"""One subject of the kill matrix: sampled, judged and diagnosed, in whatever process is free."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from equivtest.engines.base import Engine, EngineOptions
from equivtest.errors import EquivtestError, UnknownName
from equivtest.faults import catalogue, load_faults
from equivtest.faults.base import Fault, Setting
from equivtest.pipeline.alternatives import alternative_evidence
from equivtest.pipeline.identity import identity_evidence
from equivtest.pipeline.kills import identity_kills, judge
from equivtest.pipeline.live_evidence import ALTERNATIVES_FILE, IDENTITY_FILE, keep_lines, kept_lines
from equivtest.pipeline.one_arm import gather, large_batches, shards_of
from equivtest.pipeline.progress import Silent
from equivtest.protocol.budgets import Budget
from equivtest.protocol.plan import Protocol
from equivtest.records import KILL_LEVEL, Arm, Evidence, Kill, Nature
from equivtest.report.kill_matrix import Outcome
from equivtest.rng import stream_key
from equivtest.verdict.diagnosis import Diagnosis, diagnose

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
class Bench:
    """Where subjects are sampled and judged; its methods take what another process can be sent."""

    run_dir: Path
    protocol: Protocol
    options: ControlsOptions

    def plain(self, config: str) -> Plain:
        """Sample and judge plain decoding."""
        setting = Setting(config=config)
        engine, folder, protocol = self._engine(setting), self._plain_folder(config), self._own(config, "plain")
        batches = list(large_batches(shards_of(protocol, Arm.OFF, config), self.options.batch))
        gather(folder, protocol, engine, batches, Silent(), f"plain decoding, {config}")
        found = judge(folder, None, protocol, config, Arm.OFF)
        fault = dataclasses.replace(
            correct(dataclasses.replace(setting, drafter="none", acceptance="none")),
            name=f"plain-{config}",
            description=f"decoding without speculation: {config}",
        )
        varying = ("drafter", "drafter_parameters", "draft_len", "acceptance", "threads")
        return Plain(
            outcome=_outcome(fault, kills=found.kills, diagnosis=diagnose(found.law, alpha=KILL_LEVEL)),
            law=found.law,
            described={name: value for name, value in engine.describe().items() if name not in varying},
        )

    def altered(self, name: str, plain_law: tuple[Evidence, ...]) -> Outcome:
        """Sample and judge the subject of that name; plain_law: lines of plain decoding of its config."""
        (fault,) = (one for one in chosen(self.options.only, self.options.faults_from) if one.name == name)
        config, folder = fault.setting.config, self.run_dir / name
        protocol = self._own(config, name)
        batches = list(large_batches(shards_of(protocol, Arm.BIASED, config), self.options.batch))
        try:
            engine = self._engine(fault.setting)
            gather(folder, protocol, engine, batches, Silent(), name, fault=fault)
            identity = self._identity(engine, protocol, fault)
        except EquivtestError as error:
            return _outcome(fault, refused=f"{type(error).__name__}: {error}")
        found = judge(folder, self._plain_folder(config), protocol, config, Arm.BIASED)
        off_law = any(line.adjusted_p is not None and line.adjusted_p <= KILL_LEVEL for line in found.law)
        said = diagnose(
            found.law,
            off=plain_law,
            joint=found.joint,
            identity=identity,
            alternatives=self._alternatives(engine, protocol, fault) if off_law else (),
            alpha=KILL_LEVEL,
        )
        outcome = _outcome(fault, kills=(*found.kills, *identity_kills(identity)), diagnosis=said)
        return dataclasses.replace(outcome, may_be_missed=fault.subtle and self.options.budget == SMOKE.name)

    def _engine(self, setting: Setting) -> Engine:
        return _engine(self.options.engine, self.options.batch, dataclasses.replace(setting, config=""))

    def _identity(self, engine: Engine, protocol: Protocol, fault: Fault) -> tuple[Evidence, ...]:
        path, config = self.run_dir / fault.name / IDENTITY_FILE, fault.setting.config
        if not path.exists():
            keep_lines(path, {config: identity_evidence(engine, protocol, config, fault)})
        return kept_lines(path)[config]

    def _alternatives(self, engine: Engine, protocol: Protocol, fault: Fault) -> tuple[Evidence, ...]:
        """What the tokens follow instead of their law."""
        folder, config = self.run_dir / fault.name, fault.setting.config
        if not (folder / ALTERNATIVES_FILE).exists():
            lines = alternative_evidence(folder, protocol, config, Arm.BIASED, engine)
            keep_lines(folder / ALTERNATIVES_FILE, {config: lines})
        return kept_lines(folder / ALTERNATIVES_FILE)[config]

    def _plain_folder(self, config: str) -> Path:
        return self.run_dir / "plain" / config

    def _own(self, config: str, name: str) -> Protocol:
        """The protocol of one subject. Each has streams of its own: chance must not strike all of them together."""
        seed = stream_key(self.protocol.run_seed, name, config) % 2**31
        return dataclasses.replace(self.protocol, configs=(config,), run_seed=seed)


def chosen(only: Sequence[str], faults_from: Sequence[str]) -> tuple[Fault, ...]:
    """The faults asked for, in the order of the catalogue, after a correct decoder for each setting that they need."""
    known = catalogue(extra=[fault for module in faults_from for fault in load_faults(module)])
    names = [fault.name for fault in known]
    for name in only:
        if name not in names:
            raise UnknownName("fault", name, names)
    faults = [fault for fault in known if not only or fault.name in only]
    settings = dict.fromkeys(fault.setting for fault in faults)
    return (*map(correct, settings), *faults)


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
    if drafter == "model":
        # Without a small model of its own, the target's first layers are one.
        drafter, draft_model = ("model", options.draft_model) if options.draft_model else ("sampled_exit", None)
    elif drafter == "sampled_exit" and options.draft_model:
        drafter, draft_model = "model", options.draft_model
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


def _outcome(
    fault: Fault,
    *,
    kills: tuple[Kill, ...] = (),
    diagnosis: tuple[Diagnosis, ...] = (),
    refused: str | None = None,
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
    )
