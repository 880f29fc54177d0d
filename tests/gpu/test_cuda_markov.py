"""Drafts that depend on the one before, on a GPU: the CPU's, token for token."""

from __future__ import annotations

import pytest
import torch

from equivtest.errors import InvalidKernelInput, KernelUnavailable
from equivtest.kernels.contract import RowParams, Streams
from equivtest.kernels.cuda_layers import CudaLayers
from equivtest.kernels.markov import markov_drafts
from tests.kernels.test_markov import draws, inputs

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def layers() -> CudaLayers:
    try:
        return CudaLayers()
    except KernelUnavailable as unavailable:
        pytest.skip(unavailable.reason)


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden_size", [8, 24, 576, 2560])
@pytest.mark.parametrize("vocab_size", [1, 97, 300, 49_152])
@pytest.mark.parametrize(("batch", "places"), [(1, 7), (10, 3), (16, 1)])
def test_drafts_are_the_definitions(
    layers: CudaLayers, dtype: torch.dtype, hidden_size: int, vocab_size: int, batch: int, places: int, drawn: bool
) -> None:
    """Sums are added in another order: a near-tie may go the other way, and takes the rest of its block with it."""
    logits, gates, successors, head = inputs(vocab_size, batch=batch, places=places, hidden_size=hidden_size)
    successors, head = successors.to(dtype), (head / hidden_size**0.5).to(dtype)
    law, streams = draws(batch)
    given = [logits, gates, successors, head]
    on_device = [tensor.cuda() for tensor in given]
    more = (law, streams) if drawn else ()
    more_on_device = (RowParams(*(c.cuda() for c in law)), Streams(*(c.cuda() for c in streams))) if drawn else ()
    expected = markov_drafts(*given, *more)
    found = layers.markov_drafts(*on_device, *more_on_device)
    same = (found.token_ids.cpu() == expected.token_ids).all(dim=1)
    assert int((~same).sum()) <= batch // 8
    assert torch.equal(found.token_ids, layers.markov_drafts(*on_device, *more_on_device).token_ids)
    assert (found.probs is not None) == drawn
    if drawn:
        dense = found.dense(torch.zeros_like(on_device[0])).cpu()
        torch.testing.assert_close(dense[same], expected.dense(torch.zeros_like(logits))[same], atol=1e-4, rtol=1e-3)


def test_other_coins_and_other_gates_are_seen(layers: CudaLayers) -> None:
    """The twin."""
    given = inputs(300, batch=10)
    law, streams = draws(10)
    found = layers.markov_drafts(
        *(tensor.cuda() for tensor in given), RowParams(*(c.cuda() for c in law)), Streams(*(c.cuda() for c in streams))
    ).token_ids.cpu()
    later = Streams(streams.keys, streams.positions + 1)
    assert not torch.equal(found, markov_drafts(*given, law, later).token_ids)
    assert not torch.equal(found, markov_drafts(given[0], 1 - given[1], *given[2:], law, streams).token_ids)


def test_an_odd_hidden_size_is_refused(layers: CudaLayers) -> None:
    with pytest.raises(InvalidKernelInput, match="multiple of 8"):
        layers.markov_drafts(*(tensor.cuda() for tensor in inputs(97, hidden_size=12)))
