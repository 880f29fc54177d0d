"""What was wanted of a GPU, what was measured, and whether it held: read from the files that the benchmarks left.

python -m equivtest.bench.gpu_figures FOLDER [STEP...]
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click

from equivtest.bench.gpu_kernels import ALL, FUSED

NOT_MEASURED = "not measured"
_VOCAB = 151_936
_RUN_S, _LARGE_RUN_S = 60.0, 300.0
_STEP_MS = {1: 0.6, 256: 1.5}
_RATIOS = {8: 10.0, 64: 8.0}
_LOGITS_READS = 6.0
_ACCEPTED = {"greedy": 2.0, "T .8 top_p .95": 1.5}
_NOISE = 0.05
"""Of a median over requests that took turns."""
_OUTCOMES = ("tests", "failures", "errors", "skipped")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the table."""

    claim: str
    wanted: str
    measured: str
    held: bool | None
    """None: to be stated, whatever it is."""

    @property
    def word(self) -> str:
        return {True: "held", False: "not held", None: "stated"}[self.held]

    def line(self) -> str:
        return f"{self.word:<8}  {self.claim}: wanted {self.wanted}, measured {self.measured}"


def figures(folder: Path, steps: tuple[str, ...] = ()) -> list[Figure]:
    """The figures of these steps, all by default. What a file that is not there would have told is not held.

    Raises KeyError for a step that has no figures.
    """
    return [figure for step in steps or tuple(_FIGURES) for figure in _FIGURES[step](folder)]


def steps_with_figures() -> tuple[str, ...]:
    """Names that `figures` takes."""
    return tuple(_FIGURES)


def at_most(claim: str, limit: float, measured: float | None, unit: str) -> Figure:
    """Held where something was measured and it is at most the limit."""
    held = measured is not None and measured <= limit
    return Figure(claim=claim, wanted=f"at most {limit:g} {unit}", measured=_text(measured, unit), held=held)


def at_least(claim: str, limit: float, measured: float | None, unit: str) -> Figure:
    """Held where something was measured and it is at least the limit."""
    held = measured is not None and measured >= limit
    return Figure(claim=claim, wanted=f"at least {limit:g} {unit}", measured=_text(measured, unit), held=held)


def stated(claim: str, measured: str | None) -> Figure:
    """Not held only where nothing was measured."""
    held = None if measured is not None else False
    return Figure(claim=claim, wanted="a statement", measured=measured or NOT_MEASURED, held=held)


def _tests(folder: Path) -> Iterator[Figure]:
    path = folder / "tests.xml"
    suites = list(ElementTree.parse(path).getroot().iter("testsuite")) if path.is_file() else []
    counts = {name: sum(int(suite.get(name, 0)) for suite in suites) for name in _OUTCOMES}
    others = {name: count for name, count in counts.items() if name != "tests"}
    told = ", ".join(f"{count} {name}" for name, count in counts.items()) if suites else NOT_MEASURED
    held = counts["tests"] > 0 and not any(others.values())
    yield Figure(claim="GPU tests", wanted="all run, none fails", measured=told, held=held)
    for case in (case for suite in suites for case in suite.iter("testcase")):
        for found in case.iter("property"):
            yield stated(f"{case.get('name')}: {found.get('name')}", found.get("value"))


def _kernels(folder: Path) -> Iterator[Figure]:
    for batch, limit in _RATIOS.items():
        row = _row(folder / "kernels.json", vocab=_VOCAB, batch=batch, draft=7, way=FUSED, op=ALL)
        claim = f"fused verification and acceptance, vocab {_VOCAB:,}, B {batch} K 7, against the FlashInfer pipeline"
        yield at_least(claim, limit, row.get("vendor_ratio"), "times faster")
    row = _row(folder / "kernels.json", vocab=_VOCAB, batch=64, draft=7, way=FUSED, op=ALL)
    claim = f"the same, B 64 K 7, in times of reading the logits once ({row.get('us', float('nan')):.0f} us)"
    yield at_most(claim, _LOGITS_READS, row.get("logits_reads"), "reads")


def _decode(folder: Path) -> Iterator[Figure]:
    for batch, limit in _STEP_MS.items():
        row = _row(folder / f"decode-{batch}.json", what="step")
        yield at_most(f"SmolLM2 plain step, batch {batch}", limit, row.get("median_ms"), "ms")


def _protocol(folder: Path) -> Iterator[Figure]:
    for name, limit in (("cuda", _RUN_S), ("flashinfer", _RUN_S), ("qwen3-4b", _LARGE_RUN_S)):
        path = folder / f"protocol-{name}.json"
        total = _row(path, part="total").get("seconds")
        settings = _read(path).get("settings", {})
        tokens = settings.get("tokens", 0)
        yield at_most(f"a gate run of all configs after warm-up, {name}, {tokens:,} tokens", limit, total, "s")
        if name != "qwen3-4b":  # random weights are timed, not judged
            yield from _verdict(name, settings)


def _verdict(name: str, settings: Mapping[str, Any]) -> Iterator[Figure]:
    word = settings.get("verdict", NOT_MEASURED)
    yield Figure(claim=f"its verdict, {name}", wanted="equivalent", measured=word, held=word == "equivalent")
    controls = {control["name"]: control for control in settings.get("controls", [])}
    for control, wanted in (("A/A", "passed"), ("planted fault", "detected")):
        found = controls.get(control, {"passed": False, "line": NOT_MEASURED})
        yield Figure(claim=f"its {control}, {name}", wanted=wanted, measured=found["line"], held=bool(found["passed"]))


