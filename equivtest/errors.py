"""Every error equivtest raises on purpose.

    EquivtestError                    exit 4: the run is invalid
    ├── UsageError                    exit 2: the request itself is wrong
    │   ├── UnknownName               a name that is not registered; lists the known ones
    │   └── InvalidSetting            a value outside its range
    ├── KernelError
    │   ├── KernelUnavailable         the backend cannot be built or loaded here
    │   ├── UnsupportedSampling       the backend cannot represent a request and refuses it
    │   ├── InvalidKernelInput        wrong shape, dtype, device or value; names the row
    │   ├── ScratchTooSmall           scratch was allocated for less than the call needs
    │   └── SamplerFailed             a sampler under test raised, or returned something of another shape
    ├── ModelError
    │   ├── ModelUnavailable          the weights are not here and cannot be fetched
    │   ├── ChecksumMismatch          the weights are not the ones that were asked for
    │   ├── CacheFull                 the KV cache has no room for the call
    │   └── UnsupportedModel          an architecture or file format this decoder does not read
    ├── EngineError
    │   ├── EngineUnavailable         the engine is not installed, or does not answer
    │   ├── RequestFailed             a request that was not answered as asked, after every retry; names it
    │   └── TaskUnavailable           the harness cannot load a task or its data
    ├── SampleError
    │   ├── InvalidShard              a samples file that does not follow the schema
    │   └── MissingSamples            a run lacks rows that its protocol asks for
    ├── StatisticsError
    │   ├── InsufficientSamples       too little data for the test that was asked for
    │   └── ResolutionTooCoarse       too few permutations to reject even one cell
    └── RunError
        ├── RunNotFound               no such run folder
        ├── RunExists                 the run folder already holds a run
        ├── RunBusy                   another process is writing the run folder
        ├── ArmsToCome                arms that the engine of this call cannot decode are still to be collected
        └── RunMismatch               resuming a run that was started with other settings or code

Each error carries its data as fields and ends with what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any


class EquivtestError(Exception):
    """Root of the tree. `exit_code` is what the command line ends with."""

    exit_code = 4

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors of worker processes arrive as what they are: their constructors take fields, not the message."""
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[EquivtestError], args: tuple[Any, ...], fields: dict[str, Any]) -> EquivtestError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(fields)
    return error


class UsageError(EquivtestError):
    """The request is wrong; nothing was run."""

    exit_code = 2


class UnknownName(UsageError):
    """A name that is not in a registry."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, tuple(sorted(known))
        super().__init__(f"unknown {kind} {name!r}; known: {', '.join(self.known) or 'none'}")


class InvalidSetting(UsageError):
    """A value outside its range."""

    def __init__(self, setting: str, value: object, requirement: str) -> None:
        self.setting, self.value, self.requirement = setting, value, requirement
        super().__init__(f"{setting} = {value!r}: {requirement}")


class KernelError(EquivtestError):
    """Root of the kernel errors."""


class KernelUnavailable(KernelError):
    """The backend `name` cannot be built or loaded on this machine."""

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = name, reason
        super().__init__(f"kernel backend {name!r} is not available: {reason}")


class UnsupportedSampling(KernelError):
    """The backend cannot represent a feature of the request; it never approximates."""

    def __init__(self, backend: str, feature: str) -> None:
        self.backend, self.feature = backend, feature
        super().__init__(
            f"kernel backend {backend!r} does not support {feature}; route the request plain or choose another backend"
        )


class InvalidKernelInput(KernelError, ValueError):
    """A kernel was called with a wrong shape, dtype, device or value. Nothing was written."""

    def __init__(self, op: str, problem: str, *, row: int | None = None, value: object = None) -> None:
        self.op, self.problem, self.row, self.value = op, problem, row, value
        where = "" if row is None else f" in row {row}"
        what = "" if value is None else f" (got {value!r})"
        super().__init__(f"{op}: {problem}{where}{what}")


class ScratchTooSmall(KernelError, ValueError):
    """The scratch was allocated for a smaller problem than the call."""

    def __init__(self, op: str, needed: str, allocated: str) -> None:
        self.op, self.needed, self.allocated = op, needed, allocated
        super().__init__(f"{op}: scratch too small: needs {needed}, allocated for {allocated}")


class SamplerFailed(KernelError):
    """A sampler function could not be tested: it raised, or what it returned is no answer."""

    def __init__(self, case: str, problem: str) -> None:
        self.case, self.problem = case, problem
        remedy = (
            "mend it, or choose the --form and --coins it has, or --no-one-hot for one that takes no one-hot drafts"
        )
        super().__init__(f"the sampler {problem} (case: {case}); {remedy}")


class ModelError(EquivtestError):
    """Root of the model errors."""


class ModelUnavailable(ModelError):
    """The weights are not on this machine and could not be fetched."""

    def __init__(self, model: str, reason: str, remedy: str) -> None:
        self.model, self.reason, self.remedy = model, reason, remedy
        super().__init__(f"model {model!r} is not available: {reason}; {remedy}")


class ChecksumMismatch(ModelError):
    """A file's sha256 is not the expected one."""

    def __init__(self, path: Path, expected: str, actual: str) -> None:
        self.path, self.expected, self.actual = path, expected, actual
        super().__init__(f"{path}: sha256 is {actual}, expected {expected}; delete the file and fetch it again")


