"""Independent parts of an analysis, a thread each: nearly all their time is spent in numpy, outside the interpreter's
lock. Each has a core to itself: products of matrices that asked for all cores at once would wait for one another, and
took three times as long on 16 cores."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from threadpoolctl import threadpool_limits

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """The function's results in the order of the items, and its first error in that order, whichever thread was first.

    The function shares nothing with its other calls but what they only read.
    """
    listed = list(items)
    if len(listed) < 2:
        return [function(item) for item in listed]
    with threadpool_limits(1, "blas"), ThreadPoolExecutor(len(listed)) as pool:
        return list(pool.map(function, listed))
