"""The action's own shell steps, run here as a runner runs them: a correct decoder passes, a wrong one fails the job."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

GITHUB = Path(__file__).parents[2] / ".github"
ACTION = GITHUB / "actions" / "equivtest"

WRONG_DECODER = """
from equivtest.engines.decoder import DecoderEngine
from equivtest.faults import get_fault

generate, fault = DecoderEngine.generate, get_fault("inflated_acceptance", epsilon=0.9)


def wrong(self, requests, *, speculative, fault=None, on_tokens=None, planted=fault):
    fault = fault or (planted if speculative else None)
    return generate(self, requests, speculative=speculative, fault=fault, on_tokens=on_tokens)


DecoderEngine.generate = wrong
"""


def run_steps(tmp_path: Path, before: str = "", **inputs: str) -> tuple[int, str, str]:
    """Run the steps of the action that are shell, in order, until one fails: exit code, log and step summary.

    before: Python that the command `equivtest` executes first.
    """
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    command = f"#!{sys.executable}\n{before}\nfrom equivtest.cli.main import main\nmain()\n"
    for name, text in (("equivtest", command), ("python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')):
        (bin_dir / name).write_text(text)
        (bin_dir / name).chmod(0o755)
    action = yaml.safe_load((ACTION / "action.yml").read_text())
    values = {name: declared["default"] for name, declared in action["inputs"].items()} | inputs
    log = ""
    for step in action["runs"]["steps"]:
        if "run" not in step:
            continue
        assert step["shell"] == "bash"
        assert "${{" not in step["run"], "an input pasted into a script is code"
        own = {name: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda m: values[m[1]], text)
               for name, text in step.get("env", {}).items()}  # fmt: skip
        assert not any("${{" in value for value in own.values())
        runner = {
            "PATH": f"{bin_dir}:{os.environ['PATH']}",
            "GITHUB_ACTIONS": "true",
            "GITHUB_ACTION_PATH": str(ACTION),
            "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
            "GITHUB_OUTPUT": str(tmp_path / "output"),
            "PYTHONPATH": str(GITHUB.parent),
        }
        ended = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=tmp_path, env=os.environ | runner | own, capture_output=True, text=True, check=False,
        )  # fmt: skip
        log += ended.stdout + ended.stderr
        if ended.returncode:
            break
    summary = tmp_path / "summary.md"
    return ended.returncode, log, summary.read_text() if summary.exists() else ""


TINY = {"install": "pip", "budget": "smoke", "require-budget": "smoke", "args": "--model tiny\n--dtype float32\n"}


def test_a_correct_decoder_passes_and_leaves_report_tables_and_summary(tmp_path: Path) -> None:
    """Fixed seeds. On a processor that rounds differently a correct decoder is stopped in well under 1 % of runs."""
    code, log, summary = run_steps(tmp_path, **TINY)
    assert code == 0, log
    assert "::warning title=equivtest::no merge on this" in log
    assert "○ EQUIVALENT, GATES NOTHING" in summary.splitlines()[0]
    run_dir = tmp_path / "results/equivtest"
    assert {path.name for path in (run_dir / "parquet").iterdir()} == {
        "cells.parquet", "evidence.parquet", "controls.parquet", "samples.parquet", "columns.md",
    }  # fmt: skip
    kept = yaml.safe_load((ACTION / "action.yml").read_text())["runs"]["steps"][-1]["with"]["path"].split("\n")
    for path in filter(None, kept):
        assert Path(path.replace("${{ inputs.run-dir }}", str(run_dir))).exists(), path


def test_a_decoder_that_accepts_too_often_fails_the_job_with_an_annotation(tmp_path: Path) -> None:
    """Gross enough that no second look is needed."""
    code, log, summary = run_steps(tmp_path, WRONG_DECODER, **{**TINY, "args": TINY["args"] + "--no-confirm\n"})
    assert code == 1, log
    assert "::error title=equivtest::different" in log
    assert "DIFFERENT" in summary.splitlines()[0]


def test_a_run_that_cannot_start_fails_the_job_with_an_annotation(tmp_path: Path) -> None:
    code, log, _ = run_steps(tmp_path, **{**TINY, "args": "--model no-such-model"})
    assert code == 4
    assert "::error title=equivtest::the run ended without a verdict, with exit code 4" in log


def gate_sh(tmp_path: Path, stub: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """gate.sh with a command `equivtest` of this text."""
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "equivtest"
    command.write_text(f"#!/usr/bin/env bash\n{stub}\n")
    command.chmod(0o755)
    return subprocess.run(
        ["bash", str(ACTION / "gate.sh"), *arguments],
        env={**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "GITHUB_ACTIONS": "true"},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("code", [2, 4, 137])
def test_a_verdict_of_an_earlier_run_does_not_pass_a_run_that_failed(tmp_path: Path, code: int) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "verdict.json").write_text("{}")
    ended = gate_sh(tmp_path, f'[ "$1" != run ] || exit {code}', "run", "--config", "topp95")
    assert ended.returncode == code
    assert f"::error title=equivtest::the run ended without a verdict, with exit code {code}" in ended.stdout


@pytest.mark.parametrize("code", [0, 1, 3])
def test_the_gate_decides_over_a_fresh_verdict(tmp_path: Path, code: int) -> None:
    stub = f'case $1 in run) mkdir -p "$3"; sleep 0.05; echo "{{}}" >"$3/verdict.json" ;; esac; exit {code}'
    assert gate_sh(tmp_path, stub, "run").returncode == code


@pytest.mark.parametrize("asked", [None, "smoke"])
def test_a_pass_of_a_smaller_budget_is_asked_for_and_otherwise_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str | None
) -> None:
    monkeypatch.delenv("REQUIRE_BUDGET", raising=False)
    if asked:
        monkeypatch.setenv("REQUIRE_BUDGET", asked)
    stub = """case $1 in
        run) mkdir -p "$3"; sleep 0.05; echo "{}" >"$3/verdict.json" ;;
        gate) echo "$@" ;;
    esac"""
    said = gate_sh(tmp_path, stub, "run").stdout
    assert said == f"gate run --require fingerprint --require budget={asked or 'gate'}\n"
    inputs = yaml.safe_load((ACTION / "action.yml").read_text())["inputs"]
    assert inputs["budget"]["default"] == inputs["require-budget"]["default"] == "gate"


def test_without_a_folder_it_is_a_usage_error_and_no_difference(tmp_path: Path) -> None:
    assert gate_sh(tmp_path, "exit 0").returncode == 2


def test_the_key_of_the_cache_holds_no_comma(tmp_path: Path) -> None:
    """actions/cache refuses one, and options in JSON have them."""
    run_steps(tmp_path, **{**TINY, "args": '--no-such-option {"a":1,"b":2}'})
    assert re.fullmatch("args=[0-9a-f]{64}\n", (tmp_path / "output").read_text())
    text = (ACTION / "action.yml").read_text()
    assert "inputs.args" not in next(line for line in text.splitlines() if line.strip().startswith("key:"))


def artifact_name(inputs: dict[str, str], *, job: str, index: int) -> str:
    """What the runner makes of the name: `inputs.artifact || format('TEMPLATE', CONTEXT...)`."""
    steps = yaml.safe_load((ACTION / "action.yml").read_text())["runs"]["steps"]
    (upload,) = (step for step in steps if step.get("uses", "").startswith("actions/upload-artifact"))
    found = re.fullmatch(r"\$\{\{ inputs\.artifact \|\| format\('([^']*)', (.*)\) \}\}", upload["with"]["name"])
    assert found is not None
    contexts = {"github.job": job, "strategy.job-index": index, "inputs.config": inputs["config"]}
    return inputs["artifact"] or found[1].format(*(contexts[name] for name in found[2].split(", ")))


def test_no_two_jobs_of_a_matrix_name_their_artifact_alike_unless_told_to() -> None:
    declared = yaml.safe_load((ACTION / "action.yml").read_text())["inputs"]
    inputs = {name: one["default"] for name, one in declared.items()}
    jobs = [(job, index, config) for job in ("cpu", "gpu") for index in (0, 1) for config in ("topp95", "all")]
    names = {artifact_name(inputs | {"config": config}, job=job, index=index) for job, index, config in jobs}
    assert len(names) == len(jobs)
    assert all(re.fullmatch("equivtest-[a-z0-9-]+", name) for name in names)
    told = {artifact_name(inputs | {"artifact": "mine"}, job=job, index=index) for job, index, _ in jobs}
    assert told == {"mine"}


def test_models_of_ours_and_of_the_hub_are_kept_where_they_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folders that the programs themselves choose in a home without settings; a token is none of them."""
    action = yaml.safe_load((ACTION / "action.yml").read_text())
    (cache,) = (step for step in action["runs"]["steps"] if step.get("uses", "").startswith("actions/cache"))
    assert cache["with"]["path"] == "${{ inputs.cache }}"
    kept = {Path(line).expanduser() for line in action["inputs"]["cache"]["default"].split("\n") if line}
    program = (
        "from equivtest.decoder.hub import default_cache_dir\n"
        "from huggingface_hub import constants\n"
        "print(default_cache_dir(), constants.HF_HUB_CACHE, constants.HF_TOKEN_PATH)"
    )
    env = {n: v for n, v in os.environ.items() if not n.startswith(("HF_", "HUGGINGFACE_", "XDG_", "EQUIVTEST_"))}
    ended = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    ours, hub, token = map(Path, ended.stdout.split())
    assert any(ours.is_relative_to(folder) for folder in kept)
    assert hub in kept
    assert not any(token.is_relative_to(folder) for folder in kept)


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ("github-actions", "actions/equivtest/action.yml"),
        ("github-workflows", "workflows/merge-gate.yml"),
        ("gitlab-ci", "examples/gitlab-ci.yml"),
    ],
)
def test_ci_files_follow_their_schema_and_a_wrong_one_does_not(tmp_path: Path, schema: str, path: str) -> None:
    broken = tmp_path / "broken.yml"
    text = (GITHUB / path).read_text()
    broken.write_text(re.sub(r"^(runs|jobs|  script):", r"\1x:", text, flags=re.MULTILINE))
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    right, wrong = (
        subprocess.run([*command, str(file)], capture_output=True, text=True, check=False)
        for file in (GITHUB / path, broken)
    )
    assert right.returncode == 0, right.stdout + right.stderr
    assert wrong.returncode == 1


def test_the_workflow_uses_inputs_that_the_action_has() -> None:
    inputs = yaml.safe_load((ACTION / "action.yml").read_text())["inputs"]
    (job,) = yaml.safe_load((GITHUB / "workflows/merge-gate.yml").read_text())["jobs"].values()
    (step,) = (step for step in job["steps"] if step["uses"] == "./.github/actions/equivtest")
    assert set(step["with"]) <= set(inputs)
