"""Every figure in the README is the one in the file that it names."""

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "results" / "reference"


def read(name: str) -> dict:
    return json.loads((REFERENCE / name).read_text("utf-8"))


def row_of(bench: str, what: str) -> dict:
    return next(row for row in read(bench)["rows"] if row["what"] == what)


def run_figures(run: str) -> tuple[str, ...]:
    manifest, verdict = read(f"{run}/manifest.json"), read(f"{run}/verdict.json")
    seconds = [sum(manifest[name].values()) for name in ("arm_seconds", "score_seconds")]
    found = {finding["subject"]: finding for finding in verdict["findings"] if finding["family"] == "marginal"}
    cells = sum(found["off vs on"]["num_tests"].values())
    off_on, a_a, biased = (
        sum(found[subject]["num_flagged"].values()) for subject in ("off vs on", "on vs on_null", "off vs biased")
    )
    return (
        f"{seconds[0]:.0f} s of generation, {seconds[1]:.0f} s of scoring",
        f"off vs on {off_on} of {cells} cells",
        f"A/A {a_a}",
        f"planted fault seen in {biased}",
    )


def speed_figures(bench: str, ours: str, theirs: str) -> tuple[str, ...]:
    unit = "total_ms" if bench == "bench-kernels.json" else "median_ms"
    mine, other = row_of(bench, ours), row_of(bench, theirs)
    return f"{mine[unit]:.0f} ms", f"{other[unit]:,.0f} ms", f"{mine['speedup']:.1f} times"


@pytest.mark.parametrize(
    ("line", "figures"),
    [
        ("gate budget, topp95", lambda: run_figures("gate-topp95")),
        ("smoke budget, topp95", lambda: run_figures("smoke-topp95")),
        ("filter and sample", lambda: speed_figures("bench-kernels.json", "cpp", "torch_sort")),
        ("a decoding step", lambda: speed_figures("bench-decode.json", "step", "hf_step")),
        ("the forward alone", lambda: speed_figures("bench-decode.json", "forward", "hf_forward")),
    ],
)
def test_a_figure_is_the_one_that_was_measured(line: str, figures) -> None:
    text = next(text for text in (ROOT / "README.md").read_text("utf-8").splitlines() if text.startswith(f"| {line}"))
    for figure in figures():
        assert figure in text


def test_ci_runs_the_test_command_of_the_readme() -> None:
    script = (ROOT / ".ci/run").read_text("utf-8").splitlines()
    extraction = next(line for line in script if line.startswith("command="))
    found = subprocess.run(
        ["bash", "-c", f'{extraction}; echo "$command"'], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout == "pip install -e '.[test]' && python -m pytest\n"
