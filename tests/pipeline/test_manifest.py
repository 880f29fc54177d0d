"""The hash of the sources names what ran, wherever it is installed."""

from collections.abc import Callable
from pathlib import Path

import pytest

from equivtest.pipeline.manifest import source_sha256


def tree(folder: Path) -> tuple[Path, Path]:
    """A package and its kernels, with two files of one name."""
    package, kernels = folder / "package", folder / "kernels"
    for path, text in (
        (package / "__init__.py", ""),
        (package / "stats" / "words.py", "A = 1\n"),
        (package / "report" / "words.py", "A = 2\n"),
        (kernels / "cpu" / "draw.cpp", "int a;\n"),
        (kernels / "cuda" / "draw.cu", "int b;\n"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return package, kernels


def swap(package: Path, kernels: Path) -> None:
    """Names and contents, taken each by itself, stay what they were."""
    one, other = package / "stats" / "words.py", package / "report" / "words.py"
    texts = one.read_text(), other.read_text()
    other.write_text(texts[0])
    one.write_text(texts[1])


def move(package: Path, kernels: Path) -> None:
    (package / "stats" / "words.py").rename(package / "words.py")


def move_kernel(package: Path, kernels: Path) -> None:
    (kernels / "cpu" / "draw.cpp").rename(kernels / "cuda" / "draw.cpp")


def edit(package: Path, kernels: Path) -> None:
    (kernels / "cuda" / "draw.cu").write_text("int c;\n")


@pytest.mark.parametrize("change", [swap, move, move_kernel, edit])
def test_a_file_that_moves_or_changes_is_other_code(tmp_path: Path, change: Callable[[Path, Path], None]) -> None:
    folders = tree(tmp_path)
    before = source_sha256(*folders)
    change(*folders)
    assert source_sha256(*folders) != before


def test_the_same_sources_elsewhere_and_once_compiled_are_the_same_code(tmp_path: Path) -> None:
    here, there = tree(tmp_path / "here"), tree(tmp_path / "site" / "packages")
    cache = there[0] / "__pycache__"
    cache.mkdir()
    (cache / "left.py").write_text("B = 1\n")
    assert source_sha256(*here) == source_sha256(*there)
