#!/usr/bin/env bash
# The merge gate in any CI: collects a run, writes its tables, and ends with the gate's exit code.
#
#   gate.sh RUN_DIR [OPTION OF equivtest run]...     for instance: gate.sh results/ci --config topp95 --budget gate
#
# Only a run of budget gate or above passes; REQUIRE_BUDGET=smoke lets a smoke run pass, which carries no merge.
# 0 equivalent, 1 different, 2 usage error, 3 inconclusive, 4 invalid. RUN_DIR then holds report.html, summary.md,
# junit.xml and parquet/. In GitHub Actions the gate also writes the step summary and an annotation.
set -euo pipefail
if [ $# -eq 0 ]; then
    echo "usage: gate.sh RUN_DIR [OPTION OF equivtest run]..." >&2
    exit 2 # not the 1 of a difference
fi
run_dir=$1
shift
code=0
before=$(mktemp)
trap 'rm -f "$before"' EXIT
equivtest run --run-dir "$run_dir" "$@" || code=$?
# A verdict that lay there before is of another run, and says nothing of this one.
if [ ! "$run_dir/verdict.json" -nt "$before" ]; then
    [ "$code" -ne 0 ] || code=4 # without a verdict nothing was shown
    if [ "${GITHUB_ACTIONS:-}" = true ]; then
        echo "::error title=equivtest::the run ended without a verdict, with exit code $code; its log says why"
    fi
    exit "$code"
fi
# It exits with the verdict, which is the gate's to judge; where it fails it leaves no verdict behind.
equivtest report "$run_dir" --format parquet >/dev/null || true
equivtest gate "$run_dir" --require fingerprint --require budget="${REQUIRE_BUDGET:-gate}"
