"""Errors cross process borders as what they are."""

import pickle
from pathlib import Path

from equivtest.errors import EquivtestError, InvalidShard, UnknownName


def test_an_error_of_a_worker_process_keeps_its_type_message_and_fields() -> None:
    for error in (InvalidShard(Path("a"), "truncated"), UnknownName("config", "x", ["b", "a"])):
        again = pickle.loads(pickle.dumps(error))
        assert isinstance(again, EquivtestError)
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
