"""Advantages, shaping, filters and loss weights against closed forms and loops written out here."""

import math
import warnings

import numpy as np
import pytest

from launch.config import AlgorithmConfig
from reward import advantage as adv

GROUPED = ["grpo", "rloo", "opo", "grpo_passk", "reinforce_pp_baseline"]


@pytest.fixture(params=range(3))
def batch(request):
    """Unequal groups in mixed order: scores [B], prompt ids [B], lengths [B]."""
    print("seed", request.param)
    rng = np.random.default_rng(request.param)
    prompt_ids = rng.permutation(np.repeat([7, 3, 11, 100_000], [2, 5, 16, 3]))
    return rng.normal(size=prompt_ids.size), prompt_ids, rng.integers(1, 40, prompt_ids.size)


def members_of(prompt_ids, i):
    return [j for j in range(len(prompt_ids)) if prompt_ids[j] == prompt_ids[i]]


def whitened(values, lengths):
    """Whitening of values repeated over their tokens, the long way."""
    flat = np.repeat(values, lengths)
    return (np.asarray(values) - flat.mean()) / np.sqrt(flat.var(ddof=1) + 1e-8)


def expected(name, scores, ids, lengths):
    result = []
    for i, score in enumerate(scores):
        group = members_of(ids, i)
        values = scores[group]
        if name == "grpo":
            result.append((score - values.mean()) / (values.std(ddof=1) + 1e-6))
        elif name == "rloo":
            result.append(score - np.mean([scores[j] for j in group if j != i]))
        elif name == "opo":
            result.append(score - (values * lengths[group]).sum() / lengths[group].sum())
        elif name == "grpo_passk":
            order = sorted(values)
            lead = (order[-1] - order[-2]) / (values.std(ddof=1) + 1e-6)
            result.append(lead if score == order[-1] else 0.0)
        else:
            result.append(score - values.mean())
    return whitened(result, lengths) if name == "reinforce_pp_baseline" else np.array(result)


@pytest.mark.parametrize("name", GROUPED)
def test_estimators_equal_the_written_out_formula(name, batch):
    got = adv.advantages(AlgorithmConfig(advantage=name), *batch)
    assert [len(values) for values in got] == list(batch[2]) and got[0].dtype == np.float32
    np.testing.assert_allclose([values[0] for values in got], expected(name, *batch), rtol=2e-6, atol=1e-7)
    assert all((values == values[0]).all() for values in got)


@pytest.mark.parametrize("name", [*GROUPED, "reinforce_pp"])
def test_order_of_samples_changes_no_bit(name, batch):
    scores, ids, lengths = batch
    config = AlgorithmConfig(advantage=name, gamma=0.9)
    order = np.random.default_rng(1).permutation(len(ids))
    straight = adv.advantages(config, scores, ids, lengths)
    permuted = adv.advantages(config, scores[order], ids[order], lengths[order])
    for position, i in enumerate(order):
        assert np.array_equal(permuted[position], straight[i])


def test_the_figures_of_the_reference_log():
    """16 samples: one success, then two failures (the largest and smallest advantages of the reference run)."""
    one = adv.grpo([1.0] + [0.0] * 15, [4] * 16)
    assert one.max() == pytest.approx((1 - 1 / 16) / (0.25 + 1e-6), abs=1e-12) == pytest.approx(3.749985, abs=5e-7)
    assert adv.grpo([0.0] * 2 + [1.0] * 14, [4] * 16).min() == pytest.approx(-2.56173, abs=1e-5)


def test_equal_scores_give_exactly_zero():
    for name in ("grpo", "rloo", "opo", "grpo_passk"):
        got = adv.advantages(AlgorithmConfig(advantage=name), [0.1] * 3 + [0.7] * 7, [0] * 3 + [1] * 7, range(1, 11))
        assert all((values == 0).all() for values in got), name


def test_dr_grpo_only_centres():
    np.testing.assert_array_equal(adv.grpo([1.0, 0.0, 4.0, 2.0], [1, 1, 2, 2], norm_by_std=False), [0.5, -0.5, 1, -1])


@pytest.mark.parametrize("estimate", [adv.grpo, adv.rloo, lambda s, p: adv.opo(s, p, [3, 4, 5])])
def test_a_group_of_one_keeps_its_score_and_warns(estimate):
    with pytest.warns(UserWarning, match="a prompt with one sample"):
        assert estimate([0.25, 1.0, 0.0], [1, 2, 2])[0] == 0.25


def test_the_warning_comes_once(capsys):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for singles in (1, 2, 3):
            adv.grpo([1.0] * singles, range(singles))
    assert len(seen) == 1


def test_passk_needs_two_samples():
    with pytest.raises(ValueError, match="two samples"):
        adv.grpo_passk([1.0, 0.0, 1.0], [1, 1, 2])


