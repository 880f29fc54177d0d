"""Builds and loads the C++ extension: compiled on first use into the user's cache, loaded from there afterwards.

A build is named by a hash of everything that its code depends on: sources, flags, torch's version, and the CPU's
feature flags, since a library compiled with -march=native must not run on another CPU. It is made in a folder of its
own and renamed into place, so builds at the same time, or killed half-way, never meet.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import ninja
import platformdirs
import torch

from equivtest.errors import KernelUnavailable
from equivtest.resources import resource_dir

LIBRARY_NAME = "equivtest_kernels"
SOURCES = ("bindings.cpp", "cpu/sampling.cpp", "cpu/attention.cpp")
COMPILE_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-Wno-psabi")
"""No -ffast-math: the kernels tell NaN and infinities apart from numbers."""
_ABANDONED_AFTER_S = 3600
"""A build folder this old was left by a killed build."""

_log = logging.getLogger("equivtest")


def cache_dir() -> Path:
    """Where builds are kept: `extensions/` in the user's cache directory of equivtest."""
    return Path(platformdirs.user_cache_dir("equivtest")) / "extensions"


def load_extension(cache: Path) -> Path:
    """Load the library that this machine needs from `cache`, building it first if it is not there. Returns its path.

    A build is announced at INFO on the logger "equivtest". Raises KernelUnavailable with the compiler's first error,
    or where there is no compiler or `cache` cannot be used.
    """
    root = resource_dir("kernels_ext")
    home = cache / build_key(root, COMPILE_FLAGS, torch.__version__, cpu_identity())
    library = home / f"{LIBRARY_NAME}.so"
    with _usable(cache):
        is_built = library.exists()
    if not is_built:
        _log.info("compiling the C++ kernels (once for this machine, about 30 s)")
        started = time.monotonic()
        install(home, lambda folder: _compile_and_load(root, folder))
        _log.info("compiled the C++ kernels in %.0f s: %s", time.monotonic() - started, home)
        return library
    try:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise KernelUnavailable("cpp", f"{library} cannot be loaded: {error}; delete it to build it again") from error
    return library


def build_key(root: Path, flags: tuple[str, ...], torch_version: str, cpu: str) -> str:
    """Hash of everything a build depends on."""
    digest = hashlib.sha256("\0".join((torch_version, cpu, *flags)).encode())
    for path in sorted(root.rglob("*")):
        if path.suffix in {".h", ".cpp"}:
            digest.update(f"\0{path.relative_to(root).as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:20]


def cpu_identity() -> str:
    """Architecture and feature flags: two CPUs that agree run each other's -march=native code."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return f"{platform.machine()} {platform.processor()}"
    text = cpuinfo.read_text()
    features = re.search(r"^(flags|Features)\s*:.*$", text, re.MULTILINE)
    model = re.search(r"^model\s*:.*$", text, re.MULTILINE)
    return " ".join([platform.machine(), *(found[0] for found in (features, model) if found)])


def install(home: Path, build: Callable[[Path], None], *, backend: str = "cpp") -> None:
    """Run `build` in a new folder beside `home` and rename that to `home`; of several at once, the first stays.

    Raises KernelUnavailable where the folder that holds `home` cannot be made or written, and what `build` raises.
    """
    with _usable(home.parent, backend):
        home.parent.mkdir(parents=True, exist_ok=True)
        for leftover in home.parent.glob("*.building-*"):
            # One that has gone since it was listed belonged to a build that has just finished.
            with contextlib.suppress(FileNotFoundError):
                if time.time() - leftover.stat().st_mtime > _ABANDONED_AFTER_S:
                    shutil.rmtree(leftover, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{home.name}.building-", dir=home.parent))
    try:
        build(folder)
        # Another process may have finished first: its build is as good as this one.
        with contextlib.suppress(OSError):
            folder.rename(home)
        if not home.is_dir():
            raise KernelUnavailable(backend, f"the build could not be moved to {home}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _usable(cache: Path, backend: str = "cpp") -> Iterator[None]:
    """Turn a folder that cannot be made, read or written into KernelUnavailable."""
    try:
        yield
    except OSError as error:
        problem = f"the folder for compiled kernels, {cache}, cannot be used: {error.strerror or error}"
        raise KernelUnavailable(backend, f"{problem}; make it writable or use --kernels reference") from error


def _compile_and_load(root: Path, folder: Path) -> None:
    """Compile, link and load the library in `folder`, with torch's extension loader."""
    from torch.utils import cpp_extension  # slow to import, and only a build needs it

    compiler: str = cpp_extension.get_cxx_compiler()  # type: ignore[no-untyped-call]
    program, *_ = compiler.split() or [""]
    if shutil.which(program) is None:
        remedy = "install g++ (Debian: apt install g++) or use --kernels reference"
        raise KernelUnavailable("cpp", f"there is no C++ compiler here ({compiler} is not found): {remedy}")
    try:
        with _ninja_on_path(), _quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about compiler versions torch was not built with; a failure still raises
            cpp_extension.load(
                name=LIBRARY_NAME,
                sources=[str(root / source) for source in SOURCES],
                extra_cflags=list(COMPILE_FLAGS),
                extra_ldflags=["-fopenmp"],
                extra_include_paths=[str(root), str(root / "include"), str(root / "cpu")],
                build_directory=str(folder),
                is_python_module=False,
            )
    except (RuntimeError, OSError) as error:
        raise KernelUnavailable("cpp", f"the C++ kernels do not compile: {first_error(str(error))}") from error
    # The loader numbers the library of a second attempt in one process.
    next(folder.glob(f"{LIBRARY_NAME}*.so")).rename(folder / f"{LIBRARY_NAME}.so")
    for intermediate in folder.iterdir():
        if intermediate.suffix != ".so":
            intermediate.unlink()


def first_error(log: str) -> str:
    """The line of a build log that says what went wrong first."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for line in lines:
        if re.search(r"\berror\b:|not found|No such file", line):
            return line
    return lines[-1] if lines else "no message"


@contextlib.contextmanager
def _ninja_on_path() -> Iterator[None]:
    """torch runs `ninja` by name; the package's own is not on PATH when the virtual environment is not activated."""
    before = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = os.pathsep.join(filter(None, (ninja.BIN_DIR, before)))
    try:
        yield
    finally:
        os.environ["PATH"] = before


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch's builder logs to stderr before anyone has asked it to."""
    logger = logging.getLogger("torch.utils.cpp_extension")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
