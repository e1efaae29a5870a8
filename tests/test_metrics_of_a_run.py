"""A short real run: every key of the reference log line is there and equals what independent code finds in the samples.

Also the trace of the profiled step.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path

import pytest

from launch.report import parse_verl
from parallel.phases import CYCLE
from tests.jobs import Job, prepare, run_job

REFERENCE = Path(__file__).parent / "scripts" / "verl_step.log"
WORLD, STEPS, LIMIT = 2, 2, 5


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Job:
    folder = tmp_path_factory.mktemp("metrics")
    data = prepare("copy", folder / "copy")
    return run_job(
        folder / "run",
        WORLD,
        *("launch/recipes/quickstart.toml", f"model.path={data}/model", f'data.train_files=["{data}/train.parquet"]'),
        *(
            f'data.val_files=["{data}/val.parquet"]',
            "eval.every_steps=1",
            "eval.max_prompts=4",
            "log.samples_per_step=0",
        ),
        *(f"total_steps={STEPS}", "algorithm.kl_loss=0.001", "algorithm.old_log_probs=recompute"),
        *("checkpoint.every_steps=1", "--profile-steps", "2", "--profile-ranks", "1"),
    )


def spread(name: str, values: list[float]) -> dict[str, float]:
    return {f"{name}/mean": statistics.fmean(values), f"{name}/max": max(values), f"{name}/min": min(values)}


def from_samples(rows: list[dict]) -> dict[str, float]:
    """The metrics that the samples alone determine."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["prompt_id"]].append(row["score"])
    advantages = []
    for row in rows:
        scores = groups[row["prompt_id"]]
        deviation = statistics.stdev(scores)
        advantages += [(row["score"] - statistics.fmean(scores)) / (deviation + 1e-6)] * row["response_tokens"]
    idle = sum(len(set(scores)) == 1 for scores in groups.values())
    lengths = [row["prompt_tokens"] + row["response_tokens"] for row in rows]
    half = len(lengths) // WORLD
    parts = [sum(lengths[:half]), sum(lengths[half:])]
    return {
        **spread("critic/score", [row["score"] for row in rows]),
        **spread("critic/rewards", [row["score"] for row in rows]),
        **spread("critic/advantages", advantages),
        **spread("critic/returns", advantages),
        **spread("response_length", [row["response_tokens"] for row in rows]),
        **spread("prompt_length", [row["prompt_tokens"] for row in rows]),
        "response_length/clip_ratio": statistics.fmean(row["response_tokens"] == LIMIT for row in rows),
        "response_length/truncated_ratio": statistics.fmean(row["truncated"] for row in rows),
        "prompt_length/clip_ratio": 0.0,
        "critic/zero_advantage_groups": idle / len(groups),
        "actor/pg_loss": -statistics.fmean(advantages),  # one update: every ratio is 1
        "global_seqlen/min": min(parts),
        "global_seqlen/max": max(parts),
        "global_seqlen/minmax_diff": max(parts) - min(parts),
        "global_seqlen/mean": sum(lengths) / WORLD,
        "perf/total_num_tokens": sum(lengths),
    }


@pytest.mark.slow
def test_every_key_of_the_reference_line_is_written(job):
    wanted = set(parse_verl([REFERENCE.read_text()])[0])
    for row in job.metrics:
        assert not wanted - set(row)
    assert {"timing_s/testing", "training/rollout_probs_diff_mean", "rollout_corr/k3_kl", "reward/error"} <= set(row)
    assert "timing_s/save_checkpoint" in row  # of the save after the step before
    printed = parse_verl(job.output.splitlines())
    assert len(printed) == STEPS and wanted <= set(printed[0])


@pytest.mark.slow
@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_metrics_equal_what_the_samples_say(job, step):
    row, samples = job.metrics[step - 1], job.samples(step)
    assert len(samples) == 256
    for key, value in from_samples(samples).items():
        assert row[key] == pytest.approx(value, rel=1e-5, abs=2e-6), key
    balanced = [row["global_seqlen/balanced_min"], row["global_seqlen/balanced_max"]]
    assert sum(balanced) == row["perf/total_num_tokens"]


@pytest.mark.slow
def test_metrics_of_time_and_optimiser(job):
    for number, row in enumerate(job.metrics, 1):
        tokens, generated = row["perf/total_num_tokens"], 256 * row["response_length/mean"]
        seconds = {key[9:]: value for key, value in row.items() if key.startswith("timing_s/")}
        assert row["perf/time_per_step"] == seconds["step"]
        assert row["perf/throughput"] == row["perf/e2e_tps"] == pytest.approx(tokens / seconds["step"] / WORLD)
        assert row["perf/update_tps"] == pytest.approx(tokens / seconds["update_actor"] / WORLD)
        assert row["perf/vllm_tps"] == pytest.approx(tokens / seconds["gen"] / WORLD)
        assert row["timing_per_token_ms/gen"] == pytest.approx(1000 * seconds["gen"] / generated)
        for name in ("ref", "update_actor", "adv"):
            assert row[f"timing_per_token_ms/{name}"] == pytest.approx(1000 * seconds[name] / tokens)
        inside = ("gen", "old_log_prob", "ref", "adv", "update_actor", "start_profile", "stop_profile")
        # The sync of a validated step happens after it, so that reshard is not always part of the step.
        assert 0.6 * seconds["step"] < sum(seconds[name] for name in inside) <= 1.05 * seconds["step"]
        assert all(row[f"timing_max_s/{name}"] >= value - 1e-12 for name, value in seconds.items())
        assert all(row[f"slowest_rank/{name}"] in range(WORLD) for name in seconds)
        assert row["actor/lr"] == 1e-3 and row["actor/kl_coef"] == 0.001 and row["training/epoch"] == 0
        assert row["training/global_step"] == number and row["actor/grad_norm"] > 0 and row["actor/entropy"] > 0
        assert row["actor/ppo_kl"] == row["actor/pg_clipfrac"] == row["actor/pg_clipfrac_lower"] == 0
        assert row["perf/mfu/actor"] == row["perf/max_memory_allocated_gb"] == row["perf/max_memory_reserved_gb"] == 0
        held = [row[f"memory_host_gb/{move}"] for move, _ in CYCLE.values()]
        assert 0.1 < min(held) and max(held) <= 1.01 * row["perf/rank_memory_gb"] < row["perf/cpu_memory_used_gb"]
        assert 0 <= row["training/rollout_probs_diff_mean"] <= row["training/rollout_probs_diff_max"] < 1e-4
    assert job.metrics[0]["actor/kl_loss"] == 0 < job.metrics[1]["actor/kl_loss"]


@pytest.mark.slow
def test_the_trace_of_a_profiled_step_has_the_phases(job):
    files = list((job.run_dir / "profile").iterdir())
    assert [file.name for file in files] == ["step_000002_rank_001.json"]
    ranges = {event.get("name") for event in json.loads(files[0].read_text())["traceEvents"]}
    assert {f"phase {name}" for name in ("reshard", "gen", "reward", "ref", "adv", "update_actor")} <= ranges
