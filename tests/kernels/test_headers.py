"""The headers are C++17 that the compiler alone can check, and their Philox is the published one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from equivtest.resources import resource_dir

ROOT = resource_dir("kernels_ext")
HEADERS = sorted((ROOT / "include" / "equivtest").glob("*.h"))
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-psabi")


def compiler() -> str:
    return os.environ.get("CXX", "c++")


def run(*command: str, source: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=source, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.name)
def test_a_header_compiles_alone_without_torch(header: Path) -> None:
    flags = ("-std=c++17", "-fsyntax-only", "-x", "c++", *WARNINGS, f"-I{ROOT / 'include'}")
    result = run(compiler(), *flags, "-", source=f'#include "equivtest/{header.name}"\n')
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("source", ["sampling.cpp", "attention.cpp"])
def test_the_cpu_kernels_compile_without_torch(source: str) -> None:
    includes = (f"-I{ROOT / 'include'}", f"-I{ROOT / 'cpu'}")
    result = run(compiler(), "-std=c++17", "-fsyntax-only", *WARNINGS, *includes, str(ROOT / "cpu" / source))
    assert result.returncode == 0, result.stderr


def test_philox_in_cpp_gives_the_published_known_answers(tmp_path: Path) -> None:
    program = tmp_path / "known_answers.cpp"
    program.write_text(r"""
#include <cstdio>
#include "equivtest/philox.h"
int main() {
  using namespace equivtest;
  const struct { PhiloxWords counter; uint32_t key[2]; } cases[] = {
      {{{0, 0, 0, 0}}, {0, 0}},
      {{{~0u, ~0u, ~0u, ~0u}}, {~0u, ~0u}},
      {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, {0xa4093822, 0x299f31d0}}};
  for (const auto& c : cases) {
    const PhiloxWords out = philox4x32(c.counter, c.key[0], c.key[1]);
    std::printf("%08x %08x %08x %08x\n", out.word[0], out.word[1], out.word[2], out.word[3]);
  }
}
""")
    binary = tmp_path / "known_answers"
    built = run(compiler(), "-std=c++17", f"-I{ROOT / 'include'}", str(program), "-o", str(binary))
    assert built.returncode == 0, built.stderr
    assert run(str(binary)).stdout.split("\n")[:3] == [  # Random123 1.14, tests/kat_vectors, philox4x32 10
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ]


def test_exp_is_within_2_ulp_of_libm(tmp_path: Path) -> None:
    program = tmp_path / "exp.cpp"
    program.write_text(r"""
#include <cmath>
#include <cstdio>
#include <limits>
#include "equivtest/simd.h"
int main() {
  using namespace equivtest;
  double worst = 0;
  for (int i = 0; i < 87 * 4096; ++i) {
    const float x = -static_cast<float>(i) / 4096.0f;
    const double exact = std::exp(static_cast<double>(x));
    const float ulp = std::nextafterf(static_cast<float>(exact), 2.0f) - static_cast<float>(exact);
    worst = std::fmax(worst, std::fabs(exp_nonpositive(splat(x))[3] - exact) / ulp);
  }
  const float infinity = std::numeric_limits<float>::infinity();
  std::printf("%d %d %d %d\n", worst < 2, exp_nonpositive(splat(0.0f))[0] == 1.0f,
              exp_nonpositive(splat(-infinity))[0] == 0.0f, std::isnan(exp_nonpositive(splat(NAN))[0]));
}
""")
    binary = tmp_path / "exp"
    built = run(compiler(), "-std=c++17", "-O1", f"-I{ROOT / 'include'}", "-Wno-psabi", str(program), "-o", str(binary))
    assert built.returncode == 0, built.stderr
    assert run(str(binary)).stdout == "1 1 1 1\n"
