"""The forward pass of the Llama and Qwen3 architectures over a paged KV cache.

One ragged forward serves prefill, decode and verification: any number of new rows for each sequence. The arithmetic and
its order follow Hugging Face transformers (half-rotation RoPE, RMSNorm in float32 and cast back before the weight), so
that logits agree on the same weights.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equivtest.decoder.config import ModelConfig
from equivtest.decoder.graphs import MAX_GRAPH_ROWS, StepGraphs
from equivtest.decoder.kv_cache import IntArray, PagedKVCache, RaggedBatch
from equivtest.errors import InvalidSetting, UnsupportedModel
from equivtest.kernels.contract import AttentionPlan, AttentionShape, KernelBackend, LayerOps, Residual


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


class Model:
    """A decoder-only transformer with its weights on one device in one dtype.

    weights: Hugging Face names to tensors of any dtype. Raises UnsupportedModel for a missing, left-over or
    misshapen weight.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        backend: KernelBackend,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config, self.backend, self.dtype, self.device = config, backend, dtype, torch.device(device)
        taker = _Taker(config, weights, dtype, self.device)
        self._embedding = taker.take("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        ops = backend.layers
        self._layers = [_layer(config, taker, ops, f"model.layers.{i}") for i in range(config.num_layers)]
        self._norm = taker.take("model.norm.weight", (config.hidden_size,))
        if config.tied_embeddings:
            taker.ignore("lm_head.weight")
            self._head = ops.linear(self._embedding)
        else:
            self._head = ops.linear(taker.take("lm_head.weight", (config.vocab_size, config.hidden_size)))
        taker.finish()
        self._rotary = _rotary_tables(config, dtype, self.device)
        self._graphs = self._new_graphs()

    def first_layers(self, num_layers: int) -> Model:
        """The model that ends after so many layers, with this one's embedding, norm and head; weights are shared.

        Raises InvalidSetting unless 1 <= num_layers <= the model's.
        """
        self._require_depth(num_layers)
        part = copy.copy(self)
        part.config = dataclasses.replace(self.config, num_layers=num_layers)
        part._layers = self._layers[:num_layers]
        part._graphs = part._new_graphs()
        return part

    def _new_graphs(self) -> StepGraphs | None:
        return StepGraphs(self) if self.device.type == "cuda" and self.backend.capabilities.graphs else None

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,  # int64 [num_rows], on the device
        batch: RaggedBatch,
        kv: PagedKVCache,
        *,
        num_layers: int | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, [num_rows, hidden_size] in the model's dtype.

        Writes the rows' keys and values into `kv.pages`. With `num_layers` only the first layers run (early exit) and
        only their keys and values are written.
        """
        rows = batch.on(self.device)
        plan = self.backend.plan_attention(rows.attention, self.attention_shape(kv))
        if token_ids.shape != rows.slots.shape:
            raise InvalidSetting("token_ids", tuple(token_ids.shape), f"must have shape {list(rows.slots.shape)}")
        hidden = self.layers_forward(token_ids, rows.slots, rows.positions, plan, kv, num_layers=num_layers)
        return self.backend.layers.rms_norm(hidden, self._norm, self.config.rms_norm_eps)

    @torch.inference_mode()
    def step_logits(
        self,
        token_ids: Tensor,  # int64 [num_rows], on the host or the device
        batch: RaggedBatch,
        kv: PagedKVCache,
        *,
        only: IntArray | None = None,
    ) -> Tensor:
        """Logits [num_rows, vocab_size] of a forward: one step of decoding, of a shape that will come again.

        only: the rows whose logits are wanted. On a CUDA device it is a graph, and the logits are in its memory: the
        next step of the same shape overwrites them.
        """
        rows = None if only is None else torch.from_numpy(only).to(self.device)
        if self._graphs is not None and len(token_ids) <= MAX_GRAPH_ROWS:
            logits = self._graphs.logits(token_ids, batch, kv)
            return logits if rows is None else logits.index_select(0, rows)
        hidden = self.forward(token_ids.to(self.device), batch, kv)
        return self.logits(hidden if rows is None else hidden.index_select(0, rows))

    @torch.inference_mode()
    def greedy(
        self,
        token_ids: Tensor,  # int64 [B]
        batches: Sequence[RaggedBatch],  # K of B rows each
        kv: PagedKVCache,
        *,
        num_layers: int | None = None,
    ) -> Tensor:
        """The greedy continuation by K tokens: int64 [B, K] on the device; every batch feeds what the last one gave."""
        if self._graphs is not None and len(token_ids) <= MAX_GRAPH_ROWS:
            return self._graphs.greedy(token_ids, batches, kv, num_layers=num_layers)
        fed, columns = token_ids.to(self.device), []
        for batch in batches:
            fed = self.logits(self.forward(fed, batch, kv, num_layers=num_layers)).argmax(dim=-1)
            columns.append(fed)
        return torch.stack(columns, dim=1)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states [num_rows, hidden_size] of `forward`: [num_rows, vocab_size], in the model's dtype or
        in float32, as the backend has it."""
        return self.backend.layers.head(hidden, self._head)

    def attention_shape(self, kv: PagedKVCache) -> AttentionShape:
        """What the backend needs to know to plan attention over `kv`."""
        config = self.config
        return AttentionShape(
            config.num_heads, config.num_kv_heads, config.head_dim, kv.page_size, kv.pages.shape[1], self.dtype
        )

    def layers_forward(
        self,
        token_ids: Tensor,  # int64 [num_rows]
        slots: Tensor,  # int64 [num_rows], see RaggedBatch
        positions: Tensor,  # int64 [num_rows]
        plan: AttentionPlan,
        kv: PagedKVCache,
        *,
        num_layers: int | None = None,
    ) -> Residual:
        """Hidden states before the final norm, [num_rows, hidden_size].

        Device work alone, so that a graph can hold it.
        """
        depth = self.config.num_layers if num_layers is None else num_layers
        self._require_depth(depth)
        ops, config, eps = self.backend.layers, self.config, self.config.rms_norm_eps
        hidden = ops.residual(self._embedding.index_select(0, token_ids))
        for layer, pages in zip(self._layers[:depth], kv.pages, strict=False):
            heads = ops.normed_linear(hidden, eps, layer.query_key_value).view(len(token_ids), -1, config.head_dim)
            query = ops.rotate_and_store(heads, self._rotary, positions, layer.query_key_norm, eps, pages, slots)
            attended = self.backend.paged_attention(query, pages, plan)
            hidden = ops.add_linear(hidden, attended.flatten(1), layer.output)
            gated = ops.normed_gate(hidden, eps, layer.gate_up)
            hidden = ops.add_linear(hidden, gated, layer.down)
        return hidden

    def head(self, hidden: Residual) -> Tensor:
        """Logits [num_rows, vocab_size] of what `layers_forward` returns."""
        ops = self.backend.layers
        return ops.head(ops.rms_norm(hidden, self._norm, self.config.rms_norm_eps), self._head)

    def _require_depth(self, num_layers: int) -> None:
        if not 0 < num_layers <= self.config.num_layers:
            raise InvalidSetting("num_layers", num_layers, f"must be in 1..{self.config.num_layers}")


def _rotary_tables(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [max_position, head_dim], computed in float32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if config.rope_divisors:
        frequencies = frequencies / torch.tensor(config.rope_divisors, dtype=torch.float32)
    angles = torch.outer(torch.arange(config.max_position, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


class _Taker:
    """Hands out weights by name, once, checked; says what is left over."""

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._model, self._weights, self._dtype, self._device = config.architecture, weights, dtype, device
        self._left = set(weights)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._weights:
            raise UnsupportedModel(self._model, f"the weight {name} is missing")
        weight = self._weights[name]
        if tuple(weight.shape) != shape:
            raise UnsupportedModel(self._model, f"{name} has shape {list(weight.shape)}, expected {list(shape)}")
        self._left.discard(name)
        return weight.to(self._device, self._dtype)

    def ignore(self, name: str) -> None:
        self._left.discard(name)

    def finish(self) -> None:
        if self._left:
            names = ", ".join(sorted(self._left)[:5])
            raise UnsupportedModel(self._model, f"weights that this decoder does not use: {names}")


def _layer(config: ModelConfig, taker: _Taker, ops: LayerOps, prefix: str) -> _Layer:
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
