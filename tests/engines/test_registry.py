"""Engines by name, and what is said before one is loaded."""

import dataclasses

import pytest

from equivtest.engines import registry
from equivtest.engines.base import EngineOptions, ServerOptions, VllmOptions
from equivtest.engines.registry import ENGINES, check_engine
from equivtest.errors import EngineUnavailable, InvalidSetting, UnknownName

VLLM = VllmOptions(speculative_config={"method": "ngram"})
SERVER = ServerOptions(spec_off="http://host:8000")


def test_every_option_of_a_kind_is_one_of_the_record() -> None:
    fields = {field.name for field in dataclasses.fields(EngineOptions)}
    for kind in ENGINES.values():
        assert kind.options <= fields


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"engine": "oracle"}, UnknownName, "known: decoder, openai, openvino, transformers, vllm"),
        ({"engine": "transformers", "acceptance": "match"}, InvalidSetting, "is no option of the engine transformers"),
        ({"engine": "openai"}, InvalidSetting, "openai engine needs --spec-off URL"),
        ({"engine": "vllm"}, InvalidSetting, "vllm engine needs --speculative-config JSON"),
        ({"server": SERVER}, InvalidSetting, "is no option of the engine decoder"),
        ({"vllm": VLLM}, InvalidSetting, "is no option of the engine decoder"),
        ({"engine": "openai", "server": SERVER, "drafter": "ngram"}, InvalidSetting, "drafter = 'ngram'"),
    ],
)
def test_a_wrong_request_is_told_before_anything_is_loaded(options, error, says: str) -> None:
    with pytest.raises(error, match=says):
        check_engine(EngineOptions(**options))


def test_a_package_that_is_missing_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    options = EngineOptions(engine="openai", server=SERVER)
    check_engine(options)
    monkeypatch.setattr(registry, "installed_version", lambda name: None)
    with pytest.raises(EngineUnavailable, match=r"httpx2 is not installed; run: pip install 'equivtest\[server\]'"):
        check_engine(options)
    check_engine(EngineOptions())  # the built-in decoder needs nothing more
