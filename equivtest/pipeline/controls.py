"""The kill matrix: decoders that are known to be right or wrong, and what finds the wrong ones.

Every subject is one decoder with one altered stage. It is sampled like the arm of a run, judged by every family of
evidence, and must come out as its nature says: faults and lossy rules found, correct decoders and variants not.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from equivtest.engines.base import Engine
from equivtest.engines.base import EngineOptions as EngineOptions
from equivtest.errors import EquivtestError, UnknownName
from equivtest.faults import NOT_EXPRESSIBLE, catalogue, load_faults
from equivtest.faults.base import Fault, Setting
from equivtest.files import sole_writer
from equivtest.pipeline.alternatives import alternative_evidence
from equivtest.pipeline.identity import identity_evidence
from equivtest.pipeline.kills import Judgement, identity_kills, judge
from equivtest.pipeline.live_evidence import ALTERNATIVES_FILE, IDENTITY_FILE, keep_lines, kept_lines
from equivtest.pipeline.manifest import command_line, describe_code, describe_machine, utc_now
from equivtest.pipeline.one_arm import gather, large_batches, shards_of
from equivtest.pipeline.progress import Listener, Silent
from equivtest.protocol.budgets import Budget, get_budget
from equivtest.protocol.plan import Protocol
from equivtest.protocol.prompts import load_prompt_set
from equivtest.records import KILL_LEVEL, Arm, Evidence, Kill, Nature
from equivtest.report.kill_matrix import KillMatrix, Outcome, write_kill_matrix
from equivtest.rng import stream_key
from equivtest.verdict.diagnosis import Diagnosis, diagnose

SMOKE = Budget(name="smoke", num_prompts=4, num_positions=24, num_seeds=128, epsilon=0.1)
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
    """Processes that judge; None: one a core."""
    results_dir: Path = Path("results")
    run_dir: Path | None = None
    """None names a new folder under results_dir. What a folder holds already is not made twice."""


def controls(options: ControlsOptions, listener: Listener | None = None) -> tuple[Path, KillMatrix]:
    """Sample and judge every subject; write the matrix. Returns its folder and what it shows.

    Raises UnknownName for a fault, EquivtestError for a decoder that cannot be built.
    """
    listener = listener or Silent()
    subjects = chosen(options.only, options.faults_from)
    budget = SMOKE if options.budget == SMOKE.name else get_budget(options.budget)
    configs = tuple(dict.fromkeys(fault.setting.config for fault in subjects))
    protocol = Protocol.build(load_prompt_set(options.prompts), configs, budget, run_seed=options.run_seed)
    run_dir = options.run_dir or options.results_dir / f"controls-{options.budget}-{utc_now():%Y%m%dT%H%M%SZ}"
    started = time.perf_counter()
    # Spawned, for torch has threads by now that a fork would leave behind.
    with sole_writer(run_dir), ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        study = _Study(run_dir, protocol, options, listener, pool)
        outcomes = study.outcomes(subjects)
        matrix = KillMatrix(
            outcomes=outcomes,
            provenance={
                "command": command_line(),
                "seconds": round(time.perf_counter() - started, 1),
                "budget": budget.name,
                "prompts": len(protocol.prompts),
                "positions": protocol.num_positions,
                "seeds": protocol.num_seeds,
                "run_seed": options.run_seed,
                "subject": study.described,
                "code": describe_code(),
                "machine": describe_machine(),
            },
        )
        write_kill_matrix(matrix, run_dir)
    return run_dir, matrix


def catalogue_lines(only: Sequence[str] = (), faults_from: Sequence[str] = ()) -> Iterator[str]:
    """What can be planted, for people: a line each, and one for each public fault that cannot."""
    for fault in chosen(only, faults_from):
        if fault.nature is not Nature.CONTROL:
            reports = f" ({', '.join(fault.reports)})" if fault.reports else ""
            yield f"{fault.nature}, {fault.stage}: {fault.name}: {fault.description}{reports}"
    if not only:
        yield from (f"not expressible: #{number}: {reason}" for number, reason in NOT_EXPRESSIBLE.items())


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
    return Fault(
        name=f"correct-{setting.config}-{setting.drafter}",
        stage="none",
        description=f"nothing is altered: {setting.config}, {setting.drafter} drafter, {setting.acceptance} rule",
        wrap=lambda stages: stages,
        nature=Nature.CONTROL,
        kind="correct decoders",
        setting=setting,
        changes_law=False,
    )


def _plain(config: str) -> Fault:
    """Plain decoding as a subject: it must follow the law that all others are held against."""
    nothing = correct(Setting(config=config, drafter="none", acceptance="none"))
    return dataclasses.replace(nothing, name=f"plain-{config}", description=f"decoding without speculation: {config}")


class _Study:
    """Samples in this process, one subject after the other, while others judge."""

    def __init__(
        self, run_dir: Path, protocol: Protocol, options: ControlsOptions, listener: Listener, pool: ProcessPoolExecutor
    ) -> None:
        self._run_dir, self._protocol, self._options = run_dir, protocol, options
        self._listener, self._pool = listener, pool
        self._plain: dict[str, Future[Judgement]] = {}
        self.described: dict[str, object] = {}

    def outcomes(self, subjects: Sequence[Fault]) -> tuple[Outcome, ...]:
        waiting: dict[str, Callable[[], Outcome]] = {}
        done, started = 0, time.perf_counter()
        for setting, own in _by_decoder(subjects):
            engine = self._engine(setting)
            for fault in own:
                left = (time.perf_counter() - started) / done * (len(subjects) - done) if done else None
                done += 1
                about = "" if left is None else f" (about {left / 60:.0f} min left)"
                self._listener.message(f"[{done}/{len(subjects)}] {fault.name}: {fault.description}{about}")
                self._gather_plain(engine, fault.setting.config)
                waiting[fault.name] = self._sampled(engine, fault)
        self._listener.message("judging")
        plain = [
            _outcome(
                _plain(config), kills=future.result().kills, diagnosis=diagnose(future.result().law, alpha=KILL_LEVEL)
            )
            for config, future in self._plain.items()
        ]
        return (*plain, *(waiting[fault.name]() for fault in subjects))

    def _engine(self, setting: Setting) -> Engine:
        from equivtest.engines.decoder import DecoderEngine

        options = self._options.engine
        drafter, draft_model = setting.drafter, None
        if drafter == "model":
            # Without a small model of its own, the target's first layers are one.
            drafter, draft_model = ("model", options.draft_model) if options.draft_model else ("sampled_exit", None)
        exits = drafter in ("early_exit", "sampled_exit")
        engine = DecoderEngine.open(
            dataclasses.replace(
                options,
                # Replay and greedy identity are exact only in float32: elsewhere near ties fall differently by batch.
                dtype="float32" if options.dtype == "auto" else options.dtype,
                drafter=drafter,
                draft_model=draft_model,
                early_exit_layers=options.early_exit_layers if exits else None,
                draft_len=setting.draft_len,
                acceptance=setting.acceptance,
                max_batch=self._options.batch,
            ),
            on_message=None,
        )
        varying = ("drafter", "drafter_parameters", "draft_len", "acceptance")
        self.described = {name: value for name, value in engine.describe().items() if name not in varying}
        return engine

    def _gather_plain(self, engine: Engine, config: str) -> None:
        if config in self._plain:
            return
        folder, protocol = self._run_dir / "plain" / config, self._own(config, "plain")
        batches = list(large_batches(shards_of(protocol, Arm.OFF, config), self._options.batch))
        gather(folder, protocol, engine, batches, Silent(), f"plain decoding, {config}")
        self._plain[config] = self._pool.submit(judge, folder, None, protocol, config, Arm.OFF)

    def _sampled(self, engine: Engine, fault: Fault) -> Callable[[], Outcome]:
        """Samples now; what is returned waits for the judgement."""
        config, folder = fault.setting.config, self._run_dir / fault.name
        protocol = self._own(config, fault.name)
        batches = list(large_batches(shards_of(protocol, Arm.BIASED, config), self._options.batch))
        try:
            gather(folder, protocol, engine, batches, Silent(), fault.name, fault=fault)
            lines = self._identity(engine, protocol, fault)
            instead = self._alternatives(engine, protocol, fault)
        except EquivtestError as error:
            refusal = f"{type(error).__name__}: {error}"
            return lambda: _outcome(fault, refused=refusal)
        plain_folder = self._run_dir / "plain" / config
        future = self._pool.submit(judge, folder, plain_folder, protocol, config, Arm.BIASED)

        def judged() -> Outcome:
            mine, plain = future.result(), self._plain[config].result()
            said = diagnose(
                mine.law, off=plain.law, joint=mine.joint, identity=lines, alternatives=instead, alpha=KILL_LEVEL
            )
            return _outcome(fault, kills=(*mine.kills, *identity_kills(lines)), diagnosis=said)

        return judged

    def _identity(self, engine: Engine, protocol: Protocol, fault: Fault) -> tuple[Evidence, ...]:
        path, config = self._run_dir / fault.name / IDENTITY_FILE, fault.setting.config
        if not path.exists():
            keep_lines(path, {config: identity_evidence(engine, protocol, config, fault)})
        return kept_lines(path)[config]

    def _alternatives(self, engine: Engine, protocol: Protocol, fault: Fault) -> tuple[Evidence, ...]:
        """What the tokens follow instead, where they do not follow their law."""
        folder, config = self._run_dir / fault.name, fault.setting.config
        if not any(kill.found for kill in judge(folder, None, protocol, config, Arm.BIASED).kills):
            return ()
        if not (folder / ALTERNATIVES_FILE).exists():
            lines = alternative_evidence(folder, protocol, config, Arm.BIASED, engine)
            keep_lines(folder / ALTERNATIVES_FILE, {config: lines})
        return kept_lines(folder / ALTERNATIVES_FILE)[config]

    def _own(self, config: str, name: str) -> Protocol:
        """The protocol of one subject. Each has streams of its own: chance must not strike all of them together."""
        seed = stream_key(self._protocol.run_seed, name, config) % 2**31
        return dataclasses.replace(self._protocol, configs=(config,), run_seed=seed)


def _by_decoder(subjects: Sequence[Fault]) -> Iterator[tuple[Setting, list[Fault]]]:
    """Subjects that one engine serves, together."""
    groups: dict[Setting, list[Fault]] = {}
    for fault in subjects:
        groups.setdefault(dataclasses.replace(fault.setting, config=""), []).append(fault)
    yield from groups.items()


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
