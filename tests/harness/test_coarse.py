"""The coarse gate through the real harness: a decoder that sums as well with speculation passes, one that does not is
stopped."""

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx2
import numpy as np
import pytest

from equivtest.cli import main as cli_main
from equivtest.errors import EngineUnavailable, InvalidSetting, NoSpread, TaskUnavailable
from equivtest.pipeline.coarse import CoarseOptions, EngineOptions, coarse
from equivtest.records import Arm, Word
from equivtest.verdict.coarse import decide_coarse
from tests.harness.arithmetic_engine import ArithmeticEngine

TASK = """
task: greetings
custom_dataset: !function words.greetings
output_type: generate_until
test_split: test
doc_to_text: "What is {{a}} + {{b}}?"
doc_to_target: "{{a}} + {{b}} = {{sum}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 40
metric_list:
  - metric: exact_match
"""
DATA = """
from datasets import Dataset


def greetings(**_):
    return {"test": Dataset.from_list([{"a": a, "b": 2, "sum": a + 2} for a in range(30)])}
"""


def options(**changes) -> CoarseOptions:
    return CoarseOptions(engine=EngineOptions(model="arithmetic"), **{"margin": 0.2, "items": 80, **changes})


def test_equal_arms_pass_and_the_record_holds_both_readings(tmp_path: Path) -> None:
    """Fixed seed; of other seeds 5 % are called different."""
    result = coarse(options(output=tmp_path), engine=ArithmeticEngine())
    assert result.word is Word.EQUIVALENT
    assert result.overlap
    assert result.ci_low < 0 < result.ci_high
    record = json.loads((tmp_path / "lm-eval.json").read_text())
    assert record["verdict"] == "equivalent"
    assert [len(own) for own in record["arms"]["on"]["scores"]] == [result.num_items] * 3
    page = (tmp_path / "lm-eval.md").read_text()
    assert "intervals overlap" in page
    assert "paired by item" in page


def test_a_lower_score_on_the_speculative_path_is_stopped() -> None:
    result = coarse(options(), engine=ArithmeticEngine(drop=0.3))
    assert result.word is Word.DIFFERENT
    assert result.exit_code == 1
    assert result.ci_high < 0


@pytest.mark.parametrize(("num_wrong", "says"), [(1980, "(p 7.4e-06)"), (1, "(p below 1e-300)")])
def test_a_score_that_changes_everywhere_is_not_said_to_have_probability_nought(num_wrong: int, says: str) -> None:
    off, on = np.zeros((2000, 3)), np.ones((2000, 3))
    on[:num_wrong] = 0
    assert says in decide_coarse(off, on, 0.05).headline


def test_few_items_settle_nothing_and_say_how_many_would() -> None:
    result = coarse(options(items=20), engine=ArithmeticEngine())
    assert result.word is Word.INCONCLUSIVE
    assert "items settle it" in result.headline


def test_both_arms_and_all_seeds_are_asked_the_same_with_coins_of_their_own() -> None:
    engine = ArithmeticEngine()
    coarse(options(items=20), engine=engine)
    prompts = [one.prompt_token_ids for one in engine.asked]
    assert len(prompts) == 2 * 3 * 20
    assert sorted(prompts[:60]) == sorted(prompts[60:])
    assert len({one.stream_key for one in engine.asked}) == len(prompts)
    assert {one.params.temperature for one in engine.asked} == {0.8}
    first = engine.conversations[0]
    assert [message["role"] for message in first] == ["user", "assistant"] * 2 + ["user"]


