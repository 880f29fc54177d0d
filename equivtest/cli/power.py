"""`equivtest power`: what bias a protocol can see, or what a bias needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from equivtest.cli.options import ENGINE_FIELDS, engine_options, pick, results_dir_option

_EPILOG = """\b
Examples:
  equivtest power                                  the newest run: what its draft probabilities let a protocol see
  equivtest power results/my-run --bias 0.005      seeds with which a bias of .005 is found
  equivtest power --simulate --biases 0,0.01,0.02  decodes many runs of each bias and counts what every family finds
"""


@click.command("power", epilog=_EPILOG)
@click.argument("run_dir", required=False, type=click.Path(path_type=Path))
@results_dir_option("Where to look for the newest run.")
@click.option("--bias", type=float, default=None, help="Also say how many seeds this acceptance bias needs.")
@click.option("--power", "target", type=float, default=0.9, show_default=True, help="Probability of finding it.")
@click.option("--alpha", type=float, default=0.01, show_default=True, help="Level of the whole law family.")
@click.option("--simulate", is_flag=True, help="Decode and judge many runs; hours on a laptop, minutes on a GPU.")
@click.option(
    "--config",
    "configs",
    multiple=True,
    default=("topp95",),
    show_default=True,
    help="With --simulate: sampling config, several or `all`.",
)
@click.option("--budget", default="gate", show_default=True, help="With --simulate: size of one run.")
@click.option(
    "--biases",
    default="0,0.005,0.01,0.02,0.05,0.1",
    show_default=True,
    help="With --simulate: acceptance biases to plant; 0 is a correct decoder.",
)
@click.option("--fault", "faults", multiple=True, help="With --simulate: also a fault by name, such as reused_coin.")
@click.option("--runs", type=int, default=20, show_default=True, help="With --simulate: runs of each.")
@click.option("--batch", type=int, default=256, show_default=True, help="With --simulate: samples decoded at once.")
@click.option("--workers", type=int, default=None, help="With --simulate: processes that judge; default: all cores.")
@click.option(
    "--study-dir",
    type=click.Path(path_type=Path),
    default=Path("results/power-study"),
    show_default=True,
    help="With --simulate: where samples are kept. Continues what is there.",
)
@click.option("--output", type=click.Path(path_type=Path), default=None, help="Write the result as JSON.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@engine_options
def command(simulate: bool, output: Path | None, as_json: bool, **values: Any) -> int:
    """Say what acceptance bias a protocol finds with 90 % power: from RUN_DIR's law columns, or by simulation."""
    from equivtest.files import write_whole

    engine = pick(values, ENGINE_FIELDS)
    record = _simulate(engine, **values) if simulate else _closed_form(**values)
    text = json.dumps(record, indent=2) + "\n"
    if output is not None:
        write_whole(output, text)
    if as_json:
        click.echo(text, nl=False)
    else:
        for line in record["summary"]:
            click.echo(line)
    return 0


def _closed_form(
    run_dir: Path | None, results_dir: Path, bias: float | None, target: float, alpha: float, **_: Any
) -> dict[str, Any]:
    from equivtest.pipeline.power import closed_form_record
    from equivtest.pipeline.run import find_run

    return closed_form_record(run_dir or find_run(results_dir), bias=bias, power=target, alpha=alpha)


def _simulate(engine: dict[str, Any], **values: Any) -> dict[str, Any]:
    from rich.console import Console

    from equivtest.cli.progress import listener_for
    from equivtest.pipeline.power_study import EngineOptions, StudyOptions, study

    options = StudyOptions(
        engine=EngineOptions(max_batch=values["batch"], **engine),
        biases=_numbers(values["biases"]),
        **{name: values[name] for name in ("configs", "budget", "faults", "runs", "batch", "workers", "study_dir")},
    )
    return study(options, listener_for(Console(stderr=True)))


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter("must be numbers between commas, such as 0,0.01", param_hint="--biases") from None
