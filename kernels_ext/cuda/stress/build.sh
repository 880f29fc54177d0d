#!/bin/sh
# Builds the stress of the sampling kernels. Then:
#   ./stress
#   compute-sanitizer --tool memcheck ./stress
#   compute-sanitizer --tool racecheck ./stress --few
# usage: build.sh [output, default ./stress] [architecture, default native]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-stress}
include="-I$here/../../include -I$here/.."
c++ -std=c++17 -O2 -Wno-psabi $include -c "$here/expected.cpp" -o "$out.expected.o"
nvcc -std=c++17 -O3 -lineinfo --expt-relaxed-constexpr -arch="${2:-native}" $include \
  "$here/main.cu" "$here/../sampling.cu" "$out.expected.o" -o "$out"
rm "$out.expected.o"
