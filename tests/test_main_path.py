"""The README's first command, on the real model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd


def test_a_smoke_run_of_the_real_model_ends_equivalent(tmp_path: Path, smollm2_path: Path) -> None:
    """Fixed seeds. On a processor that rounds differently a correct decoder is stopped in well under 1 % of runs."""
    run_dir = tmp_path / "run"
    command = "run --config topp95 --budget smoke --run-dir"
    # With every core, as a user has it: this test comes last, when the other workers are done.
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    ended = subprocess.run(
        [sys.executable, "-m", "equivtest", *command.split(), str(run_dir)],
        capture_output=True,
        text=True,
        check=False,
        env=env,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "EQUIVALENT" in ended.stdout.splitlines()[-1]
    assert "tokens/s" in ended.stderr
    manifest = json.loads((run_dir / "manifest.json").read_text())
    assert manifest["status"] == "complete"
    subject = manifest["subject"]
    assert (subject["model"], subject["drafter"]) == ("smollm2-135m", "dflash")
    assert subject["drafter_parameters"]["draft_model"] == "smollm2-dflash"
    assert manifest["arm_tokens"] == {"off": 2048, "on": 2048, "on_null": 2048, "biased": 2048}
    cells = pd.read_parquet(run_dir / "cells.parquet")
    biased = cells[cells["comparison"] == "off_biased"]
    assert biased["rejected"].sum() >= 3
    assert (run_dir / "report.html").stat().st_size > 50_000
