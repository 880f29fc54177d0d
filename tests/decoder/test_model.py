"""The forward pass: what a row's hidden state depends on, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from equivtest.decoder.config import Architecture
from equivtest.decoder.kv_cache import PagedKVCache
from equivtest.decoder.model import Model
from equivtest.errors import InvalidSetting, UnsupportedModel
from equivtest.kernels.registry import get_backend
from tests.decoder.tiny_models import tiny_checkpoint, tiny_model


class Session:
    """A model and a cache; sequences are fed and answer with logits."""

    def __init__(self, model: Model, max_sequences: int = 8) -> None:
        self.model = model
        self.kv = PagedKVCache(model.config, num_pages=64, max_sequences=max_sequences, dtype=model.dtype)

    def feed(self, *parts: tuple[int, Tensor], num_layers: int | None = None) -> list[Tensor]:
        """Feed (sequence, token ids) side by side: the logits of each."""
        sizes = [len(tokens) for _, tokens in parts]
        batch = self.kv.extend(np.array([s for s, _ in parts]), np.array(sizes))
        rows = torch.cat([tokens for _, tokens in parts])
        logits = self.model.logits(self.model.forward(rows, batch, self.kv, num_layers=num_layers))
        return list(logits.split(sizes))

    def fresh(self, tokens: Tensor) -> Tensor:
        (logits,) = self.feed((self.kv.new_sequence(), tokens))
        return logits


def tokens(count: int, seed: int) -> Tensor:
    return torch.randint(97, (count,), generator=torch.Generator().manual_seed(seed))


def close(actual: Tensor, expected: Tensor) -> bool:
    return torch.allclose(actual, expected, rtol=0, atol=2e-5)


@pytest.fixture(params=["llama", "qwen3"])
def session(request: pytest.FixtureRequest) -> Session:
    architecture: Architecture = request.param
    return Session(tiny_model(architecture))


def test_a_forked_sequence_never_changes_its_parent(session: Session) -> None:
    prompt, ending, other = tokens(21, 1), tokens(6, 2), tokens(6, 3)
    expected = session.fresh(torch.cat((prompt, ending)))[21:]
    parent = session.kv.new_sequence()
    session.feed((parent, prompt))
    child = session.kv.fork(parent)
    session.feed((child, other))
    (after_child,) = session.feed((parent, ending))
    assert close(after_child, expected)
    assert not close(after_child, session.fresh(torch.cat((prompt, other)))[21:]), "the endings must tell them apart"


def test_a_fork_continues_as_its_parent_would(session: Session) -> None:
    prompt, ending = tokens(21, 1), tokens(6, 2)
    parent = session.kv.new_sequence()
    session.feed((parent, prompt))
    child = session.kv.fork(parent)
    session.feed((parent, tokens(6, 4)))
    (logits,) = session.feed((child, ending))
    assert close(logits, session.fresh(torch.cat((prompt, ending)))[21:])


@pytest.mark.parametrize("kept", [0, 5, 16, 17, 21])
def test_a_truncated_sequence_extended_again_equals_a_fresh_one(session: Session, kept: int) -> None:
    prompt, ending = tokens(21, 1), tokens(20, 2)
    sequence = session.kv.new_sequence()
    session.feed((sequence, torch.cat((prompt, tokens(30, 3)))))
    session.kv.truncate(np.array([sequence]), np.array([kept]))
    (logits,) = session.feed((sequence, ending))
    assert close(logits, session.fresh(torch.cat((prompt[:kept], ending)))[kept:])


def test_truncating_a_fork_leaves_its_parent_alone(session: Session) -> None:
    prompt, ending = tokens(21, 1), tokens(6, 2)
    parent = session.kv.new_sequence()
    session.feed((parent, prompt))
    child = session.kv.fork(parent)
    session.kv.truncate(np.array([child]), np.array([18]))
    session.feed((child, tokens(9, 3)))
    (logits,) = session.feed((parent, ending))
    assert close(logits, session.fresh(torch.cat((prompt, ending)))[21:])


def test_batch_mates_do_not_change_a_sequence(session: Session) -> None:
    texts = [tokens(n, n) for n in (1, 17, 33, 4)]
    alone = [session.fresh(text) for text in texts]
    session.kv.free(np.arange(4))
    sequences = [session.kv.new_sequence() for _ in texts]
    together = session.feed(*zip(sequences, texts, strict=True))
    assert all(close(a, b) for a, b in zip(together, alone, strict=True))


def test_early_exit_is_the_model_cut_off_after_those_layers(session: Session) -> None:
    config, weights = tiny_checkpoint(session.model.config.architecture, layers=2)
    short = Session(Model(config, weights | head_of(session.model), get_backend("reference")))
    sequence = session.kv.new_sequence()
    (early,) = session.feed((sequence, tokens(20, 1)), num_layers=2)
    assert close(early, short.fresh(tokens(20, 1)))
    assert not session.kv.pages[2:].any(), "layers that did not run wrote nothing"
    assert session.kv.pages[:2].any()


def head_of(model: Model) -> dict[str, Tensor]:
    """tiny_weights draws the head and the final norm before the layers, so models of any depth share them."""
    _, weights = tiny_checkpoint(model.config.architecture)
    return {name: weights[name] for name in ("lm_head.weight", "model.norm.weight", "model.embed_tokens.weight")}


def test_an_early_exit_does_not_disturb_the_full_forward_that_follows(session: Session) -> None:
    prompt, ending = tokens(20, 1), tokens(5, 2)
    sequence = session.kv.new_sequence()
    session.feed((sequence, prompt))
    session.feed((sequence, tokens(4, 3)), num_layers=1)
    session.kv.truncate(np.array([sequence]), np.array([20]))
    (logits,) = session.feed((sequence, ending))
    assert close(logits, session.fresh(torch.cat((prompt, ending)))[20:])


def test_bfloat16_agrees_with_float32_to_its_precision() -> None:
    exact = Session(tiny_model()).fresh(tokens(30, 1))
    rounded = Session(tiny_model(dtype=torch.bfloat16)).fresh(tokens(30, 1))
    assert rounded.dtype == torch.bfloat16
    error = float((rounded.float() - exact).norm() / exact.norm())
    assert 1e-4 < error < 0.05


def test_the_tiny_law_is_peaked_and_varied() -> None:
    """Tests of decoding lean on this: a flat law, or one that always says the same, would hide faults."""
    logits = Session(tiny_model()).fresh(tokens(100, 1))
    top = logits.softmax(-1).amax(-1)
    assert 0.2 < float(top.mean()) < 0.7
    assert len(set(logits.argmax(-1).tolist())) > 25


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, "model.norm.weight is missing"),
        ({"model.layers.0.mlp.up_proj.weight": torch.ones(3, 3)}, r"has shape \[3, 3\], expected \[48, 32\]"),
        (
            {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)},
            "does not use: model.layers.0.self_attn.q_proj.bias",
        ),
        ({"model.layers.9.input_layernorm.weight": torch.ones(32)}, "does not use: model.layers.9"),
    ],
)
def test_weights_that_do_not_fit_are_named(change: dict[str, Tensor | None], message: str) -> None:
    config, weights = tiny_checkpoint()
    changed = {name: weight for name, weight in (weights | change).items() if weight is not None}
    with pytest.raises(UnsupportedModel, match=message):
        Model(config, changed, get_backend("reference"))


def test_wrong_calls_are_refused() -> None:
    session = Session(tiny_model())
    sequence = session.kv.new_sequence()
    for depth in (0, 5):
        with pytest.raises(InvalidSetting, match="num_layers"):
            session.feed((sequence, tokens(3, 1)), num_layers=depth)
    with pytest.raises(InvalidSetting, match="token_ids"):
        session.model.forward(tokens(3, 1), session.kv.extend(np.array([sequence]), np.array([4])), session.kv)
