"""Dynamic sampling: the collector by hand, then whole jobs; who produced a sample changes no bit of the update."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch

from launch.config import Config, DataConfig
from launch.journal import shortened
from parallel.plain_values import frozen
from reward.advantage import keep_groups
from rollout.batch import Sample
from rollout.collect import Collector
from rollout.prompts import Prompt
from tests.jobs import prepare, run_job
from tests.test_resume import tensors

QUICKSTART = "launch/recipes/quickstart.toml"
WANTED = 4


class Rows:
    """Prompts of 100 rows, in order; row 3k teaches nothing."""

    def __len__(self):
        return 100

    def batch(self, step, count):
        ids = range(step * count, (step + 1) * count)
        return [Prompt(i, [1], "any", "", {}, i % 100) for i in ids]

    def epoch_of(self, step):
        return step // 25


def sample(prompts):
    """Two samples a prompt: 1 and 0, or 0 twice. Lengths are the prompt's row + 1."""
    return [
        Sample(p.prompt_id, n, np.zeros(1), np.zeros(p.row + 1), np.zeros(p.row + 1), "stop", float(n and p.row % 3))
        for p in prompts
        for n in range(2)
    ]


def collector(useful=keep_groups, **algorithm):
    config = Config(data=DataConfig(prompts_per_step=WANTED))
    config = replace(config, algorithm=replace(config.algorithm, dynamic_sampling=True, **algorithm))
    return Collector(Rows(), config, useful)


def ids(samples):
    return sorted({s.prompt_id for s in samples})


def test_rounds_go_on_until_the_batch_is_full_and_surplus_is_the_next_steps():
    c = collector()
    batch, metrics = c.collect(sample)
    assert ids(batch) == [1, 2, 4, 5] and len(batch) == 2 * WANTED  # 0, 3 and 6 teach nothing
    assert metrics == {"sampling/rounds": 2, "sampling/dropped_groups": 3, "sampling/surplus_groups": 1}
    batch, metrics = c.collect(sample)
    assert ids(batch) == [7, 8, 10, 11] and metrics["sampling/rounds"] == 1 and c.draws == 3
    batch, metrics = c.collect(sample)
    assert ids(batch) == [13, 14, 16, 17] and metrics["sampling/rounds"] == 2


def test_without_dynamic_sampling_a_step_is_one_batch():
    c = Collector(Rows(), Config(data=DataConfig(prompts_per_step=WANTED)), keep_groups)
    assert ids(c.collect(sample)[0]) == [0, 1, 2, 3] and c.draws == 1 and c.surplus == []


def test_at_the_limit_it_trains_with_what_exists_or_stops(caplog):
    batch, metrics = collector(dynamic_sampling_max_rounds=1).collect(sample)
    assert ids(batch) == [1, 2] and metrics["sampling/rounds"] == 1
    assert "2 of 4 prompts with differing scores after 1 rounds: training with what exists" in caplog.text
    with pytest.raises(RuntimeError, match="2 of 4 prompts with differing scores after 1 rounds; raise"):
        collector(dynamic_sampling_max_rounds=1, dynamic_sampling_at_limit="stop").collect(sample)
    with pytest.raises(RuntimeError, match="0 of 4 prompts .* after 3 rounds"):
        collector(lambda scores, _: np.zeros(len(scores), bool), dynamic_sampling_max_rounds=3).collect(sample)


def test_expected_lengths_are_those_of_the_rows_earlier_epochs():
    seen = []

    def watched(prompts):
        seen.append({p.row: p.expected_tokens for p in prompts})
        return sample(prompts)

    c = Collector(Rows(), Config(data=DataConfig(prompts_per_step=50)), keep_groups)
    for _ in range(4):
        c.collect(watched)
    assert set(seen[0].values()) == {0.0}
    assert len(set(seen[1].values())) == 1  # rows that were never sampled: all alike
    for later in seen[2:]:  # rows of greater number answer at greater length
        assert sorted(later, key=later.__getitem__) == sorted(later) and len(set(later.values())) == 50


