"""The layers of the block drafter in plain torch, as they are trained."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from equivtest.decoder.config import ModelConfig


class RMSNorm(nn.Module):
    """In float32, cast back before the weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * (wide.square().mean(dim=-1, keepdim=True) + self.eps).rsqrt()
        return self.weight * normed.to(x.dtype)


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim, self.group = config.head_dim, config.num_heads // config.num_kv_heads
        inner, kv_inner = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_inner, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_inner, bias=False)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, hidden: Tensor, context: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """hidden: [B, rows, hidden_size]. context: [B, T, hidden_size]. rotary: of context and rows together."""
        seen = torch.cat([context, hidden], dim=1)
        cos, sin = rotary
        rows = slice(context.shape[1], None)
        query = _rotate(self.q_norm(self._heads(self.q_proj(hidden))), cos[:, :, rows], sin[:, :, rows])
        key = _rotate(self.k_norm(self._heads(self.k_proj(seen))), cos, sin).repeat_interleave(self.group, dim=1)
        value = self._heads(self.v_proj(seen)).repeat_interleave(self.group, dim=1)
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        out: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        """[B, heads, rows, head_dim]."""
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


class _MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = _Attention(config), _MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor, context: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        # The context enters as it is: the layer's own norm is for the block alone.
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), context, rotary, mask)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out

    def begin_as_none(self) -> None:
        """Leave the rows as they are, until training changes that."""
        nn.init.zeros_(self.self_attn.o_proj.weight)
        nn.init.zeros_(self.mlp.down_proj.weight)


class MarkovHead(nn.Module):
    """Makes a draft depend on the one before it, of which a block that is filled at once knows nothing.

    What a token says of its successor, `successors` of its embedding, is added to the hidden state of the next place,
    as much of each entry as the place lets through. It depends on the token alone, so a decoder tabulates it.

    Source: the gated Markov head of DSpark, with the target's head in place of a low-rank matrix of its own.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.norm = RMSNorm(size, eps)
        self.up_proj = nn.Linear(size, size, bias=False)
        self.down_proj = nn.Linear(size, size, bias=False)
        self.gate_proj = nn.Linear(size, size, bias=False)

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """hidden: [..., hidden_size], of the places. previous: the same, embeddings of the tokens before them."""
        return hidden + self.gates(hidden) * self.successors(previous)

    def successors(self, embedded: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.up_proj(self.norm(embedded))))
        return out

    def gates(self, hidden: Tensor) -> Tensor:
        return torch.sigmoid(self.gate_proj(hidden))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
