"""The scorer on a GPU says what it says on the CPU: laws are reduced there, densely, and only columns come back."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from equivtest.decoder.dense_law import DenseLaw
from equivtest.decoder.draft_laws import BlockLaws, ModelLaws
from equivtest.decoder.finished_samples import FinishedSamples
from equivtest.decoder.law_columns import row_laws
from equivtest.decoder.model import Model
from equivtest.decoder.scorer import Scorer
from equivtest.decoder.sparse_law import SparseLaw
from equivtest.errors import KernelUnavailable
from equivtest.kernels.registry import get_backend
from equivtest.records import LawColumns
from tests.decoder.dflash_drafters import dflash_drafter
from tests.decoder.finished import finished
from tests.decoder.scenarios import CONFIGS, build, random_prompts, requests_for
from tests.decoder.test_law_columns import every_column, scaled_laws
from tests.decoder.tiny_models import tiny_checkpoint, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no usable CUDA device"),
]

HEAD_DIM = 64
"""Every backend takes it."""


def some_samples(config: str) -> FinishedSamples:
    """Speculative decoding on the CPU, with one token in ten replaced: most of those are off the support."""
    executor = build(get_backend("reference"), model=tiny_model(head_dim=HEAD_DIM), max_draft=3)
    requests = requests_for([random_prompts(3)[1]] * 40, CONFIGS[config], max_tokens=9)
    samples = finished(requests, executor.generate(requests, speculative=True))
    rng = np.random.default_rng(5)
    other = rng.integers(97, size=samples.token_ids.shape)
    return dataclasses.replace(samples, token_ids=np.where(rng.random(other.shape) < 0.1, other, samples.token_ids))


def scored(samples: FinishedSamples, drafter: str, kernels: str, device: str) -> LawColumns:
    config, weights = tiny_checkpoint("llama", seed=0, head_dim=HEAD_DIM)
    backend = get_backend(kernels)
    # FlashInfer attends in bfloat16 alone; its laws are compared over the same float32 forward.
    forward = get_backend("cuda") if kernels == "flashinfer" else backend
    model, draft = (Model(config, weights, forward, device=device) for _ in range(2))
    blocks = dflash_drafter(model, markov_head=True).network
    drafts = ModelLaws(draft, backend) if drafter == "model" else BlockLaws(blocks)
    # Few rows at a time, so that several batches and several chunks of laws are needed.
    return Scorer(model, backend, drafts=drafts, max_forward_rows=120, max_law_rows=50).score(samples)


def test_laws_on_a_gpu_are_dense_and_say_what_sparse_ones_say() -> None:
    p, q, (node, token_ids, coins, q_rows) = scaled_laws(2, "cuda")
    laws = row_laws(p)
    assert isinstance(laws, DenseLaw)
    dense = every_column(laws.take(node), token_ids, coins, q, q_rows)
    sparse = every_column(SparseLaw.of(p.cpu()).take(node), token_ids, coins, q.cpu(), q_rows)
    for name, column in sparse.items():
        np.testing.assert_allclose(dense[name], column, rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("drafter", ["model", "dflash"])
@pytest.mark.parametrize("kernels", ["reference", "cuda", "flashinfer"])
@pytest.mark.parametrize("config", [name for name, params in CONFIGS.items() if not params.min_p])
def test_columns_are_those_of_the_cpu(config: str, kernels: str, drafter: str) -> None:
    """In float32, but for rounding: 1e-3 covers what it does to nearly all rows; where it moves a token over a cut of
    the law, masses differ by that token, in at most one row of a hundred."""
    try:
        get_backend(kernels)
    except KernelUnavailable as unavailable:
        pytest.skip(unavailable.reason)
    samples = some_samples(config)
    on_cpu, on_gpu = scored(samples, drafter, "reference", "cpu"), scored(samples, drafter, kernels, "cuda")
    for field in dataclasses.fields(LawColumns):
        one, other = (np.asarray(getattr(columns, field.name), np.float64) for columns in (on_cpu, on_gpu))
        far = np.abs(one - other) > 1e-3
        assert far.mean() <= 0.01, (
            f"{field.name}: {far.mean():.1%} of tokens differ, by up to {np.abs(one - other).max()}"
        )
