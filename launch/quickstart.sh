#!/usr/bin/env bash
# The laptop run: environment, model and data, then 200 steps of GRPO on two processes. Arguments are overrides,
# for example: bash launch/quickstart.sh seed=1 run_dir=runs/seed1
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
export OMP_NUM_THREADS=1

[ -f data/copy/val.parquet ] || python -m launch.prepare copy data/copy
exec torchrun --standalone --nproc-per-node 2 trainer.py launch/recipes/quickstart.toml "$@"
