"""slime's and vime's options (`train.py --rollout-batch-size 32 ...`, gathered from arrays) with slime's defaults.

Defaults that differ from ours are written out: the loss is the mean over samples of token means, there is no bound for
negative advantages (eps-clip-c), prompts keep the file order without --rollout-shuffle. A text without a training
command, such as a page of the documentation, is read for its *_ARGS arrays.
"""

from __future__ import annotations

import json
from typing import Any

from launch.migration import Translation
from launch.shell_script import Script

SAME = {
    "rollout-batch-size": "data.prompts_per_step",
    "rollout-max-prompt-len": "data.max_prompt_tokens",
    "rollout-max-response-len": "data.max_response_tokens",
    "rollout-seed": "seed",
    "num-rollout": "total_steps",
    "num-epoch": "total_epochs",
    "n-samples-per-prompt": "rollout.samples_per_prompt",
    "rollout-temperature": "rollout.temperature",
    "rollout-top-p": "rollout.top_p",
    "rollout-top-k": "rollout.top_k",
    "eval-interval": "eval.every_steps",
    "n-samples-per-eval-prompt": "eval.samples_per_prompt",
    "eval-temperature": "eval.temperature",
    "eval-top-p": "eval.top_p",
    "eval-top-k": "eval.top_k",
    "tensor-model-parallel-size": "train.tp",
    "pipeline-model-parallel-size": "train.pp",
    "context-parallel-size": "train.cp",
    "expert-model-parallel-size": "train.ep",
    "expert-tensor-parallel-size": "train.etp",
    "decoder-first-pipeline-num-layers": "train.first_stage_layers",
    "decoder-last-pipeline-num-layers": "train.last_stage_layers",
    "entropy-coef": "algorithm.entropy_bonus",
    "kl-coef": "algorithm.kl_reward",
    "lr": "train.lr",
    "lr-warmup-iters": "train.optimizer.lr_warmup_steps",
    "min-lr": "train.optimizer.min_lr",
    "weight-decay": "train.optimizer.weight_decay",
    "adam-beta1": "train.optimizer.beta1",
    "adam-beta2": "train.optimizer.beta2",
    "adam-eps": "train.optimizer.eps",
    "clip-grad": "train.optimizer.clip_grad",
    "optimizer-offload-fraction": "train.optimizer.cpu_offload_fraction",
    "save-interval": "checkpoint.every_steps",
}
TEXTS = {
    "hf-checkpoint": "model.path",
    "input-key": "data.prompt_key",
    "label-key": "data.label_key",
    "save": "run_dir",
}
REWARDS = {"deepscaler": "math", "math": "math", "dapo": "math_dapo", "gsm8k": "gsm8k"}
ESTIMATORS = {
    "grpo": ("grpo", "clip"),
    "gspo": ("grpo", "gspo"),
    "cispo": ("grpo", "cispo"),
    "reinforce_plus_plus": ("reinforce_pp", "clip"),
    "reinforce_plus_plus_baseline": ("reinforce_pp_baseline", "clip"),
}
"""--advantage-estimator -> our advantage and objective."""
DIRECT = "Hugging Face files are read directly, in every layout"
SERVER = "the engine runs in the trainer's process: there is no server"
UNNECESSARY = {
    "ref-load": DIRECT,
    "load": "checkpoint.resume = auto finds what run_dir holds",
    "apply-chat-template": "chat messages always get the template; a string prompt is used as it is",
    "balance-data": "sequences are always balanced over data-parallel ranks",
    "sequence-parallel": "on whenever train.tp > 1",
    "use-dynamic-batch-size": "sequences are always packed, up to train.micro_batch_tokens",
    "recompute-num-layers": "train.recompute = full stores one activation per layer",
    "overlap-cpu-optimizer-d2h-h2d": "on with train.optimizer.cpu_offload",
    "use-precision-aware-optimizer": "needs TransformerEngine's Adam; launch/recipes/te.toml adds it",
    "attention-dropout": "always 0",
    "hidden-dropout": "always 0",
    "accumulate-allreduce-grads-in-fp32": "always",
    "attention-softmax-in-fp32": "always",
    "attention-backend": "fused attention is what cuda and npu always use",
    "use-distributed-optimizer": "always",
    "num-gpus-per-node": "torchrun's --nproc-per-node",
    "rollout-num-gpus": "colocated: the training ranks generate",
    "vllm-max-model-len": "data.max_prompt_tokens + data.max_response_tokens",
    "vllm-server-concurrency": SERVER,
    "vllm-moe-backend": "triton, the only one that keeps experts as they are loaded",
    "use-tensorboard": "TensorBoard files are always written",
}
NO_TRACKER = "TensorBoard, metrics.jsonl and log.hook"


