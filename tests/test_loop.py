"""The whole job, real vLLM and real Megatron under torchrun: it learns, its controls do not, layouts agree at step 1.

The full tier runs five seeds, both controls and the long run; the default tier one seed and the layouts.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from tests.jobs import prepare, run_job

QUICKSTART = "launch/recipes/quickstart.toml"


@pytest.fixture(scope="session")
def copy_data(tmp_path_factory) -> Path:
    return prepare("copy", tmp_path_factory.mktemp("data") / "copy")


def paths(copy_data: Path) -> list[str]:
    return [
        f"model.path={copy_data}/model",
        f'data.train_files=["{copy_data}/train.parquet"]',
        f'data.val_files=["{copy_data}/val.parquet"]',
    ]


def means(rewards: list[float]) -> tuple[float, float]:
    """Mean reward of the first five and of the last five steps."""
    return statistics.fmean(rewards[:5]), statistics.fmean(rewards[-5:])


def learns(run_dir: Path, copy_data: Path, seed: int) -> float:
    job = run_job(run_dir, 2, QUICKSTART, *paths(copy_data), f"seed={seed}", timeout_s=400)
    first, last = means(job.column("critic/rewards/mean"))
    steps = statistics.median(job.column("timing_s/step"))
    memory = max(job.column("perf/rank_memory_gb"))
    exact = job.column("val-core/copy/reward/mean@1")[-1]
    print(
        f"seed {seed}: first {first:.3f} last {last:.3f} exact {exact:.3f} step {steps:.2f} s memory {memory:.2f} GiB"
    )
    assert len(job.metrics) == 200 and job.status["state"] == "finished"
    assert first < 0.1 and last >= 0.9 and exact >= 0.8 and memory <= 1.2
    assert "critic/rewards/mean" in job.output and "ETA" in job.output
    assert list((run_dir / "tensorboard").iterdir()) and job.samples(200)
    for rank in (0, 1):
        line = f"rank 00{rank} | train dp{rank} ep{rank} | rollout replica {rank} dp0 tp0"
        assert any(line in log.read_text() for log in run_dir.glob(f"**/*{rank}*.log")), line
    return last


@pytest.mark.slow
def test_the_quickstart_learns(tmp_path, copy_data):
    learns(tmp_path / "run", copy_data, seed=0)


@pytest.mark.full
def test_the_quickstart_learns_with_every_seed(tmp_path, copy_data):
    last = [learns(tmp_path / f"run{seed}", copy_data, seed) for seed in range(5)]
    assert statistics.fmean(last) >= 0.95


@pytest.mark.full
@pytest.mark.parametrize("control", ["algorithm.shuffle_rewards=true", "rollout.sync_weights=false"])
def test_controls_do_not_learn(tmp_path, copy_data, control):
    job = run_job(
        tmp_path / "run", 2, QUICKSTART, *paths(copy_data), control, "runtime.self_check=false", timeout_s=400
    )
    first, last = means(job.column("critic/rewards/mean"))
    print(f"{control}: first {first:.3f} last {last:.3f}")
    assert last < 0.15


@pytest.mark.full
def test_what_was_learned_stays_learned(tmp_path, copy_data):
    job = run_job(tmp_path / "run", 2, QUICKSTART, *paths(copy_data), "total_steps=400", timeout_s=600)
    rewards = job.column("critic/rewards/mean")
    windows = [statistics.fmean(rewards[i : i + 20]) for i in range(len(rewards) - 19)]
    reached = next(i for i, value in enumerate(windows) if value >= 0.9)
    print(f"20-step mean reached 0.9 at step {reached + 20}, lowest after that {min(windows[reached:]):.3f}")
    assert min(windows[reached:]) >= 0.85


LAYOUTS = {
    "EP2 DP2 -> two TP1": [],
    "TP2 -> TP2": ["train.tp=2", "train.ep=1", "rollout.tp=2"],
    "PP2 -> two TP1": ["train.pp=2", "train.ep=1"],
    "DP2 -> TP2": ["train.ep=1", "rollout.tp=2"],
}


@pytest.mark.slow
def test_layouts_draw_the_same_samples_and_agree_in_loss_and_gradient(tmp_path, copy_data):
    results, segments = {}, set(Path("/dev/shm").glob("*cpushm*"))
    for number, (name, options) in enumerate(LAYOUTS.items()):
        options = [*paths(copy_data), *options, "total_steps=1", "eval.every_steps=0", "log.samples_per_step=0"]
        job = run_job(tmp_path / str(number), 2, QUICKSTART, *options)
        results[name] = (job.metrics[0], job.samples(1))
    assert not set(Path("/dev/shm").glob("*cpushm*")) - segments, "a job left shared memory behind"
    reference, samples = results["EP2 DP2 -> two TP1"]
    for name, (metrics, drawn) in results.items():
        loss = abs(metrics["actor/loss"] - reference["actor/loss"])
        norm = abs(metrics["actor/grad_norm"] - reference["actor/grad_norm"])
        print(f"{name}: loss {metrics['actor/loss']:.7f} grad norm {metrics['actor/grad_norm']:.7f}")
        assert [s["response"] for s in drawn] == [s["response"] for s in samples], name
        assert loss <= 1e-5 and norm <= 1e-5, (name, loss, norm)
        assert metrics["actor/ppo_kl"] == metrics["actor/pg_clipfrac"] == 0
