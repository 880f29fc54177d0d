"""The arithmetic of time per output token, on clocks made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from equivtest.bench.latency import Served, accepted_per_round, serve, tpot_columns, tpot_s
from equivtest.errors import InvalidSetting
from equivtest.records import SPEC, Generation, Origin

A, R, B, P = Origin.ACCEPTED, Origin.RECOVERED, Origin.BONUS, Origin.PLAIN


def generation(steps: list[int], num_drafts: list[int], origins: list[Origin]) -> Generation:
    count = len(steps)
    return Generation(
        token_ids=np.zeros(count, np.int32),
        origins=tuple(origins),
        slots=np.zeros(count, np.int8),
        draft_token_ids=np.zeros(count, np.int32),
        steps=np.array(steps, np.int32),
        batch_rows=np.zeros(count, np.int32),
        num_drafts=np.array(num_drafts, np.int8),
        route=SPEC,
    )


def test_tpot_is_last_minus_first_over_the_tokens_after_the_first() -> None:
    ends = np.array([10.0, 11.0, 13.0, 17.0])
    assert tpot_s(np.array([0, 1, 2, 3]), ends) == pytest.approx(7 / 3)
    assert tpot_s(np.array([1, 1, 1, 2, 2]), ends) == pytest.approx(2 / 4)  # rounds of three and two tokens
    assert tpot_s(np.array([2, 2]), ends) == 0.0  # both came out at once


def test_a_text_of_one_token_has_no_tpot() -> None:
    with pytest.raises(InvalidSetting, match="at least 2"):
        tpot_s(np.array([0]), np.array([1.0]))


def test_percentiles_are_over_requests_in_milliseconds() -> None:
    columns = tpot_columns(np.arange(101) / 1e3)
    assert columns == pytest.approx({"tpot_p50_ms": 50.0, "tpot_p99_ms": 99.0})


def test_accepted_per_round_counts_each_round_once_and_plain_steps_never() -> None:
    first = generation([0, 0, 0, 1, 2], [2, 2, 2, 2, 0], [A, A, B, R, P])  # rounds of 2 and 0 kept, then a plain step
    second = generation([0, 0, 1], [2, 2, 1], [A, R, R])  # rounds of 1 and 0 kept
    assert accepted_per_round([first, second]) == 3 / 4
    assert accepted_per_round([generation([0, 1], [0, 0], [P, P])]) == 0.0


def test_tokens_per_s_is_over_the_whole_call() -> None:
    served = Served(generations=[generation([0, 1, 2], [0] * 3, [P] * 3)], step_ends_s=np.arange(3.0), wall_s=1.5)
    assert served.tokens_per_s == 2.0
    assert served.tpot_s().tolist() == [1.0]


def test_the_clock_is_read_once_a_step() -> None:
    class Engine:
        def generate(self, requests, *, speculative, fault=None, on_tokens=None):
            for _ in range(3):
                on_tokens(1)
            return [generation([0, 1, 2], [0] * 3, [P] * 3)]

    served = serve(Engine(), [], speculative=False)
    assert len(served.step_ends_s) == 3
    assert (np.diff(served.step_ends_s) >= 0).all()
    assert served.step_ends_s[-1] - served.step_ends_s[0] <= served.wall_s
