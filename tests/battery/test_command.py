"""The battery as a command, as a pytest fixture and as a function of the package."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

import equivtest
from equivtest.battery.adapters import adapt
from equivtest.cli import main as cli_main
from equivtest.errors import InvalidSetting, SamplerFailed, UnknownName
from equivtest.pytest_plugin import assert_sampler, sampler_battery
from tests.battery.samplers import ChainSampler, shifted_acceptance

__all__ = ["sampler_battery"]

RIGHT = ChainSampler()
WRONG = shifted_acceptance(0.2)
QUICK = ("--budget", "smoke", "--only", "half", "--vocab", "2")


def crashes(draft_token_ids: object, draft_probs: object, target_probs: object) -> object:
    raise RuntimeError("an illegal memory access")


def exits(draft_token_ids: object, draft_probs: object, target_probs: object) -> object:
    sys.exit("no licence")


def returns_floats(draft_token_ids: object, draft_probs: object, target_probs: torch.Tensor) -> object:
    return target_probs[:, :, 0]


def returns_numpy(draft_token_ids: object, draft_probs: object, target_probs: torch.Tensor) -> object:
    return target_probs[:, :, 0].long().numpy()


def returns_booleans(draft_token_ids: object, draft_probs: object, target_probs: torch.Tensor) -> object:
    return target_probs[:, :, 0] > 0


def counts_in_a_list(
    draft_token_ids: object, draft_probs: object, target_probs: torch.Tensor
) -> tuple[torch.Tensor, object]:
    return target_probs[:, :, 0].long(), [0] * len(target_probs)


def another_device(draft_token_ids: object, draft_probs: object, target_probs: torch.Tensor) -> object:
    return target_probs[:, :, 0].long().to("meta")


def a_tuple_of_five(draft_token_ids: object, draft_probs: object, target_probs: torch.Tensor) -> object:
    return (target_probs[:, :, 0].long(),) * 5


def other_names(draft_token_ids: object, draft_probs: object, target_probs: object, u: object) -> object:
    raise AssertionError("it is not called")


def narrow_mask(draft_token_ids: torch.Tensor, draft_probs: object, target_probs: object) -> object:
    return draft_token_ids >= 0, draft_token_ids[:, :0]


def a_seed_of_its_own(
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    *,
    seed: int | None = None,
) -> object:
    assert seed is None
    return RIGHT.judge(draft_token_ids, draft_probs, target_probs, torch.rand(target_probs.shape[:2]))


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["equivtest", "kernel", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli_main.main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


def test_a_correct_sampler_exits_0(command: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = command(f"{__name__}:RIGHT", *QUICK)
    assert code == 0
    assert out.splitlines()[-1] == "EQUIVALENT: no difference was found"
    assert "an acceptance bias of 0." in out


def test_a_wrong_sampler_exits_1_and_says_what_is_wrong(
    command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    code, out, _ = command(f"{__name__}:WRONG", *QUICK, "--json", report)
    assert code == 1
    assert "accept: acceptance of dense drafts is too high by 0.1" in out
    assert "Next: look at the comparison" in out
    written = json.loads(report.read_text("utf-8"))
    assert (written["word"], written["exit_code"]) == ("different", 1)
    assert written["findings"][0]["stage"] == "accept"
    assert len(written["evidence"]) > 20
    assert written["command"].startswith("equivtest kernel tests.battery.test_command:WRONG")
    assert written["code"]["source_sha256"]
    assert written["machine"]["cores"]
    assert (written["settings"]["device"], written["settings"]["versions"]["torch"]) == ("cpu", version("torch"))
    assert written["settings"]["versions"]["tests"] is None, "the sampler's package says no version"


def test_a_parameter_that_is_no_coin_of_ours_keeps_its_default(
    command: Callable[..., tuple[int, str, str]],
) -> None:
    code, out, _ = command(f"{__name__}:a_seed_of_its_own", *QUICK)
    assert code == 0, out
    assert "coins: global" in out


def test_a_backend_of_ours_by_name(command: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = command("--backend", "cpp", *QUICK)
    assert code == 0
    assert "backend cpp as equivtest, coins: seeds, on cpu" in out


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ((), 2, "give either MODULE:FUNCTION or --backend"),
        ((f"{__name__}:RIGHT", "--backend", "cpp"), 2, "give either MODULE:FUNCTION or --backend"),
        (("no_such_module:fn",), 2, "cannot be imported"),
        ((f"{__name__}:NOTHING",), 2, "cannot be imported"),
        ((__name__,), 2, "must be module:function"),
        ((f"{__name__}:QUICK",), 2, "is not a function"),
        (("--backend", "cudnn"), 2, "known: cpp, cuda, flashinfer, reference"),
        ((f"{__name__}:RIGHT", "--form", "trt"), 2, "known: equivtest, flashinfer, mask, vllm"),
        ((f"{__name__}:RIGHT", "--coins", "dice"), 2, "known: auto, generator, generators, global, seeds, uniforms"),
        ((f"{__name__}:RIGHT", "--coins", "seeds"), 2, "the function has no parameter seeds"),
        ((f"{__name__}:RIGHT", "--budget", "huge"), 2, "known: audit, gate, smoke"),
        ((f"{__name__}:RIGHT", "--only", "odd"), 2, "known: certain, close, disjoint"),
        ((f"{__name__}:RIGHT", "--vocab", "1"), 2, "must be between 2 and"),
        ((f"{__name__}:crashes", *QUICK), 4, "raised RuntimeError: an illegal memory access (case: half"),
        (
            (f"{__name__}:returns_floats", *QUICK),
            4,
            "returned torch.float32 [1, 2] on cpu for output ids, which must be",
        ),
        ((f"{__name__}:returns_numpy", *QUICK), 4, "returned a ndarray for output ids, which must be a tensor"),
        ((f"{__name__}:returns_booleans", *QUICK), 4, "returned torch.bool [1, 2] on cpu for output ids"),
        ((f"{__name__}:counts_in_a_list", *QUICK), 4, "returned a list for accepted counts, which must be a tensor"),
        (
            (f"{__name__}:another_device", *QUICK),
            4,
            "on meta for output ids, which must be a tensor of integers [1, 2]",
        ),
        ((f"{__name__}:a_tuple_of_five", *QUICK), 4, "returned a tuple of 5 for output ids"),
        ((f"{__name__}:crashes", *QUICK), 4, "or --no-one-hot for one that takes no one-hot drafts"),
        ((f"{__name__}:narrow_mask", "--form", "mask", *QUICK), 4, "accepted is [1, 1] and recovered [1, 0]"),
        ((f"{__name__}:other_names", *QUICK), 2, "needs u, which it does not get; name its randomness uniforms, seeds"),
        (("--backend", "cpp", "--coins", "global"), 2, "a backend of ours has its own --form and --coins"),
        ((f"{__name__}:RIGHT", "--device", "gpu0", *QUICK), 2, "device = 'gpu0': torch cannot use it here"),
        ((f"{__name__}:RIGHT", "--seed", "-1", *QUICK), 2, "seed = -1: must be at least 0"),
    ],
)
def test_what_cannot_be_tested_is_no_pass(
    command: Callable[..., tuple[int, str, str]], arguments: tuple[str, ...], code: int, says: str
) -> None:
    found, out, err = command(*arguments)
    assert found == code
    assert says in out + err


def test_the_fixture_passes_a_right_sampler_and_fails_a_wrong_one(
    sampler_battery: Callable[..., equivtest.battery.SamplerReport],
) -> None:
    options = {"budget": "smoke", "only": ("half",), "vocab": (2,)}
    assert sampler_battery(RIGHT, **options).passed
    with pytest.raises(pytest.fail.Exception, match=r"too high by 0\.1"):
        assert_sampler(WRONG, **options)


def test_check_sampler_opens_on_use_and_not_before() -> None:
    """A machine without torch imports the package."""
    assert equivtest.check_sampler(RIGHT, budget="smoke", only="half", vocab=(2,)).passed
    code = "import sys, equivtest; assert 'torch' not in sys.modules; print(hasattr(equivtest, 'nothing'))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "False\n"


def test_laws_without_an_open_decision_measure_no_bias(
    command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    code, out, _ = command(
        f"{__name__}:RIGHT", "--budget", "smoke", "--only", "equal", "--vocab", "2", "--json", report
    )
    assert code == 0
    assert "no acceptance bias is measured" in out
    assert json.loads(report.read_text("utf-8"))["smallest_bias"] is None


def test_rows_that_say_nothing_leave_a_finding_and_no_measure() -> None:
    """No test has anything to look at."""

    def nothing(draft_token_ids: torch.Tensor, draft_probs: object, target_probs: torch.Tensor) -> torch.Tensor:
        return torch.full(target_probs.shape[:2], -1)

    report = equivtest.check_sampler(nothing, budget="smoke", only=("half",), vocab=(2,))
    assert "put out no token" in report.findings[0].what
    assert (report.evidence, report.smallest_bias) == ((), None)


@pytest.mark.parametrize(("rows", "measured"), [(15, False), (1024, True)])
def test_a_bias_beyond_1_is_not_said_to_be_found(rows: int, measured: bool) -> None:
    """Of 15 rows a batch so few decisions are open that they could not show any bias."""

    def answers_few(
        draft_token_ids: torch.Tensor, draft_probs: torch.Tensor | None, target_probs: torch.Tensor, generator: Any
    ) -> torch.Tensor:
        output, _ = RIGHT(draft_token_ids, draft_probs, target_probs, generator)
        return torch.where(torch.arange(len(output))[:, None] < rows, output, -1)

    report = equivtest.check_sampler(answers_few, budget="smoke", only=("flat",), vocab=())
    assert (report.smallest_bias is not None) == measured


def test_errors_are_of_the_tree() -> None:
    with pytest.raises(UnknownName):
        adapt(RIGHT, form="other")
    with pytest.raises(InvalidSetting, match="signature"):
        adapt(dict)
    with pytest.raises(SamplerFailed, match="--form and --coins"):
        equivtest.check_sampler(crashes, budget="smoke", only=("half",), vocab=(2,))
