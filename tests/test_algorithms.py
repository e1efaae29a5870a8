"""Every estimator, objective, aggregation, KL form and rollout correction in a real job of two steps.

Formulas are tested in test_advantage.py and test_loss.py; here the trainer's own wiring is: step 1 passes its
self-check whatever the algorithm, and every term that is asked for shows in the metrics.
"""

from __future__ import annotations

import math

import pytest

from tests.jobs import prepare, run_job

QUICKSTART = "launch/recipes/quickstart.toml"
MIXES = {
    "grpo gspo": "advantage=grpo norm_by_std=false policy_loss=gspo aggregation=seq-mean-token-mean kl_loss=0.001",
    "rloo cispo": "advantage=rloo policy_loss=cispo correction=token kl_loss=0.01 kl_estimator=k1",
    "reinforce++ gmpo": "advantage=reinforce_pp gamma=0.9 policy_loss=gmpo kl_reward=0.01 kl_target=0.1 "
    "kl_horizon=1000",
    "baseline sapo": "advantage=reinforce_pp_baseline policy_loss=sapo aggregation=seq-mean-token-sum-norm "
    "correction=sequence_mask",
    "opo icepop": "advantage=opo correction=icepop entropy_bonus=0.01 kl_loss=0.01 kl_estimator=k3+ "
    "aggregation=seq-mean-token-sum",
    "pass@k bypass": "advantage=grpo_passk old_log_probs=rollout clip_high=0.28 dual_clip=10.0",
    "sequence": "correction=sequence old_log_probs=recompute kl_loss=0.01 kl_estimator=abs overlong_buffer_tokens=2",
}


@pytest.fixture(scope="session")
def options(tmp_path_factory) -> list[str]:
    data = prepare("copy", tmp_path_factory.mktemp("data") / "copy")
    files = [f"model.path={data}/model", f'data.train_files=["{data}/train.parquet"]', "data.val_files=[]"]
    return [*files, "eval.every_steps=0", "log.tensorboard=false", "total_steps=2", "checkpoint.at_end=false"]


@pytest.mark.full
def test_rejected_sequences_leave_the_update(tmp_path, options):
    """Bounds that no weight meets: everything is rejected, told, and the weights stay."""
    bounds = [f"algorithm.{option}" for option in ("correction=sequence_mask", "correction_low=1.5")]
    job = run_job(tmp_path / "run", 2, QUICKSTART, *options, *bounds)
    for row in job.metrics:
        assert row["rollout_corr/rejected_fraction"] == 1 and row["actor/grad_norm"] == 0


@pytest.mark.full
def test_the_constant_of_sum_norm_is_the_longest_response(tmp_path, options):
    same = ["aggregation=seq-mean-token-sum-norm", "aggregation_norm_tokens=5"]  # data.max_response_tokens
    jobs = [
        run_job(tmp_path / str(n), 2, QUICKSTART, *options, *(f"algorithm.{o}" for o in same[:n]), "total_steps=1")
        for n in (1, 2)
    ]
    assert jobs[0].metrics[0]["actor/grad_norm"] == jobs[1].metrics[0]["actor/grad_norm"]


@pytest.mark.full
@pytest.mark.parametrize("name", MIXES)
def test_a_job_of_each_algorithm(tmp_path, options, name):
    chosen = [f"algorithm.{option}" for option in MIXES[name].split()]
    job = run_job(tmp_path / "run", 2, QUICKSTART, *options, *chosen)
    first, second = job.metrics
    assert all(value is not None and math.isfinite(value) for row in job.metrics for value in row.values())
    assert first["actor/grad_norm"] > 0 and second["actor/grad_norm"] > 0
    if "old_log_probs=rollout" not in MIXES[name]:
        assert first["actor/ppo_kl"] == first["actor/pg_clipfrac"] == 0
    if "kl_loss" in MIXES[name]:
        assert first["actor/kl_loss"] == 0 != second["actor/kl_loss"]
    if "kl_reward" in MIXES[name]:  # the penalty is in the rewards; the first step's policy is the reference itself
        assert first["actor/reward_kl_penalty"] == 0 != second["actor/reward_kl_penalty"]
        assert first["critic/score/mean"] == first["critic/rewards/mean"]
        assert second["critic/score/mean"] != second["critic/rewards/mean"]
        assert second["actor/reward_kl_penalty_coeff"] < first["actor/reward_kl_penalty_coeff"] == 0.01  # below target
    if "correction=" in MIXES[name]:
        assert first["rollout_corr/weight_mean"] == pytest.approx(1.0, abs=1e-4)
    if "old_log_probs=rollout" in MIXES[name]:  # the ratio is to the engine's log-probs, which differ a little
        assert 0 < abs(first["actor/ppo_kl"]) < 1e-4
    print(name, {key: value for key, value in second.items() if key.startswith(("actor/", "rollout_corr/"))})
