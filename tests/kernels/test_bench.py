"""The kernel benchmark: what it times is one law, done three ways."""

from __future__ import annotations

import pytest
import torch

from equivtest.bench.kernels import TORCH_SORT, _torch_sort_way, bench_kernels, realistic_logits
from equivtest.errors import InvalidSetting
from equivtest.kernels.registry import get_backend
from equivtest.records import SamplingParams

from .calls import law


def test_the_benchmark_times_each_way_and_says_on_what() -> None:
    bench = bench_kernels(num_rows=4, vocab_size=500, repeats=2)
    assert [row["what"] for row in bench.rows()] == ["cpp", "reference", TORCH_SORT]
    assert all(timing.filter_ms > 0 and timing.sample_ms > 0 for timing in bench.timings)
    assert bench.timings[-1].speedup == 1
    assert bench.settings()["num_threads"] == torch.get_num_threads()


def test_the_sort_based_way_filters_as_the_kernels_do() -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95)
    logits = realistic_logits(8, 3000)
    filtered, _ = _torch_sort_way(logits, params)
    torch.testing.assert_close(filtered(), law(get_backend("cpp"), logits, params), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("wrong", [{"num_rows": 0}, {"vocab_size": 0}, {"repeats": 0}, {"temperature": 0.0}], ids=str)
def test_a_benchmark_of_nothing_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidSetting):
        bench_kernels(**{"num_rows": 4, "vocab_size": 50, "repeats": 1, **wrong})
