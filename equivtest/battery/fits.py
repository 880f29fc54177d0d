"""Which known mistake explains what was seen.

A mistake is named only where it fits: what it makes impossible did not happen, and the tests that the right rule failed
do not fail under it. Where several fit, the one that makes what was seen the most likely is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

FITS = 1e-4
"""p-value above which a wrong rule fits."""
TELLING_KINDS = ("random", "peaked", "filtered")
"""Kinds of laws on which mistakes look different from each other."""


def most_likely(found: Mapping[str, Sequence[float | None]]) -> str | None:
    """The name with the largest log-likelihood, summed over cases, of those that fit in every one (are not None)."""
    likely = {name: sum(fit for fit in fits if fit is not None) for name, fits in found.items() if None not in fits}
    return max(likely, key=lambda name: likely[name]) if likely else None
