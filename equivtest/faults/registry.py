"""Faults by name: those of this package, and those that other packages bring through an entry point.

    [project.entry-points."equivtest.faults"]
    my_faults = "my_package.my_faults"

names a module whose FAULTS is an iterable of faults, or of functions that return one.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from hashlib import sha256
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from equivtest.errors import InvalidSetting, UnknownName
from equivtest.faults import (
    acceptance,
    end,
    generator_offset,
    history,
    lossy,
    numerics,
    proposal,
    recovery,
    rows,
    state,
    streams,
    target_law,
    variants,
)
from equivtest.faults.base import Fault

ENTRY_POINTS = "equivtest.faults"
"""Group under which packages bring faults of their own."""

_MODULES = (
    target_law,
    proposal,
    acceptance,
    recovery,
    streams,
    rows,
    state,
    history,
    end,
    numerics,
    variants,
    lossy,
)
"""In the order of the catalogue."""

NOT_EXPRESSIBLE: Mapping[int, str] = {
    41: "a recurrent state that is not rolled back: Llama and Qwen3 have none, all their state is keys and values",
}
"""Public faults, by number, that this decoder cannot have, and why."""

BY_NAME_ONLY: Mapping[str, str] = {
    generator_offset.NAME: "needs the flashinfer kernels, older than 0.7.4, and batches of one",
}
"""Faults that can be planted in some decoders alone, and in which. They are no part of the catalogue."""

_BUILT_IN: Mapping[str, Callable[..., Fault]] = {
    factory.__name__: factory for module in (*_MODULES, generator_offset) for factory in module.FAULTS
}


def known_faults() -> tuple[str, ...]:
    """Names that `get_fault` takes. Raises InvalidSetting as `catalogue` does."""
    return tuple(fault.name for fault in catalogue())


def get_fault(name: str, **params: float) -> Fault:
    """The fault of that name with its parameters; those that entry points bring have none.

    Raises UnknownName, or InvalidSetting for a parameter that it does not have or that is out of range. Entry points
    are looked at only for a name that is not this package's.
    """
    factory = _BUILT_IN.get(name)
    if factory is None:
        found = {fault.name: fault for fault in catalogue()}
        if name not in found:
            raise UnknownName("fault", name, found)
        factory = partial(_given, found[name])
    try:
        inspect.signature(factory).bind(**params)
    except TypeError as wrong:
        raise InvalidSetting(f"parameters of {name}", params, str(wrong)) from wrong
    return factory(**params)


def _given(fault: Fault) -> Fault:
    return fault


def catalogue(extra: Iterable[Fault] = ()) -> tuple[Fault, ...]:
    """Every known fault with its default parameters: this package's by kind, those of entry points, then `extra`.

    Raises InvalidSetting for a name that comes twice, or for an entry point that cannot be loaded, which it names.
    """
    points = entry_points(group=ENTRY_POINTS)
    brought = [fault for point in points for fault in _loaded(point.name, point.module, point.load)]
    faults = (*(factory() for module in _MODULES for factory in module.FAULTS), *brought, *extra)
    twice = [name for name, count in Counter(fault.name for fault in faults).items() if count > 1]
    if twice:
        raise InvalidSetting("fault", twice[0], "is the name of two faults; each needs its own")
    return faults


def load_faults(source: str) -> tuple[Fault, ...]:
    """The faults of "module", which are its FAULTS, or of "module:attribute".

    Raises InvalidSetting where it cannot be imported or holds something else.
    """
    module, _, attribute = source.partition(":")

    def load() -> Any:
        found: Any = import_module(module)
        for name in attribute.split(".") if attribute else ():
            found = getattr(found, name)
        return found

    return _loaded(source, module, load)


def _loaded(name: str, module: str, load: Callable[[], Any]) -> tuple[Fault, ...]:
    """The faults of what `load` returns: a module with FAULTS, or what such a tuple holds; with the module's hash."""
    try:
        found = load()
        listed = found.FAULTS if isinstance(found, ModuleType) else found
        items = (listed,) if isinstance(listed, Fault) or callable(listed) else tuple(listed)
        made = tuple(item if isinstance(item, Fault) else item() for item in items)
    except Exception as error:  # whatever foreign code raises, the message says whose code it was
        raise InvalidSetting("faults from", name, f"cannot be loaded: {type(error).__name__}: {error}") from error
    for fault in made:
        if not isinstance(fault, Fault):
            raise InvalidSetting("faults from", name, f"must be faults or functions that return one, not {fault!r}")
    file = getattr(sys.modules[module], "__file__", None)
    source = sha256(Path(file).read_bytes()).hexdigest() if file else f"no file, process {os.getpid()}"
    return tuple(dataclasses.replace(fault, source_sha256=source) for fault in made)
