"""Metric algebra, every formula recomputed by independent code, and what the writers leave on disk."""

import json
import logging
import math
import os
import random
import statistics
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from launch import metrics as m
from launch import writers as w
from parallel.device import Device, host_memory
from tests.ranks import run_ranks


@pytest.fixture
def seed():
    value = int(os.environ.get("TEST_SEED", time.time_ns() % 2**32))
    print(f"TEST_SEED={value}")
    return value


def random_sequences(seed):
    """The batch as a list of plain tables, one per sequence; what the arrays are made of."""
    rng = random.Random(seed)
    rows = []
    for prompt in range(rng.randint(1, 6)):
        group, dull = rng.randint(1, 5), rng.random() < 0.3
        for _ in range(group):
            length, score = rng.randint(1, 12), float(rng.random() < 0.5)
            rows.append(
                {
                    "prompt": prompt * 7,
                    "p": rng.randint(1, 10),
                    "r": length,
                    "cut": length == 12 and rng.random() < 0.5,
                    "score": score,
                    "reward": score - rng.random(),
                    "a": [0.0 if dull else rng.gauss(0, 1) for _ in range(length)],
                    "ret": [rng.gauss(0, 1) for _ in range(length)],
                    "format": rng.choice([0.0, 1.0, math.nan]),
                }
            )
    rng.shuffle(rows)  # groups are found by number, never by position
    return rows


def as_batch(rows, per_token=True):
    column = lambda key: np.array([row[key] for row in rows])  # noqa: E731
    flat = lambda key: np.array([x for row in rows for x in row[key]])  # noqa: E731
    return m.StepBatch(
        prompt_ids=column("prompt"),
        prompt_tokens=column("p"),
        response_tokens=column("r"),
        truncated=column("cut"),
        scores=column("score"),
        rewards=column("reward"),
        advantages=flat("a") if per_token else np.array([row["a"][0] for row in rows]),
        returns=flat("ret") if per_token else None,
        reward_parts={"format": column("format")},
    )


def expect(got, expected):
    assert set(got) == set(expected), set(got) ^ set(expected)
    for key, value in expected.items():
        assert got[key] == pytest.approx(value, rel=1e-12, abs=1e-12), key


def three(prefix, values):
    return {f"{prefix}/mean": statistics.fmean(values), f"{prefix}/max": max(values), f"{prefix}/min": min(values)}


@pytest.mark.parametrize("trial", range(20))
def test_critic_metrics(seed, trial):
    rows = random_sequences(seed + trial)
    groups = {row["prompt"]: [] for row in rows}
    for row in rows:
        groups[row["prompt"]] += row["a"]
    expected = three("critic/score", [r["score"] for r in rows]) | three("critic/rewards", [r["reward"] for r in rows])
    expected |= three("critic/advantages", [x for r in rows for x in r["a"]])
    expected |= three("critic/returns", [x for r in rows for x in r["ret"]])
    dull = [not any(values) for values in groups.values()]
    expected["critic/zero_advantage_groups"] = sum(dull) / len(dull)
    parts = [r["format"] for r in rows if not math.isnan(r["format"])]
    expected |= {"reward/format/mean": statistics.fmean(parts)} if parts else {}
    expect(m.critic_metrics(as_batch(rows)), expected)


def test_advantages_per_sequence_are_weighted_by_length(seed):
    rows = random_sequences(seed)
    got = m.critic_metrics(as_batch(rows, per_token=False))
    mean = sum(r["a"][0] * r["r"] for r in rows) / sum(r["r"] for r in rows)
    assert got["critic/advantages/mean"] == pytest.approx(mean) == got["critic/returns/mean"]


def test_advantage_extremes_of_the_reference_log():
    """16 samples, one right: (1 - 1/16) / (0.25 + 1e-6) = 3.749985, the log's critic/advantages/max."""
    rewards = np.array([1.0] + [0.0] * 15)
    advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    ones = np.ones(16, int)
    got = m.critic_metrics(m.StepBatch(ones, ones, ones, ones > 1, rewards, rewards, advantages))
    assert got["critic/advantages/max"] == pytest.approx(3.7499847412109375, abs=2e-6)
    assert got["critic/zero_advantage_groups"] == 0.0


