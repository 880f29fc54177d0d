"""The page is well-formed, self-contained, escaped, deterministic and says what the data say."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from equivtest.records import Word
from equivtest.report.html import flatten, render_html, write_html
from equivtest.report.tokens import ShownTokens
from equivtest.report.words import REJECTED_MARK
from tests.report.make import cells, report_data, with_prompt_id, without_law
from tests.report.page import Page

SMALL = {"num_prompts": 2, "num_positions": 6}


@cache
def small_page(word: Word = Word.EQUIVALENT) -> str:
    """The page of a small run with that verdict, rendered once for all tests that only read it."""
    return render_html(report_data(word, **SMALL))


@pytest.mark.parametrize("word", Word)
def test_the_page_opens_with_the_verdict_the_headline_the_gate_of_record_and_what_to_do(word: Word) -> None:
    data = report_data(word, **SMALL)
    page = Page(small_page(word))
    assert page.headings[1] == (2, f"{'✓✗?!'[list(Word).index(word)]} {word}")
    assert {"verdict", str(word)} <= set(page.classes)
    # The headline of a run with a diagnosis is its first sentence.
    sentences = data.diagnosis or (data.headline,)
    for line in (data.title, *sentences, *data.reasons, *data.next_steps, data.gate_of_record):
        assert line in page.text
    assert f"Exit code {data.exit_code}." in page.text
    answers = ("May merge.", "Do not merge.", "Do not merge yet:", "Do not merge: this run proves nothing")
    assert [answer in page.text for answer in answers] == [one is word for one in Word]
    others = set(map(str, Word)) - {str(word)}
    assert not others & set(page.classes)


@pytest.mark.parametrize("word", Word)
def test_tags_are_balanced_ids_unique_and_headings_in_order(word: Word) -> None:
    page = Page(small_page(word))
    assert len(page.ids) == len(set(page.ids))
    levels = [level for level, _ in page.headings]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    targets = {value[1:] for _, name, value in page.attributes if name == "href"}
    assert targets <= set(page.ids)


def test_an_equivalent_run_that_is_too_small_to_gate_does_not_say_that_a_change_may_merge() -> None:
    small, large = Page(render_html(replace(report_data(**SMALL), gates=False))), Page(small_page())
    assert "May merge." not in small.text
    assert "No merge on this" in small.text
    assert small.headings[1] == (2, "○ equivalent, gates nothing")
    banners = [next(v for t, n, v in p.attributes if (t, n) == ("section", "class")) for p in (small, large)]
    assert banners == ["verdict equivalent small", "verdict equivalent"], "neutral, where the other is green"
    style = small_page().partition("</style>")[0]
    assert re.search(r"\.equivalent\.small { --tone: var\(--fg\); --tone-bg: var\(--panel\); }", style)


@pytest.mark.parametrize("word", [word for word in Word if word is not Word.EQUIVALENT])
def test_any_other_verdict_of_a_small_run_stands_as_it_is(word: Word) -> None:
    small = Page(render_html(replace(report_data(word, **SMALL), gates=False)))
    assert small.headings[1] == Page(small_page(word)).headings[1]
    assert "gates nothing" not in small.text


def test_the_banner_of_a_difference_shows_its_three_strongest_reasons_and_folds_the_rest() -> None:
    reasons = tuple(f"reason {number}" for number in range(8))
    for word, folded in ((Word.DIFFERENT, 5), (Word.INVALID, 0)):
        text = render_html(replace(report_data(word, **SMALL), reasons=reasons))
        banner = re.search(r'<section class="verdict.*?</section>', text, re.DOTALL)
        assert banner is not None
        open_part, _, rest = banner.group().partition("<details>")
        assert re.findall(r"<li>(.*?)</li>", open_part) == list(reasons[: 8 - folded])
        assert re.findall(r"<li>(.*?)</li>", rest) == list(reasons[8 - folded :])
        assert ("5 more lines" in rest) is bool(folded)
    assert "<details>" not in small_page(Word.DIFFERENT).partition("</section>")[0], "two reasons need no fold"


def test_every_sentence_of_the_diagnosis_names_its_stage() -> None:
    data = report_data(Word.DIFFERENT, **SMALL)
    for stage, sentence in zip(("accept", "streams"), data.diagnosis, strict=True):
        assert f"stage {stage} {sentence}" in Page(small_page(Word.DIFFERENT)).text


def test_two_configs_share_a_page_without_sharing_ids() -> None:
    page = Page(render_html(report_data(configs=("topp95", "topk50"), **SMALL)))
    assert [text for level, text in page.headings if level == 3][:2] == ["topp95", "topk50"]
    assert len(page.ids) == len(set(page.ids))


def test_the_reader_of_these_tests_rejects_a_page_with_a_tag_left_open() -> None:
    text = small_page()
    with pytest.raises(AssertionError, match="closes"):
        Page(text.replace("</table>", "", 1))


def test_the_page_asks_the_network_for_nothing() -> None:
    """What its scripts do is seen in the browser; here only that no markup asks, and that the policy forbids."""
    text = small_page(Word.DIFFERENT)
    page = Page(text)
    assert not page.tags & {"link", "img", "iframe", "object", "embed", "base", "form"}
    assert ("script", "src") not in {(tag, name) for tag, name, _ in page.attributes}
    assert "default-src 'none'; script-src 'sha256-" in policy(page)
    text = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert "//" not in text.replace("</", "")
    assert not re.search(r"@import|url\((?!#)", text)
    references = [
        value for _, name, value in page.attributes if name in {"href", "src", "srcset", "xlink:href", "data"}
    ]
    assert references
    assert all(value.startswith("#") for value in references)


def policy(page: Page) -> str:
    return next(value for tag, name, value in page.attributes if (tag, name) == ("meta", "content") and "src" in value)


HOSTILE = "<script>alert('x')</script>\"'&<b>"


def test_hostile_text_anywhere_is_shown_and_never_becomes_markup() -> None:
    plain = Page(small_page(Word.DIFFERENT))
    data = with_prompt_id(report_data(Word.DIFFERENT, **SMALL), "story", HOSTILE)
    data = replace(
        data,
        title=HOSTILE,
        run_id=HOSTILE,
        headline=HOSTILE,
        reasons=(HOSTILE,),
        next_steps=(HOSTILE, "equivtest " + HOSTILE),
        gate_of_record=HOSTILE,
        controls=tuple(replace(c, name=HOSTILE, outcome=HOSTILE, expected=HOSTILE) for c in data.controls),
        configs=tuple(replace(c, params=HOSTILE, routed=HOSTILE) for c in data.configs),
        diagnosis=(HOSTILE,),
        evidence=data.evidence.assign(method=HOSTILE, name=HOSTILE),
        manifest={"command": HOSTILE, HOSTILE: {HOSTILE: [HOSTILE]}},
    )
    text = render_html(data)
    page = Page(text)
    assert text.count("<script") == small_page(Word.DIFFERENT).count("<script")
    assert page.tags == plain.tags
    assert HOSTILE in page.text
    assert {name for _, name, _ in page.attributes} == {name for _, name, _ in plain.attributes}


def test_a_hostile_config_name_stays_text_in_tables_and_figures() -> None:
    data = report_data(configs=(HOSTILE,), **SMALL)
    text = render_html(data)
    assert text.count("<script") == small_page().count("<script")
    assert Page(text).tags == Page(small_page()).tags


def test_equal_data_give_equal_bytes_and_other_data_do_not(tmp_path: Path) -> None:
    pages = [
        write_html(report_data(Word.DIFFERENT, **SMALL), tmp_path / "a.html"),
        write_html(report_data(Word.DIFFERENT, **SMALL), tmp_path / "b.html"),
    ]
    first, again = (path.read_bytes() for path in pages)
    assert first == again
    assert first != small_page(Word.EQUIVALENT).encode()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "b.html"]


def test_a_rejected_cell_is_marked_by_sign_colour_and_number_and_a_passing_one_is_not() -> None:
    passing = report_data(Word.EQUIVALENT, **SMALL)
    quiet = cells(num_prompts=2, num_positions=6, faulty=())
    passing = replace(passing, cells=quiet)
    target = quiet.index[(quiet["comparison"] == "off_on") & (quiet["prompt_id"] == "chat") & (quiet["position"] == 3)]
    failing = replace(passing, cells=quiet.copy())
    failing.cells.loc[target, ["p_value", "q_value"]] = [3.2e-9, 1.5e-7]
    failing.cells.loc[target, "rejected"] = True

    quiet_page, loud_page = Page(render_html(passing)), Page(render_html(failing))
    title = "rejected; chat, position 3: p 3.2e-09, q 1.5e-07"
    marked = [value for _, name, value in loud_page.attributes if name == "title" and value.startswith("rejected")]
    assert len(marked) == 1
    assert marked[0].startswith(title)
    assert loud_page.classes.count("r") == 1
    assert "1 of 12 cells rejected." in loud_page.text
    assert f"{REJECTED_MARK} 3e-9" in loud_page.text
    assert not any(value.startswith("rejected") for _, name, value in quiet_page.attributes if name == "title")
    assert quiet_page.classes.count("r") == 0
    assert "1 of 12 cells rejected." not in quiet_page.text


def test_every_cell_of_every_comparison_stands_in_a_heat_map_with_its_numbers() -> None:
    data = report_data(**SMALL)
    page = Page(render_html(data))
    titles = [value for tag, name, value in page.attributes if (tag, name) == ("td", "title")]
    assert len(titles) == len(data.cells) == 3 * 2 * 6
    order = [text for level, text in page.headings if level == 4]
    assert [text.split(" (")[0] for text in order[:3]] == ["off vs on", "on vs on_null", "off vs biased"]


def test_cells_of_the_a_a_control_are_listed_only_when_some_are_rejected() -> None:
    data = report_data(Word.INVALID, **SMALL)
    loud = replace(data, cells=cells(num_prompts=2, num_positions=6, faulty=("on_on_null",)))
    heading = (3, "Smallest p-values, on vs on_null")
    assert heading in Page(render_html(loud)).headings
    assert heading not in Page(render_html(data)).headings


def test_a_failed_control_is_said_in_words_and_a_passed_one_too() -> None:
    invalid, valid = (Page(small_page(word)).text for word in (Word.INVALID, Word.EQUIVALENT))
    assert "✗ failed" in invalid
    assert "✗ failed" not in valid
    assert valid.count("✓ passed") == 4, "in the banner and in the table"


def test_figures_follow_the_page_in_light_and_dark() -> None:
    text = small_page(Word.DIFFERENT)
    drawings = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert len(drawings) == 14, "four forests, two PIT, power, three TV, acceptance by slot, three quantile figures"
    for drawing in drawings:
        assert not re.findall(r"#[0-9a-f]{6}\b", drawing), "a colour that the page does not control"
        assert re.search(r'role="img" aria-label="[^"]{20,}"', drawing)
    assert "prefers-color-scheme: dark" in text
    used = set(re.findall(r"var\((--[\w-]+)\)", text))
    defined = set(re.findall(r"(--[\w-]+):", text))
    assert used <= defined


def test_a_run_without_speculation_controls_tests_or_biased_arm_still_has_a_page() -> None:
    data = without_law(report_data(**SMALL))
    data = replace(
        data,
        controls=(),
        next_steps=(),
        reasons=(),
        cells=data.cells[data.cells["comparison"] == "off_on"],
        evidence=data.evidence.iloc[:0],
        acceptance=data.acceptance.iloc[:0],
        configs=tuple(
            replace(c, routed="plain: min_p", acceptance_rate=None, mean_accepted=None) for c in data.configs
        ),
        manifest={},
        shown=ShownTokens(),
        speed=(),
    )
    page = Page(render_html(data))
    assert "This run has no controls." in page.text
    assert "plain: min_p" in page.text
    assert "Acceptance by slot" not in [text for _, text in page.headings]
    assert page.text.count("off vs biased") == 1, "only in how to read this page"
    empty = Page(render_html(replace(data, cells=data.cells.iloc[:0])))
    assert "No cell was tested." in empty.text


def test_a_gate_run_stays_under_a_megabyte_and_a_quarter_and_carries_a_plotting_library_only_to_plot() -> None:
    data = report_data(Word.DIFFERENT)
    assert len(render_html(data).encode()) < 1_250_000
    assert len(render_html(replace(data, shown=ShownTokens())).encode()) < 600_000


def test_provenance_is_flattened_and_the_command_has_its_own_place() -> None:
    manifest = {
        "command": "equivtest run",
        "code": {"git_commit": "abc", "git_dirty": False},
        "seeds": [0, 256],
        "error": None,
    }
    assert list(flatten(manifest)) == [
        ("code / git commit", "abc"),
        ("code / git dirty", "False"),
        ("seeds", "0, 256"),
        ("error", "-"),
    ]
    page = Page(render_html(replace(report_data(**SMALL), manifest=manifest)))
    assert "To reproduce this run: equivtest run" in page.text
