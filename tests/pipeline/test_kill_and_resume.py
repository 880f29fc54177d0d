"""A run killed at any moment and resumed ends in the bytes of a run that was never stopped."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from equivtest.cli import main as cli_main

NO_PAGE = """
from equivtest.cli.main import main
from equivtest.pipeline import publish

publish.write_html = lambda data, path: path.write_text("no page")
main()
"""
"""What a process runs: the command, which draws no figures."""

RESULT_FILES = ("cells.parquet", "evidence.parquet", "verdict.json")


def arguments(model: Path, run_dir: Path, *more: str) -> list[str]:
    return [
        "run", "--config", "topp95", "--budget", "smoke", "--model", str(model), "--dtype", "float32",
        "--early-exit-layers", "2", "--run-dir", str(run_dir), "--no-confirm", "--threads", "1", *more,
    ]  # fmt: skip


def start(model: Path, run_dir: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", NO_PAGE, *arguments(model, run_dir, *more)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A suite that a script started in the background ignores interrupts, and its children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def digests(run_dir: Path) -> dict[str, str]:
    shards = sorted(run_dir.rglob("seeds=*.parquet"))
    files = [*shards, *(run_dir / name for name in RESULT_FILES)]
    return {str(path.relative_to(run_dir)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def num_shards(run_dir: Path) -> int:
    """Files of samples and of law columns."""
    return len(list(run_dir.rglob("seeds=*.parquet")))


def kill_when(process: subprocess.Popen[str], run_dir: Path, shards: int, extra_s: float) -> None:
    """SIGKILL once `shards` are on disk (or at once when they never come), a moment later."""
    while process.poll() is None and num_shards(run_dir) < shards:
        time.sleep(0.005)
    time.sleep(extra_s)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def finish(model: Path, run_dir: Path, *more: str) -> None:
    """To the end, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("equivtest.pipeline.publish.write_html", lambda data, path: path.write_text("no page"))
        patch.setattr(sys, "argv", ["equivtest", *arguments(model, run_dir, *more)])
        with pytest.raises(SystemExit) as ended:
            cli_main.main()
    assert ended.value.code == 0


@pytest.fixture(scope="module")
def uninterrupted(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    finish(tiny_model_dir, run_dir)
    return run_dir


def test_a_run_killed_several_times_ends_in_the_same_bytes(
    tiny_model_dir: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    first = True
    for shards, extra_s in ((0, 1.5), (1, 0.0), (5, 0.1), (12, 0.01)):
        process = start(tiny_model_dir, run_dir, *([] if first else ["--resume"]))
        kill_when(process, run_dir, shards, extra_s)
        first = not (run_dir / "manifest.json").exists()
    finish(tiny_model_dir, run_dir, *([] if first else ["--resume"]))
    assert digests(run_dir) == digests(uninterrupted)


def test_the_comparison_would_notice_another_run(tiny_model_dir: Path, uninterrupted: Path, tmp_path: Path) -> None:
    other = tmp_path / "run"
    finish(tiny_model_dir, other, "--run-seed", "1")
    ours, theirs = digests(other), digests(uninterrupted)
    assert ours.keys() == theirs.keys()
    assert not set(ours.values()) & {digest for name, digest in theirs.items() if name.startswith("samples")}


def test_an_interrupt_leaves_a_resumable_run_and_says_how(
    tiny_model_dir: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    process = start(tiny_model_dir, run_dir)
    while process.poll() is None and num_shards(run_dir) < 2:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate()
    assert process.returncode == 4, output
    assert "--resume" in output
    assert "Traceback" not in output
    finish(tiny_model_dir, run_dir, "--resume")
    assert digests(run_dir) == digests(uninterrupted)


def test_a_run_is_not_resumed_with_other_settings(equivtest, tiny_model_dir: Path, uninterrupted: Path) -> None:
    code, _, error = equivtest(*arguments(tiny_model_dir, uninterrupted, "--resume", "--epsilon", "0.3"))
    assert code == 2
    assert "fingerprint" in error


def test_a_finished_run_is_not_overwritten(equivtest, tiny_model_dir: Path, uninterrupted: Path) -> None:
    before = digests(uninterrupted)
    code, _, error = equivtest(*arguments(tiny_model_dir, uninterrupted))
    assert code == 2
    assert "--resume" in error
    assert digests(uninterrupted) == before