def _tpot(folder: Path) -> Iterator[Figure]:
    for name in ("early_exit", "ngram", "qwen3-4b"):
        rows = _read(folder / f"tpot-{name}.json").get("rows", [])
        pairs = zip(rows[::2], rows[1::2], strict=True)  # spec-off, then spec-on
        texts = [
            f"c{off['concurrency']} {off['sampling']} {off['tpot_p50_ms']:.2f} -> {on['tpot_p50_ms']:.2f} ms "
            f"({on['speedup']:.2f}x, {on['accepted_per_round']:.2f} accepted)"
            for off, on in pairs
        ]
        yield stated(f"TPOT, spec-off -> spec-on, {name}", "; ".join(texts) or None)


def _mixed(folder: Path) -> Iterator[Figure]:
    rows = _read(folder / "mixed.json").get("rows", [])
    texts = [f"{r['batch']}, {r['requests']}, spec-{r['spec']} {r['tpot_p50_ms']:.2f} ms" for r in rows]
    yield stated("TPOT in a mixed batch of 8", "; ".join(texts) or None)


def _dflash(folder: Path) -> Iterator[Figure]:
    path, rounds = folder / "tpot-dflash.json", folder / "rounds.json"
    longest = max((row["draft_len"] for row in _read(rounds).get("rows", [])), default="?")
    for sampling, limit in _ACCEPTED.items():
        keys = {"concurrency": 1, "sampling": sampling}
        claim = f"dflash, drafts accepted a round at c1, {sampling}, draft_len {longest}"
        yield at_least(claim, limit, _row(rounds, draft_len=longest, **keys).get("accepted"), "tokens")
        served = _row(path, spec="on", **keys)
        claim = f"the same at the length chosen for speed, draft_len {served.get('draft_len', '?')}"
        yield stated(claim, _text(served["accepted_per_round"], "tokens") if served else None)
    for sampling in _ACCEPTED:
        for count in (1, 8, 16):
            keys = {"concurrency": count, "sampling": sampling}
            limit = 1.3 if count == 1 and sampling != "greedy" else 1.0
            row = _row(path, spec="on", **keys)
            where = f"c{count}, {sampling}"
            claim = f"dflash, TPOT of spec-off over spec-on, {where}, draft_len {row.get('draft_len', '?')}"
            yield at_least(claim, limit, row.get("speedup"), "times")
            row = _row(rounds, best=True, **keys)
            speedup = row["plain_ms"] / row["token_ms"] if row else None
            claim = f"the same of the device's time alone, {where}, draft_len {row.get('draft_len', '?')}"
            yield at_least(claim, limit, speedup, "times")
    mixed = {"batch": "4 greedy + 4 sampled", "spec": "on"}
    greedy, sampled = (_row(folder / "mixed-dflash.json", requests=sampling, **mixed) for sampling in _ACCEPTED)
    claim = "dflash, mixed batch of 8: greedy TPOT over that of 8 greedy"
    yield at_most(claim, 1.0 + _NOISE, greedy.get("against_alone"), "times")
    yield at_least("dflash, mixed batch of 8: sampled, spec-off over spec-on", 1.0, sampled.get("speedup"), "times")
    rows = [row for row in _read(rounds).get("rows", []) if row["best"]]
    texts = [
        f"c{r['concurrency']} {r['sampling']} K {r['draft_len']}: plain {r['plain_ms']:.2f}, "
        f"verify {r['verify_ms']:.2f}, draft {r['draft_ms']:.2f}, a token {r['token_ms']:.2f} ms"
        for r in rows
    ]
    yield stated("dflash, device time by stage at the length that pays best", "; ".join(texts) or None)
    for rule in ("chain", "match"):
        yield from _verdict(f"dflash, {rule}", _read(folder / f"gate-dflash-{rule}" / "verdict.json"))


def _onehot(folder: Path) -> Iterator[Figure]:
    for name in ("smollm2", "qwen3-4b"):
        rows = _read(folder / f"onehot-{name}.json").get("rows", [])
        texts = [f"{row['one_hot']} {row['delta_percent']:+.1f} %" for row in rows if row["one_hot"] != "none"]
        yield stated(f"one-hot rows in percent of TPOT at c8, {name}", ", ".join(texts) or None)


_FIGURES: Mapping[str, Callable[[Path], Iterator[Figure]]] = {
    "tests": _tests,
    "kernels": _kernels,
    "decode": _decode,
    "tpot": _tpot,
    "mixed": _mixed,
    "dflash": _dflash,
    "onehot": _onehot,
    "protocol": _protocol,
}


def _read(path: Path) -> dict[str, Any]:
    """The file's table; empty where there is no file."""
    return dict(json.loads(path.read_text("utf-8"))) if path.is_file() else {}


def _row(path: Path, **keys: object) -> dict[str, Any]:
    """The one row of a benchmark with these values; empty where there is none."""
    rows = [row for row in _read(path).get("rows", []) if keys.items() <= row.items()]
    return dict(rows[0]) if rows else {}


def _text(measured: float | None, unit: str) -> str:
    return NOT_MEASURED if measured is None else f"{measured:.3g} {unit}"


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("steps", nargs=-1, type=click.Choice(steps_with_figures()))
def main(folder: Path, steps: tuple[str, ...]) -> None:
    """Print held, not held or stated, a line a figure; exit 1 if anything did not hold."""
    found = figures(folder, steps)
    for figure in found:
        click.echo(figure.line())
    raise SystemExit(1 if any(figure.held is False for figure in found) else 0)


if __name__ == "__main__":
    main()
