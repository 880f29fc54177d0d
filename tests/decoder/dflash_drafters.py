"""Small random block drafters."""

from __future__ import annotations

import torch

from equivtest.decoder.config import ModelConfig
from equivtest.decoder.drafters.dflash_network import DFlashConfig, DFlashNetwork


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
