"""Who may import whom. The table is the architecture; this test is what keeps it true."""

import ast
from pathlib import Path

import pytest

import equivtest

PACKAGE = Path(equivtest.__file__).parent
LEAVES = {"errors", "files", "records", "rng", "resources", "__init__", "__main__"}
HEAVY = {"lm_eval", "torch", "pyarrow", "pandas", "transformers", "matplotlib", "scipy"}

MAY_IMPORT: dict[str, tuple[set[str], set[str]]] = {
    # room: (rooms, heavy third-party packages) beyond the leaves
    "protocol": (set(), set()),
    "kernels": (set(), {"torch"}),
    "decoder": ({"kernels"}, {"torch", "transformers"}),
    "engines": ({"decoder", "protocol", "kernels"}, {"torch", "transformers"}),
    "faults": ({"decoder", "kernels"}, {"torch"}),
    "harness": ({"engines"}, {"lm_eval"}),
    "samples": (set(), {"pyarrow"}),
    "stats": (set(), {"scipy"}),
    "verdict": ({"protocol", "stats"}, set()),
    "battery": ({"kernels", "stats"}, {"torch"}),
    "pytest_plugin": ({"battery"}, set()),
    "report": (set(), {"pandas", "pyarrow", "matplotlib"}),
    "bench": (
        {"kernels", "decoder", "engines", "protocol", "stats", "verdict"},
        {"torch", "transformers", "scipy"},
    ),
    "training": ({"kernels", "decoder", "engines", "protocol"}, {"torch", "matplotlib"}),
    "pipeline": (
        {"protocol", "kernels", "decoder", "engines", "faults", "harness", "samples", "stats", "verdict", "report"},
        {"torch", "pandas", "pyarrow"},
    ),
    "cli": ({"pipeline", "protocol", "report", "bench", "training", "battery"}, set()),
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(source: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def violations(room: str, source: str) -> list[str]:
    rooms, heavy = MAY_IMPORT[room]
    found = []
    for name in sorted(imports_of(source)):
        parts = name.split(".")
        if parts[0] == "equivtest":
            target = parts[1] if len(parts) > 1 else "__init__"
            is_room = target in MAY_IMPORT
            if is_room and target != room and target not in rooms:
                found.append(name)
        elif parts[0] in HEAVY and parts[0] not in heavy:
            found.append(name)
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_what_its_room_may(path: Path) -> None:
    room = room_of(path)
    source = path.read_text("utf-8")
    if room == "__main__":
        assert imports_of(source) <= {"__future__", "equivtest.cli.main", "equivtest.cli.main.main"}
    elif room in LEAVES:
        internal = {n.split(".")[1] for n in imports_of(source) if n.startswith("equivtest.")}
        # The one door to the battery; it opens on use, as tests/battery shows.
        assert internal <= LEAVES | ({"battery"} if room == "__init__" else set())
    else:
        assert violations(room, source) == []


def test_a_forbidden_import_is_found() -> None:
    found = violations("stats", "from equivtest.samples import reader\nimport torch")
    assert found == ["equivtest.samples", "equivtest.samples.reader", "torch"]
    assert violations("verdict", "def f():\n    import torch") == ["torch"]
    assert violations("stats", "import scipy.stats\nfrom equivtest.errors import InsufficientSamples") == []


def test_every_room_is_in_the_table() -> None:
    assert {room_of(path) for path in modules()} - LEAVES == set(MAY_IMPORT)


def test_the_decoder_reaches_kernels_through_the_contract_and_the_registry_only() -> None:
    of_no_backend = ("contract", "checks", "markov", "registry")
    allowed = {"equivtest.kernels", *(f"equivtest.kernels.{name}" for name in of_no_backend)}
    for room in ("decoder", "engines", "faults"):
        for path in (PACKAGE / room).rglob("*.py"):
            used = {n for n in imports_of(path.read_text("utf-8")) if n.startswith("equivtest.kernels")}
            modules_used = {".".join(n.split(".")[:3]) for n in used}
            assert modules_used <= allowed, path
