"""What the tokens of a run stand for, asked of the engine while it is loaded and kept in the run folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from equivtest.engines.base import Engine
from equivtest.errors import InvalidShard
from equivtest.files import write_whole
from equivtest.samples.reader import read_samples

TEXTS_FILE = "token_texts.json"


def keep_token_texts(run_dir: Path, engine: Engine) -> Path:
    """Write the text of every token that the run put out, so that reports need no tokenizer."""
    ids = np.unique(read_samples(run_dir, ["token_id"]).column(0).to_numpy()).tolist()
    texts = {str(id_): engine.token_text(id_) for id_ in ids}
    return write_whole(run_dir / TEXTS_FILE, json.dumps(texts, indent=0) + "\n")


def kept_token_texts(run_dir: Path) -> dict[int, str]:
    """What `keep_token_texts` wrote; empty where there is no file. Raises InvalidShard for a damaged one."""
    path = run_dir / TEXTS_FILE
    if not path.exists():
        return {}
    try:
        return {int(id_): str(text) for id_, text in json.loads(path.read_text("utf-8")).items()}
    except (ValueError, AttributeError) as error:
        raise InvalidShard(path, f"not a table of token texts ({error}); delete it and run with --resume") from error
