"""`equivtest gate`: the verdict of a run and its exit code, and what it refuses to believe."""

import json
import shutil
from pathlib import Path

import pytest


def test_the_gate_ends_in_the_verdict_and_its_exit_code(equivtest, results: Path) -> None:
    code, out, _ = equivtest("gate", results / "good")
    assert code == 0
    assert out.splitlines()[-1].startswith("EQUIVALENT")
    code, out, _ = equivtest("gate", results / "bad")
    assert code == 1
    assert out.splitlines()[-1].startswith("DIFFERENT")


def test_the_worst_of_several_runs_decides(equivtest, results: Path) -> None:
    assert equivtest("gate", results / "good", results / "bad")[0] == 1


def test_the_gate_does_not_believe_the_verdict_of_a_run_that_did_not_end(equivtest, results: Path, tmp_path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    manifest = json.loads((results / "good" / "manifest.json").read_text())
    (run_dir / "manifest.json").write_text(json.dumps({**manifest, "status": "started"}))
    (run_dir / "verdict.json").write_bytes((results / "good" / "verdict.json").read_bytes())
    code, out, _ = equivtest("gate", run_dir)
    assert code == 4
    assert "--resume" in out


def test_the_gate_does_not_believe_a_verdict_without_its_samples(equivtest, results: Path, tmp_path: Path) -> None:
    run_dir = shutil.copytree(results / "good", tmp_path / "run")
    assert equivtest("gate", run_dir)[0] == 0
    shard = next((run_dir / "samples" / "arm=on").rglob("*.parquet"))
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    code, out, _ = equivtest("gate", run_dir)
    assert code == 4
    assert str(shard) in out
    shard.write_bytes(content)
    assert equivtest("gate", run_dir)[0] == 0


def test_without_a_name_the_gate_judges_the_newest_run_even_if_it_failed(
    equivtest, results: Path, tmp_path: Path
) -> None:
    for name, status, started in (("old", "complete", "2026-01-01"), ("new", "error", "2026-01-02")):
        run_dir = shutil.copytree(results / "good", tmp_path / name)
        manifest = json.loads((run_dir / "manifest.json").read_text())
        (run_dir / "manifest.json").write_text(json.dumps({**manifest, "status": status, "started": started}))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "manifest.json").write_text("{")
    assert equivtest("gate", "--results-dir", tmp_path)[0] == 4
    shutil.rmtree(tmp_path / "new")
    assert equivtest("gate", "--results-dir", tmp_path)[0] == 0


def test_in_github_actions_the_gate_writes_the_summary_and_an_annotation(
    equivtest, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    _, out, _ = equivtest("gate", results / "bad")
    assert "::error title=equivtest::different" in out
    assert "DIFFERENT" in (tmp_path / "summary").read_text()


def as_gate_run(results: Path, name: str, folder: Path) -> Path:
    """A run whose manifest says that it is of budget gate; what its budget is, the manifest alone says."""
    run_dir = shutil.copytree(results / name, folder / name)
    manifest = json.loads((run_dir / "manifest.json").read_text())
    manifest["protocol"]["budget"] = "gate"
    (run_dir / "manifest.json").write_text(json.dumps(manifest))
    return run_dir


def test_a_pass_of_a_budget_that_carries_no_merge_is_refused_where_one_is_required(
    equivtest, results: Path, tmp_path: Path
) -> None:
    code, out, _ = equivtest("gate", results / "good", "--require", "budget=gate")
    assert code == 4
    assert out.splitlines()[-1].endswith("is refused: it is equivalent at budget smoke, and budget gate is required")
    assert "  next: run it again with --budget gate" in out.splitlines()
    large = as_gate_run(results, "good", tmp_path)
    assert equivtest("gate", large, "--require", "budget=gate")[0] == 0
    assert equivtest("gate", large, "--require", "budget=audit")[0] == 4
    # Both requirements hold together, and a difference is one at any budget.
    assert equivtest("gate", results / "good", "--require", "budget=smoke", "--require", "fingerprint")[0] == 0
    both = ("--require", "budget=smoke", "--require", "fingerprint=" + "0" * 8)
    assert equivtest("gate", results / "good", *both)[0] == 4
    assert equivtest("gate", results / "bad", "--require", "budget=gate")[0] == 1


def test_a_pass_that_carries_no_merge_warns_and_one_that_does_or_a_difference_does_not(
    equivtest, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "WARNING: no merge on this: a smoke run sees gross faults only" in equivtest("gate", results / "good")[1]
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    code, out, _ = equivtest("gate", results / "good")
    assert code == 0
    assert "::warning title=equivtest::no merge on this: a smoke run sees gross faults only" in out
    assert "::notice" not in out
    code, out, _ = equivtest("gate", as_gate_run(results, "good", tmp_path))
    assert code == 0
    assert "::notice title=equivtest::equivalent" in out
    assert "no merge on this" not in out
    assert "no merge on this" not in equivtest("gate", results / "bad")[1]


def test_the_gate_refuses_a_run_of_other_code_or_of_another_configuration(
    equivtest, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = shutil.copytree(results / "good", tmp_path / "run")
    manifest = json.loads((run_dir / "manifest.json").read_text())
    own = manifest["fingerprint"]
    for require in ("fingerprint", f"fingerprint={own[:8]}", f"fingerprint={own}"):
        assert equivtest("gate", run_dir, "--require", require)[0] == 0

    other_code = {**manifest, "code": {**manifest["code"], "source_sha256": "0" * 64}}
    other_size = {**manifest, "protocol": {**manifest["protocol"], "epsilon": 0.4}}
    other_prompts = {**manifest, "protocol": {**manifest["protocol"], "prompt_set_sha256": "0" * 64}}
    for changed, says in (
        (other_code, "other code"),
        (other_size, "is not that of"),
        (other_prompts, "is not that of"),
    ):
        (run_dir / "manifest.json").write_text(json.dumps(changed))
        assert equivtest("gate", run_dir)[0] == 0
        code, out, _ = equivtest("gate", run_dir, "--require", "fingerprint")
        assert code == 4
        assert says in out.splitlines()[-1]
    (run_dir / "manifest.json").write_text(json.dumps(manifest))
    code, out, _ = equivtest("gate", run_dir, "--require", "fingerprint=" + "0" * 8)
    assert code == 4
    assert own in out.splitlines()[-1]

    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    equivtest("gate", run_dir, "--require", "fingerprint=" + "0" * 8)
    assert "EQUIVALENT" not in (tmp_path / "summary").read_text(), "a refused run's own summary no longer counts"
    assert "is refused" in (tmp_path / "summary").read_text()


@pytest.mark.parametrize("require", ["code", "fingerprint=", "fingerprint=12", "fingerprint=xyzxyzxyz", "budget"])
def test_the_gate_requires_nothing_that_it_does_not_know(equivtest, results: Path, require: str) -> None:
    code, _, err = equivtest("gate", results / "good", "--require", require)
    assert code == 2
    assert "must be fingerprint" in err
    code, _, err = equivtest("gate", results / "good", "--require", "budget=huge")
    assert code == 2
    assert "known: audit, gate, smoke" in err
