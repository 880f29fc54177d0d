"""The commands as a user types them: one line of help where something is wrong, and never an exit code 0 by default."""

import contextlib
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from equivtest.cli.options import ANALYSIS_FIELDS, ENGINE_FIELDS, SERVER_FIELDS
from equivtest.cli.run import command as run_command
from equivtest.decoder.hub import resolve_model
from equivtest.decoder.weights import load_checkpoint
from equivtest.engines.base import EngineOptions, ServerOptions
from equivtest.errors import InvalidShard
from equivtest.pipeline.analysis_options import AnalysisOptions
from equivtest.protocol.budgets import BUDGETS
from equivtest.records import EXIT_CODES
from equivtest.samples.export import samples_with_law


def test_help_shows_examples_and_exit_codes(equivtest) -> None:
    code, out, _ = equivtest("--help")
    assert code == 0
    assert "4 invalid run" in out
    assert "equivtest run --config topp95 --budget smoke" in out


@pytest.mark.parametrize(
    "command",
    [
        "run",
        "report",
        "gate",
        "compare",
        "kernel",
        "power",
        "doctor",
        "bench kernels",
        "model pull",
        "model export",
        "lm-eval",
    ],
)
def test_every_command_explains_itself_with_an_example(equivtest, command: str) -> None:
    code, out, _ = equivtest(*command.split(), "--help")
    assert code == 0
    assert f"  equivtest {command}" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("run", "--config", "topk51"),
            "known: all, greedy, logitbias, minp05, penalties, processing, stops, topk20p90, topk50, topp95",
        ),
        (("run", "--budget", "huge"), "known: audit, gate, smoke"),
        (("run", "--prompts", "nothing"), "known: copying, default"),
        (("run", "--kernels", "cudnn"), "known: cpp, cuda, flashinfer, reference"),
        (("run", "--drafter", "oracle"), "known: dflash, early_exit, model, ngram, sampled_exit, self"),
        (("run", "--engine", "oracle"), "known: decoder, openai, openvino, transformers, vllm"),
        (("run", "--engine", "openai"), "needs --spec-off URL"),
        (("run", "--engine", "openai", "--spec-off", "http://h", "--api", "ollama"), "known: completions, llamacpp"),
        (("run", "--engine", "transformers", "--kernels", "cpp"), "is no option of the engine transformers"),
        (("run", "--engine", "vllm"), "the vllm engine needs vLLM's own as JSON: '{"),
        (("run", "--speculative-config", '{"method": "ngram"}'), "is no option of the engine decoder"),
        (("run", "--speculative-config", "ngram"), "is not JSON"),
        (("run", "--spec-on", "http://h"), "is no option of the engine decoder"),
        (("run", "--extra-body", "[1]"), "must be a JSON object"),
        (("run", "--epsilon", "2"), "at most 1"),
        (("run", "--plant", "nothing"), "known: accept_all, adaptive_length,"),
        (("run", "--statistic", "t"), "chi2"),
        (("run", "--num-permutations", "99"), "goes with --exact"),
        (("run", "--draft-model", "x", "--drafter", "ngram"), "goes with the model or dflash drafter"),
        (("run", "--early-exit-layers", "3", "--drafter", "self"), "goes with the early_exit or sampled_exit drafter"),
        (("run", "--resume", "--run-dir", "no/such/run"), "no run at no/such/run"),
        (("run", "--bias-margin", "2"), "must be between 0 and 1"),
        (("run", "--sequential", "--no-law"), "not with --no-law"),
        (("controls", "--only", "nothing"), "known: accept_all, adaptive_length,"),
        (("controls", "--draft-model", "tiny-draft", "--only", "nothing"), "known: accept_all, adaptive_length,"),
        (("controls", "--faults-from", "no_such_module"), "no_such_module"),
        (("controls", "--budget", "huge"), "known: audit, gate, smoke"),
        (("power", "no/such/run"), "no run at no/such/run"),
        (("gate", "no/such/run"), "no run at no/such/run"),
        (("compare", "no.parquet", "file.parquet"), "no such file"),
        (("fly",), "No such command"),
    ],
)
def test_a_wrong_request_exits_2_with_one_line_that_says_what_is_known(equivtest, arguments, says: str) -> None:
    code, _, err = equivtest(*arguments)
    assert code == 2
    assert says in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("error", "hint"), [(OSError, "writable"), (ImportError, "doctor"), (ValueError, "`equivtest -v ...`")]
)
def test_an_unexpected_error_exits_4_in_one_line_with_a_hint(
    equivtest, monkeypatch: pytest.MonkeyPatch, results: Path, error: type[Exception], hint: str
) -> None:
    def broken(*_: object) -> None:
        message = "disk on fire"
        raise error(message)

    monkeypatch.setattr("equivtest.pipeline.run.find_run", broken)
    code, _, err = equivtest("gate", "--results-dir", results)
    assert code == 4
    assert len(err.splitlines()) == 1
    assert "disk on fire" in err
    assert hint in err


