"""The loop: what it minimises falls, and a run that was interrupted ends in the same weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from equivtest.decoder.drafters.dflash_network import DFlashConfig, DFlashNetwork
from equivtest.decoder.weights import Checkpoint
from equivtest.errors import RunMismatch, UnsupportedModel
from equivtest.kernels.contract import RowParams
from equivtest.kernels.registry import get_backend
from equivtest.protocol.configs import CONFIGS
from equivtest.training import loop as module
from equivtest.training.lessons import Lessons
from equivtest.training.loop import Loop, schedule
from equivtest.training.options import LoopOptions
from equivtest.training.target import Target
from equivtest.training.train import new_network
from equivtest.training.watch import Silent

OPTIONS = LoopOptions(steps=12, batch_texts=4, num_anchors=4, report_steps=3, checkpoint_s=0.0)
MATERIAL = {"texts": "these"}


class Stopped(Exception):
    """Stands for whatever kills a run."""


@pytest.fixture
def make(checkpoint: Checkpoint, target: Target, lessons: Lessons, config: DFlashConfig):
    def made(options: LoopOptions = OPTIONS) -> Loop:
        return Loop(new_network(config, checkpoint, options.seed), target, lessons, options)

    return made


def weights(network: DFlashNetwork) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in network.parameters()])


def test_the_loss_falls(make) -> None:
    loop = make(dataclasses.replace(OPTIONS, steps=60, report_steps=20))
    loop.run(lambda: None, Silent())
    assert [entry.step for entry in loop.log] == [20, 40, 60]
    losses = [entry.loss for entry in loop.log]
    assert losses[2] < losses[1] < losses[0] - 1
    assert loop.log[2].rate < loop.log[0].rate < OPTIONS.rate


def test_the_law_of_kept_drafts_is_what_a_request_draws_from(make) -> None:
    """T .8 top_p .95 of the house, of the labels' tokens: the reference backend says what that is."""
    loop = make()
    blocks = loop._lessons.draw(4, 4, torch.Generator().manual_seed(0))
    kept = module.kept_law(blocks, 0.5)
    logits = blocks.laws.probs.float().clamp_min(1e-30).log().flatten(0, 2)
    rows = RowParams.of([CONFIGS["topp95"]] * len(logits), logits.device)
    law = get_backend("reference").verify_probs(logits, rows, out=torch.empty_like(logits))
    torch.testing.assert_close(kept.probs.flatten(0, 1), law, atol=1e-6, rtol=1e-5)
    assert (kept.probs == 0).any(), "and the nucleus leaves something out"
    assert kept.temperature == 0.8


def test_a_drafter_is_taught_to_keep_more_of_what_it_draws(make) -> None:
    """By that part of the loss alone, from where cross entropy has brought it; the labels of another place do not."""
    begun = make(dataclasses.replace(OPTIONS, steps=60, report_steps=20))
    begun.run(lambda: None, Silent())
    blocks = begun._lessons.draw(16, 8, torch.Generator().manual_seed(1))
    rates = []
    for fault in (False, True):
        loop = make(dataclasses.replace(OPTIONS, steps=60, report_steps=20, kept_share=1.0, rate=1e-3, seed=5))
        loop.network.load_state_dict(begun.network.state_dict())
        if fault:
            draw = loop._lessons.draw

            def elsewhere(*args, draw=draw):
                made = draw(*args)
                return made._replace(laws=type(made.laws)(*(column.roll(1, dims=2) for column in made.laws)))

            loop._lessons = SimpleNamespace(draw=elsewhere)
        before = loop._loss(blocks)[2].item()
        loop.run(lambda: None, Silent())
        rates.append(before - loop._loss(blocks)[2].item())
    assert rates[0] > 0.02
    assert rates[1] < 0


def test_an_interrupted_run_ends_in_the_weights_of_one_that_was_not(make, tmp_path: Path) -> None:
    whole = make()
    whole.run(lambda: None, Silent())
    begun, path = make(), tmp_path / "checkpoint.pt"

    def stop() -> None:
        begun.save(path, MATERIAL)
        if begun.step == 6:
            raise Stopped

    with pytest.raises(Stopped):
        begun.run(stop, Silent())
    resumed = make()
    resumed.load(path, MATERIAL)
    assert resumed.step == 6
    resumed.run(lambda: None, Silent())
    assert torch.equal(weights(resumed.network), weights(whole.network))
    assert [(e.step, e.loss, e.accuracy) for e in resumed.log] == [(e.step, e.loss, e.accuracy) for e in whole.log]


@pytest.mark.parametrize("lost", ["generator", "optimizer"])
def test_a_checkpoint_without_its_coins_or_moments_would_end_elsewhere(make, tmp_path: Path, lost: str) -> None:
    """The planted fault: what the test above would not see if it could not fail."""
    whole, begun, path = make(), make(), tmp_path / "checkpoint.pt"
    whole.run(lambda: None, Silent())

    def stop() -> None:
        if begun.step == 6:
            begun.save(path, MATERIAL)
            raise Stopped

    with pytest.raises(Stopped):
        begun.run(stop, Silent())
    state = torch.load(path, weights_only=True)
    fresh = make()
    fresh.save(path, MATERIAL)
    state[lost] = torch.load(path, weights_only=True)[lost]
    torch.save(state, path)
    fresh.load(path, MATERIAL)
    fresh.run(lambda: None, Silent())
    assert not torch.equal(weights(fresh.network), weights(whole.network))


def test_a_checkpoint_of_something_else_is_refused(make, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    make().save(path, MATERIAL)
    with pytest.raises(RunMismatch, match="texts"):
        make().load(path, {"texts": "those"})
    with pytest.raises(RunMismatch, match="gamma"):
        make(dataclasses.replace(OPTIONS, gamma=5.0)).load(path, MATERIAL)
    path.write_bytes(b"nothing")
    with pytest.raises(UnsupportedModel, match="not a checkpoint"):
        make().load(path, MATERIAL)


def test_seeds_decide_weights_and_draws(make) -> None:
    ends = []
    for seed in (0, 0, 1):
        loop = make(dataclasses.replace(OPTIONS, steps=2, report_steps=1, seed=seed))
        loop.run(lambda: None, Silent())
        ends.append(weights(loop.network))
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_training_by_time_ends_in_time_with_its_schedule_run_through(make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that jumps by one second at every look: a minute is over after at most sixty steps."""
    now = iter(range(10_000))
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(now)))
    loop = make(dataclasses.replace(OPTIONS, steps=None, minutes=1.0, report_steps=4))
    loop.run(lambda: None, Silent())
    assert 20 < loop.step < 60
    assert loop.seconds >= 60
    assert loop.log[-1].step == loop.step
    assert loop.log[-1].rate < 0.05 * OPTIONS.rate


def test_the_rate_rises_and_then_falls_to_zero() -> None:
    assert [schedule(progress, 0.1) for progress in (0.0, 0.05, 0.1)] == [0.0, 0.5, 1.0]
    assert schedule(0.55, 0.1) == pytest.approx(0.5)
    assert schedule(1.0, 0.1) == pytest.approx(0.0)


def test_the_target_is_left_as_it_was(make, target: Target) -> None:
    before = target.head.clone(), target.embed(torch.arange(20)).clone()
    make(dataclasses.replace(OPTIONS, steps=3)).run(lambda: None, Silent())
    assert torch.equal(target.head, before[0])
    assert torch.equal(target.embed(torch.arange(20)), before[1])
