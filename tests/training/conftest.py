"""One small drafter in training for the whole room: text, target and a network that has learned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from equivtest.decoder.drafters.dflash_network import DFlashConfig
from equivtest.decoder.hub import resolve_model
from equivtest.decoder.weights import Checkpoint, load_checkpoint
from equivtest.engines.base import EngineOptions
from equivtest.engines.decoder import DecoderEngine
from equivtest.training.chat_frame import ChatFrame
from equivtest.training.lessons import Lessons
from equivtest.training.options import NetworkOptions, TextOptions
from equivtest.training.target import Target
from equivtest.training.text import Texts, sample_texts
from equivtest.training.train import network_config
from equivtest.training.watch import Silent

TEXT = TextOptions(num_texts=128, text_length=96, question_length=40, num_held_out=72, shard_texts=64)
ENGINE = EngineOptions(model="tiny", dtype="float32", kernels="cpp", drafter="ngram", threads=1)


@pytest.fixture(scope="session")
def checkpoint() -> Checkpoint:
    return load_checkpoint(resolve_model("tiny"))


@pytest.fixture(scope="session")
def engine(checkpoint: Checkpoint) -> DecoderEngine:
    return DecoderEngine.open(ENGINE, load=lambda: checkpoint)


@pytest.fixture(scope="session")
def folder(engine: DecoderEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the texts of TEXT."""
    path = tmp_path_factory.mktemp("text")
    sample_texts(engine, TEXT, path, Silent())
    return path


@pytest.fixture(scope="session")
def texts(engine: DecoderEngine, folder: Path) -> Texts:
    return sample_texts(engine, TEXT, folder, Silent())


@pytest.fixture(scope="session")
def config(checkpoint: Checkpoint, engine: DecoderEngine) -> DFlashConfig:
    return network_config(checkpoint, ChatFrame.of(engine), NetworkOptions(num_layers=1, block_size=4))


@pytest.fixture(scope="session")
def target(engine: DecoderEngine, checkpoint: Checkpoint, config: DFlashConfig) -> Target:
    return Target.of(engine.model, checkpoint, config.target_layer_ids)


@pytest.fixture(scope="session")
def lessons(texts: Texts, target: Target, config: DFlashConfig) -> Lessons:
    return Lessons(texts, target, config.num_drafts, Silent())


@pytest.fixture(autouse=True)
def _leaves_torch_as_it_was() -> None:
    torch.set_num_threads(1)
