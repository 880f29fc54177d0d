"""One run from its options to its verdict: collect, analyse, confirm what was flagged, publish."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from equivtest.engines.base import Engine
from equivtest.engines.base import EngineOptions as EngineOptions
from equivtest.engines.base import ServerOptions as ServerOptions
from equivtest.engines.base import VllmOptions as VllmOptions
from equivtest.errors import ArmsToCome, InvalidSetting, InvalidShard, RunExists, RunNotFound
from equivtest.files import sole_writer
from equivtest.pipeline.analyse import Analysis, analyse, check_resolution
from equivtest.pipeline.analysis_options import AnalysisOptions
from equivtest.pipeline.live_evidence import ALTERNATIVES_FILE, IDENTITY_FILE, keep_lines
from equivtest.pipeline.manifest import (
    FILE_NAME,
    VERDICT_FILE,
    Manifest,
    Status,
    command_line,
    new_manifest,
    resume_command,
    resumed,
    utc_now,
    written,
)
from equivtest.pipeline.progress import Listener, Silent
from equivtest.pipeline.publish import publish
from equivtest.pipeline.texts import keep_token_texts
from equivtest.protocol.budgets import get_budget
from equivtest.protocol.configs import CONFIGS, resolve_configs
from equivtest.protocol.plan import INFLATED_ACCEPTANCE, LIKELIEST_TOKEN, Batch, Protocol
from equivtest.protocol.prompts import load_prompt_set
from equivtest.records import Arm, Word
from equivtest.report.data import ReportData

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Everything `equivtest run` can be told."""

    configs: tuple[str, ...] = ("topp95",)
    budget: str = "gate"
    prompts: str = "default"
    epsilon: float | None = None
    """Acceptance bias of the biased arm; None takes the budget's."""
    planted: str | None = None
    """Fault of the biased arm; None: `plan.INFLATED_ACCEPTANCE`, or `plan.LIKELIEST_TOKEN` for an engine that no fault
    can be put into."""
    run_seed: int = 0
    engine: EngineOptions
    analysis: AnalysisOptions
    results_dir: Path = Path("results")
    run_dir: Path | None = None
    """None names a new folder under results_dir after configs, budget and time."""
    sequential: bool = False
    """Stop collecting as soon as the answer is known."""
    resume: bool = False
    """Continue run_dir, or the newest unfinished run with the same fingerprint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """A finished run."""

    run_dir: Path
    analysis: Analysis
    data: ReportData
    """What the report shows."""


def run(options: RunOptions, listener: Listener | None = None, engine: Engine | None = None) -> RunResult:
    """Run the protocol and publish its report.

    engine: default what `options.engine` describes. Raises EquivtestError; an interrupt or an error leaves a folder
    that can be resumed.
    """
    listener = listener or Silent()
    protocol = Protocol.build(
        load_prompt_set(options.prompts),
        resolve_configs(options.configs),
        get_budget(options.budget),
        epsilon=options.epsilon,
        planted=options.planted or INFLATED_ACCEPTANCE,
        run_seed=options.run_seed,
        sequential=options.sequential,
    )
    if options.sequential and not options.analysis.law:
        raise InvalidSetting("sequential", True, "watches tokens against the target's law: not with --no-law")
    # Torch loads only when a run really starts: reports are recomputed on machines without it.
    from equivtest.engines.registry import check_engine, open_engine
    from equivtest.faults import get_fault

    # What is wrong with the request is said before anything slow.
    if protocol.planted != LIKELIEST_TOKEN:
        get_fault(protocol.planted, **protocol.planted_parameters)
    check_engine(options.engine)

    run_dir = _choose_run_dir(options)
    check_resolution(options.analysis, protocol)
    with contextlib.ExitStack() as opened:
        if engine is None:
            engine = open_engine(_engine_options(options, protocol), on_message=listener.message)
            opened.callback(engine.close)
        protocol = _plantable(options, protocol, engine)
        for config in protocol.configs:
            if reason := engine.refusal(CONFIGS[config]):
                raise InvalidSetting("config", config, reason)
        opened.enter_context(sole_writer(run_dir))
        return _run(options, protocol, engine, run_dir, listener)


def _plantable(options: RunOptions, protocol: Protocol, engine: Engine) -> Protocol:
    """The protocol with a fault that can be planted for the engine."""
    if engine.capabilities.takes_faults or protocol.planted == LIKELIEST_TOKEN:
        return protocol
    if options.planted is not None:
        requirement = f"no fault can be put into this engine; its recordings take {LIKELIEST_TOKEN}"
        raise InvalidSetting("plant", options.planted, requirement)
    return dataclasses.replace(protocol, planted=LIKELIEST_TOKEN)


def _run(options: RunOptions, protocol: Protocol, engine: Engine, run_dir: Path, listener: Listener) -> RunResult:
    from equivtest.pipeline.alternatives import alternative_evidence
    from equivtest.pipeline.collect import collect
    from equivtest.pipeline.identity import identity_evidence
    from equivtest.pipeline.score import score

    if protocol.sequential and engine.scorer() is None:
        raise InvalidSetting("sequential", True, "watches tokens against the target's law, which this engine lacks")
    manifest = _open_run(options, protocol, engine, run_dir)
    can = engine.capabilities
    judging = AnalysisOptions(**manifest.options)
    listener.message(f"run folder: {run_dir}")

    def gather(manifest: Manifest, batches: Sequence[Batch], label: str, *, scored: bool) -> Manifest:
        manifest = collect(run_dir, protocol, manifest, engine, batches, listener, label)
        of_law = [batch for batch in batches if batch[0].arm in protocol.law_arms] if scored else []
        return score(run_dir, protocol, manifest, engine, of_law, listener, "scoring") if of_law else manifest

    try:
        if (can.replays or can.exact) and not (run_dir / IDENTITY_FILE).exists():
            checks = (["replay"] if can.replays else []) + (["greedy identity"] if can.exact else [])
            listener.message(f"repeating requests: {', '.join(checks)}")
            lines = {
                config: identity_evidence(engine, protocol, config, replay=can.replays, greedy=can.exact)
                for config in protocol.configs
            }
            keep_lines(run_dir / IDENTITY_FILE, lines)
        looks: list[Analysis] = []
        for num_seeds, batches in protocol.rounds():
            label = f"collecting, {num_seeds} of {protocol.num_seeds} seeds" if protocol.sequential else "collecting"
            manifest = gather(manifest, batches, label, scored=judging.law)
            if protocol.sequential:
                manifest = dataclasses.replace(manifest, used_seeds=num_seeds)
                manifest.write(run_dir)
            analysis = analyse(run_dir, manifest.judged_protocol, judging)
            looks.append(analysis)
            if is_enough(looks):
                break
        protocol = manifest.judged_protocol
        while analysis.wants:
            want = analysis.wants[0]
            fresh = tuple(protocol.confirmation_batches(want.arms, want.strata))
            label = f"confirming on fresh seeds ({', '.join(want.arms)})"
            manifest = gather(manifest, fresh, label, scored=want.scored)
            analysis = analyse(run_dir, protocol, judging)
        # What the tokens follow instead is asked only where they do not follow their law.
        if analysis.verdict.word is Word.DIFFERENT and not (run_dir / ALTERNATIVES_FILE).exists():
            listener.message("holding the tokens against other laws")
            others = {c: alternative_evidence(run_dir, protocol, c, Arm.ON, engine) for c in protocol.configs}
            keep_lines(run_dir / ALTERNATIVES_FILE, others)
            analysis = analyse(run_dir, protocol, judging)
    except KeyboardInterrupt:
        listener.finish()
        Manifest.read(run_dir).with_status(Status.CANCELLED).write(run_dir)
        listener.message(f"stopped; what was collected is kept. To continue: {resume_command(command_line(), run_dir)}")
        raise
    except ArmsToCome:
        raise  # nothing went wrong: the run is still under way
    except Exception as error:
        listener.finish()
        Manifest.read(run_dir).with_status(Status.ERROR, error=f"{type(error).__name__}: {error}").write(run_dir)
        raise
    keep_token_texts(run_dir, engine)
    manifest.with_status(Status.COMPLETE).write(run_dir)
    data = publish(run_dir, protocol, analysis)
    return RunResult(run_dir=run_dir, analysis=analysis, data=data)


def is_enough(looks: Sequence[Analysis]) -> bool:
    """Whether a sequential run may stop after these looks. A difference is enough; equivalence is not taken from the
    first look at which a flag happens to be gone."""
    newest = looks[-1]
    return newest.different or (newest.equivalent and not any(look.wants for look in looks))


def _engine_options(options: RunOptions, protocol: Protocol) -> EngineOptions:
    """In bfloat16 a near tie may fall differently in batches of different shape, and under greedy decoding one such tie
    is a difference in every sample: dtype `auto` is float32 there."""
    if options.engine.dtype == "auto" and any(CONFIGS[config].greedy for config in protocol.configs):
        return dataclasses.replace(options.engine, dtype="float32")
    return options.engine


def reanalyse(run_dir: Path, analysis_options: AnalysisOptions | None = None) -> RunResult:
    """Recompute a run's tables and pages from its samples; needs no torch and no model."""
    manifest = Manifest.read(run_dir)
    (run_dir / VERDICT_FILE).unlink(missing_ok=True)  # an older verdict must not outlive samples that cannot be read
    protocol = manifest.judged_protocol
    judging = analysis_options or AnalysisOptions(**manifest.options)
    analysis = analyse(run_dir, protocol, judging, finished=manifest.status is Status.COMPLETE)
    data = publish(run_dir, protocol, analysis)
    return RunResult(run_dir=run_dir, analysis=analysis, data=data)


