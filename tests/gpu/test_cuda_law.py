"""What fused acceptance puts out has the target's law: chi-squared, and a biased twin that it rejects."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equivtest.kernels.contract import (
    FusedBackend,
    RowParams,
    SpecScratch,
    Streams,
)
from equivtest.kernels.cuda import load
from equivtest.records import SamplingParams
from tests.kernels.chain_law import draw_drafts, p_value, position_laws, tables

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def backend() -> FusedBackend:
    return load()


NUM_REQUESTS = 10_000
REJECT_BELOW = 1e-6


def chain_p_value(backend: FusedBackend, *, one_hot: bool, bias: float) -> float:
    """Smallest p-value over the output positions of chi-squared against the exact law, 3 drafts, 7 tokens.

    bias: added to each draft's own weight before its logarithm becomes the kernel's logit. The kernel is given no q
    where one_hot.
    """
    p, q = tables(3, one_hot=one_hot, vocab_size=7, seed=21)
    drafts = draw_drafts(q, NUM_REQUESTS, np.random.default_rng(21))
    weights = np.repeat(p[None], NUM_REQUESTS, axis=0)
    rows = np.arange(NUM_REQUESTS)[:, None]
    weights[rows, np.arange(3), drafts] += bias
    with np.errstate(divide="ignore"):
        logits = torch.tensor(np.log(weights), dtype=torch.float32).view(-1, 7).cuda()
    result = backend.accept_logits(
        logits,
        torch.arange(0, 4 * NUM_REQUESTS, 4, dtype=torch.int32, device="cuda"),
        RowParams.of([SamplingParams()] * NUM_REQUESTS, "cuda"),
        torch.tensor(drafts).cuda(),
        torch.full((NUM_REQUESTS,), 3, dtype=torch.int32, device="cuda"),
        None if one_hot else torch.tensor(q, dtype=torch.float32).expand(NUM_REQUESTS, 3, 7).contiguous().cuda(),
        Streams(torch.arange(NUM_REQUESTS).cuda(), torch.zeros(NUM_REQUESTS, dtype=torch.int64).cuda()),
        rule="chain",
        scratch=SpecScratch(NUM_REQUESTS, 3, 7, "cuda"),
    )
    output, laws = result.output_token_ids.cpu().numpy(), position_laws(p, q)
    return min(p_value(output[:, j], laws[j]) for j in range(4))


@pytest.mark.parametrize("one_hot", [True, False], ids=["one_hot", "real_q"])
def test_the_output_has_the_law_of_the_target(backend: FusedBackend, one_hot: bool) -> None:
    """False-alarm rate over the 8 positions of both cases: below 1e-5 (Bonferroni)."""
    assert chain_p_value(backend, one_hot=one_hot, bias=0.0) > REJECT_BELOW


def test_drafts_judged_with_a_little_more_than_their_probability_are_found(backend: FusedBackend) -> None:
    """The twin: .1 more before renormalisation, which is .02 to .03 after it for drafts that have about .7."""
    assert chain_p_value(backend, one_hot=True, bias=0.1) < REJECT_BELOW
