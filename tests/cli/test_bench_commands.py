"""The benchmarks as a user types them, on the small model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from equivtest.bench.gpu_figures import steps_with_figures
from equivtest.cli.bench import command

TINY = ("--model", "tiny", "--kernels", "reference", "--dtype", "float32", "--drafter", "ngram")
SCRIPT = Path(__file__).parents[2] / ".ci" / "gpu"


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(command, list(map(str, arguments)), standalone_mode=False)


@pytest.mark.parametrize("name", ["kernels", "decode", "tpot", "mixed", "onehot", "rounds", "protocol"])
def test_every_benchmark_explains_itself_with_an_example(name: str) -> None:
    ended = bench(name, "--help")
    assert f"  equivtest bench {name}" in ended.output
    assert "--device" in ended.output


def test_a_benchmark_leaves_its_figures_with_device_versions_commit_and_command(tmp_path: Path) -> None:
    ended = bench("mixed", *TINY, "--max-tokens", 4, "--output", tmp_path / "mixed.json")
    assert ended.exception is None
    assert ended.return_value == 0
    left = json.loads((tmp_path / "mixed.json").read_text("utf-8"))
    assert left["bench"] == "mixed"
    assert left["command"].startswith("equivtest")
    assert {"git_commit", "source_sha256"} <= left["code"].keys()
    assert left["settings"]["device"] == "cpu"
    assert left["settings"]["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert left["settings"]["subject"]["drafter"] == "ngram"
    assert len(left["rows"]) == 6


def test_the_protocol_benchmark_tells_every_part_and_ends_as_its_run(tmp_path: Path) -> None:
    arguments = ("--config", "topp95", "--budget", "smoke", "--run-dir", tmp_path / "run")
    ended = bench("protocol", *TINY, "--kernels", "cpp", *arguments, "--output", tmp_path / "protocol.json")
    assert ended.exception is None
    left = json.loads((tmp_path / "protocol.json").read_text("utf-8"))
    verdict = json.loads((tmp_path / "run" / "verdict.json").read_text("utf-8"))
    assert ended.return_value == verdict["exit_code"]
    assert left["settings"]["verdict"] == verdict["verdict"]
    seconds = {row["part"]: row["seconds"] for row in left["rows"]}
    arms = ("off", "on", "on_null", "biased")
    parts = ["repeat", *(f"collect {arm}" for arm in arms), *(f"score {arm}" for arm in arms), "analyse", "report"]
    assert list(seconds) == ["start", "warm-up", *parts, "total"]
    assert all(value > 0 for value in seconds.values())
    assert sum(seconds[part] for part in parts) == pytest.approx(seconds["total"])


def test_sizes_do_not_go_with_cuda() -> None:
    ended = bench("kernels", "--device", "cuda", "--rows", 5)
    assert "--rows" in str(ended.exception)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_the_gpu_script_says_that_there_is_no_gpu() -> None:
    ended = run_script("kernels")
    assert ended.returncode == 2
    assert "no usable CUDA GPU" in ended.stderr


def test_the_gpu_script_names_its_steps_and_every_figure_has_one() -> None:
    ended = run_script("kernels", "juggle")
    assert ended.returncode == 2
    assert "unknown step juggle" in ended.stderr
    assert set(steps_with_figures()) < set(ended.stderr.split())


def run_script(*steps: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run([SCRIPT, *steps], env=environment, capture_output=True, text=True, check=False)
