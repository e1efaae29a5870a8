"""Objectives, KL estimators and corrections against float64 loops and hand gradients; invariance to the split."""

import math

import pytest
import torch

from launch.config import AlgorithmConfig
from reward import loss as L
from reward.advantage import keep_tokens, token_weights

OBJECTIVES = ["clip", "gspo", "gmpo", "cispo", "sapo"]
AGGREGATIONS = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


def make(seed=0, lengths=(5, 1, 9, 4, 12), prompt=3, spread=0.4, aggregation="token-mean"):
    """Packed sequences with prompts of weight 0, whose other values are NaN: nobody may look at them."""
    print("seed", seed)
    gen = torch.Generator().manual_seed(seed)
    weights = token_weights(aggregation, lengths, norm_tokens=20)
    shares = token_weights("token-mean", lengths)
    total = sum(lengths) + prompt * len(lengths)
    fields = {
        name: torch.full((total,), math.nan)
        for name in ("advantage", "old_logprobs", "ref_logprobs", "rollout_logprobs")
    }
    fields |= {"weight": torch.zeros(total), "share": torch.zeros(total)}
    logprobs, segments = torch.full((total,), math.nan), torch.empty(total, dtype=torch.int64)
    start = 0
    for i, n in enumerate(lengths):
        where = slice(start + prompt, start + prompt + n)
        segments[start : start + prompt + n] = i
        logprobs[where] = -2 * torch.rand(n, generator=gen) - 0.1
        for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs"):
            fields[name][where] = logprobs[where] + spread * torch.randn(n, generator=gen)
        fields["advantage"][where] = torch.randn(1, generator=gen)
        fields["weight"][where] = torch.tensor(weights[i])
        fields["share"][where] = torch.tensor(shares[i])
        start += prompt + n
    return logprobs, fields, segments, len(lengths)


def clamp(x, low, high):
    return min(max(x, low), high)


def reference(config, logprobs, fields, segments, weights_of="weight"):
    """Loss of the policy term in plain Python floats (autograd-free), with true sequence ratios."""
    w, a, lp, old = (
        x.double().tolist() for x in (fields["weight"], fields["advantage"], logprobs, fields["old_logprobs"])
    )
    seqs = {}
    for t, s in enumerate(segments.tolist()):
        if w[t]:
            seqs.setdefault(s, []).append(t)
    total = 0.0
    low, high = config.clip_low, config.clip_high
    for tokens in seqs.values():
        mean = sum(lp[t] - old[t] for t in tokens) / len(tokens)
        for t in tokens:
            d = lp[t] - old[t]
            r, A = math.exp(d), a[t]
            if config.policy_loss == "clip":
                loss = max(-A * r, -A * clamp(r, 1 - low, 1 + high))
                loss = min(loss, -A * config.dual_clip) if A < 0 and config.dual_clip else loss
            elif config.policy_loss == "gspo":
                s = math.exp(mean)
                loss = max(-A * s, -A * clamp(s, 1 - low, 1 + high))
            elif config.policy_loss == "cispo":
                loss = -clamp(r, 1 - low, 1 + high) * A * lp[t]
            elif config.policy_loss == "sapo":
                tau = config.sapo_tau_positive if A > 0 else config.sapo_tau_negative
                loss = -A * 4 / tau / (1 + math.exp(-tau * (r - 1)))
            else:
                kept = [min(lp[u] - old[u], high) if A > 0 else max(lp[u] - old[u], -low) for u in tokens]
                loss = -A * math.exp(sum(kept) / len(kept))
            total += w[t] * loss
    return total


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objectives_equal_the_float64_loop(objective, seed):
    config = AlgorithmConfig(policy_loss=objective, clip_low=0.2, clip_high=0.28, dual_clip=1.5)
    logprobs, fields, segments, num = make(seed, aggregation="seq-mean-token-mean")
    loss, stats = L.policy_loss(config, logprobs, None, fields, segments, num)
    assert float(loss) == pytest.approx(reference(config, logprobs, fields, segments), rel=1e-5)
    assert stats["actor/pg_loss"][0] == loss
    assert float(stats["actor/pg_loss"][1]) == pytest.approx(1.0)


