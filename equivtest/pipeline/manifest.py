"""The manifest of a run: what was asked, of which code, on which machine, and how far it got."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import equivtest
from equivtest.engines.base import Engine
from equivtest.errors import InvalidShard, RunMismatch, RunNotFound
from equivtest.files import write_whole
from equivtest.protocol.plan import Protocol, fingerprint
from equivtest.resources import resource_dir
from equivtest.samples.shards import remove_stale_temporaries

FILE_NAME = "manifest.json"
VERDICT_FILE = "verdict.json"
SCHEMA_VERSION = 2

_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""What decides how fast a decoder is, and how its sums are rounded."""


class Status(StrEnum):
    STARTED = "started"
    COMPLETE = "complete"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """manifest.json, written before the first sample and rewritten at every change of status."""

    run_id: str
    status: Status
    fingerprint: str
    """Of protocol and subject: two runs with one fingerprint asked the same question."""
    protocol: Mapping[str, Any]
    subject: Mapping[str, Any]
    """The engine under test, as it describes itself."""
    options: Mapping[str, Any]
    """What this run was asked to do with the samples, for instance whether flags are confirmed."""
    code: Mapping[str, Any]
    machine: Mapping[str, Any]
    command: str
    started: str
    """UTC, ISO 8601."""
    arm_seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds spent generating, by arm, over all sittings; shards found on disk cost nothing."""
    arm_tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens generated in those seconds, by arm."""
    score_seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds spent holding the tokens against the target's law, by arm, over all sittings."""
    prompt_tokens: Mapping[str, int] = field(default_factory=dict)
    """Length of each prompt in tokens."""
    used_seeds: int | None = None
    """Seeds after which a sequential run stopped, or so far; None for a run that collects what its protocol says."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """What the engine said of how the samples came about, by topic."""
    error: str | None = None
    schema_version: int = SCHEMA_VERSION

    @property
    def judged_protocol(self) -> Protocol:
        """The protocol, with the seeds that were really collected."""
        protocol = Protocol.from_dict(self.protocol)
        return protocol if self.used_seeds is None else protocol.stopped_at(self.used_seeds)

    def with_status(self, status: Status, *, error: str | None = None) -> Manifest:
        return dataclasses.replace(self, status=status, error=error)

    def add_time(self, arm: str, seconds: float, tokens: int) -> Manifest:
        """The manifest with a batch's cost added to its arm."""
        return dataclasses.replace(
            self,
            arm_seconds={**self.arm_seconds, arm: round(self.arm_seconds.get(arm, 0.0) + seconds, 3)},
            arm_tokens={**self.arm_tokens, arm: self.arm_tokens.get(arm, 0) + tokens},
        )

    def with_notes(self, notes: Mapping[str, str]) -> Manifest:
        """The manifest with these in place of older ones on their topics."""
        return dataclasses.replace(self, notes={**self.notes, **notes})

    def add_score_time(self, arm: str, seconds: float) -> Manifest:
        spent = round(self.score_seconds.get(arm, 0.0) + seconds, 3)
        return dataclasses.replace(self, score_seconds={**self.score_seconds, arm: spent})

    def write(self, run_dir: Path) -> None:
        """Atomically: a reader never sees half a manifest."""
        write_whole(run_dir / FILE_NAME, json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, run_dir: Path) -> Manifest:
        """Raises RunNotFound, or InvalidShard for a file that is no manifest of this schema."""
        path = run_dir / FILE_NAME
        if not path.is_file():
            raise RunNotFound(run_dir, "name a folder that `equivtest run` made")
        try:
            data = json.loads(path.read_text("utf-8"))
            if data["schema_version"] != SCHEMA_VERSION:
                found = data["schema_version"]
                raise InvalidShard(path, f"schema version {found}, this program reads {SCHEMA_VERSION}")
            data["status"] = Status(data["status"])
            return cls(**data)
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidShard(path, f"not a run manifest: {error}") from error


