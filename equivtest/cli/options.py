"""Options that several commands share, and how they become the records that the library takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

ENGINE_FIELDS = (
    "model", "dtype", "device", "kernels", "drafter", "draft_len", "early_exit_layers", "draft_model", "acceptance",
    "threads",
)  # fmt: skip
ANALYSIS_FIELDS = ("statistic", "exact", "dependence", "num_permutations")


def engine_options(command: Command) -> Command:
    """What decides which decoder is tested; fields of EngineOptions."""
    return _stack(
        command,
        click.option("--model", default="smollm2-135m", show_default=True,
                     help="Built-in name, GGUF file, Hugging Face folder or hub id."),
        click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16"]), default="auto", show_default=True,
                     help="Weights and activations; auto is bfloat16 where the device multiplies it in hardware."),
        click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True,
                     help="Where the decoder runs."),
        click.option("--kernels", default="auto", show_default=True,
                     help="Kernel backend: auto, cpp, cuda, flashinfer or reference."),
        click.option("--drafter", default="early_exit", show_default=True,
                     help="ngram, early_exit, sampled_exit (the same layers, sampled), self, model or dflash."),
        click.option("--draft-len", type=int, default=2, show_default=True, help="Drafts offered per step."),
        click.option("--early-exit-layers", type=int, default=None, help="Layers of early_exit and sampled_exit."),
        click.option("--draft-model", default=None,
                     help="What `--drafter model` or dflash reads; dflash has one for the built-in model."),
        click.option("--acceptance", type=click.Choice(["chain", "match"]), default="chain", show_default=True,
                     help="Acceptance rule; both are exact."),
        click.option("--threads", type=int, default=None, help="CPU threads; default: all cores."),
    )  # fmt: skip


def analysis_options(command: Command) -> Command:
    """How the samples are judged; fields of AnalysisOptions."""
    return _stack(
        command,
        click.option("--statistic", type=click.Choice(["chi2", "max_z"]), default="chi2", show_default=True,
                     help="Per-cell statistic."),
        click.option("--exact", is_flag=True, help="Monte-Carlo p-values over label permutations."),
        click.option("--dependence", type=click.Choice(["bh", "by"]), default="bh", show_default=True,
                     help="False discovery rate: Benjamini-Hochberg or, for any dependence, Benjamini-Yekutieli."),
        click.option("--num-permutations", type=int, default=None,
                     help="Permutations per cell for --exact and max_z; default: enough to reject one cell."),
    )  # fmt: skip


def results_dir_option(help_text: str) -> Callable[[Command], Command]:
    """--results-dir, which every command that looks for runs has."""
    return click.option(
        "--results-dir",
        type=click.Path(path_type=Path),
        default=Path("results"),
        show_default=True,
        help=help_text,
    )


def pick(values: dict[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    """Take `fields` out of a command's values."""
    return {field: values.pop(field) for field in fields}


def _stack(command: Command, *decorators: Callable[[Command], Command]) -> Command:
    for decorate in reversed(decorators):
        command = decorate(command)
    return command
