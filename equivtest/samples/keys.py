"""Which samples a shard holds, where it lies, and which shards a run has."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from urllib.parse import quote, unquote

from equivtest.records import ShardKey


def shard_path(run_dir: Path, key: ShardKey, *, kind: str = "samples") -> Path:
    """`run_dir/<kind>/arm=<>/config=<>/prompt=<>/seeds=0000-0255.parquet`, the last seed included.

    kind: "samples", or "law" for the law columns of the same samples. Names are percent-encoded where they hold
    characters that mean something in a path.
    """
    return (
        run_dir
        / kind
        / f"arm={quote(key.arm, safe='')}"
        / f"config={quote(key.config, safe='')}"
        / f"prompt={quote(key.prompt_id, safe='')}"
        / f"seeds={key.seed_start:04d}-{key.seed_stop - 1:04d}.parquet"
    )


def find_shards(
    run_dir: Path,
    *,
    arms: Collection[str] | None = None,
    configs: Collection[str] | None = None,
    prompt_ids: Collection[str] | None = None,
    kind: str = "samples",
) -> list[ShardKey]:
    """The shards of a run by their names, sorted; None takes every value. Contents are not looked at."""
    keys = []
    for arm, arm_dir in _named_folders(run_dir / kind, "arm", arms):
        for config, config_dir in _named_folders(arm_dir, "config", configs):
            for prompt_id, prompt_dir in _named_folders(config_dir, "prompt", prompt_ids):
                for path in prompt_dir.glob("seeds=*-*.parquet"):
                    first, _, last = path.stem.removeprefix("seeds=").partition("-")
                    if first.isdecimal() and last.isdecimal():
                        keys.append(
                            ShardKey(
                                arm=arm,
                                config=config,
                                prompt_id=prompt_id,
                                seed_start=int(first),
                                seed_stop=int(last) + 1,
                            )
                        )
    return sorted(keys, key=lambda key: (key.arm, key.config, key.prompt_id, key.seed_start, key.seed_stop))


def _named_folders(parent: Path, level: str, allowed: Collection[str] | None) -> Iterator[tuple[str, Path]]:
    """The folders `level=name` in `parent` whose name is allowed, with the name."""
    for folder in parent.glob(f"{level}=*"):
        name = unquote(folder.name.removeprefix(f"{level}="))
        if allowed is None or name in allowed:
            yield name, folder
