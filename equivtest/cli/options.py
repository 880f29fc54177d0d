"""Options that several commands share, and how they become the records that the library takes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from equivtest.pipeline.run import EngineOptions

Command = TypeVar("Command", bound=Callable[..., Any])

ENGINE_FIELDS = (
    "model", "dtype", "device", "kernels", "drafter", "draft_len", "early_exit_layers", "draft_model", "drafts",
    "acceptance", "threads",
)  # fmt: skip
SERVER_FIELDS = (
    "spec_off", "spec_on", "api", "served_model", "tokenizer", "choices", "concurrency", "timeout_s", "retries",
    "backoff_s", "seeded", "extra_body", "forbid_eos",
)  # fmt: skip
VLLM_FIELDS = ("speculative_config", "engine_args")
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
        click.option("--drafter", default="auto", show_default=True,
                     help="auto (dflash for smollm2-135m, whose drafter ships here, else early_exit; openvino: ngram), "
                     "dflash, ngram, early_exit, sampled_exit (the same layers, sampled), self or model."),
        click.option("--draft-len", type=str, default="2", show_default=True, metavar="INTEGER|auto",
                     callback=_draft_len,
                     help="Drafts offered per step; auto: the decoder measures which length pays, before the run."),
        click.option("--early-exit-layers", type=int, default=None, help="Layers of early_exit and sampled_exit."),
        click.option("--draft-model", default=None,
                     help="What `--drafter model` reads, a model, or dflash, a folder of `equivtest drafter train` or "
                     "smollm2-dflash, which ships here."),
        click.option("--drafts", type=click.Choice(["likeliest", "drawn"]), default="likeliest", show_default=True,
                     help="How a dflash drafter with a Markov head picks its drafts: the likeliest, or drawn from the "
                     "request's law, which the chain rule keeps oftener and which goes with no other rule."),
        click.option("--acceptance", type=click.Choice(["chain", "match"]), default="chain", show_default=True,
                     help="Acceptance rule; both are exact."),
        click.option("--threads", type=int, default=None, help="CPU threads; default: all cores."),
    )  # fmt: skip


def server_options(command: Command) -> Command:
    """Which engine is tested, and how a server is asked or vLLM loaded; fields of ServerOptions and VllmOptions."""
    return _stack(
        command,
        click.option("--engine", default="decoder", show_default=True,
                     help="decoder (built in), transformers, vllm, openvino or openai (a server): `equivtest doctor`."),
        click.option("--speculative-config", default="{}", metavar="JSON", callback=_json_table,
                     help="vllm: its own speculative config, for the arms that speculate."),
        click.option("--engine-args", default="{}", metavar="JSON", callback=_json_table,
                     help="vllm: arguments of its LLM in both arms, beside ours or in their place."),
        click.option("--spec-off", default=None, metavar="URL", help="openai: a server that does not speculate."),
        click.option("--spec-on", default=None, metavar="URL",
                     help="openai: one that does. With one of the two a run collects what it can; --resume goes on."),
        click.option("--api", default="completions", show_default=True,
                     help="openai: completions (vLLM and others), or the own interface of llamacpp or sglang."),
        click.option("--served-model", default=None,
                     help="openai: the server's name of the model; default: its only one."),
        click.option("--tokenizer", default=None,
                     help="openai: GGUF file or folder where the weights of --model are not at hand; then no law."),
        click.option("--choices", type=int, default=1, show_default=True,
                     help="openai: samples asked for in one request; they share its seed."),
        click.option("--concurrency", type=int, default=8, show_default=True,
                     help="openai: requests under way at once."),
        click.option("--timeout", "timeout_s", type=float, default=120.0, show_default=True,
                     help="openai: longest wait for an answer, seconds."),
        click.option("--retries", type=int, default=5, show_default=True,
                     help="openai: repeats of a request without an answer that can be read, or with 429, 500 or more."),
        click.option("--backoff", "backoff_s", type=float, default=0.5, show_default=True,
                     help="openai: seconds before the first repeat, doubled before each further one."),
        click.option("--seeded/--unseeded", default=True, show_default=True,
                     help="openai: send every request a seed of its own, or leave it to the server's stream."),
        click.option("--extra-body", default="{}", metavar="JSON", callback=_json_table,
                     help="openai: fields of every request beside ours, or in their place."),
        click.option("--forbid-eos", is_flag=True,
                     help="openai: forbid the end of text by a logit bias, for servers that cannot ignore it."),
        click.option("--api-key-env", default="OPENAI_API_KEY", show_default=True,
                     help="openai: environment variable that holds the key, if there is one. It is kept nowhere."),
    )  # fmt: skip


def _draft_len(context: click.Context, parameter: click.Parameter, value: str) -> int | None:
    if value == "auto":
        return None
    try:
        return int(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is neither a number nor auto") from None


def _json_table(context: click.Context, parameter: click.Parameter, value: str) -> dict[str, Any]:
    try:
        table = json.loads(value)
    except ValueError as error:
        raise click.BadParameter(f"is not JSON: {error}") from None
    if not isinstance(table, dict):
        message = "must be a JSON object"
        raise click.BadParameter(message)
    return table


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


def pick_engine(values: dict[str, Any]) -> EngineOptions:
    """Take the values of `engine_options` and `server_options` out of a command's."""
    from equivtest.pipeline.run import EngineOptions, ServerOptions, VllmOptions

    engine, api_key = values.pop("engine"), os.environ.get(values.pop("api_key_env"))
    asked = pick(values, SERVER_FIELDS)
    is_server = engine == "openai" or asked["spec_off"] or asked["spec_on"]
    server = ServerOptions(api_key=api_key or None, **asked) if is_server else None
    own = pick(values, VLLM_FIELDS)
    vllm = VllmOptions(**own) if engine == "vllm" or any(own.values()) else None
    if vllm is not None:  # vLLM is told so by the environment alone; its log would be among what a program reads
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    return EngineOptions(engine=engine, server=server, vllm=vllm, **pick(values, ENGINE_FIELDS))


def _stack(command: Command, *decorators: Callable[[Command], Command]) -> Command:
    for decorate in reversed(decorators):
        command = decorate(command)
    return command
