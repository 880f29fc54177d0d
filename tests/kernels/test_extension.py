"""Building the extension: once, out of everyone's way, and with a plain word when it cannot be done."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from equivtest.errors import KernelUnavailable
from equivtest.kernels import extension, registry
from equivtest.kernels.cpp import load
from equivtest.resources import resource_dir


def copy_of_sources(folder: Path) -> Path:
    return Path(shutil.copytree(resource_dir("kernels_ext"), folder / "kernels_ext"))


def test_the_key_names_everything_a_build_depends_on(tmp_path: Path) -> None:
    root = copy_of_sources(tmp_path)
    flags, torch_version, cpu = ("-O3",), "2.13.0", "x86_64 avx2"
    keys = {
        extension.build_key(root, flags, torch_version, cpu),
        extension.build_key(root, ("-O2",), torch_version, cpu),
        extension.build_key(root, flags, "2.12.0", cpu),
        extension.build_key(root, flags, torch_version, "x86_64 avx512"),
    }
    header = root / "include" / "equivtest" / "philox.h"
    header.write_text(header.read_text() + "\n")
    keys.add(extension.build_key(root, flags, torch_version, cpu))
    header.rename(header.with_name("renamed.h"))
    keys.add(extension.build_key(root, flags, torch_version, cpu))
    assert len(keys) == 6


def test_the_key_is_the_same_wherever_the_sources_are(tmp_path: Path) -> None:
    here = extension.build_key(resource_dir("kernels_ext"), (), "", "")
    assert extension.build_key(copy_of_sources(tmp_path), (), "", "") == here


def test_the_cpu_s_features_are_part_of_its_identity() -> None:
    assert len(extension.cpu_identity().split()) > 5
    assert extension.cpu_identity() == extension.cpu_identity()


def test_without_a_compiler_the_backend_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(KernelUnavailable, match=r"kernel backend 'cpp' is not available.*/nowhere/c\+\+") as caught:
        extension.load_extension(tmp_path)
    assert str(caught.value).endswith("install g++ (Debian: apt install g++) or use --kernels reference")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_made_leaves_auto_with_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    cache = tmp_path / "file" / "extensions"
    with pytest.raises(KernelUnavailable, match=f"{cache}, cannot be used: Not a directory.*--kernels reference"):
        extension.load_extension(cache)

    def load_from(name: str) -> object:
        return extension.load_extension(cache) if name == "cpp" else object()

    monkeypatch.setattr(registry, "get_backend", load_from)
    name, refused = registry.resolve_auto()
    assert name == "reference"
    assert str(cache) in refused["cpp"]


@pytest.mark.parametrize("forbidden", ["pathlib.Path.exists", "pathlib.Path.mkdir", "tempfile.mkdtemp"])
def test_a_cache_that_may_not_be_used_makes_the_backend_unavailable(
    forbidden: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    cache = tmp_path / "cache"
    # What else is looked at on the way is there: only the cache is forbidden.
    for name in ("resource_dir", "cpu_identity", "build_key"):
        monkeypatch.setattr(extension, name, lambda *args: "any")
    with monkeypatch.context() as patch:
        patch.setattr(forbidden, refuse)
        with pytest.raises(KernelUnavailable, match=f"{cache}, cannot be used: Permission denied"):
            extension.load_extension(cache)


def test_a_failed_compilation_quotes_the_first_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root = copy_of_sources(tmp_path)
    (root / "cpu" / "sampling.cpp").write_text("#error this source is broken\n")
    monkeypatch.setattr(extension, "resource_dir", lambda name: tmp_path / name)
    monkeypatch.setattr(extension, "SOURCES", ("cpu/sampling.cpp",))
    cache = tmp_path / "cache"
    with caplog.at_level(logging.INFO, "equivtest"), pytest.raises(KernelUnavailable, match="this source is broken"):
        extension.load_extension(cache)
    assert [record.message for record in caplog.records] == [
        "compiling the C++ kernels (once for this machine, about 30 s)"
    ]
    assert list(cache.iterdir()) == []


def test_a_cached_build_is_loaded_without_a_compiler_or_ninja() -> None:
    load()  # builds it if this machine has not yet
    environment = {**os.environ, "CXX": "/nowhere/c++", "PATH": "/nowhere"}
    program = "from equivtest.kernels.registry import get_backend; print(get_backend('cpp').name)"
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "cpp\n"


def test_auto_prefers_cpp_and_says_why_it_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    load()
    assert registry.resolve_auto() == ("cpp", {})

    def refuse(name: str) -> object:
        if name == "cpp":
            raise KernelUnavailable("cpp", "no compiler")
        return object()

    monkeypatch.setattr(registry, "get_backend", refuse)
    assert registry.resolve_auto() == ("reference", {"cpp": "no compiler"})


def test_builds_at_the_same_time_end_with_one_whole_build(tmp_path: Path) -> None:
    home = tmp_path / "key"
    at_once = threading.Barrier(3)

    def build(folder: Path) -> None:
        (folder / "a").write_text(str(folder))
        at_once.wait(timeout=30)
        (folder / "b").write_text(str(folder))

    threads = [threading.Thread(target=extension.install, args=(home, build)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(path.name for path in home.iterdir()) == ["a", "b"]
    assert (home / "a").read_text() == (home / "b").read_text()
    assert list(tmp_path.iterdir()) == [home]


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "half").write_text("")
        message = "stopped"
        raise RuntimeError(message)

    with pytest.raises(RuntimeError, match="stopped"):
        extension.install(tmp_path / "key", build)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_build_neither_stops_the_next_one_nor_stays_forever(tmp_path: Path) -> None:
    old, recent = tmp_path / "key.building-old", tmp_path / "key.building-recent"
    for leftover in (old, recent):
        leftover.mkdir()
        (leftover / "lock").write_text("")
    two_hours_ago = time.time() - 7200
    os.utime(old, (two_hours_ago, two_hours_ago))
    extension.install(tmp_path / "key", lambda folder: (folder / "a").touch())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "key.building-recent"]


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("[1/3] c++ -c a.cpp\nFAILED: a.o\na.cpp:3:5: error: no x\nmore: error: y", "a.cpp:3:5: error: no x"),
        ("/bin/sh: 1: g++: not found\nninja: build stopped", "/bin/sh: 1: g++: not found"),
        ("something else\n\nthe last word\n", "the last word"),
        ("", "no message"),
    ],
)  # fmt: skip
def test_the_first_error_of_a_log_is_found(log: str, expected: str) -> None:
    assert extension.first_error(log) == expected
