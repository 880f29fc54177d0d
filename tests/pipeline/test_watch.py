"""A sequential run's instruments: silent on a correct decoder, and sure of a wrong one long before its end."""

import dataclasses

import pytest

from equivtest.pipeline.watch import progress_line, watch, watch_evidence, watch_finding
from equivtest.protocol.budgets import get_budget
from equivtest.protocol.plan import Protocol
from equivtest.protocol.prompts import load_prompt_set
from equivtest.records import Arm
from equivtest.verdict.facts import Role
from tests.stats.law_sampler import Fault, even_world, make_world, simulate

NUM_RUNS = 20


def watched(fault: Fault, *, even: bool = True, margin: float = 0.1, num_configs: int = 1):
    world = even_world(11) if even else make_world(11)
    runs = simulate(world, NUM_RUNS, fault=fault, seed=41, samples_per_group=80, num_positions=24, max_draft=2)
    return [watch(runs.replication(run), margin=margin, num_configs=num_configs) for run in range(NUM_RUNS)]


def test_a_correct_decoder_is_never_called_different_and_soon_equivalent() -> None:
    """20 runs at a total level of 1 %, which both instruments undercut: any alarm comes at most once in 5 draws of
    these seeds, and in truth far less often."""
    states = watched(Fault())
    assert not any(state.different for state in states)
    assert all(state.equivalent for state in states)
    assert max(state.decided_at for state in states) < states[0].num_tokens
    finding = watch_finding(Arm.ON, {"topp95": states[0]})
    assert (finding.role, finding.flagged, finding.at_once) == (Role.TEST, (), True)


@pytest.mark.parametrize(
    ("fault", "even"),
    [(Fault(epsilon=0.15), True), (Fault(reused_coin=True), True), (Fault(draft_temperature=1.6), False)],
    ids=["inflated acceptance", "reused coin", "hot draft rows"],
)
def test_a_fault_is_found_before_the_end(fault: Fault, even: bool) -> None:
    states = watched(fault, even=even)
    assert sum(state.different for state in states) >= NUM_RUNS - 1
    found = next(state for state in states if state.different)
    assert found.decided_at is not None
    assert found.decided_at < found.num_tokens
    finding = watch_finding(Arm.ON, {"topp95": found})
    assert finding.flagged
    assert "tokens" in finding.flagged[0].words


def test_configs_share_the_level() -> None:
    [alone, shared] = [watched(Fault(), num_configs=n)[0] for n in (1, 4)]
    assert alone.wealth.alpha == 4 * shared.wealth.alpha == 0.005
    assert shared.bias.alpha == shared.wealth.alpha


def test_the_lines_say_what_was_watched_and_how_much_it_took() -> None:
    state = watched(Fault())[0]
    wealth, sequence = watch_evidence("topp95", state)
    assert (wealth.name, sequence.name, sequence.margin) == ("e_process", "bias_sequence", 0.1)
    assert sequence.ci_low < 0 < sequence.ci_high
    protocol = dataclasses.replace(
        Protocol.build(load_prompt_set("default"), ("topp95",), get_budget("gate"), sequential=True), num_seeds=64
    )
    line = progress_line({"topp95": state}, protocol, 256)
    assert line.startswith("sequential: 16,384 of 65,536 tokens an arm were collected (topp95 equivalent after")
