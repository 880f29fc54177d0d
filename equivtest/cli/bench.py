"""`equivtest bench`: the project's own timings, measured side by side with the usual way."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from equivtest.cli.options import ENGINE_FIELDS, engine_options, pick

if TYPE_CHECKING:
    from equivtest.pipeline.run import EngineOptions


@click.group("bench")
def command() -> None:
    """Measure kernels and the decoder against the plain way, in one process on this machine."""


def _output_option(function: Callable[..., Any]) -> Callable[..., Any]:
    write = "Also write the figures, with machine and versions, to this JSON file."
    return click.option("--output", type=click.Path(path_type=Path), default=None, help=write)(function)


def _tell(line: str) -> None:
    click.echo(line, err=True)


def _device_option(function: Callable[..., Any]) -> Callable[..., Any]:
    choice = click.Choice(["cpu", "cuda"])
    return click.option("--device", type=choice, default="cpu", show_default=True, help="Where it runs.")(function)


def _subject_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The decoder that is timed, handed to the command as `engine` and `random_model`; and --output."""

    @functools.wraps(function)
    def call(**values: Any) -> int:
        from equivtest.pipeline.run import EngineOptions

        code: int = function(engine=EngineOptions(**pick(values, ENGINE_FIELDS)), **values)
        return code

    shape = "Time a model of this shape with random weights instead: qwen3-4b."
    return engine_options(click.option("--random-model", default=None, help=shape)(_output_option(call)))


@command.command("kernels", epilog="\b\nExample:\n  equivtest bench kernels --output bench-kernels.json")
@click.option("--rows", type=int, help="Logits rows; not with cuda.  [default: 256]")
@click.option("--vocab", type=int, help="Vocabulary size; not with cuda.  [default: 49152]")
@click.option("--repeats", type=int, help="Timed repetitions; the median is shown; not with cuda.  [default: 7]")
@_device_option
@_output_option
def kernels(device: str, output: Path | None, **sizes: int | None) -> int:
    """Filter and sample at top_p .95: cpp and reference against torch's sort and multinomial.

    On cuda: from logits to accepted tokens at T .8 top_p .95, every backend that works here and the FlashInfer pipeline
    in pieces, at the vocabularies 49,152 and 151,936, batches of 1 to 64 and 7 and 15 drafts.
    """
    given: dict[str, Any] = {name: value for name, value in sizes.items() if value is not None}
    if device == "cuda":
        from equivtest.bench.gpu_kernels import bench_gpu_kernels

        if given:
            raise click.UsageError(f"--{next(iter(given))} does not go with --device cuda: the sizes are fixed there")
        return _show("kernels", bench_gpu_kernels(on_progress=_tell), output)
    from equivtest.bench.kernels import bench_kernels

    names = {"rows": "num_rows", "vocab": "vocab_size", "repeats": "repeats"}
    return _show("kernels", bench_kernels(**{names[name]: value for name, value in given.items()}), output)


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
@_device_option
@click.option("--kernels", help="Kernel backend; default: cpp, on cuda cuda.")
@_output_option
def decode(output: Path | None, **settings: Any) -> int:
    """A plain decoding step, whole and forward alone, side by side with transformers on the same weights."""
    from equivtest.bench.decode import bench_decode

    return _show("decode", bench_decode(**settings, on_progress=_tell), output)


@command.command("tpot", epilog="\b\nExample:\n  equivtest bench tpot --device cuda --drafter ngram --draft-len 4")
@click.option("--max-tokens", default=128, show_default=True, help="Tokens of each request.")
@_subject_options
def tpot(engine: EngineOptions, random_model: str | None, output: Path | None, max_tokens: int) -> int:
    """Time per output token with 1, 8 and 16 requests in flight, spec-off and spec-on, greedy and sampled."""
    from equivtest.bench.serving import bench_tpot

    result = bench_tpot(engine, random_model=random_model, max_tokens=max_tokens, on_progress=_tell)
    return _show("tpot", result, output)


@command.command("mixed", epilog="\b\nExample:\n  equivtest bench mixed --device cuda")
@click.option("--max-tokens", default=256, show_default=True, help="Tokens of each request.")
@_subject_options
def mixed(engine: EngineOptions, random_model: str | None, output: Path | None, max_tokens: int) -> int:
    """Four greedy and four sampled requests in one batch, against eight greedy ones and against spec-off."""
    from equivtest.bench.serving import bench_mixed

    result = bench_mixed(engine, random_model=random_model, max_tokens=max_tokens, on_progress=_tell)
    return _show("mixed", result, output)


