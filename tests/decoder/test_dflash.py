"""The block drafter at work: its cached context is the network's own, whatever was accepted and rejected before.

That its drafts leave the law and greedy text alone, in ragged, mixed and waiting batches, is tested with all drafters
in test_executor.py, test_identity.py and test_mixed_batch.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from equivtest.decoder.drafters.dflash import BlockNetwork, DFlashCheckpoint, DFlashDrafter, each_row_by_itself
from equivtest.decoder.drafters.dflash_network import DFlashNetwork
from equivtest.decoder.hub import resolve_model
from equivtest.decoder.kv_cache import PagedKVCache, RaggedBatch
from equivtest.decoder.model import Model
from equivtest.decoder.stages import Drafts, Stages, StepInput
from equivtest.decoder.weights import load_checkpoint
from equivtest.engines.base import EngineOptions
from equivtest.engines.decoder import DecoderEngine
from equivtest.errors import InvalidSetting, UnsupportedModel
from equivtest.kernels.contract import BlockDrafts, SpecAccept
from equivtest.kernels.markov import markov_drafts
from equivtest.kernels.registry import get_backend
from equivtest.kernels.torch_layers import TorchLayers
from equivtest.records import Request, SamplingParams
from tests.decoder.dflash_drafters import dflash_checkpoint, dflash_config, dflash_drafter, dflash_network, features_of
from tests.decoder.incapable_backend import IncapableBackend
from tests.decoder.scenarios import CONFIGS, GREEDY, build, random_prompts, requests_for, texts
from tests.decoder.tiny_models import tiny_model

BACKEND = get_backend("cpp")
Proposals = dict[tuple[int, ...], list[int]]
"""What was proposed behind each text."""


class Watch:
    """Notes what is proposed, and keeps as many drafts as it likes: rejections and acceptances of every length."""

    def __init__(self) -> None:
        self.proposals: Proposals = {}
        self.offered: list[tuple[np.ndarray, np.ndarray]] = []
        self._rng = np.random.default_rng(0)

    def wrap(self, stages: Stages) -> Stages:
        def propose(step: StepInput) -> Drafts:
            drafts = stages.propose(step)
            self.offered.append((step.limits, drafts.num_draft))
            for row, request in enumerate(step.requests):
                text = tuple(step.table.token_ids[request, : step.lengths[row]].tolist())
                self.proposals[text] = drafts.token_ids[row, : drafts.num_draft[row]].tolist()
            return drafts

        def accept(step: StepInput, drafts: Drafts, _: Tensor) -> SpecAccept:
            emitted = self._rng.integers(drafts.num_draft + 1).astype(np.int32)
            outputs = np.concatenate([drafts.token_ids, np.zeros((step.batch, 1), np.int64)], axis=1)
            outputs[np.arange(step.batch), emitted] = self._rng.integers(97, size=step.batch)
            return SpecAccept(*(torch.from_numpy(a) for a in (outputs, emitted, emitted)))

        return dataclasses.replace(stages, propose=propose, accept=accept)


@torch.inference_mode()
def recomputed(target: Model, network: DFlashNetwork, text: Sequence[int], proposal: Sequence[int]) -> Tensor:
    """Logits [len(proposal), vocab_size] of the block behind a text, each row behind the draft before it, with nothing
    cached."""
    config = network.config
    before = torch.zeros(0, config.feature_size, dtype=target.dtype)
    if len(text) > 1:
        before = features_of(target, text[:-1], config.target_layer_ids).cpu()
    block = target.embed(network.block_token_ids(torch.tensor(text[-1])).to(target.device)).cpu()
    hidden = network(before[None], block[None, None], torch.tensor([[len(text) - 1]]))[0, 0].to(target.device)
    previous = target.embed(torch.tensor([text[-1], *proposal[:-1]], device=target.device)).cpu()
    rows = hidden.cpu().narrow(0, config.first_draft_row, len(proposal))
    return target.logits(network.behind(rows, previous).to(target.device)).cpu()


def proposals_of(drafter: DFlashDrafter, target: Model, *, max_draft: int = 8) -> Proposals:
    """Along texts of different length that start from some shared prompts, in a batch that loses rows on the way."""
    prompts = random_prompts(6)
    requests = [
        Request(prompt_token_ids=prompt, params=GREEDY, stream_key=index, max_tokens=10 + 5 * (index % 4))
        for index, prompt in enumerate([*prompts, *prompts[::2]])
    ]
    watch = Watch()
    executor = build(target.backend, model=target, replace_drafter=drafter, max_batch=7, max_draft=max_draft)
    executor.generate(requests, speculative=True, fault=watch.wrap)
    assert any(len(proposal) for proposal in watch.proposals.values())
    return watch.proposals


def wrong(proposals: Proposals, target: Model, network: DFlashNetwork, tolerance: float = 1e-3) -> int:
    """How many proposals have a token whose logit, recomputed, is more than `tolerance` behind the largest."""
    different = 0
    for text, proposal in proposals.items():
        if proposal:
            logits = recomputed(target, network, text, proposal)
            behind = logits.amax(dim=1) - logits.gather(1, torch.tensor(proposal)[:, None])[:, 0]
            different += bool((behind > tolerance).any())
    return different


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"anchor_first": True},
        {"markov_head": True},
        {"markov_head": True, "anchor_first": True},
        {"block_size": 2, "num_layers": 1},
        {"block_size": 20, "num_kv_heads": 4, "target_layer_ids": (0, 1, 2, 3)},
    ],
)
def test_every_proposal_is_what_the_whole_network_gives_for_the_text(changes: dict[str, object]) -> None:
    target = tiny_model(backend=BACKEND)
    network = dflash_network(dflash_config(target.config, **changes))
    proposals = proposals_of(dflash_drafter(target, **changes), target)
    assert len(proposals) > 30
    assert wrong(proposals, target, network) == 0
    assert len({tuple(p) for p in proposals.values()}) > 10, "the drafter looks at the text"


def test_in_bfloat16_proposals_part_from_the_networks_at_near_ties_only() -> None:
    """Within .3 of the largest logit, whose standard deviation is about 3."""
    target = tiny_model(backend=BACKEND, dtype=torch.bfloat16)
    network = dflash_network(dflash_config(target.config)).to(torch.bfloat16)
    assert wrong(proposals_of(dflash_drafter(target), target), target, network, 0.3) == 0


def test_a_markov_head_behind_the_wrong_token_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: later places know nothing of the token before them."""
    target = tiny_model(backend=BACKEND)
    drafter = dflash_drafter(target, markov_head=True)

    def behind_nothing(logits: Tensor, *rest: Tensor) -> BlockDrafts:
        places = [markov_drafts(logits[:, k : k + 1], *rest) for k in range(logits.shape[1])]
        return BlockDrafts(torch.cat([place.token_ids for place in places], dim=1), None, None)

    monkeypatch.setattr(TorchLayers, "markov_drafts", staticmethod(behind_nothing))
    proposals = proposals_of(drafter, target)
    network = dflash_network(dflash_config(target.config, markov_head=True))
    assert wrong(proposals, target, network) > len(proposals) / 4


