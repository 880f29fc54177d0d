"""A drafter learns on a GPU: in bfloat16 products, from features that stay there, and drafts as its evaluation says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from equivtest.cli.main import cli
from equivtest.training.loss import head_loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no usable CUDA device"),
]

OPTIONS = (
    "--model", "tiny", "--device", "cuda", "--texts", "1024", "--text-length", "128", "--steps", "600", "--batch-texts",
    "16", "--anchors", "16", "--layers", "2", "--held-out", "64", "--max-tokens", "64", "--answers", "8",
)  # fmt: skip


def test_a_drafter_is_trained_and_judged_on_the_gpu(tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    assert cli.main(["drafter", "train", "--out", str(folder), *OPTIONS], standalone_mode=False) == 0
    log = [json.loads(line) for line in (folder / "loss.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] < log[0]["loss"] - 1
    rows = json.loads((folder / "evaluation.json").read_text())["rows"]
    held_out = [row for row in rows if row["prompts"] == "held_out"]
    assert all(row["accepted"] > 0.1 for row in held_out)
    # Texts of plain and of speculative decoding are independent: five standard errors are one run in a million.
    for row in rows:
        assert abs(row["decoded"] - row["accepted"]) < 5 * 2**0.5 * row["standard_error"] + 0.05
    before = (folder / "model.safetensors").read_bytes()
    again = ["drafter", "train", "--out", str(folder), *OPTIONS, "--resume", "--no-evaluation"]
    assert cli.main(again, standalone_mode=False) == 0
    assert (folder / "model.safetensors").read_bytes() == before


def test_the_loss_of_the_head_is_that_of_float32_up_to_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(1000, 6, 64, generator=generator), torch.randn(49_152, 64, generator=generator)
    ids = torch.randint(49_152, (1000, 6, 33), generator=generator)
    probs = torch.rand(1000, 6, 33, generator=generator).softmax(dim=-1)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        rows = hidden.cuda().requires_grad_()
        weights = torch.full((6,), 1 / 6000).cuda()
        loss = head_loss(rows, head.cuda().to(dtype), ids.cuda(), probs.cuda(), weights, 0.5)
        loss.total.backward()
        assert rows.grad is not None
        found.append((loss.losses.detach(), rows.grad))
    assert float((found[1][1] - found[0][1]).norm() / found[0][1].norm()) < 0.03
    torch.testing.assert_close(found[1][0], found[0][0], atol=0.2, rtol=0.02)
