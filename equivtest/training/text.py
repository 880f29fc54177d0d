"""The text that a drafter learns from: sampled from its own target, question and answer.

The chat template is opened up to the user's words and the target samples them; then the user's turn is closed and the
target samples the answer, past its end of turn too, so that all texts are of one length. The same options, model,
software and kind of device give the same text. It is kept in files, one after another: a file that is there is never
sampled again.

The built-in prompts, on which drafters are judged, and a number of sampled questions are held out: no text asks them.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from equivtest.engines.base import Engine
from equivtest.errors import InvalidShard, RunMismatch, RunNotFound, UnsupportedModel
from equivtest.files import write_whole
from equivtest.protocol.configs import CONFIGS
from equivtest.protocol.prompts import load_prompt_set
from equivtest.records import Request, SamplingParams
from equivtest.rng import stream_key
from equivtest.training.chat_frame import ChatFrame, TokenIds
from equivtest.training.options import TextOptions
from equivtest.training.watch import Watcher

ANSWER_MIX: Mapping[str, float] = {"topp95": 0.45, "topk50": 0.25, "greedy": 0.3}
"""Shares of the answers that are sampled under each configuration: those on which a drafter is judged."""
QUESTION_PARAMS = SamplingParams(temperature=1.0, top_p=0.95, ignore_eos=False)
HELD_OUT_SET = "default"
"""The prompt set that is never trained on."""
SETTINGS_FILE, HELD_OUT_FILE = "text.json", "held_out.json"

_SPARE = 1.3
"""Questions asked for each that is wanted: some never end, are empty or were asked before."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Texts:
    """Texts of one length, the target's answers to questions."""

    token_ids: Tensor
    """int64 [num_texts, text_length]."""
    answer_starts: Tensor
    """int64 [num_texts], where each answer begins."""
    configs: Tensor
    """int64 [num_texts], index in ANSWER_MIX of what each answer was sampled under."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def to(self, device: torch.device) -> Texts:
        return Texts(**{name: getattr(self, name).to(device) for name in _COLUMNS})


_COLUMNS = ("token_ids", "answer_starts", "configs")


def sample_texts(engine: Engine, options: TextOptions, folder: Path, watcher: Watcher) -> Texts:
    """The texts of `folder`, after sampling what is missing there.

    Raises RunMismatch when the folder holds texts of other options or another model.
    """
    writer = _Writer(engine, options, folder, watcher)
    writer.require_same()
    writer.hold_out()
    shards: list[Texts] = []
    begin = time.monotonic()
    counts = _shard_sizes(options)
    watcher.stage("text", options.num_texts)
    for index, count in enumerate(counts):
        path = folder / f"text-{index:05}.safetensors"
        late = options.minutes is not None and time.monotonic() - begin > 60 * options.minutes
        if not path.is_file() and late and shards:
            watcher.message(f"text: {options.minutes:g} minutes are over after {index} of {len(counts)} files")
            break
        shards.append(read_shard(path) if path.is_file() else writer.write(path, index, count))
        done = sum(map(len, shards))
        rate = writer.num_sampled / max(time.monotonic() - begin, 1e-9)
        watcher.advance(done, f"{done * options.text_length:,} tokens, {rate:,.0f} tokens/s")
    return _joined(shards)


def read_texts(folder: Path) -> Texts:
    """All texts that a folder holds. Raises InvalidShard, or RunNotFound when there are none."""
    paths = sorted(folder.glob("text-*.safetensors"))
    if not paths:
        raise RunNotFound(folder, "it holds no texts; train without --resume, in another folder")
    return _joined([read_shard(path) for path in paths])


def describe_texts(texts: Texts) -> dict[str, Any]:
    """How many there are, and what identifies them."""
    digest = hashlib.sha256(texts.token_ids.int().numpy().tobytes())
    return {
        "num_texts": len(texts),
        "num_tokens": texts.token_ids.numel(),
        "num_answer_tokens": int((texts.token_ids.shape[1] - texts.answer_starts).sum()),
        "by_config": {name: int((texts.configs == index).sum()) for index, name in enumerate(ANSWER_MIX)},
        "sha256": digest.hexdigest(),
    }


def _joined(shards: Sequence[Texts]) -> Texts:
    return Texts(**{name: torch.cat([getattr(shard, name) for shard in shards]) for name in _COLUMNS})


def read_shard(path: Path) -> Texts:
    """The texts of one file. Raises InvalidShard."""
    try:
        columns = load_file(path)
        return Texts(**{name: columns[name].long() for name in _COLUMNS})
    except Exception as error:  # safetensors raises its own and OSError
        raise InvalidShard(path, f"not a file of texts: {error}; delete it, and it is sampled again") from error


def read_held_out(folder: Path) -> list[TokenIds]:
    """The held-out questions, as prompts of token ids; none where nothing was held out."""
    path = folder / HELD_OUT_FILE
    if not path.is_file():
        return []
    return [tuple(prompt) for prompt in json.loads(path.read_text("utf-8"))["prompt_token_ids"]]


class Questions:
    """Asks for questions in the target's own words. None is asked twice in one call, and none that is held out."""

    def __init__(self, engine: Engine, options: TextOptions) -> None:
        self.frame = ChatFrame.of(engine)
        self._engine, self._options = engine, options
        self._ends = frozenset(engine.describe()["eos_token_ids"])
        prompts = load_prompt_set(HELD_OUT_SET).prompts
        self._prompts = [_plain(words) for prompt in prompts for role, words in prompt.messages if role == "user"]
        self._forbidden: set[str] = set()

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that leaves half of a text to the answer."""
        return self._options.text_length // 2

    def forbid(self, questions: Sequence[TokenIds]) -> None:
        """Hold these out too."""
        self._forbidden |= {_plain(self._text(question)) for question in questions}

    def allowed(self, words: str) -> bool:
        """Whether a question is not held out and contains no built-in prompt."""
        plain = _plain(words)
        return plain not in self._forbidden and not any(prompt in plain for prompt in self._prompts)

    def sample(self, what: str, count: int) -> list[TokenIds]:
        """At most `count` questions of the stream that `what` names. Raises UnsupportedModel if there is none."""
        requests = [
            Request(
                prompt_token_ids=self.frame.opening,
                params=QUESTION_PARAMS,
                stream_key=stream_key("drafter question", self._options.seed, what, number),
                max_tokens=self._options.question_length,
            )
            for number in range(int(_SPARE * count) + 4)
        ]
        asked = [tuple(g.token_ids.tolist()) for g in self._engine.generate(requests, speculative=False)]
        # An unfinished question would be followed by an end of turn that the model did not choose.
        ended = dict.fromkeys(question[:-1] for question in asked if question[-1] in self._ends)
        found = [question for question in ended if self._fits(question)][:count]
        if count and not found:
            raise UnsupportedModel(
                str(self._engine.describe()["model"]),
                f"none of {len(requests)} questions that it asked itself ended within {self._options.question_length} "
                f"tokens and left half of {self._options.text_length} to the answer; raise both lengths",
            )
        return found

    def _fits(self, question: TokenIds) -> bool:
        words = self._text(question)
        short = len(self.frame.prompt(question)) <= self.longest_prompt
        return bool(words.strip()) and short and self.allowed(words)

    def _text(self, question: TokenIds) -> str:
        return "".join(map(self._engine.token_text, question))


class _Writer:
    """Samples what is missing in a folder."""

    def __init__(self, engine: Engine, options: TextOptions, folder: Path, watcher: Watcher) -> None:
        self._engine, self._options, self._folder, self._watcher = engine, options, folder, watcher
        self._questions = Questions(engine, options)
        self._prompts = self._given_prompts()
        self.num_sampled = 0
        """Tokens of texts sampled in this sitting."""

    def require_same(self) -> None:
        """Take the folder for these options and this model, or raise RunMismatch."""
        described = self._engine.describe()
        # More texts or more time go on where fewer left off.
        asked: dict[str, Any] = {k: v for k, v in asdict(self._options).items() if k not in ("num_texts", "minutes")}
        asked |= {name: described[name] for name in ("model_sha256", "dtype", "kernels")}
        asked |= {"answer_mix": dict(ANSWER_MIX)}
        path = self._folder / SETTINGS_FILE
        if path.is_file():
            found = json.loads(path.read_text("utf-8"))
            for name, value in asked.items():
                if found.get(name) != value:
                    raise RunMismatch(self._folder, name, found.get(name), value)
        else:
            write_whole(path, json.dumps(asked, indent=2) + "\n")

    def hold_out(self) -> None:
        """Sample the held-out questions, unless they are there, and forbid them."""
        path, frame = self._folder / HELD_OUT_FILE, self._questions.frame
        if not path.is_file():
            questions = self._questions.sample("held out", self._options.num_held_out)
            prompts = [frame.prompt(question) for question in questions]
            write_whole(path, json.dumps({"prompt_token_ids": prompts}) + "\n")
        ends = len(frame.opening), len(frame.closing)
        self._questions.forbid([prompt[ends[0] : -ends[1]] for prompt in read_held_out(self._folder)])

    def write(self, path: Path, index: int, count: int) -> Texts:
        """Sample and keep the texts of one file."""
        texts = self._sample(index, count)
        # Token ids of any vocabulary fit 32 bits.
        columns = {name: getattr(texts, name).int().contiguous() for name in _COLUMNS}
        write_whole(path, save(columns, metadata={"format": "pt"}))
        return texts

    def _sample(self, index: int, count: int) -> Texts:
        prompts, length = self._asked(index, count), self._options.text_length
        configs = _mixed(len(prompts))
        names = list(ANSWER_MIX)
        requests = [
            Request(
                prompt_token_ids=prompt,
                params=CONFIGS[names[config]],
                stream_key=stream_key("drafter answer", self._options.seed, index, number),
                max_tokens=length - len(prompt),
            )
            for number, (prompt, config) in enumerate(zip(prompts, configs, strict=True))
        ]
        generations = self._engine.generate(requests, speculative=False)
        self.num_sampled += sum(request.max_tokens for request in requests)
        rows = [[*prompt, *g.token_ids.tolist()] for prompt, g in zip(prompts, generations, strict=True)]
        starts = [len(prompt) for prompt in prompts]
        return Texts(token_ids=torch.tensor(rows), answer_starts=torch.tensor(starts), configs=torch.tensor(configs))

    def _asked(self, index: int, count: int) -> list[TokenIds]:
        """At most `count` prompts."""
        given = round(self._options.prompts_share * count) if self._prompts else 0
        asked = [self._prompts[(index * given + number) % len(self._prompts)] for number in range(given)]
        sampled = self._questions.sample(f"file {index}", count - given)
        return asked + [self._questions.frame.prompt(question) for question in sampled]

    def _given_prompts(self) -> list[TokenIds]:
        if self._options.prompts is None:
            return []
        prompts = load_prompt_set(self._options.prompts).prompts
        allowed = [p for p in prompts if all(self._questions.allowed(words) for _, words in p.messages)]
        encoded = [self._engine.encode_prompt(prompt.conversation) for prompt in allowed]
        fitting = [prompt for prompt in encoded if len(prompt) <= self._questions.longest_prompt]
        self._watcher.message(f"text: {len(fitting)} of {len(prompts)} given prompts are short enough and not held out")
        return fitting


def _shard_sizes(options: TextOptions) -> list[int]:
    whole, rest = divmod(options.num_texts, options.shard_texts)
    return [options.shard_texts] * whole + [rest] * bool(rest)


def _mixed(count: int) -> list[int]:
    """Indices in ANSWER_MIX in its proportions, spread evenly over the texts."""
    shares = torch.tensor(list(ANSWER_MIX.values())).cumsum(0)
    # The golden ratio's multiples are spread evenly however many there are.
    places = torch.arange(count, dtype=torch.float64) * 0.6180339887498949 % 1
    return torch.bucketize(places, shares[:-1].double(), right=True).tolist()


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())
