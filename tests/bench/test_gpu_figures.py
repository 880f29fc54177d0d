"""The table of what held: every claim with a twin that did not, and nothing measured is never held."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from equivtest.bench.gpu_figures import NOT_MEASURED, figures, main, steps_with_figures


def write(path: Path, rows: list[dict], **more: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rows": rows, **more}))


def fused(batch: int, ratio: float | None, reads: float) -> dict:
    return {
        "vocab": 151_936, "batch": batch, "draft": 7, "way": "cuda fused", "op": "all", "us": 99.0,
        "vendor_ratio": ratio, "logits_reads": reads,
    }  # fmt: skip


def held(folder: Path, step: str) -> list[bool | None]:
    return [figure.held for figure in figures(folder, (step,))]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([fused(8, 10.0, 9.0), fused(64, 8.0, 6.0)], [True, True, True]),
        ([fused(8, 9.9, 9.0), fused(64, 7.9, 6.1)], [False, False, False]),
        ([fused(64, None, 5.0)], [False, False, True]),  # no vendor pipeline to compare with
    ],
)
def test_kernels(tmp_path: Path, rows: list[dict], expected: list[bool]) -> None:
    other = {**fused(8, 99.0, 0.1), "vocab": 49_152}
    write(tmp_path / "kernels.json", [other, *rows])
    assert held(tmp_path, "kernels") == expected


@pytest.mark.parametrize(("skipped", "expected"), [(0, [True, None]), (3, [False, None])])
def test_a_gpu_test_that_was_skipped_is_not_held(tmp_path: Path, skipped: int, expected: list[bool | None]) -> None:
    (tmp_path / "tests.xml").write_text(
        f'<testsuites><testsuite tests="9" failures="0" errors="0" skipped="{skipped}">'
        '<testcase name="greedy"><properties><property name="1 of 8 texts part; gaps in nat" value="[0.01]"/>'
        "</properties></testcase></testsuite></testsuites>"
    )
    assert held(tmp_path, "tests") == expected
    assert "1 of 8 texts part" in figures(tmp_path, ("tests",))[1].line()


def test_decode(tmp_path: Path) -> None:
    write(tmp_path / "decode-1.json", [{"what": "step", "median_ms": 0.61}, {"what": "forward", "median_ms": 0.1}])
    write(tmp_path / "decode-256.json", [{"what": "forward", "median_ms": 9.0}, {"what": "step", "median_ms": 1.49}])
    assert held(tmp_path, "decode") == [False, True]


def controls(*passed: bool) -> list[dict[str, object]]:
    return [
        {"name": name, "passed": each, "line": f"line of {name}"}
        for name, each in zip(("A/A", "planted fault"), passed, strict=True)
    ]


def test_protocol(tmp_path: Path) -> None:
    for name, seconds in (("cuda", 59.9), ("flashinfer", 60.1), ("qwen3-4b", 299.0)):
        settings = {"tokens": 786_432, "verdict": "equivalent", "controls": controls(True, True)}
        write(tmp_path / f"protocol-{name}.json", [{"part": "total", "seconds": seconds}], settings=settings)
    assert held(tmp_path, "protocol") == [True, True, True, True, False, True, True, True, True]
    assert "786,432 tokens" in figures(tmp_path, ("protocol",))[0].line()


@pytest.mark.parametrize(
    ("word", "passed", "expected"),
    [("equivalent", (True, True), [True] * 3), ("invalid", (False, True), [False, False, True]),
     ("invalid", (True, False), [False, True, False])],
)  # fmt: skip
def test_a_run_in_time_must_end_well(
    tmp_path: Path, word: str, passed: tuple[bool, bool], expected: list[bool]
) -> None:
    settings = {"verdict": word, "controls": controls(*passed)}
    write(tmp_path / "protocol-cuda.json", [{"part": "total", "seconds": 1.0}], settings=settings)
    assert held(tmp_path, "protocol") == [True, *expected, *[False] * 5]  # of the others there is no run
    assert "line of A/A" in figures(tmp_path, ("protocol",))[2].line()


def test_the_committed_gate_run_has_the_words_that_are_looked_for(tmp_path: Path) -> None:
    reference = Path(__file__).parents[2] / "results" / "reference" / "gate-topp95" / "verdict.json"
    verdict = json.loads(reference.read_text("utf-8"))
    settings = {name: verdict[name] for name in ("verdict", "controls")}
    write(tmp_path / "protocol-cuda.json", [{"part": "total", "seconds": 1.0}], settings=settings)
    assert held(tmp_path, "protocol")[:4] == [True] * 4


def test_what_is_only_stated_needs_to_be_measured(tmp_path: Path) -> None:
    row = {"concurrency": 1, "sampling": "greedy", "tpot_p50_ms": 2.0, "speedup": 1.0, "accepted_per_round": 0.0}
    write(tmp_path / "tpot-ngram.json", [row, {**row, "tpot_p50_ms": 1.0, "speedup": 2.0, "accepted_per_round": 1.5}])
    assert held(tmp_path, "tpot") == [False, None, False]
    assert "c1 greedy 2.00 -> 1.00 ms (2.00x, 1.50 accepted)" in figures(tmp_path, ("tpot",))[1].line()
    write(tmp_path / "onehot-smollm2.json", [{"one_hot": "dense", "delta_percent": 12.34}])
    assert held(tmp_path, "onehot") == [None, False]
    assert "dense +12.3 %" in figures(tmp_path, ("onehot",))[0].line()
    write(tmp_path / "mixed.json", [{"batch": "8 greedy", "requests": "greedy", "spec": "on", "tpot_p50_ms": 1.0}])
    assert held(tmp_path, "mixed") == [None]


SAMPLING = ("greedy", "T .8 top_p .95")


@pytest.mark.parametrize(
    ("speedup", "accepted", "alone", "word", "expected"),
    [
        (1.31, 2.1, 1.04, "equivalent", [True, None] * 2 + [True] * 14 + [None] + [True] * 6),
        (0.99, 1.4, 1.06, "invalid", [False, None] * 2 + [False] * 14 + [None] + [False, True, True] * 2),
    ],
)
def test_what_is_wanted_of_the_drafter(
    tmp_path: Path, speedup: float, accepted: float, alone: float, word: str, expected: list[bool | None]
) -> None:
    on = {"spec": "on", "speedup": speedup, "accepted_per_round": 0.9, "draft_len": 3}
    off = {"spec": "off", "speedup": 9.0, "accepted_per_round": 9.0, "draft_len": 0}
    rows = [{"concurrency": c, "sampling": s, **arm} for c in (1, 8, 16) for s in SAMPLING for arm in (off, on)]
    write(tmp_path / "tpot-dflash.json", rows)
    mixed = [{"batch": "4 greedy + 4 sampled", "requests": s, "against_alone": alone, **on} for s in SAMPLING]
    write(tmp_path / "mixed-dflash.json", mixed)
    write(tmp_path / "rounds.json", timed_rounds(speedup, accepted))
    for rule in ("chain", "match"):
        write(tmp_path / f"gate-dflash-{rule}" / "verdict.json", [], verdict=word, controls=controls(True, True))
    assert held(tmp_path, "dflash") == expected
    lines = [figure.line() for figure in figures(tmp_path, ("dflash",))]
    assert lines[0].endswith(f"draft_len 5: wanted at least 2 tokens, measured {accepted} tokens")
    assert lines[1].endswith("draft_len 3: wanted a statement, measured 0.9 tokens")


def timed_rounds(speedup: float, accepted: float) -> list[dict]:
    """As fast as asked at the length that pays best, which is not the longest; at that ten times as fast. The longest
    alone has the drafts accepted that are asked for; the other has more, and so has one at other concurrency."""
    stages = {"plain_ms": 0.4, "verify_ms": 0.5, "draft_ms": 0.1}
    kept = {1: {3: 9.0, 5: accepted}}
    return [
        {"concurrency": c, "sampling": s, "draft_len": length, **stages, "token_ms": 0.4 / ratio, "best": length == 3,
         "accepted": kept.get(c, {}).get(length, 9.0)}
        for c in (8, 1, 16)
        for s in SAMPLING
        for length, ratio in ((3, speedup), (5, 10 * speedup))
    ]  # fmt: skip


def test_sampled_requests_alone_must_gain_more_and_one_at_a_time(tmp_path: Path) -> None:
    """As served and of the device's time, each by its own file."""
    row = {"spec": "on", "speedup": 1.1, "accepted_per_round": 2.0, "draft_len": 5}
    write(
        tmp_path / "tpot-dflash.json", [{"concurrency": c, "sampling": s, **row} for c in (1, 8, 16) for s in SAMPLING]
    )
    expected = [True] * 3 + [False, True, True]
    assert held(tmp_path, "dflash")[4:16:2] == expected
    assert held(tmp_path, "dflash")[5:16:2] == [False] * 6  # not measured
    write(tmp_path / "rounds.json", timed_rounds(1.1, 2.0))
    assert held(tmp_path, "dflash")[5:16:2] == expected


def test_without_a_file_nothing_is_held(tmp_path: Path) -> None:
    found = figures(tmp_path)
    assert found
    assert all(figure.held is False and figure.measured == NOT_MEASURED for figure in found)


def test_the_command_ends_as_the_figures_do(tmp_path: Path) -> None:
    write(tmp_path / "decode-1.json", [{"what": "step", "median_ms": 0.5}])
    write(tmp_path / "decode-256.json", [{"what": "step", "median_ms": 1.0}])
    good = CliRunner().invoke(main, [str(tmp_path), "decode"])
    assert (good.exit_code, good.output.count("\n")) == (0, 2)
    bad = CliRunner().invoke(main, [str(tmp_path), "decode", "mixed"])
    assert bad.exit_code == 1
    assert "not held  TPOT in a mixed batch" in bad.output
    assert CliRunner().invoke(main, [str(tmp_path), "nothing"]).exit_code == 2
    assert "protocol" in steps_with_figures()
