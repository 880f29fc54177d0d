"""What one run generates: which samples, in which batches, from which random streams."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from equivtest.errors import InvalidSetting
from equivtest.protocol.budgets import Budget
from equivtest.protocol.configs import CONFIGS
from equivtest.protocol.prompts import Prompt, PromptSet
from equivtest.records import Arm, ShardKey
from equivtest.rng import stream_key

BATCH_SAMPLES = 256
"""Samples generated together. Part of the protocol: in bfloat16 the batch shape moves logits by rounding, so a resumed
run must cut its work into the same batches to give the same bytes."""

CONFIRMATION_FACTOR = 4
"""Stage 2 draws this many times the seeds of stage 1, all fresh."""

INFLATED_ACCEPTANCE = "inflated_acceptance"
"""The fault that a run plants in a decoder unless it is asked for another."""

LIKELIEST_TOKEN = "likeliest_token"
"""What is planted for engines that no fault can be put into: a copy of arm on in which each token gives way to the most
frequent one of its cell with probability epsilon. What follows it was not written after it, so that such texts are
compared token by token and as a whole, and never held against a law."""

_FILTERS = ("temperature", "top_k", "top_p", "min_p")

Batch = tuple[ShardKey, ...]
"""Shards of one arm and config that are generated together, at most BATCH_SAMPLES samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """The whole of a run, before anything is generated."""

    prompts: tuple[Prompt, ...]
    prompt_set: str
    prompt_set_sha256: str
    configs: tuple[str, ...]
    budget: str
    num_positions: int
    num_seeds: int
    epsilon: float
    planted: str = INFLATED_ACCEPTANCE
    """Name of the fault of the biased arm; `epsilon` is the size of this one and of `LIKELIEST_TOKEN`."""
    run_seed: int = 0
    sequential: bool = False
    """Collect in rounds of a few seeds of every arm, so that collecting can stop as soon as the answer is known."""

    def __post_init__(self) -> None:
        if not self.configs:
            raise InvalidSetting("config", self.configs, "name at least one")
        if not self.prompts:
            raise InvalidSetting("prompts", self.prompt_set, "the set is empty")
        if self.num_seeds < 2:
            raise InvalidSetting("seeds", self.num_seeds, "needs at least 2 samples an arm")
        if self.num_positions < 1:
            raise InvalidSetting("positions", self.num_positions, "must be at least 1")
        if not 0 < self.epsilon <= 1:
            raise InvalidSetting("epsilon", self.epsilon, "must be above 0 and at most 1")

    @classmethod
    def build(
        cls,
        prompt_set: PromptSet,
        configs: tuple[str, ...],
        budget: Budget,
        *,
        epsilon: float | None = None,
        planted: str = INFLATED_ACCEPTANCE,
        run_seed: int = 0,
        sequential: bool = False,
    ) -> Protocol:
        """The protocol of a budget; `epsilon` None takes the budget's own."""
        return cls(
            prompts=prompt_set.prompts[: budget.num_prompts],
            prompt_set=prompt_set.name,
            prompt_set_sha256=prompt_set.sha256,
            configs=configs,
            budget=budget.name,
            num_positions=budget.num_positions,
            num_seeds=budget.num_seeds,
            epsilon=budget.epsilon if epsilon is None else epsilon,
            planted=planted,
            run_seed=run_seed,
            sequential=sequential,
        )

    def batches(self) -> Iterator[Batch]:
        """Stage 1: every arm of every config, cut into batches that do not depend on what is already on disk."""
        for _, batches in self.rounds():
            yield from batches

    def rounds(self) -> Iterator[tuple[int, tuple[Batch, ...]]]:
        """Stage 1 in rounds: how many seeds are there after each, and its batches. One round unless sequential."""
        size = max(1, BATCH_SAMPLES // len(self.prompts)) if self.sequential else self.num_seeds
        for first in range(0, self.num_seeds, size):
            stop = min(first + size, self.num_seeds)
            yield (
                stop,
                tuple(batch for config in self.configs for arm in Arm for batch in self._arm(arm, config, first, stop)),
            )

    def _arm(self, arm: Arm, config: str, first: int, stop: int) -> Iterator[Batch]:
        return _pack(
            ShardKey(arm=arm, config=config, prompt_id=prompt.id, seed_start=start, seed_stop=end)
            for prompt in self.prompts
            for start, end in _blocks(first, stop)
        )

    def stopped_at(self, num_seeds: int) -> Protocol:
        """The protocol of a run that stopped after so many seeds."""
        return replace(self, num_seeds=num_seeds)

    @property
    def planted_words(self) -> str:
        """The planted fault for people."""
        sized = {
            INFLATED_ACCEPTANCE: f"acceptance bias of {self.epsilon:.2f}",
            LIKELIEST_TOKEN: likeliest_token_words(self.epsilon),
        }
        return sized.get(self.planted, self.planted)

    @property
    def planted_parameters(self) -> dict[str, float]:
        return {"epsilon": self.epsilon} if self.planted == INFLATED_ACCEPTANCE else {}

    @property
    def law_arms(self) -> tuple[Arm, ...]:
        """The arms whose texts a decoder wrote, and that can be held against a law."""
        return tuple(arm for arm in Arm if arm is not Arm.BIASED or self.planted != LIKELIEST_TOKEN)

    @property
    def confirmation_seeds(self) -> tuple[int, int]:
        """First seed and one past the last of stage 2."""
        return self.num_seeds, self.num_seeds * (1 + CONFIRMATION_FACTOR)

    def confirmation_batches(self, arms: tuple[Arm, ...], strata: frozenset[tuple[str, str]]) -> Iterator[Batch]:
        """Stage 2: fresh seeds of some arms for the flagged (config, prompt_id) pairs, one pair a batch sequence."""
        for config, prompt_id in sorted(strata):
            for arm in arms:
                yield from _pack(
                    ShardKey(arm=arm, config=config, prompt_id=prompt_id, seed_start=start, seed_stop=stop)
                    for start, stop in _blocks(*self.confirmation_seeds)
                )

    def stream_key(self, arm: str, config: str, prompt_id: str, seed: int) -> int:
        """The key of one sample's random streams; arms never share one."""
        return stream_key(self.run_seed, arm, config, prompt_id, seed)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe description, also what the fingerprint covers."""
        return {
            "prompt_set": self.prompt_set,
            "prompt_set_sha256": self.prompt_set_sha256,
            "prompts": [{"id": prompt.id, "messages": prompt.conversation} for prompt in self.prompts],
            "configs": {
                name: {
                    field.name: getattr(CONFIGS[name], field.name)
                    for field in fields(CONFIGS[name])
                    # What came later is named where it is used: the fingerprints of older runs still hold.
                    if field.name in _FILTERS or getattr(CONFIGS[name], field.name) != field.default
                }
                for name in self.configs
            },
            "budget": self.budget,
            "num_positions": self.num_positions,
            "num_seeds": self.num_seeds,
            "epsilon": self.epsilon,
            "planted": self.planted,
            "run_seed": self.run_seed,
            "batch_samples": BATCH_SAMPLES,
            "sequential": self.sequential,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Protocol:
        """The protocol that a manifest describes."""
        return cls(
            prompts=tuple(
                Prompt(id=prompt["id"], messages=tuple((m["role"], m["content"]) for m in prompt["messages"]))
                for prompt in data["prompts"]
            ),
            configs=tuple(data["configs"]),
            **{
                field: data[field]
                for field in (
                    "prompt_set", "prompt_set_sha256", "budget", "num_positions", "num_seeds", "epsilon", "planted",
                    "run_seed", "sequential",
                )
            },
        )  # fmt: skip


def fingerprint(protocol: Protocol, subject: Mapping[str, Any]) -> str:
    """Names a protocol and the engine it ran on: two runs with one fingerprint asked the same question."""
    question = {"protocol": protocol.to_dict(), "configs": list(protocol.configs), "subject": subject}
    content = json.dumps(question, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def likeliest_token_words(epsilon: float) -> str:
    """`LIKELIEST_TOKEN` for people."""
    return f"bias of {epsilon:.2f} towards the likeliest token"


def _blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    for first in range(start, stop, BATCH_SAMPLES):
        yield first, min(first + BATCH_SAMPLES, stop)


def _pack(shards: Iterator[ShardKey]) -> Iterator[Batch]:
    batch: list[ShardKey] = []
    for shard in shards:
        if batch and sum(s.num_seeds for s in batch) + shard.num_seeds > BATCH_SAMPLES:
            yield tuple(batch)
            batch = []
        batch.append(shard)
    if batch:
        yield tuple(batch)