@pytest.mark.parametrize("objective", ["clip", "gspo", "gmpo", "sapo"])
def test_gradients_equal_finite_differences_of_the_loop(objective):
    """Also proves that the straight-through forms of GSPO and GMPO have the sequence ratio's true gradient."""
    config = AlgorithmConfig(policy_loss=objective, clip_low=0.2, clip_high=0.28, dual_clip=1.5)
    logprobs, fields, segments, num = make(4, aggregation="seq-mean-token-mean")
    logprobs = logprobs.double().requires_grad_()
    L.policy_loss(config, logprobs, None, fields, segments, num)[0].backward()
    assert torch.isfinite(logprobs.grad).all()
    for t in range(len(logprobs)):
        step = torch.zeros_like(logprobs)
        step[t] = 1e-6
        up, down = (reference(config, logprobs.detach() + s, fields, segments) for s in (step, -step))
        assert float(logprobs.grad[t]) == pytest.approx((up - down) / 2e-6, abs=1e-7), t


def test_cispo_gradient_by_hand():
    config = AlgorithmConfig(policy_loss="cispo")
    logprobs, fields, segments, num = make(5)
    logprobs.requires_grad_()
    L.policy_loss(config, logprobs, None, fields, segments, num)[0].backward()
    ratio = (logprobs.detach() - fields["old_logprobs"]).exp().clamp(0.8, 1.2)
    torch.testing.assert_close(
        logprobs.grad, torch.where(fields["weight"] > 0, -ratio * fields["advantage"], 0) * fields["weight"]
    )


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_without_old_logprobs_the_ratio_is_one(objective):
    """One update per rollout: the gradient is plain policy gradient -A * weight, and the metrics are exactly 0."""
    config = AlgorithmConfig(policy_loss=objective, kl_loss=0.1)
    logprobs, fields, segments, num = make(6)
    del fields["old_logprobs"], fields["rollout_logprobs"]
    fields["ref_logprobs"] = logprobs.clone()
    logprobs.requires_grad_()
    loss, stats = L.policy_loss(config, logprobs, None, fields, segments, num)
    loss.backward()
    want = torch.where(fields["weight"] > 0, -fields["advantage"], 0) * fields["weight"]
    torch.testing.assert_close(logprobs.grad, want, rtol=1e-5, atol=1e-9)
    for name in ("actor/ppo_kl", "actor/kl_loss", "actor/pg_clipfrac", "actor/pg_clipfrac_lower"):
        assert stats[name][0].item() == 0.0, name
        assert not torch.signbit(stats[name][0]), name


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_equal_old_logprobs_are_the_same_as_none(objective):
    config = AlgorithmConfig(policy_loss=objective)
    logprobs, fields, segments, num = make(6)
    fields["old_logprobs"] = logprobs.clone()
    one = L.policy_loss(config, logprobs, None, fields, segments, num)
    del fields["old_logprobs"]
    two = L.policy_loss(config, logprobs, None, fields, segments, num)
    assert one[0] == two[0] and one[1] == two[1]


