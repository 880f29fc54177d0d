import dataclasses

import pytest

from equivtest.errors import ChecksumMismatch, InvalidSetting, UnknownName
from equivtest.protocol.budgets import BUDGETS, get_budget
from equivtest.protocol.configs import ALL, CONFIGS, describe_params, resolve_configs
from equivtest.protocol.plan import BATCH_SAMPLES, Protocol, fingerprint
from equivtest.protocol.prompts import load_prompt_set
from equivtest.records import Arm


@pytest.fixture(scope="module")
def gate() -> Protocol:
    return Protocol.build(load_prompt_set("default"), ("topp95",), get_budget("gate"))


def test_the_gate_budget_is_the_protocol_of_record(gate: Protocol) -> None:
    assert (len(gate.prompts), gate.num_positions, gate.num_seeds, gate.epsilon) == (8, 32, 256, 0.1)
    assert len([shard for batch in gate.batches() for shard in batch]) == 4 * 8


@pytest.mark.parametrize("budget", BUDGETS)
def test_batches_cover_every_sample_exactly_once(budget: str) -> None:
    protocol = Protocol.build(load_prompt_set("default"), ALL, get_budget(budget))
    seen = [
        (s.arm, s.config, s.prompt_id, seed)
        for batch in protocol.batches()
        for s in batch
        for seed in range(s.seed_start, s.seed_stop)
    ]
    wanted = {
        (arm, config, prompt.id, seed)
        for arm in Arm
        for config in ALL
        for prompt in protocol.prompts
        for seed in range(protocol.num_seeds)
    }
    assert len(seen) == len(set(seen))
    assert set(seen) == wanted


def test_a_batch_never_mixes_arms_or_configs_and_fits_the_executor() -> None:
    protocol = Protocol.build(load_prompt_set("default"), ALL, get_budget("smoke"))
    for batch in protocol.batches():
        assert len({(s.arm, s.config) for s in batch}) == 1
        assert sum(s.num_seeds for s in batch) <= BATCH_SAMPLES


def test_rounds_cover_the_same_samples_in_full_batches_and_a_stopped_run_is_a_prefix() -> None:
    whole = Protocol.build(load_prompt_set("default"), ("topp95",), get_budget("gate"), sequential=True)
    rounds = list(whole.rounds())
    assert [num_seeds for num_seeds, _ in rounds] == list(range(32, 257, 32))
    for _, batches in rounds:
        assert [sum(shard.num_seeds for shard in batch) for batch in batches] == [BATCH_SAMPLES] * len(Arm)
    stopped = whole.stopped_at(96)
    assert list(stopped.batches()) == [batch for _, batches in rounds[:3] for batch in batches]
    assert stopped.confirmation_seeds == (96, 96 * 5)
    once = Protocol.build(load_prompt_set("default"), ("topp95",), get_budget("gate"))
    assert [num_seeds for num_seeds, _ in once.rounds()] == [256]
    assert Protocol.from_dict(whole.to_dict()) == whole


def test_confirmation_uses_four_times_as_many_seeds_and_only_fresh_ones(gate: Protocol) -> None:
    strata = frozenset({("topp95", "code")})
    batches = list(gate.confirmation_batches((Arm.OFF, Arm.ON), strata))
    seeds = [seed for batch in batches for s in batch if s.arm is Arm.ON for seed in range(s.seed_start, s.seed_stop)]
    assert seeds == list(range(256, 256 + 4 * 256))
    assert {s.prompt_id for batch in batches for s in batch} == {"code"}


def test_every_sample_of_a_run_has_its_own_stream(gate: Protocol) -> None:
    keys = {
        gate.stream_key(arm, "topp95", prompt.id, seed) for arm in Arm for prompt in gate.prompts for seed in range(256)
    }
    assert len(keys) == 4 * 8 * 256
    reseeded = dataclasses.replace(gate, run_seed=1)
    assert reseeded.stream_key(Arm.ON, "topp95", "code", 0) not in keys


def test_the_fingerprint_moves_with_the_protocol_and_with_the_subject(gate: Protocol) -> None:
    same = fingerprint(gate, {"drafter": "ngram"})
    assert same == fingerprint(Protocol.from_dict(gate.to_dict()), {"drafter": "ngram"})
    assert same != fingerprint(gate, {"drafter": "self"})
    assert same != fingerprint(dataclasses.replace(gate, epsilon=0.2), {"drafter": "ngram"})


@pytest.mark.parametrize(
    "change", [{"num_seeds": 1}, {"num_positions": 0}, {"epsilon": 0.0}, {"epsilon": 1.5}, {"configs": ()}]
)
def test_a_protocol_out_of_range_is_refused(gate: Protocol, change: dict[str, object]) -> None:
    with pytest.raises(InvalidSetting):
        dataclasses.replace(gate, **change)


def test_all_expands_once_and_unknown_configs_list_the_known_ones() -> None:
    assert resolve_configs(("all", "greedy", "topp95")) == (*ALL, "greedy")
    with pytest.raises(UnknownName, match="topk50"):
        resolve_configs(("topk51",))


def test_params_are_described_in_the_order_of_the_law() -> None:
    assert describe_params(CONFIGS["topk20p90"]) == "temperature 0.7, top_k 20, top_p 0.9"
    assert describe_params(CONFIGS["greedy"]) == "greedy"


def test_a_prompt_set_that_is_not_the_described_one_is_refused(tmp_path) -> None:
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"id": "a", "messages": [{"role": "user", "content": "hi"}]}\n')
    (tmp_path / "mine.toml").write_text('sha256 = "0000"\n')
    with pytest.raises(ChecksumMismatch):
        load_prompt_set(str(prompts))


def test_a_broken_prompt_line_is_named(tmp_path) -> None:
    import hashlib

    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"id": "a", "messages": [{"role": "user", "content": "hi"}]}\n{"id": "b"}\n')
    (tmp_path / "mine.toml").write_text(f'sha256 = "{hashlib.sha256(prompts.read_bytes()).hexdigest()}"\n')
    with pytest.raises(InvalidSetting, match="line 2"):
        load_prompt_set(str(prompts))
