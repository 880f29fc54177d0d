"""The block drafter on a GPU: in graphs it proposes what the plain network does."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from equivtest.decoder.drafters.dflash import BlockNetwork
from equivtest.decoder.model import Model
from equivtest.errors import KernelUnavailable
from equivtest.kernels.contract import KernelBackend
from equivtest.kernels.registry import get_backend
from equivtest.records import Origin
from tests.decoder.dflash_drafters import dflash_config, dflash_drafter, dflash_network
from tests.decoder.scenarios import CONFIGS, GREEDY, build, random_prompts, requests_for, texts
from tests.decoder.test_dflash import proposals_of, stale, wrong
from tests.decoder.tiny_models import tiny_checkpoint

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["cuda", "reference"])
def backend(request: pytest.FixtureRequest) -> KernelBackend:
    try:
        return get_backend(request.param)
    except KernelUnavailable as unavailable:
        pytest.skip(unavailable.reason)


def on_gpu(backend: KernelBackend, dtype: torch.dtype = torch.float32) -> Model:
    config, weights = tiny_checkpoint()
    return Model(config, weights, backend, dtype=dtype, device="cuda")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"anchor_first": True},
        {"markov_head": True},
        {"block_size": 7},
        {"block_size": 20, "target_layer_ids": (0, 1, 2, 3)},
    ],
)
def test_every_proposal_is_what_the_whole_network_gives_for_the_text(
    backend: KernelBackend, changes: dict[str, object]
) -> None:
    target = on_gpu(backend)
    proposals = proposals_of(dflash_drafter(target, **changes), target)
    assert wrong(proposals, target, dflash_network(dflash_config(target.config, **changes))) == 0


def test_in_bfloat16_proposals_part_from_the_networks_at_near_ties_only(backend: KernelBackend) -> None:
    """Within .3 of the largest logit, whose standard deviation is about 3."""
    target = on_gpu(backend, torch.bfloat16)
    network = dflash_network(dflash_config(target.config)).to(torch.bfloat16)
    assert wrong(proposals_of(dflash_drafter(target), target), target, network, 0.3) == 0


def test_a_context_that_is_not_cut_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin, without graphs, which could not hold it."""
    target = on_gpu(get_backend("reference"))
    drafter = dflash_drafter(target)
    monkeypatch.setattr(drafter.network, "follow", stale(drafter.network))
    proposals = proposals_of(drafter, target)
    assert wrong(proposals, target, dflash_network(dflash_config(target.config))) > len(proposals) / 4


def test_greedy_text_is_the_same_with_and_without_speculation(backend: KernelBackend) -> None:
    target = on_gpu(backend)
    executor = build(backend, "dflash", model=target)
    assert isinstance(executor.drafter.follower, BlockNetwork)  # type: ignore[union-attr]
    requests = requests_for(random_prompts(24), GREEDY, max_tokens=30)
    off, on, again = (executor.generate(requests, speculative=speculative) for speculative in (False, True, True))
    assert texts(on) == texts(off) == texts(again)
    assert any(Origin.ACCEPTED in g.origins for g in on)


@pytest.mark.parametrize(("acceptance", "speculative"), [("chain", True), ("match", True), ("chain", False)])
@pytest.mark.parametrize("max_batch", [1, 7, 24])
def test_rounds_that_the_device_lays_out_are_the_hosts(acceptance: str, max_batch: int, *, speculative: bool) -> None:
    """In graphs, read late; tests/decoder/test_rounds.py has the twins. One text in 24 may part at a near-tie: rows of
    another shape are multiplied in another order."""
    try:
        backend = get_backend("cuda")
    except KernelUnavailable as unavailable:
        pytest.skip(unavailable.reason)
    target = on_gpu(backend)
    drafter = dflash_drafter(target, markov_head=True)
    executor = build(backend, model=target, replace_drafter=drafter, acceptance=acceptance, max_batch=max_batch)
    requests = [
        dataclasses.replace(request, max_tokens=1 + 5 * (index % 6))
        for index, request in enumerate(requests_for(random_prompts(24), CONFIGS["topp95"]))
    ]
    assert executor._rounds is not None
    own, again = (executor.generate(requests, speculative=speculative) for _ in range(2))
    assert executor._rounds._rounds
    assert texts(again) == texts(own)
    executor._rounds = None
    by_host = executor.generate(requests, speculative=speculative)
    assert sum(a.token_ids.tolist() != b.token_ids.tolist() for a, b in zip(own, by_host, strict=True)) <= 1
