"""Call shapes of samplers, made one: a `Call` in, an `Answer` out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, Protocol, cast, get_args

import numpy as np
import torch
from torch import Tensor

from equivtest.errors import InvalidSetting, UnknownName
from equivtest.kernels.contract import PADDING, SpecScratch, Streams
from equivtest.kernels.registry import get_backend
from equivtest.rng import Purpose, uniforms

CoinsKind = Literal["uniforms", "seeds", "generators", "generator", "global"]
"""What a sampler draws from: uniforms handed to it, a seed a row and the row's position, a torch.Generator a row, one
for the batch, or torch's own."""

Sampler = Callable[..., Any]


class Coins(NamedTuple):
    """Randomness of one call. Seeds, positions and the step are always there, the rest where the kind asks for it."""

    seeds: Tensor  # int64 [B]
    positions: Tensor  # int64 [B], tokens that the row's request has put out before
    step: int
    """Calls of this stream before."""
    uniforms: Tensor | None = None  # float32 [B, K+1] in [0, 1): K acceptances and the last draw
    generators: list[torch.Generator] | None = None
    generator: torch.Generator | None = None


class Call(NamedTuple):
    """One batch to judge, on the sampler's device. Nothing of it may be changed."""

    draft_token_ids: Tensor  # int64 [B, K]; entries at or past num_draft mean nothing
    num_draft: Tensor  # int32 [B]
    num_drafts: tuple[int, ...]  # the same on the host
    draft_probs: Tensor | None  # float32 [B, K, vocab_size]; None: one-hot
    target_probs: Tensor  # float32 [B, K+1, vocab_size]
    coins: Coins


class Answer(NamedTuple):
    """What a sampler said."""

    output_token_ids: Tensor  # integer [B, K+1], -1 past the end
    emitted: Tensor | None = None  # integer [B]: accepted drafts of the row, the count to commit on
    telemetry: Tensor | None = None  # integer [B]: at least emitted


class Adapter(Protocol):
    """A sampler as the battery calls it."""

    coins: CoinsKind
    ragged: bool
    """Rows may have different num_draft."""
    per_request: bool
    """A row's tokens depend on its own coins alone."""
    replays: bool
    """The same coins give the same tokens."""
    draws_bonus: bool
    """The bonus is the sampler's own draw."""

    def __call__(self, call: Call) -> Answer: ...


class _Form:
    ragged = False
    replays = True
    draws_bonus = True

    def __init__(self, sampler: Sampler, coins: CoinsKind) -> None:
        self.sampler, self.coins = sampler, coins
        self.names = frozenset(_parameters(sampler))
        self.per_request = coins in ("uniforms", "seeds", "generators")


class EquivtestForm(_Form):
    """fn(draft_token_ids, draft_probs, target_probs, ...) -> ids, or (ids, emitted), or an object with such fields.

    Its further parameters say by their names what it takes: uniforms, seeds and positions, generators, or generator;
    and num_draft where rows may have fewer drafts than K.
    """

    def __init__(self, sampler: Sampler, coins: CoinsKind) -> None:
        super().__init__(sampler, coins)
        self.ragged = "num_draft" in self.names
        self.replays = getattr(sampler, "replays", True)
        self.per_request = self.per_request and getattr(sampler, "per_request", True)

    def __call__(self, call: Call) -> Answer:
        answer = self.sampler(call.draft_token_ids, call.draft_probs, call.target_probs, **_by_name(self, call))
        if hasattr(answer, "output_token_ids"):
            fields = (getattr(answer, name, None) for name in ("emitted", "acceptance_telemetry"))
            return Answer(answer.output_token_ids, *fields)
        if isinstance(answer, tuple) and 1 <= len(answer) <= len(Answer._fields):
            return Answer(*answer)
        return Answer(answer)


class MaskForm(_Form):
    """The same arguments -> (accepted mask [B, K], recovered ids [B, K] or [B, K+1], the last column the bonus)."""

    def __call__(self, call: Call) -> Answer:
        accepted, recovered = self.sampler(
            call.draft_token_ids, call.draft_probs, call.target_probs, **_by_name(self, call)
        )
        batch, num_draft = call.draft_token_ids.shape
        if accepted.shape != (batch, num_draft) or recovered.shape not in ((batch, num_draft), (batch, num_draft + 1)):
            message = f"accepted is {list(accepted.shape)} and recovered {list(recovered.shape)}, of drafts "
            raise ValueError(f"{message}{[batch, num_draft]}")
        self.draws_bonus = recovered.shape[1] > num_draft
        if not self.draws_bonus:
            recovered = torch.cat([recovered, _bonus(call)], dim=1)
        emitted = accepted.long().cumprod(dim=1).sum(dim=1, keepdim=True)
        places = torch.arange(num_draft + 1, device=emitted.device)
        drafts = torch.cat([call.draft_token_ids, recovered[:, -1:]], dim=1)
        return Answer(torch.where(places < emitted, drafts, torch.where(places == emitted, recovered.long(), PADDING)))


