#!/usr/bin/env bash
# One node of a job: environment of the platform, printed; the nodes meet; then torchrun. job.sbatch runs it through srun.
# Without Slurm, the same line on every host but for NODE_RANK (0 on the host that MASTER_ADDR names):
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=HOST bash launch/node.sh trainer.py RECIPE.toml [section.key=value ...]
# Set beforehand, every variable below keeps its value. NPROC: ranks of this node; PLATFORM: cuda, npu or cpu;
# NODE_INTERFACE: network interface between the nodes; MEET_S: longest wait for the other nodes; RANK_CPUS=none: no
# binding to NUMA nodes; ATTEMPT_LOGS: directory for the output of each rank, which is otherwise shown here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ $# -gt 0 ] || { echo "usage: bash launch/node.sh trainer.py RECIPE.toml [section.key=value ...]" >&2 && exit 2; }

python=${PYTHON:-python}
export NNODES=${NNODES:-${SLURM_NNODES:-1}} NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-0}}
export MASTER_ADDR=${MASTER_ADDR:-127.0.0.1} MASTER_PORT=${MASTER_PORT:-29500}

shopt -s nullglob
nvidia=(/dev/nvidia[0-9]*) ascend=(/dev/davinci[0-9]*)
platform=cpu devices=1
if [ ${#nvidia[@]} -gt 0 ]; then platform=cuda devices=${#nvidia[@]}; fi
if [ ${#ascend[@]} -gt 0 ]; then platform=npu devices=${#ascend[@]}; fi
platform=${PLATFORM:-$platform} nproc=${NPROC:-$devices}

told=()
default() { # NAME VALUE: export, unless the user has; remember for the printed list
    export "$1=${!1:-$2}"
    told+=("$1=${!1}")
}
vendor() { # FILE: source it, if there; such scripts read variables that may be unset
    [ -f "$1" ] || return 0
    set +eu
    source "$1" || echo "warning: $1 ended with $?" >&2
    set -eu
}
default OMP_NUM_THREADS "$([ "$platform" = cpu ] && echo 1 || echo 8)"
case $platform in
    cuda)
        default CUDA_DEVICE_MAX_CONNECTIONS 1
        default CUDA_DEVICE_ORDER PCI_BUS_ID
        default TORCH_NCCL_ASYNC_ERROR_HANDLING 1
        ;;
    npu)
        [ "${ASCEND_HOME_PATH:-}" ] || vendor "${ASCEND_ROOT:-/usr/local/Ascend}/ascend-toolkit/set_env.sh"
        [ "${ATB_HOME_PATH:-}" ] || vendor "${ASCEND_ROOT:-/usr/local/Ascend}/nnal/atb/set_env.sh"
        default CUDA_DEVICE_MAX_CONNECTIONS 1 # Megatron asks for it by this name on npu too
        default TASK_QUEUE_ENABLE 2           # 1 with graph mode
        default VLLM_ASCEND_ENABLE_NZ 0       # weights that are written in place must stay row-major
        default HCCL_CONNECT_TIMEOUT 3600
        default HCCL_EXEC_TIMEOUT 3600
        default HCCL_ASYNC_ERROR_HANDLING 1 # with 0 a lost rank hangs the others
        ;;
    cpu) ;;
    *) echo "error: PLATFORM = $platform; one of cuda, npu, cpu" >&2 && exit 2 ;;
esac
limit=$(ulimit -Hn)
if [ "$limit" = unlimited ] || [ "$limit" -ge 32768 ]; then limit=32768; fi
ulimit -n "$limit"
told+=("ulimit -n $limit")

# Names of variables that the two commands set: NODE_ADDRESS, *_SOCKET_IFNAME; RANK_CPUS.
found=$("$python" -m launch.nodes meet)
while IFS='=' read -r name value; do [ -z "$name" ] || default "$name" "$value"; done <<<"$found"
[ "${RANK_CPUS:-}" ] || RANK_CPUS=$("$python" -m launch.nodes cpus "$nproc" "$platform")
default RANK_CPUS "$RANK_CPUS"

echo "node $NODE_RANK of $NNODES on $(hostname): $platform, $nproc ranks; head $MASTER_ADDR:$MASTER_PORT; ${told[*]}"
logs=()
if [ -n "${ATTEMPT_LOGS:-}" ]; then
    mkdir -p "$ATTEMPT_LOGS"
    logs=(--log-dir "$ATTEMPT_LOGS" --redirects 3 --tee 3 --local-ranks-filter 0)
fi
exec "$python" -m torch.distributed.run --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$nproc" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --max-restarts 0 "${logs[@]}" "$@"
