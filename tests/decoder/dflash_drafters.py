"""Small random block drafters."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from equivtest.decoder.config import ModelConfig
from equivtest.decoder.drafters.dflash import DFlashCheckpoint, DFlashDrafter
from equivtest.decoder.drafters.dflash_network import DFlashConfig, DFlashNetwork
from equivtest.decoder.kv_cache import PagedKVCache
from equivtest.decoder.model import Model


def dflash_config(target: ModelConfig, **changes: object) -> DFlashConfig:
    """A drafter of two layers for a target; `changes` are fields of DFlashConfig."""
    fields: dict[str, object] = {
        "hidden_size": target.hidden_size,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 1,
        "head_dim": 8,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "vocab_size": target.vocab_size,
        "max_position": target.max_position,
        "num_target_layers": target.num_layers,
        "block_size": 5,
        "target_layer_ids": (0, target.num_layers - 2),
        "mask_token_id": 7,
    }
    return DFlashConfig(**(fields | changes))  # type: ignore[arg-type]


def dflash_network(config: DFlashConfig, *, seed: int = 0) -> DFlashNetwork:
    """Weights large enough that everything a block sees matters to what it proposes."""
    torch.manual_seed(seed)
    network = DFlashNetwork(config)
    with torch.no_grad():
        for weight in network.parameters():
            if weight.dim() == 1:
                weight.add_(0.2 * torch.randn(weight.shape))
            else:
                weight.normal_(std=1.5 / weight.shape[1] ** 0.5)
    return network.eval()


def dflash_drafter(target: Model, *, seed: int = 0, **changes: object) -> DFlashDrafter:
    """A random drafter for a target; `changes` are fields of DFlashConfig."""
    return DFlashDrafter(
        dflash_checkpoint(target.config, seed=seed, **changes), target, draws=bool(changes.get("markov_head"))
    )


def dflash_checkpoint(target: ModelConfig, *, seed: int = 0, **changes: object) -> DFlashCheckpoint:
    config = dflash_config(target, **changes)
    return DFlashCheckpoint(config, dflash_network(config, seed=seed).state_dict(), "random", "")


class Recorder:
    """A follower that keeps the features it is handed, and companion pages of no use."""

    lookahead = 0

    def __init__(self, model: Model, layer_ids: tuple[int, ...]) -> None:
        self.config, self.layer_ids = dataclasses.replace(model.config, num_layers=1), layer_ids
        self.features: list[Tensor] = []

    def follow(self, features: Tensor, slots: Tensor, positions: Tensor, pages: Tensor) -> None:
        self.features.append(features.clone())


def features_of(model: Model, token_ids: Sequence[int], layer_ids: tuple[int, ...]) -> Tensor:
    """Features [len(token_ids), len(layer_ids) * hidden_size] of a text, computed in one go with an empty cache."""
    recorder = Recorder(model, layer_ids)
    kv = PagedKVCache(
        model.config,
        num_pages=64,
        max_sequences=1,
        dtype=model.dtype,
        device=model.device,
        companion=recorder.config,
    )
    batch = kv.extend(np.array([kv.new_sequence()]), np.array([len(token_ids)]))
    model.forward(torch.tensor(token_ids, device=model.device), batch, kv, follower=recorder)
    return recorder.features[0]