@command.command("onehot", epilog="\b\nExample:\n  equivtest bench onehot --device cuda --draft-len 7")
@click.option("--max-tokens", default=128, show_default=True, help="Tokens of each request.")
@_subject_options
def onehot(engine: EngineOptions, random_model: str | None, output: Path | None, max_tokens: int) -> int:
    """What dense one-hot rows of the drafts cost at 8 requests: written every step, by scatter, or not at all."""
    from equivtest.bench.onehot import bench_onehot

    result = bench_onehot(engine, random_model=random_model, max_tokens=max_tokens, on_progress=_tell)
    return _show("onehot", result, output)


@command.command("rounds", epilog="\b\nExample:\n  equivtest bench rounds --device cuda --draft-model drafter")
@click.option("--model", default="smollm2-135m", show_default=True, help="Built-in name, GGUF file or folder.")
@click.option("--draft-model", help="Folder of `equivtest drafter train`; default: what comes with the model.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    default="auto",
    show_default=True,
    help="Weights and activations.",
)
@_device_option
@click.option("--kernels", default="auto", show_default=True, help="Kernel backend.")
@click.option(
    "--acceptance", type=click.Choice(["chain", "match"]), default="chain", show_default=True, help="Acceptance rule."
)
@click.option("--concurrency", type=int, multiple=True, default=(1, 8, 16), show_default=True, help="Requests at once.")
@click.option(
    "--draft-len",
    "draft_lens",
    type=int,
    multiple=True,
    default=(1, 2, 3, 5, 7),
    show_default=True,
    help="Drafts of a request in a round; more than the drafter has are left out.",
)
@click.option("--max-tokens", default=256, show_default=True, help="Tokens of each request.")
@_output_option
def rounds(
    output: Path | None, concurrency: tuple[int, ...], draft_lens: tuple[int, ...], max_tokens: int, **settings: Any
) -> int:
    """Where the time of a speculative round on a GPU goes, and which draft length pays.

    Device time by stage against a plain step, what the device waits for the host, accepted drafts a round and by slot,
    and how many break even. Of the block drafter, whose rounds are laid out on the device.
    """
    from equivtest.bench.rounds import PAY_COLUMNS, TIME_COLUMNS, bench_rounds
    from equivtest.pipeline.run import EngineOptions

    result = bench_rounds(
        EngineOptions(drafter="dflash", **settings),
        concurrency=concurrency,
        draft_lens=draft_lens,
        max_tokens=max_tokens,
        on_progress=_tell,
    )
    keys, rows = ("concurrency", "sampling", "draft_len"), result.rows()
    _print("rounds: time", [pick(dict(row), (*keys, *TIME_COLUMNS)) for row in rows])
    shown = [row | {"by_slot": " ".join(f"{rate:.2f}" for rate in row["by_slot"])} for row in rows]
    _print("rounds: what they give", [pick(row, (*keys, *PAY_COLUMNS)) for row in shown])
    if output:
        _write("rounds", output, result.settings(), rows)
    return 0


@command.command("protocol", epilog="\b\nExample:\n  equivtest bench protocol --device cuda --kernels flashinfer")
@click.option("--config", "configs", multiple=True, default=("all",), show_default=True, help="As of `equivtest run`.")
@click.option("--budget", default="gate", show_default=True, help="As of `equivtest run`.")
@click.option("--run-dir", type=click.Path(path_type=Path), default=None, help="Keep the run here; default: nowhere.")
@_subject_options
def protocol(
    engine: EngineOptions, random_model: str | None, output: Path | None, configs: tuple[str, ...], budget: str,
    run_dir: Path | None,
) -> int:  # fmt: skip
    """Wall time of a whole run by its parts, after one that warms up; ends as that run does, but 0 for a random model,
    which is timed and not judged."""
    from equivtest.pipeline.analysis_options import AnalysisOptions
    from equivtest.pipeline.run import RunOptions
    from equivtest.pipeline.timed_run import timed_run

    def opened() -> Any:
        from equivtest.bench.subject import open_engine  # loads torch, which is part of starting

        return open_engine(engine, random_model, on_message=_tell)

    options = RunOptions(configs=configs, budget=budget, engine=engine, analysis=AnalysisOptions(), run_dir=run_dir)
    result = timed_run(options, opened, on_progress=_tell)
    _show("protocol", result, output)
    return 0 if random_model else result.result.data.exit_code


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

    console = Console()
    console = console if console.is_terminal else Console(width=160)
    table = Table(title=f"bench {name}")
    for column, value in rows[0].items():
        table.add_column(column, justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*(f"{value:,.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    console.print(table)


def _write(name: str, output: Path, settings: dict[str, Any], rows: list[dict[str, Any]], **more: Any) -> None:
    from equivtest.pipeline.manifest import command_line, describe_code, describe_machine

    output.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "bench": name, "command": command_line(), "machine": describe_machine(), "code": describe_code(),
        "settings": settings, "rows": rows, **more,
    }  # fmt: skip
    output.write_text(json.dumps(record, indent=2) + "\n", "utf-8")