def split(logprobs, fields, segments, num, sequences):
    """The micro-batch of some of the sequences."""
    keep = torch.isin(segments, torch.tensor(sequences))
    renumber = torch.full((num,), -1)
    renumber[sequences] = torch.arange(len(sequences))
    return (
        logprobs[keep],
        {name: value[keep] for name, value in fields.items()},
        renumber[segments[keep]],
        len(sequences),
    )


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loss_gradient_and_metrics_do_not_depend_on_micro_batches(objective, aggregation):
    config = AlgorithmConfig(
        policy_loss=objective, aggregation=aggregation, kl_loss=0.3, entropy_bonus=0.01, correction="sequence"
    )
    logprobs, fields, segments, num = make(7, aggregation=aggregation)
    logprobs.requires_grad_()
    results = []
    for parts in ([[0, 1, 2, 3, 4]], [[0], [1], [2], [3], [4]], [[4, 1], [2, 0, 3]]):
        logprobs.grad, total, sums = None, 0.0, {}
        for sequences in parts:
            lp, part, seg, n = split(logprobs, fields, segments, num, sequences)
            loss, stats = L.policy_loss(config, lp, lp * -1.5, part, seg, n)
            loss.backward()
            total += loss.item()
            for name, (value, weight) in stats.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = (before[0] + value.item(), before[1] + weight.item())
        results.append((total, logprobs.grad.clone(), {name: s / w for name, (s, w) in sums.items()}))
    for total, grad, metrics in results[1:]:
        assert total == pytest.approx(results[0][0], rel=1e-5, abs=1e-7)
        torch.testing.assert_close(grad, results[0][1], rtol=1e-5, atol=1e-7)
        assert metrics == pytest.approx(results[0][2], rel=1e-5, abs=1e-7)
    pg_loss, kl, entropy = (results[0][2][f"actor/{name}"] for name in ("pg_loss", "kl_loss", "entropy"))
    assert pg_loss + 0.3 * kl - 0.01 * entropy == pytest.approx(results[0][0], rel=1e-5)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_sequence_may_be_spread_over_ranks(objective):
    """Two context parallel ranks, each with half of the positions, and a seq_sum that adds both sides."""
    config = AlgorithmConfig(policy_loss=objective, correction="sequence_mask", correction_low=0.1, correction_high=9.0)
    logprobs, fields, segments, num = make(8)
    whole = logprobs.clone().requires_grad_()
    L.policy_loss(config, whole, None, fields, segments, num)[0].backward()
    first = torch.arange(len(segments)) % 2 == 0
    calls: dict[bool, list] = {True: [], False: []}

    def run(side, other_sums):
        mine = first if side else ~first
        part = {name: value[mine] for name, value in fields.items()}
        lp = logprobs[mine].clone().requires_grad_()
        local = L.local_seq_sum(segments[mine], num)

        def seq_sum(values):
            assert not values.requires_grad
            calls[side].append(local(values))
            return calls[side][-1] + (other_sums[len(calls[side]) - 1] if other_sums else 0)

        loss = L.policy_loss(config, lp, None, part, segments[mine], num, seq_sum)[0]
        loss.backward()
        return lp.grad

    # Every summand of a sequence total depends on local values only, so the other side's totals are known beforehand.
    run(True, None), run(False, None)
    left, right = calls[True], calls[False]
    calls = {True: [], False: []}
    grad = torch.empty_like(whole)
    grad[first] = run(True, right)
    calls[False] = []
    grad[~first] = run(False, left)
    torch.testing.assert_close(grad, whole.grad, rtol=1e-5, atol=1e-8)


def test_dual_clip_and_clip_fractions():
    ratio, advantage = torch.tensor([5.0, 5.0, 1.1, 0.5, 0.5]), torch.tensor([-1.0, 1.0, 1.0, 1.0, -1.0])
    loss, clipped, lower = L.clip_loss(ratio, advantage, 0.2, 0.28, 3.0)
    torch.testing.assert_close(loss, torch.tensor([3.0, -1.28, -1.1, -0.5, 0.8]))
    assert clipped.tolist() == [False, True, False, False, True] and lower.tolist() == [
        True,
        False,
        False,
        False,
        False,
    ]
    assert L.clip_loss(ratio, advantage, 0.2, 0.28, 0.0)[0][0] == 5.0


