"""Prompt sets: `<set>.jsonl` holds the prompts, `<set>.toml` their source, licence and sha256."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from equivtest.errors import ChecksumMismatch, InvalidSetting, UnknownName
from equivtest.resources import resource_dir

_PROMPT_ID = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One fixed conversation up to the assistant's turn."""

    id: str
    """Names the prompt in columns, folders and reports."""
    messages: tuple[tuple[str, str], ...]
    """(role, content) pairs, rendered with the model's chat template."""

    @property
    def conversation(self) -> list[dict[str, str]]:
        """The messages as chat templates and JSON have them."""
        return [{"role": role, "content": content} for role, content in self.messages]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """Prompts in a fixed order; budgets take the first few."""

    name: str
    sha256: str
    prompts: tuple[Prompt, ...]


def prompt_set_names() -> tuple[str, ...]:
    """The built-in sets."""
    return tuple(path.stem for path in sorted(resource_dir("prompts").glob("*.jsonl")))


def load_prompt_set(name_or_path: str) -> PromptSet:
    """The built-in set of that name, or a .jsonl file with its .toml beside it.

    Raises UnknownName, ChecksumMismatch (not the file that its .toml describes), InvalidSetting naming a bad line.
    """
    path = Path(name_or_path)
    if path.suffix != ".jsonl":
        if name_or_path not in prompt_set_names():
            raise UnknownName("prompt set", name_or_path, prompt_set_names())
        path = resource_dir("prompts") / f"{name_or_path}.jsonl"
    elif not path.is_file():
        raise InvalidSetting("prompts", name_or_path, "no such file")
    content = path.read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    described = path.with_suffix(".toml")
    if not described.is_file():
        raise InvalidSetting("prompts", str(path), f"needs {described.name} beside it with source, licence and sha256")
    expected = tomllib.loads(described.read_text("utf-8")).get("sha256", "")
    if expected != sha256:
        raise ChecksumMismatch(path, expected, sha256)
    prompts = tuple(_parse(path, number, line) for number, line in enumerate(content.decode().splitlines(), 1) if line)
    ids = [prompt.id for prompt in prompts]
    if len(set(ids)) != len(ids):
        raise InvalidSetting("prompts", str(path), "prompt ids must be unique")
    return PromptSet(name=path.stem, sha256=sha256, prompts=prompts)


def _parse(path: Path, number: int, line: str) -> Prompt:
    where = f"{path.name} line {number}"
    try:
        record = json.loads(line)
        prompt_id = record["id"]
        messages = tuple((str(message["role"]), str(message["content"])) for message in record["messages"])
    except (ValueError, KeyError, TypeError) as error:
        requirement = 'each line is {"id": ..., "messages": [{"role": ..., "content": ...}]}'
        raise InvalidSetting(where, line[:80], requirement) from error
    if not isinstance(prompt_id, str) or not _PROMPT_ID.fullmatch(prompt_id):
        raise InvalidSetting(where, prompt_id, "a prompt id is made of letters, digits, dot, dash and underscore")
    return Prompt(id=prompt_id, messages=messages)
