"""verl's dotted options (`python3 -m verl.trainer.main_ppo a.b=c +d.e=f`) with ppo_megatron_trainer.yaml's defaults.

Defaults that differ from ours are written out: validation before training, eager engine, padded static batches.
"""

from __future__ import annotations

from launch.migration import Translation, flag, unbracket
from launch.shell_script import Script

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
MEGATRON, OPTIM = f"{ACTOR}.megatron", f"{ACTOR}.optim"
TRANSFORMER = f"{MEGATRON}.override_transformer_config"
ENTRIES = ("verl.trainer.main_ppo", "recipe.dapo.main_dapo", "recipe.dapo.src.main_dapo")

ESTIMATORS = {
    "grpo": "grpo",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "opo": "opo",
    "grpo_passk": "grpo_passk",
}
KL = {
    **{"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2"},
    **{"low_var_kl+": "k3+", "k3+": "k3+"},
}
SAME = {
    "data.train_batch_size": "data.prompts_per_step",
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.max_response_length": "data.max_response_tokens",
    "data.seed": "seed",
    f"{OPTIM}.lr": "train.lr",
    f"{OPTIM}.clip_grad": "train.optimizer.clip_grad",
    f"{OPTIM}.weight_decay": "train.optimizer.weight_decay",
    f"{OPTIM}.lr_warmup_steps": "train.optimizer.lr_warmup_steps",
    f"{OPTIM}.min_lr": "train.optimizer.min_lr",
    f"{OPTIM}.override_optimizer_config.optimizer_offload_fraction": "train.optimizer.cpu_offload_fraction",
    f"{ACTOR}.ppo_epochs": "train.epochs",
    f"{ACTOR}.entropy_coeff": "algorithm.entropy_bonus",
    f"{ACTOR}.clip_ratio_low": "algorithm.clip_low",
    f"{ACTOR}.clip_ratio_high": "algorithm.clip_high",
    f"{ACTOR}.clip_ratio_c": "algorithm.dual_clip",
    f"{MEGATRON}.pipeline_model_parallel_size": "train.pp",
    f"{MEGATRON}.virtual_pipeline_model_parallel_size": "train.vpp",
    f"{MEGATRON}.context_parallel_size": "train.cp",
    f"{MEGATRON}.expert_model_parallel_size": "train.ep",
    f"{TRANSFORMER}.num_layers_in_first_pipeline_stage": "train.first_stage_layers",
    f"{TRANSFORMER}.num_layers_in_last_pipeline_stage": "train.last_stage_layers",
    f"{ROLLOUT}.n": "rollout.samples_per_prompt",
    f"{ROLLOUT}.tensor_model_parallel_size": "rollout.tp",
    f"{ROLLOUT}.dp_model_parallel_size": "rollout.dp",
    f"{ROLLOUT}.data_parallel_size": "rollout.dp",
    f"{ROLLOUT}.temperature": "rollout.temperature",
    f"{ROLLOUT}.top_p": "rollout.top_p",
    f"{ROLLOUT}.top_k": "rollout.top_k",
    f"{ROLLOUT}.gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
    f"{ROLLOUT}.max_num_batched_tokens": "rollout.vllm.max_num_batched_tokens",
    f"{ROLLOUT}.max_num_seqs": "rollout.vllm.max_num_seqs",
    "actor_rollout_ref.nccl_timeout": "runtime.deadline_s",
    "trainer.total_epochs": "total_epochs",
    "trainer.total_training_steps": "total_steps",
    "trainer.max_actor_ckpt_to_keep": "checkpoint.keep",
    "reward_model.overlong_buffer.penalty_factor": "algorithm.overlong_penalty",
    "algorithm.filter_groups.max_num_gen_batches": "algorithm.dynamic_sampling_max_rounds",
}
TEXTS = {
    "actor_rollout_ref.model.path": "model.path",
    "data.prompt_key": "data.prompt_key",
    "trainer.default_local_dir": "run_dir",
    f"{ACTOR}.loss_agg_mode": "algorithm.aggregation",
}
FLAGS = {
    "data.shuffle": "data.shuffle",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.norm_by_std",
    "algorithm.filter_groups.enable": "algorithm.dynamic_sampling",
    f"{ROLLOUT}.enable_expert_parallel": "rollout.expert_parallel",
    f"{OPTIM}.override_optimizer_config.optimizer_cpu_offload": "train.optimizer.cpu_offload",
}
KERNELS = "needs TransformerEngine, Apex or DeepEP, which the job runs without; launch/recipes/te.toml adds it"
UNNECESSARY = {
    f"{ROLLOUT}.rollout_world_size": "read by nothing in verl either; replicas are world / (tp * dp)",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": "scoring uses the packing of the update, so first-step KL is 0",
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": "scoring uses the packing of the update, so first-step KL is 0",
    f"{ROLLOUT}.log_prob_use_dynamic_bsz": "sequences are always packed",
    f"{REF}.log_prob_micro_batch_size_per_gpu": "scoring uses the packing of the update, so first-step KL is 0",
    f"{REF}.log_prob_max_token_len_per_gpu": "scoring uses the packing of the update, so first-step KL is 0",
    f"{REF}.log_prob_use_dynamic_bsz": "sequences are always packed",
    f"{ROLLOUT}.calculate_log_probs": "the engine's log-probs are always kept",
    f"{ROLLOUT}.free_cache_engine": "the engine always sleeps while training",
    f"{ROLLOUT}.load_format": "weights come from the trainer",
    f"{MEGATRON}.use_dist_checkpointing": "Hugging Face files are read directly, in every layout",
    f"{MEGATRON}.dist_checkpointing_path": "Hugging Face files are read directly, in every layout",
    f"{MEGATRON}.use_mbridge": "Hugging Face files are read directly, in every layout",
    f"{MEGATRON}.sequence_parallel": "on whenever train.tp > 1",
    "actor_rollout_ref.model.use_fused_kernels": "logits exist for train.log_prob_chunk_tokens tokens at a time",
    "actor_rollout_ref.model.use_remove_padding": "sequences are always packed",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "train.recompute",
    f"{OPTIM}.override_optimizer_config.overlap_cpu_optimizer_d2h_h2d": "on with train.optimizer.cpu_offload",
    f"{OPTIM}.override_optimizer_config.use_precision_aware_optimizer": KERNELS,
    f"{TRANSFORMER}.recompute_num_layers": "train.recompute = full stores one activation per layer",
    f"{TRANSFORMER}.use_flash_attn": "fused attention is what npu and cuda always use",
    f"{TRANSFORMER}.moe_router_dtype": "the router always computes in fp32",
    f"{TRANSFORMER}.moe_enable_deepep": KERNELS,
    f"{TRANSFORMER}.moe_token_dispatcher_type": KERNELS,
    f"{TRANSFORMER}.moe_permute_fusion": KERNELS,
    f"{TRANSFORMER}.gradient_accumulation_fusion": KERNELS,
    "trainer.critic_warmup": "there is no critic",
    "trainer.logger": "console, log file, metrics.jsonl and TensorBoard are always written; log.hook feeds others",
    "trainer.project_name": "run_dir names the run",
    "trainer.experiment_name": "run_dir names the run",
    "trainer.balance_batch": "sequences are always balanced over data-parallel ranks",
    "--config-path": "no Hydra",
    "--config-name": "no Hydra; the defaults of the Megatron trainer are assumed",
}
FALSE_IS_OURS = {
    f"{TRANSFORMER}.apply_rope_fusion": "off; it needs TransformerEngine",
    f"{TRANSFORMER}.moe_shared_expert_overlap": "off, and the supported models have no shared expert",
    f"{TRANSFORMER}.account_for_embedding_in_pipeline_split": "off; train.first_stage_layers says what is meant",
    f"{TRANSFORMER}.account_for_loss_in_pipeline_split": "off; train.last_stage_layers says what is meant",
}


