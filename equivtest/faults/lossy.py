"""Acceptance rules that trade the law for speed by design. A gate must find them, though nobody calls them bugs."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from equivtest.decoder.stages import StepInput
from equivtest.errors import InvalidSetting
from equivtest.faults.base import Family, Fault, Nature
from equivtest.faults.wrappers import Judge, Offered, judged, verdict

_FOUND_BY = frozenset({Family.MARGINAL, Family.JOINT, Family.LAW})


def typical_acceptance(*, epsilon: float = 0.09, delta: float = 0.3) -> Fault:
    """Accepts a draft d when p(d) > min(epsilon, delta exp(-H(p))), H the entropy in nats.

    Source: Cai et al. 2024 (Medusa), section 2.3.1; the defaults are those of its code. Raises InvalidSetting unless
    both are above 0 and below 1.
    """
    for name, value in (("epsilon", epsilon), ("delta", delta)):
        if not 0 < value < 1:
            raise InvalidSetting(name, value, "must be above 0 and below 1")

    def judge(step: StepInput, offered: Offered, target_probs: Tensor) -> Tensor:
        laws = target_probs[offered.rows, offered.slots].double()
        entropy = torch.special.entr(laws).sum(dim=1)
        return verdict(offered.p > (delta * (-entropy).exp()).clamp(max=epsilon))

    return _lossy("typical_acceptance", judge, "drafts are accepted wherever they are typical of the target's law")


def relaxed_threshold(*, threshold: float = 0.7) -> Fault:
    """Accepts a draft when u q < p / threshold. Raises InvalidSetting unless 0 < threshold < 1."""
    if not 0 < threshold < 1:
        raise InvalidSetting("threshold", threshold, "must be above 0 and below 1")
    return _lossy(
        "relaxed_threshold",
        lambda step, offered, target_probs: offered.p / threshold,
        f"drafts are accepted with probability p / ({threshold:g} q)",
    )


def top_n_acceptance(*, n: float = 3) -> Fault:
    """Accepts a draft that is one of the n likeliest tokens. Raises InvalidSetting unless n is such a number."""
    if not (math.isfinite(n) and n == int(n) and n >= 1):
        raise InvalidSetting("n", n, "must be a whole number of at least 1")

    def judge(step: StepInput, offered: Offered, target_probs: Tensor) -> Tensor:
        likelier = target_probs[offered.rows, offered.slots] > offered.p[:, None]
        return verdict((likelier.sum(dim=1) < n) & (offered.p > 0))

    return _lossy("top_n_acceptance", judge, f"drafts among the {n:g} likeliest tokens are accepted, all others not")


def scaled_acceptance(*, factor: float = 0.8) -> Fault:
    """Accepts a draft when u q < factor p. Raises InvalidSetting unless 0 < factor < 1."""
    if not 0 < factor < 1:
        raise InvalidSetting("factor", factor, "must be above 0 and below 1")
    return _lossy(
        "scaled_acceptance",
        lambda step, offered, target_probs: offered.p * factor,
        f"drafts are accepted with {factor:g} of the probability they should be",
    )


def _lossy(name: str, judge: Judge, description: str) -> Fault:
    return Fault(
        name=name,
        stage="accept",
        kind="lossy by design",
        nature=Nature.LOSSY,
        description=description,
        expected=_FOUND_BY,
        wrap=judged(name, judge),
    )


FAULTS: tuple[Callable[[], Fault], ...] = (typical_acceptance, relaxed_threshold, top_n_acceptance, scaled_acceptance)
