"""`equivtest controls`: the kill matrix."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from equivtest.cli.options import pick, results_dir_option

_EPILOG = """\b
Examples:
  equivtest controls                                   the whole catalogue on the small model, minutes
  equivtest controls --budget gate                     the same with the samples of a gate run
  equivtest controls --only reused_coin --only seed_ignored
  equivtest controls --list                            every fault with its public reports
  equivtest controls --faults-from my_package.faults   yours as well (a module with FAULTS)
  equivtest controls --model smollm2-135m --budget gate --device cuda --batch 2048

\b
Exit codes: 0 every subject came out as it must, 1 one did not.
"""

_ENGINE_FIELDS = ("model", "dtype", "device", "kernels", "draft_model", "early_exit_layers", "threads")


@click.command("controls", epilog=_EPILOG)
@click.option(
    "--budget",
    default="smoke",
    show_default=True,
    help="Samples of each subject: smoke (4 prompts, 20 positions, 128 seeds) or a run's gate or audit.",
)
@click.option("--only", multiple=True, help="Only this fault; may be repeated.")
@click.option("--faults-from", multiple=True, help="A module, or module:attribute, with more faults.")
@click.option("--list", "as_list", is_flag=True, help="Print the catalogue and stop.")
@click.option(
    "--model", default="tiny", show_default=True, help="Built-in name, GGUF file, Hugging Face folder or hub id."
)
@click.option(
    "--draft-model",
    default=None,
    help="Smaller model for faults of sampled drafts; default: the model's own first layers, sampled.",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    default="auto",
    show_default=True,
    help="auto is float32: replay is exact only there.",
)
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where the decoder runs."
)
@click.option("--kernels", default="auto", show_default=True, help="Kernel backend: auto, cpp or reference.")
@click.option("--early-exit-layers", type=int, default=None, help="Layers of the early_exit drafter.")
@click.option("--threads", type=int, default=None, help="CPU threads; default: all cores.")
@click.option("--batch", type=click.IntRange(min=1), default=1024, show_default=True, help="Samples decoded at once.")
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=None,
    help="Processes that sample and judge; default: one a core, one alone on a GPU.",
)
@click.option("--run-seed", type=int, default=0, show_default=True, help="Seeds every random stream.")
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    default=None,
    help="Folder of the matrix; what it holds already is not made twice. Default: a new one.",
)
@results_dir_option("Where such folders are made.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows of controls.parquet as JSON.")
def command(as_list: bool, as_json: bool, **values: Any) -> int:
    """Plant every fault of the catalogue and measure which evidence finds it: the kill matrix.

    Beside the faults, correct decoders and valid variants must pass, and rules that are lossy by design must be found.
    """
    # The processes take a core each: a pool of threads in every one of them costs more than half of the time.
    if values["workers"] != 1 and values["device"] == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    from rich.console import Console

    from equivtest.cli.progress import listener_for
    from equivtest.pipeline.control_subject import ControlsOptions
    from equivtest.pipeline.controls import EngineOptions, catalogue_lines, controls
    from equivtest.report.terminal import kill_screen

    if as_list:
        for line in catalogue_lines(values["only"], values["faults_from"]):
            click.echo(line)
        return 0
    options = ControlsOptions(engine=EngineOptions(**pick(values, _ENGINE_FIELDS)), **values)
    run_dir, matrix = controls(options, listener_for(Console(stderr=True)))
    if as_json:
        click.echo(json.dumps(list(matrix.rows()), indent=2))
    else:
        console = Console()
        console.print(f"page: {run_dir / 'controls.html'}", soft_wrap=True, highlight=False)
        console.print(kill_screen(matrix))
    return 0 if matrix.as_expected else 1