def test_what_is_saved_goes_on_as_if_never_interrupted():
    whole, cut = collector(), collector()
    for c in (whole, cut):
        for _ in range(40):
            c.collect(sample)
    resumed = collector()
    resumed.load(frozen(cut.state()))
    for _ in range(5):
        (batch, metrics), (other, expected) = resumed.collect(sample), whole.collect(sample)
        assert ids(batch) == ids(other) and metrics == expected
    assert np.array_equal(resumed.lengths.total, whole.lengths.total)


def test_a_step_of_another_size_goes_on_behind_the_last_prompt_drawn():
    c = collector()
    c.collect(sample)
    assert c.draws == 2 and ids(c.surplus) == [7]
    resumed = collector()
    resumed.config = replace(resumed.config, data=replace(resumed.config.data, prompts_per_step=3))
    resumed.load(frozen(c.state()))
    batch, _ = resumed.collect(sample)
    assert resumed.draws == 4 and ids(batch) == [7, 10, 11] and len(batch) == 6  # from 9 on: 8 was drawn


# Whole jobs


@pytest.fixture(scope="session")
def options(tmp_path_factory) -> list[str]:
    data = prepare("copy", tmp_path_factory.mktemp("data") / "copy")
    files = [f"model.path={data}/model", f'data.train_files=["{data}/train.parquet"]', "data.val_files=[]"]
    return [*files, "eval.every_steps=0", "log.tensorboard=false", "log.samples_per_step=0", "total_steps=3"]


DYNAMIC = [
    "algorithm.dynamic_sampling=true",
    "reward.function=tests.scripts.parity:score",
    "reward.workers=1",
    "algorithm.overlong_buffer_tokens=4",  # shaped rewards differ within every group, unshaped ones do not
    "data.prompts_per_step=6",
    "rollout.samples_per_prompt=4",
]


def groups_of(job, step: int) -> dict[int, list[dict]]:
    groups = defaultdict(list)
    for row in job.samples(step):
        groups[row["prompt_id"]].append(row)
    return groups


def check_steps(job, steps: int) -> None:
    """Full batches of groups that teach, none twice; groups drawn = trained on + dropped + left over."""
    assert [row["training/global_step"] for row in job.metrics] == [*range(1, steps + 1)]
    used: set[int] = set()
    carried = 0
    for step, metrics in enumerate(job.metrics, 1):
        groups = groups_of(job, step)
        assert len(groups) == 6 and not used & groups.keys() and list(groups) == sorted(groups)
        for rows in groups.values():
            assert len(rows) == 4 and len({row["score"] for row in rows}) == 2
            assert int(rows[0]["prompt"].rstrip("=")) % 2 == 0
        drawn, dropped = 6 * metrics["sampling/rounds"], metrics["sampling/dropped_groups"]
        assert carried + drawn - dropped == 6 + metrics["sampling/surplus_groups"]
        assert not used or min(groups) > max(used)  # surplus first, then what was drawn later
        carried, used = metrics["sampling/surplus_groups"], used | groups.keys()
    assert sum(row["sampling/rounds"] for row in job.metrics) > steps
    assert any(row["sampling/surplus_groups"] for row in job.metrics[:-1])


@pytest.mark.slow
def test_a_job_refills_its_batches_and_keeps_the_surplus(tmp_path, options):
    job = run_job(tmp_path / "run", 2, QUICKSTART, *options, *DYNAMIC)
    check_steps(job, 3)
    shaped = [row for step in (1, 2, 3) for row in job.samples(step) if row["reward"] != row["score"]]
    assert shaped, "the overlong punishment never applied: the test shows nothing"
    assert job.output.count("step 1, a scored sample: score") == 3
    assert "training data: 9800 prompts, 1633 steps an epoch of 6; the last 2 are dropped" in job.output
    for row in [rows[0] for rows in groups_of(job, 1).values()][:3]:
        assert f"  prompt   {row['prompt']!r}" in job.output and f"  response {row['response']!r}" in job.output


