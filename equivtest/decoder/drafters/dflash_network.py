"""The DFlash block drafter in plain torch: what is trained, what is stored, and what the fast path is compared with.

One pass fills a block of tokens in parallel from hidden states of the target. The block's first row is the anchor, the
newest committed token; its other rows are mask tokens. Every layer's keys and values are [context | block] and its
queries the block alone, without a causal mask inside the block. The context of a block is every token before its
anchor: the outputs of several target layers, concatenated, projected (`fc`) and normed (`hidden_norm`), whose keys and
values each layer makes with its own projections. The anchor's own features are not context, for the target has not been
fed the anchor yet. Positions are those of the text, for context and block alike.

Source: DFlash, arXiv 2602.06036, and the checkpoints published with it. There `target_layer_ids` count from 0 and mean
the residual stream after that layer: entry id + 1 of transformers' `hidden_states`, whose entry 0 is the embedding; an
engine that captures before a layer captures before layer id + 1. Here that holds for the last layer too, whose output
transformers alone hands out after the final norm.

The target's embedding makes the block's input, its head reads the output: both are shared and not part of the network.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from equivtest.decoder.config import ModelConfig, config_from_hf
from equivtest.decoder.drafters.dflash_layers import Layer, MarkovHead, RMSNorm
from equivtest.decoder.weights import load_weights, read_json
from equivtest.errors import ModelUnavailable, UnsupportedModel
from equivtest.kernels.contract import RowParams
from equivtest.kernels.markov import markov_law
from equivtest.kernels.registry import get_backend

MAX_FILE_BYTES = 16_000_000
"""Most bytes of weights in one file."""

_ARCHITECTURE = "DFlashDraftModel"
_ANCHOR_FIRST_KEYS = ("sample_from_anchor", "query_zero_predicts_next")
_NEUTRAL: Mapping[str, object] = {
    "input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None, "is_causal": False,
    "fc_layernorm": False, "markov_rank": 0, "conv_kernel_size": None, "selector_rank": None, "draft_vocab_size": None,
    "shift_label": False,
}  # fmt: skip
"""Settings of related drafters that change the arithmetic, each with the value that leaves it as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig:
    """Everything that fixes the shape and the arithmetic of a drafter. Raises UnsupportedModel where it cannot be."""

    hidden_size: int
    """The target's."""
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    vocab_size: int
    """The target's."""
    max_position: int
    """The target's longest sequence."""
    num_target_layers: int
    block_size: int
    """Rows of a block: the anchor and block_size - 1 mask tokens."""
    target_layer_ids: tuple[int, ...]
    """Target layers whose outputs are the features, counted from 0, rising; in the order of their concatenation."""
    mask_token_id: int
    """A token of the target's vocabulary that stands for a token to fill in."""
    anchor_first: bool = False
    """Which row predicts which token. False (mask-first): a mask row predicts its own place, the anchor's output is not
    used, and a block proposes block_size - 1 drafts. True: every row predicts the token after its place, the anchor's
    row the first draft, and a block proposes block_size drafts."""
    markov_head: bool = False
    """Whether a draft depends on the one before it, see `MarkovHead`."""

    def __post_init__(self) -> None:
        config = self.as_model()  # checks the fields it shares
        ids = self.target_layer_ids
        if not ids or list(ids) != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] < self.num_target_layers:
            raise UnsupportedModel(
                _ARCHITECTURE, f"target_layer_ids = {list(ids)} must rise within 0..{self.num_target_layers - 1}"
            )
        if not 0 <= self.mask_token_id < config.vocab_size:
            raise UnsupportedModel(
                _ARCHITECTURE, f"mask_token_id = {self.mask_token_id} must be in 0..{config.vocab_size - 1}"
            )
        if self.num_drafts < 1:
            raise UnsupportedModel(_ARCHITECTURE, f"block_size = {self.block_size} leaves no draft to propose")

    @property
    def num_drafts(self) -> int:
        """Drafts that a block proposes."""
        return self.block_size if self.anchor_first else self.block_size - 1

    @property
    def first_draft_row(self) -> int:
        """The row of a block that predicts its first draft: row first_draft_row + k predicts draft k, the token at
        position anchor + 1 + k."""
        return 0 if self.anchor_first else 1

    @property
    def feature_size(self) -> int:
        """Width of the features of a token."""
        return len(self.target_layer_ids) * self.hidden_size

    def as_model(self) -> ModelConfig:
        """The drafter's layers as those of a decoder: they are Qwen3's."""
        return ModelConfig(
            architecture="qwen3",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            rope_theta=self.rope_theta,
            rms_norm_eps=self.rms_norm_eps,
            tied_embeddings=True,
            max_position=self.max_position,
        )

    @classmethod
    def from_json(cls, folder: Path) -> DFlashConfig:
        """Read `folder`/config.json as published checkpoints have it: a Qwen3 config with a table `dflash_config`.

        Raises ModelUnavailable without the file, UnsupportedModel naming a key that is missing or not implemented.
        """
        file, model = folder / "config.json", str(folder)
        if not file.is_file():
            raise ModelUnavailable(model, "the folder has no config.json", "give the folder of a DFlash drafter")
        table = read_json(file)
        if table.get("architectures") != [_ARCHITECTURE]:
            raise UnsupportedModel(model, f"architectures = {table.get('architectures')!r} is not {_ARCHITECTURE}")
        own = table.get("dflash_config")
        if not isinstance(own, dict):
            raise UnsupportedModel(model, "config.json has no table dflash_config")
        own = table | own
        for key, neutral in _NEUTRAL.items():
            if own.get(key, neutral) not in (neutral, None):
                raise UnsupportedModel(model, f"{key} = {own[key]!r} is not implemented")
        layers = config_from_hf(model, table)
        if layers.architecture != "qwen3" or layers.rope_divisors:
            raise UnsupportedModel(model, "only Qwen3 layers with unscaled rotary embedding are implemented")
        return cls(
            hidden_size=layers.hidden_size,
            intermediate_size=layers.intermediate_size,
            num_layers=layers.num_layers,
            num_heads=layers.num_heads,
            num_kv_heads=layers.num_kv_heads,
            head_dim=layers.head_dim,
            rope_theta=layers.rope_theta,
            rms_norm_eps=layers.rms_norm_eps,
            vocab_size=layers.vocab_size,
            max_position=layers.max_position,
            num_target_layers=_integer(model, own, "num_target_layers"),
            block_size=_integer(model, own, "block_size"),
            target_layer_ids=_integers(model, own, "target_layer_ids"),
            mask_token_id=_integer(model, own, "mask_token_id"),
            anchor_first=any(bool(own.get(key)) for key in _ANCHOR_FIRST_KEYS),
            markov_head=bool(own.get("tied_markov_head")),
        )

    def to_json(self, folder: Path) -> None:
        """Write `folder`/config.json, which `from_json` reads back."""
        table = {
            "architectures": [_ARCHITECTURE],
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_norm_eps,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position,
            "layer_types": ["full_attention"] * self.num_layers,
            "num_target_layers": self.num_target_layers,
            "block_size": self.block_size,
            "dflash_config": {
                "target_layer_ids": list(self.target_layer_ids),
                "mask_token_id": self.mask_token_id,
                "sample_from_anchor": self.anchor_first,
                "tied_markov_head": self.markov_head,
            },
        }
        (folder / "config.json").write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


