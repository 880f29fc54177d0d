"""The profile of a round on a GPU: every stage in a graph of its own, the round in the executor's."""

from __future__ import annotations

import pytest
import torch

from equivtest.bench.rounds import TIME_COLUMNS, _Clock, profile
from equivtest.decoder.executor import Executor
from equivtest.decoder.model import Model
from equivtest.decoder.rounds import DeviceRounds
from equivtest.errors import KernelUnavailable
from equivtest.kernels.registry import get_backend
from tests.decoder.scenarios import CONFIGS, build, random_prompts, requests_for
from tests.decoder.tiny_models import tiny_checkpoint

pytestmark = pytest.mark.gpu


def on_gpu(max_batch: int) -> tuple[Executor, DeviceRounds]:
    try:
        backend = get_backend("cuda")
    except KernelUnavailable as unavailable:
        pytest.skip(unavailable.reason)
    config, weights = tiny_checkpoint()
    model = Model(config, weights, backend, dtype=torch.bfloat16, device="cuda")
    executor = build(backend, "dflash", model=model, max_batch=max_batch, max_draft=3)
    rounds = DeviceRounds.of(model, backend, executor.drafter, "chain")
    assert rounds is not None
    return executor, rounds


def test_a_row_tells_every_stage_of_a_draft_length() -> None:
    executor, rounds = on_gpu(1)
    requests = requests_for(random_prompts(4), CONFIGS["topp95"], max_tokens=64)
    rows = profile(executor, rounds, requests, 1, (1, 3))
    assert [row["draft_len"] for row in rows] == [1, 3]
    for row in rows:
        assert all(row[name] > 0 for name in TIME_COLUMNS if name not in ("rest_ms", "gap_ms"))
        assert 0 <= row["accepted"] <= row["draft_len"] == len(row["by_slot"])
    assert sum(row["best"] for row in rows) == 1


@pytest.mark.parametrize("batch", [1, 3])
def test_a_stage_of_its_own_leaves_the_round_as_it_was(batch: int) -> None:
    """After the stages were timed, a round of the same state puts out what one before them does."""
    executor, rounds = on_gpu(batch)
    clock = _Clock(executor, rounds, requests_for(random_prompts(batch), CONFIGS["topp95"], max_tokens=64), 3)
    with torch.inference_mode():
        before = clock._loaded(3).run().clone()
        times = clock.round_ms(3)
        assert torch.equal(clock._loaded(3).run(), before)
    assert times.keys() == {"draft_ms", "verify_ms", "accept_ms", "round_ms"}