def test_a_local_task_file_is_asked_and_read_up_to_its_stop_text(tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text(TASK)
    (tmp_path / "words.py").write_text(DATA)
    result = coarse(options(task=str(tmp_path / "task.yaml"), items=None), engine=ArithmeticEngine())
    assert (result.task, result.num_items) == ("task.yaml", 30)
    assert 0.5 < result.arms[0].mean < 0.9


def test_what_cannot_be_asked_is_refused() -> None:
    engine = ArithmeticEngine()
    small = {"items": 20, "seeds": 2}
    for changes in ({"task": "no_such_task"}, {"metric": "bleu"}, {"items": 1}, {"planted": "reused_coin"}):
        with pytest.raises(InvalidSetting):
            coarse(options(**small | changes), engine=engine)
    with pytest.raises(InvalidSetting, match="greedy"):
        options(temperature=0)
    engine.generate = lambda requests, **_: ArithmeticEngine(drop=1.0).generate(requests, speculative=True)  # type: ignore
    with pytest.raises(NoSpread, match="partly right"):  # all wrong: nothing is measured
        coarse(options(**small), engine=engine)


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        ("doc_to_text: ", "  doc_to_text: ", "task.yaml, line 6: mapping values are not allowed in this context"),
        ("{{b}}?", "{{b + }}?", "task.yaml: TemplateSyntaxError: unexpected 'end of print statement'"),
        ("words.greetings", "words.nothing", "has no function 'nothing'"),
        ("test_split", "no_such_field", "unexpected keyword argument 'no_such_field'"),
        ("test_split: test", "test_split: nothing", "task.yaml: KeyError: 'nothing'"),
        (TASK, "- a list", "Expected YAML dict"),
    ],
)
def test_a_local_task_file_that_is_wrong_is_a_usage_error_that_says_where(
    tmp_path: Path, monkeypatch, capsys, right: str, wrong: str, says: str
) -> None:
    (tmp_path / "words.py").write_text(DATA)
    (tmp_path / "task.yaml").write_text(TASK.replace(right, wrong))
    monkeypatch.setattr(sys, "argv", ["equivtest", "lm-eval", "--task", str(tmp_path / "task.yaml")])
    with pytest.raises(SystemExit) as ended:
        cli_main.main()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert says in error
    assert "hub" not in error


def test_a_local_task_file_whose_data_cannot_be_had_is_no_usage_error(tmp_path: Path) -> None:
    data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path / 'gone.json'}}}}}"
    (tmp_path / "task.yaml").write_text(TASK.replace("custom_dataset: !function words.greetings", data))
    with pytest.raises(TaskUnavailable, match=r"gone\.json"):
        coarse(options(task=str(tmp_path / "task.yaml")), engine=ArithmeticEngine())


def test_a_local_task_file_whose_data_is_out_of_reach_is_no_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's client raises errors of its HTTP package, which are no OSError."""

    def unreachable(*_: object) -> None:
        raise httpx2.ConnectError("no route to the hub")

    monkeypatch.setattr("equivtest.harness.tasks.TaskManager.load", unreachable)
    (tmp_path / "task.yaml").write_text(TASK)
    with pytest.raises(TaskUnavailable, match="no route to the hub"):
        coarse(options(task=str(tmp_path / "task.yaml")), engine=ArithmeticEngine())


def test_without_the_harness_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equivtest.engines.registry.installed_version", lambda _: None)
    with pytest.raises(EngineUnavailable, match=r"pip install 'equivtest\[lm-eval\]'"):
        coarse(options(), engine=ArithmeticEngine())


def test_the_command_ends_in_the_verdict_with_a_decoder(monkeypatch, capsys) -> None:
    """Model tiny has never seen a sum: all of its answers are wrong, and the run is invalid, not equivalent."""
    words = "lm-eval --model tiny --items 4 --seeds 2 --dtype float32"
    monkeypatch.setattr(sys, "argv", ["equivtest", *words.split()])
    with pytest.raises(SystemExit) as ended:
        cli_main.main()
    assert ended.value.code == 4
    assert "partly right" in capsys.readouterr().err


@pytest.mark.parametrize(("asked", "bars"), [({}, False), ({"TQDM_DISABLE": ""}, True)])
def test_a_log_gets_plain_lines_and_bars_of_the_harness_only_where_they_are_asked_for(asked: dict, bars: bool) -> None:
    words = "lm-eval --model tiny --items 4 --seeds 2 --dtype float32"
    env = {name: value for name, value in os.environ.items() if name != "TQDM_DISABLE"}
    ended = subprocess.run(
        [sys.executable, "-m", "equivtest", *words.split()],
        env={**env, **asked}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ("\r" in ended.stderr or "it/s" in ended.stderr) is bars
    for arm in ("off", "on"):
        assert f"arm {arm}: 112 tokens to collect\n" in ended.stderr
        assert f"arm {arm}: 112 of 112 tokens" in ended.stderr


def test_the_screen_ends_in_the_verdict(monkeypatch, capsys) -> None:
    monkeypatch.setattr("equivtest.engines.registry.open_engine", lambda *_, **__: ArithmeticEngine(drop=0.3))
    monkeypatch.setattr(sys, "argv", ["equivtest", "lm-eval", "--items", "80", "--margin", "0.2"])
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        cli_main.main()
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 1
    assert lines[-1].strip() == "✗ DIFFERENT (exit code 1)"
    assert any("usual reading" in line for line in lines)
    assert str(Arm.ON) in {line.split()[0] for line in lines if line.split()}