def find_run(results_dir: Path, *, unfinished: bool = False) -> Path:
    """The newest run under `results_dir`, however it ended; with `unfinished` the newest that did not end.

    A folder with a damaged manifest is passed over with a warning. Raises RunNotFound.
    """
    runs = []
    for path in results_dir.glob(f"*/{FILE_NAME}"):
        try:
            manifest = Manifest.read(path.parent)
        except InvalidShard as damaged:
            _LOG.warning("passed over: %s", damaged)
            continue
        if not unfinished or manifest.status is not Status.COMPLETE:
            runs.append((manifest.started, path.parent))
    if not runs:
        kind = "unfinished run" if unfinished else "run"
        raise RunNotFound(results_dir, f"there is no {kind} there; start one with `equivtest run`")
    return max(runs)[1]


def _choose_run_dir(options: RunOptions) -> Path:
    """Where the run goes, before anything slow: the run to resume, or a folder that holds none."""
    if options.resume:
        run_dir = options.run_dir or find_run(options.results_dir, unfinished=True)
        Manifest.read(run_dir)
        return run_dir
    name = f"{'+'.join(options.configs)}-{options.budget}-{utc_now():%Y%m%dT%H%M%SZ}"
    run_dir = options.run_dir or options.results_dir / name
    if run_dir.exists() and not run_dir.is_dir():
        raise InvalidSetting("run-dir", str(run_dir), "is a file")
    if (run_dir / FILE_NAME).exists():
        raise RunExists(run_dir)
    return run_dir


def _open_run(options: RunOptions, protocol: Protocol, engine: Engine, run_dir: Path) -> Manifest:
    manifest = new_manifest(protocol, engine, asdict(_possible(options.analysis, engine)))
    return resumed(run_dir, manifest) if options.resume else written(run_dir, manifest)


def _possible(analysis: AnalysisOptions, engine: Engine) -> AnalysisOptions:
    """Without a reachable law there is no law family, and the record says so."""
    return analysis if engine.scorer() else dataclasses.replace(analysis, law=False)
