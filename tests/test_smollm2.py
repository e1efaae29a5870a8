"""The main job on real input: SmolLM2-135M-Instruct and GSM8K: three steps, validation, resume, export.

The model comes from a PyPI package; the problems from ../shared/data/gsm8k where that folder exists.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.jobs import ROOT, prepare, run_job

RECIPE = "launch/recipes/smollm2-gsm8k.toml"
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"

LOAD_WITH_VLLM = """
import sys, os
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", TORCHDYNAMO_DISABLE="1")
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=128, kv_cache_memory_bytes=64 << 20)
out = llm.generate(["2 + 2 ="], SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)
print("tokens", list(out[0].outputs[0].token_ids))
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.skipif(not GSM8K.exists(), reason=f"needs GSM8K at {GSM8K}")
def test_three_steps_with_validation_resume_and_export(tmp_path):
    model = prepare("smollm2", tmp_path / "smollm2")
    data = prepare("gsm8k", tmp_path / "gsm8k", "--from", str(GSM8K))
    options = [f"model.path={model}", f'data.train_files=["{data}/train.parquet"]']
    options += [f'data.val_files=["{data}/test.parquet"]']
    first = run_job(tmp_path / "run", 2, RECIPE, *options, "total_steps=2", timeout_s=300)
    done = len(first.metrics)
    job = run_job(tmp_path / "run", 2, RECIPE, *options, timeout_s=300)
    assert done == 2 and "resumed after step 2" in job.output
    rows = job.metrics
    assert [row["training/global_step"] for row in rows] == [1, 2, 3]
    assert rows[0]["actor/ppo_kl"] == rows[0]["actor/pg_clipfrac"] == 0
    assert rows[0]["training/rollout_probs_diff_mean"] < 1e-4
    assert "val-core/openai/gsm8k/reward/mean@1" in rows[-1]
    export = job.run_dir / "export"
    assert loads_in_transformers(export) == tokens_of_vllm(export)


def loads_in_transformers(path: Path) -> list[int]:
    """Four greedy tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = (
        AutoTokenizer.from_pretrained(path),
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
    )
    ids = tokenizer("2 + 2 =", return_tensors="pt")
    with torch.no_grad():
        out = model.generate(**ids, max_new_tokens=4, do_sample=False)
    return out[0, ids["input_ids"].shape[1] :].tolist()


def tokens_of_vllm(path: Path) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", LOAD_WITH_VLLM, str(path)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.split("tokens", 1)[1])
