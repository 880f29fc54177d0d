"""The serving benchmarks run on the small model and keep to what they say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equivtest.bench.onehot import MODES, OneHotWrap, bench_onehot
from equivtest.bench.random_model import LOGIT_DEVIATION, SHAPES, random_engine, random_weights, shape_named
from equivtest.bench.serving import bench_mixed, bench_tpot
from equivtest.bench.subject import GREEDY, SAMPLED, requests_for
from equivtest.decoder.kv_cache import PagedKVCache
from equivtest.engines.base import EngineOptions
from equivtest.engines.decoder import DecoderEngine
from equivtest.errors import InvalidSetting, UnknownName
from tests.decoder.tiny_models import tiny_config

TINY = EngineOptions(model="tiny", kernels="reference", dtype="float32", drafter="ngram", draft_len=3)


def test_tpot_has_a_row_for_every_load_law_and_arm() -> None:
    bench = bench_tpot(TINY, concurrency=(1, 4), max_tokens=6, repeats=1)
    rows = bench.rows()
    assert [(row["concurrency"], row["sampling"], row["spec"]) for row in rows] == [
        (count, sampling, spec)
        for count in (1, 4)
        for sampling in ("greedy", "T .8 top_p .95")
        for spec in ("off", "on")
    ]
    for row in rows:
        assert 0 < row["tpot_p50_ms"] <= row["tpot_p99_ms"]
        if row["spec"] == "off":
            assert row["speedup"] == 1.0
            assert row["accepted_per_round"] == 0.0
    assert bench.settings()["subject"]["max_batch"] == 4


def test_arms_and_laws_take_turns() -> None:
    """So that a machine that slows down slows all of them; the first call of each is not measured."""
    told: list[str] = []
    bench_tpot(TINY, concurrency=(2,), max_tokens=2, repeats=2, on_progress=told.append)
    calls = [f"c2, {law}, spec-{spec}" for law in ("greedy", "T .8 top_p .95") for spec in ("off", "on")]
    turns = ("unmeasured", "1 of 2", "2 of 2")
    assert [line for line in told if line.startswith("c2")] == [f"{call}, {turn}" for turn in turns for call in calls]


def test_the_mixed_batch_tells_greedy_from_sampled_requests() -> None:
    rows = bench_mixed(TINY, max_tokens=6, repeats=2).rows()
    assert [(row["batch"], row["requests"], row["spec"]) for row in rows] == [
        (batch, requests, spec)
        for spec in ("off", "on")
        for batch, requests in (
            ("8 greedy", "greedy"),
            ("4 greedy + 4 sampled", "greedy"),
            ("4 greedy + 4 sampled", "T .8 top_p .95"),
        )
    ]
    assert [row["against_alone"] for row in rows if row["batch"] == "8 greedy"] == [1.0, 1.0]
    assert all(row["speedup"] == 1.0 for row in rows if row["spec"] == "off")


def test_one_hot_rows_cost_what_they_say() -> None:
    rows = bench_onehot(TINY, concurrency=2, max_tokens=6, rounds=1).rows()
    assert [row["one_hot"] for row in rows] == list(MODES)
    assert rows[0]["delta_percent"] == 0.0
    assert rows[0]["bytes_a_step"] == 0
    assert 0 < rows[1]["bytes_a_step"] <= 2 * 2 * 3 * 4  # set and cleared: 2 rows of 3 drafts, 4 bytes
    assert rows[2]["bytes_a_step"] == rows[1]["bytes_a_step"] // 2 * 1024  # whole rows, written once


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_the_same_with_any_one_hot_and_a_scatter_leaves_nothing_behind(mode) -> None:
    engine = DecoderEngine.open(TINY)
    requests = requests_for(engine, [SAMPLED, GREEDY], max_tokens=12)
    wrap = OneHotWrap(mode)
    texts = [generation.token_ids for generation in engine.generate(requests, speculative=True)]
    again = [generation.token_ids for generation in engine.generate(requests, speculative=True, fault=wrap)]
    assert all(np.array_equal(*pair) for pair in zip(texts, again, strict=True))
    if mode == "none":
        assert wrap._flat is None
    else:
        assert bool(wrap._flat.any()) == (mode == "dense")


@pytest.mark.parametrize("wrong", [{"max_tokens": 1}, {"concurrency": (0,)}], ids=str)
def test_a_benchmark_of_nothing_is_refused(wrong) -> None:
    with pytest.raises(InvalidSetting):
        bench_tpot(TINY, **wrong)


@pytest.mark.parametrize("tied", [True, False])
def test_a_random_model_has_a_law_of_a_few_nats(tied) -> None:
    """Logits of deviation 5, whether the head is the embedding or not."""
    config = tiny_config("qwen3", vocab_size=60_000, hidden=256, tied_embeddings=tied)
    engine = random_engine("test", config, EngineOptions(kernels="reference", dtype="float32", drafter="early_exit"))
    logits = _logits(engine)
    assert logits.std(dim=1).mean().item() == pytest.approx(LOGIT_DEVIATION, rel=0.1)
    law = logits.softmax(dim=1)
    entropy = -(law * law.clamp(min=1e-30).log()).sum(dim=1)
    assert 1.5 < entropy.mean().item() < 5.0


def _logits(engine: DecoderEngine) -> torch.Tensor:
    model = engine._executor.model
    kv = PagedKVCache(model.config, num_pages=8, max_sequences=1, dtype=model.dtype)
    batch = kv.extend(np.array([kv.new_sequence()]), np.array([40]))
    return model.step_logits(torch.arange(40) * 7, batch, kv)


def test_a_random_model_decodes_with_and_without_speculation() -> None:
    config = tiny_config("qwen3", vocab_size=1_500, tied_embeddings=True)
    engine = random_engine("test", config, EngineOptions(kernels="reference", dtype="float32", max_batch=2))
    requests = requests_for(engine, [GREEDY] * 2, max_tokens=8)
    on, off = (engine.generate(requests, speculative=speculative) for speculative in (True, False))
    assert [g.token_ids.tolist() for g in on] == [g.token_ids.tolist() for g in off]
    assert (engine.describe()["model"], engine.describe()["drafter"]) == ("random test", "early_exit")
    assert engine.token_text(1_499) == "<unused 1499>"


def test_the_shape_of_qwen3_4b_has_four_billion_weights() -> None:
    config = SHAPES["qwen3-4b"]
    names = random_weights(tiny_config("qwen3", tied_embeddings=True), device="cpu").keys()
    assert "model.layers.3.self_attn.k_norm.weight" in names
    attention = config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    assert config.num_layers * layer + config.vocab_size * config.hidden_size == pytest.approx(4.02e9, rel=0.01)


def test_random_models_refuse_what_they_lack() -> None:
    with pytest.raises(UnknownName, match="qwen3-4b"):
        shape_named("qwen5")
    options = EngineOptions(drafter="model", draft_model="tiny-draft")
    with pytest.raises(InvalidSetting, match="draft model"):
        random_engine("test", tiny_config(), options)
