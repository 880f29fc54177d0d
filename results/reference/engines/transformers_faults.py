"""Two public faults put into assisted generation of the installed transformers, and gated through the adapter.

python transformers_faults.py greedy-draft RUN_DIR     greedy drafts, accepted as if sampled (transformers#32867)
python transformers_faults.py raw-q RUN_DIR            filtered drafts, raw law in the ratio (transformers#47932)
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from equivtest.engines.base import EngineOptions
from equivtest.pipeline.analysis_options import AnalysisOptions
from equivtest.pipeline.run import RunOptions, run

begin = AssistedCandidateGenerator.__init__


def begin_greedy(self: Any, *arguments: Any, **named: Any) -> None:
    begin(self, *arguments, **named)
    self.generation_config.do_sample = False


def begin_with_logits(self: Any, *arguments: Any, **named: Any) -> None:
    begin(self, *arguments, **named)
    self.generation_config.output_logits = True


def candidates_with_raw_logits(self: Any, generation_args: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    made = self.assistant_model.generate(**generation_args, **self.assistant_kwargs)
    self.assistant_kwargs["cache"] = made.cache
    return made.sequences, torch.stack(made.logits, dim=1)  # where transformers takes made.scores


def main(fault: str, run_dir: str) -> None:
    if fault == "greedy-draft":
        AssistedCandidateGenerator.__init__ = begin_greedy
    elif fault == "raw-q":
        AssistedCandidateGenerator.__init__ = begin_with_logits
        AssistedCandidateGenerator._generate_candidates = candidates_with_raw_logits
    else:
        sys.exit(__doc__)
    engine = EngineOptions(
        engine="transformers", model="tiny", drafter="model", draft_model="tiny-draft", draft_len=3, threads=1
    )
    options = RunOptions(
        configs=("topk20p90",), budget="smoke", engine=engine, analysis=AnalysisOptions(), run_dir=Path(run_dir)
    )
    verdict = run(options).analysis.verdict
    print(verdict.word, verdict.headline)  # noqa: T201
    sys.exit(verdict.exit_code)


if __name__ == "__main__":
    main(*sys.argv[1:])
