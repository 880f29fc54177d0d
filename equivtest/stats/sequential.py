"""Monitoring while samples are collected: evidence that may be looked at after every token and stopped at any time.

Both states take martingale differences in the order of collection: x_t = f(y_t) - E f under the target's law at that
prefix, with f, its bound and its weight known before y_t is drawn. Tokens of one sample come in order of position;
samples may be interleaved in any way that does not look ahead. States are frozen: `update` returns the next one, and
any cut of the tokens into updates leads to the same state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.special import logsumexp

from equivtest.errors import InsufficientSamples, InvalidSetting

Floats = npt.NDArray[np.float64]
Decision = Literal["equivalent", "different"]

DEFAULT_BETS = tuple(sign * 2.0**-power for power in range(1, 11) for sign in (1, -1))
"""One thousandth to a half, both signs. The best bet on x / Var f is the bias itself."""

_LARGEST_STAKE = 0.5
"""Largest share of the wealth that one token can lose."""

_BLOCK_TOKENS = 4_096
"""Tokens taken at a time: bounds the memory, not the result."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EProcess:
    """Bets against F martingales: the mean, over functionals and bets, of the wealth that each bet has made.

    H0: every x_t has conditional mean 0. Wealth of bet b on functional f: the product over tokens of 1 + b_t x_t, with
    b_t = b cut to half of 1 / bound_t, known before the draw. Under H0 the mean wealth is a nonnegative martingale that
    starts at 1, so it ever reaches 1 / alpha with probability at most alpha (Ville 1939).

    Source: Waudby-Smith & Ramdas 2024 (betting, with a mixture over a grid of bets).
    """

    alpha: float
    bets: tuple[float, ...]
    """G bets, in units of 1 / x."""
    log_wealth: Floats
    """[F, G]"""
    num_tokens: int = 0
    max_log_e: float = 0.0
    """Largest logarithm of the mean wealth so far."""
    crossed_at: int | None = None
    """Tokens after which the mean wealth first reached 1 / alpha; None if it has not."""

    @property
    def log_e(self) -> float:
        """Logarithm of the mean wealth now."""
        return float(logsumexp(self.log_wealth) - math.log(self.log_wealth.size))

    @property
    def rejected(self) -> bool:
        return self.crossed_at is not None

    @property
    def p_value(self) -> float:
        """Valid at any time: 1 over the largest mean wealth so far."""
        return math.exp(-self.max_log_e)

    def update(self, differences: Floats, bounds: Floats) -> EProcess:
        """The state after more tokens.

        differences, bounds: float64 [F, n] with |differences| <= bounds, both finite; 0 and 0 at tokens that a
        functional does not speak of. Raises InvalidSetting.
        """
        expected = (len(self.log_wealth), np.shape(differences)[-1])
        for name, values in (("differences", differences), ("bounds", bounds)):
            if np.shape(values) != expected or not np.isfinite(values).all():
                raise InvalidSetting(name, np.shape(values), f"must be finite, of shape {expected}")
        if (np.abs(differences) > bounds * (1 + 1e-9)).any():
            worst = float((np.abs(differences) - bounds).max())
            raise InvalidSetting("differences", worst, "exceed their bounds by this much")
        state = self
        for start in range(0, expected[1], _BLOCK_TOKENS):
            block = slice(start, start + _BLOCK_TOKENS)
            state = state._after(differences[:, block], bounds[:, block])
        return state

    def _after(self, differences: Floats, bounds: Floats) -> EProcess:
        largest = np.divide(_LARGEST_STAKE, bounds, out=np.zeros_like(bounds), where=bounds > 0)[:, None, :]
        bets = np.clip(np.array(self.bets)[None, :, None], -largest, largest)
        log_wealth = np.log1p(bets * differences[:, None, :])
        log_wealth[:, :, 0] += self.log_wealth
        np.cumsum(log_wealth, axis=2, out=log_wealth)
        log_e = logsumexp(log_wealth, axis=(0, 1)) - math.log(self.log_wealth.size)
        crossed_at = self.crossed_at
        reached = np.flatnonzero(log_e >= -math.log(self.alpha))
        if crossed_at is None and len(reached):
            crossed_at = self.num_tokens + int(reached[0]) + 1
        return replace(
            self,
            log_wealth=log_wealth[:, :, -1].copy(),
            num_tokens=self.num_tokens + differences.shape[1],
            max_log_e=max(self.max_log_e, float(log_e.max())),
            crossed_at=crossed_at,
        )


