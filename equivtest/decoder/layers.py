"""A stack of transformer layers on a kernel backend, with weights taken by name from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equivtest.decoder.config import ModelConfig
from equivtest.errors import UnsupportedModel
from equivtest.kernels.contract import AttentionPlan, KernelBackend, LayerOps, Residual


class WeightTaker:
    """Hands out weights by name, once, checked; says what is left over."""

    def __init__(self, model: str, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        """model: names it in errors."""
        self.dtype, self.device = dtype, device
        self._model, self._weights, self._left = model, weights, set(weights)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The weight in the dtype and on the device. Raises UnsupportedModel for a missing or misshapen one."""
        if name not in self._weights:
            raise UnsupportedModel(self._model, f"the weight {name} is missing")
        weight = self._weights[name]
        if tuple(weight.shape) != shape:
            raise UnsupportedModel(self._model, f"{name} has shape {list(weight.shape)}, expected {list(shape)}")
        self._left.discard(name)
        return weight.to(self.device, self.dtype)

    def ignore(self, name: str) -> None:
        self._left.discard(name)

    def finish(self) -> None:
        """Raises UnsupportedModel for weights that nobody took."""
        if self._left:
            names = ", ".join(sorted(self._left)[:5])
            raise UnsupportedModel(self._model, f"weights that this decoder does not use: {names}")


class LayerStack:
    """The layers of a model or of a drafter, over pages of keys and values."""

    def __init__(self, config: ModelConfig, taker: WeightTaker, backend: KernelBackend, *, prefix: str) -> None:
        """prefix: of the weights' names, before the number of the layer."""
        self.config, self._backend = config, backend
        self._layers = [_layer(config, taker, backend.layers, f"{prefix}.{i}") for i in range(config.num_layers)]
        self.rotary = _rotary_tables(config, taker.dtype, taker.device)

    def run(
        self,
        index: int,
        hidden: Residual,  # of num_rows rows; may be written to
        slots: Tensor,  # int64 [num_rows], see RaggedBatch
        positions: Tensor,  # int64 [num_rows]
        plan: AttentionPlan,
        pages: Tensor,  # of this layer, [num_pages, 2, page_size, num_kv_heads, head_dim]
    ) -> Residual:
        """What layer `index` makes of the rows; writes their keys and values."""
        layer, ops, eps = self._layers[index], self._backend.layers, self.config.rms_norm_eps
        heads = ops.normed_linear(hidden, eps, layer.query_key_value).view(len(slots), -1, self.config.head_dim)
        query = ops.rotate_and_store(heads, self.rotary, positions, layer.query_key_norm, eps, pages, slots)
        attended = self._backend.paged_attention(query, pages, plan)
        hidden = ops.add_linear(hidden, attended.flatten(1), layer.output)
        gated = ops.normed_gate(hidden, eps, layer.gate_up)
        return ops.add_linear(hidden, gated, layer.down)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One layer's weights; projections that share an input are one matrix.

    Matrices are as `LayerOps.linear` made them.
    """

    query_key_value: Any  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size], of a norm's output
    query_key_norm: Tensor | None  # [num_heads + num_kv_heads, head_dim]
    output: Any  # [hidden_size, num_heads * head_dim]
    gate_up: Any  # [2 * intermediate_size, hidden_size], of a norm's output
    down: Any  # [hidden_size, intermediate_size]


def _rotary_tables(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [max_position, head_dim], computed in float32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if config.rope_divisors:
        frequencies = frequencies / torch.tensor(config.rope_divisors, dtype=torch.float32)
    angles = torch.outer(torch.arange(config.max_position, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def _layer(config: ModelConfig, taker: WeightTaker, ops: LayerOps, prefix: str) -> _Layer:
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_heads, config.num_kv_heads
    query_key_norm = None
    if config.qk_norm:
        query = taker.take(f"{prefix}.self_attn.q_norm.weight", (dim,))
        key = taker.take(f"{prefix}.self_attn.k_norm.weight", (dim,))
        query_key_norm = torch.cat((query.expand(heads, dim), key.expand(kv_heads, dim)))
    return _Layer(
        query_key_value=ops.linear(
            torch.cat(
                (
                    taker.take(f"{prefix}.self_attn.q_proj.weight", (heads * dim, hidden)),
                    taker.take(f"{prefix}.self_attn.k_proj.weight", (kv_heads * dim, hidden)),
                    taker.take(f"{prefix}.self_attn.v_proj.weight", (kv_heads * dim, hidden)),
                )
            ),
            taker.take(f"{prefix}.input_layernorm.weight", (hidden,)),
        ),
        query_key_norm=query_key_norm,
        output=ops.linear(taker.take(f"{prefix}.self_attn.o_proj.weight", (hidden, heads * dim))),
        gate_up=ops.linear(
            torch.cat(
                (
                    taker.take(f"{prefix}.mlp.gate_proj.weight", (inner, hidden)),
                    taker.take(f"{prefix}.mlp.up_proj.weight", (inner, hidden)),
                )
            ),
            taker.take(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        ),
        down=ops.linear(taker.take(f"{prefix}.mlp.down_proj.weight", (hidden, inner))),
    )
