"""Recordings whose texts end early are compared position by position, the last token repeated.

The seeds are fixed, so every test is deterministic; with other seeds the literal gate flags one law in at most 5 %.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from equivtest.errors import InsufficientSamples, MissingSamples
from equivtest.pipeline.analysis_options import AnalysisOptions
from equivtest.pipeline.compare import compare
from equivtest.records import Word
from equivtest.verdict.verdict import Verdict

STOP = 0


def recording(path: Path, *, seed: int, stop: float, max_tokens: int = 8, stops: bool = True) -> Path:
    """256 texts of independent tokens that end at their first STOP."""
    rng = np.random.default_rng(seed)
    law = np.array([stop, *[(1 - stop) / 5] * 5])
    lines = []
    for index in range(256):
        tokens = rng.choice(6, max_tokens, p=law).tolist()
        if stops and STOP in tokens:
            tokens = tokens[: tokens.index(STOP) + 1]
        lines.append(json.dumps({"prompt_id": "story", "seed": index, "token_ids": tokens}))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def judge(on: Path, off: Path) -> Verdict:
    return compare(on, off, AnalysisOptions(confirm=False), epsilon=0.4).verdict


def test_texts_that_end_alike_are_equivalent_and_texts_that_end_sooner_are_different(tmp_path: Path) -> None:
    off = recording(tmp_path / "off.jsonl", seed=1, stop=0.2)
    assert judge(recording(tmp_path / "on.jsonl", seed=2, stop=0.2), off).word is Word.EQUIVALENT
    assert judge(recording(tmp_path / "sooner.jsonl", seed=3, stop=0.4), off).word is Word.DIFFERENT


def test_arms_whose_longest_texts_differ_are_compared_where_texts_ended(tmp_path: Path) -> None:
    """With a stop in two of three tokens the longest of 256 texts ends well before 100 tokens, here and there."""
    off, on = (recording(tmp_path / f"{seed}.jsonl", seed=seed, stop=0.65, max_tokens=100) for seed in (1, 2))
    longest = [max(len(json.loads(line)["token_ids"]) for line in path.read_text().splitlines()) for path in (off, on)]
    assert longest[0] != longest[1]
    assert judge(on, off).word is Word.EQUIVALENT
    cut = recording(tmp_path / "cut.jsonl", seed=3, stop=0.2, max_tokens=6, stops=False)
    with pytest.raises(MissingSamples, match="6 positions in"):
        judge(recording(tmp_path / "whole.jsonl", seed=4, stop=0.2), cut)


@pytest.mark.parametrize(("arm", "seeds", "enough"), [("on", 3, False), ("on", 4, True), ("off", 1, False)])
def test_a_recording_with_too_few_seeds_is_named(arm: str, seeds: int, enough: bool, tmp_path: Path) -> None:
    files = {
        name: recording(tmp_path / f"{name}.jsonl", seed=len(name), stop=0.2, stops=False) for name in ("on", "off")
    }
    files[arm].write_text("\n".join(files[arm].read_text().splitlines()[:seeds]), encoding="utf-8")
    if enough:
        judge(files["on"], files["off"])
        return
    with pytest.raises(
        InsufficientSamples, match=rf"recorded / story of .*{arm}.jsonl: {seeds} samples, needs at least"
    ):
        judge(files["on"], files["off"])
