"""A run is scored once, whatever interrupts it, and its law columns meet their samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from equivtest.decoder.scorer import Scorer
from equivtest.errors import InvalidSetting, InvalidShard, MissingSamples
from equivtest.kernels.registry import get_backend
from equivtest.pipeline.law_input import read_scored_tokens
from equivtest.pipeline.manifest import Manifest, new_manifest, written
from equivtest.pipeline.progress import Listener, Silent
from equivtest.pipeline.score import score as score_samples
from equivtest.protocol.configs import CONFIGS
from equivtest.protocol.plan import Batch, Protocol
from equivtest.protocol.prompts import Prompt
from equivtest.records import Arm, Origin, Request, ShardKey
from equivtest.samples.keys import shard_path
from equivtest.samples.shards import write_shard
from equivtest.stats.law import law_family
from tests.decoder.scenarios import build
from tests.pipeline.fake_engine import FakeEngine

PROTOCOL = Protocol(
    prompts=tuple(Prompt(id=name, messages=(("user", name),)) for name in ("one", "two")),
    prompt_set="test",
    prompt_set_sha256="",
    configs=("topp95",),
    budget="test",
    num_positions=8,
    num_seeds=16,
    epsilon=0.1,
)
PROMPTS = {"one": (3, 4, 5, 3, 4), "two": (11, 12, 13)}


class Heard(Silent):
    def __init__(self) -> None:
        self.scored = self.skipped = 0

    def advance(self, num_tokens: int) -> None:
        self.scored += num_tokens

    def skip(self, num_tokens: int) -> None:
        self.skipped += num_tokens


def batches(*arms: Arm) -> list[Batch]:
    return [batch for batch in PROTOCOL.batches() if batch[0].arm in arms]


class Scores(FakeEngine):
    """An engine of which only the law is asked."""

    def __init__(self, scorer: Scorer | None) -> None:
        super().__init__(scorer=scorer, has_law=scorer is not None)

    def encode_prompt(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        return PROMPTS[messages[-1]["content"]]


def score(run_dir: Path, engine: FakeEngine, batches: list[Batch], listener: Listener) -> Manifest:
    manifest = written(run_dir, new_manifest(PROTOCOL, engine, {}))
    return score_samples(run_dir, PROTOCOL, manifest, engine, batches, listener, "scoring")


@pytest.fixture
def collected(tmp_path: Path) -> tuple[Path, FakeEngine]:
    executor = build(get_backend("cpp"), max_draft=2)
    for batch in batches(Arm.OFF, Arm.ON):
        requests = [
            Request(
                prompt_token_ids=PROMPTS[key.prompt_id],
                params=CONFIGS[key.config],
                stream_key=PROTOCOL.stream_key(key.arm, key.config, key.prompt_id, seed),
                max_tokens=8,
            )
            for key in batch
            for seed in range(key.seed_start, key.seed_stop)
        ]
        generations = executor.generate(requests, speculative=batch[0].arm is not Arm.OFF)
        for index, key in enumerate(batch):
            write_shard(tmp_path, key, generations[16 * index : 16 * index + 16], 8)
    return tmp_path, Scores(Scorer(executor.model, get_backend("cpp")))


def test_only_what_is_not_scored_yet_is_scored(collected: tuple[Path, FakeEngine]) -> None:
    run_dir, engine = collected
    first = Heard()
    manifest = score(run_dir, engine, batches(Arm.OFF), first)
    assert manifest.score_seconds[Arm.OFF] > 0
    assert Manifest.read(run_dir) == manifest
    files = {path: path.read_bytes() for path in sorted((run_dir / "law").rglob("*.parquet"))}
    assert (first.scored, first.skipped, len(files)) == (256, 0, 2)
    broken, kept = files
    broken.write_bytes(b"PAR1")
    second = Heard()
    score(run_dir, engine, batches(Arm.OFF, Arm.ON), second)
    assert (second.scored, second.skipped) == (3 * 128, 128)
    assert broken.read_bytes() == files[broken]
    assert kept.read_bytes() == files[kept]


def test_tokens_and_their_law_meet(collected: tuple[Path, FakeEngine]) -> None:
    run_dir, engine = collected
    score(run_dir, engine, batches(Arm.OFF, Arm.ON), Silent())
    tokens = read_scored_tokens(run_dir, batches(Arm.ON), PROTOCOL.num_positions)
    assert (tokens.num_tokens, int((~tokens.continues).sum())) == (256, 32)
    assert (tokens.origin == list(Origin).index(Origin.ACCEPTED)).any()
    assert (tokens.is_draft == (tokens.origin == list(Origin).index(Origin.ACCEPTED))).all()
    assert (tokens.q_variance[~tokens.has_draft] == 0).all()
    assert (tokens.q_mean[tokens.has_draft] > 0).any()
    assert np.unique(tokens.group).tolist() == [0, 1]
    assert np.unique(tokens.batch).tolist() == [0]
    on = law_family(tokens, "on")
    assert {"rank", "rows", "support"} <= {e.name for e in on.evidence}
    assert on.named("residual").statistic == 0
    plain = read_scored_tokens(run_dir, batches(Arm.OFF), PROTOCOL.num_positions)
    assert not plain.has_draft.any()
    assert law_family(plain, "off").named("support").statistic == 0


def test_what_lacks_is_said(collected: tuple[Path, FakeEngine]) -> None:
    run_dir, engine = collected
    with pytest.raises(InvalidShard, match="no such file"):
        read_scored_tokens(run_dir, batches(Arm.OFF), PROTOCOL.num_positions)
    with pytest.raises(InvalidShard, match="no such file"):
        score(run_dir, engine, batches(Arm.BIASED), Silent())
    score(run_dir, engine, batches(Arm.OFF, Arm.ON), Silent())
    off, on = (
        ShardKey(arm=arm, config="topp95", prompt_id="one", seed_start=0, seed_stop=16) for arm in (Arm.OFF, Arm.ON)
    )
    shard_path(run_dir, off, kind="law").write_bytes(shard_path(run_dir, on, kind="law").read_bytes())
    with pytest.raises(InvalidShard, match="arm"):
        read_scored_tokens(run_dir, batches(Arm.OFF), PROTOCOL.num_positions)
    with pytest.raises(MissingSamples, match="no batch"):
        read_scored_tokens(run_dir, [], PROTOCOL.num_positions)


def test_an_engine_without_a_law_cannot_be_scored(collected: tuple[Path, FakeEngine]) -> None:
    with pytest.raises(InvalidSetting, match="no law"):
        score(collected[0], Scores(None), batches(Arm.OFF), Silent())
