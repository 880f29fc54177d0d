"""The kill matrix: decoders that are known to be right or wrong, and what finds the wrong ones.

Every subject is one decoder with one altered stage. It is sampled like the arm of a run, judged by every family of
evidence, and must come out as its nature says: faults and lossy rules found, correct decoders and variants not.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from equivtest.engines.base import EngineOptions as EngineOptions
from equivtest.faults import BY_NAME_ONLY, NOT_EXPRESSIBLE
from equivtest.files import sole_writer
from equivtest.pipeline.control_subject import SMOKE, ControlsOptions, KillStudy, chosen
from equivtest.pipeline.manifest import command_line, describe_code, describe_machine, utc_now
from equivtest.pipeline.progress import Listener, Silent
from equivtest.protocol.budgets import get_budget
from equivtest.protocol.plan import Protocol
from equivtest.protocol.prompts import load_prompt_set
from equivtest.records import Nature
from equivtest.report.kill_matrix import KillMatrix, write_kill_matrix


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
    with sole_writer(run_dir), _workers(options) as work:
        study = KillStudy(run_dir=run_dir, protocol=protocol, options=options)
        listener.message(f"plain decoding: {', '.join(configs)}")
        plain = dict(zip(configs, work(study.plain, configs), strict=True))
        outcomes = []
        # Subjects of one decoder side by side, so that a process seldom needs another.
        ordered = sorted(subjects, key=lambda fault: (fault.setting.drafter, fault.setting.acceptance))
        law = [plain[fault.setting.config].law for fault in ordered]
        for outcome in work(study.altered, [fault.name for fault in ordered], law):
            outcomes.append(outcome)
            seconds = (time.perf_counter() - started) / len(outcomes) * (len(ordered) - len(outcomes))
            left = f" (about {seconds / 60:.0f} min left)"
            listener.message(f"[{len(outcomes)}/{len(ordered)}] {outcome.name}: {outcome.words}{left}")
        by_name = {outcome.name: outcome for outcome in outcomes}
        matrix = KillMatrix(
            outcomes=(*(one.outcome for one in plain.values()), *(by_name[fault.name] for fault in subjects)),
            provenance={
                "command": command_line(),
                "seconds": round(time.perf_counter() - started, 1),
                "budget": budget.name,
                "prompts": len(protocol.prompts),
                "positions": protocol.num_positions,
                "seeds": protocol.num_seeds,
                "run_seed": options.run_seed,
                "subject": plain[configs[0]].described,
                "code": describe_code(),
                "machine": describe_machine(),
            },
        )
        write_kill_matrix(matrix, run_dir)
    return run_dir, matrix


@contextlib.contextmanager
def _workers(options: ControlsOptions) -> Iterator[Callable[..., Iterator[Any]]]:
    """`map` over as many processes as asked for; by default one a core, and this one alone on a GPU."""
    number = options.workers or (1 if options.engine.device == "cuda" else os.cpu_count() or 1)
    if number == 1:
        yield map
        return
    # Spawned, for torch may have threads by now that a fork would leave behind.
    with ProcessPoolExecutor(number, mp_context=get_context("spawn"), initializer=_one_thread) as pool:
        yield pool.map


def _one_thread() -> None:
    """Processes that share the cores take one each: thread pools that wait for each other cost half of them."""
    import torch

    torch.set_num_threads(1)


def catalogue_lines(only: Sequence[str] = (), faults_from: Sequence[str] = ()) -> Iterator[str]:
    """What can be planted, for people: a line each, and one for each public fault that cannot, or not here."""
    for fault in chosen(only, faults_from):
        if fault.nature is not Nature.CONTROL:
            reports = f" ({', '.join(fault.reports)})" if fault.reports else ""
            yield f"{fault.nature}, {fault.stage}: {fault.name}: {fault.description}{reports}"
    if not only:
        yield from (f"not expressible: #{number}: {reason}" for number, reason in NOT_EXPRESSIBLE.items())
        yield from (f"by name only: {name}: {needs}" for name, needs in BY_NAME_ONLY.items())
