"""The questions of addition.yaml."""

from __future__ import annotations

import random
from typing import Any

from datasets import Dataset

_SEED = 2026
_NUM_EXAMPLES, _NUM_QUESTIONS = 2, 200


def addition(**_: Any) -> dict[str, Dataset]:
    """Splits `examples` and `test` of different sums a + b, a from 1 to 30 and b from 1 to 9; every call gives the
    same."""
    every = [{"a": a, "b": b, "sum": a + b} for a in range(1, 31) for b in range(1, 10)]
    rows = random.Random(_SEED).sample(every, _NUM_EXAMPLES + _NUM_QUESTIONS)
    return {"examples": Dataset.from_list(rows[:_NUM_EXAMPLES]), "test": Dataset.from_list(rows[_NUM_EXAMPLES:])}