def test_empty_batch():
    for name in [*GROUPED, "reinforce_pp"]:
        assert adv.advantages(AlgorithmConfig(advantage=name), [], [], []) == []


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_pp_with_kl_per_token(gamma):
    rng = np.random.default_rng(5)
    lengths, scores = [3, 1, 6], rng.normal(size=3)
    kl = [rng.normal(size=n) for n in lengths]
    got = adv.advantages(AlgorithmConfig(advantage="reinforce_pp", gamma=gamma), scores, [0, 1, 2], lengths, kl, 0.3)
    returns = []
    for i, n in enumerate(lengths):
        rewards = [-0.3 * kl[i][t] + (scores[i] if t == n - 1 else 0) for t in range(n)]
        returns += [sum(gamma ** (s - t) * rewards[s] for s in range(t, n)) for t in range(n)]
    want = (np.array(returns) - np.mean(returns)) / np.sqrt(np.var(returns, ddof=1) + 1e-8)
    np.testing.assert_allclose(np.concatenate(got), want, rtol=1e-5, atol=1e-6)


def test_kl_in_reward_is_summed_for_outcome_estimators():
    kl = [np.array([0.5, 0.5]), np.array([1.0, 2.0, 3.0])]
    np.testing.assert_allclose(adv.sequence_rewards([1.0, 2.0], kl, 0.1), [0.9, 1.4])
    got = adv.advantages(AlgorithmConfig(norm_by_std=False), [1.0, 2.0], [0, 0], [2, 3], kl, 0.1)
    np.testing.assert_allclose([got[0][0], got[1][0]], [-0.25, 0.25], rtol=1e-6)


def test_kl_penalty_closed_forms():
    log_p, log_q = np.log([0.5, 0.2, 0.9]), np.log([0.25, 0.4, 0.9])
    ratio = np.exp(log_q - log_p)
    np.testing.assert_allclose(adv.kl_penalty("k1", log_p, log_q), -np.log(ratio))
    np.testing.assert_allclose(adv.kl_penalty("abs", log_p, log_q), abs(np.log(ratio)))
    np.testing.assert_allclose(adv.kl_penalty("k2", log_p, log_q), np.log(ratio) ** 2 / 2)
    np.testing.assert_allclose(adv.kl_penalty("k3", log_p, log_q), ratio - 1 - np.log(ratio), atol=1e-15)
    assert adv.kl_penalty("k3", [-50.0], [0.0]) == 10.0
    with pytest.raises(ValueError, match="k1, k2"):
        adv.kl_penalty("k9", [0.0], [0.0])


def test_kl_controller():
    assert adv.KLController(0.1).updated(9.0, 100) == adv.KLController(0.1)
    assert (
        adv.KLController(0.1).resumed(0.7).coefficient == 0.1
        and adv.KLController(0.1, 2.0).resumed(0.7).coefficient == 0.7
    )
    controller = adv.KLController(0.1, target=2.0, horizon=1000)
    assert controller.updated(2.2, 100).coefficient == pytest.approx(0.1 * (1 + 0.1 * 100 / 1000))
    assert controller.updated(50.0, 100).coefficient == pytest.approx(0.1 * (1 + 0.2 * 0.1))
    assert controller.updated(0.0, 100).coefficient == pytest.approx(0.1 * (1 - 0.2 * 0.1))


def test_overlong_punishment():
    np.testing.assert_allclose(adv.overlong([10, 80, 90, 95, 100], 100, 20, 0.5), [0, 0, -0.25, -0.375, -0.5])
    assert not np.signbit(adv.overlong([10, 80], 100, 20)).any()
    assert (adv.overlong([100], 100, 0) == 0).all()
    with pytest.raises(ValueError, match="overlong_buffer_tokens = 101"):
        adv.overlong([1], 100, 101)


def test_keep_groups():
    scores = [0.1, 1.0, 0.1, 0.0, 0.1, 1.0]
    assert adv.keep_groups(scores, [5, 2, 5, 2, 5, 9]).tolist() == [False, True, False, True, False, True]
    assert adv.keep_groups([], []).tolist() == []


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
)
def test_weights_equal_the_written_out_aggregation(aggregation, masked):
    rng = np.random.default_rng(2)
    lengths = [4, 1, 7, 3]
    mask = (
        [rng.random(n) < 0.6 for n in lengths[:-1]] + [np.zeros(3, bool)]
        if masked
        else [np.ones(n, bool) for n in lengths]
    )
    losses = [rng.normal(size=n) for n in lengths]
    kept = [loss[m] for loss, m in zip(losses, mask, strict=True) if m.any()]
    want = {
        "token-mean": np.concatenate(kept).mean(),
        "seq-mean-token-mean": np.mean([values.mean() for values in kept]),
        "seq-mean-token-sum": np.mean([values.sum() for values in kept]),
        "seq-mean-token-sum-norm": np.mean([values.sum() / 50 for values in kept]),
    }[aggregation]
    weights = adv.token_weights(aggregation, lengths, mask if masked else None, norm_tokens=50)
    assert all(w.dtype == np.float32 for w in weights)
    got = math.fsum(float((w.astype(float) * loss).sum()) for w, loss in zip(weights, losses, strict=True))
    assert got == pytest.approx(want, rel=1e-6)


def test_weights_when_everything_is_rejected():
    for aggregation in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
        assert not np.concatenate(adv.token_weights(aggregation, [2, 3], [np.zeros(2), np.zeros(3)])).any()


def test_weights_refuse_nonsense():
    with pytest.raises(ValueError, match="positive constant, got 0"):
        adv.token_weights("seq-mean-token-sum-norm", [2])
    with pytest.raises(ValueError, match="median"):
        adv.token_weights("median", [2])
