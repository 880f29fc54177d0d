"""The kernel benchmark's table, on a processor and with a pipeline made by hand."""

from __future__ import annotations

import pytest
import torch

from equivtest.bench import device_clock
from equivtest.bench.device_clock import copy_bandwidth, num_inputs, time_calls
from equivtest.bench.gpu_kernels import ALL, VENDOR, Case, bench_gpu_kernels, with_ratios


def pieces(logits, draft_token_ids, temperature, top_p):
    assert logits.dtype == torch.bfloat16
    batch, draft = draft_token_ids.shape
    assert logits.shape[0] == batch * (draft + 1)
    likeliest = logits.argmax(dim=1).view(batch, draft + 1)[:, :draft]
    assert torch.equal(draft_token_ids, likeliest), "the drafts of every other way"
    assert (temperature, top_p) == (0.8, 0.95)
    return {"cast": lambda: logits.float(), "softmax": lambda: logits.softmax(dim=1)}


def test_every_way_has_its_operations_and_their_sum() -> None:
    lines: list[str] = []
    bench = bench_gpu_kernels(
        device="cpu", vocabs=(300,), batches=(1, 2), drafts=(3,), backends=("reference", "cuda"), vendor=pieces,
        on_progress=lines.append,
    )  # fmt: skip
    rows = bench.rows()
    ways = [(way, op) for way in ("reference", VENDOR) for op in {"reference": ("verify_probs", "spec_accept", ALL),
                                                                 VENDOR: ("cast", "softmax", ALL)}[way]]  # fmt: skip
    assert [(row["batch"], row["way"], row["op"]) for row in rows] == [
        (batch, *way) for batch in (1, 2) for way in ways
    ]
    assert "cuda" in bench.settings()["refused"]
    bandwidth = bench.settings()["copy_bytes_per_s"]
    for start in range(0, len(rows), 3):
        first, second, whole = rows[start : start + 3]
        assert whole["us"] == first["us"] + second["us"]
        assert first["bytes_read"] == whole["bytes_read"] == 2 * whole["batch"] * 4 * 300
        assert second["bytes_read"] == 2 * first["bytes_read"]
        assert whole["share_of_copy"] == pytest.approx(1 / whole["logits_reads"])
        assert whole["logits_reads"] == pytest.approx(whole["us"] / 1e6 * bandwidth / whole["bytes_read"])
    assert len(lines) == 2


def test_the_ratio_is_of_whole_ways_and_one_for_the_vendor() -> None:
    def row(way: str, op: str, us: float) -> dict:
        return {"way": way, "op": op, "us": us}

    rows = [row("cuda fused", ALL, 40.0), row(VENDOR, "cast", 100.0), row(VENDOR, ALL, 400.0)]
    assert [each["vendor_ratio"] for each in with_ratios(rows)] == [10.0, None, 1.0]
    assert [each["vendor_ratio"] for each in with_ratios(rows[:1])] == [None]


def test_inputs_in_turn_outgrow_the_cache_four_times() -> None:
    case = Case(vocab=49_152, batch=1, draft=7)
    assert case.logits_bytes == 786_432
    assert num_inputs(case.logits_bytes, 50 << 20) * case.logits_bytes >= 4 * (50 << 20)
    assert num_inputs(1 << 30, 50 << 20) == 1
    assert num_inputs(case.logits_bytes, 0) == 1


def test_the_time_is_of_one_call_and_every_input_has_its_turn(monkeypatch) -> None:
    made = []
    calls = [lambda index=index: made.append(index) for index in range(4)]
    monkeypatch.setattr(device_clock, "_host_s", lambda calls: [call() for call in calls] and 4e-3)
    timing = time_calls(calls, "cpu")
    assert timing == (pytest.approx(1_000.0), "host")
    assert made[:8] == [0, 1, 2, 3] * 2
    assert len(made) >= 4 * (1 + 5)


def test_a_copy_has_a_bandwidth() -> None:
    assert 1e7 < copy_bandwidth("cpu") < 1e13


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_call_that_waits_is_timed_by_launches_and_one_that_does_not_by_a_graph() -> None:
    x = torch.ones(1 << 20, device="cuda")
    assert time_calls([lambda: x.mul_(1.0)], "cuda").how == "graph"
    assert time_calls([lambda: x.sum().item()], "cuda").how == "launches"
    assert time_calls([lambda: x.mul_(1.0)], "cuda").how == "graph"  # a refused capture leaves nothing behind
    assert copy_bandwidth("cuda") > 1e11
