"""The block drafter in plain torch: who sees whom, and what lies on disk."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from equivtest.decoder.drafters import dflash_network as module
from equivtest.decoder.drafters.dflash_network import DFlashConfig, DFlashNetwork, attention_mask
from equivtest.errors import ModelUnavailable, UnsupportedModel
from tests.decoder.dflash_drafters import dflash_config, dflash_network
from tests.decoder.tiny_models import tiny_config

CONFIG = dflash_config(tiny_config())
CONTEXT, ANCHORS = 12, (0, 4, 11, 12)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Features, block inputs and context lengths of one text with a block at each of ANCHORS."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(1, CONTEXT, CONFIG.feature_size, generator=generator)
    blocks = torch.randn(1, len(ANCHORS), CONFIG.block_size, CONFIG.hidden_size, generator=generator)
    return features, blocks, torch.tensor([ANCHORS])


def moved(old: Tensor, new: Tensor) -> list[bool]:
    """Of each block of one text, whether any row changed."""
    return ((old - new).abs().amax(dim=(2, 3)) > 1e-6)[0].tolist()


@torch.inference_mode()
def test_a_block_sees_the_features_before_its_anchor_and_no_later_one() -> None:
    network = dflash_network(CONFIG)
    features, blocks, lens = inputs()
    old = network(features, blocks, lens)
    assert old.shape == (1, len(ANCHORS), CONFIG.block_size, CONFIG.hidden_size)
    for position in range(CONTEXT):
        changed = features.clone()
        changed[:, position] += 1
        assert moved(old, network(changed, blocks, lens)) == [position < anchor for anchor in ANCHORS]


@torch.inference_mode()
def test_every_row_of_a_block_sees_every_row_of_it_and_none_of_another() -> None:
    network = dflash_network(CONFIG)
    features, blocks, lens = inputs()
    old = network(features, blocks, lens)
    for block in range(len(ANCHORS)):
        for row in range(CONFIG.block_size):
            changed = blocks.clone()
            changed[:, block, row] += 1
            new = network(features, changed, lens)
            assert moved(old, new) == [other == block for other in range(len(ANCHORS))]
            assert ((old - new)[0, block].abs().amax(dim=1) > 1e-6).all()


@torch.inference_mode()
def test_many_blocks_at_once_are_those_blocks_one_by_one() -> None:
    network = dflash_network(CONFIG)
    features, blocks, lens = inputs()
    together = network(features, blocks, lens)
    for index, anchor in enumerate(ANCHORS):
        alone = network(features[:, :anchor], blocks[:, index : index + 1], lens[:, index : index + 1])
        torch.testing.assert_close(alone[:, 0], together[:, index], atol=1e-5, rtol=1e-4)


@torch.inference_mode()
def test_a_shift_of_the_text_changes_nothing_but_a_shift_of_the_block_does() -> None:
    """Rotary positions are relative: what a block sees stays the same only if context and block both move."""
    network = dflash_network(CONFIG)
    features, blocks, _ = inputs()
    one = blocks[:, :1]
    lens = torch.tensor([[CONTEXT]])
    mask = attention_mask(lens, CONTEXT, CONFIG.block_size)
    positions = torch.arange(CONTEXT + CONFIG.block_size)[None]
    context, results = network.hidden_norm(network.fc(features)), []
    for shifted in (positions, positions + 7, positions + 7 * (positions >= CONTEXT)):
        hidden = one.flatten(1, 2)
        for layer in network.layers:
            hidden = layer(hidden, context, network._rotary(shifted, hidden.dtype), mask)
        results.append(network.norm(hidden))
    torch.testing.assert_close(results[0], network(features, one, lens)[:, 0])
    torch.testing.assert_close(results[0], results[1], atol=1e-4, rtol=1e-4)
    assert float((results[0] - results[2]).abs().max()) > 1e-2


@pytest.mark.parametrize("markov_head", [False, True])
def test_training_reaches_every_weight(markov_head: bool) -> None:
    network = dflash_network(dataclasses.replace(CONFIG, markov_head=markov_head))
    hidden = network(*inputs())
    network.behind(hidden, torch.randn(hidden.shape)).square().sum().backward()
    assert all(float(weight.grad.abs().max()) > 0 for weight in network.parameters() if weight.grad is not None)
    assert all(weight.grad is not None for weight in network.parameters())


def test_blocks_are_an_anchor_and_masks() -> None:
    assert dflash_network(CONFIG).block_token_ids(torch.tensor([3, 5])).tolist() == [[3, 7, 7, 7, 7], [5, 7, 7, 7, 7]]


@pytest.mark.parametrize(("anchor_first", "num_drafts", "first_row"), [(False, 4, 1), (True, 5, 0)])
def test_both_conventions_say_which_row_predicts_what(anchor_first: bool, num_drafts: int, first_row: int) -> None:
    config = dataclasses.replace(CONFIG, anchor_first=anchor_first)
    assert (config.num_drafts, config.first_draft_row) == (num_drafts, first_row)


def test_a_fresh_markov_head_changes_nothing_until_it_has_learned() -> None:
    hidden, previous = torch.randn(2, 3, CONFIG.hidden_size), torch.randn(2, 3, CONFIG.hidden_size)
    config = dataclasses.replace(CONFIG, markov_head=True)
    assert torch.equal(DFlashNetwork(config).behind(hidden, previous), hidden)
    assert not torch.equal(dflash_network(config).behind(hidden, previous), hidden)


@pytest.mark.parametrize("markov_head", [False, True])
@pytest.mark.parametrize("anchor_first", [False, True])
@pytest.mark.parametrize("max_bytes", [10**9, 10_000])
def test_what_is_saved_is_what_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anchor_first: bool, max_bytes: int, markov_head: bool
) -> None:
    monkeypatch.setattr(module, "MAX_FILE_BYTES", max_bytes)
    network = dflash_network(dataclasses.replace(CONFIG, anchor_first=anchor_first, markov_head=markov_head))
    network.save(tmp_path, torch.float32)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (tmp_path / "model.safetensors.index.json").exists() == (max_bytes < 10**9)
    assert all(sum(w.nbytes for w in load_file(file).values()) <= max_bytes for file in files)
    loaded = DFlashNetwork.load(tmp_path)
    assert loaded.config == network.config
    torch.testing.assert_close(loaded(*inputs()), network(*inputs()), atol=0, rtol=0)


def test_weights_are_stored_in_bfloat16_unless_asked_otherwise(tmp_path: Path) -> None:
    dflash_network(CONFIG).save(tmp_path)
    assert {weight.dtype for weight in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    assert {weight.dtype for weight in DFlashNetwork.load(tmp_path).parameters()} == {torch.float32}


def test_names_on_disk_are_those_of_published_checkpoints(tmp_path: Path) -> None:
    dflash_network(dataclasses.replace(CONFIG, num_layers=1)).save(tmp_path)
    layer = [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    layer += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"]
    names = {"fc.weight", "hidden_norm.weight", "norm.weight"} | {f"layers.0.{name}.weight" for name in layer}
    assert set(load_file(tmp_path / "model.safetensors")) == names


def test_a_published_config_is_read(tmp_path: Path) -> None:
    """The keys of a drafter for an 8B target with 36 layers; some versions keep block_size inside the table."""
    table = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "hidden_act": "silu", "attention_bias": False, "rope_theta": 1000000, "rms_norm_eps": 1e-6,
        "vocab_size": 151936, "max_position_embeddings": 40960, "layer_types": ["full_attention"] * 5,
        "num_target_layers": 36, "tie_word_embeddings": False, "use_sliding_window": False, "rope_scaling": None,
        "dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33], "mask_token_id": 151669},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(table | {"block_size": 16}))
    config = DFlashConfig.from_json(tmp_path)
    assert (config.block_size, config.num_drafts, config.mask_token_id) == (16, 15, 151669)
    assert config.target_layer_ids == (1, 9, 17, 25, 33)
    own = table["dflash_config"] | {"block_size": 16, "query_zero_predicts_next": True}  # type: ignore[operator]
    (tmp_path / "config.json").write_text(json.dumps(table | {"dflash_config": own}))
    assert DFlashConfig.from_json(tmp_path) == dataclasses.replace(config, anchor_first=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "architectures"),
        ({"dflash_config": None}, "dflash_config"),
        ({"block_size": None}, "block_size"),
        ({"block_size": 1}, "block_size = 1 leaves no draft"),
        ({"dflash_config": {"target_layer_ids": [0, 4], "mask_token_id": 7}}, r"target_layer_ids .* 0\.\.3"),
        ({"dflash_config": {"target_layer_ids": [2, 0], "mask_token_id": 7}}, "target_layer_ids"),
        ({"dflash_config": {"target_layer_ids": "all", "mask_token_id": 7}}, "target_layer_ids"),
        ({"dflash_config": {"target_layer_ids": [0], "mask_token_id": 97}}, "mask_token_id = 97"),
        ({"dflash_config": {"target_layer_ids": [0]}}, "mask_token_id"),
        ({"is_causal": True}, "is_causal"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ({"model_type": "llama"}, "Qwen3"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "unscaled rotary"),
    ],
)
def test_a_config_that_asks_for_something_else_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    CONFIG.to_json(tmp_path)
    file = tmp_path / "config.json"
    assert DFlashConfig.from_json(tmp_path) == CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UnsupportedModel, match=message):
        DFlashConfig.from_json(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("fc.weight"), "fc.weight is missing"),
        (lambda weights: weights.update({"norm.weight": torch.ones(3)}), r"norm.weight has shape \[3\], expected"),
        (lambda weights: weights.update({"lm_head.weight": torch.ones(3)}), "does not have: lm_head.weight"),
    ],
)
def test_weights_that_do_not_fit_are_named(tmp_path: Path, change: object, message: str) -> None:
    dflash_network(CONFIG).save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    change(weights)  # type: ignore[operator]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=message):
        DFlashNetwork.load(tmp_path)


def test_a_folder_without_a_drafter_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"config\.json"):
        DFlashNetwork.load(tmp_path)
    CONFIG.to_json(tmp_path)
    with pytest.raises(ModelUnavailable, match="safetensors"):
        DFlashNetwork.load(tmp_path)