class FlashInferForm(_Form):
    """chain_speculative_sampling: draft_probs first, counts that it adds to, and a generator or seed and offset."""

    def __call__(self, call: Call) -> Answer:
        q = call.draft_probs
        if q is None:
            q = torch.zeros_like(call.target_probs[:, :-1]).scatter_(2, call.draft_token_ids[:, :, None], 1.0)
        drafts = call.draft_token_ids.int()
        if self.coins == "uniforms":
            return _counted(self.sampler(q, drafts, call.coins.uniforms, call.target_probs))
        keywords: dict[str, Any] = {}
        if self.coins == "generator":
            keywords["generator"] = call.coins.generator
        elif self.coins == "seeds":
            seeds = call.coins.seeds
            keywords = {"seed": seeds, "offset": torch.full_like(seeds, call.coins.step * (drafts.shape[1] + 2))}
        return _counted(self.sampler(q, drafts, call.target_probs, **keywords))


class VllmForm(_Form):
    """vLLM's rejection_sample: ragged drafts laid end to end, the bonus drawn by the caller, seeded rows by generator.

    One named `target_logits` gets logarithms of the probabilities, in a copy, for it changes them.
    """

    ragged = True
    draws_bonus = False

    def __call__(self, call: Call) -> Answer:
        batch, width = call.draft_token_ids.shape
        device = call.draft_token_ids.device
        offered = torch.arange(width, device=device) < call.num_draft[:, None]
        target = call.target_probs[:, :-1][offered]
        generators = dict(enumerate(call.coins.generators or ()))
        metadata = SimpleNamespace(
            all_greedy=False, all_random=True, temperature=torch.ones(batch, device=device), top_k=None, top_p=None,
            generators=generators,
        )  # fmt: skip
        tokens = self.sampler(
            call.draft_token_ids[offered].int(),
            list(call.num_drafts),
            width,
            call.num_draft.cumsum(0).int(),
            None if call.draft_probs is None else call.draft_probs[offered],
            target.log() if "target_logits" in self.names else target,
            _bonus(call).int(),
            metadata,
        )
        return Answer(tokens)


class BackendSampler:
    """The spec_accept of a kernel backend of ours, in the form of equivtest."""

    def __init__(self, name: str) -> None:
        """Raises UnknownName, KernelUnavailable."""
        self.backend = get_backend(name)
        self.per_request = self.replays = self.backend.capabilities.per_request_seed
        self.device = "cpu" if "cpu" in self.backend.capabilities.devices else "cuda"
        self._scratch: SpecScratch | None = None

    def __call__(
        self,
        draft_token_ids: Tensor,
        draft_probs: Tensor | None,
        target_probs: Tensor,
        *,
        num_draft: Tensor,
        seeds: Tensor,
        positions: Tensor,
    ) -> Answer:
        batch, num_rows, vocab_size = target_probs.shape
        scratch = self._scratch
        if scratch is None or (scratch.max_batch, scratch.max_draft, scratch.vocab_size) != (
            batch,
            num_rows - 1,
            vocab_size,
        ):
            scratch = self._scratch = SpecScratch(batch, num_rows - 1, vocab_size, target_probs.device)
        result = self.backend.spec_accept(
            draft_token_ids, num_draft, target_probs, draft_probs, Streams(seeds, positions), scratch=scratch
        )
        tokens, emitted, telemetry = (column.clone() for column in result[:3])
        return Answer(tokens, emitted, telemetry)


FORMS: Mapping[str, Callable[[Sampler, CoinsKind], Adapter]] = {
    "equivtest": EquivtestForm,
    "flashinfer": FlashInferForm,
    "vllm": VllmForm,
    "mask": MaskForm,
}
_PARAMETERS: Mapping[CoinsKind, tuple[str, ...]] = {
    "uniforms": ("uniforms",),
    "seeds": ("seeds", "positions"),
    "generators": ("generators",),
    "generator": ("generator",),
    "global": (),
}
"""Names of the parameters that take each kind of coins, the most telling kind first."""
_FLASHINFER_PARAMETERS: Mapping[CoinsKind, tuple[str, ...]] = {
    # The function takes both of the first; a generator is what its callers leave it with.
    "generator": ("generator",),
    "seeds": ("seed",),
    "uniforms": ("uniform_samples", "uniforms"),
    "global": (),
}


