#!/usr/bin/env bash
# The merge gate in any CI: collects a run, writes its tables, and ends with the gate's exit code.
#
#   gate.sh RUN_DIR [OPTION OF equivtest run]...     for instance: gate.sh results/ci --config topp95 --budget gate
#
# 0 equivalent, 1 different, 2 usage error, 3 inconclusive, 4 invalid. RUN_DIR then holds report.html, summary.md,
# junit.xml and parquet/. In GitHub Actions the gate also writes the step summary and an annotation.
set -euo pipefail
run_dir=${1:?name the folder of the run}
shift
code=0
equivtest run --run-dir "$run_dir" "$@" || code=$?
if [ ! -f "$run_dir/verdict.json" ]; then
    [ "$code" -ne 0 ] || code=4 # without a verdict nothing was shown
    if [ "${GITHUB_ACTIONS:-}" = true ]; then
        echo "::error title=equivtest::the run ended without a verdict, with exit code $code; its log says why"
    fi
    exit "$code"
fi
# It exits with the verdict, which is the gate's to judge; where it fails it leaves no verdict behind.
equivtest report "$run_dir" --format parquet >/dev/null || true
equivtest gate "$run_dir" --require fingerprint