def new_manifest(protocol: Protocol, engine: Engine, options: Mapping[str, Any]) -> Manifest:
    """What a folder is about to hold; `options` as in the record."""
    subject = engine.describe()
    return Manifest(
        run_id="",
        status=Status.STARTED,
        fingerprint=fingerprint(protocol, subject),
        protocol=protocol.to_dict(),
        subject=subject,
        options=options,
        code=describe_code(),
        machine=describe_machine(),
        command=command_line(),
        started=utc_now().isoformat(),
        prompt_tokens={prompt.id: len(engine.encode_prompt(prompt.conversation)) for prompt in protocol.prompts},
    )


def resumed(run_dir: Path, asked: Manifest) -> Manifest:
    """The manifest on disk, if it asked the same question of the same code."""
    found = Manifest.read(run_dir)
    # What no option can mend comes first; a setting of the subject is named before the fingerprint, which says less.
    for name, on_disk, now in (
        ("source_sha256", found.code.get("source_sha256"), asked.code["source_sha256"]),
        ("CPU", _cpu(found), _cpu(asked)),
        *((name, found.subject.get(name), asked.subject.get(name)) for name in {**found.subject, **asked.subject}),
        ("fingerprint", found.fingerprint, asked.fingerprint),
        ("analysis", found.options, asked.options),
    ):
        if on_disk != now:
            raise RunMismatch(run_dir, name, on_disk, now)
    return written(run_dir, dataclasses.replace(found, status=Status.STARTED, error=None))


def _cpu(manifest: Manifest) -> tuple[object, ...]:
    """Sums are rounded in another order on another processor, and the samples are then others."""
    return manifest.machine.get("cpu"), *manifest.machine.get("cpu_features", ())


def written(run_dir: Path, manifest: Manifest) -> Manifest:
    """The manifest on disk under its folder's name, and nothing there that judges fewer samples."""
    remove_stale_temporaries(run_dir)
    (run_dir / VERDICT_FILE).unlink(missing_ok=True)  # it judged fewer samples
    manifest = dataclasses.replace(manifest, run_id=run_dir.name)
    manifest.write(run_dir)
    return manifest


def utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC).replace(microsecond=0)


def describe_code() -> dict[str, Any]:
    """Version, git commit and dirty flag where there is a repository, and a hash of the sources that ran."""
    root = Path(equivtest.__file__).resolve().parent
    dirty = _git(root, "status", "--porcelain", "--untracked-files=no")
    return {
        "version": equivtest.__version__,
        "source_sha256": source_sha256(root, resource_dir("kernels_ext")),
        "git_commit": _git(root, "rev-parse", "HEAD"),
        "git_dirty": None if dirty is None else bool(dirty),
    }


def source_sha256(package: Path, kernels: Path) -> str:
    """One hash of every Python file of a package and every file of its kernels, each under its path in its folder:
    where the folders lie is no part of it, and where a file lies in them is."""
    digest = hashlib.sha256()
    for folder, pattern in ((package, "*.py"), (kernels, "*")):
        for path in sorted(folder.rglob(pattern)):
            if path.is_file() and "__pycache__" not in path.parts:
                name = f"{folder.name}/{path.relative_to(folder).as_posix()}"
                digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def describe_machine() -> dict[str, Any]:
    """What the run ran on; no host name, so that a manifest can be published."""
    return {
        "cpu": _cpu_info("model name") or platform.processor() or "unknown",
        "cpu_features": [name for name in _CPU_FEATURES if name in (_cpu_info("flags") or "").split()],
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def command_line() -> str:
    """The command to reproduce this process, quoted for a shell."""
    return shlex.join(["equivtest", *sys.argv[1:]])


def resume_command(command: str, run_dir: Path) -> str:
    """The command that continues the run which `command` started in `run_dir`."""
    words = shlex.split(command)
    if "--resume" not in words:
        words.append("--resume")
    if not any(word.split("=")[0] == "--run-dir" for word in words):
        words += ["--run-dir", str(run_dir)]
    return shlex.join(words)


def _git(root: Path, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def _cpu_info(field: str) -> str | None:
    """The first entry of /proc/cpuinfo with that name; None on systems without one."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == field), None)
