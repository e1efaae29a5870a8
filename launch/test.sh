#!/usr/bin/env bash
# bash launch/test.sh [fast | --full [AREA]] [pytest arguments]
#   fast    pure modules, style, layers: at most 3 minutes
#   (none)  the default tier, which CI runs: adds what starts processes, engines and models
#   --full  everything of one area, or of all: whole matrices, all faults, many seeds (areas: tests/areas.py)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
export OMP_NUM_THREADS=1

marks="not full" tier=default files=() # no files: all of tests/
case "${1:-}" in
    fast)
        marks="not slow and not full" tier=fast
        shift
        ;;
    --full)
        marks="" tier=full
        shift
        area=all
        case "${1:-}" in "" | -*) ;; *) area=$1 && shift ;; esac
        listed=$(python -m tests.areas "$area")
        mapfile -t files <<<"$listed"
        ;;
esac
TEST_TIER=$tier exec python -m pytest -rs -m "$marks" "${files[@]}" "$@"