def _integer(model: str, table: Mapping[str, object], key: str) -> int:
    value = table.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UnsupportedModel(model, f"{key} = {value!r} is not a whole number")
    return value


def _integers(model: str, table: Mapping[str, object], key: str) -> tuple[int, ...]:
    value = table.get(key)
    if not isinstance(value, list) or not all(isinstance(entry, int) for entry in value):
        raise UnsupportedModel(model, f"{key} = {value!r} is not a list of whole numbers")
    return tuple(value)


class DFlashNetwork(nn.Module):
    """The drafter's layers between the target's embedding and head. Its state is the checkpoint, name for name."""

    def __init__(self, config: DFlashConfig) -> None:
        """Weights as a fresh network has them, from torch's generator."""
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config.as_model()) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.markov_head = MarkovHead(config.hidden_size, config.rms_norm_eps) if config.markov_head else None
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        if self.markov_head is not None:
            nn.init.zeros_(self.markov_head.down_proj.weight)  # begins as if it were not there

    def forward(self, features: Tensor, block_hidden: Tensor, context_lens: Tensor) -> Tensor:
        """Hidden states for the target's head, [B, N, block_size, hidden_size], of N blocks in each of B texts.

        features: [B, T, feature_size], of the texts' tokens from their first one on; what is past a block's context is
        not looked at and may be anything finite. block_hidden: [B, N, block_size, hidden_size], the target's embedding
        of `block_token_ids`. context_lens: int64 [B, N] in 0..T, the tokens before each block's anchor, which is the
        anchor's position. Blocks do not see each other.
        """
        batch, num_blocks, block_size, hidden_size = block_hidden.shape
        num_context = features.shape[1]
        context = self.hidden_norm(self.fc(features))
        hidden = block_hidden.flatten(1, 2)
        places = context_lens[..., None] + torch.arange(block_size, device=features.device)
        positions = torch.cat(
            [torch.arange(num_context, device=features.device).expand(batch, -1), places.flatten(1)], dim=1
        )
        rotary = self._rotary(positions, hidden.dtype)
        mask = attention_mask(context_lens, num_context, block_size)
        for layer in self.layers:
            hidden = layer(hidden, context, rotary, mask)
        normed: Tensor = self.norm(hidden)
        return normed.view(batch, num_blocks, block_size, hidden_size)

    def behind(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Hidden states for the head of places, each behind a given token: [..., K, hidden_size] of `forward`'s rows
        that predict drafts. previous: the same, the target's embeddings of the tokens before them, the anchor first."""
        return hidden if self.markov_head is None else self.markov_head(hidden, previous)

    def successors(self, embedding: Tensor) -> Tensor | None:
        """What each token says of the one after it, [vocab_size, hidden_size], for `drafts`. None: nothing.

        embedding: the target's, [vocab_size, hidden_size].
        """
        return None if self.markov_head is None else self.markov_head.successors(embedding)

    def drafts(self, hidden: Tensor, anchor_ids: Tensor, head: Tensor, successors: Tensor | None) -> Tensor:
        """int64 [N, K], each the likeliest token of its place, behind the draft before it if there is a Markov head.

        hidden: [N, K, hidden_size] of `forward`'s rows that predict drafts. anchor_ids: int64 [N]. head: the target's,
        [vocab_size, hidden_size].
        """
        if successors is None:
            return (hidden.to(head.dtype) @ head.T).argmax(dim=-1)
        logits, gates = self._opened(hidden, anchor_ids, head, successors)
        return get_backend("reference").layers.markov_drafts(logits, gates, successors, head).token_ids

    def draft_laws(
        self, hidden: Tensor, previous_ids: Tensor, head: Tensor, successors: Tensor, law: RowParams
    ) -> Tensor:
        """float32 [N, K, vocab_size], what a decoder draws the draft of each place from. For one with a Markov head.

        hidden, head: see `drafts`. previous_ids: int64 [N, K], the token before each place, the anchor first. law: of
        N * K rows.
        """
        logits, gates = self._opened(hidden, previous_ids[:, 0], head, successors)
        gates[:, 0] = 0  # these logits know the token before
        rows = logits.flatten(0, 1)
        out = torch.empty(rows.shape, device=rows.device)
        markov_law(rows, gates.flatten(0, 1), successors, head, law, previous_ids.flatten(), out)
        return out.view(logits.shape)

    def _opened(self, hidden: Tensor, anchor_ids: Tensor, head: Tensor, successors: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [N, K, vocab_size], the first place's behind its anchor, the others' behind nothing yet; and gates."""
        assert self.markov_head is not None
        gates = self.markov_head.gates(hidden)
        fed = hidden.clone()
        fed[:, 0] += gates[:, 0] * successors[anchor_ids]
        return fed.to(head.dtype) @ head.T, gates

    def block_token_ids(self, anchors: Tensor) -> Tensor:
        """[..., block_size]: each anchor (int64 [...]) and mask tokens."""
        masks = torch.full_like(anchors, self.config.mask_token_id)
        return torch.stack([anchors] + [masks] * (self.config.block_size - 1), dim=-1)

    def _rotary(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, 1, rows, head_dim], computed in float32."""
        dim = self.config.head_dim
        exponents = torch.arange(0, dim, 2, device=positions.device).float() / dim
        angles = positions[..., None].float() / self.config.rope_theta**exponents
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def save(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write config.json and the weights in `dtype`, in files of at most MAX_FILE_BYTES, or of one tensor."""
        folder.mkdir(parents=True, exist_ok=True)
        self.config.to_json(folder)
        weights = {name: w.detach().to("cpu", dtype).contiguous() for name, w in self.state_dict().items()}
        files = _split(weights)
        if len(files) == 1:
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
            return
        names = [f"model-{number + 1:05}-of-{len(files):05}.safetensors" for number in range(len(files))]
        for name, part in zip(names, files, strict=True):
            save_file(part, folder / name, metadata={"format": "pt"})
        size = sum(weight.nbytes for weight in weights.values())
        places = {weight: name for name, part in zip(names, files, strict=True) for weight in part}
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype = torch.float32) -> DFlashNetwork:
        """The network of a folder, on the CPU. Raises ModelUnavailable, or UnsupportedModel naming the weight that is
        missing, misshapen or left over."""
        network = cls(DFlashConfig.from_json(folder))
        weights = load_weights(folder)
        expected = network.state_dict()
        for name, weight in expected.items():
            if name not in weights:
                raise UnsupportedModel(str(folder), f"the weight {name} is missing")
            if weights[name].shape != weight.shape:
                shape = list(weights[name].shape)
                raise UnsupportedModel(str(folder), f"{name} has shape {shape}, expected {list(weight.shape)}")
        left = sorted(set(weights) - set(expected))
        if left:
            raise UnsupportedModel(str(folder), f"weights that a drafter does not have: {', '.join(left[:5])}")
        network.load_state_dict(dict(weights))
        return network.to(dtype)


def attention_mask(context_lens: Tensor, num_context: int, block_size: int) -> Tensor:
    """Who sees whom, bool [B, 1, N * block_size, num_context + N * block_size]: rows of a block see the context before
    its anchor and their own block, all of it. context_lens: int64 [B, N] in 0..num_context.
    """
    batch, num_blocks = context_lens.shape
    device = context_lens.device
    context = torch.arange(num_context, device=device) < context_lens[..., None]  # [B, N, T]
    own = torch.eye(num_blocks, dtype=torch.bool, device=device).repeat_interleave(block_size, dim=1)
    mask = torch.cat([context, own.expand(batch, -1, -1)], dim=2)
    return mask.repeat_interleave(block_size, dim=1).unsqueeze(1)


def _split(weights: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """In order, as many to a file as MAX_FILE_BYTES allows."""
    files: list[dict[str, Tensor]] = [{}]
    room = MAX_FILE_BYTES
    for name, weight in weights.items():
        if weight.nbytes > room and files[-1]:
            files.append({})
            room = MAX_FILE_BYTES
        files[-1][name] = weight
        room -= weight.nbytes
    return files