def test_power_says_what_a_run_could_have_seen(equivtest, results: Path, tmp_path: Path) -> None:
    code, out, _ = equivtest("power", results / "good", "--bias", "0.02", "--output", tmp_path / "power.json")
    assert code == 0
    assert "256 seeds (gate): an acceptance bias of 0.0" in out
    assert "a bias of 0.02 needs" in out
    assert json.loads((tmp_path / "power.json").read_text())["rows"][0]["budget"] == "this run"


@pytest.mark.parametrize("command", ["report", "gate"])
def test_a_closed_pipe_never_exits_as_different(results: Path, command: str) -> None:
    program = f"{sys.executable} -m equivtest {command} {results / 'good'} | true; exit ${{PIPESTATUS[0]}}"
    assert subprocess.run(["bash", "-c", program], capture_output=True, check=False).returncode in (0, 4)


def test_a_report_that_fails_leaves_no_older_verdict_behind(equivtest, results: Path, tmp_path: Path) -> None:
    run_dir = shutil.copytree(results / "good", tmp_path / "run")
    shard = next((run_dir / "samples" / "arm=on").rglob("*.parquet"))
    shard.write_bytes(shard.read_bytes()[:100])
    assert equivtest("report", run_dir)[0] == 4
    assert not (run_dir / "verdict.json").exists()


def test_help_of_run_is_enough_to_start(equivtest) -> None:
    _, out, _ = equivtest("run", "--help")
    for name, budget in BUDGETS.items():
        (line,) = (line for line in out.splitlines() if line.lstrip().startswith(f"{name} ") and "positions x" in line)
        assert f"{budget.num_prompts} prompts x {budget.num_positions} positions x {budget.num_seeds:,} seeds" in line
    for word, code in EXIT_CODES.items():
        assert f"{code} {word}" in out


def test_tables_are_read_by_pandas_and_duckdb_and_every_column_is_described(
    equivtest, results: Path, tmp_path: Path
) -> None:
    run_dir = shutil.copytree(results / "good", tmp_path / "run")
    assert equivtest("report", run_dir, "--format", "parquet")[0] == 0
    folder = run_dir / "parquet"
    tables = {path.stem: path for path in folder.glob("*.parquet")}
    assert set(tables) == {"cells", "evidence", "controls", "samples"}
    columns = (folder / "columns.md").read_text()
    for path in tables.values():
        frame = pd.read_parquet(path)
        (count,) = duckdb.execute(f"SELECT count(*) FROM '{path}'").fetchone()
        assert count == len(frame) > 0
        for field in pq.read_schema(path):
            assert field.metadata[b"description"], f"{path.name}: {field.name}"
            assert f"| {field.name} |".replace("_", "\\_") in columns
    protocol = json.loads((run_dir / "manifest.json").read_text())["protocol"]
    size = protocol["num_seeds"] * protocol["num_positions"] * len(protocol["prompts"])
    rows = duckdb.execute(f"SELECT arm, count(*), count(p_token) FROM '{tables['samples']}' GROUP BY arm").fetchall()
    assert {arm: (total, scored) for arm, total, scored in rows} == {
        arm: (size, size) for arm in ("off", "on", "on_null", "biased")
    }


def test_samples_whose_law_is_of_other_tokens_are_not_joined(results: Path, tmp_path: Path) -> None:
    run_dir = shutil.copytree(results / "good", tmp_path / "run")
    shutil.rmtree(run_dir / "samples" / "arm=on")
    shutil.copytree(results / "bad" / "samples" / "arm=on", run_dir / "samples" / "arm=on")
    with pytest.raises(InvalidShard, match="other tokens"):
        samples_with_law(run_dir)


class TestTerminal:
    """The screen of `report`, on a terminal and off it."""

    @pytest.mark.parametrize("width", [60, 200])
    def test_no_line_is_wider_than_asked_and_the_last_is_the_verdict(
        self, equivtest, monkeypatch: pytest.MonkeyPatch, results: Path, width: int
    ) -> None:
        monkeypatch.setenv("COLUMNS", str(width))
        _, out, _ = equivtest("report", results / "good")
        first, *lines = out.splitlines()
        assert first.startswith("report: "), "a path, which is not cut"
        assert max(map(len, lines)) <= width
        assert lines[-1].strip() == "○ EQUIVALENT, GATES NOTHING (exit code 0)"
        assert "\x1b" not in out, "no colour where nobody looks"

    def test_a_terminal_has_colour_unless_asked_not_to(self, results: Path) -> None:
        assert "\x1b[" in on_terminal(results / "good", {})
        plain = on_terminal(results / "good", {"NO_COLOR": "1"})
        assert not re.search(r"\x1b\[[0-9;]*3[0-7]", plain)
        assert "EQUIVALENT" in plain.splitlines()[-1]


def on_terminal(run_dir: Path, settings: dict[str, str]) -> str:
    """What `report` writes to a pseudo-terminal."""
    ours, theirs = pty.openpty()
    env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-m", "equivtest", "report", str(run_dir)],
        stdout=theirs, stderr=theirs, env={**env, "TERM": "xterm", "COLUMNS": "100", **settings},
    )  # fmt: skip
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):  # the end of a terminal is an error
        while chunk := os.read(ours, 65536):
            said += chunk
    process.wait()
    os.close(ours)
    return said.decode()


