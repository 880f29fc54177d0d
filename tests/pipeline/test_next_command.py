"""The command that a page offers next is the run's own, changed in one thing."""

from __future__ import annotations

import pytest

from equivtest.pipeline.next_command import next_command
from equivtest.records import Word

RUN = "equivtest run --model 'my model' --budget smoke --run-dir=here --resume --acceptance chain --run-dir there"
CHAIN = {"acceptance": "chain"}


@pytest.mark.parametrize("word", [Word.INCONCLUSIVE, Word.EQUIVALENT])
def test_what_a_smoke_run_cannot_decide_is_run_again_as_a_gate(word: Word) -> None:
    wanted = "equivtest run --model 'my model' --acceptance chain --budget gate"
    assert next_command(RUN, word, budget="smoke", subject=CHAIN) == wanted


def test_a_difference_is_looked_at_under_the_other_acceptance_rule() -> None:
    command = "equivtest run --budget=gate"
    assert next_command(command, Word.DIFFERENT, budget="gate", subject=CHAIN) == f"{command} --acceptance match"
    other = {"acceptance": "match"}
    assert next_command(command, Word.DIFFERENT, budget="gate", subject=other) == f"{command} --acceptance chain"


def test_where_another_run_helps_nothing_there_is_no_command() -> None:
    assert next_command("equivtest run", Word.EQUIVALENT, budget="gate", subject=CHAIN) is None
    assert next_command("equivtest run", Word.INVALID, budget="smoke", subject=CHAIN) is None
    assert next_command("equivtest run", Word.INCONCLUSIVE, budget="audit", subject=CHAIN) is None
    assert next_command("equivtest run", Word.DIFFERENT, budget="gate", subject={"engine": "openai"}) is None
    assert next_command("python -m my_script", Word.DIFFERENT, budget="gate", subject=CHAIN) is None
