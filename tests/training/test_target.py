"""The teacher: its features and laws are those of the same model in transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from equivtest.decoder.hub import resolve_model
from equivtest.training.target import NUM_LABELS, Target
from equivtest.training.text import Texts


@pytest.fixture(scope="module")
def theirs(texts: Texts) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Hidden states, the embedding first, and logits of three texts."""
    model = AutoModelForCausalLM.from_pretrained(resolve_model("tiny"), dtype=torch.float32)
    with torch.inference_mode():
        output = model(texts.token_ids[:3], output_hidden_states=True)
    return list(output.hidden_states), output.logits


def test_features_are_the_outputs_of_the_layers(target: Target, texts: Texts, theirs: tuple) -> None:
    features, _ = target.features_and_labels(texts.token_ids[:3])
    assert features.shape == (3, texts.token_ids.shape[1], target.feature_size)
    # transformers hands out the last layer's output after the final norm alone.
    for index, layer in enumerate((1, 2)):
        own = features[..., index * 128 : (index + 1) * 128]
        torch.testing.assert_close(own, theirs[0][layer + 1], atol=2e-4, rtol=1e-3)
        assert float((own - theirs[0][layer]).abs().max()) > 0.1


def test_labels_are_the_law_of_the_next_token(target: Target, texts: Texts, theirs: tuple) -> None:
    _, labels = target.features_and_labels(texts.token_ids[:3])
    top = theirs[1].topk(NUM_LABELS, dim=-1)
    torch.testing.assert_close(labels.probs, top.values.softmax(dim=-1), atol=1e-4, rtol=1e-3)
    assert float((labels.token_ids == top.indices).float().mean()) > 0.99
    greedy = texts.configs[:3] == 2
    if greedy.any():
        rows, starts = texts.token_ids[:3][greedy], texts.answer_starts[:3][greedy]
        for row, start, ids in zip(rows, starts.tolist(), labels.token_ids[greedy], strict=True):
            assert torch.equal(ids[start - 1 : -1, 0].long(), row[start:])


def test_one_text_alone_is_read_as_among_others(target: Target, texts: Texts) -> None:
    together, _ = target.features_and_labels(texts.token_ids[:3])
    for row in range(3):
        alone, logits = target.features_and_logits(texts.token_ids[row])
        torch.testing.assert_close(alone, together[row], atol=1e-4, rtol=1e-3)
        assert logits.shape == (texts.token_ids.shape[1], target.config.vocab_size)


def test_the_shared_ends_are_the_targets(target: Target, texts: Texts) -> None:
    ids = texts.token_ids[:2, :5]
    torch.testing.assert_close(target.embed(ids), target.head[ids])  # tiny ties its head to its embedding
