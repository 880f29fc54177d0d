"""The paged cache against a plain list per sequence, over random histories of every operation."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from equivtest.decoder.kv_cache import PagedKVCache
from equivtest.errors import CacheFull, InvalidSetting
from tests.decoder.tiny_models import tiny_config

CONFIG = tiny_config(layers=1, heads=1, kv_heads=1, head_dim=2, max_position=64)


def make_cache(num_pages: int = 40, max_sequences: int = 6, cache: type[PagedKVCache] = PagedKVCache) -> PagedKVCache:
    return cache(CONFIG, num_pages=num_pages, max_sequences=max_sequences, page_size=4, dtype=torch.float32)


class Twin:
    """A cache and, beside it, the contents each sequence should have; every write is a number never used before."""

    def __init__(self, kv: PagedKVCache) -> None:
        self.kv, self.contents, self.next = kv, dict[int, list[int]](), 1

    def extend(self, sequences: list[int], num_new: list[int]) -> None:
        batch = self.kv.extend(np.array(sequences), np.array(num_new))
        assert len(set(batch.slots.tolist())) == sum(num_new), "two rows share a slot"
        values = torch.arange(self.next, self.next + sum(num_new))
        self.next += sum(num_new)
        page, offset = batch.slots // self.kv.page_size, batch.slots % self.kv.page_size
        self.kv.pages[0, page, 0, offset, 0, 0] = values.float()
        starts = batch.query_start.tolist()
        for i, sequence in enumerate(sequences):
            rows = slice(starts[i], starts[i + 1])
            old = len(self.contents[sequence])
            self.contents[sequence] += values[rows].tolist()
            assert batch.positions[rows].tolist() == list(range(old, old + num_new[i]))
            assert batch.kv_lens[i].item() == len(self.contents[sequence])
            assert self.read(batch.page_table[i], len(self.contents[sequence])) == self.contents[sequence]

    def read(self, pages: npt.NDArray[np.int32], length: int) -> list[int]:
        return [
            int(x) for x in self.kv.pages[0, torch.from_numpy(pages.astype(np.int64)), 0, :, 0, 0].flatten()[:length]
        ]

    def check(self) -> None:
        """Every sequence holds its own contents, and pages are neither lost nor counted twice."""
        tables = {s: self.kv._table[s, : -(-len(c) // self.kv.page_size)] for s, c in self.contents.items()}
        for sequence, contents in self.contents.items():
            assert self.kv.lengths(np.array([sequence])).tolist() == [len(contents)]
            assert self.read(tables[sequence], len(contents)) == contents
            slots = self.kv.slots(np.full(len(contents), sequence), np.arange(len(contents)))
            page, offset = torch.from_numpy(slots // self.kv.page_size), torch.from_numpy(slots % self.kv.page_size)
            assert self.kv.pages[0, page, 0, offset, 0, 0].tolist() == contents
        held = {int(page) for table in tables.values() for page in table}
        assert len(held) + self.kv.num_free_pages == len(self.kv._references)
        assert not held & {int(page) for page in self.kv._free_pages[: self.kv.num_free_pages]}


def random_history(cache: type[PagedKVCache], seed: int, steps: int = 60) -> None:
    rng = np.random.default_rng(seed)
    twin = Twin(make_cache(cache=cache))
    for _ in range(steps):
        live = list(twin.contents)
        chosen = [s for s in live if rng.random() < 0.6]
        action = rng.integers(6)
        if (action == 0 or not live) and twin.kv.num_free_sequences:
            twin.contents[twin.kv.new_sequence()] = []
        elif action == 1 and twin.kv.num_free_sequences:
            source = int(rng.choice(live))
            twin.contents[twin.kv.fork(source)] = list(twin.contents[source])
        elif action == 2 and chosen:
            lengths = [int(rng.integers(len(twin.contents[s]) + 1)) for s in chosen]
            twin.kv.truncate(np.array(chosen), np.array(lengths))
            for sequence, length in zip(chosen, lengths, strict=True):
                del twin.contents[sequence][length:]
        elif action == 3 and chosen and rng.random() < 0.3:
            twin.kv.free(np.array(chosen))
            for sequence in chosen:
                del twin.contents[sequence]
        elif chosen:
            room = [min(int(rng.integers(1, 7)), 64 - len(twin.contents[s])) for s in chosen]
            fits = [i for i, n in enumerate(room) if n > 0]
            if fits and twin.kv.num_free_pages >= 3 * len(fits):
                twin.extend([chosen[i] for i in fits], [room[i] for i in fits])
        twin.check()


@pytest.mark.parametrize("seed", range(25))
def test_every_sequence_keeps_its_own_contents(seed: int) -> None:
    random_history(PagedKVCache, seed)


class WritesSharedPages(PagedKVCache):
    """Planted fault: no copy on write."""

    def _shared_last_pages(self, sequences: Any, lengths: Any) -> Any:
        return np.zeros(0, dtype=np.int64)


class KeepsOnePageTooMany(PagedKVCache):
    """Planted fault: truncation leaks the page at the cut."""

    def _release(self, sequences: Any, first: Any, last: Any) -> None:
        super()._release(sequences, np.minimum(first + 1, last), last)


class DropsSharedPages(PagedKVCache):
    """Planted fault: a page is released while another sequence holds it."""

    def fork(self, sequence: int) -> int:
        copy = super().fork(sequence)
        length = int(self.lengths(np.array([sequence]))[0])
        self._references[self._table[copy, : -(-length // self.page_size)]] = 1
        return copy


@pytest.mark.parametrize("faulty", [WritesSharedPages, KeepsOnePageTooMany, DropsSharedPages])
def test_the_histories_see_a_planted_fault(faulty: type[PagedKVCache]) -> None:
    caught = 0
    for seed in range(10):
        try:
            random_history(faulty, seed)
        except (AssertionError, CacheFull, InvalidSetting):
            caught += 1
    assert caught >= 8


def test_forks_share_the_prompt_and_copy_only_its_last_page() -> None:
    kv = make_cache(num_pages=40, max_sequences=6)
    twin = Twin(kv)
    prompt = kv.new_sequence()
    twin.contents[prompt] = []
    twin.extend([prompt], [10])  # 3 pages, the last one half full
    assert kv.num_free_pages == 37
    for _ in range(4):
        copy = kv.fork(prompt)
        twin.contents[copy] = list(twin.contents[prompt])
    assert kv.num_free_pages == 37
    twin.extend([1, 2, 3, 4], [1, 1, 1, 1])
    assert kv.num_free_pages == 33  # one copy each: the prompt keeps the original
    twin.extend([prompt], [1])
    assert kv.num_free_pages == 33  # now the only holder
    twin.check()


def test_the_last_holder_writes_in_place() -> None:
    kv = make_cache()
    twin = Twin(kv)
    first = kv.new_sequence()
    twin.contents[first] = []
    twin.extend([first], [2])
    twin.contents[kv.fork(first)] = list(twin.contents[first])
    twin.extend([0, 1], [1, 1])  # both holders of one page at once: one copy is enough
    assert kv.num_free_pages == 38
    twin.check()


def test_a_full_cache_says_what_it_needs_and_changes_nothing() -> None:
    kv = make_cache(num_pages=5, max_sequences=2)
    twin = Twin(kv)
    for _ in range(2):
        twin.contents[kv.new_sequence()] = []
    twin.extend([0, 1], [7, 6])
    with pytest.raises(CacheFull, match="needs 2 pages, has 1 free") as caught:
        kv.extend(np.array([0, 1]), np.array([2, 3]))
    assert (caught.value.need, caught.value.have) == (2, 1)
    twin.check()
    twin.extend([0, 1], [1, 3])
    with pytest.raises(CacheFull, match="needs 1 sequences, has 0 free"):
        kv.new_sequence()
    with pytest.raises(CacheFull, match="sequences"):
        kv.fork(0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda kv: kv.extend(np.array([0, 0]), np.array([1, 1])), "distinct"),
        (lambda kv: kv.extend(np.array([0]), np.array([0])), "at least 1"),
        (lambda kv: kv.extend(np.array([0]), np.array([1, 1])), "one entry"),
        (lambda kv: kv.extend(np.array([0]), np.array([62])), "at most 64 tokens"),
        (lambda kv: kv.extend(np.array([1]), np.array([1])), "not in use"),
        (lambda kv: kv.lengths(np.array([-1])), "not in use"),
        (lambda kv: kv.slots(np.array([0]), np.array([3])), "position = 3: is not in the sequence"),
        (lambda kv: kv.slots(np.array([0]), np.array([-1])), "position = -1"),
        (lambda kv: kv.slots(np.array([2]), np.array([0])), "not in use"),
        (lambda kv: kv.fork(99), "not in use"),
        (lambda kv: kv.truncate(np.array([0]), np.array([4])), "between 0 and"),
        (lambda kv: kv.free(np.array([3])), "not in use"),
        (lambda kv: make_cache(num_pages=0), "num_pages"),
    ],
)
def test_wrong_calls_are_refused_and_change_nothing(call: Any, message: str) -> None:
    twin = Twin(make_cache())
    twin.contents[twin.kv.new_sequence()] = []
    twin.extend([0], [3])
    with pytest.raises(InvalidSetting, match=message):
        call(twin.kv)
    twin.check()


def test_no_python_loop_over_sequences() -> None:
    """Bookkeeping for 256 sequences runs fewer interpreter lines than there are sequences."""
    kv = PagedKVCache(CONFIG, num_pages=1024, max_sequences=256, page_size=4, dtype=torch.float32)
    sequences = np.array([kv.new_sequence() for _ in range(256)])
    counted = 0

    def count(frame: Any, event: str, argument: Any) -> Any:
        nonlocal counted
        counted += event == "line" and frame.f_code.co_filename.endswith("kv_cache.py")
        return count

    import sys

    sys.settrace(count)
    try:
        kv.extend(sequences, np.full(256, 3))
        kv.truncate(sequences, np.full(256, 1))
    finally:
        sys.settrace(None)
    assert 20 < counted < 200