def find_options(script: Script) -> tuple[dict[str, str], list[list[str]]]:
    """Options of the training command and all other commands; several values are joined by blanks."""
    words: list[str] | None = None
    others = []
    for command in script.commands:
        entry = next((i for i, w in enumerate(command) if w.rpartition("/")[2] in ("train.py", "train_async.py")), None)
        if entry is None:
            others.append(command)
        else:
            words = command[entry + 1 :]
    if words is None:
        arrays = {n: v for n, v in script.variables.items() if n.endswith("_ARGS") and isinstance(v, list)}
        words = [word for value in arrays.values() for word in value]
    if not any(word.startswith("--") for word in words):
        raise ValueError("no command that runs train.py and no *_ARGS=( --options ); is this a slime or vime script?")
    return parse(words), others


def parse(words: list[str]) -> dict[str, str]:
    """--name value ..., --name=value and --flag -> texts; a later one wins, as in argparse."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            found[name] = [value] if has_value else []
        elif name and word != "...":
            found[name].append(word)
    return {name: " ".join(values) if values else "true" for name, values in found.items()}


def translate(job: Translation) -> None:
    for name, target in SAME.items():
        job.copy(name, target)
    for name, target in TEXTS.items():
        job.copy(name, target, str)
    for name, reason in UNNECESSARY.items():
        job.unnecessary(name, reason)
    for name in job.given:
        if name.startswith(("wandb", "use-wandb")):
            job.unnecessary(name, NO_TRACKER)
    for part in (_data, _batch, _training, _algorithm, _engine, _places):
        part(job)
    for name, value in job.given.items():  # vLLM's own names pass through
        if name.startswith("vllm-") and name not in job.fates:
            job.put(f"rollout.vllm.{name[5:].replace('-', '_')}", _plain(value), name)


def _plain(text: str) -> Any:
    """A value as the type it looks like; several numbers are a list."""
    words = text.split()
    if len(words) > 1 and all(word.isdigit() for word in words):
        return [int(word) for word in words]
    try:
        return json.loads(text)
    except ValueError:
        return text


def _data(job: Translation) -> None:
    job.copy("prompt-data", "data.train_files", str.split)
    job.copy("eval-prompt-data", "data.val_files", lambda text: text.split()[1::2] or text.split())
    job.put("data.shuffle", job.on("rollout-shuffle"), "rollout-shuffle")
    job.choose("rm-type", "data.default_source", REWARDS)
    if "rollout-max-prompt-len" not in job.given:
        job.put("data.max_prompt_tokens", 2048)
        job.remarks.append(
            "data.max_prompt_tokens = 2048: the script sets no limit; longer prompts are dropped, counted"
        )
    if "eval-temperature" not in job.given and "eval-interval" in job.given:
        job.put("eval.temperature", job.number("rollout-temperature", 1.0))
    own, common = job.number("eval-max-response-len", 0), job.number("rollout-max-response-len", 0)
    if own == common:
        job.unnecessary("eval-max-response-len", "the same as in training")
    else:
        job.unsupported("eval-max-response-len", "validation has training's limit, data.max_response_tokens")


def _batch(job: Translation) -> None:
    samples = job.number("rollout-batch-size", 1) * job.number("n-samples-per-prompt", 1)
    size = job.number("global-batch-size", samples)
    job.put("train.mini_batches", max(1, samples // size), "global-batch-size")
    if samples % size:
        job.remarks.append(f"{samples} samples are no multiple of global-batch-size {size}: slime drops the rest")
    job.copy("max-tokens-per-gpu", "train.micro_batch_tokens")
    micro = "micro-batch-size"
    if job.on("use-dynamic-batch-size"):
        job.unnecessary(micro, "use-dynamic-batch-size ignores it")
    elif micro in job.given:
        longest = job.recipe["data.max_prompt_tokens"] + job.recipe.get("data.max_response_tokens", 1024)
        job.put("train.micro_batch_tokens", job.number(micro, 1) * longest, micro)


def _training(job: Translation) -> None:
    job.choose("recompute-granularity", "train.recompute", {"full": "full", "selective": "selective"})
    if job.get("recompute-method", "uniform") == "uniform":
        job.unnecessary("recompute-method", "train.recompute = full is uniform")
    else:
        job.unsupported("recompute-method", "only uniform recomputation")
    job.choose("optimizer", "train.optimizer.kind", {"adam": "adam", "sgd": "sgd"})
    styles = {name: name for name in ("constant", "linear", "cosine")}
    job.choose("lr-decay-style", "train.optimizer.lr_schedule", styles)
    job.put("train.optimizer.cpu_offload", job.on("optimizer-cpu-offload"), "optimizer-cpu-offload")
    dispatcher = "moe-token-dispatcher-type"
    if job.get(dispatcher, "alltoall") == "alltoall":
        job.unnecessary(dispatcher, "the default")
    else:
        job.unsupported(dispatcher, "always alltoall; launch/recipes/te.toml adds DeepEP's")
    if job.on("colocate"):
        job.put("train.offload", ["params", "optimizer"], "colocate")


def _algorithm(job: Translation) -> None:
    name = job.get("advantage-estimator", "grpo")
    if name in ESTIMATORS:
        advantage, objective = ESTIMATORS[name]
        job.recipe |= {"algorithm.advantage": advantage, "algorithm.policy_loss": objective}
        job.translated(f"algorithm.advantage = {advantage}, policy_loss = {objective}", "advantage-estimator")
    else:
        job.unsupported("advantage-estimator", f"{name!r} does not exist here")
        job.remarks.append(f"advantage-estimator {name!r} has no counterpart: the recipe trains something else")
    low = job.number("eps-clip", 0.2)
    job.put("algorithm.clip_low", low, "eps-clip")
    job.put("algorithm.clip_high", job.number("eps-clip-high", low), "eps-clip-high")
    job.put("algorithm.dual_clip", job.number("eps-clip-c", 0), "eps-clip-c")
    per_token = "calculate-per-token-loss"
    job.put("algorithm.aggregation", "token-mean" if job.on(per_token) else "seq-mean-token-mean", per_token)
    weight = job.number("kl-loss-coef", 0.0) if job.on("use-kl-loss") else 0.0
    job.put("algorithm.kl_loss", weight, "use-kl-loss", "kl-loss-coef")
    known = {"low_var_kl": "k3", "k3": "k3", "k2": "k2", "k1": "k1"}
    job.choose("kl-loss-type", "algorithm.kl_estimator", known)
    job.copy("disable-grpo-std-normalization", "algorithm.norm_by_std", lambda text: text != "true")


def _engine(job: Translation) -> None:
    dp = job.number("vllm-data-parallel-size", 1)
    job.put("rollout.dp", dp, "vllm-data-parallel-size")
    if "rollout-num-gpus-per-engine" in job.given:
        size = job.number("rollout-num-gpus-per-engine", 1)
        job.put("rollout.tp", size // dp, "rollout-num-gpus-per-engine")
    job.put("rollout.expert_parallel", job.on("vllm-enable-expert-parallel"), "vllm-enable-expert-parallel")
    balance = _plain(job.get("vllm-eplb-config", "{}"))
    copies = balance.get("num_redundant_experts", 0) if isinstance(balance, dict) else 0
    job.put("rollout.redundant_experts", int(copies), "vllm-enable-eplb", "vllm-eplb-config")
    replay = "R3" if job.on("use-rollout-routing-replay") else "R2" if job.on("use-routing-replay") else "none"
    job.put("rollout.routing_replay", replay, "use-rollout-routing-replay", "use-routing-replay")
    job.copy("update-weight-buffer-size", "rollout.sync_staging_mib", lambda text: int(text) >> 20)


def _places(job: Translation) -> None:
    if "actor-num-gpus-per-node" in job.given or "actor-num-nodes" in job.given:
        nodes, per_node = job.number("actor-num-nodes", 1), job.number("actor-num-gpus-per-node", 8)
        job.put("world", nodes * per_node, "actor-num-nodes", "actor-num-gpus-per-node")
        if "colocate" not in job.given:
            job.remarks.append("the script gives the engine GPUs of its own; here the training ranks generate")
    job.recipe["runtime.device"] = "cuda"
