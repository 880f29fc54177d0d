"""Where the files that ship beside the package are: in the source tree, or bundled in a wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def resource_dir(name: str) -> Path:
    """The folder `prompts` or `kernels_ext`; raises FileNotFoundError when the installation lacks it."""
    for parent in (_PACKAGE.parent, _PACKAGE / "_bundled"):
        if (parent / name).is_dir():
            return parent / name
    message = f"{name}/ is missing beside {_PACKAGE}; reinstall equivtest"
    raise FileNotFoundError(message)
