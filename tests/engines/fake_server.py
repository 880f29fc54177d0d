"""A server of completions on a thread, with a small exact law behind it, that misbehaves where a test wants it."""

import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from equivtest.records import SamplingParams
from tests.pipeline.fake_engine import VOCAB_SIZE, laws_of

TROUBLES = (
    "slow", "cut", "429", "500", "not_json", "no_object", "too_few", "too_many", "wrong_usage", "missing_choice",
    "duplicate_index", "no_ids", "odd_ids",
)  # fmt: skip
"""What can go wrong with an answer. `slow` waits until the client has given up."""

Draw = Callable[[Sequence[int], Mapping[str, Any], int], list[int]]
"""Token ids of one choice: from the prompt, the body of the request and the index of the choice."""


def draw_by_position(
    *, epsilon: float = 0.0, speculative: bool = False, ignores_seeds: bool = False, first_id: int = 40
) -> Draw:
    """From `laws_of`, each position on its own, its tokens being the ids from `first_id` on; speculative: by drafting
    the likeliest token, which is accepted with a probability that is too large by epsilon."""
    own = np.random.default_rng(0)

    def draw(prompt: Sequence[int], body: Mapping[str, Any], index: int) -> list[int]:
        rng = own if ignores_seeds else np.random.default_rng([body.get("seed", 0), index])
        laws = laws_of(prompt, body["max_tokens"], SamplingParams())
        tokens = []
        for law in laws:
            draft = int(law.argmax())
            if speculative:
                if rng.random() < law[draft] + epsilon:
                    tokens.append(draft)
                    continue
                law = np.where(np.arange(VOCAB_SIZE) == draft, 0.0, law)
                law /= law.sum()
            tokens.append(int(rng.choice(VOCAB_SIZE, p=law)))
        return [first_id + token for token in tokens]

    return draw


class FakeServer:
    """Answers at `url` while it is entered. Each request meets the next of `troubles` when it first comes, and is
    answered when it comes again; with `forever` never."""

    def __init__(
        self,
        draw: Draw | None = None,
        *,
        troubles: Sequence[str] = (),
        forever: bool = False,
        after: int = 0,
        tells_ids: bool = True,
        takes_ids: bool = True,
        finish_reason: str = "length",
        decode: Callable[[Sequence[int]], str] = lambda ids: " ".join(map(str, ids)),
        encode: Callable[[str], Sequence[int]] = lambda text: list(text.encode()),
        key: str | None = None,
        models: Sequence[str] = ("fake",),
        metrics: Callable[[], str] | None = None,
    ) -> None:
        """after: requests that are answered before the first trouble. key: what a bearer must name."""
        self.draw, self.troubles, self.forever, self.after = draw or draw_by_position(), list(troubles), forever, after
        self.tells_ids, self.takes_ids, self.finish_reason = tells_ids, takes_ids, finish_reason
        self.decode, self.encode, self.key, self.models = decode, encode, key, models
        self.metrics = metrics
        self.bodies: list[dict[str, Any]] = []
        self.num_answers: Counter[str] = Counter()
        """Right answers by request."""
        self._tries: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def __enter__(self) -> "FakeServer":
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # head and body go out at once

            def do_GET(self) -> None:
                if self.path == "/v1/models":
                    self.reply(200, {"data": [{"id": name} for name in fake.models]})
                elif self.path == "/metrics" and fake.metrics:
                    self.reply(200, fake.metrics().encode())
                else:
                    self.reply(404, {"error": "no such page"})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                given = self.headers.get("Authorization", "")
                if fake.key and given != f"Bearer {fake.key}":
                    self.reply(401, {"error": f"wrong key {given}"})
                else:
                    fake.answer(self, body)

            def reply(self, status: int, answer: object, *, promised: int = 0, retry_after: str | None = None) -> None:
                content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content) + promised))
                if retry_after:
                    self.send_header("Retry-After", retry_after)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *arguments: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        return self

    def __exit__(self, *unused: object) -> None:
        self._ended.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def answer(self, http: Any, body: dict[str, Any]) -> None:
        name = json.dumps(body, sort_keys=True)
        with self._lock:
            self.bodies.append(body)
            self._tries[name] += 1
            in_trouble = len(self.bodies) > self.after and (self.forever or self._tries[name] == 1)
            trouble = self.troubles[len(self._tries) % len(self.troubles)] if in_trouble and self.troubles else ""
        if trouble in ("429", "500"):
            http.reply(int(trouble), {"error": "busy"}, retry_after="0" if trouble == "429" else None)
        elif trouble == "slow":
            self._ended.wait(2.0)
            http.close_connection = True
        elif trouble == "not_json":
            http.reply(200, b"<html>busy</html>")
        elif trouble == "no_object":
            http.reply(200, ["busy"])
        elif not self.takes_ids and not isinstance(body["prompt"], str):
            http.reply(422, {"error": "the prompt must be a string"})
        else:
            answer = self._completion(body, trouble)
            if trouble == "cut":
                http.reply(200, json.dumps(answer).encode()[:40], promised=1000)
                http.connection.shutdown(socket.SHUT_RDWR)
                http.close_connection = True
            else:
                if not trouble:
                    with self._lock:
                        self.num_answers[name] += 1
                http.reply(200, answer)

    def _completion(self, body: dict[str, Any], trouble: str) -> dict[str, Any]:
        prompt = self.encode(body["prompt"]) if isinstance(body["prompt"], str) else body["prompt"]
        with self._lock:  # the law behind it may be a decoder, which serves one at a time
            texts = [self.draw(prompt, body, index) for index in range(body["n"])]
        texts[0] = {"too_few": texts[0][:-1], "too_many": [*texts[0], 3], "odd_ids": [*texts[0][:-1], "x"]}.get(
            trouble, texts[0]
        )
        choices: list[dict[str, Any]] = [
            {
                "index": index,
                "text": "" if trouble == "odd_ids" else self.decode(ids),
                "finish_reason": self.finish_reason,
                **({"token_ids": ids} if self.tells_ids and trouble != "no_ids" else {}),
            }
            for index, ids in enumerate(texts)
        ]
        if trouble == "missing_choice":
            choices.pop()
        if trouble == "duplicate_index":
            choices.append(choices[0])
        counted = sum(map(len, texts)) + (trouble == "wrong_usage")
        return {"choices": choices[::-1], "usage": {"completion_tokens": counted, "prompt_tokens": len(prompt)}}
