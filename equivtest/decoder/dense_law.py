"""Laws as dense rows, for GPUs: they are reduced where they are, and only columns come to the host.

A GPU reads a row of the vocabulary faster than it finds the few tokens that the law holds. Sums are in float64, a block
of rows at a time, so that temporaries stay small beside the laws themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equivtest.decoder.sparse_law import Floats
from equivtest.decoder.stages import Int64Array

_BLOCK_ENTRIES = 1 << 24
"""Most entries of [rows, vocab_size] that are reduced at a time: bounds the temporaries, not the result."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DenseLaw:
    """Laws p of rows, several of which may have the same one; the methods are those of `SparseLaw`."""

    probs: Tensor
    """[num_laws, vocab_size], any float dtype; not copied."""
    totals: Tensor
    """float64 [num_laws], what normalises them."""
    which: Int64Array
    """[num_rows], the law of each row."""

    @classmethod
    def of(cls, probs: Tensor) -> DenseLaw:
        """probs: [num_rows, vocab_size]; every row has mass. A view: it must not change while the laws are in use."""
        return cls(probs=probs, totals=_totals(probs), which=np.arange(len(probs)))

    def take(self, which: Int64Array) -> DenseLaw:
        """The laws of these rows ([n], any order, any number of times)."""
        return DenseLaw(probs=self.probs, totals=self.totals, which=self.which[which])

    def at(self, token_ids: Int64Array) -> Floats:
        """[num_rows] the probability of one token a row; 0 where the row does not hold it."""
        rows, ids = self._on_device(self.which), self._on_device(np.maximum(token_ids, 0))
        own = self.probs[rows, ids].double() / self.totals[rows]
        return np.where(token_ids >= 0, own.cpu().numpy(), 0.0)

    def entropy(self) -> tuple[Floats, Floats]:
        """[num_rows] mean and variance of -ln p over p."""

        def moments(law: Tensor) -> tuple[Tensor, Tensor]:
            p = _normalised(self.probs, self.totals, law)
            return _moments(p, torch.where(p > 0, -p.log(), 0.0))

        return self._by_law(moments, self.which)

    def pit_rank(self, token_ids: Int64Array, coins: Floats) -> Floats:
        """[num_rows] mass above the token in descending p, plus coin times the mass of the token and its ties."""

        def masses(law: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
            p = self.probs[law]
            own = p.gather(1, token[:, None])
            above = torch.where(p > own, p, 0.0).sum(dim=1, dtype=torch.float64)
            ties = (p == own).sum(dim=1) * own[:, 0].double()
            return above / self.totals[law], ties / self.totals[law]

        above, ties = self._by_law(masses, self.which, token_ids)
        return np.minimum(above + coins * ties, 1.0)

    def pit_vocab(self, token_ids: Int64Array, coins: Floats) -> Floats:
        """[num_rows] mass of the ids below the token, plus coin times its own mass."""
        every = torch.arange(self.probs.shape[1], device=self.probs.device)

        def masses(law: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
            p = self.probs[law]
            below = torch.where(every < token[:, None], p, 0.0).sum(dim=1, dtype=torch.float64)
            return below / self.totals[law], p.gather(1, token[:, None])[:, 0].double() / self.totals[law]

        below, own = self._by_law(masses, self.which, token_ids)
        return np.minimum(below + coins * own, 1.0)

    def moments(self, q: Tensor, q_rows: Int64Array) -> tuple[Floats, Floats]:
        """[num_rows] mean and variance over p of laws q [n, vocab_size], normalised; 0 in rows without one.

        q_rows: [num_rows], the row of q for each row of p, -1 for none.
        """
        has, totals = q_rows >= 0, _totals(q)
        mean, variance = np.zeros(len(has)), np.zeros(len(has))
        if has.any():
            mean[has], variance[has] = self._by_law(
                lambda law, row: _moments(_normalised(self.probs, self.totals, law), _normalised(q, totals, row)),
                self.which[has],
                q_rows[has],
            )
        return mean, variance

    def _by_law(self, values: Callable[..., tuple[Tensor, Tensor]], *keys: Int64Array) -> tuple[Floats, Floats]:
        """[num_rows] each: two values of every row, computed once for rows with equal keys ([num_rows] each)."""
        code = keys[0] if len(keys) == 1 else keys[0] * (keys[1].max() + 1) + keys[1]
        _, first, back = np.unique(code, return_index=True, return_inverse=True)
        distinct = self._on_device(np.stack([key[first] for key in keys]))
        blocks = torch.split(distinct, _block_rows(self.probs), dim=1)
        parts = [torch.stack(values(*block)) for block in blocks]
        one, other = torch.cat(parts, dim=1).cpu().numpy()[:, back]
        return one, other

    def _on_device(self, values: Int64Array) -> Tensor:
        return torch.from_numpy(values).to(self.probs.device)


def _block_rows(probs: Tensor) -> int:
    return max(1, _BLOCK_ENTRIES // probs.shape[1])


def _totals(probs: Tensor) -> Tensor:
    """float64 [num_laws]; in blocks, because torch widens what it sums."""
    return torch.cat([part.sum(dim=1, dtype=torch.float64) for part in torch.split(probs, _block_rows(probs))])


def _normalised(probs: Tensor, totals: Tensor, rows: Tensor) -> Tensor:
    return probs[rows] / totals[rows, None]


def _moments(p: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """[rows] mean and variance of the values over p."""
    mean = (p * values).sum(dim=1)
    return mean, (p * (values - mean[:, None]) ** 2).sum(dim=1)
