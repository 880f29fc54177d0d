"""The commands, from a target's name to a drafter in a folder and its card."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from equivtest.cli.main import cli
from equivtest.decoder.drafters.dflash_network import DFlashConfig, DFlashNetwork
from equivtest.decoder.weights import Checkpoint
from equivtest.engines.decoder import DecoderEngine
from equivtest.errors import InvalidSetting, RunExists, RunMismatch, RunNotFound, UnsupportedModel
from equivtest.training.card import card as card_text
from equivtest.training.chat_frame import ChatFrame
from equivtest.training.options import LoopOptions, NetworkOptions, TextOptions
from equivtest.training.train import network_config, new_network, spread_layers, start_from, unused_token

SMALL = (
    "--model", "tiny", "--dtype", "float32", "--threads", "1", "--texts", "24", "--text-length", "64", "--steps", "6",
    "--batch-texts", "2", "--anchors", "2", "--layers", "1", "--block-size", "4", "--max-tokens", "12",
    "--answers", "1", "--held-out", "8",
)  # fmt: skip


def equivtest(*arguments: object) -> int:
    """In this process; errors come as what they are."""
    code: int = cli.main([str(argument) for argument in arguments], standalone_mode=False)
    return code


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("drafter") / "mine"
    command = [sys.executable, "-m", "equivtest", "drafter", "train", "--out", str(folder), *SMALL]
    return folder, subprocess.run(command, capture_output=True, text=True, check=False)


def test_one_command_leaves_a_drafter_and_its_card(made: tuple) -> None:
    folder, ended = made
    assert ended.returncode == 0, ended.stderr
    assert {file.name for file in folder.iterdir()} == {
        "card.md", "config.json", "evaluation.json", "held_out.json", "loss.jsonl", "loss.png", "model.safetensors",
        "training.json", "work",
    }  # fmt: skip
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert DFlashNetwork.load(folder).config == DFlashConfig.from_json(folder)
    assert "| held_out | topk50 |" in ended.stdout
    assert "step 6" in ended.stderr


@pytest.fixture
def trained(config: DFlashConfig, checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A drafter without a Markov head whose weights are all different from those of a fresh one."""
    network = new_network(dataclasses.replace(config, markov_head=False), checkpoint, 1)
    network.save(tmp_path / "trained", torch.float32)
    return tmp_path / "trained"


