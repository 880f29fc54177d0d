"""`equivtest kernel`: is a rejection sampler, given as a function, exact?"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

_EPILOG = """\b
The function takes draft_token_ids [B, K], draft_probs [B, K, V] (None for one-hot drafts) and target_probs
[B, K+1, V], and returns ids [B, K+1]: accepted drafts, one recovered or bonus token, then -1; or (ids, accepted
counts). Parameters named generator, generators, seeds and positions, or uniforms get its randomness, one named
num_draft fewer drafts a row. Other call shapes: --form.

\b
Examples:
  equivtest kernel my_package.sampler:rejection_sample
  equivtest kernel flashinfer.sampling:chain_speculative_sampling --form flashinfer --device cuda
  equivtest kernel flashinfer.sampling:chain_speculative_sampling --form flashinfer --device cuda --coins seeds
  equivtest kernel vllm.v1.sample.rejection_sampler:rejection_sample --form vllm --device cuda --vocab 151936
  equivtest kernel --backend cpp
  equivtest kernel my_package.sampler:rejection_sample --only random --only close --budget audit

\b
Exit codes: 0 no difference was found, 1 different, 2 usage error, 4 the function could not be tested.
"""


@click.command("kernel", epilog=_EPILOG)
@click.argument("function", metavar="MODULE:FUNCTION", required=False)
@click.option("--backend", default=None, help="A kernel backend of ours instead: cpp, cuda, flashinfer or reference.")
@click.option("--form", default="equivtest", show_default=True, help="Call shape: equivtest, flashinfer, vllm or mask.")
@click.option(
    "--coins",
    default="auto",
    show_default=True,
    help="Randomness that the function gets: generator, generators (one a row), seeds (one a row), uniforms, or global "
    "(torch's own). auto: by the names of its parameters.",
)
@click.option("--device", default=None, help="Where it runs, such as cuda. Default: where the backend does, else cpu.")
@click.option(
    "--budget",
    default="gate",
    show_default=True,
    help="smoke (seconds), gate (finds an acceptance bias of .003), audit.",
)
@click.option(
    "--vocab", "vocab", type=int, multiple=True, help="Vocabulary to play; repeatable. Default: 2, 128, 4096."
)
@click.option("--only", multiple=True, help="Only laws of this kind, such as random or disjoint; repeatable.")
@click.option("--no-one-hot", is_flag=True, help="The function takes no one-hot drafts (draft_probs=None).")
@click.option("--seed", type=int, default=0, show_default=True, help="Of laws, drafts and coins.")
@click.option("--json", "output", type=click.Path(path_type=Path), default=None, help="Also write the report here.")
def command(
    function: str | None,
    backend: str | None,
    vocab: tuple[int, ...],
    no_one_hot: bool,
    output: Path | None,
    **values: Any,
) -> int:
    """Test the rejection sampler MODULE:FUNCTION, or a backend of ours, and say in words what is wrong with it."""
    if (function is None) == (backend is None):
        raise click.UsageError("give either MODULE:FUNCTION or --backend")
    if backend is not None and (values["form"], values["coins"]) != ("equivtest", "auto"):
        raise click.UsageError("a backend of ours has its own --form and --coins")
    from equivtest.battery.adapters import BackendSampler, load_sampler
    from equivtest.battery.plan import DEFAULT_VOCABS
    from equivtest.battery.run import check_sampler
    from equivtest.files import write_whole

    sys.path.insert(0, os.getcwd())
    sampler = load_sampler(function) if function is not None else BackendSampler(str(backend))
    values["device"] = values["device"] or getattr(sampler, "device", "cpu")
    report = check_sampler(
        sampler, vocab=vocab or DEFAULT_VOCABS, one_hot=not no_one_hot, name=function or f"backend {backend}", **values
    )
    if output is not None:
        write_whole(output, json.dumps(_where(function, report.device) | report.to_dict(), indent=2) + "\n")
    for line in report.lines():
        click.echo(line)
    return report.exit_code


def _where(function: str | None, device: str) -> dict[str, Any]:
    """How the report came about: the command, our code, the machine, and the versions of the sampler's package and of
    what runs it."""
    from equivtest.bench.measured import describe_device
    from equivtest.pipeline.manifest import command_line, describe_code, describe_machine

    settings = describe_device(device.partition(":")[0])
    if function is not None:
        package = function.partition(":")[0].partition(".")[0]
        settings["versions"][package] = getattr(sys.modules.get(package), "__version__", None)
    return {"command": command_line(), "machine": describe_machine(), "code": describe_code(), "settings": settings}
