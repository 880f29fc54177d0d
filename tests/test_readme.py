"""Every figure in the README is the one in the file that it names."""

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from equivtest.kernels.registry import get_backend
from tests.decoder.scenarios import CONFIGS, build, random_prompts, requests_for

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


def found(study: str, subject: str, family: str) -> str:
    row = next(row for row in read(study)["rows"] if (row["subject"], row["family"]) == (subject, family))
    return f"{row['num_found']} of {row['num_runs']}"


def power_figures(study: str, *asked: tuple[str, str, str]) -> tuple[str, ...]:
    """Words of the README, each with the count that it quotes."""
    return tuple(text.format(found(study, subject, family)) for text, subject, family in asked)


def closed_form_figures() -> tuple[str, ...]:
    row = next(row for row in read("power-closed-form.json")["rows"] if row["budget"] == "gate")
    return f"{row['smallest_bias']:.4f}", f"{row['ratio']:.2f} times", f"{row['seeds_for_bias']:.0f} seeds"


def gate_figures() -> tuple[str, ...]:
    shares = {row["what"]: row for row in read("calibration.json")["gate"] if row["decoder"] == "correct"}
    stopped = shares["stopped: a flag stood on fresh seeds"]
    return (
        f"{stopped['count']} of {stopped['runs']:,} runs",
        f"{stopped['ci_low']:.2%} to {stopped['ci_high']:.2%}".replace("%", " %"),
        f"gate of record {shares['gate of record: stage 1 of the marginal family']['count']}",
        f"confirmation {shares['marginal family with confirmation']['count']}",
    )


def coin_figures() -> tuple[str, ...]:
    findings = {
        (finding["family"], finding["subject"]): finding
        for finding in read("gate-reused-coin/verdict.json")["findings"]
    }
    marginal = findings["marginal", "off vs biased"]
    lag = next(
        flag
        for flag in findings["law", "biased against the target's law"]["flagged"]
        if flag["test"] == "lag_recovered"
    )
    cells = sum(marginal["num_tests"].values())
    return f"{sum(marginal['num_flagged'].values())} of {cells} cells", f"adjusted p {lag['p_value']:.0e}"


def matrix_figures() -> tuple[str, ...]:
    record = read("controls-gate/controls.json")
    assert record["as_expected"] is True
    counts = dict(line.split(": ") for line in record["summary"] if ": " in line)
    named = next(line for line in record["summary"] if line.startswith("diagnosis"))
    faults, variants, correct, lossy = (
        counts[name].removesuffix(" found").removesuffix(" passed")
        for name in ("Faults", "Valid variants", "Correct decoders (A/A)", "Lossy by design")
    )
    return (
        f"{faults} faults found, in {record['seconds']:.0f} s",
        f"{variants} valid variants and {correct} correct decoders passed",
        f"{lossy} lossy rules found",
        f"named in {' '.join(named.split()[5:8])}",
    )


def speed_figures(bench: str, ours: str, theirs: str) -> tuple[str, ...]:
    unit = "total_ms" if bench == "bench-kernels.json" else "median_ms"
    mine, other = row_of(bench, ours), row_of(bench, theirs)
    return f"{mine[unit]:.0f} ms", f"{other[unit]:,.0f} ms", f"{mine['speedup']:.1f} times"


def gpu_row(bench: str, **wanted: object) -> dict:
    return next(row for row in read(f"h200/{bench}.json")["rows"] if wanted.items() <= row.items())


def whole_run_figures(bench: str, *, judged: bool = True) -> tuple[str, ...]:
    seconds = f"{gpu_row(bench, part='total')['seconds']:.1f} s"
    if not judged:
        return (seconds,)
    settings = read(f"h200/{bench}.json")["settings"]
    a_a, planted = (
        next(control["line"] for control in settings["controls"] if control["name"] == name)
        for name in ("A/A", "planted fault")
    )
    return (
        seconds,
        f"{settings['tokens']:,} tokens",
        settings["verdict"],
        "A/A " + a_a.split("passed, ")[1].split(",")[0].removesuffix(" rejected"),
        "planted fault in " + planted.split("detected, ")[1].split(" rejected")[0],
    )


def plain_step_figures() -> tuple[str, ...]:
    one, many = (gpu_row(f"decode-{batch}", what="step")["median_ms"] for batch in (1, 256))
    return (f"{one:.2f} ms and {many:.2f} ms",)