@pytest.mark.parametrize("trial", range(20))
def test_length_metrics(seed, trial):
    rows = random_sequences(seed + trial)
    share = lambda hits: sum(hits) / len(rows)  # noqa: E731
    expected = three("response_length", [r["r"] for r in rows]) | three("prompt_length", [r["p"] for r in rows])
    expected["response_length/clip_ratio"] = share(r["r"] == 12 for r in rows)
    expected["response_length/truncated_ratio"] = share(r["cut"] for r in rows)
    expected["prompt_length/clip_ratio"] = share(r["p"] == 10 for r in rows)
    expect(m.length_metrics(as_batch(rows), max_prompt_tokens=10, max_response_tokens=12), expected)


@pytest.mark.parametrize("trial", range(20))
def test_seqlen_metrics(seed, trial):
    rng = random.Random(seed + trial)
    ranks = rng.randint(1, 5)
    lengths = [rng.randint(1, 100) for _ in range(ranks * rng.randint(1, 6))]
    owner = [rng.randrange(ranks) for _ in lengths]
    size = len(lengths) // ranks
    before = [sum(lengths[k * size : (k + 1) * size]) for k in range(ranks)]
    after = [sum(n for n, o in zip(lengths, owner, strict=True) if o == k) for k in range(ranks)]
    expected = {"min": min(before), "max": max(before), "minmax_diff": max(before) - min(before)}
    expected |= {"balanced_min": min(after), "balanced_max": max(after), "partitions": ranks}
    expected["mean"] = sum(lengths) / ranks
    partitions = [[i for i, o in enumerate(owner) if o == k] for k in range(ranks)]
    got = m.seqlen_metrics(np.array(lengths), partitions)
    expect(got, {f"global_seqlen/{key}": value for key, value in expected.items()})


