"""Tasks of the harness: those that it brings, a local file of its format, and one that ships here and needs no hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from equivtest.errors import InvalidSetting, TaskUnavailable
from equivtest.harness.model import DEFAULT_MAX_TOKENS

SHIPPED = {"addition": Path(__file__).parent / "addition.yaml"}
"""Tasks inside this package, by name."""

_FEWSHOT_SEED = 1234
_DATA_PACKAGES = frozenset({"datasets", "httpx", "httpx2", "huggingface_hub", "requests"})
"""Whose errors are about a task's data, where they are no OSError."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scored:
    """One run of a task."""

    metric: str
    """`metric,filter`, as the harness writes it."""
    scores: npt.NDArray[np.float64]
    """[num_items], in the order of the task."""
    prompts: tuple[str, ...]
    """Hashes of what was asked."""


class SampledTask:
    """One task whose answers are generated."""

    def __init__(self, name_or_path: str, *, num_items: int | None = None, metric: str | None = None) -> None:
        """num_items: the first so many; None takes all. metric: `name` or `name,filter`; None takes the first that
        scores items one by one.

        Raises InvalidSetting for a name that is neither, a file that is wrong, a group or a task that samples nothing,
        and TaskUnavailable for one whose data cannot be had.
        """
        self.name, self._metric = name_or_path, metric
        where = SHIPPED.get(name_or_path, Path(name_or_path))
        local = where.is_file()
        manager = TaskManager(include_defaults=not local)
        if not local and name_or_path not in manager.all_tasks:
            requirement = f"must be a task of the harness, a YAML file of its format, or {', '.join(SHIPPED)}"
            raise InvalidSetting("task", name_or_path, requirement)
        try:
            loaded = manager.load([str(where) if local else name_or_path])
        except Exception as error:  # its data sets come by many ways
            if local and not _is_of_data(error):
                requirement = f"must be a task in the harness's format: {_said(error, where)}"
                raise InvalidSetting("task", name_or_path, requirement) from error
            raise TaskUnavailable(name_or_path, f"{type(error).__name__}: {error}") from error
        if len(loaded["tasks"]) != 1:
            raise InvalidSetting("task", name_or_path, f"must be one task, not {', '.join(loaded['tasks'])}")
        self._loaded = loaded
        ((self._key, self._task),) = loaded["tasks"].items()
        if self._task.get_config("output_type") != "generate_until":
            raise InvalidSetting("task", name_or_path, "must be one that generates (output_type: generate_until)")
        if self._task.get_config("num_fewshot") is None:
            self._task.set_config("num_fewshot", 0)
        asked = self._task.get_config("generation_kwargs") or {}
        self.max_tokens = int(asked.get("max_gen_toks", DEFAULT_MAX_TOKENS))
        """Of an answer."""
        available = len(self._task.eval_docs)
        if num_items is not None and not 2 <= num_items <= available:
            raise InvalidSetting("items", num_items, f"must be 2 to {available}, which the task has")
        self.num_items = num_items or available

    def score(self, model: LM) -> Scored:
        """Ask the model every question once. Every call asks the same."""
        self._task.set_fewshot_seed(_FEWSHOT_SEED)
        answers: list[dict[str, Any]] = evaluate(
            model,
            self._loaded,
            limit=self.num_items,
            bootstrap_iters=0,
            apply_chat_template=True,
            fewshot_as_multiturn=True,
        )["samples"][self._key]
        metric = _chosen(answers, self._metric)
        name, _, wanted = metric.partition(",")
        own = sorted((one for one in answers if one["filter"] == wanted), key=lambda one: int(one["doc_id"]))
        return Scored(
            metric=metric,
            scores=np.array([float(one[name]) for one in own]),
            prompts=tuple(one["prompt_hash"] for one in own),
        )


def _is_of_data(error: Exception) -> bool:
    """Whether a task is well described, but its data could not be read or fetched."""
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _DATA_PACKAGES


def _said(error: Exception, path: Path) -> str:
    """What is wrong with a task's file, on one line: in which file, which may be one that it includes, and where."""
    mark = getattr(error, "problem_mark", None)  # of an error in the YAML itself
    if mark is None:
        return f"{path}: {type(error).__name__}: {' '.join(str(error).split())}"
    return f"{mark.name}, line {mark.line + 1}: {getattr(error, 'problem', None)}"


def _chosen(answers: Sequence[dict[str, Any]], asked: str | None) -> str:
    """The first metric, or the one asked for, among those that give every item a number."""
    first = {one["filter"]: one for one in reversed(answers)}
    known = [
        f"{name},{one['filter']}"
        for one in sorted(first.values(), key=answers.index)
        for name in one["metrics"]
        if isinstance(one[name], int | float | np.number)
    ]
    for metric in known:
        if asked is None or asked in (metric, metric.partition(",")[0]):
            return metric
    raise InvalidSetting("metric", asked, f"must be one of {', '.join(known) or 'none, for no metric is per item'}")
