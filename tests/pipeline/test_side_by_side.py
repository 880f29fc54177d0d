"""Parts of an analysis in threads come out as they do one after another."""

from __future__ import annotations

import threading

import pytest

from equivtest.pipeline.side_by_side import side_by_side


def test_results_stand_in_the_order_of_the_items_whichever_is_done_first() -> None:
    last_done = threading.Event()

    def result(item: int) -> int:
        if item == 2:
            last_done.set()
        else:
            assert last_done.wait(10)
        return item * item

    assert side_by_side(result, range(3)) == [0, 1, 4]


def test_the_error_that_is_raised_is_the_first_in_order_not_in_time() -> None:
    last_failed = threading.Event()

    def fail(item: str) -> None:
        if item == "first":
            assert last_failed.wait(10)
        else:
            last_failed.set()
        raise ValueError(item)

    with pytest.raises(ValueError, match="first"):
        side_by_side(fail, ["first", "last"])


def test_one_item_and_none_need_no_thread() -> None:
    assert side_by_side(lambda _: threading.get_ident(), [0]) == [threading.get_ident()]
    assert side_by_side(str, []) == []