@pytest.mark.parametrize("grown", [{}, {"num_layers": 3}, {"num_layers": 2, "markov_head": True}])
def test_a_drafter_that_starts_from_another_drafts_the_same(
    grown: dict, trained: Path, config: DFlashConfig, checkpoint: Checkpoint
) -> None:
    """The twin: without the weights of that, or with layers that do not begin as none, it does not."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1, 9, config.feature_size, generator=generator)
    fed = torch.randn(1, 2, config.block_size, config.hidden_size, generator=generator)
    lens, head = torch.tensor([[3, 9]]), torch.randn(50, config.hidden_size, generator=generator)
    embedding = torch.randn(50, config.hidden_size, generator=generator)

    def drafts(network: DFlashNetwork) -> torch.Tensor:
        hidden = network(features, fed, lens)
        return network.behind(hidden, embedding[:1].expand_as(hidden)) @ head.T

    network = new_network(dataclasses.replace(config, **{"markov_head": False, **grown}), checkpoint, 2)
    fresh = drafts(network)
    start_from(network, trained)
    expected = drafts(DFlashNetwork.load(trained))
    torch.testing.assert_close(drafts(network), expected)
    assert (fresh - expected).abs().max() > 0.1
    if "num_layers" in grown:
        torch.nn.init.normal_(network.layers[-1].mlp.down_proj.weight)
        assert (drafts(network) - expected).abs().max() > 0.1
    assert not any(weight.requires_grad is False for weight in network.parameters())


@pytest.mark.parametrize("other", [{"block_size": 5}, {"num_layers": 0}])
def test_a_drafter_of_another_shape_is_no_start(
    other: dict, trained: Path, config: DFlashConfig, checkpoint: Checkpoint
) -> None:
    """And one of more layers is none for one of fewer."""
    shape = dataclasses.replace(config, **other) if "num_layers" not in other else config
    if "num_layers" in other:
        grown = new_network(dataclasses.replace(config, num_layers=2), checkpoint, 1)
        grown.save(trained.with_name("deeper"), torch.float32)
        trained = trained.with_name("deeper")
    with pytest.raises(UnsupportedModel, match="training asks for"):
        start_from(new_network(shape, checkpoint, 2), trained)


def test_the_card_says_how_it_was_made_and_how_well_it_drafts(made: tuple) -> None:
    folder, _ = made
    card = (folder / "card.md").read_text("utf-8")
    record, evaluation = (json.loads((folder / f"{name}.json").read_text()) for name in ("training", "evaluation"))
    for fact in (
        record["command"], record["texts"]["sha256"], record["target"]["model_sha256"], record["code"]["source_sha256"],
        "6 steps of 2 texts with 2 blocks", "Seeds**: text 0, weights and draws 0", record["target"]["torch"],
        f"{record['texts']['num_texts']} texts of 64 tokens", "topp95", "held out",
    ):  # fmt: skip
        assert fact in card
    assert record["options"]["loop"]["gamma"] == 3.0
    assert record["steps"] == record["last"]["step"] == 6
    judged = ["greedy likeliest", "topp95 likeliest", "topp95 drawn", "topk50 likeliest", "topk50 drawn"]
    assert [f"{row['config']} {row['drafts']}" for row in evaluation["rows"]] == judged * 2
    for row in evaluation["rows"]:
        assert f"| {row['prompts']} | {row['config']} | {row['drafts']} | {row['num_texts']} |" in card
        assert len(row["by_slot"]) == 3
        assert row["decoded"] is not None
    assert not re.search(r"\{|None|nan", card)
    assert "not kept" not in card
    record["options"]["loop"]["kept_share"] = 0.25
    assert "a share of 0.25 of the loss is the drafts not kept" in card_text(record, evaluation)


def test_a_folder_that_holds_a_run_is_not_trained_over(made: tuple) -> None:
    with pytest.raises(RunExists, match="--resume"):
        equivtest("drafter", "train", "--out", made[0], *SMALL)


def test_a_finished_run_resumes_to_the_same_weights_and_other_options_do_not(made: tuple) -> None:
    folder, _ = made
    before = (folder / "model.safetensors").read_bytes()
    assert equivtest("drafter", "train", "--out", folder, *SMALL, "--resume", "--no-evaluation") == 0
    assert (folder / "model.safetensors").read_bytes() == before
    with pytest.raises(RunMismatch, match="gamma"):
        equivtest("drafter", "train", "--out", folder, *SMALL, "--resume", "--gamma", "5")


def test_a_run_that_is_not_there_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound, match="leave out --resume"):
        equivtest("drafter", "train", "--out", tmp_path / "none", *SMALL, "--resume")


def test_a_drafter_is_evaluated_again_by_its_folder_alone(made: tuple, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = made
    before = json.loads((folder / "evaluation.json").read_text())["rows"]
    options = ("--model", "tiny", "--dtype", "float32", "--threads", "1", "--max-tokens", "12", "--answers", "1")
    assert equivtest("drafter", "evaluate", folder, *options, "--json") == 0
    assert json.loads(capsys.readouterr().out) == before


def test_another_targets_drafter_is_refused(made: tuple) -> None:
    with pytest.raises(UnsupportedModel, match="another target"):
        equivtest("drafter", "evaluate", made[0], "--model", "tiny-draft", "--dtype", "float32")


def test_weights_are_bfloat16(made: tuple) -> None:
    assert {weight.dtype for weight in load_file(made[0] / "model.safetensors").values()} == {torch.bfloat16}


def test_layers_are_spread_from_the_second_to_the_last() -> None:
    assert spread_layers(30) == (1, 8, 15, 22, 29)
    assert spread_layers(4) == (1, 2, 3)
    assert spread_layers(1) == (0,)


def test_the_mask_is_a_token_that_no_text_holds(checkpoint: Checkpoint, engine: DecoderEngine) -> None:
    frame = ChatFrame.of(engine)
    assert engine.token_text(unused_token(checkpoint, frame)) == "<|endoftext|>"
    everything = ChatFrame(opening=(*frame.opening, 0), closing=frame.closing)
    with pytest.raises(InvalidSetting, match="mask_token_id"):
        unused_token(checkpoint, everything)
    named = network_config(checkpoint, everything, NetworkOptions(mask_token_id=9))
    assert named.mask_token_id == 9


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (TextOptions, {"num_texts": 0}),
        (TextOptions, {"prompts_share": 1.5}),
        (TextOptions, {"minutes": 0}),
        (NetworkOptions, {"block_size": 1}),
        (LoopOptions, {"steps": None}),
        (LoopOptions, {"rate": 0}),
        (LoopOptions, {"soft_share": 2}),
    ],
)
def test_options_that_cannot_be_are_refused(kind: type, values: dict) -> None:
    with pytest.raises(InvalidSetting):
        kind(**values)
