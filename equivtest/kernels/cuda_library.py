"""Builds and loads the CUDA kernels: one shared library without torch, compiled by nvcc on first use, called by ctypes.

The library knows nothing of torch, so it needs no torch headers and fits every torch version; a call hands over device
pointers and the current stream. Every exported function `equivtest_<op>` launches, never waits, and returns an error
text or null.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from equivtest.errors import KernelUnavailable
from equivtest.kernels.extension import cache_dir, first_error, install
from equivtest.resources import resource_dir

_OLDEST = (8, 0)
"""bfloat16 in the tensor cores."""
LIBRARY_NAME = "libequivtest_cuda.so"
COMPILE_FLAGS = ("-O3", "-std=c++17", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC")

_log = logging.getLogger("equivtest")

Argument = Tensor | int | float | None


class CudaLibrary:
    """The loaded kernels. Made by `load_library`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._functions: dict[str, ctypes._NamedFuncPointer] = {}

    def call(self, op: str, *arguments: Argument) -> None:
        """Launch `equivtest_<op>` on the current stream.

        A tensor goes as its data pointer, None as null, an int as int64, a float as double; the stream comes last. The
        caller has checked devices, dtypes and contiguity. Raises RuntimeError with CUDA's message.
        """
        function = self._functions.get(op)
        if function is None:
            function = self._functions[op] = getattr(self._library, f"equivtest_{op}")
            function.restype = ctypes.c_char_p
        message = function(*map(_as_c, arguments), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
        if message is not None:
            error = f"CUDA kernel {op}: {message.decode()}"
            raise RuntimeError(error)


def _as_c(value: Argument) -> ctypes.c_void_p | ctypes.c_int64 | ctypes.c_double:
    if value is None:
        return ctypes.c_void_p(None)
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.c_double(value) if isinstance(value, float) else ctypes.c_int64(value)


@functools.cache
def load_library() -> CudaLibrary:
    """The kernels for the current device, compiled if this machine has not yet done so.

    A build is announced at INFO on the logger "equivtest". Raises KernelUnavailable where there is no CUDA device or no
    nvcc, with the compiler's first error, or where the cache cannot be used.
    """
    if not torch.cuda.is_available():
        raise KernelUnavailable("cuda", f"torch {torch.__version__} finds no usable CUDA device")
    compiler = find_nvcc()
    capability = torch.cuda.get_device_capability()
    if capability < _OLDEST:
        raise KernelUnavailable(
            "cuda", f"{torch.cuda.get_device_name()} is sm_{capability[0]}{capability[1]}: sm_80 or newer"
        )
    architecture = "{}{}".format(*capability)
    root = resource_dir("kernels_ext")
    home = cache_dir().with_name("cuda") / build_key(root, architecture, compiler)
    if not (home / LIBRARY_NAME).exists():
        _log.info("compiling the CUDA kernels (once for this machine, about a minute)")
        started = time.monotonic()
        install(home, lambda folder: compile_library(root, folder, compiler, [architecture]), backend="cuda")
        _log.info("compiled the CUDA kernels in %.0f s: %s", time.monotonic() - started, home)
    return CudaLibrary(home / LIBRARY_NAME)


def find_nvcc() -> str:
    """Path of nvcc: on PATH, or in the CUDA toolkit that torch finds. Raises KernelUnavailable."""
    from torch.utils.cpp_extension import CUDA_HOME  # slow to import, and only a build needs it

    for candidate in ("nvcc", *([f"{CUDA_HOME}/bin/nvcc"] if CUDA_HOME else [])):
        found = shutil.which(candidate)
        if found is not None:
            return found
    raise KernelUnavailable("cuda", "there is no nvcc here: install the CUDA toolkit, or use --kernels reference")


def build_key(root: Path, architecture: str, compiler: str) -> str:
    """Hash of everything a build depends on: sources, flags, the device's architecture and nvcc's version."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256("\0".join((architecture, version, *COMPILE_FLAGS)).encode())
    for path in sorted([*(root / "include").rglob("*.h"), *(root / "cuda").glob("*.cu*")]):
        digest.update(f"\0{path.relative_to(root).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:20]


def compile_library(root: Path, folder: Path, compiler: str, architectures: Sequence[str]) -> None:
    """Compile every kernels_ext/cuda/*.cu side by side, for each architecture ("90"), and link them in `folder`.

    Raises KernelUnavailable with the compiler's first error.
    """
    targets = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in architectures]
    include = ["-I", str(root / "include"), "-I", str(root / "cuda")]
    common = [compiler, *COMPILE_FLAGS, *targets, *include]
    sources = sorted((root / "cuda").glob("*.cu"))
    objects = [folder / f"{source.stem}.o" for source in sources]
    _run_all([[*common, "-c", str(source), "-o", str(target)] for source, target in zip(sources, objects, strict=True)])
    _run_all([[compiler, *targets, "-shared", *map(str, objects), "-o", str(folder / LIBRARY_NAME)]])
    for intermediate in objects:
        intermediate.unlink()


def _run_all(commands: Sequence[Sequence[str]]) -> None:
    """Run compilers at the same time; raise for the first that fails once all have ended."""
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for command in commands
    ]
    outputs = [process.communicate()[0] for process in running]
    for process, output in zip(running, outputs, strict=True):
        if process.returncode:
            raise KernelUnavailable("cuda", f"the CUDA kernels do not compile: {first_error(output)}")
