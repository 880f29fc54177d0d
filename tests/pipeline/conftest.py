"""A Hugging Face folder small enough that a whole smoke run takes seconds."""

from pathlib import Path

import pytest

from tests.decoder.hf_folder import write_folder
from tests.decoder.tiny_models import tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of four layers."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    write_folder(folder, *tiny_checkpoint("llama", seed=3, vocab_size=320, layers=4))
    return folder