def fused_figures() -> tuple[str, ...]:
    rows = [gpu_row("kernels", vocab=151_936, batch=batch, draft=7, way="cuda fused") for batch in (8, 64)]
    return tuple(f"{row['batch']} requests {row['us']:.0f} us, {row['vendor_ratio']:.1f} times as fast" for row in rows)


def serving_figures() -> tuple[str, ...]:
    off, on = (
        gpu_row("tpot-early_exit", concurrency=1, sampling="T .8 top_p .95", spec=spec)["tpot_p50_ms"]
        for spec in ("off", "on")
    )
    return f"plain {off:.2f} ms", f"early_exit {on:.2f} ms"


def one_hot_figures() -> tuple[str, ...]:
    return (f"{gpu_row('onehot-smollm2', one_hot='dense')['delta_percent']:.1f} %",)


@pytest.mark.parametrize(
    ("line", "figures"),
    [
        ("gate budget, topp95", lambda: run_figures("gate-topp95")),
        ("smoke budget, topp95", lambda: run_figures("smoke-topp95")),
        (
            "smallest acceptance bias seen",
            lambda: power_figures(
                "power-h200-small.json",
                ("0.005 found in {} runs", "bias 0.005", "law"),
                ("0.02 confirmed as different in {}", "bias 0.02", "law, confirmed"),
                ("record: 0.02 in {}", "bias 0.02", "protocol of record"),
                ("joint: 0.02 in {}", "bias 0.02", "joint"),
                ("MMD-Hamming: 0.02 in {}", "bias 0.02", "MMD-Hamming"),
            ),
        ),
        (
            "larger biases",
            lambda: power_figures(
                "power-h200-large.json",
                ("joint: 0.05 in {} runs", "bias 0.05", "protocol of record"),
                ("joint: 0.05 in {} runs", "bias 0.05", "max_z"),
                ("joint: 0.05 in {} runs", "bias 0.05", "joint"),
                ("MMD-Hamming: 0.05 in {}", "bias 0.05", "MMD-Hamming"),
                ("0.1 in {}", "bias 0.1", "MMD-Hamming"),
            ),
        ),
        ("the same in closed form", closed_form_figures),
        ("a correct decoder under the whole gate", gate_figures),
        ("the recovery's coin", coin_figures),
        ("the kill matrix", matrix_figures),
        ("filter and sample", lambda: speed_figures("bench-kernels.json", "cpp", "torch_sort")),
        ("whole gate of three configs on one H200", lambda: whole_run_figures("protocol-cuda")),
        ("the same with `flashinfer` kernels", lambda: whole_run_figures("protocol-flashinfer")),
        ("the same for random weights", lambda: whole_run_figures("protocol-qwen3-4b", judged=False)),
        ("plain step of SmolLM2", plain_step_figures),
        ("from bfloat16 logits", fused_figures),
        ("time per output token at 1 request", serving_figures),
        ("dense one-hot rows", one_hot_figures),
        ("a decoding step", lambda: speed_figures("bench-decode.json", "step", "hf_step")),
        ("the forward alone", lambda: speed_figures("bench-decode.json", "forward", "hf_forward")),
    ],
)
def test_a_figure_is_the_one_that_was_measured(line: str, figures) -> None:
    text = next(text for text in (ROOT / "README.md").read_text("utf-8").splitlines() if text.startswith(f"| {line}"))
    for figure in figures():
        assert figure in text


def test_the_fault_of_the_readme_is_one() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    code = text.split("```python\n")[1].split("```")[0]
    found: dict = {}
    exec(code, found)  # what a reader would paste into a module
    (fault,) = found["FAULTS"]
    batch = build(get_backend("cpp")).generate
    prompts = requests_for(random_prompts(6), CONFIGS["topp95"])
    right, wrong = (batch(prompts, speculative=True, fault=wrap) for wrap in (None, fault))
    assert any(a.token_ids.tolist() != b.token_ids.tolist() for a, b in zip(right, wrong, strict=True))


def test_ci_runs_the_test_command_of_the_readme() -> None:
    script = (ROOT / ".ci/run").read_text("utf-8").splitlines()
    extraction = next(line for line in script if line.startswith("command="))
    found = subprocess.run(
        ["bash", "-c", f'{extraction}; echo "$command"'], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout == "pip install -e '.[test]' && python -m pytest\n"


def test_extras_that_the_readme_and_errors_name_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    texts = [ROOT / "README.md", *(ROOT / "equivtest").rglob("*.py")]
    named = {name for text in texts for name in re.findall(r"(?:equivtest|-e '\.)\[(\w+)\]", text.read_text("utf-8"))}
    assert {"test", "cuda"} <= named <= set(extras)