def test_drafts_are_drawn_with_a_markov_head_alone() -> None:
    target = tiny_model(backend=BACKEND)
    assert BlockNetwork(dflash_checkpoint(target.config, markov_head=True), target, draws=True).draws
    with pytest.raises(InvalidSetting, match="no Markov head"):
        BlockNetwork(dflash_checkpoint(target.config), target, draws=True)


def stale(network: BlockNetwork) -> Callable[..., None]:
    """A context that is not cut back: what was once written for a place stays there."""
    follow, written = network.follow, set[int]()

    def first_write(features: Tensor, slots: Tensor, positions: Tensor, pages: Tensor) -> None:
        new = torch.tensor([slot not in written for slot in slots.tolist()])
        written.update(slots.tolist())
        if new.any():
            follow(features[new], slots[new], positions[new], pages)

    return first_write


def shifted(network: BlockNetwork) -> Callable[..., None]:
    follow = network.follow
    return lambda features, slots, positions, pages: follow(features, slots, positions + 1, pages)


def swapped(network: BlockNetwork) -> Callable[..., None]:
    follow = network.follow
    return lambda features, slots, positions, pages: follow(features.roll(1, dims=1), slots, positions, pages)


@pytest.mark.parametrize("fault", [stale, shifted, swapped])
def test_a_context_that_is_not_cut_back_or_not_the_texts_is_found(
    fault: Callable[[BlockNetwork], Callable[..., None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin: rejected drafts that stay in the context, positions one off, features in another order."""
    target = tiny_model(backend=BACKEND)
    drafter = dflash_drafter(target)
    monkeypatch.setattr(drafter.network, "follow", fault(drafter.network))
    proposals = proposals_of(drafter, target)
    assert wrong(proposals, target, dflash_network(dflash_config(target.config))) > len(proposals) / 4


def test_a_block_that_is_causal_inside_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: rows of a block that are one sequence see no mask behind them."""
    target = tiny_model(backend=BACKEND)
    drafter = dflash_drafter(target)
    monkeypatch.setattr("equivtest.decoder.drafters.dflash.each_row_by_itself", lambda batch: batch)
    proposals = proposals_of(drafter, target)
    assert wrong(proposals, target, dflash_network(dflash_config(target.config))) > len(proposals) / 4


def test_each_row_by_itself_is_as_long_as_the_whole() -> None:
    batch = RaggedBatch(
        page_table=np.array([[4, 5], [6, 7]], np.int32),
        kv_lens=np.array([9, 20], np.int32),
        query_start=np.array([0, 2, 4], np.int32),
        slots=np.arange(4),
        positions=np.array([7, 8, 18, 19]),
    )
    rows = each_row_by_itself(batch)
    assert rows.page_table.tolist() == [[4, 5], [4, 5], [6, 7], [6, 7]]
    assert rows.kv_lens.tolist() == [9, 9, 20, 20]
    assert rows.query_start.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("anchor_first", [False, True])
def test_a_block_offers_no_more_than_it_has_and_no_row_more_than_its_limit(anchor_first: bool) -> None:
    """Plain rows, rows near their end and rows in full flight in one batch."""
    backend = IncapableBackend(BACKEND)
    target = tiny_model(backend=backend)
    drafter = dflash_drafter(target, anchor_first=anchor_first)
    kinds = (GREEDY, CONFIGS["minp05"], CONFIGS["topk50"])  # min_p goes plain on this backend
    requests = [
        Request(prompt_token_ids=prompt, params=kinds[index % 3], stream_key=index, max_tokens=3 + index)
        for index, prompt in enumerate(random_prompts(9))
    ]
    watch = Watch()
    executor = build(backend, model=target, replace_drafter=drafter, max_draft=8, plain_backend=BACKEND)
    executor.generate(requests, speculative=True, fault=watch.wrap)
    most = 5 if anchor_first else 4
    assert all(np.array_equal(np.minimum(limits, most), counts) for limits, counts in watch.offered)
    assert any((limits == 0).any() and (limits > most).any() for limits, _ in watch.offered)


def test_a_request_may_fill_the_models_context_to_the_last_token() -> None:
    target = tiny_model(backend=BACKEND, max_position=40)
    executor = build(BACKEND, model=target, replace_drafter=dflash_drafter(target, block_size=16), max_draft=15)
    requests = [
        Request(prompt_token_ids=prompt, params=GREEDY, stream_key=0, max_tokens=40 - len(prompt))
        for prompt in random_prompts(12)
        if len(prompt) < 40
    ]
    off, on = (executor.generate(requests, speculative=speculative) for speculative in (False, True))
    assert texts(on) == texts(off)
    assert {len(r.prompt_token_ids) + len(g.token_ids) for r, g in zip(requests, on, strict=True)} == {40}


def test_a_plain_call_computes_no_features(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_model(backend=BACKEND)
    drafter = dflash_drafter(target)
    rows: list[int] = []
    monkeypatch.setattr(drafter.network, "follow", lambda features, *_: rows.append(len(features)))
    executor = build(BACKEND, model=target, replace_drafter=drafter)
    requests = requests_for(random_prompts(4), GREEDY, max_tokens=6)
    executor.generate(requests, speculative=False)
    assert rows == []
    executor.generate(requests, speculative=True)
    assert sum(rows) >= sum(len(request.prompt_token_ids) + 4 for request in requests)


def test_a_call_with_and_one_without_speculation_share_a_cache() -> None:
    executor = build(BACKEND, "dflash")
    requests = requests_for(random_prompts(4), GREEDY, max_tokens=6)
    caches = set()
    for speculative in (True, False, True):
        executor.generate(requests, speculative=speculative)
        caches.add(executor._kv)
    assert len(caches) == 1


def test_companion_pages_are_shared_and_copied_as_pages_are() -> None:
    """A fork that writes into a shared page takes a copy of the companion's with it."""
    target = tiny_model(backend=BACKEND)
    companion = dflash_config(target.config).as_model()
    kv = PagedKVCache(
        target.config, num_pages=8, max_sequences=4, page_size=4, dtype=torch.float32, companion=companion
    )
    one = kv.new_sequence()
    first = kv.extend(np.array([one]), np.array([6]))
    assert kv.companion_pages is not None
    kv.companion_pages.normal_()
    other = kv.fork(one)
    second = kv.extend(np.array([other]), np.array([1]))
    shared, (old, new) = first.page_table[0, 0], (first.page_table[0, 1], second.page_table[0, 1])
    assert (second.page_table[0, 0], new != old) == (shared, True)
    assert torch.equal(kv.companion_pages[:, old], kv.companion_pages[:, new])


@pytest.mark.parametrize("name", ["fc.weight", "layers.1.mlp.up_proj.weight", "layers.0.self_attn.k_norm.weight"])
def test_a_missing_and_a_misshapen_weight_are_named(name: str) -> None:
    target = tiny_model()
    checkpoint = dflash_checkpoint(target.config)
    lacking = {other: weight for other, weight in checkpoint.weights.items() if other != name}
    with pytest.raises(UnsupportedModel, match=f"random.*{name} is missing"):
        DFlashDrafter(checkpoint._replace(weights=lacking), target)
    with pytest.raises(UnsupportedModel, match=f"{name} has shape"):
        DFlashDrafter(checkpoint._replace(weights={**lacking, name: torch.ones(3)}), target)
    with pytest.raises(UnsupportedModel, match=r"lm_head\.weight"):
        DFlashDrafter(checkpoint._replace(weights={**checkpoint.weights, "lm_head.weight": torch.ones(3)}), target)


@pytest.mark.parametrize("shape", [{"vocab_size": 31}, {"hidden": 16}, {"layers": 3}])
def test_a_drafter_of_another_target_is_refused(shape: dict[str, int]) -> None:
    with pytest.raises(UnsupportedModel, match=r"random.*another target"):
        DFlashDrafter(dflash_checkpoint(tiny_model().config), tiny_model(**shape))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random drafter for the shipped `tiny` model, on disk."""
    folder = tmp_path_factory.mktemp("drafters") / "random-dflash"
    dflash_network(dflash_config(load_checkpoint(resolve_model("tiny")).config, head_dim=16)).save(folder)
    return folder


def tiny_engine(folder: Path | None, acceptance: str = "match") -> DecoderEngine:
    options = EngineOptions(
        model="tiny", dtype="float32", drafter="dflash", draft_len=4, acceptance=acceptance,
        draft_model=None if folder is None else str(folder),
    )  # fmt: skip
    return DecoderEngine.open(options)


def test_the_record_of_a_run_names_the_drafter_and_its_weights(folder: Path) -> None:
    described = tiny_engine(folder).describe()["drafter_parameters"]
    assert described["draft_model"] == "random-dflash"
    assert described["draft_model_sha256"] == DFlashCheckpoint.load(folder).sha256
    assert (described["block_size"], described["target_layer_ids"], described["anchor_first"]) == (5, [0, 2], False)


def test_a_model_without_a_drafter_of_its_own_needs_one_named() -> None:
    with pytest.raises(InvalidSetting, match="block drafter"):
        tiny_engine(None)


@pytest.mark.parametrize("params", [GREEDY, *CONFIGS.values()])
def test_drafts_of_any_weights_leave_the_tiny_models_text_as_it_is(folder: Path, params: SamplingParams) -> None:
    """Token for token, by the match rule, from a drafter in bfloat16 on disk."""
    engine = tiny_engine(folder)
    prompts = [engine.encode_prompt([{"role": "user", "content": f"What is {n} - 3?"}]) for n in range(6)]
    requests = requests_for(prompts, params, max_tokens=12)
    off, on = (engine.generate(requests, speculative=speculative) for speculative in (False, True))
    assert texts(on) == texts(off)
    assert any(g.num_drafts.max() == 4 for g in on)
