"""The `equivtest` command: its group, and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import traceback

import click

import equivtest
from equivtest.errors import EquivtestError
from equivtest.records import EXIT_CODES, Word

_COMMANDS = (
    "run",
    "report",
    "gate",
    "controls",
    "compare",
    "kernel",
    "power",
    "doctor",
    "bench",
    "model",
    "drafter",
    "lm-eval",
)
"""Each is the command `command` of the module of that name in equivtest/cli, imported when it is called."""

_EPILOG = """\b
Exit codes: 0 equivalent, 1 different, 2 usage error, 3 inconclusive, 4 invalid run.

\b
Examples:
  equivtest run --config topp95 --budget smoke    about a minute, sees gross faults
  equivtest run --config topp95                   the gate: 8 prompts x 32 positions x 256 seeds x 4 arms
  equivtest gate                                  the last run's verdict on one screen, as an exit code
"""


class _LazyGroup(click.Group):
    def list_commands(self, context: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"equivtest.cli.{name.replace('-', '_')}").command
        return command


@click.group(cls=_LazyGroup, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(equivtest.__version__, prog_name="equivtest")
@click.option("-v", "--verbose", is_flag=True, help="Show tracebacks and details of the work.")
def cli(verbose: bool) -> None:
    """Does an LLM decoder with speculative decoding sample from the same distribution as without it?"""
    logging.basicConfig(level=logging.DEBUG if verbose else logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("equivtest").setLevel(logging.DEBUG if verbose else logging.INFO)


def main() -> None:
    """Entry point. Every way out has an exit code, and none of them is 0 by default."""
    # Before torch loads its thread pool: threads that spin while they wait make a decoder several times slower on a
    # machine that does anything else, and gain about 5 % on one that does not.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if not sys.stderr.isatty():
        # Bars of other packages, which read this when they are imported, would fill a log; ours say plain lines there.
        for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(name, "1")
    verbose = bool({"-v", "--verbose"} & set(sys.argv[1:]))
    try:
        code = cli.main(standalone_mode=False)
    except click.exceptions.Exit as exit_:
        code = exit_.exit_code
    except click.ClickException as error:
        error.show()
        code = 2
    except (BrokenPipeError, SystemExit):
        # Whoever read our output has gone. click and rich exit 1 then, which here would claim a difference.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_CODES[Word.INVALID]
    except (click.Abort, KeyboardInterrupt):
        click.echo("equivtest: interrupted", err=True)
        code = EXIT_CODES[Word.INVALID]
    except EquivtestError as error:
        code = _report(str(error), error.exit_code, verbose)
    except OSError as error:
        remedy = "check that the path exists, is writable and has room"
        code = _report(f"{error}; {remedy}", EXIT_CODES[Word.INVALID], verbose)
    except ImportError as error:
        remedy = "reinstall with `pip install -e .`; `equivtest doctor` says what is missing"
        code = _report(f"{error}; {remedy}", EXIT_CODES[Word.INVALID], verbose)
    except Exception as error:
        hint = "" if verbose else " (run again with `equivtest -v ...` for the traceback)"
        code = _report(f"internal error: {type(error).__name__}: {error}{hint}", EXIT_CODES[Word.INVALID], verbose)
    # A command that forgets to say how it ended has not shown anything.
    sys.exit(code if isinstance(code, int) else EXIT_CODES[Word.INVALID])


def _report(line: str, code: int, verbose: bool) -> int:
    if verbose:
        traceback.print_exc()
    click.echo(f"equivtest: {line}", err=True)
    return code
