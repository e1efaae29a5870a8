#!/usr/bin/env bash
# Stacks of every rank of a running job, which goes on: bash launch/stacks.sh RUN_DIR
# Ranks of this host are asked directly, those of a Slurm job on its nodes through srun, others over ssh.
# Nothing is attached to the ranks: SIGUSR2 makes each write its stacks into its log, held interpreter lock or not.
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: bash launch/stacks.sh RUN_DIR" >&2 && exit 2; }
run_dir=$(realpath "$1")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python}

places=$("$python" -m launch.stacks where "$run_dir") # host and Slurm job of each host with ranks
while read -r host job <&3; do
    [ "$host" ] || continue
    ask=("$python" -m launch.stacks ask "$run_dir")
    if [ "$host" = "$(hostname)" ]; then
        "${ask[@]}"
    elif [ "$job" != - ]; then
        srun --overlap --jobid "$job" --nodes 1 --ntasks 1 --nodelist "$host" "${ask[@]}" || echo "$host: srun failed" >&2
    else
        ssh -n "$host" "cd $(printf %q "$PWD") && $(printf '%q ' "${ask[@]}")" || echo "$host: ssh failed" >&2
    fi
done 3<<<"$places"
exec "$python" -m launch.stacks show "$run_dir"
