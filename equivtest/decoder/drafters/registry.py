"""Drafters by name. A drafter is built only when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from equivtest.decoder.drafters.base import Drafter
from equivtest.decoder.drafters.dflash import DFlashCheckpoint, DFlashDrafter
from equivtest.decoder.drafters.draft_model import ModelDrafter
from equivtest.decoder.drafters.early_exit import EarlyExitDrafter, default_layers
from equivtest.decoder.drafters.ngram import NgramDrafter
from equivtest.decoder.model import Model
from equivtest.errors import InvalidSetting, UnknownName
from equivtest.kernels.contract import KernelBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterContext:
    """What a drafter may be built from."""

    target: Model
    backend: KernelBackend
    acceptance: str = "chain"
    """Name of the rule that will judge the drafts."""
    early_exit_layers: int | None = None
    """Layers of `early_exit` and `sampled_exit`; None: `default_layers` of them."""
    draft_model: Callable[[], tuple[Model, str]] | None = None
    """Loads the small model of `model`, with the name the run records."""
    block_drafter: Callable[[], DFlashCheckpoint] | None = None
    """Reads the network of `dflash`."""


def _model(context: DrafterContext) -> Drafter:
    assert context.draft_model is not None  # checked by make_drafter
    model, label = context.draft_model()
    return ModelDrafter(model, context.backend, target=context.target, label=label)


def _sampled_exit(context: DrafterContext) -> Drafter:
    target = context.target
    depth = context.early_exit_layers or default_layers(target.config.num_layers)
    label = f"the target's first {depth} of {target.config.num_layers} layers"
    part = target.first_layers(depth)
    return ModelDrafter(part, context.backend, target=target, label=label, name="sampled_exit")


def _dflash(context: DrafterContext) -> Drafter:
    assert context.block_drafter is not None  # checked by make_drafter
    return DFlashDrafter(context.block_drafter(), context.target, draws=context.acceptance == "chain")


_FACTORIES: Mapping[str, Callable[[DrafterContext], Drafter]] = {
    "ngram": lambda _: NgramDrafter(),
    "early_exit": lambda context: EarlyExitDrafter(context.target, num_layers=context.early_exit_layers),
    "self": lambda context: EarlyExitDrafter(context.target, num_layers=context.target.config.num_layers, name="self"),
    "model": _model,
    "sampled_exit": _sampled_exit,
    "dflash": _dflash,
}
_NEEDS: Mapping[str, str] = {
    "model": "drafter 'model' needs a draft model",
    "dflash": "drafter 'dflash' needs the folder of a block drafter that was trained for the model",
}
"""Drafters that are read from somewhere."""


def known_drafters() -> tuple[str, ...]:
    """Names that `make_drafter` takes."""
    return tuple(_FACTORIES)


def check_drafter(name: str, *, has_draft_model: bool) -> None:
    """What can be said before a model is loaded: raises UnknownName, or InvalidSetting for a missing draft model."""
    if name not in _FACTORIES:
        raise UnknownName("drafter", name, _FACTORIES)
    if name in _NEEDS and not has_draft_model:
        raise InvalidSetting("draft_model", None, _NEEDS[name])


def make_drafter(name: str, context: DrafterContext) -> Drafter:
    """The drafter of that name. Raises UnknownName, or InvalidSetting for what it lacks or cannot be."""
    source = context.block_drafter if name == "dflash" else context.draft_model
    check_drafter(name, has_draft_model=source is not None)
    return _FACTORIES[name](context)
