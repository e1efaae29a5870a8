"""The tree of options: frozen dataclasses, nothing else. The string under a field is its help text.

Upstream options pass through the tables `train.megatron` and `rollout.vllm`; they are checked by name against the
installed versions when those are imported, not here. Reading TOML and `section.key=value` is in config.py, rules that
join several options are in checks.py. Others import all of it from launch.config.
Left out on purpose: registries, plug-ins, environment-variable expansion.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


class ConfigError(ValueError):
    """What the user asked for cannot be. At most five lines: the option or file, the numbers, the remedy."""


@dataclass(frozen=True)
class ModelConfig:
    path: str = ""
    """Directory in Hugging Face format: config.json, safetensors, tokenizer. Read, never written."""
    trust_random_weights: bool = False
    """Build random weights of config.json's shapes when the directory has no safetensors (benchmarks only)."""


@dataclass(frozen=True)
class DataConfig:
    train_files: list[str] = field(default_factory=list)
    """Parquet or jsonl files, read in this order."""
    val_files: list[str] = field(default_factory=list)
    """Validation files, each one a set of its own."""
    prompts_per_step: int = 128
    """Prompts of one step; every prompt is sampled rollout.samples_per_prompt times."""
    max_prompt_tokens: int = 1024
    """Longest prompt after the chat template."""
    max_response_tokens: int = 1024
    """Longest response, end-of-text included."""
    overlong_prompts: Literal["filter", "error", "left", "right", "middle"] = "filter"
    """What happens to longer prompts, at load time: dropped with a printed count, an error, or cut."""
    shuffle: bool = True
    """Order of an epoch is a pure function of (seed, epoch); off keeps the file order."""
    incomplete_batch: Literal["drop", "keep"] = "drop"
    """The last, smaller batch of an epoch."""
    prompt_key: str = "prompt"
    """Column with the prompt: a chat message list, or a string that is used as it is."""
    label_key: str = "reward_model"
    """Column with the ground truth: a string, or a table with the key ground_truth."""
    source_key: str = "data_source"
    """Column that names the reward rule."""
    default_source: str = ""
    """Reward rule of rows that have no source column."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the tokenizer's chat template, for example enable_thinking = false."""


@dataclass(frozen=True)
class OptimizerConfig:
    weight_decay: float = 0.01
    """AdamW weight decay; one-dimensional parameters have none."""
    beta1: float = 0.9
    """Adam's first moment decay."""
    beta2: float = 0.999
    """Adam's second moment decay."""
    eps: float = 1e-8
    """Adam's epsilon."""
    clip_grad: float = 1.0
    """Global gradient norm limit; 0 switches clipping off."""
    kind: Literal["adam", "sgd"] = "adam"
    """sgd is plain (no momentum); for tests and comparisons."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up, over total_steps."""
    lr_warmup_steps: int = 0
    """Optimizer steps of linear warm-up from 0; a shorter run ends within it."""
    min_lr: float = 0.0
    """End value of linear and cosine schedules."""
    cpu_offload: bool = False
    """Adam on the host (Megatron's hybrid optimizer); a no-op on cpu."""
    cpu_offload_fraction: float = 1.0
    """Share of the optimizer state that lives on the host with cpu_offload."""


@dataclass(frozen=True)
class TrainConfig:
    tp: int = 1
    """Tensor parallel size (sequence parallel is on whenever tp > 1)."""
    pp: int = 1
    """Pipeline stages."""
    vpp: int = 1
    """Model chunks per pipeline stage (interleaved schedule)."""
    cp: int = 1
    """Context parallel size."""
    ep: int = 1
    """Expert parallel size."""
    etp: int = 0
    """Expert tensor parallel size; 0 means tp, which is Megatron's rule when nothing is said."""
    first_stage_layers: int = 0
    """Layers of the first pipeline stage; 0 spreads evenly."""
    last_stage_layers: int = 0
    """Layers of the last pipeline stage; 0 spreads evenly."""
    order: Literal["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"] = "tp-cp-ep-dp-pp"
    """Order of the training axes over the ranks, fastest first."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Parameters and activations; masters, gradient reduction, softmax and router are fp32 always."""
    micro_batch_tokens: int = 16384
    """Hard limit of tokens in one micro-batch of packed sequences (per context-parallel rank)."""
    mini_batches: int = 1
    """Optimizer steps per rollout: the batch's prompts are cut into this many parts."""
    epochs: int = 1
    """Passes over one rollout."""
    lr: float = 1e-6
    """Peak learning rate."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation; full stores one activation per layer."""
    spec: Literal["torch", "te"] = "torch"
    """Layer implementation: plain torch on every platform, or TransformerEngine when installed."""
    npu_adaptor: Literal["torch_npu", "mindspeed"] = "torch_npu"
    """What lets Megatron run on npu: torch_npu's transfer_to_npu, or MindSpeed with the versions it pairs with."""
    offload: list[Literal["params", "optimizer"]] = field(default_factory=list)
    """Training state that moves to the host while the engine generates."""
    log_prob_chunk_tokens: int = 4096
    """Tokens whose logits exist at a time in the log-prob head."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    megatron: dict[str, Any] = field(default_factory=dict)
    """Any field of Megatron's TransformerConfig, OptimizerConfig or DistributedDataParallelConfig, by name."""


