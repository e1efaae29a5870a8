"""Tiny random model directories in Hugging Face format, for the quickstart and for tests; nothing is downloaded.

transformers' own classes write them, so that their tensor names and shapes are an outside check of parallel/family.py.
The tokenizer has one character per id: pad, eos, '=', bos, ten digits, then letters up to 32, so that every sampled id
can be printed. Its chat template renders the contents of all messages, then '=' for the answer to come.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

PAD, EOS, EQUALS, BOS, FIRST_DIGIT = 0, 1, 2, 3, 4
NUM_TOKENS = 32
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "Llama"},
    "llama-tied": {"architecture": "Llama", "tie_word_embeddings": True},
    "qwen2": {"architecture": "Qwen2", "hidden_size": 128},  # heads x head_dim, vLLM knows no other
    "qwen2-tied": {"architecture": "Qwen2", "hidden_size": 128, "tie_word_embeddings": True},
    "qwen3": {"architecture": "Qwen3"},
    "qwen3-tied": {"architecture": "Qwen3", "tie_word_embeddings": True},
    "qwen3-moe": {"architecture": "Qwen3Moe"},
}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": BOS,
}
MOE_SIZES = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.0,
}


def write_model(
    out: str | Path,
    family: str = "qwen3-moe",
    *,
    vocab: int = NUM_TOKENS,
    seed: int = 0,
    shard_bytes: int = 0,
    noise: float = 0.1,
    dtype: str = "float32",
    **sizes: Any,
) -> Path:
    """A model directory with tokenizer; `sizes` are fields of the family's config class.

    vocab >= 32, odd numbers included; shard_bytes > 0 splits the weights into files of at most that size; `noise` is
    the spread of norms around 1 and of biases around 0, so that a misplaced one is noticed.
    """
    import torch
    import transformers

    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}; one of {', '.join(FAMILIES)}")
    if vocab < NUM_TOKENS:
        raise ValueError(f"vocabulary of {vocab}: the tokenizer has {NUM_TOKENS} ids; use at least that many")
    fields = {**SIZES, **FAMILIES[family], "vocab_size": vocab}
    architecture = fields.pop("architecture")
    fields |= (MOE_SIZES if architecture == "Qwen3Moe" else {}) | sizes
    config = getattr(transformers, architecture + "Config")(**fields)
    torch.manual_seed(seed)
    model = getattr(transformers, architecture + "ForCausalLM")(config).to(getattr(torch, dtype))
    if noise:
        _add_noise(model, noise)
    model.generation_config.update(eos_token_id=EOS, pad_token_id=PAD, bos_token_id=BOS)
    model.save_pretrained(out, max_shard_size=shard_bytes or "50GB")
    _use_published_names(Path(out) / "config.json")
    write_tokenizer(out)
    return Path(out)


def _add_noise(model: Any, noise: float) -> None:
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += noise * torch.randn_like(parameter)


def _use_published_names(file: Path) -> None:
    """transformers 5 writes num_local_experts where published Qwen3-MoE directories have num_experts."""
    config = json.loads(file.read_text())
    if "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def write_tokenizer(out: str | Path) -> None:
    """tokenizer.json, tokenizer_config.json and the chat template of the 32 one-character tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = string.ascii_lowercase[: NUM_TOKENS - FIRST_DIGIT - len(string.digits)]
    tokens = ["<pad>", "<eos>", "=", "<bos>", *string.digits, *letters]
    # No unknown token: text that the model cannot spell is an error, not a silent stand-in.
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<pad>",  # a name only, never produced; without it Qwen2's tokenizer class adds a 33rd token
        clean_up_tokenization_spaces=False,
        model_max_length=SIZES["max_position_embeddings"],
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(out)


def write_all(out: str | Path, vocab: int = NUM_TOKENS, seed: int = 0, shard_bytes: int = 0) -> list[Path]:
    """One directory per family below `out`."""
    return [
        write_model(Path(out) / family, family, vocab=vocab, seed=seed, shard_bytes=shard_bytes) for family in FAMILIES
    ]
