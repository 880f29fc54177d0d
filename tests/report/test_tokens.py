"""The tokens of a page: short, whole, and of scripts that are what they claim to be."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib

import pytest

from equivtest.errors import ChecksumMismatch
from equivtest.records import Arm
from equivtest.report import scripts
from equivtest.report.html import render_html
from tests.report.make import report_data
from tests.report.make_tokens import HOSTILE_TEXTS

DATA = report_data(num_prompts=2, num_positions=6)


def test_the_page_carries_the_counts_and_texts_that_it_was_given() -> None:
    found = re.search(r'<script type="application/json" id="shown">(.*?)</script>', render_html(DATA), flags=re.DOTALL)
    assert found is not None
    assert "<" not in found[1]
    assert ">" not in found[1]
    read = json.loads(found[1])
    indices, counts, num_others = read["cells"]["topp95"]["chat"]["3"]
    cell = DATA.shown.cells["topp95", "chat", 3]
    assert [read["ids"][index] for index in indices] == list(cell.token_ids)
    assert dict(zip(read["arms"], counts, strict=True)) == {arm: list(cell.counts[arm]) for arm in Arm}
    assert num_others == cell.num_others
    assert dict(zip(read["ids"], read["texts"], strict=True)) == {**HOSTILE_TEXTS, 9: "plain", 10: None}
    assert list(read["samples"]["topp95"]) == ["story", "chat"], "in the run's order"


def test_the_scripts_of_others_are_byte_for_byte_those_that_were_published() -> None:
    entries = tomllib.loads((scripts.VENDOR / "vendor.toml").read_text("utf-8"))["script"]
    assert [entry["package"] for entry in entries] == ["d3", "@observablehq/plot"]
    for entry in entries:
        assert hashlib.sha256((scripts.VENDOR / entry["file"]).read_bytes()).hexdigest() == entry["sha256"]
        assert "</script" not in (scripts.VENDOR / entry["file"]).read_text("utf-8")


def test_a_changed_script_is_refused(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in scripts.VENDOR.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes() + b"\n" * (path.name == "d3.min.js"))
    monkeypatch.setattr(scripts, "VENDOR", tmp_path)
    scripts.page_scripts.cache_clear()
    with pytest.raises(ChecksumMismatch, match=r"d3\.min\.js"):
        scripts.page_scripts(plots=True)
    assert len(scripts.page_scripts(plots=False).contents) == 3
    scripts.page_scripts.cache_clear()
