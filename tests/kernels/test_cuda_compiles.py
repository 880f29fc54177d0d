"""The CUDA kernels compile without a warning and without torch, for every GPU generation that the project supports.

No GPU is needed, but nvcc is.
"""

from __future__ import annotations

import functools
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from equivtest.kernels.cuda_library import COMPILE_FLAGS, find_nvcc
from equivtest.resources import resource_dir

ROOT = resource_dir("kernels_ext")
SOURCES = sorted((ROOT / "cuda").rglob("*.cu"))  # the stress program too
ARCHITECTURES = ("80", "90", "120")


@functools.cache
def fast_compile() -> tuple[str, ...]:
    """What is wrong with a source is said whatever is optimised; nvcc can do without from version 12.9 on."""
    known = subprocess.run([find_nvcc(), "--help"], capture_output=True, text=True, check=True).stdout
    return ("--Ofast-compile=max",) if "--Ofast-compile" in known else ()


def compile_source(source: Path, folder: Path) -> None:
    """For all architectures in one go. Raises RuntimeError with what nvcc says, if it is anything at all."""
    targets = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in ARCHITECTURES]
    include = ("-I", str(ROOT / "include"), "-I", str(ROOT / "cuda"))
    strict = ("-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra")
    output = ("-c", str(source), "-o", str(folder / f"{source.stem}.o"))
    command = [find_nvcc(), *COMPILE_FLAGS, *fast_compile(), *targets, *include, *strict, *output]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if ended.returncode or ended.stdout:
        raise RuntimeError(ended.stdout)


def test_every_source_compiles_without_a_word(tmp_path: Path) -> None:
    assert {source.stem for source in SOURCES} >= {"attention", "layers", "products", "sampling"}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda source: compile_source(source, tmp_path), SOURCES))


@pytest.mark.parametrize(("line", "complaint"), [("int y = *x;", "never referenced"), ("*x = z;", "undefined")])
def test_a_source_that_does_not_is_found(tmp_path: Path, line: str, complaint: str) -> None:
    source = tmp_path / "planted.cu"
    source.write_text(f"__global__ void kernel(int* x) {{ {line} }}\n")
    with pytest.raises(RuntimeError, match=complaint):
        compile_source(source, tmp_path)