def find_options(script: Script) -> tuple[dict[str, str], list[list[str]]]:
    """Options of the training command (the last one in the scripts) and all other commands."""
    found: dict[str, str] = {}
    others = []
    for words in script.commands:
        entry = next((i for i, word in enumerate(words) if word in ENTRIES), None)
        if entry is None:
            others.append(words)
            continue
        pairs = [word.lstrip("+").partition("=") for word in words[entry + 1 :] if "=" in word]
        found = {name: value for name, _, value in pairs}
    if not found:
        raise ValueError(f"no command that runs one of {', '.join(ENTRIES)}; is this a verl script?")
    return found, others


def translate(job: Translation) -> None:
    for name, target in SAME.items():
        job.copy(name, target)
    for name, target in TEXTS.items():
        job.copy(name, target, str)
    for name, target in FLAGS.items():
        job.copy(name, target, flag)
    for name, reason in UNNECESSARY.items():
        job.unnecessary(name, reason)
    for name, reason in FALSE_IS_OURS.items():
        (job.unsupported if job.on(name) else job.unnecessary)(name, reason)
    for part in (_data, _batch, _training, _reference, _engine, _algorithm, _schedule):
        part(job)
    for name, value in job.given.items():  # Megatron's own names pass through
        if name.startswith(f"{TRANSFORMER}.") and name not in job.fates:
            plain = flag(value) if value.lower() in ("true", "false") else value
            job.put(f"train.megatron.{name[len(TRANSFORMER) + 1 :]}", plain, name)


