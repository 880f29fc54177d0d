"""The forward pass of the Llama and Qwen3 architectures over a paged KV cache.

One ragged forward serves prefill, decode and verification: any number of new rows for each sequence. The arithmetic and
its order follow Hugging Face transformers (half-rotation RoPE, RMSNorm in float32 and cast back before the weight), so
that logits agree on the same weights.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from equivtest.decoder.config import ModelConfig
from equivtest.decoder.kv_cache import PagedKVCache, RaggedBatch
from equivtest.decoder.linear import Linear
from equivtest.errors import InvalidSetting, UnsupportedModel
from equivtest.kernels.contract import KernelBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One layer's weights; projections that share an input are one matrix."""

    attention_norm: Tensor  # [hidden_size]
    query_key_value: Linear  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    query_key_norm: Tensor | None  # [num_heads + num_kv_heads, head_dim]
    output: Linear  # [hidden_size, num_heads * head_dim]
    mlp_norm: Tensor  # [hidden_size]
    gate_up: Linear  # [2 * intermediate_size, hidden_size]
    down: Linear  # [hidden_size, intermediate_size]


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
        self._layers = [_layer(config, taker, f"model.layers.{i}") for i in range(config.num_layers)]
        self._norm = taker.take("model.norm.weight", (config.hidden_size,))
        if config.tied_embeddings:
            taker.ignore("lm_head.weight")
            self._head = Linear(self._embedding)
        else:
            self._head = Linear(taker.take("lm_head.weight", (config.vocab_size, config.hidden_size)))
        taker.finish()
        self._cos, self._sin = _rotary_tables(config, dtype, self.device)

    def first_layers(self, num_layers: int) -> Model:
        """The model that ends after so many layers, with this one's embedding, norm and head; weights are shared.

        Raises InvalidSetting unless 1 <= num_layers <= the model's.
        """
        self._require_depth(num_layers)
        part = copy.copy(self)
        part.config = dataclasses.replace(self.config, num_layers=num_layers)
        part._layers = self._layers[:num_layers]
        return part

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,  # int64 [num_rows]
        batch: RaggedBatch,
        kv: PagedKVCache,
        *,
        num_layers: int | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, [num_rows, hidden_size] in the model's dtype.

        Writes the rows' keys and values into `kv.pages`. With `num_layers` only the first layers run (early exit) and
        only their keys and values are written.
        """
        depth = self.config.num_layers if num_layers is None else num_layers
        self._require_depth(depth)
        if token_ids.shape != batch.slots.shape:
            raise InvalidSetting("token_ids", tuple(token_ids.shape), f"must have shape {list(batch.slots.shape)}")
        cos = self._cos.index_select(0, batch.positions).unsqueeze(1)  # [num_rows, 1, head_dim]
        sin = self._sin.index_select(0, batch.positions).unsqueeze(1)
        # Rows of `kv.pages[layer]` seen as [num_pages * 2 * page_size, ...]: a page's keys, then its values.
        key_rows = batch.slots + torch.div(batch.slots, kv.page_size, rounding_mode="floor") * kv.page_size
        value_rows = key_rows + kv.page_size
        hidden = self._embedding.index_select(0, token_ids)
        for layer, pages in zip(self._layers[:depth], kv.pages, strict=False):
            normed = _rms_norm(hidden, layer.attention_norm, self.config.rms_norm_eps)
            query, key, value = self._project(layer, normed, cos, sin)
            rows = pages.flatten(0, 2)
            rows.index_copy_(0, key_rows, key)
            rows.index_copy_(0, value_rows, value)
            attended = self.backend.paged_attention(query, pages, batch.page_table, batch.kv_lens, batch.query_start)
            hidden = layer.output(attended.flatten(1)).add_(hidden)
            normed = _rms_norm(hidden, layer.mlp_norm, self.config.rms_norm_eps)
            gate, up = layer.gate_up(normed).chunk(2, dim=-1)
            hidden = layer.down(functional.silu(gate).mul_(up)).add_(hidden)
        return _rms_norm(hidden, self._norm, self.config.rms_norm_eps)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states [num_rows, hidden_size]: [num_rows, vocab_size] in the model's dtype."""
        return self._head(hidden)

    def _require_depth(self, num_layers: int) -> None:
        if not 0 < num_layers <= self.config.num_layers:
            raise InvalidSetting("num_layers", num_layers, f"must be in 1..{self.config.num_layers}")

    def _project(self, layer: _Layer, normed: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query [num_rows, num_heads, head_dim] and key [num_rows, num_kv_heads, head_dim], rotated, and value."""
        config = self.config
        num_rotated = config.num_heads + config.num_kv_heads
        heads = layer.query_key_value(normed).view(len(normed), -1, config.head_dim)
        rotated, value = heads[:, :num_rotated], heads[:, num_rotated:]
        if layer.query_key_norm is not None:
            rotated = _rms_norm(rotated, layer.query_key_norm, config.rms_norm_eps)
        rotated = _rotate(rotated, cos, sin)
        return rotated[:, : config.num_heads].contiguous(), rotated[:, config.num_heads :], value


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last dimension in float32, cast back, times weight."""
    wide = x.float()
    scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    normed: Tensor = (wide * scale).to(x.dtype).mul_(weight)
    return normed


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


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


def _layer(config: ModelConfig, taker: _Taker, prefix: str) -> _Layer:
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_heads, config.num_kv_heads
    query_key_norm = None
    if config.qk_norm:
        query = taker.take(f"{prefix}.self_attn.q_norm.weight", (dim,))
        key = taker.take(f"{prefix}.self_attn.k_norm.weight", (dim,))
        query_key_norm = torch.cat((query.expand(heads, dim), key.expand(kv_heads, dim)))
    return _Layer(
        attention_norm=taker.take(f"{prefix}.input_layernorm.weight", (hidden,)),
        query_key_value=Linear(
            torch.cat(
                (
                    taker.take(f"{prefix}.self_attn.q_proj.weight", (heads * dim, hidden)),
                    taker.take(f"{prefix}.self_attn.k_proj.weight", (kv_heads * dim, hidden)),
                    taker.take(f"{prefix}.self_attn.v_proj.weight", (kv_heads * dim, hidden)),
                )
            )
        ),
        query_key_norm=query_key_norm,
        output=Linear(taker.take(f"{prefix}.self_attn.o_proj.weight", (hidden, heads * dim))),
        mlp_norm=taker.take(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        gate_up=Linear(
            torch.cat(
                (
                    taker.take(f"{prefix}.mlp.gate_proj.weight", (inner, hidden)),
                    taker.take(f"{prefix}.mlp.up_proj.weight", (inner, hidden)),
                )
            )
        ),
        down=Linear(taker.take(f"{prefix}.mlp.down_proj.weight", (hidden, inner))),
    )
