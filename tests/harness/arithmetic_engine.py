"""Answers sums: rightly with a chance that is lower, by `drop`, on the speculative path."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from equivtest.engines.base import Capabilities
from equivtest.records import SPEC, Generation, Origin, Request
from equivtest.rng import Purpose, uniforms

RIGHT = 0.7


class ArithmeticEngine:
    capabilities = Capabilities()

    def __init__(self, drop: float = 0.0) -> None:
        self.drop = drop
        self.asked: list[Request] = []
        self.conversations: list[Sequence[dict[str, str]]] = []

    def encode_prompt(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        self.conversations.append(messages)
        return tuple(messages[-1]["content"].encode())

    def text(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode()

    def generate(self, requests: Sequence[Request], *, speculative: bool, **_: Any) -> list[Generation]:
        self.asked += requests
        coins = uniforms(np.array([one.stream_key for one in requests]), np.zeros(1, np.int64), Purpose.PLAIN)
        chance = RIGHT - self.drop * speculative
        return [_answer(one, right=bool(coin < chance)) for one, coin in zip(requests, coins, strict=True)]

    def describe(self) -> dict[str, Any]:
        return {"engine": "arithmetic", "model": "arithmetic"}

    def notes(self) -> dict[str, str]:
        return {}

    def close(self) -> None:
        pass


def _answer(request: Request, *, right: bool) -> Generation:
    a, b = (int(word) for word in bytes(request.prompt_token_ids).decode().rstrip("?").split() if word.isdigit())
    ids = np.frombuffer(f"{a} + {b} = {a + b + (not right)}\nWhat is 1 + 1?".encode(), np.uint8).astype(np.int32)
    num = len(ids)
    blank = np.zeros(num, np.int32)
    return Generation(
        token_ids=ids,
        origins=(Origin.UNKNOWN,) * num,
        slots=np.full(num, -1, np.int8),
        draft_token_ids=blank - 1,
        steps=blank,
        batch_rows=blank,
        num_drafts=blank.astype(np.int8),
        route=SPEC,
    )
