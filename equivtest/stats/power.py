"""What bias a protocol can see, in closed form, from the draft probabilities of a pilot.

The alternative throughout: a draft of target probability p is accepted with probability min(1, p + bias), and a
rejected one leaves the rest of the law as it was. All there is to know about a token is then whether it is its draft.
Drafts outside the target's support (p = 0) are left out: accepting one is seen at once, by the support test. How a bias
moves the prefixes, and with them the p of later drafts, is left out too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import special
from scipy.optimize import brentq
from scipy.stats import norm

from equivtest.errors import InsufficientSamples, InvalidSetting
from equivtest.stats.law_martingale import MAX_WEIGHT

Floats = npt.NDArray[np.float64]

_LARGEST_FACTOR = 1e6
"""Largest factor by which a protocol is thought to grow (and, inverted, to shrink)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pilot:
    """What a pilot says about a protocol."""

    p_draft: Floats
    """[n] target probability of the draft at every draft slot that was reached, in (0, 1]."""
    num_seeds: int
    """Seeds of the pilot; tokens grow in proportion to them."""
    max_weight: float
    """Largest weight of a token in the bias test: its information 1 / (p (1 - p)) is cut here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LawPower:
    """The bias test at one protocol and its distance from the best test there is."""

    num_seeds: int
    alpha: float
    power: float
    smallest_bias: float
    """Bias found with `power` at this protocol."""
    seeds: float
    """Seeds needed for that bias: num_seeds, but for rounding."""
    neyman_pearson_seeds: float
    """Seeds that the likelihood-ratio test needs for the same bias, knowing it."""

    @property
    def ratio(self) -> float:
        """Samples that the bias test needs, in units of what the Neyman-Pearson test needs."""
        return self.seeds / self.neyman_pearson_seeds


def pilot(p_draft: npt.NDArray[np.floating], num_seeds: int, *, max_weight: float = MAX_WEIGHT) -> Pilot:
    """Check the draft probabilities of a pilot and leave out those of 0.

    p_draft: [n] in [0, 1]; num_seeds at least 1; max_weight at least 4, below which all weights are equal. Raises
    InsufficientSamples (no draft that could be accepted and rejected), InvalidSetting.
    """
    values = np.asarray(p_draft, np.float64)
    if values.ndim != 1 or not ((values >= 0) & (values <= 1)).all():
        raise InvalidSetting("p_draft", values.shape, "must be a flat array of probabilities in [0, 1]")
    if num_seeds < 1:
        raise InvalidSetting("num_seeds", num_seeds, "must be at least 1")
    if not max_weight >= 4:
        raise InvalidSetting("max_weight", max_weight, "must be at least 4")
    values = values[values > 0]
    undecided = int((values < 1).sum())
    if not undecided:
        raise InsufficientSamples("power (draft tokens with 0 < p < 1)", undecided, 1)
    return Pilot(p_draft=values, num_seeds=num_seeds, max_weight=max_weight)


def bias_test_power(pilot: Pilot, bias: float, *, seeds: float | None = None, alpha: float = 0.01) -> float:
    """Probability that the two-sided bias test at level alpha finds `bias` with `seeds` seeds.

    z = S / sqrt(V), S = sum w (1[y = d] - p), V = sum w^2 p (1 - p), w = min(1 / (p (1 - p)), max_weight). Under the
    bias S has mean sum w (p' - p) and variance sum w^2 p' (1 - p'), p' = min(1, p + bias).
    """
    root = math.sqrt((pilot.num_seeds if seeds is None else seeds) / pilot.num_seeds)
    return _two_sided_power(root, _moments(pilot, bias), alpha)


def bias_test_seeds(pilot: Pilot, bias: float, *, power: float = 0.9, alpha: float = 0.01) -> float:
    """Seeds with which the bias test finds `bias` with probability `power`; not rounded. Raises InvalidSetting."""
    _check_level(power, alpha)
    moments = shift, null, alternative = _moments(pilot, bias)
    # Without the wrong side's tail the root is in closed form; that tail can only lower it.
    root = (norm.isf(alpha / 2) * math.sqrt(null) + norm.isf(1 - power) * math.sqrt(alternative)) / shift

    def missing(less: float) -> float:
        return power - _two_sided_power(less, moments, alpha)

    # Where a bias spreads S so far that both tails reject without any drift, only the right side's finding counts.
    if missing(0.0) > 0 > missing(root):
        root = brentq(missing, 0.0, root, xtol=1e-12)
    return float(pilot.num_seeds * root**2)


def _two_sided_power(root: float, moments: tuple[float, float, float], alpha: float) -> float:
    """P(|z| > critical value) under the bias, at root^2 times the pilot's tokens; rises with root."""
    shift, null, alternative = moments
    critical = norm.isf(alpha / 2) * math.sqrt(null)
    spread = max(math.sqrt(alternative), 1e-12 * critical)
    return float(norm.sf((critical - shift * root) / spread) + norm.sf((critical + shift * root) / spread))


def smallest_bias(pilot: Pilot, *, seeds: float | None = None, power: float = 0.9, alpha: float = 0.01) -> float:
    """The bias that the bias test finds with probability `power` with `seeds` seeds (the pilot's by default).

    Raises InsufficientSamples where not even a bias of 1/2 is found.
    """
    _check_level(power, alpha)
    wanted = pilot.num_seeds if seeds is None else seeds

    def excess_seeds(log_bias: float) -> float:
        return math.log(bias_test_seeds(pilot, math.exp(log_bias), power=power, alpha=alpha) / wanted)

    if excess_seeds(math.log(0.5)) > 0:
        needed = math.ceil(bias_test_seeds(pilot, 0.5, power=power, alpha=alpha))
        raise InsufficientSamples("power: seeds that find a bias of 0.5", math.floor(wanted), needed)
    return math.exp(brentq(excess_seeds, math.log(1e-9), math.log(0.5), xtol=1e-6))


def neyman_pearson_power(pilot: Pilot, bias: float, *, seeds: float | None = None, alpha: float = 0.01) -> float:
    """Power of the one-sided likelihood-ratio test of `bias` against none: no test at level alpha has more.

    From the cumulant function K(s) = sum ln(p^(1-s) p'^s + (1-p)^(1-s) (1-p')^s) of the log-likelihood ratio under
    H0, by exponential tilting with a normal law at the tilt (Esscher 1932). Where p' = 1 a rejected draft refutes the
    bias; the tilt accounts for that.
    """
    factor = (pilot.num_seeds if seeds is None else seeds) / pilot.num_seeds
    ratio = _LikelihoodRatio(pilot, bias)

    def log_level(tilt: float) -> float:
        return ratio.log_level(tilt, factor) - math.log(alpha)

    if log_level(_SMALLEST_TILT) <= 0:
        return 1.0  # the test may reject whatever the bias does not rule out
    if log_level(_LARGEST_TILT) > 0:
        return float(alpha)
    return ratio.power(float(brentq(log_level, _SMALLEST_TILT, _LARGEST_TILT, xtol=1e-9)), factor)


def neyman_pearson_seeds(pilot: Pilot, bias: float, *, power: float = 0.9, alpha: float = 0.01) -> float:
    """Seeds with which the likelihood-ratio test finds `bias` with probability `power`; not rounded."""
    _check_level(power, alpha)

    def missing(log_factor: float) -> float:
        seeds = pilot.num_seeds * math.exp(log_factor)
        return power - neyman_pearson_power(pilot, bias, seeds=seeds, alpha=alpha)

    edge = math.log(_LARGEST_FACTOR)
    if missing(edge) > 0:
        raise InsufficientSamples("Neyman-Pearson limit (seeds)", pilot.num_seeds, int(pilot.num_seeds * 1e6))
    return pilot.num_seeds * math.exp(brentq(missing, -edge, edge, xtol=1e-4))


def law_power(pilot: Pilot, *, seeds: int | None = None, power: float = 0.9, alpha: float = 0.01) -> LawPower:
    """The smallest bias found at a protocol, and how many samples the best test would have needed for it."""
    bias = smallest_bias(pilot, seeds=seeds, power=power, alpha=alpha)
    return LawPower(
        num_seeds=pilot.num_seeds if seeds is None else seeds,
        alpha=alpha,
        power=power,
        smallest_bias=bias,
        seeds=bias_test_seeds(pilot, bias, power=power, alpha=alpha),
        neyman_pearson_seeds=neyman_pearson_seeds(pilot, bias, power=power, alpha=alpha),
    )


_SMALLEST_TILT = 1e-6
_LARGEST_TILT = 8.0


class _LikelihoodRatio:
    """The log-likelihood ratio of a bias over the pilot's tokens, exponentially tilted."""

    def __init__(self, pilot: Pilot, bias: float) -> None:
        _check_bias(bias)
        p = pilot.p_draft[pilot.p_draft < 1]  # a sure token says nothing
        biased = np.minimum(1.0, p + bias)
        self._accepted = np.log(p), np.log(biased)
        self._rejected = np.log1p(-p), np.log1p(-biased, out=np.full_like(p, -np.inf), where=biased < 1)

    def log_level(self, tilt: float, factor: float) -> float:
        """Logarithm of P0(ratio > c) at the c that is the tilted mean."""
        cumulant, mean, variance = self._tilted(tilt, factor)
        return cumulant - tilt * mean + _log_tail(tilt, variance)

    def power(self, tilt: float, factor: float) -> float:
        """P1(ratio > c) at the same c."""
        cumulant, mean, variance = self._tilted(tilt, factor)
        log_tail = cumulant + (1 - tilt) * mean + _log_tail(abs(1 - tilt), variance)
        return float(-np.expm1(min(0.0, log_tail)) if tilt < 1 else np.exp(min(0.0, log_tail)))

    def _tilted(self, tilt: float, factor: float) -> tuple[float, float, float]:
        """Cumulant function and its first two derivatives, of `factor` times the tokens."""
        accepted = (1 - tilt) * self._accepted[0] + tilt * self._accepted[1]
        rejected = (1 - tilt) * self._rejected[0] + tilt * self._rejected[1]
        total = np.logaddexp(accepted, rejected)
        share = np.exp(accepted - total)
        ratio_accepted = self._accepted[1] - self._accepted[0]
        possible = np.isfinite(rejected)
        ratio_rejected = np.zeros_like(share)
        ratio_rejected[possible] = self._rejected[1][possible] - self._rejected[0][possible]
        mean = share * ratio_accepted + (1 - share) * ratio_rejected
        variance = share * (1 - share) * (ratio_accepted - ratio_rejected) ** 2
        return factor * float(total.sum()), factor * float(mean.sum()), factor * float(variance[possible].sum())


def _log_tail(tilt: float, variance: float) -> float:
    """Logarithm of E exp(-tilt x) over x > 0 for x normal with mean 0."""
    spread = tilt * math.sqrt(variance)
    # exp(spread^2 / 2) times the normal tail, without overflow.
    return math.log(special.erfcx(spread / math.sqrt(2)) / 2)


def _moments(pilot: Pilot, bias: float) -> tuple[float, float, float]:
    """Mean of S under the bias, and its variance without and with it, at the pilot's size."""
    _check_bias(bias)
    p = pilot.p_draft
    variance = p * (1 - p)
    weight = 1 / np.maximum(variance, 1 / pilot.max_weight)
    biased = np.minimum(1.0, p + bias)
    return (
        float((weight * (biased - p)).sum()),
        float((weight**2 * variance).sum()),
        float((weight**2 * biased * (1 - biased)).sum()),
    )


def _check_bias(bias: float) -> None:
    if not 0 < bias < 1:
        raise InvalidSetting("bias", bias, "must be between 0 and 1")


def _check_level(power: float, alpha: float) -> None:
    if not 0 < alpha < 0.5 <= power < 1:
        raise InvalidSetting("(alpha, power)", (alpha, power), "must satisfy 0 < alpha < 0.5 <= power < 1")
