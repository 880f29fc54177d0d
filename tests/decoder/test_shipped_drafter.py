"""The block drafters that ship: which model they are of, when one is taken, and that they draft.

What is asked of the weights holds for any that were trained for the model: acceptance far from nothing.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from equivtest.decoder.drafters.dflash import DFlashCheckpoint, DFlashDrafter
from equivtest.decoder.executor import Executor
from equivtest.decoder.hub import BLOCK_DRAFTERS, BUILT_IN, SHIPPED, resolve_model
from equivtest.decoder.model import Model
from equivtest.decoder.weights import Checkpoint
from equivtest.engines.base import EngineOptions
from equivtest.engines.decoder import DecoderEngine
from equivtest.errors import InvalidSetting, ModelUnavailable
from equivtest.kernels.registry import get_backend
from equivtest.protocol.prompts import load_prompt_set
from equivtest.records import Generation, Origin, Request, SamplingParams

NAME, TARGET = "smollm2-dflash", "smollm2-135m"
FOLDER = SHIPPED[NAME]
LAWS = (SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, top_p=0.95))


def test_no_file_of_a_shipped_folder_is_larger_than_16_mb() -> None:
    sizes = {file: file.stat().st_size for folder in SHIPPED.values() for file in folder.rglob("*") if file.is_file()}
    assert sum(file.suffix == ".safetensors" for file in sizes) >= len(SHIPPED)
    assert max(sizes.values()) <= 16_000_000


def test_its_card_names_the_built_in_model_and_no_other() -> None:
    cards = [card.read_text("utf-8") for card in FOLDER.glob("*.md")]
    assert any(f"`{BLOCK_DRAFTERS[NAME]}`, sha256 `{BUILT_IN[TARGET].sha256}`" in card for card in cards)


@pytest.fixture(scope="module")
def target(smollm2_checkpoint: Checkpoint) -> Model:
    return Model(smollm2_checkpoint.config, smollm2_checkpoint.weights, get_backend("cpp"))


@pytest.fixture(scope="module")
def prompts(smollm2_checkpoint: Checkpoint) -> list[tuple[int, ...]]:
    conversations = [prompt.conversation for prompt in load_prompt_set("default").prompts]
    return [tuple(smollm2_checkpoint.tokenizer.encode_chat(one)) for one in conversations]


def accepted_a_round(checkpoint: DFlashCheckpoint, target: Model, prompts: list[tuple[int, ...]]) -> list[float]:
    """By law, in a few tokens behind each prompt."""
    executor = Executor(target, target.backend, DFlashDrafter(checkpoint, target), max_batch=16, max_draft=4)
    requests = [
        Request(prompt_token_ids=prompt, params=law, stream_key=key, max_tokens=12)
        for law in LAWS
        for key, prompt in enumerate(prompts)
    ]
    made = executor.generate(requests, speculative=True)
    return [_accepted_a_round(made[start : start + len(prompts)]) for start in (0, len(prompts))]


def _accepted_a_round(generations: list[Generation]) -> float:
    origins = [origin for generation in generations for origin in generation.origins]
    accepted = sum(origin is Origin.ACCEPTED for origin in origins)
    return accepted / (len(origins) - accepted)  # every round ends with one token that is no accepted draft


def test_its_drafts_are_accepted(target: Model, prompts: list[tuple[int, ...]]) -> None:
    assert min(accepted_a_round(DFlashCheckpoint.load(FOLDER), target, prompts)) > 0.3


def test_drafts_of_its_weights_in_disorder_are_not(target: Model, prompts: list[tuple[int, ...]]) -> None:
    trained = DFlashCheckpoint.load(FOLDER)
    order = torch.Generator().manual_seed(0)
    weights = {
        name: weight.flatten()[torch.randperm(weight.numel(), generator=order)].view(weight.shape)
        for name, weight in trained.weights.items()
    }
    assert max(accepted_a_round(trained._replace(weights=weights), target, prompts[:4])) < 0.05


def open_unfetched(monkeypatch: pytest.MonkeyPatch, **options: object) -> list[str]:
    """What is said before the model is looked for, which is not to be had."""

    def nowhere(name: str | Path, **_: object) -> Path:
        raise ModelUnavailable(str(name), "it is not here", "")

    monkeypatch.setattr("equivtest.engines.decoder.resolve_model", nowhere)
    heard: list[str] = []
    with pytest.raises(ModelUnavailable, match=str(options["model"])):
        DecoderEngine.open(EngineOptions(kernels="cpp", **options), on_message=heard.append)  # type: ignore[arg-type]
    return heard


@pytest.mark.parametrize(("model", "drafter"), [(TARGET, "dflash"), ("tiny", "early_exit"), ("x.gguf", "early_exit")])
def test_auto_is_the_drafter_that_ships_for_the_model(
    model: str, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert open_unfetched(monkeypatch, model=model) == [f"drafter: {drafter}"]
    assert open_unfetched(monkeypatch, model=model, drafter="ngram") == []


def test_a_path_that_is_called_like_the_model_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / TARGET).mkdir()
    assert open_unfetched(monkeypatch, model=TARGET) == ["drafter: early_exit"]
    with pytest.raises(InvalidSetting, match="needs the folder of a block drafter"):
        DecoderEngine.open(EngineOptions(model=TARGET, kernels="cpp", drafter="dflash"))


def test_what_goes_with_another_drafter_is_refused_once_auto_has_chosen() -> None:
    with pytest.raises(InvalidSetting, match="goes with the model or dflash drafter, not with early_exit"):
        DecoderEngine.open(EngineOptions(model="tiny", draft_model=NAME))


def test_it_is_found_by_name_and_taken_for_other_weights_of_its_models_shape(smollm2_checkpoint: Checkpoint) -> None:
    """As of a fine-tuned model, for which it must be asked by name."""
    assert resolve_model(NAME) == FOLDER
    tuned = dataclasses.replace(smollm2_checkpoint, sha256="of other weights")
    options = EngineOptions(model=TARGET, dtype="float32", kernels="cpp", drafter="dflash")
    with pytest.raises(InvalidSetting, match="needs the folder of a block drafter"):
        DecoderEngine.open(options, load=lambda: tuned)
    described = DecoderEngine.open(dataclasses.replace(options, draft_model=NAME), load=lambda: tuned).describe()
    assert (described["drafter"], described["model_sha256"]) == ("dflash", "of other weights")
    parameters = described["drafter_parameters"]
    assert parameters["draft_model"] == NAME
    assert parameters["draft_model_sha256"] == DFlashCheckpoint.load(FOLDER).sha256