@dataclass(frozen=True)
class RolloutConfig:
    tp: int = 1
    """Tensor parallel size of one vLLM replica."""
    dp: int = 1
    """Data parallel size inside one replica; only with expert_parallel, to widen the experts."""
    expert_parallel: bool = False
    """Split experts over tp x dp by expert; off splits every expert over tp x dp."""
    redundant_experts: int = 0
    """Extra expert copies per layer (EPLB slots)."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Weights and activations of the engine."""
    samples_per_prompt: int = 16
    """Group size of GRPO."""
    temperature: float = 1.0
    """Sampling temperature; the trainer's log-probs are divided by it too."""
    top_p: float = 1.0
    """Nucleus sampling; below 1 the rollout log-probs are renormalised."""
    top_k: int = -1
    """Keep the k likeliest tokens; -1 is off."""
    min_p: float = 0.0
    """Drop tokens below min_p x the likeliest."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a response."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Ids that end a response, beside the end-of-text ids of generation_config.json and the tokenizer."""
    schedule: Literal["queue", "static"] = "queue"
    """queue: a replica takes the next request when a slot frees; static: a fixed split."""
    routing_replay: Literal["none", "R2", "R3"] = "none"
    """Replay of expert choices in training: recorded in the scoring pass (R2) or by vLLM (R3)."""
    sync_weights: bool = True
    """Write the new weights into the engine after each update; off is a control experiment."""
    sync_plan: Literal["planned", "golden"] = "planned"
    """planned: our resharder; golden: gather full tensors and use vLLM's own loader (slow, an oracle)."""
    sync_staging_mib: int = 256
    """Cap of what a rank sends and of what it receives in one round of the weight sync."""
    compare_at_start: bool = False
    """Let vLLM load its weights itself and compare each with what the first sync would write; not on resume."""
    verify_every_steps: int = 0
    """Compare hashes of every tensor on both sides every N syncs, beyond the first three; 0 is never."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """Any field of vLLM's EngineArgs, by name."""