def e_process(num_functionals: int, *, alpha: float = 0.01, bets: tuple[float, ...] = DEFAULT_BETS) -> EProcess:
    """The state before the first token. Raises InvalidSetting."""
    _check_alpha(alpha)
    if num_functionals < 1:
        raise InvalidSetting("num_functionals", num_functionals, "must be at least 1")
    if not bets or not all(math.isfinite(bet) for bet in bets):
        raise InvalidSetting("bets", bets, "must be finite numbers, at least one")
    return EProcess(alpha=alpha, bets=bets, log_wealth=np.zeros((num_functionals, len(bets))))


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasSequence:
    """A confidence sequence for the mean bias, and the first decision that it allows.

    The bias at a token is the conditional mean of x_t: with f = 1[y = draft], the excess probability of acceptance. The
    interval after t tokens is (S +- sqrt((V + rho) (2 ln(1 / alpha) + ln((V + rho) / rho)))) / W with S = sum w x,
    W = sum w, and V the larger of sum w^2 Var f and sum w^2 x^2. It covers the w-weighted mean bias of the tokens so
    far at all times at once with probability at least 1 - alpha: exactly where there is no bias, because V is never
    below a third of sum w^2 x^2 plus two thirds of sum w^2 Var f (Delyon 2009), and in
    large samples where there is one, because sum w^2 x^2 then does not fall short of the variance.

    Source: Robbins 1970; Howard et al. 2021 (the two-sided normal mixture).
    """

    alpha: float
    margin: float
    rho: float
    """Inverse variance of the mixing normal, in units of V."""
    total: float = 0.0
    """S"""
    weight: float = 0.0
    """W"""
    predicted_variance: float = 0.0
    realised_variance: float = 0.0
    num_tokens: int = 0
    decision: Decision | None = None
    """different: an interval excluded 0. equivalent: one lay inside (-margin, margin) and none had excluded 0."""
    decided_at: int | None = None
    """Tokens after which the decision fell."""

    @property
    def estimate(self) -> float:
        """The weighted mean bias so far. Raises InsufficientSamples before the first token with a weight."""
        self._check_started()
        return self.total / self.weight

    @property
    def interval(self) -> tuple[float, float]:
        """Both ends of the interval now. Raises InsufficientSamples before the first token with a weight."""
        self._check_started()
        variance = np.array([max(self.predicted_variance, self.realised_variance)])
        radius = float(normal_mixture_radius(variance, alpha=self.alpha, rho=self.rho)[0])
        return (self.total - radius) / self.weight, (self.total + radius) / self.weight

    def update(self, differences: Floats, variances: Floats, weights: Floats) -> BiasSequence:
        """The state after more tokens.

        differences, variances, weights: float64 [n] of finite x_t, of Var f under the target's law and of w_t, the
        latter two at least 0. Raises InvalidSetting.
        """
        for name, values in (("differences", differences), ("variances", variances), ("weights", weights)):
            if np.ndim(values) != 1 or len(values) != len(differences) or not np.isfinite(values).all():
                raise InvalidSetting(name, np.shape(values), f"must be finite, of shape ({len(differences)},)")
        for name, values in (("variances", variances), ("weights", weights)):
            if (values < 0).any():
                raise InvalidSetting(name, float(values.min()), "must be at least 0")
        if not len(differences):
            return self
        total = self.total + np.cumsum(weights * differences)
        weight = self.weight + np.cumsum(weights)
        predicted = self.predicted_variance + np.cumsum(weights**2 * variances)
        realised = self.realised_variance + np.cumsum((weights * differences) ** 2)
        decision, decided_at = self.decision, self.decided_at
        if decision is None:
            radius = normal_mixture_radius(np.maximum(predicted, realised), alpha=self.alpha, rho=self.rho)
            different = np.abs(total) > radius
            decided = np.flatnonzero(different | (np.abs(total) + radius < self.margin * weight))
            if len(decided):
                decision = "different" if different[decided[0]] else "equivalent"
                decided_at = self.num_tokens + int(decided[0]) + 1
        return replace(
            self,
            total=float(total[-1]),
            weight=float(weight[-1]),
            predicted_variance=float(predicted[-1]),
            realised_variance=float(realised[-1]),
            num_tokens=self.num_tokens + len(differences),
            decision=decision,
            decided_at=decided_at,
        )

    def _check_started(self) -> None:
        if not self.weight > 0:
            raise InsufficientSamples("confidence sequence (tokens with a weight)", 0, 1)


def bias_sequence(*, alpha: float = 0.01, margin: float = 0.01, rho: float | None = None) -> BiasSequence:
    """The state before the first token.

    rho: by default 1 / margin^2. With the efficient weight 1 / Var f, V is the information about the bias and the
    mixing normal is one over biases with standard deviation `margin`: the interval is tightest about when it decides.
    Raises InvalidSetting.
    """
    _check_alpha(alpha)
    if not 0 < margin < 1:
        raise InvalidSetting("margin", margin, "must be between 0 and 1")
    rho = margin**-2 if rho is None else rho
    if not (math.isfinite(rho) and rho > 0):
        raise InvalidSetting("rho", rho, "must be finite and above 0")
    return BiasSequence(alpha=alpha, margin=margin, rho=rho)


def normal_mixture_radius(variance: Floats, *, alpha: float, rho: float) -> Floats:
    """What |S| ever exceeds with probability at most alpha, at each running variance V: float64 of V's shape.

    The mixture over lambda ~ N(0, 1 / rho) of exp(lambda S - lambda^2 V / 2) is
    sqrt(rho / (V + rho)) exp(S^2 / (2 (V + rho))); this is where it reaches 1 / alpha.
    """
    enlarged = variance + rho
    radius: Floats = np.sqrt(enlarged * (2 * math.log(1 / alpha) + np.log(enlarged / rho)))
    return radius


def _check_alpha(alpha: float) -> None:
    if not 0 < alpha < 1:
        raise InvalidSetting("alpha", alpha, "must be between 0 and 1")
