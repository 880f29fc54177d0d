"""`equivtest lm-eval`: the coarse gate, a benchmark's score with speculation off and on."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import click

from equivtest.cli.options import engine_options, pick_engine, server_options

_EPILOG = """\b
Examples:
  equivtest lm-eval                               sums of two numbers, offline, three seeds an arm
  equivtest lm-eval --task gsm8k --seeds 3        a task of the harness, whose data it fetches
  equivtest lm-eval --task my_task.yaml --items 200
  equivtest lm-eval --plant inflated_acceptance --epsilon 0.5   would this gate see such a fault?
\b
Needs the harness: pip install 'equivtest[lm-eval]'. Two readings: whether the arms' 95 % intervals over seeds overlap,
which is what is usually looked at, and the interval of the difference, paired by item, which decides.
\b
Exit codes: 0 it lies within the margin, 1 it leaves out 0 (5 % of correct decoders), 2 usage error, 3 neither,
4 invalid. Coarse: a benchmark sees no fault that leaves its score alone. `equivtest run` does.
"""


@click.command("lm-eval", epilog=_EPILOG)
@click.option(
    "--task",
    default="addition",
    show_default=True,
    help="A task of the harness, a YAML file of its format, or addition, which ships here.",
)
@click.option("--seeds", type=int, default=3, show_default=True, help="Answers to every item in each arm.")
@click.option("--items", type=int, default=None, help="The first so many items of the task; default: all.")
@click.option("--metric", default=None, help="name or name,filter; default: the task's first that scores each item.")
@click.option("--temperature", type=float, default=0.8, show_default=True, help="In place of the task's own.")
@click.option(
    "--margin",
    type=float,
    default=0.05,
    show_default=True,
    help="Difference of scores that still counts as equivalent.",
)
@click.option("--plant", "planted", default=None, help="Put this fault into arm on, to learn whether it is seen.")
@click.option("--epsilon", type=float, default=0.1, show_default=True, help="Size of inflated_acceptance.")
@click.option("--run-seed", type=int, default=0, show_default=True, help="Seeds every random stream.")
@click.option("--output", type=click.Path(path_type=Path), default=None, help="Folder for lm-eval.json and lm-eval.md.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on standard output.")
@engine_options
@server_options
def command(as_json: bool, **values: Any) -> int:
    """Score a benchmark of EleutherAI's harness with speculation off and on, and judge the difference."""
    from rich.console import Console

    from equivtest.cli.progress import listener_for
    from equivtest.pipeline.coarse import CoarseOptions, coarse
    from equivtest.report.coarse import as_json as record
    from equivtest.report.coarse import coarse_screen

    # The harness warns of what is none of the user's doing.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    subject = pick_engine(values)
    result = coarse(CoarseOptions(engine=subject, **values), listener_for(Console(stderr=True)))
    if as_json:
        click.echo(json.dumps(record(result), indent=2))
    else:
        Console().print(coarse_screen(result))
    return result.exit_code
