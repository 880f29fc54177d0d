"""Drafts that depend on the one before, on a GPU: the CPU's, token for token."""

from __future__ import annotations

import pytest
import torch

from equivtest.errors import InvalidKernelInput, KernelUnavailable
from equivtest.kernels.cuda_layers import CudaLayers
from equivtest.kernels.markov import markov_drafts
from tests.kernels.test_markov import inputs

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def layers() -> CudaLayers:
    try:
        return CudaLayers()
    except KernelUnavailable as unavailable:
        pytest.skip(unavailable.reason)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden_size", [8, 24, 576, 2560])
@pytest.mark.parametrize("vocab_size", [1, 97, 300, 49_152])
@pytest.mark.parametrize(("batch", "places"), [(1, 7), (9, 3), (16, 1)])
def test_drafts_are_the_definitions(
    layers: CudaLayers, dtype: torch.dtype, hidden_size: int, vocab_size: int, batch: int, places: int
) -> None:
    """Sums are added in another order: a near-tie may go the other way, and takes the rest of its block with it."""
    logits, gates, anchors, successors, head = inputs(vocab_size, batch=batch, places=places, hidden_size=hidden_size)
    head = head / hidden_size**0.5
    successors, head = successors.to(dtype), head.to(dtype)
    expected = markov_drafts(logits, gates, anchors, successors, head)
    on_device = [tensor.cuda() for tensor in (logits, gates, anchors, successors, head)]
    found = layers.markov_drafts(*on_device).cpu()
    assert int((found != expected).any(dim=1).sum()) <= batch // 8
    assert torch.equal(found, layers.markov_drafts(*on_device).cpu())


def test_one_place_behind_another_token_is_seen(layers: CudaLayers) -> None:
    """The twin."""
    logits, gates, anchors, successors, head = inputs(300)
    found = layers.markov_drafts(*(tensor.cuda() for tensor in (logits, gates, anchors, successors, head))).cpu()
    assert not torch.equal(found, markov_drafts(logits, gates, (anchors + 1) % 300, successors, head))


def test_an_odd_hidden_size_is_refused(layers: CudaLayers) -> None:
    with pytest.raises(InvalidKernelInput, match="multiple of 8"):
        layers.markov_drafts(*(tensor.cuda() for tensor in inputs(97, hidden_size=12)))
