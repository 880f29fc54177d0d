"""A small stand-in for the modules openvino and openvino_genai, which tests put into sys.modules.

Its pipelines draw every token from one fixed law with the request's own seed; `trouble` makes them misbehave.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

VOCAB = 24


class FakeOpenvino:
    """Both modules in one. What was asked of it is kept."""

    def __init__(self, trouble: str | None = None) -> None:
        self.trouble = trouble
        self.properties: list[dict[str, Any]] = []
        self.configs: list[Any] = []
        self.prompts: list[list[int]] = []
        self.unpacked: list[str] = []

    def Tensor(self, array: np.ndarray) -> np.ndarray:
        assert array.dtype == np.int64
        assert array.shape[0] == 1
        return array

    def GenerationConfig(self) -> SimpleNamespace:
        return SimpleNamespace(num_assistant_tokens=None, max_ngram_size=0, top_k=2**64 - 1)

    def SchedulerConfig(self) -> SimpleNamespace:
        return SimpleNamespace()

    def LLMPipeline(self, path: str, device: str, *, enable_save_ov_model: bool) -> None:
        assert enable_save_ov_model
        self.unpacked.append(Path(path).resolve().name)

    def draft_model(self, path: str, device: str, **properties: Any) -> tuple[str, dict[str, Any]]:
        assert not path.endswith(".gguf")
        return "draft", properties

    def ContinuousBatchingPipeline(self, path: str, scheduler: Any, device: str, properties: dict[str, Any]) -> Any:
        if self.trouble == "compile":
            message = "Exception from /build/src/core.cpp:84:\nunsupported architecture\n"
            raise RuntimeError(message)
        self.properties.append(dict(properties))
        speculates = "prompt_lookup" in properties or "draft_model" in properties
        return SimpleNamespace(generate=lambda prompts, configs: self._generate(prompts, configs, speculates))

    def get_version(self) -> str:
        return "2026.4.0.0-fake"

    def _generate(self, prompts: list[np.ndarray], configs: list[Any], speculates: bool) -> list[Any]:
        if self.trouble == "stops":
            message = "Check 'false' failed at /build/src/sampler.cpp:1:\nout of memory"
            raise RuntimeError(message)
        self.configs += configs
        self.prompts += [prompt[0].tolist() for prompt in prompts]
        for config in configs:
            assert (config.num_assistant_tokens is not None) == speculates
        metrics = SimpleNamespace(get_num_draft_tokens=lambda: 10, get_num_accepted_tokens=lambda: 4)
        made = [
            SimpleNamespace(
                m_generation_ids=[self._text(config)] * (2 if self.trouble == "two texts" else 1),
                extended_perf_metrics=metrics if speculates else None,
            )
            for config in configs
        ]
        return made[1:] if self.trouble == "lost" else made

    def _text(self, config: Any) -> list[int]:
        rng = np.random.default_rng(0 if self.trouble == "one seed" else config.rng_seed)
        law = np.arange(VOCAB, 0, -1.0) ** (1 / config.temperature) if config.do_sample else np.eye(VOCAB)[3]
        text: list[int] = rng.choice(VOCAB, config.max_new_tokens, p=law / law.sum()).tolist()
        ends = [i for i, token in enumerate(text) if token in config.stop_token_ids and not config.ignore_eos]
        text = text[: ends[0] + 1] if ends else text
        return {"short": text[:-1], "long": [*text, 1], "empty": []}.get(str(self.trouble), text)
