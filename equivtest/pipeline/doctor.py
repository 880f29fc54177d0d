"""What is installed, which backends resolve and why not."""

from __future__ import annotations

import importlib.metadata
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from equivtest.decoder.hub import NAMES, cached_model
from equivtest.decoder.weights import default_dtype
from equivtest.engines.registry import ENGINES, EngineKind, installed_version, missing_packages
from equivtest.errors import EquivtestError, KernelUnavailable
from equivtest.kernels.registry import get_backend, known_backends, resolve_auto
from equivtest.pipeline.manifest import describe_code, describe_machine

_PACKAGES = ("torch", "numpy", "scipy", "pyarrow", "tokenizers", "gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the doctor's report."""

    name: str
    ok: bool
    finding: str
    """What was found, or what to do about it."""
    required: bool = True
    """Whether `equivtest run` cannot work without it."""


def examine() -> list[Check]:
    """Look at everything a run needs; builds the kernel extension if it was never built."""
    checks = [_code(), _machine(), *(_package(name) for name in _PACKAGES)]
    compiler = shutil.which("g++") or shutil.which("c++")
    checks.append(Check(name="compiler", ok=compiler is not None, finding=compiler or "no C++ compiler: install g++",
                        required=False))  # fmt: skip
    checks += [_backend(name) for name in known_backends()]
    try:
        name, _ = resolve_auto()
        checks.append(Check(name="kernels auto", ok=True, finding=name))
    except KernelUnavailable as error:
        checks.append(Check(name="kernels auto", ok=False, finding=error.reason))
    checks += [_engine(name, kind) for name, kind in ENGINES.items()]
    checks += [_model(name) for name in NAMES]
    return checks


def _code() -> Check:
    code = describe_code()
    commit = code["git_commit"] or "not a git checkout"
    dirty = ", uncommitted changes" if code["git_dirty"] else ""
    return Check(name="equivtest", ok=True, finding=f"{code['version']} ({commit}{dirty})")


def _machine() -> Check:
    machine = describe_machine()
    finding = f"{machine['cpu']}, {torch.get_num_threads()} threads, dtype auto is {str(default_dtype())[6:]}"
    return Check(name="machine", ok=True, finding=finding)


def _package(name: str) -> Check:
    try:
        return Check(name=name, ok=True, finding=importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Check(name=name, ok=False, finding=f"not installed; pip install {name}")


def _engine(name: str, kind: EngineKind) -> Check:
    missing = missing_packages(kind)
    versions = ", ".join(f"{package} {installed_version(package)}" for package in kind.packages)
    finding = missing or f"{kind.words}{f' ({versions})' if versions else ''}"
    return Check(name=f"engine {name}", ok=missing is None, finding=finding, required=False)


def _backend(name: str) -> Check:
    try:
        capabilities = get_backend(name).capabilities
    except KernelUnavailable as error:
        return Check(name=f"kernels {name}", ok=False, finding=error.reason, required=False)
    can = [word for word in ("min_p", "per_request_seed", "ragged_draft") if getattr(capabilities, word)]
    devices = ", ".join(sorted(capabilities.devices))
    return Check(name=f"kernels {name}", ok=True, finding=f"{devices}; {', '.join(can)}")


def _model(name: str) -> Check:
    try:
        path: Path | None = cached_model(name)
    except EquivtestError as error:
        return Check(name=f"model {name}", ok=False, finding=str(error), required=False)
    finding = str(path) if path else f"not fetched yet: equivtest model pull {name}"
    return Check(name=f"model {name}", ok=path is not None, finding=finding, required=False)
