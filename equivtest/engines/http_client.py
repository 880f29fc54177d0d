"""Asks a server in JSON until it answers: repeats with back-off, and errors that name the request."""

from __future__ import annotations

import math
import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import httpx2

from equivtest.engines.base import ServerOptions
from equivtest.errors import RequestFailed

Answer = TypeVar("Answer")

_REPEATED = frozenset({408, 409, 425, 429})
"""Beside 500 and above: the statuses that may be another when asked again."""
_LONGEST_WAIT_S = 30.0
_SHOWN = 300
"""Characters of a server's own words in an error."""


class Unreadable(Exception):
    """An answer that is not one to the request. Asked again, the server may give one."""


class _AgainLater(Exception):
    """A try that failed and may be repeated."""

    def __init__(self, problem: str, words: str, wait_s: float = 0.0) -> None:
        self.problem, self.detail, self.wait_s = problem, f"{problem}: {words}", wait_s
        super().__init__(self.detail)


class RequestRefused(RequestFailed):
    """The server understood the request and does not take it."""

    def __init__(self, request: str, problem: str) -> None:
        super().__init__(request, problem, "the server's words say what it does not take")


class JsonClient:
    """Its methods may be called from several threads."""

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        encrypted = any(url and url.startswith("https:") for url in (options.spec_off, options.spec_on))
        self._http = httpx2.Client(
            headers=headers,
            timeout=options.timeout_s,
            limits=httpx2.Limits(max_connections=options.concurrency),
            trust_env=False,
            verify=encrypted,  # certificates are read where there is something to verify
        )
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self.repeats: Counter[str] = Counter()
        """Why requests were asked again, and how often."""

    def ask(self, url: str, body: Mapping[str, Any] | None, read: Callable[[Any], Answer], *, label: str) -> Answer:
        """What `read` makes of the answer to a POST of `body`, or to a GET where that is None.

        read: raises Unreadable for what is not an answer to the request. Raises RequestFailed, which names `label`, for
        a refusal, and where every repeat failed.
        """
        wait_s = self._options.backoff_s
        for attempt in range(self._options.retries + 1):
            try:
                return self._once(url, body, read, label)
            except _AgainLater as failed:
                last = failed
            if attempt < self._options.retries:
                with self._lock:
                    self.repeats[last.problem] += 1
                # Requests that failed together are not repeated together.
                jittered = max(last.wait_s, wait_s * random.uniform(0.5, 1.0))
                if self._stopped.wait(min(jittered, _LONGEST_WAIT_S)):
                    raise RequestFailed(label, "given up, because another request failed", "see that one")
                wait_s *= 2
        asked = f"{url} was asked {self._options.retries + 1} times and failed every time, the last with {last.detail}"
        raise RequestFailed(label, asked, "look at the server's log")

    def _once(self, url: str, body: Mapping[str, Any] | None, read: Callable[[Any], Answer], label: str) -> Answer:
        try:
            response = self._http.request("GET" if body is None else "POST", url, json=body)
        except httpx2.TransportError as error:
            raise _AgainLater(type(error).__name__, str(error)) from error
        status = response.status_code
        if status in _REPEATED or status >= 500:
            raise _AgainLater(f"HTTP {status}", self._words(response), named_wait_s(response))
        if status >= 400:
            raise RequestRefused(label, f"{url} refused it with HTTP {status}: {self._words(response)}")
        try:
            return read(response.json())
        except Unreadable as error:
            raise _AgainLater("unreadable answer", str(error)) from error
        except ValueError as error:
            raise _AgainLater("unreadable answer", f"not JSON: {self._words(response)}") from error

    def page(self, url: str) -> str | None:
        """The text of a page; None where there is none."""
        try:
            response = self._http.get(url)
        except httpx2.TransportError:
            return None
        return response.text if response.is_success else None

    def stop(self) -> None:
        """End the waits for another try."""
        self._stopped.set()

    def close(self) -> None:
        self._http.close()

    def restart(self) -> None:
        """Wait again."""
        self._stopped.clear()

    def _words(self, response: httpx2.Response) -> str:
        """The server's own, without the key if it repeats that."""
        key = self._options.api_key
        text = " ".join(response.text.split())
        return (text.replace(key, "***") if key else text)[:_SHOWN] or "no words"


def named_wait_s(response: httpx2.Response) -> float:
    """What the server asks to wait, in seconds; dates are not read."""
    try:
        named = float(response.headers.get("retry-after", 0))
    except ValueError:
        return 0.0
    return named if math.isfinite(named) else 0.0