def reference_batch():
    """2,048 sequences with the totals of the reference log: 2,894,758 tokens, 2,722,118 of them generated."""
    response, prompt = np.full(2048, 2722118 // 2048), np.full(2048, (2894758 - 2722118) // 2048)
    response[: 2722118 - response.sum()] += 1
    prompt[: 2894758 - 2722118 - prompt.sum()] += 1
    zeros = np.zeros(2048)
    return m.StepBatch(np.arange(2048) // 16, prompt, response, zeros > 0, zeros, zeros, zeros)


def test_speed_metrics_of_the_reference_log():
    seconds = {"generate_sequences": 1311.4302978515625, "gen": 1549.5419146210188, "ref": 133.7677788970759}
    seconds |= {"adv": 0.17963880999013782, "update_actor": 644.0539472099626, "step": 2814.4491687440313}
    got = m.speed_metrics(reference_batch(), seconds, world=128)
    logged = {
        "timing_per_token_ms/ref": 0.046210349499708064,
        "timing_per_token_ms/gen": 0.5692412726490985,
        "timing_per_token_ms/update_actor": 0.22248973738390657,
        "timing_per_token_ms/adv": 6.205658987388162e-05,
        "perf/total_num_tokens": 2894758,
        "perf/time_per_step": 2814.4491687440313,
        "perf/throughput": 8.035425590966435,
        "perf/e2e_tps": 8.035425590966435,
        # the seed's formula: (mean response + mean prompt) * prompts * samples / world / seconds
        "perf/update_tps": (1329.1591796875 + 84.296875) * 128 * 16 / 128 / 644.0539472099626,
        "perf/vllm_tps": (1329.1591796875 + 84.296875) * 128 * 16 / 128 / 1549.5419146210188,
        "perf/generate_tps": 1329.1591796875 * 2048 / 128 / 1311.4302978515625,
    }
    expect(got, logged)


def test_phases_that_did_not_run_have_no_key():
    got = m.speed_metrics(reference_batch(), {"step": 2.0, "ref": 0.0}, world=4)
    assert set(got) == {"perf/throughput", "perf/e2e_tps", "perf/total_num_tokens", "perf/time_per_step"}


def test_global_seqlen_mean_of_the_reference_log():
    lengths = reference_batch().prompt_tokens + reference_batch().response_tokens
    got = m.seqlen_metrics(lengths, [range(k, 2048, 128) for k in range(128)])
    assert got["global_seqlen/mean"] == 22615.296875


QWEN3_235B = SimpleNamespace(
    num_layers=94,
    hidden=4096,
    heads=64,
    kv_heads=4,
    head_dim=128,
    ffn=12288,
    vocab=151936,
    experts=128,
    experts_per_token=8,
    expert_ffn=1536,
    is_moe=True,
)


def test_flops_and_mfu():
    assert m.active_parameters(QWEN3_235B) == pytest.approx(22.19e9, rel=1e-3)
    lengths = np.array([3, 5])
    expected = 6 * m.active_parameters(QWEN3_235B) * 8 + 12 * (9 + 25) * 128 * 64 * 94
    assert m.train_flops(QWEN3_235B, lengths) == expected
    # 1.32 % without the attention term, on 128 devices of 354 TFLOP/s (reference log)
    flops = 6 * m.active_parameters(QWEN3_235B) * 2894758
    assert m.mfu(flops, 644.0539472099626, 128, m.peak_flops("Ascend910B1")) == pytest.approx(0.0132, abs=5e-5)
    dense = SimpleNamespace(num_layers=2, hidden=8, heads=4, kv_heads=2, head_dim=3, ffn=16, vocab=32, is_moe=False)
    assert m.active_parameters(dense) == 2 * (8 * 12 + 2 * 8 * 6 + 12 * 8 + 3 * 8 * 16) + 2 * 32 * 8


@pytest.mark.parametrize(
    "name, peak",
    [("NVIDIA H200", 989e12), ("NVIDIA H20", 148e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("Ascend910B3", 354e12)],
)
def test_peak_by_device_name(name, peak):
    assert m.peak_flops(name) == peak
    assert m.mfu(1e12, 1.0, 1, m.peak_flops("cpu")) == 0.0


def test_memory_of_the_device_and_of_every_move():
    now = dict(
        allocated=1,
        reserved=2,
        peak_allocated=3 << 30,
        peak_reserved=4 << 30,
        free=5,
        total=6,
        host=7,
        host_used=8 << 30,
        host_total=9 << 30,
    )
    after = now | dict(allocated=8 << 30, free=10 << 30, total=80 << 30, host=2 << 30)
    metrics = m.Metrics()
    peak = dict(allocated=2 << 30, reserved=9 << 30, device=11 << 30)
    m.add_memory(
        metrics,
        now,
        {"wake_cache": after, "sleep": after | dict(free=75 << 30, allocated=0)},
        {"sync": peak},
        {"generate": 12 << 30, "sync": 0},
    )
    result = metrics.reduce()
    assert result["perf/max_memory_allocated_gb"] == 3 and result["perf/max_memory_reserved_gb"] == 9
    assert result["memory_peak_gb/generate"] == 12 and result["memory_peak_gb/sync"] == 0
    assert result["memory_device_gb/wake_cache"] == 70 and result["memory_allocated_gb/wake_cache"] == 8
    assert result["memory_device_gb/sleep"] == 5 and result["memory_host_gb/sleep"] == 2
    assert result["perf/cpu_memory_used_gb"] == 8
    assert all(metrics.table[key].op == "max" for key in result)


def test_a_cpu_has_host_memory_only():
    memory = Device("cpu").memory()
    assert memory["host"] < memory["host_used"] < memory["host_total"]
    block = np.ones(512 << 20, np.uint8)  # large beside what a host reclaims from this process meanwhile
    grown = Device("cpu").memory()["host"] - memory["host"]
    assert 0.8 * len(block) < grown < 1.5 * len(block) and not any(memory[n] for n in memory if "host" not in n)
    metrics = m.Metrics()
    m.add_memory(metrics, memory, {"sleep": memory}, {"sleep": Device("cpu").peaks()}, {"sync": 0})
    result = metrics.reduce()
    assert {key for key in result if key.startswith("memory_")} == {"memory_host_gb/sleep"}
    assert result["memory_host_gb/sleep"] <= result["perf/rank_memory_gb"] * 1.01 and result["perf/rank_memory_gb"] > 0


def test_host_memory_of_the_node_and_of_a_limited_cgroup(tmp_path):
    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    assert host_memory(tmp_path) == (0, 0)
    write("proc/meminfo", "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 600 kB\n")
    write("proc/self/cgroup", "0::/job/step\n")
    assert host_memory(tmp_path) == (400 * 1024, 1000 * 1024)
    write("sys/fs/cgroup/job/step/memory.max", "max\n")
    write("sys/fs/cgroup/job/step/memory.current", "9\n")
    for name, value in (("max", 500 * 1024), ("current", 300 * 1024), ("stat", "anon 1\ninactive_file 102400\n")):
        write(f"sys/fs/cgroup/job/memory.{name}", str(value))
    assert host_memory(tmp_path) == (200 * 1024, 500 * 1024)
    write("sys/fs/cgroup/job/memory.max", str(2000 * 1024))  # more than the node has
    assert host_memory(tmp_path) == (400 * 1024, 1000 * 1024)


# --- algebra


@pytest.mark.parametrize("trial", range(20))
def test_algebra_is_the_same_for_any_split(seed, trial):
    """Values dealt to ranks at random, in parts: as if one rank had seen them all."""
    rng = random.Random(seed + trial)
    values = [rng.gauss(0, 3) for _ in range(rng.randint(2, 40))]
    ranks = [m.Metrics() for _ in range(rng.randint(1, 6))]
    for op in ("mean", "sum", "min", "max", "std"):
        for metrics in ranks:
            metrics.declare(op, op)
        rest = list(values)
        while rest:
            part, rest = rest[: (cut := rng.randint(1, 5))], rest[cut:]
            rng.choice(ranks).add_array(op, np.array(part), op)
    rows = {
        op: np.array([[k.table[op].sum, k.table[op].weight, k.table[op].squares] for k in ranks])
        for op in ranks[0].table
    }
    got = {op: m.fold(op, table) for op, table in rows.items()}
    expect(
        got,
        {
            "mean": statistics.fmean(values),
            "sum": math.fsum(values),
            "min": min(values),
            "max": max(values),
            "std": statistics.stdev(values),
        },
    )


def test_weights_and_zero_weights():
    metrics = m.Metrics()
    metrics.add("mean", 2.0, 3)
    metrics.add("mean", 6.0, 1)
    metrics.add_sum("loss", 10.0, 4)
    metrics.add_sum("loss", 0.0, 0)
    metrics.add("sum", 2.0, op="sum")
    metrics.add("sum", 3.0, op="sum")
    metrics.declare("nothing", "max")
    metrics.add_array("empty", np.array([]), "mean")
    metrics.add("one", 5.0, op="std")
    metrics.add("below", -3.0, op="max")
    assert metrics.reduce() == {"mean": 3.0, "loss": 2.5, "sum": 5.0, "one": 0.0, "below": -3.0}
    with pytest.raises(AssertionError, match="added as mean and as max"):
        metrics.add("mean", 1.0, op="max")


@pytest.mark.parametrize("op", ["mean", "sum", "min", "max", "std"])
def test_nan_is_never_hidden(op):
    for order in ([1.0, math.nan, 2.0], [math.nan, 1.0, 2.0], [1.0, 2.0, math.nan]):
        metrics = m.Metrics()
        for value in order:
            metrics.add("x", value, op=op)
        assert math.isnan(metrics.reduce()["x"])


def values_of(rank):
    rng = np.random.default_rng(100 + rank)
    return rng.normal(size=5 + 3 * rank)


def reduce_on(rank, world):
    """(what ranks with equal names agree on, the error of ranks with unequal names)"""
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=rank, world_size=world)
    metrics, values = m.Metrics(), values_of(rank)
    for op in ("mean", "sum", "min", "max", "std"):
        metrics.add_array(op, values, op)
    m.add_timings(metrics, {"gen": 1.0 + rank % 2, "step": 5.0 - rank})
    m.add_agreement(metrics, -np.abs(values), -np.abs(values) * 0.9)
    if rank == 0:
        metrics.add("only_zero", 7.0)
    else:
        metrics.declare("only_zero")
    result, said = metrics.reduce(dist.group.WORLD), ""
    if rank == 2:
        metrics.declare("forgotten")
    try:
        metrics.reduce(dist.group.WORLD)
    except AssertionError as error:
        said = str(error)
    dist.destroy_process_group()
    return result, said


@pytest.mark.slow
def test_reduce_over_processes():
    results, said = zip(*run_ranks(3, reduce_on, 3), strict=True)
    assert results[0] == results[1] == results[2]
    assert said[0] == said[1] == said[2]
    assert "metrics of ranks 0 and 2 differ: ['forgotten|mean']" in said[0]
    values = np.concatenate([values_of(rank) for rank in range(3)])
    p, q = np.exp(-np.abs(values)), np.exp(-np.abs(values) * 0.9)
    expect(
        results[0],
        {
            "mean": statistics.fmean(values),
            "sum": math.fsum(values),
            "min": min(values),
            "max": max(values),
            "std": statistics.stdev(values),
            "timing_s/gen": 4 / 3,
            "timing_max_s/gen": 2.0,
            "slowest_rank/gen": 1,
            "timing_s/step": 4.0,
            "timing_max_s/step": 5.0,
            "slowest_rank/step": 0,
            "training/rollout_probs_diff_mean": statistics.fmean(abs(p - q)),
            "training/rollout_probs_diff_max": max(abs(p - q)),
            "training/rollout_probs_diff_std": statistics.stdev(abs(p - q)),
            "rollout_corr/kl": statistics.fmean(np.log(p / q)),
            "rollout_corr/k3_kl": statistics.fmean(q / p - 1 - np.log(q / p)),
            "only_zero": 7.0,
        },
    )


def test_agreement_of_equal_policies_is_zero():
    metrics = m.Metrics()
    m.add_agreement(metrics, np.float32([-0.1, -3.0]), np.float32([-0.1, -3.0]))
    m.add_agreement(metrics, np.float32([]), np.float32([]))
    assert set(metrics.reduce().values()) == {0.0}


# --- writers


def make(tmp_path, **options):
    return w.Writers(tmp_path, **{"total_steps": 9, "tensorboard": False, **options})


def test_console_line_can_be_parsed():
    values = {"critic/score/mean": np.float64(1 / 3), "training/global_step": np.int64(7), "actor/lr": 1e-06, "x": "no"}
    line = w.console_line(7, values)
    assert line == f"step:7 - critic/score/mean:{1 / 3!r} - training/global_step:7 - actor/lr:1e-06"
    head, *pairs = line.split(" - ")
    assert head == "step:7" and float(dict(pair.split(":") for pair in pairs)["critic/score/mean"]) == 1 / 3


def test_metrics_file_and_log(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    writers = make(tmp_path)
    for step in (1, 2):
        writers.write(
            step, {"timing_s/step": 2.0, "critic/rewards/mean": 0.25 * step, "a": math.nan, "b": np.float32(1)}
        )
    writers.close()
    lines = [
        json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["training/global_step"] for line in lines] == [1, 2] and lines[1]["critic/rewards/mean"] == 0.5
    assert lines[0]["a"] is None and lines[0]["b"] == 1.0
    assert any(r.message.startswith("step:2 - training/global_step:2 - critic/") for r in caplog.records)
    assert any(r.message == "step 2/9  reward 0.500  step 2.00s  ETA 00:00:14" for r in caplog.records)


def test_resume_purges_what_came_later(tmp_path):
    writers = make(tmp_path)
    for step in range(1, 6):
        writers.write(step, {"critic/rewards/mean": step / 10})
        writers.samples(step, [{"step": step}])
    writers.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"training/global_step": 3, "torn')
    writers = make(tmp_path, resumed_step=3)
    writers.write(4, {"critic/rewards/mean": 9.0})
    writers.close()
    rows = w.read_metrics(tmp_path / "metrics.jsonl")
    assert [(r["training/global_step"], r["critic/rewards/mean"]) for r in rows] == [
        (1, 0.1),
        (2, 0.2),
        (3, 0.3),
        (4, 9.0),
    ]
    assert sorted(p.name for p in (tmp_path / "samples").iterdir()) == [f"step_{i:06d}.jsonl" for i in (1, 2, 3)]
    assert "9 ┤" in writers.curve() and len(writers.history) == 4


@pytest.mark.parametrize("limit, written", [(0, 5), (2, 2), (-1, 0)])
def test_samples(tmp_path, limit, written):
    writers = make(tmp_path, samples_per_step=limit)
    writers.samples(12, [{"prompt": f"é{i}", "score": 1.0} for i in range(5)])
    file = tmp_path / "samples" / "step_000012.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    assert [row["prompt"] for row in rows] == [f"é{i}" for i in range(written)]


CALLS = []


def good_hook(step, metrics):
    CALLS.append((step, metrics["x"]))


def bad_hook(step, metrics):
    raise OSError("tracker is down")


NOT_A_HOOK = 3


def test_hooks(tmp_path, caplog):
    CALLS.clear()
    make(tmp_path, hook="tests.test_metrics:good_hook").write(4, {"x": 1.5})
    from tests import test_metrics

    assert test_metrics.CALLS == [(4, 1.5)]
    make(tmp_path, hook="tests.test_metrics:bad_hook").write(5, {"x": 1.5})
    assert "log.hook failed at step 5" in caplog.text and "tracker is down" in caplog.text
    for name in (
        "tests.test_metrics:nothing",
        "no.such:thing",
        "tests.test_metrics",
        "",
        "tests.test_metrics:NOT_A_HOOK",
    ):
        if name:
            with pytest.raises(ValueError, match="log.hook"):
                make(tmp_path, hook=name)


def test_tensorboard_round_trip_and_purge(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    writers = make(tmp_path, tensorboard=True, config={"train": {"tp": 2, "note": "a|b<i>"}})
    for step in (1, 2, 3):
        writers.write(step, {"actor/lr": step / 10})
        writers.samples(step, [{"response": "<b>*x*</b>"}])
        writers.histograms(step, {"lengths": np.arange(5), "none": []})
    writers.close()
    time.sleep(1.1)  # event files are told apart by the second
    writers = make(tmp_path, tensorboard=True, resumed_step=2)
    writers.write(3, {"actor/lr": 9.0})
    writers.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"), {"tensors": 0, "histograms": 0})
    events.Reload()
    assert [(e.step, round(e.value, 6)) for e in events.Scalars("actor/lr")] == [(1, 0.1), (2, 0.2), (3, 9.0)]
    text = events.Tensors("sample/0/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text == "<pre>response: &lt;b&gt;*x*&lt;/b&gt;</pre>"
    table = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| train.tp | 2 |" in table and "a&#124;b&lt;i&gt;" in table
    assert [e.step for e in events.Histograms("lengths")] == [1, 2]


def test_missing_tensorboard_is_a_warning(tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    make(tmp_path, tensorboard=True).write(1, {})
    assert "no TensorBoard files" in caplog.text


def test_eta_and_clock():
    progress = w.Progress(total_steps=100, resumed_step=10)
    assert progress.line(11, {"timing_s/step": 60.0}).endswith("ETA 01:29:00")
    assert progress.line(12, {"timing_s/step": 30.0}).endswith("ETA 01:06:00")
    assert (w.clock(0), w.clock(59.6), w.clock(90061)) == ("00:00:00", "00:01:00", "1d 01:01:01")


def test_curve_shows_shape_and_ends(seed):
    text = w.draw_curve([i / 199 for i in range(200)], width=40, height=5, title="reward")
    lines = text.splitlines()
    assert lines[0] == "reward" and len(lines) == 8 and all(len(line) <= 51 for line in lines)
    columns = list(zip(*[line[11:].ljust(40) for line in lines[1:6]], strict=True))
    heights = [sum(" ▁▂▃▄▅▆▇█".index(cell) for cell in column) for column in columns]
    assert heights == sorted(heights) and heights[0] == 1 and heights[-1] == 40
    assert lines[-1].strip().startswith("1 ") and lines[-1].endswith("200")
    assert w.draw_curve([]) == ": no values" and "0.5" in w.draw_curve([0.5] * 3)
    assert " " in w.draw_curve([0.0, math.nan, 1.0]).splitlines()[0]


def test_sections_come_in_the_reference_order():
    got = m.in_order({"timing_s/x": 1, "zzz/y": 2, "critic/score/mean": 3, "actor/lr": 4, "global_seqlen/min": 5})
    assert list(got) == ["global_seqlen/min", "actor/lr", "critic/score/mean", "timing_s/x", "zzz/y"]