def test_clip_fraction_is_a_token_mean():
    config = AlgorithmConfig(aggregation="seq-mean-token-sum")
    logprobs, fields, segments, num = make(9, aggregation="seq-mean-token-sum")
    _, stats = L.policy_loss(config, logprobs, None, fields, segments, num)
    valid = fields["weight"] > 0
    ratio = (logprobs - fields["old_logprobs"])[valid].exp()
    a = fields["advantage"][valid]
    clipped = ((ratio > 1.2) & (a > 0)) | ((ratio < 0.8) & (a < 0))
    assert float(stats["actor/pg_clipfrac"][0] / stats["actor/pg_clipfrac"][1]) == pytest.approx(
        float(clipped.float().mean())
    )
    kl = float((fields["old_logprobs"] - logprobs)[valid].mean())
    assert float(stats["actor/ppo_kl"][0] / stats["actor/ppo_kl"][1]) == pytest.approx(kl, rel=1e-5)


def test_sapo_has_slope_one_at_ratio_one():
    ratio = torch.ones(2, requires_grad=True)
    L.sapo_loss(ratio, torch.tensor([1.0, -1.0]), 1.0, 1.05).sum().backward()
    torch.testing.assert_close(ratio.grad, torch.tensor([-1.0, 1.0]))


def test_extreme_log_ratios_stay_finite():
    for objective in OBJECTIVES:
        lp = torch.tensor([-0.1, -800.0], requires_grad=True)
        fields = {
            "weight": torch.full((2,), 0.5),
            "advantage": torch.tensor([1.0, -1.0]),
            "old_logprobs": torch.tensor([-700.0, -0.1]),
        }
        loss, _ = L.policy_loss(AlgorithmConfig(policy_loss=objective), lp, None, fields, torch.tensor([0, 1]), 2)
        loss.backward()
        assert torch.isfinite(loss) and torch.isfinite(lp.grad).all()


def test_kl_values_and_gradients():
    lp = torch.tensor([-0.5, -1.0, -2.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-0.7, -0.4, -2.0], dtype=torch.float64)
    d = (lp - ref).detach()
    values = {"k1": d, "abs": d.abs(), "k2": d**2 / 2, "k3": torch.exp(-d) + d - 1, "k3+": torch.exp(-d) + d - 1}
    gradients = {"k1": torch.ones(3).double(), "abs": d.sign(), "k2": d, "k3": 1 - torch.exp(-d), "k3+": d}
    for name, value in values.items():
        lp.grad = None
        got = L.kl_estimate(name, lp, ref)
        got.sum().backward()
        torch.testing.assert_close(got.detach(), value)
        torch.testing.assert_close(lp.grad, gradients[name])
        assert L.kl_estimate(name, lp, lp.detach()).abs().max() == 0
    assert L.kl_estimate("k3", torch.tensor([-50.0]), torch.tensor([0.0])).item() == 10.0
    with pytest.raises(ValueError, match="k7"):
        L.kl_estimate("k7", lp, ref)


def test_k3_plus_has_the_gradient_of_the_reverse_kl():
    """E over the policy of k2's gradient (with score-function terms dropped) is the KL's gradient; k3's is not."""
    logits = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ref = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).log_softmax(0)
    lp = logits.log_softmax(0)
    true = torch.autograd.grad((lp.exp() * (lp - ref)).sum(), logits, retain_graph=True)[0]
    got = {
        name: torch.autograd.grad((lp.detach().exp() * L.kl_estimate(name, lp, ref)).sum(), logits, retain_graph=True)[
            0
        ]
        for name in ("k3+", "k3")
    }
    torch.testing.assert_close(got["k3+"], true)
    assert (got["k3"] - true).abs().max() > 0.01