class UnsupportedModel(ModelError):
    """The architecture or file format is not one the built-in decoder reads."""

    def __init__(self, model: str, reason: str) -> None:
        self.model, self.reason = model, reason
        super().__init__(f"cannot load {model}: {reason}")


class CacheFull(ModelError):
    """The cache has fewer free pages (or sequences) than the call needs; the call changed nothing."""

    def __init__(self, what: str, need: int, have: int) -> None:
        self.what, self.need, self.have = what, need, have
        super().__init__(f"KV cache is full: needs {need} {what}, has {have} free; use a smaller batch or a larger one")


class EngineError(EquivtestError):
    """Root of the errors of engines that are not the built-in decoder."""


class EngineUnavailable(EngineError):
    """The engine cannot be opened here."""

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = name, reason
        super().__init__(f"engine {name!r} is not available: {reason}")


class RequestFailed(EngineError):
    """A request was not answered as asked. None of the batch that it is part of was kept."""

    def __init__(self, request: str, problem: str, remedy: str) -> None:
        self.request, self.problem, self.remedy = request, problem, remedy
        super().__init__(f"{request}: {problem}; {remedy}")


class TaskUnavailable(EngineError):
    """A task of the evaluation harness, or its data, cannot be had here."""

    def __init__(self, task: str, reason: str) -> None:
        self.task, self.reason = task, reason
        super().__init__(f"task {task!r} is not available: {reason}; connect to its hub, or give --task a local file")


class SampleError(EquivtestError):
    """Root of the errors about samples on disk."""


class InvalidShard(SampleError):
    """A samples file does not follow the schema."""

    def __init__(self, path: Path, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(f"{path}: {problem}")


class MissingSamples(SampleError):
    """The run lacks rows that its protocol asks for."""

    def __init__(self, missing: str, remedy: str) -> None:
        self.missing, self.remedy = missing, remedy
        super().__init__(f"missing samples: {missing}; {remedy}")


class StatisticsError(EquivtestError):
    """Root of the statistics errors."""


class InsufficientSamples(StatisticsError):
    """Too little data for the test."""

    def __init__(self, test: str, have: int, need: int) -> None:
        self.test, self.have, self.need = test, have, need
        super().__init__(f"{test}: {have} samples, needs at least {need}; collect more seeds")


class NoSpread(StatisticsError):
    """Every item says the same, so nothing can be said of the error of their mean."""

    def __init__(self, test: str, num_items: int) -> None:
        self.test, self.num_items = test, num_items
        super().__init__(
            f"{test}: the same in all of {num_items} items, so its error is unknown; "
            "take a task that the model gets partly right, or more items"
        )


class ResolutionTooCoarse(StatisticsError):
    """1/(B+1) is above q/m: no single cell could be rejected, whatever the data."""

    def __init__(self, num_permutations: int, num_cells: int, q: float) -> None:
        self.num_permutations, self.num_cells, self.q = num_permutations, num_cells, q
        needed = int(num_cells / q)
        super().__init__(
            f"{num_permutations} permutations cannot reject any of {num_cells} cells at q = {q}; use at least {needed}"
        )


class RunError(EquivtestError):
    """Root of the errors about run folders."""


class RunNotFound(RunError):
    """There is no run where one was expected."""

    exit_code = 2

    def __init__(self, where: Path, remedy: str) -> None:
        self.where, self.remedy = where, remedy
        super().__init__(f"no run at {where}; {remedy}")


class RunExists(RunError):
    """A run folder that should be new already holds a run."""

    exit_code = 2

    def __init__(self, where: Path) -> None:
        self.where = where
        super().__init__(f"{where} already holds a run; add --resume to continue it or choose another --run-dir")


class RunBusy(RunError):
    """Another process is writing this run folder."""

    exit_code = 2

    def __init__(self, where: Path) -> None:
        self.where = where
        super().__init__(f"another process is writing {where}; wait for it or choose another --run-dir")


class ArmsToCome(RunError):
    """What this call's engine can decode is on disk; the run goes on once it decodes the other way. Exits 3."""

    exit_code = 3

    def __init__(self, arms: Iterable[str], lacking: str) -> None:
        self.arms, self.lacking = tuple(arms), lacking
        super().__init__(
            f"not decided: samples of {', '.join(self.arms)} are still to come, for which the engine of this call does "
            f"not decode {lacking}; what it can is on disk. Start it so and continue with --resume"
        )


class RunMismatch(RunError):
    """The run on disk was started with other settings or other code than this call."""

    exit_code = 2

    def __init__(self, where: Path, field: str, on_disk: object, asked: object) -> None:
        self.where, self.field, self.on_disk, self.asked = where, field, on_disk, asked
        super().__init__(
            f"{where} cannot be resumed: its {field} is {on_disk!r}, this call has {asked!r}; start a new run"
        )