def test_report_recomputes_the_verdict_and_prints_it_as_json(equivtest, results: Path) -> None:
    code, out, _ = equivtest("report", results / "bad", "--json")
    assert code == 1
    assert json.loads(out)["verdict"] == "different"


def test_a_report_is_recomputed_without_torch(results: Path) -> None:
    program = """
import sys
from importlib.abc import MetaPathFinder

class NoTorch(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'")

sys.meta_path.insert(0, NoTorch())
sys.argv = ["equivtest", "report", sys.argv[1]]
from equivtest.cli.main import main
main()
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, str(results / "good")], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "EQUIVALENT" in ended.stdout.splitlines()[-1]


def recording(path: Path, *, seed: int, bias: float = 0.0) -> Path:
    rng = np.random.default_rng(seed)
    law = np.array([0.4 + bias, *([(0.6 - bias) / 6] * 6)])
    with path.open("w") as sink:
        for sample in range(256):
            tokens = rng.choice(7, size=8, p=law).tolist()
            sink.write(json.dumps({"prompt_id": "story", "seed": sample, "token_ids": tokens}) + "\n")
    return path


def test_recordings_of_one_law_compare_as_equivalent_and_of_two_as_different(equivtest, tmp_path: Path) -> None:
    """Fixed seeds; a literal gate on 8 cells flags one law in at most 5 % of other seeds."""
    off = recording(tmp_path / "off.jsonl", seed=1)
    code, out, _ = equivtest("compare", recording(tmp_path / "on.jsonl", seed=2), off, "--epsilon", "0.3")
    assert code == 0, out
    assert "taken on trust" in out
    code, out, _ = equivtest("compare", recording(tmp_path / "worse.jsonl", seed=3, bias=0.3), off, "--epsilon", "0.3")
    assert code == 1, out


@pytest.mark.parametrize("epsilon", ["0", "-1", "5", "nan"])
def test_an_impossible_bias_is_refused(equivtest, tmp_path: Path, epsilon: str) -> None:
    off, on = recording(tmp_path / "off.jsonl", seed=1), recording(tmp_path / "on.jsonl", seed=2)
    assert equivtest("compare", on, off, "--epsilon", epsilon)[0] == 2


def test_a_recording_is_not_compared_with_itself(equivtest, tmp_path: Path) -> None:
    off = recording(tmp_path / "off.jsonl", seed=1)
    code, _, err = equivtest("compare", off, shutil.copy(off, tmp_path / "on.jsonl"))
    assert code == 2
    assert "very same samples" in err


def test_recordings_too_small_for_their_teeth_are_invalid_not_equivalent(equivtest, tmp_path: Path) -> None:
    off, on = recording(tmp_path / "off.jsonl", seed=1), recording(tmp_path / "on.jsonl", seed=2)
    code, out, _ = equivtest("compare", on, off, "--epsilon", "0.01")
    assert code == 4
    assert "missed" in out


def test_a_model_is_exported_as_a_folder_that_runs(equivtest, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    assert equivtest("model", "export", "tiny", folder)[:2] == (0, f"{folder}\n")
    assert load_checkpoint(folder).config == load_checkpoint(resolve_model("tiny")).config
    code, _, error = equivtest("model", "export", "tiny", folder)
    assert code == 2
    assert "holds something already" in error


def test_doctor_names_every_backend(equivtest) -> None:
    code, out, _ = equivtest("doctor", "--json")
    assert code == 0
    checks = {check["name"]: check for check in json.loads(out)}
    assert checks["kernels reference"]["ok"]
    assert checks["kernels cpp"]["ok"]
    assert {"kernels cuda", "kernels flashinfer"} <= set(checks)
    assert {f"engine {name}" for name in ("decoder", "transformers", "openai")} <= set(checks)


def test_doctor_prints_a_remedy_that_can_be_pasted(equivtest, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = equivtest("doctor")
    assert code == 4
    assert "pip install 'equivtest[transformers]'" in out
    assert "pip install 'equivtest[server]'" in out


def test_doctor_exits_4_when_a_requirement_is_missing(equivtest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equivtest.pipeline.doctor._PACKAGES", ("torch", "no-such-package"))
    code, out, _ = equivtest("doctor", "--json")
    assert code == 4
    assert "pip install no-such-package" in out


def test_the_command_line_has_the_defaults_of_the_library() -> None:
    defaults = run_command.make_context("run", []).params
    for record, fields in (
        (EngineOptions(), (*ENGINE_FIELDS, "engine")),
        (AnalysisOptions(), (*ANALYSIS_FIELDS, "confirm")),
        (ServerOptions(spec_on="http://h"), [f for f in SERVER_FIELDS if f != "spec_on"]),
    ):
        assert {field: defaults[field] for field in fields} == {field: getattr(record, field) for field in fields}