def _data(job: Translation) -> None:
    for kind in ("train", "val"):
        job.copy(f"data.{kind}_files", f"data.{kind}_files", unbracket)
    filters = job.on("data.filter_overlong_prompts")
    rule = "filter" if filters else job.get("data.truncation", "error")
    job.put("data.overlong_prompts", rule, "data.filter_overlong_prompts", "data.truncation")
    job.put("reward.gsm8k_window_chars", 300)
    job.remarks.append("reward.gsm8k_window_chars = 300: verl's GSM8K rule reads the last 300 characters only")


def _batch(job: Translation) -> None:
    prompts = job.number("data.train_batch_size", 1024)
    mini = job.number(f"{ACTOR}.ppo_mini_batch_size", 256)
    job.put("train.mini_batches", max(1, prompts // mini), f"{ACTOR}.ppo_mini_batch_size")
    longest = job.number("data.max_prompt_length", 512) + job.number("data.max_response_length", 512)
    micro, cap = f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.ppo_max_token_len_per_gpu"
    if job.on(f"{ACTOR}.use_dynamic_bsz"):
        job.put("train.micro_batch_tokens", job.number(cap, 16384), f"{ACTOR}.use_dynamic_bsz", cap)
        job.unnecessary(micro, "use_dynamic_bsz ignores it")
    else:
        cp = job.number(f"{MEGATRON}.context_parallel_size", 1)
        tokens = job.number(micro, 1) * longest // cp
        job.put("train.micro_batch_tokens", tokens, f"{ACTOR}.use_dynamic_bsz", micro)
        job.unnecessary(cap, "only read with use_dynamic_bsz")


def _training(job: Translation) -> None:
    tp = job.number(f"{MEGATRON}.tensor_model_parallel_size", 1)
    job.put("train.tp", tp, f"{MEGATRON}.tensor_model_parallel_size")
    etp = job.number(f"{MEGATRON}.expert_tensor_parallel_size", tp)
    has_experts = {f"{MEGATRON}.expert_{kind}_parallel_size" for kind in ("model", "tensor")} & set(job.given)
    if has_experts:  # unset it is tp, which the recipe says instead of leaving it to be known
        job.put("train.etp", etp, f"{MEGATRON}.expert_tensor_parallel_size")
    moved = {f"{MEGATRON}.param_offload": "params", f"{MEGATRON}.optimizer_offload": "optimizer"}
    job.put("train.offload", [part for name, part in moved.items() if job.on(name)], *moved)
    job.translated("train.offload has params: gradients are freed with them", f"{MEGATRON}.grad_offload")
    name, method = f"{TRANSFORMER}.recompute_granularity", f"{TRANSFORMER}.recompute_method"
    job.choose(name, "train.recompute", {"full": "full", "selective": "selective"})
    if job.get(method, "uniform") == "uniform":
        job.unnecessary(method, "train.recompute = full is uniform")
    else:
        job.unsupported(method, "only uniform recomputation")
    styles = {"constant": "constant", "linear": "linear", "cosine": "cosine"}
    job.choose(f"{OPTIM}.lr_decay_style", "train.optimizer.lr_schedule", styles)


def _reference(job: Translation) -> None:
    """The reference policy is the actor's model with other weights, so its layout cannot differ."""
    for name, value in job.given.items():
        if name.startswith(f"{REF}.megatron."):
            mine = job.given.get(f"{MEGATRON}.{name[len(REF) + 10 :]}")
            differs = mine not in (None, value)
            reason = "the reference policy uses the actor's model and layout"
            (job.unsupported if differs else job.unnecessary)(name, reason)


def _engine(job: Translation) -> None:
    if job.get(f"{ROLLOUT}.name", "vllm") == "vllm":
        job.unnecessary(f"{ROLLOUT}.name", "vLLM is the engine")
    else:
        job.unsupported(f"{ROLLOUT}.name", "vLLM is the only engine")
    job.put("rollout.vllm.enforce_eager", job.on(f"{ROLLOUT}.enforce_eager", True), f"{ROLLOUT}.enforce_eager")
    name = f"{ROLLOUT}.enable_chunked_prefill"
    if job.on(name, True):
        job.unnecessary(name, "vLLM's default")
    else:
        job.put("rollout.vllm.enable_chunked_prefill", False, name)
    values = f"{ROLLOUT}.val_kwargs"
    samples = f"{values}.do_sample"
    if job.on(samples):
        for key in ("temperature", "top_p", "top_k"):
            job.copy(f"{values}.{key}", f"eval.{key}")
        job.translated("eval.temperature above 0", samples)
    else:
        for key in ("temperature", "top_p", "top_k"):
            job.unnecessary(f"{values}.{key}", "do_sample is off, so validation is greedy")
        job.unnecessary(samples, "validation is greedy")
    job.copy(f"{values}.n", "eval.samples_per_prompt")


def _algorithm(job: Translation) -> None:
    job.choose("algorithm.adv_estimator", "algorithm.advantage", ESTIMATORS, "grpo")
    weight = job.number(f"{ACTOR}.kl_loss_coef", 0.001) if job.on(f"{ACTOR}.use_kl_loss") else 0.0
    job.put("algorithm.kl_loss", weight, f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef")
    job.choose(f"{ACTOR}.kl_loss_type", "algorithm.kl_estimator", KL, "low_var_kl")
    uses, weight_name = "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"
    if job.on(uses):
        job.put("algorithm.kl_reward", job.number(weight_name, 0.001), uses, weight_name)
    else:
        job.put("algorithm.kl_reward", 0.0, uses)
        job.unnecessary(weight_name, "use_kl_in_reward is off")
    job.choose(
        f"{ACTOR}.policy_loss.loss_mode",
        "algorithm.policy_loss",
        {"vanilla": "clip", "gspo": "gspo", "gmpo": "gmpo", "geo_mean": "gmpo", "cispo": "cispo", "sapo": "sapo"},
    )
    manager, buffer = "reward_model.reward_manager", "reward_model.overlong_buffer"
    if job.get(manager, "naive") in ("naive", "dapo", "batch"):
        job.unnecessary(manager, "the rule is found by data source; overlong shaping has its own options")
    else:
        job.unsupported(manager, "write it as reward.function = package.module:function")
    if job.on(f"{buffer}.enable"):
        job.put("algorithm.overlong_buffer_tokens", job.number(f"{buffer}.len", 0), f"{buffer}.enable", f"{buffer}.len")


def _schedule(job: Translation) -> None:
    nodes, per_node = job.number("trainer.nnodes", 1), job.number("trainer.n_gpus_per_node", 8)
    job.put("world", nodes * per_node, "trainer.nnodes", "trainer.n_gpus_per_node")
    job.put("checkpoint.every_steps", max(0, job.number("trainer.save_freq", -1)), "trainer.save_freq")
    job.put("eval.every_steps", max(0, job.number("trainer.test_freq", -1)), "trainer.test_freq")
    job.put("eval.before_training", job.on("trainer.val_before_train", True), "trainer.val_before_train")
    job.put("runtime.device", job.get("trainer.device", "cuda"), "trainer.device")
    resumes = {"auto": "auto", "disable": "none", "resume_path": job.get("trainer.resume_from_path", "auto")}
    job.choose("trainer.resume_mode", "checkpoint.resume", resumes)
    job.translated("checkpoint.resume", "trainer.resume_from_path")
    if "HCCL_EXEC_TIMEOUT" in job.environment:
        job.put("runtime.deadline_s", float(job.environment["HCCL_EXEC_TIMEOUT"]), "$HCCL_EXEC_TIMEOUT")
