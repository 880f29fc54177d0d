"""`equivtest bench`: the project's own timings, measured side by side with the usual way."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


@click.group("bench")
def command() -> None:
    """Measure kernels and the decoder against the plain way, in one process on this machine."""


def _output_option(function: Callable[..., Any]) -> Callable[..., Any]:
    write = "Also write the figures, with machine and versions, to this JSON file."
    return click.option("--output", type=click.Path(path_type=Path), default=None, help=write)(function)


@command.command("kernels", epilog="\b\nExample:\n  equivtest bench kernels --output bench-kernels.json")
@click.option("--rows", default=256, show_default=True, help="Logits rows.")
@click.option("--vocab", default=49_152, show_default=True, help="Vocabulary size.")
@click.option("--repeats", default=7, show_default=True, help="Timed repetitions; the median is shown.")
@_output_option
def kernels(rows: int, vocab: int, repeats: int, output: Path | None) -> int:
    """Filter and sample at top_p .95: cpp and reference against torch's sort and multinomial."""
    from equivtest.bench.kernels import bench_kernels

    return _show("kernels", bench_kernels(num_rows=rows, vocab_size=vocab, repeats=repeats), output)


@command.command("decode", epilog="\b\nExample:\n  equivtest bench decode --batch 256 --context 60")
@click.option("--model", default="smollm2-135m", show_default=True, help="Built-in name, GGUF file or folder.")
@click.option("--batch", default=256, show_default=True, help="Sequences decoded together.")
@click.option("--context", default=60, show_default=True, help="Tokens already in the cache when timing starts.")
@click.option("--steps", default=8, show_default=True, help="Timed steps.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    default="auto",
    show_default=True,
    help="Weights and activations of both sides.",
)
@_output_option
def decode(model: str, batch: int, context: int, steps: int, dtype: str, output: Path | None) -> int:
    """A plain decoding step, whole and forward alone, side by side with transformers on the same weights."""
    from equivtest.bench.decode import bench_decode

    tell = functools.partial(click.echo, err=True)
    result = bench_decode(model, batch=batch, context=context, steps=steps, dtype=dtype, on_progress=tell)
    return _show("decode", result, output)


@command.command("calibration", epilog="\b\nExample:\n  equivtest bench calibration --output calibration.json")
@click.option("--replications", default=2_000, show_default=True, help="Correct runs of each family and of the gate.")
@click.option("--seed", default=1, show_default=True, help="Of every stream; the table depends on nothing else.")
@click.option("--workers", type=int, default=None, help="Processes; one a core by default.")
@_output_option
def calibration(replications: int, seed: int, workers: int | None, output: Path | None) -> int:
    """How often a correct decoder is stopped: every test's level and the whole gate's, on a synthetic decoder.

    Kind exact: the level must be the nominal one; upper: at most that. Exits 1, with a mark at the rate, if a level
    lies outside its exact interval. Takes some 10 minutes on 2 cores.
    """
    # The processes take a core each: a pool of threads in every one of them doubles the time.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from equivtest.bench.calibration import calibrate

    def tell(name: str, done: int, total: int) -> None:
        if done == total or done % 100 == 0:
            click.echo(f"{name}: {done:,} of {total:,}", err=True)

    result = calibrate(replications=replications, seed=seed, workers=workers, on_progress=tell)
    _print("calibration", result.rows())
    gate = [share.row() for share in result.gate]
    _print("calibration: the whole gate", gate)
    for level in result.failures:
        click.echo(f"outside its interval: {level}", err=True)
    if output:
        _write("calibration", output, result.settings(), [level.row() for level in result.levels], gate=gate)
    return 1 if result.failures else 0


def _show(name: str, result: Any, output: Path | None) -> int:
    rows = result.rows()
    _print(name, rows)
    if output:
        _write(name, output, result.settings(), rows)
    return 0


def _print(name: str, rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"bench {name}")
    for column, value in rows[0].items():
        table.add_column(column, justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*(f"{value:,.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)


def _write(name: str, output: Path, settings: dict[str, Any], rows: list[dict[str, Any]], **more: Any) -> None:
    from equivtest.pipeline.manifest import command_line, describe_code, describe_machine

    output.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "bench": name, "command": command_line(), "machine": describe_machine(), "code": describe_code(),
        "settings": settings, "rows": rows, **more,
    }  # fmt: skip
    output.write_text(json.dumps(record, indent=2) + "\n", "utf-8")