@dataclass(frozen=True)
class AlgorithmConfig:
    advantage: Literal["grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "opo", "grpo_passk"] = "grpo"
    """Advantage estimator."""
    norm_by_std: bool = True
    """Divide GRPO's centred rewards by the group's standard deviation (off: Dr.GRPO)."""
    policy_loss: Literal["clip", "gspo", "cispo", "gmpo", "sapo"] = "clip"
    """Policy objective."""
    clip_low: float = 0.2
    """Lower clip range: ratio >= 1 - clip_low."""
    clip_high: float = 0.2
    """Upper clip range: ratio <= 1 + clip_high."""
    dual_clip: float = 3.0
    """Bound of the loss for negative advantages (Dual-clip PPO); 0 switches it off."""
    sapo_tau_positive: float = 1.0
    """SAPO's gate temperature for positive advantages."""
    sapo_tau_negative: float = 1.05
    """SAPO's gate temperature for negative advantages."""
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    """How token losses become one number; denominators are global over the mini-batch."""
    aggregation_norm_tokens: int = 0
    """Constant of seq-mean-token-sum-norm; 0 means data.max_response_tokens."""
    kl_loss: float = 0.0
    """Weight of the KL term in the loss; 0 builds no reference policy."""
    kl_estimator: Literal["k1", "k2", "k3", "abs", "k3+"] = "k3"
    """KL estimator of the loss term; k3+ has k3's value and k2's gradient."""
    kl_reward: float = 0.0
    """Weight of the KL penalty in the reward; 0 switches it off."""
    kl_reward_estimator: Literal["k1", "k2", "k3", "abs"] = "k1"
    """KL estimator of the reward penalty."""
    kl_target: float = 0.0
    """Target of the adaptive controller of kl_reward; 0 keeps kl_reward fixed."""
    kl_horizon: int = 10000
    """Horizon, in samples, of the adaptive controller."""
    gamma: float = 1.0
    """Discount of reinforce_pp."""
    entropy_bonus: float = 0.0
    """Weight of the entropy bonus."""
    overlong_buffer_tokens: int = 0
    """DAPO's soft overlong punishment begins this many tokens before the limit; 0 is off."""
    overlong_penalty: float = 1.0
    """Punishment at the limit."""
    dynamic_sampling: bool = False
    """DAPO: drop groups whose unshaped scores are all equal, sample until the batch is full; surplus waits a step."""
    dynamic_sampling_max_rounds: int = 10
    """Generation rounds of one step at most; 0 is no limit."""
    dynamic_sampling_at_limit: Literal["train", "stop"] = "train"
    """At the limit: train with what exists (with a warning), or stop with an error."""
    correction: Literal["none", "token", "sequence", "icepop", "sequence_mask"] = "none"
    """Rollout correction between the engine's and the trainer's log-probs."""
    correction_low: float = 0.5
    """Lower bound of icepop and sequence_mask."""
    correction_high: float = 2.0
    """Truncation of the importance weight, upper bound of icepop and sequence_mask."""
    old_log_probs: Literal["auto", "recompute", "rollout"] = "auto"
    """auto: the current pass when there is one update per rollout, else recomputed; rollout: bypass mode."""
    shuffle_rewards: bool = False
    """Permute rewards within the batch: a control experiment that must not learn."""


@dataclass(frozen=True)
class RewardConfig:
    function: str = ""
    """package.module:f or file.py:f, f(data_source, solution, ground_truth, extra_info); else the built-in rules."""
    weights: dict[str, float] = field(default_factory=dict)
    """Weights of several rewards per sample (a function that returns a table)."""
    gsm8k_mode: Literal["strict", "flexible"] = "strict"
    """strict: the number after the last ####; flexible: the last number."""
    gsm8k_window_chars: int = 0
    """Look at the last characters only (the reference rule uses 300); 0 is the whole text."""
    url: str = ""
    """HTTP endpoint that scores batches of samples."""
    timeout_s: float = 10.0
    """Hard deadline of one sample; later it scores 0 and is counted."""
    memory_mib: int = 2048
    """Memory by which scoring one sample may make a reward worker grow; more scores 0 and is counted."""
    workers: int = 0
    """Reward processes per rank; 0 scores cheap built-in rules inline and uses 2 processes otherwise."""


@dataclass(frozen=True)
class EvalConfig:
    every_steps: int = 0
    """Validate every N steps and after the last; 0 is never."""
    before_training: bool = False
    """Validate before the first step."""
    samples_per_prompt: int = 1
    """k of mean@k, best@k and maj@k."""
    temperature: float = 0.0
    """Sampling temperature of validation; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus sampling of validation."""
    top_k: int = -1
    """Top-k of validation."""
    max_prompts: int = 0
    """Use the first N prompts of each set; 0 is all."""


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int = 0
    """Save every N steps; 0 saves when the run stops early and at its end."""
    keep: int = 2
    """Complete checkpoints kept; older ones are removed after a newer one is complete."""
    keep_every: int = 0
    """Never remove checkpoints of every N-th step; 0 is off."""
    resume: Literal["auto", "none"] | str = "auto"
    """auto: the newest complete checkpoint of run_dir; none: start anew; or a checkpoint directory."""
    background: bool = False
    """Write from a host snapshot while training goes on."""
    at_end: bool = True
    """Save after the last step."""
    export: bool = False
    """Write a Hugging Face directory (run_dir/export) after the last step."""


@dataclass(frozen=True)
class LogConfig:
    tensorboard: bool = True
    """Write TensorBoard files."""
    samples_per_step: int = 0
    """Samples written per step to samples/; 0 is all, -1 none."""
    hook: str = ""
    """package.module:function(step, metrics) called on rank 0 after each step."""
    profile_steps: list[int] = field(default_factory=list)
    """Steps recorded by the torch profiler."""
    profile_ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks recorded by the torch profiler."""


@dataclass(frozen=True)
class RuntimeConfig:
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """Device of all ranks; auto takes the only kind that is present."""
    deadline_s: float = 1800.0
    """Longest silence of one phase before the stacks of all ranks go to disk and the run ends."""
    time_limit_s: float = 0.0
    """Wall time of the job from its start; a step that cannot end before is not started; 0 is none."""
    self_check: bool = True
    """Check the first step: kl and clip fraction of its first update, sampler agreement, weight hashes, memory."""
    self_check_probs_diff: float = 0.0
    """Bound of mean |p_engine - p_trainer| in the first step; 0 takes 1e-4 for float32 and 2e-2 for bfloat16."""
    debug_rank: int = -1
    """Breakpoint in this rank before the first step, while the others wait; --debug-rank R."""
    record: str = ""
    """Directory that gets the samples of every step; --record DIR."""
    record_steps: list[int] = field(default_factory=list)
    """Steps that runtime.record keeps; empty is all."""
    replay: str = ""
    """Directory of recorded samples: train on them without an engine, under any layout; --replay DIR."""
    rollout_only: bool = False
    """Generate and score, train nothing; --rollout-only."""


@dataclass(frozen=True)
class Config:
    run_dir: str = "runs/default"
    """Everything the run writes goes here."""
    seed: int = 0
    """Seeds prompt order, sampling and everything else."""
    world: int = 0
    """Number of ranks that the recipe is meant for; checked against the launch; 0 takes the launch's."""
    total_steps: int = 0
    """Steps in all, one rollout each; 0 takes total_epochs."""
    total_epochs: int = 1
    """Passes over the training prompts when total_steps is 0."""
    shrink: bool = False
    """Rehearse the recipe on a laptop: degrees of at most 2 on at most 4 ranks, a tiny model below model.path."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
