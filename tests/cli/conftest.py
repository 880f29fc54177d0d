"""Two runs to look at."""

from pathlib import Path

import pytest

from equivtest.engines.base import EngineOptions
from equivtest.pipeline.analysis_options import AnalysisOptions
from equivtest.pipeline.run import RunOptions, run
from tests.pipeline.fake_engine import FakeEngine


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an equivalent run and a different one."""
    folder = tmp_path_factory.mktemp("results")
    for name, epsilon in (("good", 0.0), ("bad", 0.4)):
        run(
            RunOptions(
                budget="smoke", engine=EngineOptions(model="fake"), analysis=AnalysisOptions(confirm=False),
                run_dir=folder / name,
            ),
            engine=FakeEngine(on_epsilon=epsilon),
        )  # fmt: skip
    return folder
