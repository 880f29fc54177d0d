"""Fixtures that more than one room needs: the real model, here and in Hugging Face transformers; the command line."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

# As the command line does, and before torch starts its threads: see equivtest.cli.main.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Two processes run the tests: a pool of threads in each of them would cost more than it gives.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where nothing compiled may be kept, each of the many processes that the tests start would compile the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest
import torch

from equivtest.cli import main as cli_main
from equivtest.decoder.hub import resolve_model
from equivtest.errors import KernelUnavailable
from equivtest.kernels.registry import get_backend

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from equivtest.decoder.weights import Checkpoint


LONGEST_FIRST = (
    "tests/pipeline/test_controls.py",
    "tests/pipeline/test_kill_and_resume.py",
    "tests/pipeline/test_run.py",
    "tests/kernels/test_cuda_compiles.py",
    "tests/test_style.py",
    "tests/training/test_evaluate.py",
    "tests/cli/test_commands.py",
    "tests/calibration/test_levels.py",
    "tests/decoder/test_executor.py",
    "tests/decoder/test_processed_decoding.py",
    "tests/decoder/test_stops.py",
)
"""So that no process waits at the end for another's long file."""


def pytest_sessionstart(session: pytest.Session) -> None:
    """The C++ kernels are compiled before the processes of the tests start: else each of them would do it."""
    if not hasattr(session.config, "workerinput"):
        with contextlib.suppress(KernelUnavailable):
            get_backend("cpp")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where torch finds no usable CUDA device; the order is the one above."""
    place = {name: index for index, name in enumerate((*LONGEST_FIRST, "", "tests/test_main_path.py"))}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], place[""]))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The built-in model's file, fetched on first use."""
    return resolve_model("smollm2-135m")


@pytest.fixture(scope="session")
def smollm2_checkpoint(smollm2_path: Path) -> Checkpoint:
    from equivtest.decoder.weights import load_checkpoint

    return load_checkpoint(smollm2_path)


@pytest.fixture(scope="session")
def hf_smollm2(smollm2_checkpoint: Checkpoint) -> PreTrainedModel:
    """transformers' LlamaForCausalLM with the same float32 weights, in evaluation mode."""
    from equivtest.decoder.transformers_model import transformers_model

    return transformers_model(smollm2_checkpoint.config, smollm2_checkpoint.weights, dtype=torch.float32)


@pytest.fixture
def page() -> None:
    """For tests that look at the page of a run that they make."""


@pytest.fixture(autouse=True)
def _no_page_unless_asked_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing the figures of its page is most of what a small run costs."""
    if "page" not in request.fixturenames:
        monkeypatch.setattr("equivtest.pipeline.publish.write_html", lambda data, path: path.write_text("no page"))


@pytest.fixture
def equivtest(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run a command line in this process; gives (exit code, stdout, stderr)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["equivtest", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli_main.main()
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return call
