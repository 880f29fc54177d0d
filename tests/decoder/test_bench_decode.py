"""The decoding benchmark runs both sides on a small model and reports what it timed."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from equivtest.bench import decode
from equivtest.bench.decode import bench_decode
from equivtest.decoder.kv_cache import PagedKVCache
from equivtest.decoder.transformers_model import transformers_model
from equivtest.errors import InvalidSetting, UsageError
from tests.decoder.gguf_files import write_gguf
from tests.decoder.tiny_models import tiny_checkpoint, tiny_config


@pytest.fixture
def model_path(tmp_path: Path) -> str:
    config, weights = tiny_checkpoint(vocab_size=320)
    write_gguf(tmp_path / "m.gguf", config, weights)
    return str(tmp_path / "m.gguf")


@pytest.mark.parametrize("shared_prompt", [True, False])
def test_both_decoders_are_timed(model_path: str, shared_prompt: bool) -> None:
    threads = torch.get_num_threads()
    lines: list[str] = []
    result = bench_decode(
        model_path,
        kernels="reference",
        dtype="bfloat16",
        batch=3,
        context=5,
        steps=2,
        threads=1,
        shared_prompt=shared_prompt,
        on_progress=lines.append,
    )
    for timing in (result.step, result.forward, result.hf_step, result.hf_forward):
        assert timing.num_steps == 4
        assert 0 < timing.best_s <= timing.median_s
        assert timing.tokens_per_s == 3 / timing.median_s
    speedup = {row["what"]: row["speedup"] for row in result.rows()}
    assert speedup["step"] == pytest.approx(result.step.tokens_per_s / result.hf_step.tokens_per_s)
    assert speedup["forward"] == pytest.approx(result.forward.tokens_per_s / result.hf_forward.tokens_per_s)
    assert speedup["hf_step"] == speedup["hf_forward"] == 1
    assert (result.dtype, result.threads, result.backend) == ("bfloat16", 1, "reference")
    assert result.device["device"] == "cpu"
    assert {"equivtest", "torch", "transformers"} <= set(result.settings()["device"]["versions"])
    assert len(lines) == 4
    assert torch.get_num_threads() == threads


def test_unshared_prompts_hold_the_same_contents_on_pages_of_their_own() -> None:
    kv = PagedKVCache(tiny_config(), num_pages=32, max_sequences=3, dtype=torch.float32)
    sequences = np.array([kv.new_sequence()])
    batch = kv.extend(sequences, np.array([21]))
    kv.pages.flatten(1, 3)[:, batch.slots] = 1.0
    contents = kv.pages[:, batch.page_table[0].astype(np.int64)].clone()
    sequences = np.array([0, kv.fork(0), kv.fork(0)])
    decode._unshare(kv, sequences)
    assert kv.num_free_pages == 32 - 3 * 2
    after = kv.extend(sequences, np.ones(3, dtype=np.int64)).page_table
    assert len(set(after.flatten().tolist())) == 6
    for pages in after.astype(np.int64):
        assert torch.equal(kv.pages[:, pages], contents)


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "transformers":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UsageError, match="pip install"):
        transformers_model(*tiny_checkpoint(), dtype=torch.float32)


@pytest.mark.parametrize("setting", ["batch", "context", "steps", "threads"])
def test_sizes_below_one_are_refused(setting: str, model_path: str) -> None:
    with pytest.raises(InvalidSetting, match=setting):
        bench_decode(model_path, kernels="reference", **{setting: 0})
