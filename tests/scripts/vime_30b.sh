#!/bin/bash
# The form of the slime and vime scripts for Qwen3-30B-A3B, with the values of their documentation.
ACTOR_NUM_NODES="${ACTOR_NUM_NODES:-1}"
ACTOR_NUM_GPUS_PER_NODE="${ACTOR_NUM_GPUS_PER_NODE:-8}"
TOTAL_GPUS=$((ACTOR_NUM_NODES * ACTOR_NUM_GPUS_PER_NODE))
set -ex
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${HERE}/models/qwen3-30B-A3B.sh"

if [[ "${ACTOR_NUM_NODES}" -le 1 ]]; then
   CKPT_ARGS=(
      --hf-checkpoint /root/Qwen3-30B-A3B
      #--hf-checkpoint /root/Qwen3-30B-A3B-FP8
      --ref-load /root/Qwen3-30B-A3B_torch_dist
      --load /root/Qwen3-30B-A3B_vime/
      --save /root/Qwen3-30B-A3B_vime/
      --save-interval 20
   )
   ROLLOUT_ARGS=(
      --prompt-data /root/dapo-math-17k.jsonl --input-key prompt --label-key label
      --apply-chat-template --rollout-shuffle --rm-type deepscaler
      --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8
      --rollout-max-response-len 8192 --rollout-temperature 1
      --global-batch-size 256 --balance-data
   )
   EVAL_ARGS=(
      --eval-interval 20
      --eval-prompt-data aime /root/aime-2024.jsonl
      --n-samples-per-eval-prompt 16 --eval-max-response-len 16384 --eval-top-p 1
   )
   GRPO_ARGS=(
      --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl
      --entropy-coef 0.00 --eps-clip 0.2 --eps-clip-high 0.28
   )
   OPTIMIZER_ARGS=(
      --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
      --optimizer-cpu-offload
      --overlap-cpu-optimizer-d2h-h2d
      --use-precision-aware-optimizer
   )
   VLLM_ARGS=(
      --rollout-num-gpus-per-engine 8
      --vllm-gpu-memory-utilization 0.7
      --vllm-enable-expert-parallel
      --vllm-cudagraph-capture-sizes 1 2 4 8 $(seq 16 8 256)
   )
   MEGATRON_TP="${MEGATRON_TP:-4}" MEGATRON_CP="${MEGATRON_CP:-1}" MAX_TOKENS_PER_GPU="${MAX_TOKENS_PER_GPU:-20480}"
else
   CKPT_ARGS=(--hf-checkpoint /root/Qwen3-30B-A3B --ref-load /root/Qwen3-30B-A3B_torch_dist)
   ROLLOUT_ARGS=(
      --prompt-data /root/dapo-math-17k.jsonl --input-key prompt --label-key label
      --apply-chat-template --rollout-shuffle --rm-type deepscaler
      --num-rollout "${NUM_ROLLOUT:-100}" --rollout-batch-size "${ROLLOUT_BATCH_SIZE:=4}"
      --n-samples-per-prompt "${N_SAMPLES_PER_PROMPT:=2}"
      --rollout-max-response-len 2048 --rollout-temperature 1
      --global-batch-size "${GLOBAL_BATCH_SIZE:-$((ROLLOUT_BATCH_SIZE * N_SAMPLES_PER_PROMPT))}" --balance-data
   )
   EVAL_ARGS=()
   GRPO_ARGS=(--advantage-estimator gspo --kl-loss-coef 0.00 --kl-coef 0.00 --entropy-coef 0.00 --eps-clip 4e-4)
   if [[ "${ENABLE_R3:-1}" == "1" ]]; then
      GRPO_ARGS+=(--use-rollout-routing-replay)
   fi
   OPTIMIZER_ARGS=(
      --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
   )
   VLLM_ARGS=(
      --rollout-num-gpus-per-engine "${ROLLOUT_NUM_GPUS_PER_ENGINE:-${TOTAL_GPUS}}"
      --vllm-gpu-memory-utilization "${VLLM_GPU_MEMORY_UTILIZATION:-0.65}"
      --vllm-moe-backend "${VLLM_MOE_BACKEND:-triton}"
      --update-weight-buffer-size "${UPDATE_WEIGHT_BUFFER_SIZE:-$((512 * 1024 * 1024))}"
   )
   MEGATRON_TP="${MEGATRON_TP:-8}" MEGATRON_CP="${MEGATRON_CP:-2}" MAX_TOKENS_PER_GPU="${MAX_TOKENS_PER_GPU:-4096}"
fi
PERF_ARGS=(
   --tensor-model-parallel-size "${MEGATRON_TP}" --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size "${MEGATRON_CP}"
   --expert-model-parallel-size "${MEGATRON_EP:-8}"
   --expert-tensor-parallel-size 1
   --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
   # --micro-batch-size 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu "${MAX_TOKENS_PER_GPU}"
)
MISC_ARGS=(
   --attention-dropout 0.0 --hidden-dropout 0.0
   --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32
   --attention-backend flash
)
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json='{"env_vars": {"A": "1"}}' \
   -- python3 train.py \
   --actor-num-nodes "${ACTOR_NUM_NODES}" \
   --actor-num-gpus-per-node "${ACTOR_NUM_GPUS_PER_NODE}" \
   --colocate \
   ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} ${OPTIMIZER_ARGS[@]} ${GRPO_ARGS[@]} ${PERF_ARGS[@]} \
   ${EVAL_ARGS[@]+"${EVAL_ARGS[@]}"} ${VLLM_ARGS[@]} ${MISC_ARGS[@]}
