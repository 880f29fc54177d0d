"""Samples from anywhere: a parquet or JSON-lines file that another program wrote, as token arrays per cell family.

Columns prompt_id, seed, position, token_id, one row a token, in parquet or one JSON object a line; or one JSON object
a sample with prompt_id, seed and token_ids (a list). `config` is optional in both. A folder is all such files in it.

A list may be shorter than others of its prompt: that text ended early, and its last token is repeated. Rows a token do
not say whether a text ended or rows were lost, so there every sample needs every position.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from equivtest.errors import InvalidShard, MissingSamples, UsageError
from equivtest.samples.codes import sorted_codes

DEFAULT_CONFIG = "recorded"
"""Name of the configuration when the file does not name any."""

_SUFFIXES = (".parquet", ".jsonl")


class CellFamily(NamedTuple):
    """The cells of one (config, prompt): one for each position."""

    config: str
    prompt_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSamples:
    """One arm's samples."""

    source: Path
    """The file or folder they were read from."""
    tokens: Mapping[CellFamily, npt.NDArray[np.int32]]
    """Token ids [num_seeds, num_positions], rows sorted by seed; families sorted by name."""
    ended_early: frozenset[CellFamily]
    """Families in which some text is shorter than others: its last token is repeated."""


def read_recorded(path: Path) -> RecordedSamples:
    """Read one arm's samples from a file or folder.

    Raises UsageError when the path is not one, InvalidShard naming the file and its line or column when the content is
    not as described above, MissingSamples when a sample lacks a position that another sample of its family has.
    """
    read = [_read_file(file) for file in _files(path)]
    arms = sorted(set().union(*(file_arms for _, file_arms in read)))
    if len(arms) > 1:
        raise InvalidShard(path, f"holds the arms {', '.join(arms)}; give the samples of one arm")
    table = pa.concat_tables([file_table for file_table, _ in read])
    if table.num_rows == 0:
        raise MissingSamples(missing=f"no rows in {path}", remedy="record some tokens first")
    columns = {name: table.column(name) for name in table.column_names}
    families: dict[CellFamily, npt.NDArray[np.int32]] = {}
    ended_early: set[CellFamily] = set()
    config_codes, configs = sorted_codes(columns["config"])
    prompt_codes, prompts = sorted_codes(columns["prompt_id"])
    seed, position, token, ends = (columns[name].to_numpy() for name in ("seed", "position", "token_id", "ends"))
    family = config_codes * len(prompts) + prompt_codes
    for code in np.unique(family):
        rows = family == code
        name = CellFamily(configs[code // len(prompts)], prompts[code % len(prompts)])
        last = position[rows & ends]
        if len(last) and last.min() < position[rows].max():
            ended_early.add(name)
        families[name] = _grid(path, name, seed[rows], position[rows], token[rows], ends[rows])
    return RecordedSamples(source=path, tokens=families, ended_early=frozenset(ended_early))


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES)
        if not files:
            message = f"{path} holds no {' or '.join(_SUFFIXES)} file"
            raise UsageError(message)
        return files
    if not path.is_file():
        message = f"no such file: {path}"
        raise UsageError(message)
    if path.suffix not in _SUFFIXES:
        message = f"{path}: samples are read from {' or '.join(_SUFFIXES)} files"
        raise UsageError(message)
    return [path]


def _read_file(path: Path) -> tuple[pa.Table, set[str]]:
    """Columns config, prompt_id (string), seed, position, token_id (int64), without nulls or negative numbers, and ends
    (whether the token is the last one of a list); and the arms that the file names."""
    table = _read_parquet(path) if path.suffix == ".parquet" else _read_jsonl(path)
    arms = set(pc.unique(table.column("arm")).to_pylist()) - {None} if "arm" in table.column_names else set()
    columns: dict[str, pa.ChunkedArray] = {}
    for name, kind in _COLUMN_TYPES.items():
        if name not in table.column_names:
            if name != "config":
                known = ", ".join(table.column_names)
                raise InvalidShard(path, f"no column {name}; it has {known or 'none'}")
            columns[name] = pa.chunked_array([pa.repeat(DEFAULT_CONFIG, table.num_rows)])
            continue
        columns[name] = _checked_column(path, name, table.column(name), kind)
    in_lists = "ends" in table.column_names
    columns["ends"] = table.column("ends") if in_lists else pa.chunked_array([pa.repeat(False, table.num_rows)])
    return pa.table(columns), {str(arm) for arm in arms}


_COLUMN_TYPES = {
    "config": pa.string(),
    "prompt_id": pa.string(),
    "seed": pa.int64(),
    "position": pa.int64(),
    "token_id": pa.int64(),
}
_INT32_MAX = 2**31 - 1


def _checked_column(path: Path, name: str, column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    if column.null_count:
        row = int(np.argmax(column.is_null().to_numpy()))
        raise InvalidShard(path, f"column {name} is empty in {column.null_count} rows, first in row {row}")
    number = pa.types.is_integer(column.type)
    if kind == pa.int64() and not number:
        raise InvalidShard(path, f"column {name} has type {column.type}, must be whole numbers")
    try:
        column = column.cast(kind)
    except pa.ArrowException as unreadable:
        raise InvalidShard(path, f"column {name} has type {column.type}: {unreadable}") from unreadable
    if kind == pa.int64():
        values = column.to_numpy()
        wrong = (values < 0) | (values > _INT32_MAX)
        if wrong.any():
            row = int(np.argmax(wrong))
            raise InvalidShard(path, f"column {name} is {values[row]} in row {row}, must be in 0..{_INT32_MAX}")
    return column


def _read_parquet(path: Path) -> pa.Table:
    try:
        with pq.ParquetFile(path) as file:
            known = [*_COLUMN_TYPES, "arm"]
            return file.read([name for name in file.schema_arrow.names if name in known])
    except (pa.ArrowException, OSError) as damaged:
        raise InvalidShard(path, f"truncated or corrupt: {damaged}") from damaged


def _read_jsonl(path: Path) -> pa.Table:
    """One row a token, whichever of the two layouts a line has."""
    columns: dict[str, list[object]] = {name: [] for name in (*_COLUMN_TYPES, "arm", "ends")}
    with path.open(encoding="utf-8-sig") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    _add_line(path, number, line, columns)
        except UnicodeDecodeError as undecodable:
            raise InvalidShard(path, f"not UTF-8 text: {undecodable}") from undecodable
    kinds = {**_COLUMN_TYPES, "arm": pa.string(), "ends": pa.bool_()}
    return pa.table({name: pa.array(values, kinds[name]) for name, values in columns.items()})


def _add_line(path: Path, number: int, line: str, columns: dict[str, list[object]]) -> None:
    here = f"line {number}"
    try:
        entry = json.loads(line.rstrip("\r\n"))
    except json.JSONDecodeError as malformed:
        raise InvalidShard(path, f"{here}: not JSON: {malformed.msg} at column {malformed.colno}") from malformed
    if not isinstance(entry, dict):
        raise InvalidShard(path, f"{here}: must be a JSON object")
    whole_sample = "token_ids" in entry
    needed = ("prompt_id", "seed", "token_ids") if whole_sample else ("prompt_id", "seed", "position", "token_id")
    for name in needed:
        if name not in entry:
            raise InvalidShard(
                path,
                f"{here}: lacks {name}; a line holds prompt_id, seed and either token_ids or position and token_id",
            )
    for name in ("seed", "position", "token_id"):
        if name in needed and not _is_id(entry[name]):
            raise InvalidShard(path, f"{here}: {name} is {entry[name]!r}, must be a whole number of at least 0")
    for name in ("prompt_id", "config", "arm"):
        if not isinstance(entry.get(name, ""), str):
            raise InvalidShard(path, f"{here}: {name} is {entry[name]!r}, must be text")
    tokens = entry["token_ids"] if whole_sample else [entry["token_id"]]
    if not (isinstance(tokens, list) and tokens and all(map(_is_id, tokens))):
        raise InvalidShard(path, f"{here}: token_ids must be a list of whole numbers of at least 0, with at least one")
    columns["config"] += [entry.get("config", DEFAULT_CONFIG)] * len(tokens)
    columns["prompt_id"] += [entry["prompt_id"]] * len(tokens)
    columns["arm"] += [entry.get("arm")] * len(tokens)
    columns["seed"] += [entry["seed"]] * len(tokens)
    columns["position"] += range(len(tokens)) if whole_sample else [entry["position"]]
    columns["token_id"] += tokens
    columns["ends"] += [*[False] * (len(tokens) - 1), whole_sample]


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _INT32_MAX


def _grid(
    path: Path,
    family: CellFamily,
    seed: npt.NDArray[np.int64],
    position: npt.NDArray[np.int64],
    token: npt.NDArray[np.int64],
    ends: npt.NDArray[np.bool_],
) -> npt.NDArray[np.int32]:
    """Token ids [num_seeds, num_positions]; each seed must have each position exactly once, up to the end of a list."""
    where = f"config {family.config}, prompt {family.prompt_id}"
    seeds, seed_index = np.unique(seed, return_inverse=True)
    num_positions = int(position.max()) + 1
    row = int(np.argmax(position))
    if num_positions * len(seeds) > 64 * len(token) and not ends[row]:
        raise MissingSamples(
            missing=f"{where}: seed {seed[row]} has position {position[row]}, but all seeds have {len(token)} tokens",
            remedy=_REMEDY,
        )
    place = seed_index * num_positions + position
    counts = np.bincount(place, minlength=len(seeds) * num_positions)
    if (counts > 1).any():
        first = int(np.argmax(counts > 1))
        raise InvalidShard(
            path, f"{where}: seed {seeds[first // num_positions]}, position {first % num_positions} is there twice"
        )
    tokens = np.full((len(seeds), num_positions), -1, dtype=np.int32)
    tokens.ravel()[place] = token
    for index, last in zip(seed_index[ends], position[ends], strict=True):
        tokens[index, last + 1 :] = tokens[index, last]
    lacking = tokens.ravel() == -1
    if lacking.any():
        first = int(np.argmax(lacking))
        raise MissingSamples(
            missing=f"{int(lacking.sum())} of {len(counts)} tokens in {path}, {where}, first at "
            f"seed {seeds[first // num_positions]}, position {first % num_positions}",
            remedy=_REMEDY,
        )
    return tokens


_REMEDY = (
    "every sample of a prompt needs the same number of tokens: generate a fixed number and ignore end-of-text, or give "
    "whole samples as token_ids"
)
