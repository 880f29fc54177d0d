"""A Chromium for the tests: the one that is there, else one that is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import BrowserType

_NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome", "google-chrome-stable")
_LONGEST_INSTALL_S = 240


class NoBrowser(Exception):
    """Everything that was tried, and why it failed."""


def find_chromium(kind: BrowserType) -> Path:
    """The path of a Chromium, by the first of these that gives one: the variable CHROMIUM, the PATH, what playwright
    has installed, the package of Debian or Ubuntu where this process may install it, what playwright can install.
    Raises NoBrowser."""
    named = os.environ.get("CHROMIUM")
    if named:
        return _existing(Path(named), "the variable CHROMIUM")
    tried = []
    for way in (_on_path, _of_playwright, _install_by_apt, _install_by_playwright):
        try:
            return way(kind)
        except NoBrowser as failed:
            tried.append(str(failed))
    message = "; ".join(tried)
    raise NoBrowser(message)


def _existing(path: Path, whose: str) -> Path:
    if not path.is_file():
        message = f"{whose} names {path}, which is not there"
        raise NoBrowser(message)
    return path


def _on_path(kind: BrowserType) -> Path:
    for found in filter(None, map(shutil.which, _NAMES)):
        return Path(found)
    message = f"none of {', '.join(_NAMES)} on the PATH"
    raise NoBrowser(message)


def _of_playwright(kind: BrowserType) -> Path:
    return _existing(Path(kind.executable_path), "playwright")


def _install_by_playwright(kind: BrowserType) -> Path:
    _run([sys.executable, "-m", "playwright", "install", "chromium"])
    return _of_playwright(kind)


def _install_by_apt(kind: BrowserType) -> Path:
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        message = "apt-get is not there or not allowed"
        raise NoBrowser(message)
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium"]
    try:
        _run(install)
    except NoBrowser:
        _run(["apt-get", "update", "-qq"])
        _run(install)
    return _on_path(kind)


def _run(command: list[str]) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_LONGEST_INSTALL_S, env=environment)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        message = f"`{' '.join(command)}` failed: {str(said).strip()[-200:]}"
        raise NoBrowser(message) from error
