"""Blocks are drawn inside answers, with the tokens and the laws that belong to them."""

from __future__ import annotations

import pytest
import torch

from equivtest.decoder.drafters.dflash_network import DFlashConfig
from equivtest.errors import InvalidSetting
from equivtest.training import lessons as module
from equivtest.training.lessons import Blocks, Lessons
from equivtest.training.target import Target
from equivtest.training.text import Texts
from equivtest.training.watch import Silent


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def row_of(texts: Texts, blocks: Blocks, features: torch.Tensor) -> list[int]:
    """Which text each row of a draw is of, by its features."""
    return [int((features - blocks.features[b]).abs().amax(dim=(1, 2)).argmin()) for b in range(len(blocks.features))]


def test_blocks_hold_the_tokens_after_their_anchor_and_the_laws_of_those(
    lessons: Lessons, texts: Texts, target: Target, config: DFlashConfig
) -> None:
    features, labels = target.features_and_labels(texts.token_ids)
    blocks = lessons.draw(4, 6, generator())
    for b, row in enumerate(row_of(texts, blocks, features)):
        torch.testing.assert_close(blocks.features[b], features[row])
        for n, anchor in enumerate(blocks.anchors[b].tolist()):
            places = slice(anchor, anchor + config.num_drafts)
            assert int(blocks.anchor_ids[b, n]) == int(texts.token_ids[row, anchor])
            assert torch.equal(blocks.next_ids[b, n], texts.token_ids[row, anchor + 1 : anchor + 1 + config.num_drafts])
            assert torch.equal(blocks.laws.token_ids[b, n], labels.token_ids[row, places])
            torch.testing.assert_close(blocks.laws.probs[b, n], labels.probs[row, places])


def test_anchors_reach_from_the_last_prompt_token_to_the_last_whole_block(
    texts: Texts, target: Target, config: DFlashConfig
) -> None:
    """One text, 8,000 uniform anchors: that one of fewer than 96 places is missed has a probability below 1e-33."""
    one = Texts(**{name: getattr(texts, name)[:1] for name in ("token_ids", "answer_starts", "configs")})
    anchors = Lessons(one, target, config.num_drafts, Silent()).draw(1, 8000, generator()).anchors
    first, last = int(one.answer_starts[0]) - 1, one.token_ids.shape[1] - 1 - config.num_drafts
    assert anchors.unique().tolist() == list(range(first, last + 1))


def test_features_that_do_not_fit_are_computed_in_each_step(
    lessons: Lessons, texts: Texts, target: Target, config: DFlashConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_most_bytes", lambda device: 0)
    lazy = Lessons(texts, target, config.num_drafts, Silent())
    kept, computed = lessons.draw(3, 5, generator(7)), lazy.draw(3, 5, generator(7))
    torch.testing.assert_close(computed.features, kept.features, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(computed.laws.probs, kept.laws.probs, atol=1e-4, rtol=1e-3)
    for name in ("anchors", "anchor_ids", "next_ids"):
        assert torch.equal(getattr(computed, name), getattr(kept, name))
    assert not computed.features.is_inference()


def test_features_that_fit_in_eight_bits_alone_are_kept_so(
    lessons: Lessons, texts: Texts, target: Target, config: DFlashConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off by at most a sixteenth each; an entry thirty thousand times smaller than its row's largest may become 0."""
    compact_bytes = lessons._bytes(compact=True)
    assert compact_bytes < lessons._bytes(compact=False)
    monkeypatch.setattr(module, "_most_bytes", lambda device: compact_bytes)
    compact = Lessons(texts, target, config.num_drafts, Silent())
    kept, coarse = lessons.draw(3, 5, generator(7)), compact.draw(3, 5, generator(7))
    largest = kept.features.abs().amax(dim=-1, keepdim=True)
    assert ((coarse.features - kept.features).abs() <= kept.features.abs() / 16 + largest / 30_000).all()
    assert not torch.equal(coarse.features, kept.features)
    assert torch.equal(coarse.next_ids, kept.next_ids)


def test_a_block_that_fits_no_answer_is_refused(texts: Texts, target: Target) -> None:
    with pytest.raises(InvalidSetting, match="no room for 90 drafts"):
        Lessons(texts, target, 90, Silent())