def test_correction_weights():
    old = torch.log(torch.tensor([0.4, 0.9, 0.1, 0.5, 0.5]))
    rollout = torch.log(torch.tensor([0.4, 0.3, 0.4, 0.25, 0.2]))
    segments, mask = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([True, True, True, True, False])
    want = {  # token ratios 1, 3, 1/4, 2, (2.5 masked); sequence ratios 3/4 and 2
        "token": [1, 2, 0.25, 2, 1],
        "icepop": [1, 0, 0, 2, 1],
        "sequence": [0.75, 0.75, 0.75, 1.9, 1.9],
        "sequence_mask": [1, 1, 1, 0, 0],
    }
    for name, values in want.items():
        high = 1.9 if name.startswith("sequence") else 2.0001 if name == "icepop" else 2.0
        config = AlgorithmConfig(correction=name, correction_low=0.5, correction_high=high)
        got = L.correction_weights(config, old, rollout, mask, segments, L.local_seq_sum(segments, 2))
        torch.testing.assert_close(got[:4], torch.tensor(values[:4], dtype=torch.float32))


@pytest.mark.parametrize("kind", ["token", "sequence", "icepop", "sequence_mask"])
def test_correction_computed_before_or_inside_is_the_same(kind):
    config = AlgorithmConfig(correction=kind)
    logprobs, fields, segments, num = make(3)
    inside, stats = L.policy_loss(config, logprobs, None, fields, segments, num)
    mask = fields["weight"] > 0
    args = (fields["old_logprobs"], fields["rollout_logprobs"], mask, segments, L.local_seq_sum(segments, num))
    fields["correction"] = L.correction_weights(config, *args)
    assert L.policy_loss(config, logprobs, None, fields, segments, num)[0] == inside
    zeros = (fields["correction"][mask] == 0).float().mean()
    torch.testing.assert_close(stats["rollout_corr/zero_fraction"][0], zeros)


def test_sequence_mask_before_the_update_agrees_with_the_loss():
    config = AlgorithmConfig(correction="sequence_mask")
    logprobs, fields, segments, num = make(11, lengths=(5, 1, 9, 4, 12, 3, 2))
    mask = fields["weight"] > 0
    old, rollout = fields["old_logprobs"], fields["rollout_logprobs"]
    got = L.correction_weights(config, old, rollout, mask, segments, L.local_seq_sum(segments, num))
    pairs = [[x[mask & (segments == i)].numpy() for i in range(num)] for x in (old, rollout)]
    want = torch.cat([torch.tensor(m) for m in keep_tokens(*pairs, config.correction_low, config.correction_high)])
    assert torch.equal(got[mask] > 0, want) and 0 < want.sum() < len(want)


def test_rejected_sequences_leave_the_denominator():
    lengths = [2, 3]
    weights = torch.tensor([*token_weights("token-mean", lengths, [[True] * 2, [False] * 3])[0], 0, 0, 0])
    logprobs = torch.full((5,), -1.0)
    fields = {"weight": weights, "advantage": torch.tensor([1.0, 1, 9, 9, 9])}
    loss, stats = L.policy_loss(AlgorithmConfig(), logprobs, None, fields, torch.tensor([0, 0, 1, 1, 1]), 2)
    assert float(loss) == -1.0 and float(stats["actor/pg_loss"][1]) == 1.0


def test_mismatch_metrics():
    logprobs, fields, segments, num = make(2)
    _, stats = L.policy_loss(AlgorithmConfig(), logprobs, None, fields, segments, num)
    old, rollout = fields["old_logprobs"], fields["rollout_logprobs"]
    want = (old.exp() - rollout.exp()).abs().nanmean()
    got = stats["training/rollout_probs_diff_mean"]
    torch.testing.assert_close(got[0] / got[1], want)


def test_an_empty_micro_batch_is_a_zero_that_can_go_backward():
    lp = torch.zeros(4, requires_grad=True)
    fields = {"weight": torch.zeros(4), "advantage": torch.zeros(4)}
    loss, stats = L.policy_loss(AlgorithmConfig(), lp, lp, fields, torch.zeros(4, dtype=torch.int64), 0 + 1)
    loss.backward()
    assert loss == 0 and (lp.grad == 0).all() and all(s == 0 and w == 0 for s, w in stats.values())
