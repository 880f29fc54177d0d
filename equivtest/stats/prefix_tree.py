"""The tree of the prefixes of a set of samples: a node for every distinct prefix, its children the tokens that follow.

Samples and nodes are put in a canonical order that looks at the shape of the tree alone, so that what is computed from
it, permutations included, depends neither on the order of the samples nor on which token has which id at which node.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equivtest.errors import InvalidSetting

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixTree:
    """The prefixes of lengths 0 to T of N samples. A level holds the nodes of one length, numbered from 0.

    Nodes are numbered by their parent, then by falling count, then by the shape of the subtree below: the children of a
    node are consecutive, the most frequent first, and so are the samples of a node.
    """

    order: Ints
    """[N] the sample that stands at each place of the canonical order."""
    node: Ints
    """[T + 1, N] node of each sample, in canonical order, at each level; never falls along a level."""
    counts: tuple[Ints, ...]
    """T + 1 arrays: samples of each node of a level."""
    parents: tuple[Ints, ...]
    """T arrays: for each node of level t + 1, its parent in level t."""

    @property
    def num_samples(self) -> int:
        return len(self.order)

    @property
    def num_positions(self) -> int:
        return len(self.parents)


def prefix_tree(tokens: npt.NDArray[np.integer]) -> PrefixTree:
    """The tree of all prefixes.

    tokens: integer [N, T], one sample a row, N and T at least 1; ids at least 0. Raises InvalidSetting.
    """
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer) or 0 in tokens.shape:
        raise InvalidSetting(
            "samples", f"{tokens.dtype} of shape {tokens.shape}", "must be integers [samples, positions], not empty"
        )
    if tokens.min() < 0:
        raise InvalidSetting("token ids", int(tokens.min()), "must be at least 0; cut padding off first")
    node = _numbered_by_token(tokens)
    counts = [np.bincount(level) for level in node]
    shapes = _shapes(node, counts)
    parents = []
    for level in range(tokens.shape[1]):
        parent = _parent(node, level)
        # Nodes that tie in shape are interchangeable: whichever comes first, the tree looks the same.
        order = np.lexsort((shapes[level + 1], -counts[level + 1], parent))
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        node[level + 1] = rank[node[level + 1]]
        counts[level + 1] = counts[level + 1][order]
        parents.append(parent[order])
    order = np.argsort(node[-1], kind="stable")
    return PrefixTree(order=order, node=node[:, order], counts=tuple(counts), parents=tuple(parents))


def _numbered_by_token(tokens: npt.NDArray[np.integer]) -> Ints:
    """[T + 1, N] nodes numbered by parent and token id, whatever the order of the samples."""
    num_samples, num_positions = tokens.shape
    node = np.zeros((num_positions + 1, num_samples), np.int64)
    for level in range(num_positions):
        token = np.unique(tokens[:, level], return_inverse=True)[1].ravel()
        node[level + 1] = np.unique(node[level] * num_samples + token, return_inverse=True)[1].ravel()
    return node


def _parent(node: Ints, level: int) -> Ints:
    parent = np.empty(int(node[level + 1].max()) + 1, np.int64)
    parent[node[level + 1]] = node[level]
    return parent


def _shapes(node: Ints, counts: list[Ints]) -> list[Words]:
    """For each level, a 64-bit digest of the subtree below each node: equal for equal shapes, children in any order.

    Two different shapes with one digest would cost the canonical order, not the validity of a test.
    """
    shapes = [_mixed(counts[-1].astype(np.uint64))]
    for level in range(len(counts) - 2, -1, -1):
        below = counts[level].astype(np.uint64)
        np.add.at(below, _parent(node, level), shapes[-1])
        shapes.append(_mixed(below))
    return shapes[::-1]


def _mixed(words: Words) -> Words:
    """The finaliser of splitmix64 (Steele, Lea & Flood 2014)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
