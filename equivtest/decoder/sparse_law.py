"""Laws as their non-zero entries, for the CPU.

A filtered law has few tokens, so its non-zero entries are gathered in one pass over [num_rows, vocab_size] and all the
rest is arithmetic on them, in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from equivtest.decoder.stages import Int64Array

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseLaw:
    """The non-zero entries of laws p, row after row, normalised in float64."""

    rows: Int64Array
    """[nnz], non-decreasing."""
    ids: Int64Array
    """[nnz], rising within a row."""
    probs: Floats
    """[nnz]; each row sums to 1."""
    starts: Int64Array
    """[num_rows], first entry of each row; no row is empty."""

    @classmethod
    def of(cls, probs: Tensor) -> SparseLaw:
        """probs: [num_rows, vocab_size] on the CPU, any float dtype; every row has mass."""
        # numpy finds sparse True values several times faster than torch.
        flat = np.flatnonzero((probs.reshape(-1) > 0).numpy())
        values = probs.reshape(-1)[torch.from_numpy(flat)].numpy().astype(np.float64)
        rows, ids = np.divmod(flat, probs.shape[1])
        starts = np.searchsorted(rows, np.arange(probs.shape[0]))
        return cls(rows=rows, ids=ids, probs=values / np.add.reduceat(values, starts)[rows], starts=starts)

    @classmethod
    def certain(cls, token_ids: Int64Array) -> SparseLaw:
        """A point mass in each row, at token_ids [num_rows]."""
        every = np.arange(len(token_ids))
        return cls(rows=every, ids=token_ids, probs=np.ones(len(token_ids)), starts=every)

    def take(self, which: Int64Array) -> SparseLaw:
        """The laws of these rows ([n], any order, any number of times)."""
        counts = np.diff(self.starts, append=len(self.rows))[which]
        starts = np.cumsum(counts) - counts
        rows = np.repeat(np.arange(len(which)), counts)
        entries = np.arange(len(rows)) + (self.starts[which] - starts)[rows]
        return SparseLaw(rows=rows, ids=self.ids[entries], probs=self.probs[entries], starts=starts)

    def sums(self, values: npt.NDArray[np.generic]) -> Floats:
        """[num_rows] sums of one value an entry."""
        return np.add.reduceat(np.asarray(values, np.float64), self.starts)

    def at(self, token_ids: Int64Array) -> Floats:
        """[num_rows] the probability of one token a row; 0 where the row does not hold it."""
        return self.sums(self.probs * (self.ids == token_ids[self.rows]))

    def entropy(self) -> tuple[Floats, Floats]:
        """[num_rows] mean and variance of -ln p over p."""
        surprisal = -np.log(self.probs)
        mean = self.sums(self.probs * surprisal)
        return mean, self.sums(self.probs * (surprisal - mean[self.rows]) ** 2)

    def pit_rank(self, token_ids: Int64Array, coins: Floats) -> Floats:
        """[num_rows] mass above the token in descending p, plus coin times the mass of the token and its ties.

        Ties are taken together, so that nothing depends on which token has which id.
        """
        own = self.at(token_ids)
        above, ties = self.probs > own[self.rows], self.probs == own[self.rows]
        return np.minimum(self.sums(self.probs * above) + coins * self.sums(self.probs * ties), 1.0)

    def pit_vocab(self, token_ids: Int64Array, coins: Floats) -> Floats:
        """[num_rows] mass of the ids below the token, plus coin times its own mass."""
        below = self.sums(self.probs * (self.ids < token_ids[self.rows]))
        return np.minimum(below + coins * self.at(token_ids), 1.0)

    def moments(self, q: Tensor, q_rows: Int64Array) -> tuple[Floats, Floats]:
        """[num_rows] mean and variance over p of laws q [n, vocab_size], normalised; 0 in rows without one.

        q_rows: [num_rows], the row of q for each row of p, -1 for none.
        """
        inside = q_rows[self.rows] >= 0
        rows, ids = q_rows[self.rows][inside], self.ids[inside]
        values = np.zeros(len(self.probs))
        total = q.sum(dim=1, dtype=torch.float64).numpy()
        values[inside] = q.numpy()[rows, ids].astype(np.float64) / total[rows]
        mean = self.sums(self.probs * values)
        return mean, self.sums(self.probs * (values - mean[self.rows]) ** 2) * (q_rows >= 0)
