"""FlashInfer's generator left to advance by itself, with a fake FlashInfer; with the real one: tests/gpu."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from equivtest.decoder.acceptance import ChainAcceptance, MatchAcceptance, RoutedAcceptance
from equivtest.decoder.stages import AcceptStage, Drafts, StepInput
from equivtest.errors import InvalidSetting
from equivtest.faults import BY_NAME_ONLY, get_fault, known_faults
from equivtest.kernels.contract import SpecScratch, Streams
from equivtest.kernels.registry import get_backend
from equivtest.pipeline.controls import catalogue_lines
from tests.faults.planted import stages_of
from tests.kernels.chain_law import draw_drafts, p_value, position_laws, tables
from tests.kernels.fake_flashinfer import VERSIONS, OnCpu
from tests.kernels.vendor_calls import Chain, lag_correlation

FAULT = get_fault("generator_offset")


def planted(backend: OnCpu, monkeypatch: pytest.MonkeyPatch) -> AcceptStage:
    package = SimpleNamespace(sampling=backend.fake)
    monkeypatch.setitem(sys.modules, "flashinfer", cast("Any", package))
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", backend.fake)
    return FAULT(stages_of(accept=RoutedAcceptance(ChainAcceptance(backend), backend))).accept


def step(index: int, batch: int, width: int, vocab_size: int) -> StepInput:
    keys = torch.arange(batch)
    fields = {
        "index": index,
        "batch": batch,
        "num_main": batch,
        "table": SimpleNamespace(stream_keys=keys.numpy()),
        "streams": Streams(keys, torch.full((batch,), index)),
        "scratch": SpecScratch(batch, width, vocab_size),
    }
    return cast("StepInput", SimpleNamespace(**fields))


def rounds(accept: AcceptStage, batch: int) -> Chain:
    """The stage as `lag_correlation` calls it; row 0 of batches of this size."""
    index = -1

    def play(draft_token_ids: Tensor, target_probs: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal index
        index += 1
        num_draft = np.full(batch, draft_token_ids.shape[1], np.int32)
        drafts = Drafts(draft_token_ids.expand(batch, -1).contiguous(), num_draft, None)
        p = target_probs.expand(batch, -1, -1).contiguous()
        result = accept(step(index, batch, drafts.width, p.shape[-1]), drafts, p)
        return result.output_token_ids[:1].clone(), result.emitted[:1].clone()

    return play


@pytest.mark.parametrize(
    ("version", "batch", "shares"), [("0.6.13", 1, True), ("0.6.13", 2, False), ("0.7.4", 1, False)]
)
def test_an_old_version_in_batches_of_one_uses_a_coin_twice(
    version: str, batch: int, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed seeds; without a shared coin |correlation| exceeds 4 standard errors in 1 of 16,000 streams."""
    accept = planted(OnCpu(version), monkeypatch)
    correlation, num_pairs = lag_correlation(rounds(accept, batch), "cpu")
    error = num_pairs**-0.5
    assert abs(correlation + 3**0.5 / 2 if shares else correlation) < 4 * error


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("one_hot", [True, False], ids=["one_hot", "real_q"])
def test_the_law_of_a_round_is_right(version: str, one_hot: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """100,000 rows by chi-squared, 10 positions at p < 1e-8 each: a false alarm in 1 of 2,500,000 seeds in all."""
    num_rows = 100_000
    p, q = tables(3, one_hot=one_hot, vocab_size=7, seed=9)
    drafts = draw_drafts(q, num_rows, np.random.default_rng(9))
    num_draft = (np.arange(num_rows) % 4).astype(np.int32)
    laws, q_laws = (torch.tensor(t, dtype=torch.float32).expand(num_rows, *t.shape).contiguous() for t in (p, q))
    offered = Drafts(drafts, num_draft, None if one_hot else q_laws)
    result = planted(OnCpu(version), monkeypatch)(step(0, num_rows, 3, 7), offered, laws)
    for k in range(4):
        rows = result.output_token_ids[torch.from_numpy(num_draft == k)].numpy()
        expected = position_laws(p[: k + 1], q[:k])
        assert min(p_value(rows[:, j], expected[j]) for j in range(k + 1)) > 1e-8
        assert (rows[:, k + 1 :] == -1).all()
    assert torch.equal((result.output_token_ids >= 0).sum(dim=1), result.emitted + 1)


def test_a_call_can_be_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    p = torch.full((1, 4, 64), 1 / 64)
    drafts = torch.zeros(1, 3, dtype=torch.int64)
    texts = []
    for _ in range(2):
        play = rounds(planted(OnCpu("0.6.13"), monkeypatch), 1)
        texts.append([play(drafts, p)[0].tolist() for _ in range(20)])
    assert texts[0] == texts[1]
    assert len({str(tokens) for tokens in texts[0]}) > 15


def test_it_goes_with_flashinfer_and_the_chain_rule_only() -> None:
    cpp, vendor = get_backend("cpp"), OnCpu("0.7.4")
    for rule in (ChainAcceptance(cpp), MatchAcceptance(vendor)):
        with pytest.raises(InvalidSetting, match="goes with the flashinfer kernels"):
            FAULT(stages_of(accept=RoutedAcceptance(rule, cpp)))


def test_it_is_planted_by_name_and_no_part_of_the_matrix() -> None:
    assert FAULT.name in BY_NAME_ONLY
    assert FAULT.name not in known_faults()
    assert [line for line in catalogue_lines() if "generator_offset" in line] == [
        f"by name only: generator_offset: {BY_NAME_ONLY['generator_offset']}"
    ]
