"""What ships beside the code is in what pip installs: models, drafters and their cards, byte for byte."""

import hashlib
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODELS = ROOT / "equivtest" / "decoder" / "models"
SHIPPED = {file.relative_to(ROOT).as_posix(): file for file in MODELS.rglob("*") if file.is_file()}
assert {file.parent.name for file in SHIPPED.values()} >= {"tiny", "tiny-draft", "smollm2-dflash"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    ended = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--target", "sdist", "--directory", folder],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


def test_the_wheel_holds_every_shipped_file(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        held = {name: hashlib.sha256(wheel.read(name)).digest() for name in wheel.namelist() if name in SHIPPED}
    assert held == {name: hashlib.sha256(file.read_bytes()).digest() for name, file in SHIPPED.items()}


def test_the_sdist_holds_every_shipped_file_under_its_folder(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        sizes = {member.name.partition("/")[2]: member.size for member in sdist.getmembers()}
    assert {name: sizes.get(name) for name in SHIPPED} == {name: file.stat().st_size for name, file in SHIPPED.items()}