@pytest.mark.full
def test_surplus_and_lengths_survive_a_resume(tmp_path, options):
    whole = run_job(tmp_path / "whole", 2, QUICKSTART, *options, *DYNAMIC, "total_steps=4")
    run_job(tmp_path / "cut", 2, QUICKSTART, *options, *DYNAMIC, "total_steps=2")
    resumed = run_job(tmp_path / "cut", 2, QUICKSTART, *options, *DYNAMIC, "total_steps=4")
    assert "resumed after step 2" in resumed.output
    check_steps(resumed, 4)
    assert resumed.lasting == whole.lasting
    assert all(resumed.samples(step) == whole.samples(step) for step in range(1, 5))
    expected, found = tensors(whole, 4), tensors(resumed, 4)
    assert expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.full
def test_a_job_at_the_limit_trains_with_what_exists_or_stops(tmp_path, options):
    limit = [*options, *DYNAMIC, "algorithm.dynamic_sampling_max_rounds=1", "train.mini_batches=6"]
    job = run_job(tmp_path / "train", 2, QUICKSTART, *limit)
    assert len(job.metrics) == 3 and "training with what exists" in job.output
    assert 0 < len(groups_of(job, 1)) < 6 and job.metrics[0]["actor/grad_norm"] > 0
    stopped = run_job(tmp_path / "stop", 2, QUICKSTART, *limit, "algorithm.dynamic_sampling_at_limit=stop", expect=None)
    assert stopped.code not in (0, 2) and "of 6 prompts with differing scores after 1 rounds; raise" in stopped.output


@pytest.mark.slow
def test_permuted_producers_give_bit_equal_updates(tmp_path, options):
    script, more = "tests/scripts/patched_trainer.py", [*options, "total_steps=2", "algorithm.kl_loss=0.001"]
    plain, permuted = (
        run_job(tmp_path / patch, 2, QUICKSTART, *more, script=script, env={"PATCH": patch})
        for patch in ("nothing", "permuted_producers")
    )
    assert permuted.lasting == plain.lasting
    assert permuted.samples(2) == plain.samples(2)
    expected, found = tensors(plain, 2), tensors(permuted, 2)
    assert expected.keys() == found.keys() and len(expected) > 50
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.full
@pytest.mark.parametrize("cut", ["rollout.top_p=0.9", "rollout.top_k=8", "rollout.min_p=0.9"])
def test_sampling_below_full_warns_once_and_runs(tmp_path, options, cut):
    job = run_job(tmp_path / "run", 2, QUICKSTART, *options, cut)
    assert job.output.count("log-probs are renormalised over what is kept") == 1
    assert len(job.metrics) == 3 and job.metrics[0]["training/rollout_probs_diff_mean"] > 1e-4


@pytest.mark.full
def test_prompts_and_samples_do_not_depend_on_the_number_of_ranks(tmp_path, options):
    one = run_job(tmp_path / "one", 1, QUICKSTART, *options, "world=1", "train.ep=1", "total_steps=1")
    two = run_job(tmp_path / "two", 2, QUICKSTART, *options, "total_steps=1")
    assert one.samples(1) == two.samples(1)


@pytest.mark.full
def test_an_endless_regex_cannot_stop_the_step(tmp_path, options):
    """Every eighth response hangs in C code: it scores 0, is counted, and the others have their scores."""
    hostile = ["reward.function=tests.scripts.parity:hostile", "reward.timeout_s=1", "total_steps=1"]
    job = run_job(tmp_path / "run", 2, QUICKSTART, *options, *hostile, "data.prompts_per_step=4")
    rows, share = job.samples(1), job.metrics[0]["reward/timeout"]
    late = [row for row in rows if row["score"] == 0]
    assert 0 < len(late) < len(rows) and share == pytest.approx(len(late) / len(rows))
    assert all(row["score"] == 1 for row in rows if row not in late)


def test_shortened_keeps_head_and_tail():
    assert shortened("abc", 3) == "abc"
    assert shortened("a" * 50 + "b" * 50, 10) == "aaaaa ... bbbbb"