def load_sampler(name: str) -> Sampler:
    """The function that `module:function` names; the function may be an attribute of an attribute.

    Raises InvalidSetting for a name of another form, a module that cannot be imported, or no such function in it.
    """
    module, colon, path = name.partition(":")
    if not (module and colon and path):
        raise InvalidSetting("sampler", name, "must be module:function, such as my_package.sampler:rejection_sample")
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        remedy = "the module must be importable, from the working directory too"
        raise InvalidSetting("sampler", name, f"cannot be imported: {error}; {remedy}") from error
    if not callable(found):
        raise InvalidSetting("sampler", name, "is not a function")
    return cast("Sampler", found)


def adapt(sampler: Sampler, *, form: str = "equivtest", coins: str = "auto") -> Adapter:
    """The sampler as the battery calls it. coins: a CoinsKind, or "auto": by the names of its parameters.

    Raises UnknownName, InvalidSetting.
    """
    if form not in FORMS:
        raise UnknownName("form of a sampler", form, FORMS)
    if coins != "auto" and coins not in get_args(CoinsKind):
        raise UnknownName("kind of coins", coins, ("auto", *get_args(CoinsKind)))
    taking = _FLASHINFER_PARAMETERS if form == "flashinfer" else _PARAMETERS
    names = frozenset(_parameters(sampler))
    if coins == "auto":
        coins = next((kind for kind in taking if names & set(taking[kind]) - {"positions"}), "global")
    elif form != "vllm" and coins != "global" and not names & set(taking.get(coins, ())):  # type: ignore[call-overload]
        wanted = " or ".join(taking.get(coins, ())) or f"for {coins}"  # type: ignore[call-overload]
        raise InvalidSetting("coins", coins, f"the function has no parameter {wanted}")
    if form in ("equivtest", "mask"):
        _require_known(sampler, {*taking[coins], "num_draft"})  # type: ignore[index]
    return FORMS[form](sampler, coins)  # type: ignore[arg-type]


def _parameters(sampler: Sampler) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(sampler).parameters)
    except (TypeError, ValueError) as error:
        raise InvalidSetting("sampler", sampler, f"must be a function with a signature ({error})") from error


def _require_known(sampler: Sampler, handed: set[str]) -> None:
    """Raise InvalidSetting where the sampler cannot do without a parameter that it does not get."""
    further = list(inspect.signature(sampler).parameters.values())[3:]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    lacking = [p.name for p in further if p.default is p.empty and p.kind not in variadic and p.name not in handed]
    if lacking:
        known = ", ".join(name for names in _PARAMETERS.values() for name in names)
        requirement = f"needs {', '.join(lacking)}, which it does not get; name its randomness {known}, or see --coins"
        raise InvalidSetting("sampler", getattr(sampler, "__name__", type(sampler).__name__), requirement)


def _by_name(form: _Form, call: Call) -> dict[str, Any]:
    offers = call.coins._asdict() | {"num_draft": call.num_draft}
    wanted = form.names & {*_PARAMETERS[form.coins], "num_draft"}
    return {name: offers[name] for name in sorted(wanted)}


def _counted(answer: Any) -> Answer:
    """FlashInfer's (tokens, accepted counts, emitted counts), or tokens alone."""
    if isinstance(answer, Tensor):
        return Answer(answer)
    tokens, telemetry, emitted = answer
    return Answer(tokens, emitted, telemetry)


def _bonus(call: Call) -> Tensor:
    """[B, 1] int64: a draw from row num_draft by the row's own coin, for samplers that are handed the bonus."""
    rows = torch.arange(len(call.num_drafts), device=call.target_probs.device)
    cumulative = call.target_probs[rows, call.num_draft.long()].double().cumsum(dim=1)
    steps = np.full(len(rows), call.coins.step)
    u = torch.from_numpy(uniforms(call.coins.seeds.cpu().numpy(), steps, Purpose.BONUS)).to(cumulative.device)
    return torch.searchsorted(cumulative, u[:, None] * cumulative[:, -1:], right=True)
