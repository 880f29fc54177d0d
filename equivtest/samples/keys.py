"""Which samples a shard holds, where it lies, and which shards a run has."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from equivtest.errors import InvalidSetting


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardKey:
    """Which samples a shard holds. Its place on disk follows from it."""

    arm: str
    """Name of the arm."""
    config: str
    """Name of the sampling configuration."""
    prompt_id: str
    """Id of the prompt."""
    seed_start: int
    """First seed."""
    seed_stop: int
    """One past the last seed."""

    def __post_init__(self) -> None:
        for field in ("arm", "config", "prompt_id"):
            if not getattr(self, field):
                raise InvalidSetting(
                    setting=f"ShardKey.{field}", value=getattr(self, field), requirement="must not be empty"
                )
        if not 0 <= self.seed_start < self.seed_stop:
            raise InvalidSetting(
                setting="ShardKey seeds",
                value=(self.seed_start, self.seed_stop),
                requirement="must satisfy 0 <= seed_start < seed_stop",
            )

    @property
    def num_seeds(self) -> int:
        return self.seed_stop - self.seed_start

    def path(self, run_dir: Path) -> Path:
        """`run_dir/samples/arm=<>/config=<>/prompt=<>/seeds=0000-0255.parquet`, the last seed included.

        Names are percent-encoded where they hold characters that mean something in a path.
        """
        return (
            run_dir
            / "samples"
            / f"arm={quote(self.arm, safe='')}"
            / f"config={quote(self.config, safe='')}"
            / f"prompt={quote(self.prompt_id, safe='')}"
            / f"seeds={self.seed_start:04d}-{self.seed_stop - 1:04d}.parquet"
        )


def find_shards(
    run_dir: Path,
    *,
    arms: Collection[str] | None = None,
    configs: Collection[str] | None = None,
    prompt_ids: Collection[str] | None = None,
) -> list[ShardKey]:
    """The shards of a run by their names, sorted; None takes every value. Contents are not looked at."""
    keys = []
    for arm, arm_dir in _named_folders(run_dir / "samples", "arm", arms):
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
